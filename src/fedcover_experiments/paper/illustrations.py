"""Two figures that need no runs: the paper's Figure 1, and its illustration of the pruning policies.

The masks that they show are computed by the policies themselves.
"""

from dataclasses import dataclass
from functools import cache

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn
from torch.nn import functional as F

from fedcover.budgets import QUARTERS, parse_code
from fedcover.clients import Client
from fedcover.params import Mask, Params, params_of
from fedcover.policies.registry import named_policy
from fedcover.report.style import INK, MUTED, RULE, TEXT, WARN, WIDTH, colour, styled
from fedcover.seeding import Round, ambient, generator
from fedcover.structure.trace import trace
from fedcover_experiments.paper.arithmetic import audit_row

DESIGNS = {"1111444444": "(a) existing", "1111234444": "(b) higher", "1111223344": "(c) highest"}
"""The codes of Figure 1."""
REGIONS = 4
INPUTS, NEURONS, OUTPUTS = 8, 8, 3
BUDGET = QUARTERS["4"]
"""Pattern 4, which keeps 75 %, for all policies."""
ROUNDS, SHOWN = 5, 3
"""Rounds of the small model, and the round in which WP, NP and FS are shown."""
_KEPT, _CUT = {"facecolor": colour(0), "edgecolor": "none"}, {"facecolor": "none", "edgecolor": MUTED}


def held_regions(code: str) -> list[list[bool]]:
    """Return, for each client of a code, which of the regions S1 to S4 it holds.

    >>> held_regions("14")
    [[True, True, True, True], [True, True, True, False]]
    """
    return [budget.kept(torch.arange(REGIONS)).tolist() for budget in parse_code(code)]


def region_coverage(code: str) -> list[int]:
    """Return how many clients hold each region; the smallest number is Gamma_min."""
    return [sum(column) for column in zip(*held_regions(code), strict=True)]


@styled
def designs_figure() -> Figure:
    """Draw Figure 1: the regions that clients hold under three codes of equal cost, and the coverage of each."""
    figure = Figure(figsize=(WIDTH, 4.5), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(DESIGNS)))
    for axes, (code, title) in zip(panels, DESIGNS.items(), strict=True):
        _draw_design(axes, code)
        axes.set_title(f"{title}\n{code}", color=INK, linespacing=1.35, pad=6)
    panels[0].set_yticks([*range(len(code)), len(code) + 0.15], [*next(iter(DESIGNS)), "held by"])
    panels[0].set_ylabel("clients, by digit of the code", loc="top")
    _add_key(figure, "held", "cut")
    return figure


def _draw_design(axes: Axes, code: str) -> None:
    rows, counts = held_regions(code), region_coverage(code)
    for client, regions in enumerate(rows):
        for region, kept in enumerate(regions):
            _add_square(axes, region, client, 0.86, kept)
    least = min(counts)
    for region, count in enumerate(counts):
        marked = {"color": WARN, "fontweight": "bold"} if count == least else {"color": INK}
        axes.text(region, len(rows) + 0.15, f"{count}", ha="center", va="center", **marked)  # type: ignore[arg-type]
    axes.axhline(len(rows) - 0.4, color=RULE, linewidth=0.7)
    audit = audit_row("WP", code, "mlp")
    axes.text(1.5, len(rows) + 1.2, f"Γmin = {least}", ha="center", va="center", color=WARN, fontweight="bold")
    axes.text(1.5, len(rows) + 2.15, f"cost {100 * audit.macs_ratio:.1f} %", ha="center", va="center", color=MUTED)
    axes.set_xticks(range(REGIONS), [f"S{region + 1}" for region in range(REGIONS)])
    axes.set_yticks(range(len(rows)), list(code))
    axes.xaxis.tick_top()
    _clear(axes, REGIONS, len(rows) + 2.2)
    axes.set_aspect("auto")


@dataclass(frozen=True)
class RoundMask:
    """The small model in one round: its parameters, and the mask of a client that keeps 75 %."""

    theta: Params
    mask: Mask

    @property
    def incoming(self) -> Tensor:
        """The kept weights into the hidden neurons, neuron by input."""
        return self._kept("0.weight")

    @property
    def outgoing(self) -> Tensor:
        """The kept weights out of the hidden neurons, neuron by output."""
        return self._kept("2.weight").T

    def _kept(self, name: str) -> Tensor:
        return self.mask.get(name, torch.ones_like(self.theta[name], dtype=torch.bool))


def round_masks(name: str, rounds: int = ROUNDS) -> list[RoundMask]:
    """Return the masks of a policy for a small model in each round of its training."""
    model, thetas = _small_model()
    policy = named_policy(name).bind(trace(model, torch.zeros(2, INPUTS)))
    state, shown = policy.start(), []
    for number, theta in enumerate(thetas[:rounds], 1):
        (plan,), state = policy.plan(theta, [Client(0, 0, BUDGET)], Round(number, 0), state)
        shown.append(RoundMask(theta, plan.mask))
    return shown


@cache
def _small_model() -> tuple[nn.Module, list[Params]]:
    """Return a model, and its parameters at the start of each round of a short training on random data."""
    with ambient(0, "illustration"):
        model = nn.Sequential(nn.Linear(INPUTS, NEURONS), nn.ReLU(), nn.Linear(NEURONS, OUTPUTS))
    rng = generator(0, "illustration")
    inputs = torch.randn(64, INPUTS, generator=rng)
    labels = (inputs @ torch.randn(INPUTS, OUTPUTS, generator=rng)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    thetas = []
    for _ in range(ROUNDS):
        thetas.append(params_of(model))
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model, thetas


@styled
def policies_figure() -> Figure:
    """Draw the masks of WP, NP and FS for a small model, and below those of PT in each round."""
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    titles = {"WP": "WP: single\nweights", "NP": "NP: whole\nneurons", "FS": "FS: first\nneurons"}
    grid = figure.add_gridspec(2, len(titles) * ROUNDS)
    for number, (policy, title) in enumerate(titles.items()):
        axes = figure.add_subplot(grid[0, number * ROUNDS : (number + 1) * ROUNDS])
        _draw_mask(axes, round_masks(policy, SHOWN)[-1])
        axes.set_title(title, color=INK)
        axes.set_ylabel("" if number else "neurons")
    before: Tensor | None = None
    for number, shown in enumerate(round_masks("PT")):
        axes = figure.add_subplot(grid[1, number * len(titles) : (number + 1) * len(titles)])
        _draw_weights(axes, shown.theta["0.weight"], shown.incoming)
        _clear(axes, INPUTS, NEURONS)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"round {number + 1}" if number else "PT:\nround 1", color=INK)
        changed = 0 if before is None else int((shown.incoming != before).sum())
        axes.set_xlabel(f"{changed}\nchanged" if changed else "same\nmask" if number else "first\nmask")
        before = shown.incoming
    _add_key(figure, "kept", "cut")
    return figure


def _draw_mask(axes: Axes, shown: RoundMask) -> None:
    """Draw the weights into the neurons and, after a gap, those out of them."""
    _draw_weights(axes, shown.theta["0.weight"], shown.incoming)
    _draw_weights(axes, shown.theta["2.weight"].T, shown.outgoing, after=INPUTS + 1)
    _clear(axes, INPUTS + 1 + OUTPUTS, NEURONS)
    axes.set_xticks([(INPUTS - 1) / 2, INPUTS + 1 + (OUTPUTS - 1) / 2], ["in", "out"])
    axes.set_yticks([])


def _draw_weights(axes: Axes, weights: Tensor, kept: Tensor, after: int = 0) -> None:
    """Draw a square for each weight, larger for larger weights; a row is a neuron."""
    sides = (weights.abs() / weights.abs().max()).sqrt().clamp(min=0.2) * 0.9
    for row, (row_sides, row_kept) in enumerate(zip(sides.tolist(), kept.tolist(), strict=True)):
        for column, (side, keep) in enumerate(zip(row_sides, row_kept, strict=True)):
            _add_square(axes, after + column, row, side, keep)


def _add_square(axes: Axes, x: float, y: float, side: float, kept: bool) -> None:
    axes.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, linewidth=0.6, **(_KEPT if kept else _CUT)))  # type: ignore[arg-type]


def _clear(axes: Axes, columns: float, rows: float) -> None:
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.tick_params(length=0)


def _add_key(figure: Figure, kept: str, cut: str) -> None:
    handles = [Patch(label=kept, linewidth=0.6, **_KEPT), Patch(label=cut, linewidth=0.6, **_CUT)]  # type: ignore[arg-type]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=2,
        labelcolor=INK,
        fontsize=TEXT,
        handlelength=1,
        handleheight=1,
    )
