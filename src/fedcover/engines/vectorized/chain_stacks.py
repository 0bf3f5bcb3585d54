"""Stacks of many clients whose model is a chain of layers, and the kernels that take their steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover.engines.vectorized.batch_table import to_device
from fedcover.engines.vectorized.launch import launch
from fedcover.engines.vectorized.pooled_stacks import (
    TILES,
    Batches,
    PooledConvolution,
    PooledStacks,
    PooledTiles,
    Trained,
)
from fedcover.engines.vectorized.stacks import load_shifts, stack_like
from fedcover.params import Params
from fedcover.seeding import LOW, mix
from fedcover.structure.dropout import DropoutCall

AHEAD = 10
"""The number of steps of a CUDA graph. A round may end with fewer, so the tables have as many rows more."""

PRUNED = -(2**31)
"""The bits of -0.0 as an int32, which mark a momentum outside the mask."""


class Linear(NamedTuple):
    """A linear layer of a chain."""

    weight: str
    bias: str
    """Empty if it has none."""
    inputs: int
    outputs: int
    relu: bool = False
    """Whether ReLU follows."""
    drop: DropoutCall | None = None
    """The dropout that follows, before or after ReLU, which makes no difference."""

    @property
    def drops(self) -> tuple[int, int, float]:
        """The number of the dropout layer, the smallest hash with which an entry stays, and its factor."""
        if self.drop is None:
            return 0, 0, 1.0
        return self.drop.layer, int(self.drop.p * 2**32), 1 / (1 - self.drop.p)


class Clients(NamedTuple):
    """What clients start with."""

    thetas: Sequence[Params]
    """The distinct parameters."""
    theta_of: Tensor
    """For each client, the number of its parameters."""
    masks: Sequence[Mapping[str, Tensor]]
    """The distinct masks."""
    mask_of: Tensor
    """For each client, the number of its mask."""
    lr: Sequence[float]
    """The step size of each client."""
    keys: Sequence[int]
    """The key of each client's dropout."""
    complement: bool = False
    """Whether entries outside the masks stay at their values, instead of 0."""
    shifts: Sequence[Mapping[str, Tensor]] = ()
    """What is added to the gradients of each client; empty if no client has shifts."""


class Correction(NamedTuple):
    """What steps add to gradients."""

    shifts: bool = False
    """Whether clients have shifts."""
    proximal: float = 0.0
    """mu of the proximal term."""


NO_CORRECTION = Correction()


class ChainTiles(NamedTuple):
    """The sizes of tiles; ``benchmarks/chain_tiles.py`` compares them.

    A program of the first layer loads the next tiles of rows x columns weights and momenta, 8 KiB by default, while it
    computes with the present ones. Several programs on a multiprocessor keep more in flight than the 16 KiB that an
    H200 needs: reads of 2.1 TB/s on 132 multiprocessors with a latency of a microsecond.
    """

    rows: int = 32
    columns: int = 32
    parts: int = 1
    """The number of programs that share the columns of a block of rows."""
    warps: int = 2
    stages: int = 2
    """The number of tiles in shared memory; 1 to load into registers."""
    registers: int | None = None
    """The largest number of registers of a thread; None leaves it to the compiler."""
    inner_rows: int = 32
    """The rows of tiles of the layers between the first and the last."""
    inner_entries: int = 1024
    """Examples of a batch times columns of these tiles."""
    inner_warps: tuple[int, int] = (1, 2)
    """The warps of programs of these layers, forward and backward."""
    head_columns: int = 64
    head_warps: int = 4
    pooled: tuple[PooledTiles, ...] = TILES
    """The tiles of convolutions."""


class Front(NamedTuple):
    """The layers before the linear layers of a chain."""

    convolutions: Sequence[PooledConvolution]
    drop: DropoutCall | None = None
    """The dropout that follows."""


class ChainStacks:
    """The stacks of clients that are trained together; the first axis is the client.

    Args:
        layers: The linear layers, from first to last.
        data: Inputs, one row for each example, and labels.
        size: The largest number of steps, of clients, and of examples of a batch.
        tiles: The sizes of tiles.
        front: The layers before the linear layers, if there are any.
        correction: What steps add to gradients.
    """

    def __init__(
        self,
        layers: Sequence[Linear],
        data: tuple[Tensor, Tensor],
        size: tuple[int, int, int],
        tiles: ChainTiles,
        front: Front | None = None,
        correction: Correction = NO_CORRECTION,
    ) -> None:
        self.layers, self._tiles = list(layers), tiles
        self._x, self._labels = data
        steps, self._clients, self._batch = size
        self._device = self._x.device
        self.theta: Params = {}
        self.velocity: Params = {}
        """Momenta; -0.0 marks a pruned entry."""
        for convolution in front.convolutions if front else ():
            self._add(convolution.weight, *convolution.shape)
            if convolution.bias:
                self._add(convolution.bias, convolution.channels[1])
        for layer in layers:
            self._add(layer.weight, layer.outputs, layer.inputs)
            if layer.bias:
                self._add(layer.bias, layer.outputs)
        self._shift = stack_like(self.theta, list(self.theta) if any(correction) else ())
        self._trained = Trained(self.theta, self.velocity, self._shift, correction.proximal or None)
        if front:  # for the kernels of linear layers, it is a layer without bias and ReLU
            last = front.convolutions[-1]
            self.layers.insert(0, Linear(last.weight, "", last.pixels, layers[0].inputs, drop=front.drop))
        self.index = torch.full((steps + AHEAD + 1, *size[1:]), -1, dtype=torch.int32, device=self._device)
        self.losses = torch.zeros((steps + AHEAD, self._clients), device=self._device)
        self._lr = torch.zeros(self._clients, device=self._device)
        self._keys = torch.zeros(self._clients, dtype=torch.int32, device=self._device)
        self._base = torch.zeros((), dtype=torch.long, device=self._device)
        """The number of steps that were taken before the present group of steps."""
        parts = [1 if front else tiles.parts, *[1] * (len(self.layers) - 1)]
        self._h = [self._zeros(p, self._batch, layer.outputs) for p, layer in zip(parts, self.layers, strict=True)]
        self._d = [self._zeros(self._batch, layer.outputs) for layer in self.layers]
        self.pooled: PooledStacks | None = None
        """The convolutions, if there are any."""
        if front:
            batches, ends = Batches(self._x, self.index, self._base, self._lr), (self._h[0], self._d[0])
            self.pooled = PooledStacks(front.convolutions, self._trained, batches, ends, tiles.pooled)

    def _add(self, name: str, *shape: int) -> None:
        self.theta[name], self.velocity[name] = self._zeros(*shape), self._zeros(*shape)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros((self._clients, *shape), device=self._device)

    def start(self, clients: Clients, first: int = 0) -> None:
        """Set clients to theta o m, or theta, with momenta of 0; compute outputs of a linear first layer.

        Args:
            clients: The clients; fewer than the stacks are for leave the other rows as they are.
            first: The number of the first step.
        """
        from fedcover.engines.vectorized import chain_kernels  # here, since it needs Triton

        block = 1024
        for name, stack in self.theta.items():
            size, masked = stack[0].numel(), any(name in mask for mask in clients.masks)
            values = torch.stack([theta[name].to(stack.device) for theta in clients.thetas])
            kept = values
            if masked:
                whole = torch.ones(stack.shape[1:], dtype=torch.bool, device=stack.device)
                kept = torch.stack([mask[name].to(stack.device) if name in mask else whole for mask in clients.masks])
            launch(
                chain_kernels.start,
                (len(clients.lr) * -(-size // block),),
                stack,
                self.velocity[name],
                values,
                clients.theta_of,
                kept,
                clients.mask_of,
                size,
                masked,
                clients.complement,
                block,
            )
        self._load_shift(clients)
        self._lr[: len(clients.lr)].copy_(to_device(clients.lr, self._device, torch.float32))
        self._keys[: len(clients.keys)].copy_(to_device([_hash(key) for key in clients.keys], self._device))
        self._base.fill_(first)
        if self.pooled is None:
            self._first_layer(-1, 0.0, update=False)

    def _load_shift(self, clients: Clients) -> None:
        """Set shifts to those of clients minus mu theta_q: the proximal term is mu theta plus a shift."""
        load_shifts(self._shift, clients.shifts or [{}] * len(clients.lr))
        if self._trained.proximal is not None:
            for name, shift in self._shift.items():
                shift.sub_(self.theta[name], alpha=self._trained.proximal)

    def pruned(self) -> Params:
        """Return which entries of each stack are outside the masks, as their momenta mark them."""
        return {name: velocity.view(torch.int32) == PRUNED for name, velocity in self.velocity.items()}

    def restart(self) -> None:
        """Set the number of steps to 0, for measurements."""
        self._base.zero_()

    def take_steps(self, number: int, momentum: float) -> None:
        """Take the next steps of all clients that have not finished; at most ``AHEAD`` at once."""
        assert number <= AHEAD, number
        for offset in range(number):
            if self.pooled is not None:
                self.pooled.forward(offset)
            for at in range(1, len(self.layers) - 1):
                self._inner_forward(at, offset)
            self._head(offset, momentum)
            for at in range(len(self.layers) - 2, 0, -1):
                self._inner_backward(at, offset, momentum)
            if self.pooled is None:
                self._first_layer(offset, momentum)
            else:
                self.pooled.backward(offset, momentum)
        self._base.add_(number)

    @property
    def _side(self) -> int:
        """The rows of a tile with one row for each example of a batch."""
        return max(16, power_of_two(self._batch))

    @property
    def _columns(self) -> int:
        """The columns of a tile of a layer that is neither the first nor the last."""
        return max(16, self._tiles.inner_entries // self._side)

    def _first_layer(self, offset: int, momentum: float, update: bool = True) -> None:
        from fedcover.engines.vectorized import chain_kernels

        layer, tiles = self.layers[0], self._tiles
        span = -(-layer.inputs // tiles.columns // tiles.parts) * tiles.columns
        rows = max(16, min(tiles.rows, power_of_two(layer.outputs)))
        blocks = -(-layer.outputs // rows) * tiles.parts
        launch(
            chain_kernels.first_layer, (self._clients * blocks,),
            *self._trained.of(layer.weight), self._d[0], self._h[0], self._x, self.index, self._base, offset,
            self._clients, self._lr, momentum, self._trained.proximal, self._batch, layer.outputs, layer.inputs, update,
            tiles.parts, span, self._side, rows, tiles.columns, tiles.stages,
            num_warps=max(1, tiles.warps * rows // tiles.rows), maxnreg=tiles.registers,
        )  # fmt: skip

    def _head(self, offset: int, momentum: float) -> None:
        from fedcover.engines.vectorized import chain_kernels

        last = self.layers[-1]
        scores = max(16, power_of_two(last.outputs))
        ends = (
            self._labels, self.index, self._base, self.losses, self._keys, offset, self._clients, self._lr, momentum,
            self._trained.proximal,
        )  # fmt: skip
        bias = self._bias_of(len(self.layers) - 1)
        if len(self.layers) == 1:
            launch(
                chain_kernels.only_head, (self._clients,),
                *bias, self._h[0], self._d[0], *ends, self._batch, last.outputs, self._tiles.parts, bool(last.bias),
                self._side, scores, num_warps=self._tiles.head_warps,
            )  # fmt: skip
            return
        columns = max(16, min(power_of_two(last.inputs), self._tiles.head_columns * 16 // max(self._side, scores)))
        launch(
            chain_kernels.head, (self._clients,),
            *self._trained.of(last.weight), *bias, *self._bias_of(len(self.layers) - 2), self._h[-2], self._d[-2],
            *ends, *self._sizes(len(self.layers) - 1), bool(last.bias), self._side, scores, columns,
            num_warps=self._tiles.head_warps,
        )  # fmt: skip

    def _inner_forward(self, at: int, offset: int) -> None:
        from fedcover.engines.vectorized import chain_kernels

        layer, tiles = self.layers[at], self._tiles
        launch(
            chain_kernels.inner_forward, (self._clients * -(-layer.outputs // tiles.inner_rows),),
            self.theta[layer.weight], self._bias_of(at - 1)[0], self._h[at - 1], self._h[at], self.index, self._base,
            self._keys, offset, self._clients, *self._sizes(at), self._side, tiles.inner_rows, self._columns,
            num_warps=tiles.inner_warps[0],
        )  # fmt: skip

    def _inner_backward(self, at: int, offset: int, momentum: float) -> None:
        from fedcover.engines.vectorized import chain_kernels

        layer, tiles = self.layers[at], self._tiles
        launch(
            chain_kernels.inner_backward, (self._clients * -(-layer.inputs // self._columns),),
            *self._trained.of(layer.weight), *self._bias_of(at - 1), self._h[at - 1], self._d[at], self._d[at - 1],
            self.index, self._base, self._keys, offset, self._clients, self._lr, momentum, self._trained.proximal,
            *self._sizes(at), self._side, tiles.inner_rows, self._columns, num_warps=tiles.inner_warps[1],
        )  # fmt: skip

    def _sizes(self, at: int) -> tuple[Any, ...]:
        """Return what kernels of a layer must be compiled for."""
        layer, below = self.layers[at], self.layers[at - 1]
        parts = self._h[at - 1].shape[1]
        return self._batch, layer.inputs, layer.outputs, parts, bool(below.bias), below.relu, *below.drops

    def _bias_of(self, at: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the stacks of a layer's bias; without a bias, tensors that kernels do not read."""
        return self._trained.of(self.layers[at].bias or self.layers[at].weight)


def _hash(key: int) -> int:
    """Return the part of the dropout's hash that depends on the key, as a signed number of 32 bits."""
    number: int = mix(mix(key & LOW) ^ (key >> 32) & LOW)
    return number - ((number & 1 << 31) << 1)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number.

    >>> power_of_two(10), power_of_two(16)
    (16, 16)
    """
    return 1 << (number - 1).bit_length()
