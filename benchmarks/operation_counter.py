"""Count the tensor operations and the synchronisations of a piece of code."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods that wait for a GPU."""
WAITS = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
    "aten::bincount",
    "aten::_local_scalar_dense",
)
"""Operations whose result the host needs."""


class OperationCounter(TorchDispatchMode):
    """A context that counts operations, views and synchronisations.

    On a GPU, torch reports each synchronisation itself. On a CPU, calls are counted that would wait for a GPU if their
    tensor were on one. Since some of these tensors are on the CPU in any case, this is an upper bound.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        """The operations by name."""
        self._depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count one operation and run it."""
        name = func._schema.name
        self.names[name] += 1
        views = name == "aten::detach" or any(
            a.alias_info and not a.alias_info.is_write for a in func._schema.arguments
        )
        self.counts["views" if views else "operations"] += 1
        by_mask = name == "aten::index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if self._device.type != "cuda" and (by_mask or name in WAITS) and not self._depth:
            self.counts["synchronisations"] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the block does, synchronisations included."""
        with self, self._reported() if self._device.type == "cuda" else self._read():
            yield

    @contextmanager
    def _reported(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        self.counts["synchronisations"] += sum("synchroniz" in str(warning.message) for warning in caught)

    @contextmanager
    def _read(self) -> Iterator[None]:
        before: dict[str, Callable[..., Any]] = {name: getattr(Tensor, name) for name in READS}
        for name, method in before.items():
            setattr(Tensor, name, self._counted(method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(Tensor, name, method)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts["synchronisations"] += not self._depth
            self._depth += 1  # one method may call another
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1

        return call
