"""Watching the operations of a forward pass, one by one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode, ABC):
    """A context in which ``seen`` is called with every operation that torch runs; subclasses implement it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would otherwise import its compiler, which takes a second, to switch it off here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, out)
        return out

    @abstractmethod
    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Handle one operation, after it has run.

        Args:
            func: The operation, such as ``torch.ops.aten.addmm.default``.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            out: Its result.
        """


@contextmanager
def unfused() -> Iterator[None]:
    """Make torch run attention and recurrent layers as single operations that can be followed."""
    before, fast = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
        torch.backends.mha.set_fastpath_enabled(fast)
