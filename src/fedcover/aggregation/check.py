"""``check_aggregator``: find the law of the aggregation contract that an aggregator breaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, Aggregator, ClientUpdate
from fedcover.budgets import Budget
from fedcover.clients import Client
from fedcover.data import Examples, Population
from fedcover.errors import InputError
from fedcover.params import FULL, Mask, Params
from fedcover.seeding import generator

ROUNDS = 3
EXAMPLES = (3, 5, 2, 7)
"""The number of examples of each client."""
SHAPES = {"wide.weight": (5, 4), "wide.bias": (5,), "whole": (3,)}
"""The parameters of the checked rounds; masks prune the first two, and the first has entries without a holder."""

LAWS = {
    "runs": "start, add, add_together, result and state must not raise for the updates of a round",
    "result fits": "result must return every parameter with its shape and type",
    "order does not matter": "the order of the updates may change the result by rounding only",
    "adding together": "add_together may differ from one add per update by rounding only",
    "masks are respected": "values outside an update's mask must have no influence, not even if they are NaN",
    "uncovered entries stay": "an entry that no update holds must keep its value, bit for bit",
    "equal updates": "if all clients send the same whole model, the result must be that model (averages = True)",
    "tolerance": "no tolerates(n) of n updates may move an entry out of the range of the others (averages = True)",
    "deterministic": "the result must depend only on theta, the updates and the state",
    "no global randomness": "an aggregator must not draw from torch's global generator",
    "arguments are left alone": "theta, the updates and the state must not be changed in place",
    "state is tensors": "state must return a dict of tensors, so that checkpoints can store it",
}
"""The laws that ``check_aggregator`` tests, each with its rule."""


@dataclass(frozen=True)
class _Planned:
    client: Client
    mask: Mask


def check_aggregator(aggregator: Aggregator, seed: int = 0) -> None:
    """Raise InputError, naming the law, if an aggregator breaks a law of the aggregation contract.

    The aggregator is given a few rounds of random updates under random masks. Nothing is trained.

    Args:
        aggregator: The aggregator, not yet bound to a population.
        seed: Seed of the masks and values.

    Raises:
        InputError: If a law is broken; ``fedcover.aggregation.check.LAWS`` lists them.

    >>> from fedcover.aggregation.robust import trimmed
    >>> check_aggregator(trimmed(0.2))
    """
    bound = aggregator.bind(_population())
    check = _Checker(aggregator, bound, seed)
    theta = {name: check.draw(shape) for name, shape in SHAPES.items()}
    state = bound.initial_state(theta)
    for _ in range(ROUNDS):
        theta, state = check.round(theta, state)


class _Checker:
    def __init__(self, aggregator: Aggregator, bound: Aggregator, seed: int) -> None:
        self._aggregator, self._bound = aggregator, bound
        self._rng = generator(seed, "check_aggregator")

    def draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=self._rng)

    def round(self, theta: Params, state: Mapping[str, Tensor]) -> tuple[Params, dict[str, Tensor]]:
        """Check one round and return the new model and the new state."""
        masks = [FULL if client == 0 else self._mask() for client in range(len(EXAMPLES))]
        masks[0] = {"wide.weight": torch.arange(20).view(5, 4) > 2}  # the first entries have no holder
        updates = [
            ClientUpdate(i, {name: old + 0.1 * self.draw(old.shape) for name, old in theta.items()}, mask, EXAMPLES[i])
            for i, mask in enumerate(masks)
        ]
        before = [_copied(theta), _copied(state), *(_copied(update.theta) for update in updates)]
        ambient = torch.default_generator.get_state()
        new, after = self._aggregate(theta, updates, state)
        if not torch.equal(ambient, torch.default_generator.get_state()):
            raise self._broken("no global randomness", "it moved torch's global generator")
        if not all(map(_same, before, [theta, state, *(update.theta for update in updates)])):
            raise self._broken("arguments are left alone", "a tensor of its arguments changed")
        again = self._aggregate(theta, updates, state)
        if not _same(new, again[0]) or not _same(after, again[1]):
            raise self._broken("deterministic", "a second call gave another result")
        for law, other in (
            ("order does not matter", self._aggregate(theta, updates[::-1], state)[0]),
            ("adding together", self._aggregate(theta, updates, state, together=True)[0]),
        ):
            if not all(torch.allclose(new[name], other[name], rtol=1e-5, atol=1e-6) for name in new):
                raise self._broken(law, "the results differ by more than rounding")
        for junk in (1e30, float("nan")):
            spoilt = [replace(update, theta=_spoilt(update, junk)) for update in updates]
            if not _same(self._aggregate(theta, spoilt, state)[0], new):
                raise self._broken("masks are respected", f"{junk} outside the masks changed the result")
        uncovered = ~torch.stack([mask["wide.weight"] for mask in masks]).any(0)
        if not torch.equal(new["wide.weight"][uncovered], theta["wide.weight"][uncovered]):
            raise self._broken("uncovered entries stay", "an entry without a holder changed")
        if self._bound.averages:
            self._check_equal(theta, updates, state)
            self._check_tolerance(theta, updates, state)
        return new, after

    def _check_equal(self, theta: Params, updates: Sequence[ClientUpdate], state: Mapping[str, Tensor]) -> None:
        equal = [replace(update, theta=updates[0].theta, mask=FULL) for update in updates]
        new = self._aggregate(theta, equal, state)[0]
        if not all(torch.allclose(new[name], updates[0].theta[name], rtol=1e-5, atol=1e-6) for name in new):
            raise self._broken("equal updates", "it differs from the update that all clients sent")

    def _check_tolerance(self, theta: Params, updates: Sequence[ClientUpdate], state: Mapping[str, Tensor]) -> None:
        whole = [replace(update, mask=FULL) for update in updates]
        liars = self._bound.tolerates(len(whole))
        for junk in (1e30, -1e30):
            lies = [replace(u, theta={n: torch.full_like(t, junk) for n, t in theta.items()}) for u in whole[:liars]]
            new = self._aggregate(theta, [*lies, *whole[liars:]], state)[0]
            for name, tensor in new.items():
                honest = torch.stack([update.theta[name] for update in whole[liars:]])
                low, high = honest.min(0).values - 1e-5, honest.max(0).values + 1e-5
                if liars and not bool(((tensor >= low) & (tensor <= high)).all()):
                    raise self._broken(
                        "tolerance", f"{liars} of {len(whole)} updates of {junk} moved '{name}' out of it"
                    )

    def _aggregate(
        self, theta: Params, updates: Sequence[ClientUpdate], state: Mapping[str, Tensor], together: bool = False
    ) -> tuple[Params, dict[str, Tensor]]:
        try:
            plans = [_Planned(Client(u.client, i, Budget(), u.examples), u.mask) for i, u in enumerate(updates)]
            aggregation = self._bound.start(theta, plans, dict(state))
            _add(aggregation, updates, together)
            new, after = aggregation.result(), aggregation.state()
        except Exception as error:
            raise self._broken("runs", f"{type(error).__name__}: {error}") from error
        if not isinstance(new, dict) or {name: (t.shape, t.dtype) for name, t in new.items()} != {
            name: (t.shape, t.dtype) for name, t in theta.items()
        }:
            raise self._broken("result fits", "names, shapes or types differ from those of theta")
        if not isinstance(after, dict) or any(not isinstance(tensor, Tensor) for tensor in after.values()):
            raise self._broken("state is tensors", f"it returned a {type(after).__name__} with other values")
        return new, after

    def _mask(self) -> Mask:
        weight = torch.rand(5, 4, generator=self._rng) < 0.6
        weight.view(-1)[:3] = False
        return {"wide.weight": weight, "wide.bias": torch.rand(5, generator=self._rng) < 0.6}

    def _broken(self, law: str, what: str) -> InputError:
        return InputError(f"aggregator {self._aggregator} breaks the law '{law}': {what}; {LAWS[law]}")


def _add(aggregation: Aggregation, updates: Sequence[ClientUpdate], together: bool) -> None:
    if together:
        aggregation.add_together(updates)
        return
    for update in updates:
        aggregation.add(update)


def _population() -> Population:
    """Return clients with these numbers of examples and different labels."""
    labels = torch.arange(sum(EXAMPLES)) % 3
    parts = torch.arange(sum(EXAMPLES)).split(EXAMPLES)
    return Population(Examples(torch.zeros(len(labels), 1), labels, classes=3), parts)


def _spoilt(update: ClientUpdate, junk: float) -> Params:
    return {
        name: torch.where(update.mask[name], tensor, junk) if name in update.mask else tensor
        for name, tensor in update.theta.items()
    }


def _copied(tensors: Mapping[str, Tensor]) -> Params:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
