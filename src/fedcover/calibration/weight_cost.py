"""The seconds that one weight of each layer costs in a training step on this device, as PruneFL needs them."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedcover.budgets import Budget
from fedcover.calibration.calibration import Line
from fedcover.calibration.timing import made_up, median_seconds, trained_form
from fedcover.clients import Client
from fedcover.engines.serial import Serial
from fedcover.errors import InputError, check_whole
from fedcover.params import FULL, Mask, params_of
from fedcover.policies.shared_mask import hidden_of, largest, magnitudes, whole_part
from fedcover.seeding import Round
from fedcover.training.client import Job
from fedcover.training.task import LocalSGD, Task

LEAST_FIXED = 1e-3
"""The least share of a step's seconds that counts as fixed, since timings are noisy."""


def weight_seconds(
    model: nn.Module, example: Tensor, keeps: Sequence[float] = (0.25, 0.5, 0.75), batch: int = 10, repeats: int = 7
) -> tuple[dict[str, float], float]:
    """Seconds of one weight by layer, and those of a step that pruning does not save: for ``prunefl(seconds, fixed)``.

    Each hidden layer is pruned to each keep, the others left whole, and steps are timed as ``Serial`` takes them; the
    slope of a line through the seconds is what a weight costs. A device whose arithmetic is dense, as most are, gains
    nothing from single weights: their seconds are then 0 or nearly so, and PruneFL keeps all that budgets allow.
    ``fedcover calibrate weights`` writes them as settings.
    """
    check_whole("batch", batch, 1)
    check_whole("repeats", repeats, 1)
    if not keeps or any(not 0 < keep < 1 for keep in keeps):
        raise InputError(f"keeps must be one or more numbers between 0 and 1; got {list(keeps)}")
    structure = trained_form(model, example)
    theta = params_of(structure.model)
    layers = hidden_of(structure, "PruneFL")
    cases: list[tuple[str, int]] = [(n, whole_part(keep, theta[n].numel())) for n in layers for keep in keeps]
    masks: list[Mask] = [largest(magnitudes(theta, [name]), many) for name, many in cases]
    task, clients, client = Task(structure.model), made_up(structure, batch), Client(0, 0, Budget())
    recipe, first = LocalSGD(1, batch, lr=1e-4), Round(1, 0)
    jobs = [Job(task, clients, client, theta, mask, recipe, first) for mask in [*masks, FULL]]
    *each, whole = median_seconds(Serial(), jobs, repeats)
    seconds = {}
    for name in layers:
        points = [(float(many), t) for (of, many), t in zip(cases, each, strict=True) if of == name]
        seconds[name] = Line.through([*points, (float(theta[name].numel()), whole)]).slope
    spent = sum(value * theta[name].numel() for name, value in seconds.items())
    return seconds, max(whole - spent, LEAST_FIXED * whole)
