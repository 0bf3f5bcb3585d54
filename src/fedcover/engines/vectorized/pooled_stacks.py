"""Stacks of the convolutions of a chain, each followed by ReLU and max-pooling of 2 x 2, and calls of their kernels."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover.engines.vectorized.launch import launch
from fedcover.engines.vectorized.side_stream import SideStream
from fedcover.params import Params


class PooledConvolution(NamedTuple):
    """A convolution with stride 1 and without padding, followed by ReLU and max-pooling of 2 x 2."""

    weight: str
    bias: str
    """Empty if it has none."""
    channels: tuple[int, int]
    """The channels of inputs and outputs."""
    size: tuple[int, int]
    """The height and width of inputs."""
    kernel: tuple[int, int]

    @property
    def pooled(self) -> tuple[int, int]:
        """The height and width of pooled outputs.

        >>> PooledConvolution("conv1.weight", "", (3, 6), (32, 32), (5, 5)).pooled
        (14, 14)
        """
        height, width = ((n - k + 1) // 2 for n, k in zip(self.size, self.kernel, strict=True))
        return height, width

    @property
    def pixels(self) -> int:
        """The number of pixels, in all channels, that the outputs of a pooling window read."""
        return self.channels[0] * (self.kernel[0] + 1) * (self.kernel[1] + 1)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the weights."""
        return self.channels[1], self.channels[0], *self.kernel

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that all kernels are compiled for, apart from that of a batch."""
        return self.channels[0], *self.size, self.channels[1], *self.kernel, *self.pooled


class KernelTiles(NamedTuple):
    """The sizes of tiles of one kernel."""

    places: int
    """Pooled places, or for gradients of images squares of 2 x 2 pixels, that a program computes with at once."""
    pixels: int
    """Pixels of a patch, in all channels, that are loaded at once."""
    warps: int = 4
    stages: int = 1
    """The number of tiles in shared memory; 1 to load into registers."""
    registers: int | None = None
    """The largest number of registers of a thread; None leaves it to the compiler."""

    @property
    def options(self) -> dict[str, int | None]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class PooledTiles(NamedTuple):
    """The sizes of tiles of a convolution; ``benchmarks/gpu_lenet.py`` compares them."""

    forward: KernelTiles = KernelTiles(128, 64)
    sums: KernelTiles = KernelTiles(32, 128)
    """Tiles of gradients of weights."""
    each: int = 512
    """Pooled places over which a program sums at most; a multiple of those that it computes with at once."""
    images: KernelTiles = KernelTiles(128, 4)
    """Tiles of gradients of images."""


TILES = (
    PooledTiles(KernelTiles(128, 64), KernelTiles(32, 128, registers=168), 512),
    PooledTiles(KernelTiles(64, 32), KernelTiles(32, 128, stages=2), 256, KernelTiles(128, 4, registers=168)),
)
"""The tiles of the first convolution, and of all others: the fastest of LeNet's on an H200."""


class Batches(NamedTuple):
    """Where kernels find the batches of clients."""

    x: Tensor
    """All examples, one row for each."""
    examples: Tensor
    """The example at (step, client, position); -1 for padding."""
    base: Tensor
    """The number of steps that were taken before the present group of steps."""
    lr: Tensor
    """The step size of each client."""


class Trained(NamedTuple):
    """What steps read and change, by tensor."""

    theta: Params
    velocity: Params
    """Momenta; -0.0 marks a pruned entry."""
    shift: Params
    """What is added to gradients, of which -mu theta_q is a part; empty if nothing is added."""
    proximal: float | None
    """mu of the proximal term; None without one."""

    def of(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the stacks of a tensor."""
        return self.theta[name], self.velocity[name], self.shift.get(name)


class PooledStacks:
    """The convolutions of clients that are trained together, and what a step keeps between its kernels.

    Args:
        convolutions: The convolutions, from first to last.
        trained: The stacks of all tensors; kernels change them in place.
        batches: The batches.
        ends: The outputs of the last convolution, (clients, 1, batch, features), and their gradients.
        tiles: The sizes of tiles of each convolution; the last ones are those of all further convolutions.
    """

    def __init__(
        self,
        convolutions: Sequence[PooledConvolution],
        trained: Trained,
        batches: Batches,
        ends: tuple[Tensor, Tensor],
        tiles: Sequence[PooledTiles],
    ) -> None:
        self.convolutions = convolutions
        self._tiles = [tiles[min(at, len(tiles) - 1)] for at in range(len(convolutions))]
        self._trained = trained
        self._batches = batches
        self._clients, self._batch = batches.examples.shape[1:]
        self._side_stream = SideStream(batches.x.device)
        below = list(enumerate(convolutions[:-1]))
        self._outputs = [*(self._empty(self._batch, c.channels[1], *c.pooled) for _, c in below), ends[0]]
        self._gradients = [*(self._empty(self._batch, *c.pooled, self._channels(at)) for at, c in below), ends[1]]
        self._codes = [torch.empty_like(d, dtype=torch.int8) for d in self._gradients]
        self._sums = [
            self._empty(self._parts(at), c.pixels + 1, 4, self._channels(at)) for at, c in enumerate(convolutions)
        ]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty((self._clients, *shape), device=self._batches.x.device)

    def forward(self, offset: int) -> None:
        """Compute the outputs of all convolutions at a step."""
        for at in range(len(self.convolutions)):
            self.forward_one(at, offset)

    def backward(self, offset: int, momentum: float) -> None:
        """Take the steps of all convolutions, from the gradients of the last one's outputs.

        On a GPU, the steps of the others go on while gradients reach the first one.
        """
        side = self._side_stream
        with side.used():
            for at in range(len(self.convolutions) - 1, 0, -1):
                with side.fork():
                    self.sum_gradients(at, offset)
                self.input_gradient(at, offset)
                with side.fork():  # behind the gradient of images, which reads the weights
                    self.update(at, offset, momentum)
            self.sum_gradients(0, offset)
            self.update(0, offset, momentum)

    def forward_one(self, at: int, offset: int) -> None:
        """Compute pooled outputs and codes of one convolution."""
        from fedcover.engines.vectorized import pooled_kernels  # here, since it needs Triton

        conv, tiles = self.convolutions[at], self._tiles[at].forward
        theta, bias = self._trained.theta[conv.weight], self._trained.theta[conv.bias or conv.weight]
        launch(
            pooled_kernels.forward, (self._clients * _blocks(self._places(conv), tiles.places),),
            self._input(at), theta, bias, self._outputs[at], self._codes[at], *self._step(offset), *self._sizes(at),
            self._is_last(at), bool(conv.bias), at == 0, self._side, self._channels(at), tiles.places,
            min(tiles.pixels, _side(conv.pixels)), **tiles.options,
        )  # fmt: skip

    def sum_gradients(self, at: int, offset: int) -> None:
        """Compute the parts of the gradients of one convolution's weights and bias."""
        from fedcover.engines.vectorized import pooled_kernels

        conv, tiles = self.convolutions[at], self._tiles[at].sums
        pixels = min(tiles.pixels, _side(conv.pixels))
        programs = self._clients * self._parts(at) * _blocks(conv.pixels, pixels)
        launch(
            pooled_kernels.weight_gradient, (programs,),
            self._input(at), self._gradients[at], self._codes[at], self._sums[at], *self._step(offset),
            *self._sizes(at), self._is_last(at), at == 0, self._tiles[at].each, self._side, self._channels(at), pixels,
            tiles.places, **tiles.options,
        )  # fmt: skip

    def input_gradient(self, at: int, offset: int) -> None:
        """Compute the gradients of the pooled outputs of the convolution below."""
        from fedcover.engines.vectorized import pooled_kernels

        conv, tiles = self.convolutions[at], self._tiles[at].images
        squares = self._batch * prod((side + 1) // 2 for side in conv.size)
        launch(
            pooled_kernels.input_gradient, (self._clients * _blocks(squares, tiles.places),),
            self._gradients[at], self._codes[at], self._trained.theta[conv.weight], self._gradients[at - 1],
            *self._step(offset), *self._sizes(at), self._is_last(at), self._side, self._channels(at),
            self._channels(at - 1), tiles.places, **tiles.options,
        )  # fmt: skip

    def update(self, at: int, offset: int, momentum: float) -> None:
        """Take the step of one convolution's weights and bias."""
        from fedcover.engines.vectorized import pooled_kernels

        conv, block = self.convolutions[at], 512
        launch(
            pooled_kernels.update, (self._clients * _blocks(prod(conv.shape), block),),
            *self._trained.of(conv.weight), *self._trained.of(conv.bias or conv.weight), self._sums[at],
            *self._step(offset), self._batches.lr, momentum, self._trained.proximal, self._batch, *conv.channels,
            *conv.kernel, bool(conv.bias), self._parts(at), self._side, self._channels(at), block, num_warps=4,
        )  # fmt: skip

    @property
    def _side(self) -> int:
        """The side of a tile for the examples of a batch."""
        return _side(self._batch)

    def _step(self, offset: int) -> tuple[Any, ...]:
        return self._batches.examples, self._batches.base, offset, self._clients

    def _sizes(self, at: int) -> tuple[int, ...]:
        return self._batch, *self.convolutions[at].sizes

    def _channels(self, at: int) -> int:
        """Return the side of a tile for the outputs of a convolution. Only the first one has no product over them."""
        outputs = self.convolutions[at].channels[1]
        return 8 if at == 0 and outputs <= 8 else _side(outputs)

    def _input(self, at: int) -> Tensor:
        return self._outputs[at - 1] if at else self._batches.x

    def _is_last(self, at: int) -> bool:
        return at == len(self.convolutions) - 1

    def _places(self, convolution: PooledConvolution) -> int:
        return self._batch * prod(convolution.pooled)

    def _parts(self, at: int) -> int:
        return _blocks(self._places(self.convolutions[at]), self._tiles[at].each)


def _side(size: int) -> int:
    """Return the side of a tile for an axis: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks(size: int, side: int) -> int:
    return -(-size // side)
