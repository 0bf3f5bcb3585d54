"""Side streams: work goes there only where somebody waits for its results."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fedcover.engines.vectorized.side_stream import SideStream


class Stream:
    """A stream of a GPU that only notes for which streams it waits."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Streams:
    """The current stream, which blocks can change."""

    def __init__(self) -> None:
        self.main = self.current = Stream()

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    return streams


def test_work_beside_is_waited_for_at_the_end_of_the_block(streams: Streams) -> None:
    side = SideStream(torch.device("cuda"))
    with side.used():
        with side.fork():
            beside = streams.current
        assert streams.current is streams.main
        assert not streams.main.waited
    assert beside is not streams.main
    assert beside.waited == [streams.main]
    assert streams.main.waited == [beside]


def test_work_stays_in_the_current_stream_where_nobody_waits(streams: Streams) -> None:
    """Steps that share a model may differ in whether they wait, so it is decided call by call."""
    side = SideStream(torch.device("cuda"))
    with side.used(), side.fork():
        pass
    with side.fork():
        assert streams.current is streams.main


def test_a_stream_without_work_is_not_waited_for(streams: Streams) -> None:
    with SideStream(torch.device("cuda")).used():
        pass
    assert not streams.main.waited


def test_an_error_ends_the_use_of_the_stream(streams: Streams) -> None:
    side = SideStream(torch.device("cuda"))
    with pytest.raises(ValueError, match="broken"), side.used():
        raise ValueError("broken")
    with side.fork():
        assert streams.current is streams.main


def test_a_cpu_has_no_side_stream() -> None:
    side = SideStream(torch.device("cpu"))
    with side.used(), side.fork(torch.zeros(2)):
        pass
