"""Descriptions of Python objects as text, by which two processes can compare what they run.

A description is a text, or a dict of descriptions whose key ``""`` names the object itself. It contains what an object
is made of: attributes, tensors, the code of functions and classes that are not part of a library, and the values in
their closures. It never contains an address in memory, so equal objects have equal descriptions in every process.
"""

import functools
import hashlib
import json
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor, nn

from fedcover.federation.checkpoint import digest_of

Description = Union[str, "dict[str, Description]"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), types.EllipsisType, torch.dtype, torch.device, np.dtype)
LONGEST = 200
"""Longest text of a sequence; a longer one is replaced by a digest."""
LIBRARIES = ("fedcover", "torch", "numpy", "builtins")
FOLDERS = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib"))
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
OF_RECURRENT_LAYERS = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Lists of a layer's own parameters, whose values are not part of what the layer is."""
OF_EVERY_CLASS = frozenset(
    ("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__dataclass_fields__", "_abc_impl",
     "__dataclass_params__", "__match_args__", "__abstractmethods__", "__parameters__", "__firstlineno__",
     "__static_attributes__", "__qualname__", "__annotate_func__", "__annotations_cache__")
)  # fmt: skip


def describe(value: object) -> Description:
    """Return the description of an object.

    >>> describe(functools.partial(max, default=0.5))
    {'': 'partial', 'func': 'builtins.max', 'keywords': {'': 'dict', 'default': '0.5'}}
    >>> describe(nn.Dropout(0.25))
    {'': 'Dropout', 'p': '0.25', 'inplace': 'False'}
    """
    return _Describer().value(value)


def describe_layers(model: nn.Module) -> dict[str, Description]:
    """Return a text for each layer of a model, by name; the values of parameters are left out."""
    describer = _Describer()
    return {name: _text(describer.layer(layer)) for name, layer in model.named_modules()}


def digest(description: object) -> str:
    """Return a short digest of a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]


class _Describer:
    """Describes one object; an object inside itself is only named there."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def value(self, value: Any) -> Description:
        if isinstance(value, Enum):
            return str(value)
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, PurePath | types.ModuleType):
            return str(value) if isinstance(value, PurePath) else value.__name__
        if isinstance(value, Tensor | np.ndarray):
            tensor = torch.as_tensor(value)
            return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {digest_of({'': tensor})[:8]}"
        if id(value) in self._open:
            return type(value).__name__
        self._open.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._open.discard(id(value))

    def layer(self, layer: nn.Module) -> Description:
        """Return the description of a module without its children and the values of its parameters."""
        parts = self._attributes(layer, OF_EVERY_MODULE | OF_RECURRENT_LAYERS)
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                frozen = "" if parameter.requires_grad else " frozen"
                kind = str(parameter.dtype).removeprefix("torch.")
                parts[name] = f"{kind} {tuple(parameter.shape)}{frozen}"
        parts |= {name: self.value(buffer) for name, buffer in layer._buffers.items()}
        hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
        return self._named(layer, {**parts, **({"hooks": self.value(hooks)} if hooks else {})})

    def _parts(self, value: Any) -> Description:
        if isinstance(value, Mapping):
            return {"": type(value).__name__, **{str(key): self.value(inner) for key, inner in value.items()}}
        if isinstance(value, set | frozenset):
            return self._sequence(sorted((self.value(inner) for inner in value), key=json.dumps))
        if isinstance(value, list | tuple):
            return self._sequence([self.value(inner) for inner in value])
        if isinstance(value, functools.partial):
            parts = {"args": self.value(value.args) if value.args else "", "keywords": self.value(value.keywords)}
            return {"": "partial", "func": self.value(value.func), **{k: part for k, part in parts.items() if part}}
        if isinstance(value, types.MethodType):
            return {"": value.__qualname__, "self": self.value(value.__self__), "code": self.value(value.__func__)}
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return _name(value) if _of_library(value.__module__) else {"": _name(value), "code": self._class(value)}
        if isinstance(value, nn.Module):
            layers = {name or type(value).__name__: self.layer(layer) for name, layer in value.named_modules()}
            values = {f"{name} values": self.value(parameter) for name, parameter in value.named_parameters()}
            return layers | values if len(layers) > 1 or values else layers[type(value).__name__]
        if callable(value) and hasattr(value, "__qualname__"):  # a built-in function
            return f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"
        if is_dataclass(value):
            return self._named(value, {field.name: self.value(getattr(value, field.name)) for field in fields(value)})
        return self._named(value, self._attributes(value) or self._reduced(value))

    def _sequence(self, inner: Sequence[Description]) -> Description:
        text = f"[{', '.join(map(str, inner))}]"
        if len(text) <= LONGEST and all(isinstance(one, str) for one in inner):
            return text
        if len(inner) > LONGEST:
            return f"{len(inner)} items {digest(inner)}"
        return {"": f"{len(inner)} items", **{str(number): one for number, one in enumerate(inner)}}

    def _named(self, value: object, parts: dict[str, Description]) -> Description:
        """Return the parts of an object with its class, and the digest of the class's code if it is the user's."""
        kind = type(value)
        name = kind.__name__ if _of_library(kind.__module__) else f"{kind.__name__} (code {digest(self._class(kind))})"
        return {"": name, **parts} if parts else name

    def _attributes(self, value: object, without: frozenset[str] = frozenset()) -> dict[str, Description]:
        """Return the attributes of an object, without values that are cached."""
        slots = [slot for cls in type(value).__mro__ for slot in _slots(cls)]
        named = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)} | getattr(value, "__dict__", {})
        cached = {
            n for cls in type(value).__mro__ for n, a in vars(cls).items() if isinstance(a, functools.cached_property)
        }
        return {name: self.value(part) for name, part in named.items() if name not in without | cached}

    def _reduced(self, value: object) -> dict[str, Description]:
        """Return what pickle would store of an object without attributes, such as a range; nothing if it cannot."""
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:
            return {}
        parts = reduced[1:3] if isinstance(reduced, tuple) else ()
        return {"state": self.value(parts)} if any(parts) else {}

    def _class(self, kind: type) -> Description:
        """Return the code and constants of a class and of its bases, except those of libraries."""
        parts: dict[str, Description] = {}
        for cls in kind.__mro__:
            if _of_library(cls.__module__):
                continue
            for name, part in vars(cls).items():
                part = getattr(part, "__func__", None) or getattr(part, "fget", None) or getattr(part, "func", part)
                generated = isinstance(part, types.FunctionType) and part.__code__.co_filename == "<string>"
                if name not in OF_EVERY_CLASS and not generated:
                    parts[f"{cls.__name__}.{name}"] = self.value(part)
        return parts

    def _function(self, function: types.FunctionType) -> Description:
        name = f"{function.__module__}.{function.__qualname__}"
        if _of_library(function.__module__):
            code, parts = None, dict[str, Description]()
        else:
            code, parts = function.__code__, {"code": self._code(function.__code__, function.__doc__)}
        defaults = dict(zip(_arguments(function)[::-1], (function.__defaults__ or ())[::-1], strict=False))
        parts |= {key: self.value(v) for key, v in {**defaults, **(function.__kwdefaults__ or {})}.items() if code}
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            parts[key] = self.value(cell.cell_contents) if _filled(cell) else "not set"
        for key in _names(code) if code else ():
            if key in function.__globals__ and not _of_library(_home(function.__globals__[key])):
                parts.setdefault(key, self.value(function.__globals__[key]))
        return {"": name, **parts} if parts else name

    def _code(self, code: types.CodeType, doc: str | None = None) -> str:
        constants = [
            self._code(constant) if isinstance(constant, types.CodeType) else self.value(constant)
            for constant in code.co_consts
            if doc is None or constant != doc
        ]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"{digest([code.co_code.hex(), constants, list(code.co_names)])} of Python {version}"


def _text(description: Description) -> str:
    """Return a description in one line, such as ``Dropout(p=0.5, inplace=False)``.

    >>> _text({"": "Dropout", "p": "0.5"})
    'Dropout(p=0.5)'
    """
    if isinstance(description, str):
        return description
    inner = ", ".join(f"{name}={_text(part)}" for name, part in description.items() if name)
    return f"{description.get('', '')}({inner})"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _slots(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [slot for slot in slots if slot not in ("__dict__", "__weakref__")]


def _arguments(function: types.FunctionType) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _names(code: types.CodeType) -> list[str]:
    """Return the global names that code and the functions inside it use."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _home(value: object) -> str:
    """Return the module of a function or class, or of a module itself; "" for other values."""
    if isinstance(value, types.ModuleType):
        return "builtins"  # its functions are used by name, which is part of the code
    return str(getattr(value, "__module__", "") or "") if callable(value) else ""


@functools.cache
def _of_library(module: str | None) -> bool:
    """Return whether a module belongs to a library, whose code is described by its version and not by its contents."""
    if module is None:
        return False
    if module.partition(".")[0] in LIBRARIES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in FOLDERS)
