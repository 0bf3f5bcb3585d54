"""Progress on the console."""

import time
from types import SimpleNamespace

import pytest
import typer

from fedcover.cli import console, sweep_progress


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


def test_a_comparison_of_five_runs_at_80_columns_shows_every_name_and_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    names = [f"WP-1111223344-mnist-iid-seed{seed}" for seed in range(5)]
    measures = {"accuracy": "97.91 %", "local accuracy": "97.90 %", "loss": "0.0712", "uncovered": "0 %"}
    measures |= {"mean δ²": "0.0110", "kept": "85.0 %", "MB down": "25.0", "MB up": "25.0", "seconds": "14.2"}
    console.show_comparison([{"run": name, "Γmin": f"{n} of 10", **measures} for n, name in enumerate(names)])
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert all(f"{n} of 10" in shown for n in range(5))
    assert shown.count("97.91 %") == 5
    assert max(map(len, shown.splitlines())) <= 80


def test_a_name_wider_than_the_terminal_is_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "width", 40)
    console.show_comparison([{"run": f"{letter * 90}", "Γmin": "4 of 10"} for letter in "ab"])
    shown = capsys.readouterr().out
    assert (shown.count("a"), shown.count("b")) == (90, 90)
    assert shown.count("4 of 10") == 2
    assert max(map(len, shown.splitlines())) <= 40


def test_a_long_sweep_prints_lines_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_progress, "EVERY", 0.0)
    cell = SimpleNamespace(folder="seed=0")
    with sweep_progress.SweepProgress(SimpleNamespace(), False, 1, 5) as progress:  # type: ignore[arg-type]
        for index in (1, 2):
            record = SimpleNamespace(round=index, accuracy=0.5, metrics={}, loss=1.0)
            progress.on_round(cell, record)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "sweep of 1 runs, 5 rounds", "1 of 5 rounds, 0 of 1 runs", "2 of 5 rounds, 0 of 1 runs"
    ]  # fmt: skip


def test_heads_of_columns_are_not_broken_inside_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ("pattern", "clients", "parameters", "bytes down", "bytes up", "MFLOPs a step", "multiply-adds", "noise")
    monkeypatch.setattr(console.out, "_width", 80)
    console.show_table([dict.fromkeys(heads, "1234567") for _ in range(2)])
    assert "pattern" in capsys.readouterr().out.splitlines()[0]
