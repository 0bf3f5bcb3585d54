"""Progress of runs in Python: nothing is printed unless it is asked for."""

import re
from collections.abc import Callable

import pytest
from tests.conftest import small_data

import fedcover as fc
from fedcover.federation import progress_lines

Make = Callable[..., fc.Federation]
TEST = small_data(60, seed=9)


def test_a_run_prints_nothing_unless_asked(small_federation: Make, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = small_federation().run(3, evaluate_on=TEST)
    assert capsys.readouterr() == ("", "")
    records: list[fc.RoundRecord] = []
    shown = small_federation().run(3, evaluate_on=TEST, progress=True, on_round=records.append)
    out, err = capsys.readouterr()
    assert (out, shown, len(records)) == ("", quiet, 3)
    first, last = err.splitlines()
    assert re.fullmatch(r"round 1 of 3: accuracy [\d.]+, loss [\d.]+, Γmin \d \([\d.]+ s, about [\d.]+ s left\)", first)
    assert re.fullmatch(rf"round 3 of 3: accuracy {quiet.last.accuracy:.4g}, loss .*, Γmin \d \([\d.]+ s\)", last)
    with pytest.raises(fc.InputError, match="progress must be True or False; got 'yes'"):
        small_federation().run(1, progress="yes")  # type: ignore[arg-type]


def test_lines_about_many_runs(
    small_federation: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "EVERY", 0.0)
    fc.run_many([small_federation(seed=seed) for seed in (1, 2)], 2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [f"{n} of 4 rounds of 2 runs" for n in (1, 2, 3, 4)]
