"""A few seconds of fuzzing; ``python -m tests.flower.fuzz`` goes on for longer."""

import pytest

from fedcover.errors import InputError
from tests.flower import fuzz
from tests.flower.fuzz import Target


@pytest.mark.filterwarnings("error")
def test_no_bytes_do_harm() -> None:
    made = fuzz.fuzz(seed=1, inputs=15_000, seconds=20)
    for name in ("decode_request", "read_answer"):
        found = [target.found for target in made if target.name == name]
        assert sum(count["taken"] for count in found) > 50
        assert sum(count["refused"] for count in found) > 500


def test_the_fuzzer_notices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An entrance with another error, or that takes long, is found and its input shown."""
    (good, *_) = fuzz.targets()

    def faulty(data: bytes) -> None:
        if data != good.valid:
            raise KeyError("oops")

    monkeypatch.setattr(fuzz, "targets", lambda: [Target("faulty", faulty, InputError, good.valid)])
    with pytest.raises(SystemExit, match=r"faulty failed on input 0 of seed 0: [0-9a-f]+"):
        fuzz.fuzz(0, inputs=10)
    assert "KeyError: 'oops'" in capsys.readouterr().err
    monkeypatch.setattr(fuzz, "MOST_SECONDS", -1.0)
    monkeypatch.setattr(fuzz, "targets", lambda: [good])
    with pytest.raises(SystemExit, match=r"took .* s and"):
        fuzz.fuzz(0, inputs=10)
