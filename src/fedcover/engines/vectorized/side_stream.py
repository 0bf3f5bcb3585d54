"""A second stream of a GPU, for work whose results are needed only later, such as the gradients of weights."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs, copy_of
from fedcover.structure.calls import call_model

HIGHEST = -3
"""The highest priority of a stream in torch."""


def weights_used_once(model: nn.Module, example: Inputs) -> set[int]:
    """Return the ids of the parameters that one operation of a forward pass reads.

    The gradient of any other parameter is a sum. Autograd computes it on the current stream, which has not yet waited
    for the side stream.
    """
    with torch.enable_grad():
        pending: list[Any] = [call_model(model, copy_of(example)).grad_fn]
    seen: set[Any] = {None}
    uses: Counter[int] = Counter()
    while pending:
        if (node := pending.pop()) in seen:
            continue
        seen.add(node)
        for source, _ in node.next_functions:
            if hasattr(source, "variable"):
                uses[id(source.variable)] += 1
            else:
                pending.append(source)
    return {number for number, count in uses.items() if count == 1}


@contextmanager
def behind(stream: Any) -> Iterator[None]:
    """Enter a stream of a GPU, behind all work of the current one; do nothing for None."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def urgent_stream(device: torch.device) -> Any:
    """Return a stream of a GPU whose work goes before that of training; None on a CPU."""
    return torch.cuda.Stream(device, priority=HIGHEST) if device.type == "cuda" else None


class SideStream:
    """A stream beside the current one; captured into a CUDA graph, it is a branch of the graph.

    On a CPU, which has no streams, its contexts do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_used = self._is_behind = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Enter a context whose forks go to the stream, which the current stream waits for at its end.

        Outside such a context a fork stays in the current stream, since nobody would wait for its results.
        """
        self._is_used = self._stream is not None
        try:
            yield
        finally:
            self._is_used = False
            if self._is_behind:  # a graph must not wait for a stream that is not part of it
                torch.cuda.current_stream().wait_stream(self._stream)
            self._is_behind = False

    @contextmanager
    def fork(self, *tensors: Tensor | None) -> Iterator[None]:
        """Enter the stream, behind all work of the current one.

        Args:
            tensors: What is read there; its memory is not used again before.
        """
        if not self._is_used:
            yield
            return
        self._is_behind = True
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)
        with behind(self._stream):
            yield


class SideWork(NamedTuple):
    """Which gradients are computed on a side stream."""

    stream: SideStream
    weights: Collection[int]
    """The ids of the parameters, from ``weights_used_once``."""
