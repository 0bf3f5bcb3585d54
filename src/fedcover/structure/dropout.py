"""Dropout with an address: the units that drop depend only on (client, round, step, layer).

Dropout draws from a global generator, so the units that a client drops would depend on the engine and on the
other clients in the cohort. Copies of the model that are trained use ``KeyedDropout`` instead, whose bits are a hash.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedcover.data.inputs import Inputs, copy_of
from fedcover.seeding import TOP, generator_states, mix_address, mix_int32, seeded
from fedcover.structure.attention import ExplicitAttention, attend, can_be_explicit
from fedcover.structure.calls import call_model
from fedcover.structure.dispatch import Watch
from fedcover.structure.state import copy_with_same_parameters

MOST_LAYERS = 1 << 20


class DropoutCall(NamedTuple):
    """One call of a dropout layer in a forward pass."""

    layer: int
    """Number of the layer and of the call, from ``Stream.number``."""
    p: float
    """Probability that an entry drops."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stream:
    """The state of a model's dropout layers: the key of the client and round, and the step."""

    def __init__(self) -> None:
        self.key: Any = 0
        self._step: Any = 0
        self._counts: dict[int, int] = {}
        self.recorded: dict[DropoutCall, None] = {}
        """Calls of the layers since this was last cleared."""
        self.prepared: Mapping[DropoutCall, Tensor] | None = None
        """Scales drawn in advance; if set, no hash is computed."""
        self.of_functions = False
        """Whether the model calls functions that draw, and these draw from the stream where they are dropout."""

    def __deepcopy__(self, memo: object) -> "Stream":
        return self  # copies of a model share the stream, so that setting it affects all of them

    @property
    def step(self) -> Any:
        """The current step; setting it starts a forward pass."""
        return self._step

    @step.setter
    def step(self, step: Any) -> None:
        self._step = step
        self._counts.clear()

    def number(self, layer: int) -> int:
        """Return the number of a layer's next call in this forward pass; repeated calls drop different entries."""
        count = self._counts.get(layer, 0)
        self._counts[layer] = count + 1
        return layer + count * MOST_LAYERS

    def scale(self, call: DropoutCall, device: torch.device) -> Tensor:
        """Return the factors of a call at this step: 1 / (1 - p) for entries that stay, 0 for those that drop."""
        if self.prepared is not None:
            return self.prepared[call]
        self.recorded[call] = None
        kept = _numbers(self.key, self.step, call, device) >= _threshold(call)
        return kept.to(call.dtype) * (1 / (1 - call.p))


def scales(key: int, steps: Tensor, call: DropoutCall, device: torch.device) -> Tensor:
    """Return the factors of a call at each of several steps, stacked along the first axis."""
    # Comparing in place gives numbers 0 or 1: bool tensors take three times as long to write and to read.
    return _numbers(key, steps, call, device).ge_(_threshold(call)).to(call.dtype).mul_(1 / (1 - call.p))


def _numbers(key: Any, step: Any, call: DropoutCall, device: torch.device) -> Tensor:
    """Return a random int32 for each entry; a tensor of steps or keys adds its shape in front."""
    start = torch.as_tensor(mix_address(key, step, call.layer), device=device).to(torch.int32)
    # The base is well mixed, and mix separates neighbouring numbers, so entries may differ by one.
    entry = torch.arange(math.prod(call.shape), device=device, dtype=torch.int32)
    return (mix_int32(start.unsqueeze(-1) + entry) ^ TOP).view(*start.shape, *call.shape)


def _threshold(call: DropoutCall) -> int:
    """Return the smallest number with which an entry stays."""
    return int(call.p * 2**32) + TOP


_SILENT: list[bool] = []
"""Not empty inside ``silent_dropout``."""


@contextmanager
def silent_dropout() -> Iterator[None]:
    """Drop no entries inside the block, whatever a model's streams are."""
    _SILENT.append(True)
    try:
        yield
    finally:
        _SILENT.pop()


class KeyedDropout(nn.Module):
    """``nn.Dropout`` with the bits of a stream."""

    def __init__(self, p: float, layer: int, stream: Stream) -> None:
        super().__init__()
        self.p, self.layer, self.stream = p, layer, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries with probability p and scale the others by 1 / (1 - p); in evaluation return the input."""
        return _drop(x, self.p, self.layer, self.stream) if self.training else x


def _drop(x: Tensor, p: float, layer: int, stream: Stream) -> Tensor:
    """Return the input with entries dropped with probability p, and the others scaled by 1 / (1 - p)."""
    if p == 0 or _SILENT:
        return x
    if p == 1:
        return torch.zeros_like(x)
    call = DropoutCall(stream.number(layer), p, tuple(x.shape), x.dtype)
    return x * stream.scale(call, x.device)


class _KeyedFunctions(TorchFunctionMode):
    """A context in which ``F.dropout`` and the dropout of ``F.scaled_dot_product_attention`` draw from a stream."""

    def __init__(self, layer: int, stream: Stream) -> None:
        super().__init__()
        self._layer, self._stream = layer, stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout or func is torch.dropout:
            x, p, training = _dropout_arguments(*args, **(kwargs or {}))
            return _drop(x, p, self._layer, self._stream) if training else x
        if func is F.scaled_dot_product_attention:
            drop_p, rest = _attention_arguments(*args, **(kwargs or {}))
            if drop_p:
                return attend(drop=lambda weights: _drop(weights, drop_p, self._layer, self._stream), **rest)
        return func(*args, **(kwargs or {}))


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[Tensor, float, bool]:
    return input, p, training and train


def _attention_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **rest: Any
) -> tuple[float, dict[str, Any]]:
    rest.pop("enable_gqa", None)
    return dropout_p, {"query": query, "key": key, "value": value, "attn_mask": attn_mask, **rest}


def with_keyed_dropout(
    model: nn.Module, example: Inputs | None = None, share: bool = False
) -> tuple[nn.Module, Stream]:
    """Return a copy of the model whose dropout draws from a stream, and that stream.

    This covers ``nn.Dropout``, the dropout of ``nn.MultiheadAttention`` and, for models that call them, ``F.dropout``
    and the dropout of ``F.scaled_dot_product_attention``.

    Args:
        model: The model, which is not changed.
        example: A batch of inputs, by which functions that draw are noticed; without it they are not replaced.
        share: Whether the copy has the model's own parameters; they must not be changed then.
    """
    stream = Stream()
    scratch = copy_with_same_parameters(model) if share else copy.deepcopy(model)
    keyed: dict[nn.Module, KeyedDropout] = {}
    for parent in list(scratch.modules()):
        for name, child in list(parent._modules.items()):  # one layer may have several names
            if type(child) is nn.Dropout:
                setattr(parent, name, keyed.setdefault(child, KeyedDropout(child.p, len(keyed), stream)))
        if isinstance(parent, nn.MultiheadAttention) and parent.dropout and can_be_explicit(parent):
            ExplicitAttention.replace(parent)
            parent.keyed_dropout = keyed[parent] = KeyedDropout(parent.dropout, len(keyed), stream)
    if example is not None and draws(scratch, example):
        stream.of_functions = True
        _enter_while_running(scratch, _KeyedFunctions(len(keyed), stream))
    return scratch, stream


def draws(model: nn.Module, example: Inputs) -> bool:
    """Return whether a forward pass in training mode draws random numbers, from any generator."""
    watch = _GeneratorWatch()
    with seeded(0, "look"), torch.no_grad(), watch:
        before = torch.default_generator.get_state(), generator_states()
        call_model(copy_with_same_parameters(model).train(), copy_of(example))
        same = torch.equal(before[0], torch.default_generator.get_state())
        return watch.drawn or not same or before[1] != generator_states()


class _GeneratorWatch(Watch):
    """Notices operations that draw from a generator of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look for a generator among the arguments."""
        self.drawn = self.drawn or any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _enter_while_running(model: nn.Module, context: _KeyedFunctions) -> None:
    """Make a context active during the forward passes of a model and of its copies."""
    model.register_forward_pre_hook(lambda *_: (context.__enter__(), None)[1])  # type: ignore[no-untyped-call]
    model.register_forward_hook(lambda *_: context.__exit__(None, None, None), always_call=True)  # type: ignore[no-untyped-call]
