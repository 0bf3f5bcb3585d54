"""Parameters and masks: dicts of tensors over a plain module's ``named_parameters()``.

A mask is data: one bool tensor for each parameter tensor that it touches. A name left out is kept
whole, so ``{}`` is the full model. theta o m is the meaning of a pruned model.
"""

from collections.abc import Hashable, ItemsView, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcover.errors import InputError

Params = dict[str, Tensor]
Mask = Mapping[str, Tensor]

Axes = Mapping[str, Mapping[int, npt.NDArray[np.bool_]]]
"""For each tensor that is pruned, along each axis of which indices are removed: which of them stay."""
Value = TypeVar("Value")

MOST_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 27}
"""The entries that are processed as one stack: few and large operations suit a GPU, and not a CPU's caches."""

FULL: Mask = MappingProxyType({})
"""The mask of the whole model, which is read-only."""


class FixedMask(Mapping[str, Tensor]):
    """A mask whose tensors never change, so that what is computed from it can be kept and used again.

    Args:
        tensors: The bool tensors of the mask by name.
        axes: The tensors whose mask is an outer product, as for whole units. Tensors may be left out.
        flat: The mask as one tensor over the entries of all parameters, of which the tensors are views.
        names: The parameters over whose entries ``flat`` is, in their order.

    A change in place that PyTorch counts is noticed: what was computed before it is dropped.

    >>> mask = FixedMask({"w": torch.tensor([True, False])})
    >>> mask.stored("count"), mask.keep("count", 1), mask.stored("count")
    (None, 1, 1)
    """

    __slots__ = ("__weakref__", "_axes", "_changed", "_flat", "_names", "_results", "_tensors", "_version")

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        axes: Axes | None = None,
        flat: Tensor | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._tensors, self._axes, self._flat, self._names = dict(tensors), axes or {}, flat, tuple(names)
        self._version, self._changed = 0 if flat is None else flat._version, False
        self._results: dict[Hashable, Any] = {}

    @property
    def axes(self) -> Axes:
        """The tensors whose mask is an outer product."""
        self._notice_change()
        return self._axes

    def intact(self) -> bool:
        """Return whether PyTorch has counted no change in place since the mask was built; False if it cannot tell."""
        self._notice_change()
        return self._flat is not None and not self._changed

    def stored(self, key: Hashable) -> Any:
        """Return the result that is kept under a key; None if there is none."""
        self._notice_change()
        return self._results.get(key)

    def keep(self, key: Hashable, result: Value) -> Value:
        """Keep a result of this mask under a key, and return it."""
        self._notice_change()
        self._results[key] = result
        return result

    def flat(self, theta: Mapping[str, Tensor]) -> Tensor:
        """Return the mask over the entries of all parameters, in their order and on their device.

        The tensors of the mask are views of the first such tensor from then on.
        """
        if self._flat is None:
            self._flat, self._names = _flat(self._tensors, theta), tuple(theta)
            self._version = self._flat._version
            parts = parts_of_flat(self._flat, theta)
            self._tensors = {name: parts[name] for name in self._tensors}
        fits = self._names == tuple(theta) and self._flat.device == device_of(theta)
        return self._flat if fits else _flat(self._tensors, theta)

    def _notice_change(self) -> None:
        """Drop what is known of the mask if PyTorch has counted a change in place."""
        if self._flat is not None and self._flat._version != self._version:
            self._version, self._changed, self._axes = self._flat._version, True, {}
            self._results.clear()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors."""
        return self._tensors.items()

    def __repr__(self) -> str:
        return repr(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: kept.clone() for name, kept in self._tensors.items()},)  # without the rest of the buffer


def fixed(mask: Mask) -> Mask:
    """Return a mask as one that is never changed; its tensors are not copied."""
    return mask if isinstance(mask, FixedMask) or not mask else FixedMask(mask)


def axes_of(mask: Mask) -> Axes:
    """Return the tensors of a mask that are outer products by construction."""
    return mask.axes if isinstance(mask, FixedMask) else {}


def flat_mask(mask: Mask, theta: Mapping[str, Tensor]) -> Tensor:
    """Return a mask as one bool tensor over the entries of all parameters.

    >>> flat_mask({"w": torch.tensor([True, False])}, {"w": torch.zeros(2), "b": torch.zeros(1)}).tolist()
    [True, False, True]
    """
    return mask.flat(theta) if isinstance(mask, FixedMask) else _flat(mask, theta)


def _flat(mask: Mask, theta: Mapping[str, Tensor]) -> Tensor:
    device = device_of(theta)
    whole = torch.ones((), dtype=torch.bool, device=device)
    parts = [
        mask[name].to(device).reshape(-1) if name in mask else whole.expand(tensor.numel())
        for name, tensor in theta.items()
    ]
    return torch.cat(parts)


def flat_values(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the entries of all tensors as one new tensor."""
    parts = [tensor.reshape(-1) for tensor in tensors.values()]
    if len(parts) == 1:
        return parts[0].to(dtype, copy=True)
    if len({part.dtype for part in parts}) > 1:
        parts = [part.to(dtype) for part in parts]
    return torch.cat(parts).to(dtype)


def flat_like(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return the entries of tensors as one new tensor, in the order and on the device of others, with their first type.

    >>> like = {"w": torch.zeros(1), "b": torch.zeros(1)}
    >>> flat_like({"b": torch.tensor([2.0]), "w": torch.tensor([1.0])}, like).tolist()
    [1.0, 2.0]
    """
    dtype = next(iter(like.values())).dtype
    return flat_values({name: tensors[name].to(tensor.device) for name, tensor in like.items()}, dtype)


def parts_of_flat(flat: Tensor, theta: Mapping[str, Tensor]) -> Params:
    """Return one tensor over the entries of all parameters as views in their shapes.

    >>> parts_of_flat(torch.arange(3), {"w": torch.zeros(1, 2), "b": torch.zeros(1)})
    {'w': tensor([[0, 1]]), 'b': tensor([2])}
    """
    parts = flat.split([tensor.numel() for tensor in theta.values()])
    return {name: part.view(theta[name].shape) for name, part in zip(theta, parts, strict=True)}


def params_of(model: nn.Module) -> Params:
    """Return a detached copy of a module's parameters, by name.

    >>> sorted(params_of(nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def put_params(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    """Copy values into a module's parameters, in place."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(theta[name])


def prune(theta: Mapping[str, Tensor], mask: Mask) -> Params:
    """Return theta o m: the entries that the mask keeps, and exact zeros elsewhere, even in place of NaN.

    >>> prune({"w": torch.tensor([1.0, float("nan")])}, {"w": torch.tensor([True, False])})["w"].tolist()
    [1.0, 0.0]
    """
    return {
        name: torch.where(mask[name], tensor, torch.zeros_like(tensor)) if name in mask else tensor.clone()
        for name, tensor in theta.items()
    }


def count(theta: Mapping[str, Tensor], mask: Mask = FULL) -> int:
    """Return the number of entries that the mask keeps.

    >>> count({"w": torch.zeros(4), "b": torch.zeros(2)}, {"w": torch.tensor([True, False, False, True])})
    4
    """
    return sum(int(mask[name].sum()) if name in mask else tensor.numel() for name, tensor in theta.items())


def norm2(theta: Mapping[str, Tensor]) -> float:
    """Return ||theta||^2, the sum of squares over all entries, in double precision."""
    return float(sum(numbers([tensor.double().square().sum() for tensor in theta.values()])))


def numbers(scalars: Sequence[Tensor]) -> list[Any]:
    """Return tensors of one entry and one type as numbers, with a single transfer from the device."""
    return torch.stack(list(scalars)).tolist() if scalars else []


class HostCopy:
    """Numbers of a device on their way to the CPU; only reading them waits for the device.

    Args:
        tensor: The numbers, which must not change before they are read.

    >>> HostCopy(torch.arange(3)).tolist()
    [0, 1, 2]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arrived = tensor, None
        self._numbers: Any = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> Any:
        """Return the numbers, after waiting for them."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._tensor.tolist()
        return self._numbers


def most_together(entries: int, device: torch.device) -> int:
    """Return how many tensors of so many entries are best processed as one stack, and at least 1."""
    return max(1, most_entries(device) // max(1, entries))


def most_entries(device: torch.device) -> int:
    """Return how many entries are best processed at once."""
    return MOST_AT_ONCE.get(device.type, MOST_AT_ONCE["cpu"])


def spans_of(tensors: Mapping[str, Tensor]) -> list[Params]:
    """Return the tensors, in their order, in spans that are best processed at once.

    >>> tensors = {"w": torch.zeros(3, 2), "b": torch.zeros(3), "large": torch.zeros(1 << 17)}
    >>> [list(span) for span in spans_of(tensors)]
    [['w', 'b'], ['large']]
    """
    spans: list[Params] = []
    size = 0
    for name, tensor in tensors.items():
        size += tensor.numel()
        if not spans or size > most_entries(tensor.device):
            spans.append({})
            size = tensor.numel()
        spans[-1][name] = tensor
    return spans


def entries_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of entries of all tensors."""
    return sum(tensor.numel() for tensor in tensors.values())


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of tensors in batches of one shape, which a single operation can process as a stack.

    Batches fit into memory. Large tensors gain nothing from it on a CPU.

    >>> alike([torch.zeros(2), torch.zeros(3), torch.ones(2)])
    [[0, 2], [1]]
    """
    shapes: dict[tuple[torch.Size, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        shapes.setdefault((tensor.shape, tensor.device), []).append(number)
    batches = []
    for (shape, device), members in shapes.items():
        together = most_together(shape.numel(), device)
        batches += [members[start : start + together] for start in range(0, len(members), together)]
    return batches


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> Params:
    """Return the tensors on a device; tensors that are already there are not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; a copy to a GPU is asynchronous."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def device_of(theta: Mapping[str, Tensor]) -> torch.device:
    """Return the device of theta."""
    return next(iter(theta.values())).device


def has_room(device: torch.device, share: float = 0.5) -> bool:
    """Return whether this share of a GPU's memory is free, or reserved by torch and unused; False for a CPU."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    if free > share * total:  # torch takes a millisecond to say what it has reserved
        return True
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > share * total


def storage_of(theta: Mapping[str, Tensor]) -> torch.device:
    """Return where tensors are kept for later rounds: beside theta while a quarter of a GPU is free, else on the CPU.

    Values are the same in both places: they are computed entry by entry.
    """
    device = device_of(theta)
    return device if has_room(device, 0.25) else torch.device("cpu")


def all_finite(theta: Mapping[str, Tensor], mask: Mask = FULL) -> bool:
    """Return whether every entry that the mask keeps is finite."""
    return all(numbers([torch.isfinite(t[mask[name]] if name in mask else t).all() for name, t in theta.items()]))


def check_mask(mask: object, theta: Mapping[str, Tensor], whose: str, any_device: bool = False) -> None:
    """Raise InputError unless a mask fits theta: names of parameters, and bool tensors of their shapes and devices.

    Args:
        mask: Mask to check.
        theta: Parameters by name; only shapes and devices are read.
        whose: Subject of the message, such as "the mask of client 3".
        any_device: Whether the mask may be on another device.
    """
    if not isinstance(mask, Mapping):
        raise InputError(f"{whose} is a {type(mask).__name__}; return a dict from parameter name to bool tensor")
    for name, kept in mask.items():
        if name not in theta:
            raise InputError(
                f"{whose} names '{name}', which is not a parameter of the model; it has {', '.join(theta)}"
            )
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
            kind = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise InputError(f"{whose} is {kind} for '{name}'; make it a bool tensor, such as `scores > threshold`")
        if kept.shape != theta[name].shape:
            raise InputError(
                f"{whose} has shape {tuple(kept.shape)} for '{name}', whose shape is {tuple(theta[name].shape)};"
                f" return one bool for each entry"
            )
        if kept.device != theta[name].device and not any_device:
            raise InputError(
                f"{whose} is on {kept.device} for '{name}', which is on {theta[name].device}; move it there"
            )
