"""``fedcover run``: train a federation into a run folder."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import RESUMABLE, RunProgress, friendly, out, scores_text
from fedcover.cli.options import BudgetUnitOption, CalibrationOption, DataOption, QuietOption
from fedcover.config.build import (
    build_callbacks,
    build_federation,
    describe_budgets,
    recorded_keeps,
    schedule_of,
    settings_of,
)
from fedcover.config.default_budgets import with_default_budgets
from fedcover.config.schema import Config, read_config
from fedcover.deploy.processes.signals import stop_signals
from fedcover.errors import InputError, MissingExtraError
from fedcover.federation.complements import describe_complement
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.lockstep import run_all_rounds
from fedcover.federation.run_folder import read_settings
from fedcover.federation.runs import Run


@partial(friendly, interrupted=RESUMABLE)
def run(
    config: Annotated[
        Path | None, typer.Argument(help="Settings in TOML; default: the paper's MNIST settings.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting, such as local.lr=0.1.", metavar="KEY=VALUE")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run folder; default: a new one under runs/.", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume the run in --out, if any, bit-identical to an uninterrupted run."),
    ] = False,
    certify: Annotated[
        bool, typer.Option("--certify", help="Record a certificate of the convergence theorem for every round.")
    ] = False,
    require_coverage: Annotated[
        bool,
        typer.Option(
            "--require-coverage", help="Stop before a round whose masks leave part of the model to no client."
        ),
    ] = False,
    budget_unit: BudgetUnitOption = "",
    calibration: CalibrationOption = "",
    data: DataOption = None,
    quiet: QuietOption = False,
    report: Annotated[bool, typer.Option(help="Write the page report.html into the run folder.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Train a federation, and measure coverage and pruning noise in every round.

    `fedcover list settings` shows every setting, `fedcover list policies` those of each policy. Example:
    `fedcover run --set policy.name=NP --set budgets.code=1111444444 --set rounds=20 --out runs/np`

    With `--budget-unit` the code is a list of amounts, such as
    `--budget-unit parameters --set budgets.code=159010,9x80000`. What each client keeps for its amount is computed
    before training, shown, and recorded for a resumed run.
    """
    changes = [*(set_ or []), *(["certify=true"] if certify else [])]
    changes += ["require_coverage=true"] if require_coverage else []
    budgets = {"unit": budget_unit, "calibration": calibration}
    changes += [f"budgets.{key}={value}" for key, value in budgets.items() if value]
    settings, keeps = _settings(config, changes, out_dir, resume)
    folder = out_dir or unused(Path("runs") / settings.title)
    with stop_signals(leave=False), RunProgress(quiet or as_json) as progress:
        history = train(settings, folder, resume, data, progress, keeps)
    if report and settings.engine != "flower-sim":  # a simulation's server has written it
        write_page(folder)
    if as_json:
        out.print_json(json.dumps({**history.summary, "folder": str(folder)}))
    elif not quiet:
        _show(history, folder, report)


def _settings(
    config: Path | None, changes: Sequence[str], out_dir: Path | None, resume: bool
) -> tuple[Config, list[float] | None]:
    """Return the settings of the run, and the keeps that a resumed run recorded."""
    if resume and out_dir is None:
        raise InputError("--resume needs --out DIR, the folder of the run to resume")
    if resume and config is None and out_dir is not None:
        keeps = recorded_keeps(read_settings(out_dir))
        return read_config(out_dir / "config.toml", changes), keeps
    return with_default_budgets(read_config(config, changes)), None


def _show(history: History, folder: Path, report: bool) -> None:
    last, summary = history.last, history.summary
    local = f", local {last.local_accuracy:.2%}" if last.local_accuracy is not None else ""
    if stop := summary.get("stopped"):
        out.print(f"stopped after round {stop['round']}: {stop['reason']} ({stop['by']})")
    scores = scores_text(last.accuracy, last.metrics, last.loss)
    robust = f", robust to {count} malicious client{'s' * (count > 1)}" if (count := summary.get("robust_to")) else ""
    out.print(
        f"{summary['name']}: {scores}{local} after {len(history)} rounds;"
        f" Γmin {history.gamma_min}{robust}, δ² {last.pruning_noise:.4f}; {summary['seconds']:.1f} s"
    )
    if bias := summary.get("label_bias"):
        out.print(
            f"label bias per region (total variation): {bias['after']:.3f} weighted, {bias['before']:.3f} unweighted;"
            f" worst region {bias['worst']:.3f}, which is {bias['worst_share']:.1%} of the model"
        )
    if summary["certificate"]:
        out.print(f"certificate: {summary['certificate']['sentence']}")
    out.print(f"data: {summary['data']}")
    if (folder / "report.html").exists():
        out.print(f"report: {folder / 'report.html'}")
    elif report:
        out.print("report: not written; it needs pip install 'fedcover[report]'")


def train(
    settings: Config,
    folder: Path,
    resume: bool,
    data: str | None,
    progress: RunProgress,
    keeps: Sequence[float] | None = None,
) -> History:
    """Build the federation and run its rounds into a folder, with progress.

    Args:
        settings: The settings of the run.
        folder: The run folder.
        resume: Whether to resume the run in the folder, if any.
        data: Folder with the data sets.
        progress: The progress bar.
        keeps: What budgets in another unit than ``fraction`` were resolved to when the run began.
    """
    if settings.engine == "flower-sim":
        on_round = progress.follow(settings.title, settings.rounds, "Flower on Ray")
        return simulate_run(settings, folder, resume, data, on_round)
    federation, test = build_federation(settings, data, keeps)
    budgets = describe_budgets(settings, [budget.keep for budget in federation.resolved_budgets])
    lines = (budgets, describe_complement(federation), f"engine: {federation.engine}")
    note = "\n".join(line for line in lines if line)
    on_round = progress.follow(settings.title, settings.rounds, note)
    federation.evaluator.on_progress = progress.evaluating(settings.title)
    run = Run(
        federation,
        federation.test_set(test),
        on_round,
        folder,
        resume,
        settings_of(settings, federation),
        build_callbacks(settings),
    )
    return run_all_rounds([run], schedule_of(settings), federation.engine)[0]


def simulate_run(
    settings: Config, folder: Path, resume: bool, data: str | None, on_round: Callable[[RoundRecord], None]
) -> History:
    """Play a run on Flower and Ray; they are imported only then."""
    from fedcover.deploy.flower.simulate import simulate

    return simulate(settings, folder, resume, data, on_round)


def write_page(folder: Path) -> None:
    """Write the report page into a run folder, if the report extra is installed."""
    try:
        from fedcover.report import write_report
    except MissingExtraError:
        return
    write_report([folder])


def unused(path: Path) -> Path:
    """Return the path, with a number appended if it already exists."""
    free, number = path, 2
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free
