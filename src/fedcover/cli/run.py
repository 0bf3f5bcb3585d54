"""``fedcover run``: train a federation into a run folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import RunProgress, friendly, out
from fedcover.cli.options import CalibrationOption, DataOption, QuietOption, UnitOption
from fedcover.config.build import build_federation, describe_budgets, recorded_keeps, settings_of
from fedcover.config.schema import Config, read_config
from fedcover.errors import InputError
from fedcover.federation.history import History
from fedcover.federation.run_folder import read_settings


@friendly
def run(
    config: Annotated[
        Path | None, typer.Argument(help="Settings in TOML; the paper's MNIST settings if left out.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting, such as local.lr=0.1.", metavar="KEY=VALUE")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run folder; a new one under runs/ if left out.", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, if there is one, to the same bits.")
    ] = False,
    certify: Annotated[
        bool, typer.Option("--certify", help="Write a certificate of the theorem for every round.")
    ] = False,
    require_coverage: Annotated[
        bool,
        typer.Option(
            "--require-coverage",
            help="End before a round whose masks, planned for the cohort drawn, leave part of the model to nobody.",
        ),
    ] = False,
    unit: UnitOption = "",
    calibration: CalibrationOption = "",
    data: DataOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Train a federation: real data, any masks, coverage and noise measured in every round.

    `fedcover list settings` shows every setting, `fedcover list policies` what each policy takes. Example:
    `fedcover run --set policy.name=NP --set budgets.code=1111444444 --set rounds=20 --out runs/np`

    With `--unit` the code is amounts, such as `--unit parameters --set budgets.code=159010,9x80000`; what each client
    keeps for them is worked out before training, shown, and written down for a resumed run.
    """
    changes = [*(set_ or []), *(["certify=true"] if certify else [])]
    changes += ["require_coverage=true"] if require_coverage else []
    changes += [f"budgets.{key}={value}" for key, value in (("unit", unit), ("calibration", calibration)) if value]
    if resume and out_dir is None:
        raise InputError("--resume needs --out DIR, the folder of the run to go on with")
    keeps = None
    if resume and config is None and out_dir is not None:
        keeps = recorded_keeps(read_settings(out_dir))  # or a sentence, if it is no run folder
        settings = read_config(out_dir / "config.toml", changes)
    else:
        settings = read_config(config, changes)
    where = out_dir or unused(Path("runs") / settings.title)
    with RunProgress(quiet or as_json) as progress:
        history = train(settings, where, resume, data, progress, keeps)
    summary = json.loads((where / "summary.json").read_text())
    if as_json:
        out.print_json(json.dumps({**summary, "folder": str(where)}))
    elif not quiet:
        last = history.last
        local = f", local {last.local_accuracy:.2%}" if last.local_accuracy is not None else ""
        out.print(
            f"{summary['name']}: accuracy {last.accuracy:.2%}{local} after {len(history)} rounds;"
            f" Γmin {history.gamma_min}, δ² {last.pruning_noise:.4f}; {summary['seconds']:.1f} s"
        )
        if bias := summary.get("label_bias"):
            out.print(
                f"labels of regions: {bias['after']:.3f} from the population's with these weights, {bias['before']:.3f}"
                f" with equal ones; at worst {bias['worst']:.3f}, in {bias['worst_share']:.1%} of the model"
            )
        if summary["certificate"]:
            out.print(f"certificate: {summary['certificate']['sentence']}")
        out.print(f"data: {summary['data']}")
        if (where / "report.html").exists():
            out.print(f"report: {where / 'report.html'}")


def train(
    settings: Config,
    where: Path,
    resume: bool,
    data: str | None,
    progress: RunProgress,
    keeps: Sequence[float] | None = None,
) -> History:
    """Build the federation and play its rounds into a folder, with progress; see ``build_federation`` for keeps."""
    if settings.engine == "flower-sim":
        from fedcover.deploy.flower.simulate import simulate

        return simulate(
            settings, where, resume, data, progress.follow(settings.title, settings.rounds, "Flower on Ray")
        )
    federation, test = build_federation(settings, data, keeps)
    note = "\n".join(
        line
        for line in (
            describe_budgets(settings, [budget.keep for budget in federation.budgets]),
            f"engine: {federation.engine}",
        )
        if line
    )
    history = federation.run(
        settings.rounds,
        evaluate_on=test,
        evaluate_every=settings.evaluate.every,
        local_every=settings.evaluate.local_every,
        out=where,
        resume=resume,
        checkpoint_every=settings.checkpoint_every,
        settings=settings_of(settings, federation),
        on_round=progress.follow(settings.title, settings.rounds, note),
    )
    write_page(where)
    return history


def write_page(folder: Path) -> None:
    """Write the report page into a run folder, if the report extra is installed."""
    try:
        from fedcover.report import write_report
    except ImportError:
        return
    write_report([folder])


def unused(path: Path) -> Path:
    """The path, or the same with a number behind it if something is there already."""
    free, number = path, 2
    while free.exists():
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free
