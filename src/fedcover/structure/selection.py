"""The choice of layers that may be pruned, by names and patterns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fedcover.errors import InputError
from fedcover.structure.trace import ModelStructure


def select_layers(structure: ModelStructure, only: Sequence[str], skip: Sequence[str]) -> ModelStructure:
    """Return the structure of a model of which only some layers may be pruned.

    Args:
        structure: Structure of the model.
        only: Layers that may be pruned; all, if there is none. Each is the name of a parameter, of a layer or of a
            module with several layers, or a pattern of such names, in which * stands for any text.
        skip: Layers that stay whole, in the same form.

    Raises:
        InputError: If a name or pattern matches nothing, or if no hidden layer is left.

    >>> from torch import nn, zeros; from fedcover.structure.trace import trace
    >>> structure = trace(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)), zeros(2, 4))
    >>> select_layers(structure, (), ["1"]).hidden
    ('0.weight',)
    """
    wanted = _matches(structure, "only", only) if only else set(structure.shapes)
    left = wanted - _matches(structure, "skip", skip)
    selected = replace(structure, selected=frozenset(left))
    if structure.hidden and not selected.hidden:
        raise InputError(
            "only and skip leave no hidden layer to prune; widen only, narrow skip, or use the policy 'full'"
        )
    return selected


def _matches(structure: ModelStructure, setting: str, patterns: Sequence[str]) -> set[str]:
    """Return the parameters that any of the patterns matches; raise InputError for a pattern without a match."""
    chosen: set[str] = set()
    for pattern in patterns:
        names = {name for name in structure.shapes if any(fnmatchcase(one, pattern) for one in _names(name))}
        if not names:
            every = list(dict.fromkeys(one for name in structure.shapes for one in _names(name)))
            near = get_close_matches(pattern, every, n=1, cutoff=0.0)
            raise InputError(
                f"{setting} has '{pattern}', which matches no layer or parameter of the model; did you mean"
                f" '{near[0]}'?"
            )
        chosen |= names
    return chosen


def _names(parameter: str) -> Iterator[str]:
    """Yield a parameter's name, and those of its layer and of the modules around it."""
    while parameter:
        yield parameter
        parameter = parameter.rpartition(".")[0]
