"""``fedcover design``: from budgets to masks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from fedcover.afford import UNITS, Calibration, Prices
from fedcover.blueprint import Blueprint, blueprint
from fedcover.budgets import MOST_CLIENTS, Budget, parse_code
from fedcover.cli.console import friendly, out, show_table
from fedcover.design import Holding
from fedcover.errors import InputError
from fedcover.files import write_atomically
from fedcover.models import IMAGES, build
from fedcover.network import Network, trace
from fedcover.runfolder import load_model


@friendly
def design(
    budgets: Annotated[str, typer.Option(help="What each client can keep: 1,1,0.75,0.5, or 4x1,6x0.75, or a code.")],
    gamma: Annotated[int | None, typer.Option(help="Ask for this least coverage.")] = None,
    noise: Annotated[float | None, typer.Option(help="Ask for a mean δ² of at most this.")] = None,
    model: Annotated[str, typer.Option(help="Weigh by a fresh model's weights: mlp, lenet or resnet18.")] = "",
    unit: Annotated[
        str, typer.Option(help="What budgets are: fraction, parameters, macs, bytes or seconds (needs --model).")
    ] = "fraction",
    calibration: Annotated[
        Path | None, typer.Option(help="For seconds: what `fedcover calibrate` measured on the clients' device.")
    ] = None,
    steps: Annotated[int, typer.Option(help="For seconds: local steps in a round.")] = 300,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Weigh by the weights of this run (needs --model).")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a picture here: .svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The frontier between coverage Γ and pruning noise for these budgets, the best point on it, and who holds what.

    Without a model the weights are taken to be spread evenly. The policy `optimal` makes these masks anew in every
    round: `fedcover run --set policy.name=optimal --set budgets.code=...`.
    """
    found = _made(budgets, gamma, noise, model, folder, Currency(unit, calibration, steps))
    if figure is not None:
        _draw(found, figure)
    if as_json:
        out.print_json(json.dumps(found.as_dict()))
    else:
        _show(found)


@dataclass(frozen=True)
class Currency:
    """What budgets are counted in."""

    unit: str
    calibration: Path | None
    steps: int

    def budgets(self, text: str, network: Network | None) -> tuple[Budget, ...]:
        """Budgets as what they buy of a model."""
        if self.unit not in UNITS:
            raise InputError(f"budgets cannot be in '{self.unit}'; use one of {', '.join(UNITS)}")
        if self.unit == "fraction":
            return parse_code(text)
        if network is None:
            raise InputError(f"budgets in {self.unit} need --model, the network whose {self.unit} they are")
        measured = Calibration.load(self.calibration) if self.calibration else None
        prices = Prices(network)
        return tuple(
            Budget(prices.keep_for(self.unit, amount, measured, self.steps if self.unit == "seconds" else None))
            for amount in amounts(text)
        )


def amounts(text: str) -> list[float]:
    """The numbers in a list such as 159010,3x80000.

    >>> amounts("2x1.5,3")
    [1.5, 1.5, 3.0]
    """
    found: list[float] = []
    for item in text.replace(",", " ").split():
        times, _, amount = item.rpartition("x")
        try:
            value, repeats = float(amount), int(times or 1)
        except ValueError:
            raise InputError(f"'{item}' is no amount; give numbers such as 159010,3x80000") from None
        if not 0 < repeats <= MOST_CLIENTS:
            raise InputError(f"'{item}' repeats {repeats} times; use 1 to {MOST_CLIENTS}")
        found += [value] * repeats
    if not found:
        raise InputError("there are no budgets; give one for each client, such as 159010,3x80000")
    return found


def _made(
    budgets: str, gamma: int | None, noise: float | None, model: str, folder: Path | None, currency: Currency
) -> Blueprint:
    if not model:
        if folder is not None:
            raise InputError("--run needs --model, the name of the network that the run trained, such as mlp")
        return blueprint(currency.budgets(budgets, None), gamma, noise)
    shape = IMAGES.get(model, (1, 28, 28))
    network = build(model, shape, 10, 0)
    if folder is not None:
        load_model(folder, network)
    example = torch.zeros(2, *shape)
    parsed = currency.budgets(budgets, trace(network, example))
    return blueprint(parsed, gamma, noise, network, example, f"{model}, {folder or 'fresh'}")


def _draw(found: Blueprint, path: Path) -> None:
    from fedcover.report.design import design_figure
    from fedcover.report.svg import FORMATS, file_bytes

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"a figure ends in {', '.join('.' + one for one in FORMATS)}; got '{path.name}'")
    drawn = design_figure(found.frontier, found.chosen, found.given, found.keeps, found.holdings)
    write_atomically(path, file_bytes(drawn, kind))


def _show(found: Blueprint) -> None:
    clients = len(found.keeps)
    out.print(f"{clients} clients that can keep {sum(found.keeps):g} models together, {found.weights}", style="bold")
    rows = [
        {
            "Γ": point.gamma,
            "mean δ²": f"{point.mean_noise:.4f}",
            "noise factor": "–" if point.noise_factor is None else f"{point.noise_factor:.4f}",
            "": "◀" if point == found.chosen else "",
        }
        for point in found.frontier
    ]
    show_table(rows)
    out.print(f"chosen: Γ {found.chosen.gamma}, {found.why}")
    if found.given is not None:
        same = next((point for point in found.frontier if point.gamma == found.given.gamma), None)
        least = f"; the frontier has {same.mean_noise:.4f} there" if same else ""
        out.print(f"the code itself: Γ {found.given.gamma}, mean δ² {found.given.mean_noise:.4f}{least}")
    for layer in dict.fromkeys(holding.layer for holding in found.holdings):
        # A segment of a single entry, between two large ones, is not shown.
        parts = [h for h in found.holdings if h.layer == layer and h.end - h.start > 0.001]
        out.print(f"\nwho holds what{f' of {layer}' if layer else ''}, largest weights first")
        table = []
        for client, keep in enumerate(found.keeps):
            cells = {_span(p): f"{p.parts[client]:.0%}" for p in parts}
            table.append({"client": client, "keep": f"{keep:g}", **cells})
        table.append({"client": "held by", "keep": "", **{_span(p): str(p.holders) for p in parts}})
        show_table(table)


def _span(holding: Holding) -> str:
    return f"{holding.start:.1%}–{holding.end:.1%}"
