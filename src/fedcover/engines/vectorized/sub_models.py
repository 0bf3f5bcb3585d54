"""The sub-models of the clients of a round: cut where masks remove whole units, and restored after training."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fedcover.aggregation.stacks import ClientStack, Positions
from fedcover.data.inputs import copy_of
from fedcover.engines.client_trainer import cut_options
from fedcover.engines.vectorized.hosts import Host, NarrowMask, hosted_mask, hosted_positions, hosts_of
from fedcover.params import FixedMask, Mask, Params, alike, device_of, fixed, flat_values
from fedcover.structure.calls import call_model
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.structure.exits import with_exits
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.structure.units import shape_after
from fedcover.training.client import Job

WORTHWHILE = 5e6
"""The multiply-adds of a model's forward pass, for one example, from which smaller products are faster on a GPU: below,
clients of all shapes are better trained as one batch."""


REMOVES = "removes units"
"""The key of what is stored with a mask: whether it may remove units."""


@dataclass(frozen=True)
class Part:
    """One client's job, in the shapes of its sub-model."""

    whole: Job
    """The job in the shapes of the whole model."""
    job: Job
    sub: SubModel | None = None
    """The sub-model; None for the whole model."""
    positions: Positions | None = None
    """Where the entries of the sub-model are; None for the whole model, or one whose parameters have several types."""

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        model = self.sub.model if self.sub else self.job.task.model
        return with_exits(model, self.job.exits.numbers) if self.job.exits else model

    @property
    def shape_key(self) -> Any:
        """What sub-models must share to be trained as one batch."""
        return self.sub.shape_key if self.sub else None


class SubModels:
    """A cutter of jobs, which analyses each model once, and each mask that does not change once."""

    def __init__(self) -> None:
        self._shrinkers: dict[int, tuple[nn.Module, Shrinker | None]] = {}  # with the model, whose id is not reused
        self._dropping: dict[int, tuple[nn.Module, bool]] = {}

    def of(self, jobs: Sequence[Job]) -> list[Part]:
        """Return the part of each job; jobs with the same theta and mask share one cut."""
        masks = {id(job.mask): fixed(job.mask) for job in jobs}
        _note_removed_units([masks[id(job.mask)] for job in jobs if self._may_shrink(job)])
        hosts = self._hosts(jobs, masks)
        flat: dict[int, Tensor] = {}
        thetas: dict[tuple[int, int], Params] = {}
        parts = []
        for job in jobs:
            mask = masks[id(job.mask)]
            sub, host = self._sub_model(job, mask), hosts.get((_host_key(job), id(mask)))
            if sub is None:
                parts.append(Part(job, job))
                continue
            positions, small_mask = _positions(sub, job.theta, mask), sub.mask
            if host is not None and isinstance(mask, FixedMask):
                sub, small_mask = host.sub, hosted_mask(mask, host, job.theta)
                positions = hosted_positions(mask, host, job.theta, _positions(sub, job.theta, host.mask))
            at = (id(job.theta), id(sub))
            if at not in thetas:
                thetas[at] = sub.cut(job.theta) if positions is None else _cut(sub, job.theta, positions, flat)
            options = job.options and cut_options(sub, job.options)
            parts.append(Part(job, replace(job, theta=thetas[at], mask=small_mask, options=options), sub, positions))
        return parts

    def _hosts(self, jobs: Sequence[Job], masks: Mapping[int, Mask]) -> dict[tuple[Any, int], Host]:
        """Return the hosts of narrow masks by the keys of models and the ids of masks."""
        examples: Counter[tuple[Any, int]] = Counter()
        first: dict[tuple[Any, int], tuple[Job, FixedMask, SubModel]] = {}
        for job in jobs:
            mask = masks[id(job.mask)]
            sub = self._sub_model(job, mask)
            if sub is not None and isinstance(mask, FixedMask):
                key = (_host_key(job), id(mask))
                examples[key] += job.recipe.batch_size
                first[key] = (job, mask, sub)
        hosts: dict[tuple[Any, int], Host] = {}
        for model in {model for model, _ in first}:
            of_model = {key: entry for key, entry in first.items() if key[0] == model}
            job = next(iter(of_model.values()))[0]
            if len(of_model) > 1 and not self._drops(job):
                candidates = [NarrowMask(mask, sub, examples[key]) for key, (_, mask, sub) in of_model.items()]
                hosts |= {(model, mask): host for mask, host in hosts_of(candidates, job.theta).items()}
        return hosts

    def _drops(self, job: Job) -> bool:
        """Return whether a model has dropout, which draws for the units that a sub-model has."""
        model = job.task.model
        if id(model) not in self._dropping:
            example = job.population.examples.example()
            keyed, stream = with_keyed_dropout(model, example)
            stream.step = 0
            with torch.no_grad():
                call_model(keyed.train(), copy_of(example))
            self._dropping[id(model)] = (model, bool(stream.recorded))
        return self._dropping[id(model)][1]

    def _sub_model(self, job: Job, mask: Mask) -> SubModel | None:
        """Return the sub-model of a job's mask; None if nothing can be cut."""
        shrinker = self._shrinker(job) if self._may_shrink(job) else None
        if shrinker is None or not isinstance(mask, FixedMask):
            return None
        key = ("sub-model", shrinker)
        if mask.stored(key) is None:
            sub = shrinker.shrink(mask) if mask.stored(REMOVES) else None
            mask.keep(key, (sub if sub and sub.cuts else None,))
        sub_model: SubModel | None = mask.stored(key)[0]
        return sub_model

    def _may_shrink(self, job: Job) -> bool:
        """Return whether a job has a mask, trains only what is inside it, and has a model that is large enough."""
        whole = job.options is not None and job.options.whole
        return bool(job.mask) and not whole and self._shrinker(job) is not None

    def _shrinker(self, job: Job) -> Shrinker | None:
        """Return the shrinker of a job's model; None if smaller models would not be faster."""
        model = job.task.model
        if id(model) not in self._shrinkers:
            structure = job.task.structure(job.population.examples.example())
            shrinker = Shrinker(structure) if structure.work >= WORTHWHILE else None
            self._shrinkers[id(model)] = (model, shrinker)
        return self._shrinkers[id(model)][1]


def _host_key(job: Job) -> Any:
    """Return what clients must share for one of their sub-models to be the host of others."""
    return id(job.task.model), job.exits and job.exits.template


def _note_removed_units(masks: Sequence[Mask]) -> None:
    """Store with each mask whether it removes all entries of some row of a matrix, as the removal of a unit does."""
    distinct = {id(mask): mask for mask in masks}.values()
    new = [mask for mask in distinct if isinstance(mask, FixedMask) and mask.stored(REMOVES) is None]
    for mask in new:
        mask.keep(REMOVES, any(0 in along for along in mask.axes.values()))
    pairs = [(mask, kept) for mask in new if not mask.stored(REMOVES) for kept in mask.values() if kept.ndim > 1]
    if not pairs:
        return
    batches = alike([kept for _, kept in pairs])
    stacks = [torch.stack([pairs[n][1] for n in batch]) for batch in batches]
    removed = torch.cat([~stack.flatten(2).any(2).all(1) for stack in stacks]).tolist()
    for number, removes in zip((n for batch in batches for n in batch), removed, strict=True):
        if removes:
            pairs[number][0].keep(REMOVES, True)


def _positions(sub: SubModel, theta: Params, mask: Mask) -> Positions | None:
    """Return where the entries of a sub-model are; None if the parameters have several types."""
    if not isinstance(mask, FixedMask) or len({tensor.dtype for tensor in theta.values()}) != 1:
        return None
    key = ("positions", sub, device_of(theta))
    stored: Positions | None = mask.stored(key)
    return stored or mask.keep(key, Positions(sub.positions(theta, mask), None if sub.mask else ref(mask)))


def _cut(sub: SubModel, theta: Params, positions: Positions, flat: dict[int, Tensor]) -> Params:
    """Return the part of theta that a sub-model has, in one operation."""
    if id(theta) not in flat:
        flat[id(theta)] = flat_values(theta, next(iter(theta.values())).dtype)
    small = flat[id(theta)].index_select(0, positions.index)
    shapes = {name: shape_after(tensor.shape, sub.cuts.get(name)) for name, tensor in theta.items()}
    parts = small.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def restored(parts: Sequence[Part], stacks: Params) -> Params:
    """Return stacks of parameters in the shapes of the whole model, with zeros where sub-models have no entry.

    Args:
        parts: The clients of the stacks.
        stacks: Stacks in the shapes of the sub-models.
    """
    if not stacks or parts[0].sub is None:
        return stacks
    rows_of: dict[int, list[int]] = {}
    for row, part in enumerate(parts):
        rows_of.setdefault(id(part.sub), []).append(row)
    like = {name: parts[0].whole.theta[name] for name in stacks}
    whole = {name: stack.new_zeros((len(parts), *like[name].shape)) for name, stack in stacks.items()}
    for rows in rows_of.values():
        at, sub = torch.tensor(rows, device=next(iter(stacks.values())).device), parts[rows[0]].sub
        assert sub is not None
        for name, values in sub.restore({n: s[at] for n, s in stacks.items()}, like, stacked=True).items():
            whole[name].index_copy_(0, at, values)
    return whole


def rows_of(parts: Sequence[Part], stacks: Params, flat: Tensor | None) -> Sequence[Mapping[str, Tensor]]:
    """Return each client's parameters in the shapes of the whole model.

    Args:
        parts: The clients of the stacks.
        stacks: Stacks in the shapes of the sub-models.
        flat: The same as one row for each client; None if there is none.
    """
    theta = parts[0].whole.theta
    orders = {tuple(one) for one in {id(part.whole.theta): part.whole.theta for part in parts}.values()}
    if flat is None or orders != {tuple(stacks)} or any(part.sub and not part.positions for part in parts):
        whole = restored(parts, stacks)
        return [{name: stack[row] for name, stack in whole.items()} for row in range(len(parts))]
    return ClientStack(flat, [part.positions for part in parts], theta).rows()
