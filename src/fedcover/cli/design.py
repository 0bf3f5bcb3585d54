"""``fedcover design``: from budgets to masks."""

import json
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor, nn

from fedcover._files import write_atomically
from fedcover.audit.design import WINDOW, DesignReport, design_report
from fedcover.audit.window import WindowCoverage
from fedcover.budgets import parse_code
from fedcover.calibration import BudgetUnit
from fedcover.cli.console import friendly, out, show_table
from fedcover.cli.options import CalibrationOption, UnitOption
from fedcover.errors import InputError, check_extra
from fedcover.federation.run_folder import load_model
from fedcover.masks.design import SegmentShare
from fedcover.models import MODELS, default_model
from fedcover.structure.trace import trace
from fedcover.theory import Constants, Steps, theorem1
from fedcover.theory.sentences import percent

STEPS = 300
"""Local steps in a round where budgets are in seconds: those of the paper's clients."""


@friendly
def design(
    budgets: Annotated[str, typer.Option(help="What each client can keep: 1,1,0.75,0.5, or 4x1,6x0.75, or a code.")],
    gamma: Annotated[int | None, typer.Option(help="Ask for this least coverage (with --units, of units).")] = None,
    noise: Annotated[float | None, typer.Option(help="Ask for a mean δ² of at most this.")] = None,
    constants: Annotated[
        str,
        typer.Option(
            metavar="L,SIGMA2,G",
            help="Choose by the whole bound (needs --lr, --steps and --model): smoothness, variance of a gradient,"
            " its mean squared norm.",
        ),
    ] = "",
    lr: Annotated[float | None, typer.Option(help="For --constants: the step size, without momentum.")] = None,
    model: Annotated[str, typer.Option(help=f"Weigh by a fresh model's weights: {', '.join(MODELS)}.")] = "",
    units: Annotated[
        bool, typer.Option("--units", help="Design masks of whole units, as `optimal_units` does (needs --model).")
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(help=f"With --units: see how often weights are held in so many rounds; {WINDOW} if left out."),
    ] = None,
    unit: UnitOption = "fraction",
    calibration: CalibrationOption = "",
    steps: Annotated[
        int | None, typer.Option(help=f"For seconds ({STEPS} if left out) and --constants: local steps in a round.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Weigh by the weights of this run (needs --model).")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a picture here: .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The frontier between coverage Γ and pruning noise for these budgets, the best point on it, and who holds what.

    The best is that of the least pruning term of the bound, which is all that remains of it as the step size goes to
    0. At a fixed step size gradient noise and drift stay and favour more coverage: `--constants` weighs them in.

    Without a model the weights are taken to be spread evenly, and budgets are fractions or a code. The policy `optimal`
    makes these masks anew in every round: `fedcover run --set policy.name=optimal --set budgets.code=...`.

    With `--units` Γ is the coverage of units, and δ² and the coverage of weights are measured on masks of a round. A
    weight between two hidden layers is held only by clients that hold both its ends, so the masks are planned over a
    window of rounds too, to show how often weights are held.
    """
    known = _known(constants, lr, steps)
    if steps is not None and known is None and unit != "seconds":
        raise InputError("--steps is for --constants and for budgets in seconds; give one of them, or leave it out")
    if window is not None and not units:
        raise InputError("--window is for masks of whole units; give --units too, or leave it out")
    currency, rounds = BudgetUnit(unit, calibration), WINDOW if window is None else window
    if not model:
        if needs := "--units" if units else "--run" if folder is not None else "--constants" if known else "":
            raise InputError(f"{needs} needs --model, the name of the network, such as mlp")
        if not currency.plain:
            raise InputError(f"budgets in {unit} need --model, the network whose {unit} they are")
        found = design_report(parse_code(budgets), gamma, noise)
    else:
        module, example = _module(model, folder)
        given = currency.budgets(
            budgets, trace(module, example), lambda place, many: STEPS if steps is None else steps, units=units
        )
        about = f"{'units of ' if units else ''}{model}, {folder or 'fresh'}"
        found = design_report(given, gamma, noise, module, example, about, units, rounds, known)
    if figure is not None:
        _draw(found, figure)
    if as_json:
        out.print_json(json.dumps(found.as_dict()))
    else:
        _show(found)
        if known is not None:
            _show_step(*known)


def _known(constants: str, lr: float | None, steps: int | None) -> tuple[Constants, Steps] | None:
    """What the bound is made of, if it is given."""
    if not constants:
        if lr is not None:
            raise InputError("--lr is for --constants, which weigh the terms of the bound; give them, or leave it out")
        return None
    try:
        smoothness, variance, gradient = (float(item) for item in constants.split(","))
    except ValueError:
        raise InputError(f"--constants is '{constants}'; give three numbers L,SIGMA2,G, such as 1,0.5,2") from None
    if lr is None or steps is None:
        raise InputError("--constants needs --lr and --steps, the size and the number of a client's local steps")
    return Constants(smoothness, variance, gradient, gap=0.0), Steps(steps, lr)


def _show_step(constants: Constants, steps: Steps) -> None:
    """Say so if the step size is larger than the theorem allows."""
    bound = theorem1(constants, steps, 1, 1, 1, 0.0)
    if not bound.step_holds:
        out.print(f"the theorem holds for a step size of {bound.largest_step:.3g} at most; beyond it this is a guide")


def _module(model: str, folder: Path | None) -> tuple[nn.Module, Tensor]:
    """A named network, fresh or with the weights of a run, and an example of its inputs."""
    module, example = default_model(model)
    return load_model(folder, module) if folder is not None else module, example


def _draw(found: DesignReport, path: Path) -> None:
    check_extra("report", "drawing a figure", "matplotlib", "PIL")
    from fedcover.report.design import design_figure
    from fedcover.report.svg import FORMATS, file_bytes

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"a figure ends in {', '.join('.' + one for one in FORMATS)}; got '{path.name}'")
    drawn = design_figure(found.frontier, found.chosen, found.patterns, found.keeps, found.holdings)
    write_atomically(path, file_bytes(drawn, kind))


def _show(found: DesignReport) -> None:
    clients, bounded = len(found.keeps), any(point.bound is not None for point in found.frontier)
    what = "coverage of units Γ" if found.units else "Γ"
    out.print(f"{clients} clients that can keep {sum(found.keeps):g} models together, {found.weights}", style="bold")
    rows = [
        {
            "Γ of units" if found.units else "Γ": point.gamma,
            **({"Γ of weights": point.weights_gamma} if found.units else {}),
            "mean δ²": f"{point.mean_noise:.4f}",
            "noise factor": "–" if point.noise_factor is None else f"{point.noise_factor:.4f}",
            **({"bound": "–" if point.bound is None else f"{point.bound:.4g}"} if bounded else {}),
            "": "◀" if point == found.chosen else "",
        }
        for point in found.frontier
    ]
    show_table(rows)
    out.print(f"chosen: {what} {found.chosen.gamma}, {found.why}")
    if found.patterns is not None:
        same = next((point for point in found.frontier if point.gamma == found.patterns.gamma), None)
        least = f"; the frontier has {same.mean_noise:.4f} there" if same else ""
        out.print(f"the code itself: {what} {found.patterns.gamma}, mean δ² {found.patterns.mean_noise:.4f}{least}")
    for layer in dict.fromkeys(holding.layer for holding in found.holdings):
        # A segment of a single entry, between two large ones, is not shown.
        parts = [h for h in found.holdings if h.layer == layer and h.end - h.start > 0.001]
        kind = "units" if found.units else "weights"
        out.print(f"\nwho holds what{f' of {layer}' if layer else ''}, largest {kind} first")
        table = []
        for client, keep in enumerate(found.keeps):
            cells = {_span(p): f"{p.parts[client]:.0%}" for p in parts}
            table.append({"client": client, "keep": f"{keep:g}", **cells})
        table.append({"client": "held by", "keep": "", **{_span(p): str(p.holders) for p in parts}})
        show_table(table)
    if found.window is not None:
        _show_rounds(found.window)


def _show_rounds(found: WindowCoverage) -> None:
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds} rounds"
    out.print(
        f"\nsingle weights in {rounds}: {percent(found.covered)} of them held by somebody, the least held"
        f" {_times(found.gamma_min)} in all; in the worst round {percent(found.covered_each)}, the least held"
        f" {_times(found.gamma_min_each)}; mean δ² {found.mean_noise:.4f}"
    )
    rows = [
        {
            "weights of": layer.layer,
            "ends": "two" if layer.pairs else "one",
            "worst round": percent(layer.covered_each),
            "its least": str(layer.gamma_min_each),
            rounds: percent(layer.covered),
            "least": str(layer.gamma_min),
        }
        for layer in found.layers
    ]
    show_table(rows)
    if any(layer.pairs for layer in found.layers):
        out.print("weights with two ends lie between two hidden layers: held by clients that hold both units")


def _times(many: int) -> str:
    return {0: "never", 1: "once"}.get(many, f"{many} times")


def _span(holding: SegmentShare) -> str:
    return f"{holding.start:.1%}–{holding.end:.1%}"
