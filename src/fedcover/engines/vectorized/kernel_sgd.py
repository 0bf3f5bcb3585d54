"""A fast path: SGD of many clients by kernels on a GPU, in steps that are not compiled.

It knows momentum, Nesterov's form of it, weight decay, clipping and gains. Forward passes compute with copies of the
weights in fewer bits if they are to. Small tensors share one piece of memory, and one kernel takes their step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover.engines.vectorized.gains import Gains
from fedcover.engines.vectorized.launch import launch
from fedcover.engines.vectorized.stacks import ClientKeys, OptionsKind, StackResults, column
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.recipes import LocalSGD, Recipe
from fedcover.training.transforms import TINY

Gradients = Callable[..., tuple[Params, Tensor]]
BLOCK = 2048
ALIGNED = 16
"""Entries between the beginnings of packed tensors are a multiple of this, so that kernels read whole lines."""
SMALL = 1 << 16
"""The entries up to which tensors are packed: copying their gradients costs less than launching kernels."""


def try_kernel_sgd(
    recipe: Recipe, kind: OptionsKind, theta: Params, masks: Params, trained: Sequence[str], gradients: Gradients
) -> "KernelSGD | None":
    """Return the fast path; None for a recipe, options or types that it does not know."""
    if not isinstance(recipe, LocalSGD) or any(kind._replace(gains=False, complement=False)):
        return None
    if not replace(recipe, weight_decay=0.0, nesterov=False, clip=None).is_plain:
        return None
    if any(theta[name].dtype != torch.float32 for name in trained):
        return None
    return KernelSGD(recipe, kind.gains, theta, masks, trained, gradients)


class _Tensors(NamedTuple):
    """The stacks of one tensor, or of several side by side."""

    theta: Tensor
    velocity: Tensor
    mask: Tensor | None
    copy: Tensor | None
    """Theta in fewer bits."""
    gains: Tensor | None

    owner: Tensor | None = None
    """The client of each entry, if several stacks lie one behind the other."""

    @property
    def gains_kind(self) -> int:
        """0 without gains, 1 for one per client, 2 for one per entry."""
        return 0 if self.gains is None else 1 if self.owner is None else 2


class _Pack:
    """The stacks of small tensors, one behind the other, with unused entries of 0 between them.

    Args:
        theta: The stacks of all parameters, whose order in memory is kept.
        names: The names of the tensors.
    """

    def __init__(self, theta: Params, names: Sequence[str]) -> None:
        self.names, first = names, theta[names[0]]
        self._orders = [_order(theta[name]) for name in names]
        self._shapes = [theta[name].permute(order).shape for name, order in zip(names, self._orders, strict=True)]
        self._unused = [-math.prod(shape) % ALIGNED for shape in self._shapes]
        self._zeros = first.new_zeros(ALIGNED)
        clients = torch.arange(len(first), device=first.device)
        rows = {name: column(clients, theta[name]).expand(theta[name].shape) for name in names}
        self.owner = self.line(rows).to(torch.int32)
        """The client of each entry."""
        entries = self.parts(torch.arange(len(self.owner), device=first.device))
        self.by_client = torch.cat([stack.reshape(len(stack), -1) for stack in entries.values()], 1)
        """The entries of each client."""

    def line(self, stacks: Params) -> Tensor:
        """Return stacks one behind the other."""
        parts = []
        for name, order, unused in zip(self.names, self._orders, self._unused, strict=True):
            parts.append(stacks[name].permute(order).reshape(-1))
            if unused:
                parts.append(self._zeros[:unused].to(parts[-1].dtype))
        return torch.cat(parts)

    def parts(self, line: Tensor) -> dict[str, Tensor]:
        """Return the stacks of a line by name, as parts of its memory."""
        sizes = [math.prod(shape) for shape in self._shapes]
        widths = [width for pair in zip(sizes, self._unused, strict=True) for width in pair]
        stacks = {}
        for name, part, shape, order in zip(
            self.names, line.split(widths)[::2], self._shapes, self._orders, strict=True
        ):
            stacks[name] = part.view(shape).permute(sorted(range(len(order)), key=order.__getitem__))
        return stacks

    def zeros(self, dtype: torch.dtype) -> tuple[Tensor, Params]:
        """Return a line of 0, and its stacks by name."""
        line = torch.zeros(len(self.owner), dtype=dtype, device=self.owner.device)
        return line, self.parts(line)


def _order(stack: Tensor) -> list[int]:
    """Return the axes of a stack in the order in which they lie in memory."""
    strides = stack.stride()
    return sorted(range(stack.ndim), key=lambda axis: -strides[axis])


class KernelSGD:
    """Stacks of parameters, momenta and masks, whose steps are taken by kernels."""

    def __init__(
        self,
        recipe: LocalSGD,
        gains: bool,
        theta: Params,
        masks: Params,
        trained: Sequence[str],
        gradients: Gradients,
    ) -> None:
        self.theta, self.masks = dict(theta), dict(masks)
        self._recipe, self._trained, self._gradients = recipe, tuple(trained), gradients
        first = next(iter(theta.values()))
        self._lr = torch.zeros(len(first), device=first.device)
        self._copies: Params = {}
        self._velocity = {name: torch.zeros_like(theta[name]) for name in trained}
        self._packs = [_Pack(theta, names) for names in _packed_names(theta, trained)]
        self._packed = [self._packed_tensors(pack, gains) for pack in self._packs]
        packed = {name for pack in self._packs for name in pack.names}
        self._large = [name for name in trained if name not in packed]
        self._gains = Gains(self.theta, trained, gains)

    def _packed_tensors(self, pack: _Pack, gains: bool) -> _Tensors:
        """Replace the stacks of packed tensors by parts of common lines."""
        theta, parts = pack.zeros(torch.float32)
        velocity, velocities = pack.zeros(torch.float32)
        self.theta |= parts
        self._velocity |= velocities
        mask = None
        if self.masks:
            mask, masks = pack.zeros(torch.bool)
            self.masks |= masks
        return _Tensors(theta, velocity, mask, None, torch.ones_like(theta) if gains else None, pack.owner)

    def use_copies(self, dtype: torch.dtype) -> None:
        """Let passes compute with copies of matrices and kernels in another type, also of those that stand still."""
        for number, pack in enumerate(self._packs):
            if self.theta[pack.names[0]].ndim > 2:
                line, copies = pack.zeros(dtype)
                self._packed[number] = self._packed[number]._replace(copy=line)
                self._copies |= copies
        packed = {name for pack in self._packs for name in pack.names}
        others = {name: stack for name, stack in self.theta.items() if name not in packed and stack.ndim > 2}
        self._copies |= {name: stack.to(dtype) for name, stack in others.items() if stack.dtype == torch.float32}

    def sync(self) -> None:
        """Copy the weights that passes compute with."""
        for name, copied in self._copies.items():
            copied.copy_(self.theta[name])

    def load(self, jobs: Sequence[Job]) -> None:
        """Multiply theta by the gains, and set momenta to 0."""
        self._lr.copy_(torch.tensor([job.recipe.lr for job in jobs]))
        changed = self._gains.load(self.theta, jobs)
        for pack, packed in zip(self._packs, self._packed, strict=True):
            packed.velocity.zero_()
            for name, part in pack.parts(packed.gains).items() if changed and packed.gains is not None else ():
                part.copy_(column(self._gains.of[name], part).expand_as(part))
        for name in self._large:
            self._velocity[name].zero_()
        self.sync()

    def arguments(self, step: Tensor) -> tuple[Any, ...]:
        """Return nothing: the stacks are its own."""
        return ()

    def update(self, tensors: tuple[Any, ...], batch: tuple[Tensor, ...], keys: ClientKeys, step: Tensor) -> Tensor:
        """Take one step: v <- momentum v + (g + decay theta) o m, theta <- theta - lr v."""
        shown = {**self.theta, **self._copies}
        parameters = {name: shown.pop(name) for name in self._trained}
        grads, losses = self._gradients(parameters, shown, *batch, keys, step)
        due = [(self._tensors(name), grads[name]) for name in self._large]
        due = [(one, _laid_out_as(grad, one.theta)) for one, grad in due]
        due += [(packed, pack.line(grads)) for pack, packed in zip(self._packs, self._packed, strict=True)]
        lr = batch[2].any(1) * self._lr  # 0 for a client that has finished its steps
        factor = lr if self._recipe.clip is None else self._clipping(due, self._recipe.clip)
        for one, grad in due:
            self._launch(one, grad, lr, factor)
        return losses

    def _tensors(self, name: str) -> _Tensors:
        return _Tensors(
            self.theta[name], self._velocity[name], self.masks.get(name), self._copies.get(name),
            self._gains.of.get(name),
        )  # fmt: skip

    def _launch(self, one: _Tensors, grad: Tensor, lr: Tensor, factor: Tensor) -> None:
        """Take the step of one tensor, or of the packed ones."""
        from fedcover.engines.vectorized.sgd_kernels import sgd_step  # here, since it needs Triton

        recipe, theta = self._recipe, one.theta
        clients, size = (1, len(theta)) if one.owner is not None else (len(theta), theta[0].numel())
        missing = (theta if tensor is None else tensor for tensor in (one.mask, one.copy, one.gains, one.owner))
        launch(
            sgd_step, (-(-size // BLOCK), clients), theta, one.velocity, grad, *missing, lr, factor,
            float(recipe.momentum), float(recipe.weight_decay), size,
            one.owner is not None, one.mask is not None, one.copy is not None, one.gains_kind,
            recipe.clip is not None, recipe.weight_decay != 0, recipe.nesterov, recipe.momentum != 0, BLOCK,
        )  # fmt: skip

    def _clipping(self, due: Sequence[tuple[_Tensors, Tensor]], most: float) -> Tensor:
        """Return the factor of each client's gradients that limits their norm over all tensors."""
        from fedcover.engines.vectorized.sgd_kernels import sgd_square_sums

        rows = {id(pack.owner): pack.by_client for pack in self._packs}
        due = [(one, grad) if one.owner is None else _by_client(one, grad, rows[id(one.owner)]) for one, grad in due]
        blocks = [-(-grad[0].numel() // BLOCK) for _, grad in due]
        sums = torch.empty(len(self._lr), sum(blocks), device=self._lr.device)
        first = 0
        for (one, grad), count in zip(due, blocks, strict=True):
            launch(
                sgd_square_sums, (count, len(grad)), grad, grad if one.mask is None else one.mask,
                grad if one.gains is None else one.gains, sums, grad[0].numel(), sums.shape[1], first,
                one.mask is not None, one.gains is not None, BLOCK,
            )  # fmt: skip
            first += count
        return (most / sums.sum(1).sqrt().clamp_min(TINY)).clamp(max=1.0)

    def shown(self, rows: Tensor) -> Params:
        """Return the parameters of some clients, times their gains."""
        return {name: stack[rows] for name, stack in self.theta.items()}

    def moments(self, name: str) -> list[Tensor]:
        """Return the momenta of a tensor."""
        return [self._velocity[name]]

    def results(self, clients: int) -> StackResults:
        """Return the parameters of the first clients, divided by their gains."""
        return StackResults(self._gains.divided(self.theta, clients), {}, {})


def _laid_out_as(grad: Tensor, theta: Tensor) -> Tensor:
    """Return a gradient with the layout of its stack in memory."""
    return grad if grad.stride() == theta.stride() else torch.empty_like(theta, dtype=grad.dtype).copy_(grad)


def _packed_names(theta: Params, trained: Sequence[str]) -> list[list[str]]:
    """Return the names of small vectors, and of small matrices, whose gradients may be of another type."""
    small = [name for name in trained if theta[name][0].numel() <= SMALL]
    kinds = [[name for name in small if theta[name].ndim <= 2], [name for name in small if theta[name].ndim > 2]]
    return [names for names in kinds if names]


def _by_client(one: _Tensors, grad: Tensor, rows: Tensor) -> tuple[_Tensors, Tensor]:
    """Return packed gradients as one stack with these rows, inside their masks and times their gains."""
    grad = grad if one.mask is None else torch.where(one.mask, grad, 0.0)
    grad = grad if one.gains is None else grad * one.gains
    return one._replace(mask=None, gains=None), grad[rows]
