"""Parameters and masks in memory that processes share: no copies through pipes, no names on disk."""

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from fedcover.params import Mask, Params

ALIGN = 64


class BufferLayout:
    """Where each tensor of a model lies in one flat stretch of bytes."""

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._bits: dict[str, tuple[int, int]] = {}
        at = bits = 0
        for name, tensor in theta.items():
            self._places[name] = (at, tensor.dtype, tuple(tensor.shape))
            self._bits[name] = (bits, tensor.numel())
            at += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
            bits += -(-tensor.numel() // ALIGN) * ALIGN
        self.size = max(at, ALIGN)
        self.entries = max(bits, ALIGN)

    def params(self, memory: Tensor) -> Params:
        """The model as views on a stretch of memory of ``size`` bytes."""
        views = {}
        for name, (at, dtype, shape) in self._places.items():
            count = self._bits[name][1]
            stretch = memory[at : at + count * dtype.itemsize]
            views[name] = stretch.view(dtype).view(shape)
        return views

    def put_mask(self, memory: Tensor, mask: Mask) -> tuple[str, ...]:
        """The names in a mask, now written into a stretch of memory of ``entries`` bytes."""
        for name, kept in mask.items():
            at, count = self._bits[name]
            memory[at : at + count].copy_(kept.reshape(-1))
        return tuple(mask)

    def mask(self, memory: Tensor, names: tuple[str, ...]) -> Mask:
        """The mask with these names, as views on the memory that ``put_mask`` wrote."""
        views = {}
        for name in names:
            at, count = self._bits[name]
            views[name] = memory[at : at + count].view(torch.bool).view(self._places[name][2])
        return views

    def put_levels(self, memory: Tensor, levels: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The names of tensors with one byte for each entry, now written into a stretch of ``entries`` bytes."""
        for name, level in levels.items():
            at, count = self._bits[name]
            memory[at : at + count].copy_(level.reshape(-1))
        return tuple(levels)

    def levels(self, memory: Tensor, names: tuple[str, ...]) -> Params:
        """The bytes that ``put_levels`` wrote, as views."""
        places = {name: self._bits[name] for name in names}
        return {n: memory[at : at + count].view(self._places[n][2]) for n, (at, count) in places.items()}

    def put_kept(self, memory: Tensor, theta: Params, mask: Mask) -> None:
        """Write the values that a mask keeps, and only those, one after another, tensor by tensor."""
        for name, view in self.params(memory).items():
            if name in mask:
                values = theta[name][mask[name]]
                view.view(-1)[: values.numel()] = values
            else:
                view.copy_(theta[name])

    def kept(self, memory: Tensor, mask: Mask) -> Params:
        """The model that ``put_kept`` wrote, with zeros outside the mask, as tensors of its own."""
        theta = {}
        for name, view in self.params(memory).items():
            if name in mask:
                theta[name] = torch.zeros(view.shape, dtype=view.dtype)
                theta[name][mask[name]] = view.view(-1)[: int(mask[name].sum())]
            else:
                theta[name] = view.clone()
        return theta


def shared_bytes(size: int) -> Tensor:
    """Memory that this process and those it forks share; it goes when the last of them does."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
