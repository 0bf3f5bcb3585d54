"""Progress on the console."""

import pytest

from fedcover.cli import console


@pytest.mark.parametrize(("every", "quiet", "lines"), [(0.0, False, 3), (60.0, False, 0), (0.0, True, 0)])
def test_only_a_long_evaluation_prints_lines(
    every: float, quiet: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "EVERY", every)
    with console.RunProgress(quiet) as progress:
        progress.follow("a run", 3)
        on_evaluate = progress.evaluating("a run")
        for done in (500, 1000, 2000):
            on_evaluate(done, 2000)
    shown = capsys.readouterr().err
    assert shown.count("evaluating") == lines
    assert ("a run  evaluating 25%" in shown) == bool(lines)
