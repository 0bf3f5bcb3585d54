"""The time that one weight of each layer adds to a training step on this device, for PruneFL."""

from collections.abc import Sequence

from torch import nn

from fedcover.budgets import Budget
from fedcover.calibration.calibration import Line
from fedcover.calibration.timing import median_seconds, synthetic_task, training_structure
from fedcover.clients import Client
from fedcover.data import Inputs
from fedcover.engines.serial import Serial
from fedcover.errors import InputError, check_whole
from fedcover.params import FULL, Mask, params_of
from fedcover.policies.shared_mask import largest, magnitudes, whole_part
from fedcover.seeding import Round
from fedcover.structure.trace import hidden_weights
from fedcover.training.client import Job
from fedcover.training.recipes import LocalSGD

LEAST_FIXED = 1e-3
"""The least fraction of a step's seconds that counts as fixed, since timings are noisy."""


def weight_seconds(
    model: nn.Module, example: Inputs, keeps: Sequence[float] = (0.25, 0.5, 0.75), batch: int = 10, repeats: int = 7
) -> tuple[dict[str, float], float]:
    """Return the seconds of one weight by layer, and the seconds of a step that pruning does not save.

    Both are arguments of ``prunefl(seconds, fixed)``; ``fedcover calibrate weights`` writes them as settings. Each
    hidden layer is pruned to each keep while the others are whole, and steps of the engine ``Serial`` are timed. The
    cost of a weight is the slope of a line through these times. On a device with dense arithmetic, as most are, pruning
    single weights saves nothing: their seconds are about 0, and PruneFL keeps as many as budgets allow.

    Args:
        model: The model to train; it is not changed.
        example: A batch of inputs.
        keeps: The fractions of a layer to time, each between 0 and 1; the full layer is timed too.
        batch: The batch size.
        repeats: The number of timings of each case.
    """
    check_whole("batch", batch, 1)
    check_whole("repeats", repeats, 1)
    if not keeps or any(not 0 < keep < 1 for keep in keeps):
        raise InputError(f"keeps must be one or more numbers between 0 and 1; got {list(keeps)}")
    structure = training_structure(model, example)
    theta = params_of(structure.model)
    layers = hidden_weights(structure, "PruneFL")
    cases: list[tuple[str, int]] = [(n, whole_part(keep, theta[n].numel())) for n in layers for keep in keeps]
    masks: list[Mask] = [largest(magnitudes(theta, [name]), count) for name, count in cases]
    (task, clients), client = synthetic_task(structure, batch), Client(0, 0, Budget())
    recipe, first = LocalSGD(1, batch, lr=1e-4), Round(1, 0)
    jobs = [Job(task, clients, client, theta, mask, recipe, first) for mask in [*masks, FULL]]
    *pruned, full = median_seconds(Serial(shrink=False), jobs, repeats)
    seconds = {}
    for name in layers:
        points = [(float(count), t) for (layer, count), t in zip(cases, pruned, strict=True) if layer == name]
        seconds[name] = Line.through([*points, (float(theta[name].numel()), full)]).slope
    weights = sum(value * theta[name].numel() for name, value in seconds.items())
    return seconds, max(full - weights, LEAST_FIXED * full)
