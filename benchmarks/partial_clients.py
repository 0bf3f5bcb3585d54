"""The contenders of ``partial_training.py``: ways to train one client of ResNet-18, with their masks and bytes."""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn

import fedcover as fc
from fedcover.engines import client_trainer
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.masks.cost import costs_of
from fedcover.models import default_model
from fedcover.params import Mask, Params, count, entries_of, fixed, on_device, params_of
from fedcover.policies.federated_dropout import random_submodels
from fedcover.training.client import Job
from fedcover.training.complements import Frozen
from fedcover.training.options import TrainingOptions
from fedcover.training.steps.partial import trained_parts

MODEL, KEEP = "resnet18_gn", 0.25
TENSOR = 4
"""The bytes of a value."""


@dataclass(frozen=True)
class Contender:
    """One way to train a client."""

    title: str
    mask: str | None
    frozen: bool = False
    """Whether the client sees the whole model."""
    dense: bool = False
    """Whether gradients and moments are of the whole model, and masked."""
    small: bool = False
    """Whether the client trains a smaller model, which has been cut before."""


CONTENDERS = {
    "full": Contender("the whole model", None),
    "units": Contender("a quarter of the units of each layer; the rest is frozen", "units", frozen=True),
    "half": Contender("half of the units of each layer, a quarter of the weights; the rest is frozen", "half", True),
    "weights": Contender("a quarter of the single weights; the rest is frozen", "weights", frozen=True),
    "window": Contender("the last layers, at most a quarter of the weights; the rest is frozen", "window", frozen=True),
    "masked_units": Contender("as 'units', by masks over gradients and moments of the whole", "units", True, True),
    "masked_weights": Contender(
        "as 'weights', by masks over gradients and moments of the whole", "weights", True, True
    ),
    "masked_window": Contender("as 'window', by masks over gradients and moments of the whole", "window", True, True),
    "pruned_units": Contender("a quarter of the units, as a smaller model", "units", small=True),
    "pruned_half": Contender("half of the units, as a smaller model", "half", small=True),
    "pruned_weights": Contender("a quarter of the single weights; the rest is 0", "weights", dense=True),
}


def make_masks(theta: Params) -> dict[str, Mask]:
    """Return the masks by name."""
    model, example = default_model(MODEL)
    policy = random_submodels().bind(fc.trace(model, example))
    masks: dict[str, Mask] = {}
    for name, keep in (("units", KEEP), ("half", 0.5)):
        (plan,), _ = policy.plan(theta, [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), policy.start())
        masks[name] = dict(plan.mask)
    rng = torch.Generator().manual_seed(0)
    masks["weights"] = {n: torch.rand(t.shape, generator=rng) < KEEP for n, t in theta.items() if t.ndim > 1}
    names, left = list(theta), KEEP * entries_of(theta)
    while theta[names[-1]].numel() <= left:
        left -= theta[names.pop()].numel()
    masks["window"] = {name: torch.zeros(theta[name].shape, dtype=torch.bool) for name in names}
    return masks


def counted(theta: Params, mask: Mask, one: Contender) -> dict[str, float]:
    """Return the megabytes of gradients, moments and indices of a step, and of messages."""
    model, example = default_model(MODEL)
    outside = Frozen().bytes_down if one.frozen else None
    (cost,) = costs_of(fc.trace(model, example), [mask], outside)
    trained = entries_of(theta) if one.dense else count(theta, mask)
    index = 0
    if one.frozen and not one.dense:
        parts = trained_parts(list(theta), mask, theta).values()
        indices = [t for part in parts for t in (part.rows, part.columns, part.entries) if t is not None]
        index = sum(t.nbytes for t in indices)
    return {
        "trained": count(theta, mask),
        "gradients_mb": round(TENSOR * trained / 1e6, 2),
        "moments_mb": round(TENSOR * trained / 1e6, 2),
        "indices_mb": round(index / 1e6, 2),
        "down_mb": round(cost.bytes_down / 1e6, 2),
        "up_mb": round(cost.bytes_up / 1e6, 2),
    }


def small_models(masks: dict[str, Mask]) -> dict[str, nn.Module]:
    """Return the models that are cut by masks of whole units."""
    model, example = default_model(MODEL)
    return {name: fc.shrink(model, masks[name], example).model for name in ("units", "half")}


def random_images(batch: int, steps: int) -> fc.Examples:
    """Return the examples of an epoch."""
    rng = torch.Generator().manual_seed(0)
    size = steps * batch
    inputs = torch.randn(size, 3, 32, 32, generator=rng)
    return fc.Examples(inputs, torch.randint(10, (size,), generator=rng), classes=10)


class Player:
    """A client that trains one way, on the device of its examples.

    Args:
        one: The contender.
        model: The model, whole or cut, on any device.
        mask: The contender's mask; empty for none.
        examples: The client's examples.
        batch: The number of examples of a step.
    """

    def __init__(self, one: Contender, model: nn.Module, mask: Mask, examples: fc.Examples, batch: int) -> None:
        assert examples.labels is not None
        device = examples.labels.device
        model = model.to(device)
        mask = {} if one.small else fixed(on_device(mask, device))
        clients = fc.data.from_parts(examples, [torch.arange(len(examples))])
        options = TrainingOptions(complement=True) if one.frozen else None
        client, recipe = fc.Client(0, 0, fc.Budget(KEEP)), fc.LocalSGD(1, batch, 0.01)
        self._job = Job(fc.Task(model), clients, client, params_of(model), mask, recipe, fc.Round(1, 0), options)
        self._dense, self._trainer = one.dense, ClientTrainer(shrink=False)

    def epoch(self) -> float:
        """Train an epoch as the contender does, whatever the library would choose; return the loss."""
        with patch.object(client_trainer, "pays", lambda *_: not self._dense):
            return self._trainer.train(self._job).train_loss
