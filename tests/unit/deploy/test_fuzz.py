"""A few seconds of fuzzing; ``python -m tests.unit.deploy.fuzz`` runs for longer."""

import pytest

from fedcover.errors import InputError
from tests.unit.deploy import fuzz
from tests.unit.deploy.fuzz import Target


@pytest.mark.filterwarnings("error")
def test_any_bytes_are_accepted_or_refused() -> None:
    decoders = fuzz.fuzz(seed=1, inputs=15_000, seconds=20)
    for name in ("decode_request", "decode_reply"):
        outcomes = [target.outcomes for target in decoders if target.name == name]
        assert sum(count["accepted"] for count in outcomes) > 50
        assert sum(count["refused"] for count in outcomes) > 500


def test_the_fuzzer_notices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder that raises another error, or takes long, is detected and its input shown."""
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
