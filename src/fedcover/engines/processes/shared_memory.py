"""Parameters and masks in anonymous memory that processes share, without copies through pipes."""

import mmap
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedcover.params import Mask, Params
from fedcover.training.recipes import moment_dtype

ALIGN = 64
"""Tensors begin at multiples of this many bytes."""


class BufferLayout:
    """The positions of a model's tensors in one flat buffer of bytes.

    ``size`` is the length of a buffer for parameters, ``entries`` that of a buffer with one byte per entry.
    """

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        self._tensors: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._entries: dict[str, tuple[int, int]] = {}
        at = entry = 0
        for name, tensor in theta.items():
            self._tensors[name] = (at, tensor.dtype, tuple(tensor.shape))
            self._entries[name] = (entry, tensor.numel())
            at += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
            entry += -(-tensor.numel() // ALIGN) * ALIGN
        self.size = max(at, ALIGN)
        self.entries = max(entry, ALIGN)

    @cached_property
    def counts(self) -> "BufferLayout":
        """The layout of a count for each entry, which may take more bytes than the parameters."""
        shapes = {name: (shape, moment_dtype("count", dtype)) for name, (_, dtype, shape) in self._tensors.items()}
        return BufferLayout({n: torch.empty(shape, dtype=dtype, device="meta") for n, (shape, dtype) in shapes.items()})

    def params(self, memory: Tensor) -> Params:
        """Return the parameters as views of a buffer of ``size`` bytes."""
        views = {}
        for name, (at, dtype, shape) in self._tensors.items():
            count = self._entries[name][1]
            views[name] = memory[at : at + count * dtype.itemsize].view(dtype).view(shape)
        return views

    def put_params(self, memory: Tensor, theta: Mapping[str, Tensor]) -> None:
        """Write some of the parameters, or tensors of their shapes, into a buffer of ``size`` bytes."""
        views = self.params(memory)
        for name, tensor in theta.items():
            views[name].copy_(tensor)

    def put_mask(self, memory: Tensor, mask: Mask) -> tuple[str, ...]:
        """Write a mask into a buffer of ``entries`` bytes and return its names."""
        for name, kept in mask.items():
            at, count = self._entries[name]
            memory[at : at + count].copy_(kept.reshape(-1))
        return tuple(mask)

    def mask(self, memory: Tensor, names: tuple[str, ...]) -> Mask:
        """Return the mask that ``put_mask`` wrote, with these names, as views of the buffer."""
        views = {}
        for name in names:
            at, count = self._entries[name]
            views[name] = memory[at : at + count].view(torch.bool).view(self._tensors[name][2])
        return views

    def put_levels(self, memory: Tensor, levels: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Write tensors of one byte per entry into a buffer of ``entries`` bytes and return their names."""
        for name, level in levels.items():
            at, count = self._entries[name]
            memory[at : at + count].copy_(level.reshape(-1))
        return tuple(levels)

    def levels(self, memory: Tensor, names: tuple[str, ...]) -> Params:
        """Return the tensors that ``put_levels`` wrote, with these names, as views of the buffer."""
        views = {}
        for name in names:
            at, count = self._entries[name]
            views[name] = memory[at : at + count].view(self._tensors[name][2])
        return views

    def put_kept(self, memory: Tensor, theta: Mapping[str, Tensor], mask: Mask) -> None:
        """Write only the values that a mask keeps, contiguously within each tensor."""
        for name, view in self.params(memory).items():
            if name in mask:
                values = theta[name][mask[name]]
                view.view(-1)[: values.numel()] = values
            else:
                view.copy_(theta[name])

    def kept(self, memory: Tensor, mask: Mask) -> Params:
        """Return copies of the parameters that ``put_kept`` wrote, with zeros outside the mask."""
        theta = {}
        for name, view in self.params(memory).items():
            if name in mask:
                theta[name] = torch.zeros(view.shape, dtype=view.dtype)
                theta[name][mask[name]] = view.view(-1)[: int(mask[name].sum())]
            else:
                theta[name] = view.clone()
        return theta


def shared_bytes(size: int) -> Tensor:
    """Return memory shared by this process and its forks; it is freed when the last of them ends."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
