"""``fedcover design``: masks for the clients' budgets."""

import json
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from fedcover._files import write_atomically
from fedcover.audit.design import WINDOW, DesignReport, design_report
from fedcover.audit.window import WindowCoverage
from fedcover.budgets import parse_code
from fedcover.calibration import BudgetUnit, CostModel
from fedcover.calibration.cost_map import RESOURCES
from fedcover.cli.console import friendly, out, show_table
from fedcover.cli.options import BudgetUnitOption, CalibrationOption, JsonOption
from fedcover.cli.scarce import design_for_scarce
from fedcover.config.task_and_data import model_and_example
from fedcover.data import Inputs
from fedcover.errors import InputError, check_extra
from fedcover.federation.run_folder import load_model
from fedcover.masks.design import Point, SegmentShare
from fedcover.models import MODELS
from fedcover.report.format import MISSING, percent_down
from fedcover.structure.trace import trace
from fedcover.theory import Constants, Steps, theorem1

STEPS = 300
"""Default local steps per round for budgets in seconds: those of the paper's clients."""


@friendly
def design(
    budgets: Annotated[
        str | None, typer.Option(help="What each client can keep: 1,1,0.75,0.5, or 4x1,6x0.75, or a code.")
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(help="Require this least coverage (with --whole-units, of units).")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="Require a mean δ² of at most this.")] = None,
    constants: Annotated[
        str,
        typer.Option(
            metavar="L,SIGMA2,G",
            help="Choose by the whole bound (needs --lr, --steps and --model): smoothness, gradient variance, and"
            " mean squared gradient norm.",
        ),
    ] = "",
    lr: Annotated[float | None, typer.Option(help="For --constants: the step size, without momentum.")] = None,
    model: Annotated[str, typer.Option(help=f"Use the weights of a new model: {', '.join(MODELS)}.")] = "",
    whole_units: Annotated[
        bool,
        typer.Option("--whole-units", help="Design masks of whole units, as `optimal_units` does (needs --model)."),
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(help=f"For --whole-units: rounds over which to count holders of weights; default: {WINDOW}."),
    ] = None,
    budget_unit: BudgetUnitOption = "fraction",
    calibration: CalibrationOption = "",
    steps: Annotated[
        int | None,
        typer.Option(help=f"Local steps per round, for --constants and for seconds (default there: {STEPS})."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Use the weights of this run (needs --model).", metavar="DIR")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a figure here: .svg, .png or .pdf.")] = None,
    scarce: Annotated[
        str,
        typer.Option(
            metavar="RESOURCE[=SHARE],...",
            help=f"Instead of --budgets: what is scarce at the clients ({', '.join(RESOURCES)}), with the share of a"
            " full client's cost that they can afford.",
        ),
    ] = "",
    split: Annotated[
        str, typer.Option(help="For --scarce: how data are split, such as iid; default: all splits of the study.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show the frontier between coverage Γ and pruning noise for budgets, its best point, and what each client holds.

    The best point has the least pruning term of the bound, the only term that remains as the step size goes to 0. At
    a fixed step size, gradient noise and drift remain too and favour more coverage: `--constants` includes them.

    Without a model, weights are assumed to be spread evenly, and budgets are fractions or a code. The policy `optimal`
    computes these masks in every round: `fedcover run --set policy.name=optimal --set budgets.code=CODE`.

    With `--whole-units`, Γ is the coverage of units, and δ² and the coverage of weights are measured on the masks of a
    round. A weight between two hidden layers is held only by clients that hold both of its units. Therefore masks are
    also planned over a window of rounds, to show how often weights are held.

    With `--scarce`, no budgets are needed: the command shows which masks and which complement were most accurate in a
    study of costs, `fedcover study costs`, within the shares that clients can afford.
    """
    if scarce:
        others = (budgets, gamma, noise, constants, lr, whole_units, window, calibration, steps, folder, figure)
        if any(other not in (None, "", False) for other in others) or budget_unit != "fraction":
            raise InputError("--scarce looks settings up in a study; it takes only --split, --model and --json")
        design_for_scarce(scarce, split, model, as_json)
        return
    if budgets is None or split:
        raise InputError("give --budgets, what each client can keep, or --scarce, what is scarce at the clients")
    bound = _bound(constants, lr, steps)
    if steps is not None and bound is None and budget_unit != "seconds":
        raise InputError("--steps is for --constants and for budgets in seconds; give one of them, or leave it out")
    if window is not None and not whole_units:
        raise InputError("--window is for masks of whole units; give --whole-units too, or leave it out")
    unit, rounds = BudgetUnit(budget_unit, calibration), WINDOW if window is None else window
    if not model:
        _check_needs_no_model({"--whole-units": whole_units, "--run": folder is not None, "--constants": bound}, unit)
        report = design_report(parse_code(budgets), gamma, noise)
    else:
        module, example = _module(model, folder)
        local_steps = STEPS if steps is None else steps
        costs = CostModel(trace(module, example), whole_units)
        resolved = unit.budgets(budgets, costs, lambda index, count: local_steps)
        weights = f"{'units of ' if whole_units else ''}{model}, {folder or 'new'}"
        report = design_report(resolved, gamma, noise, module, example, weights, whole_units, rounds, bound)
    if figure is not None:
        _draw(report, figure)
    if as_json:
        out.print_json(json.dumps(report.as_dict()))
        return
    _show(report)
    if bound is not None:
        _show_step(*bound)


def _bound(constants: str, lr: float | None, steps: int | None) -> tuple[Constants, Steps] | None:
    """Return the constants of the bound and the local steps, or None if the options do not ask for the bound."""
    if not constants:
        if lr is not None:
            raise InputError("--lr is for --constants, which weigh the terms of the bound; give them, or leave it out")
        return None
    try:
        smoothness, variance, gradient = (float(item) for item in constants.split(","))
    except ValueError:
        raise InputError(f"--constants must be three numbers L,SIGMA2,G, such as 1,0.5,2; got '{constants}'") from None
    if lr is None or steps is None:
        raise InputError("--constants needs --lr and --steps, the size and the number of a client's local steps")
    return Constants(smoothness, variance, gradient, gap=0.0), Steps(steps, lr)


def _check_needs_no_model(options: dict[str, object], unit: BudgetUnit) -> None:
    """Raise InputError if one of the options, or the budget unit, needs a model."""
    if option := next((name for name, used in options.items() if used), None):
        raise InputError(f"{option} needs --model, the name of a model, such as mlp")
    if not unit.plain:
        raise InputError(f"budgets in {unit.unit} need --model, the model whose {unit.unit} they are")


def _module(model: str, folder: Path | None) -> tuple[nn.Module, Inputs]:
    """Return a named model, new or with the weights of a run, and an example of its inputs."""
    module, example = model_and_example(model)
    return load_model(folder, module) if folder is not None else module, example


def _draw(report: DesignReport, path: Path) -> None:
    check_extra("report", "drawing a figure", "matplotlib", "PIL")
    from fedcover.report.design import design_figure
    from fedcover.report.svg import FORMATS, file_bytes

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InputError(
            f"the file name of a figure must end in {', '.join('.' + suffix for suffix in FORMATS)}; got '{path.name}'"
        )
    figure = design_figure(report.frontier, report.chosen, report.patterns, report.keeps, report.holdings)
    write_atomically(path, file_bytes(figure, kind))


def _show(report: DesignReport) -> None:
    coverage = "coverage of units Γ" if report.units else "Γ"
    out.print(
        f"{len(report.keeps)} clients that can keep {sum(report.keeps):g} models together, {report.weights}",
        style="bold",
    )
    show_table(_frontier_rows(report))
    out.print(f"chosen: {coverage} {report.chosen.gamma}, {report.why}")
    if (code := report.patterns) is not None:
        same = next((point for point in report.frontier if point.gamma == code.gamma), None)
        least = f"; the frontier has {same.mean_noise:.4f} there" if same else ""
        out.print(f"the code itself: {coverage} {code.gamma}, mean δ² {code.mean_noise:.4f}{least}")
    for layer in dict.fromkeys(holding.layer for holding in report.holdings):
        _show_holders(report, layer)
    if report.window is not None:
        _show_rounds(report.window)


def _frontier_rows(report: DesignReport) -> list[dict[str, object]]:
    bounded = any(point.bound is not None for point in report.frontier)

    def row(point: Point) -> dict[str, object]:
        factor, bound = point.noise_factor, point.bound
        return {
            "Γ of units" if report.units else "Γ": point.gamma,
            **({"Γ of weights": point.weights_gamma} if report.units else {}),
            "mean δ²": f"{point.mean_noise:.4f}",
            "noise factor": MISSING if factor is None else f"{factor:.4f}",
            **({"bound": MISSING if bound is None else f"{bound:.4g}"} if bounded else {}),
            "": "◀" if point == report.chosen else "",
        }

    return [row(point) for point in report.frontier]


def _show_holders(report: DesignReport, layer: str) -> None:
    """Show each client's share of each segment of a layer."""
    # A segment of a single entry, between two large ones, is not shown.
    parts = [h for h in report.holdings if h.layer == layer and h.end - h.start > 0.001]
    kind = "units" if report.units else "weights"
    out.print(f"\nwhat each client holds{f' of {layer}' if layer else ''}, largest {kind} first")
    table = []
    for client, keep in enumerate(report.keeps):
        cells = {_span(part): f"{part.parts[client]:.0%}" for part in parts}
        table.append({"client": f"{client}", "keep": f"{keep:g}", **cells})
    table.append({"client": "held by", "keep": "", **{_span(part): f"{part.holders}" for part in parts}})
    show_table(table)


def _show_rounds(window: WindowCoverage) -> None:
    rounds = "1 round" if window.rounds == 1 else f"{window.rounds} rounds"
    out.print(
        f"\nsingle weights in {rounds}: {percent_down(window.covered)} covered, the least-held weight"
        f" {_times(window.gamma_min)}; in the worst round {percent_down(window.covered_each)} covered, the least-held"
        f" weight {_times(window.gamma_min_each)}; mean δ² {window.mean_noise:.4f}"
    )
    rows = [
        {
            "weights of": layer.layer,
            "between units": "yes" if layer.pairs else "no",
            "worst round": percent_down(layer.covered_each),
            "its Γ": f"{layer.gamma_min_each}",
            rounds: percent_down(layer.covered),
            "Γ": f"{layer.gamma_min}",
        }
        for layer in window.layers
    ]
    show_table(rows)
    if any(layer.pairs for layer in window.layers):
        out.print("A weight between units of two hidden layers is held only by clients that hold both units.")


def _show_step(constants: Constants, steps: Steps) -> None:
    """Print a line if the step size is larger than the theorem allows."""
    bound = theorem1(constants, steps, 1, 1, 1, 0.0)
    if not bound.step_holds:
        out.print(
            f"the theorem covers step sizes up to {bound.largest_step:.3g}; for larger ones the bound is only a guide"
        )


def _times(count: int) -> str:
    return {0: "never held", 1: "held once"}.get(count, f"held {count} times")


def _span(holding: SegmentShare) -> str:
    return f"{holding.start:.1%}–{holding.end:.1%}"
