"""Ctrl-C ends a run even if it arrives in code that swallows every exception, and handlers are restored."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from tests.conftest import small_data, small_net

import fedcover as fc
from fedcover.federation.history import History


def swallow_ctrl_c() -> None:
    with suppress(BaseException):  # as a bare `except` of other code
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 0.05)  # the signal arrives here at the latest


def federation() -> fc.Federation:
    return fc.Federation(small_net(), fc.data.iid(small_data(), 4), cohort=2, local=fc.LocalSGD(1))


def test_a_swallowed_ctrl_c_ends_the_run_after_the_round(tmp_path: Path) -> None:
    rounds = []

    def on_round(record: fc.RoundRecord) -> None:
        rounds.append(record.round)
        if record.round == 2:
            swallow_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        federation().run(50, out=tmp_path / "run", on_round=on_round)
    assert rounds == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    history = federation().run(3, out=tmp_path / "run", resume=True)
    assert [record.round for record in history] == [1, 2, 3]


def test_the_runs_after_it_are_not_trained_either() -> None:
    seen = []

    def on_round(number: int, record: fc.RoundRecord) -> None:
        seen.append((number, record.round))
        swallow_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        fc.run_many([federation(), federation()], 1, on_round=on_round)
    assert seen == [(0, 1)]


def test_handlers_of_others_and_other_threads_are_left_alone() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        federation().run(2, on_round=lambda record: swallow_ctrl_c())
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT] * 2
    histories: list[History] = []
    thread = threading.Thread(target=lambda: histories.append(federation().run(1)))
    thread.start()
    thread.join()
    assert len(histories) == 1
