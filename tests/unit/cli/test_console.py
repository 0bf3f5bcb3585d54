"""Progress on the console."""

import time

import pytest
import typer

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


def test_a_batch_prints_lines_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "EVERY", 0.05)
    with console.BatchProgress("4 runs", 8):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "4 runs"
    assert lines[1].startswith("4 runs: 0 of 8 rounds after")
    assert len(lines) > 2


@pytest.mark.parametrize(("hint", "shown"), [("", "interrupted\n"), ("repeat it", "interrupted; repeat it\n")])
def test_ctrl_c_says_what_can_be_done(hint: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        console.friendly(command, interrupted=hint)()
    assert caught.value.exit_code == console.INTERRUPTED
    assert capsys.readouterr().err == shown
