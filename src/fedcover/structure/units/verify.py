"""Verification of units: a smaller copy must give the outputs of the masked model, or the units stay whole."""

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedcover._threads import one_thread
from fedcover.params import Params, prune, put_params
from fedcover.seeding import ambient, generator
from fedcover.structure.attention import CannotCutError
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.candidates import Candidate
from fedcover.structure.units.group import UnitGroup, layer_of
from fedcover.structure.units.slicing import cuts_of, smaller_copy

PATTERNS = 4
MORE_RUNS = 8
"""Additional dry runs of a small model, in which each group has its own pattern."""
MOST_INPUTS = 16
WORK = 3e7
"""About the number of multiply-adds that a dry run may take for more inputs than the example has."""
FAILS = "their number is fixed in the code: a smaller copy of the model fails in a dry run with"
MIXED = (
    "a smaller copy of the model has other outputs in a dry run: each of them depends on the others or on their number"
)


def verify_groups(
    structure: ModelStructure, candidates: Sequence[Candidate]
) -> tuple[tuple[UnitGroup, ...], dict[str, str]]:
    """Return the groups that can be cut, and the layers of all others with the reason.

    Units that can only be removed together, such as the channels of an attention head, are first tried one by one;
    where that fails, the larger units of ``Candidate.coarser`` are tried.
    """
    finest, dry_run = tuple(group for candidate in candidates for group in candidate.finest), DryRun(structure)
    if not finest or not dry_run.fault_of(finest):
        return finest, {}
    groups: tuple[UnitGroup, ...] = ()
    faults: dict[str, str] = {}
    for candidate in candidates:
        reason = ""
        for option in (candidate.finest, *candidate.coarser()):
            fault = dry_run.fault_of((*groups, *option))
            if not fault:
                groups += option
                break
            reason = fault
        else:
            members = (member for group in candidate.finest for member in group.members)
            faults |= {layer_of(member.tensor): reason for member in members if member.incoming}
    return groups, faults


class DryRun:
    """A comparison of smaller copies of a model with the masked model, on random parameters and inputs."""

    def __init__(self, structure: ModelStructure) -> None:
        self._structure = structure

    def fault_of(self, groups: Sequence[UnitGroup]) -> str:
        """Return the reason why these groups cannot be cut together; an empty string if they can.

        Parameters are random, since an output layer that starts at zero would hide every fault, and are drawn again
        for every run: a maximum over units shows a fault only where the other units are below 0.
        """
        structure, rng = self._structure, generator(0, "dry run")
        orders = [torch.randperm(group.size, generator=rng) for group in groups]
        try:
            with torch.no_grad(), one_thread(), ambient(0, "dry run"):
                dense, inputs, tolerance = self._setup
                for run in range(PATTERNS + (MORE_RUNS if _work(structure) < WORK / MOST_INPUTS else 0)):
                    theta = _parameters(structure, rng)
                    mask: dict[str, Tensor] = {}
                    for group, order in zip(groups, orders, strict=True):
                        # A narrow model may hide a fault, as behind a ReLU that is 0; mixed patterns show it.
                        pattern = run if run < PATTERNS else int(torch.randint(PATTERNS, (), generator=rng))
                        group.restrict(mask, theta, _patterns(order)[pattern])
                    put_params(dense, prune(theta, mask))
                    small = smaller_copy(dense, cuts_of(groups, mask))
                    expected = dense(inputs.clone())  # a model may write to its input
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        actual = small(inputs.clone())
                    if not _close(actual, expected, tolerance):
                        return MIXED
        except CannotCutError as error:
            return str(error)
        except Exception as error:
            return f"{FAILS} '{str(error).partition(chr(10))[0] or type(error).__name__}'"
        return ""

    @cached_property
    def _setup(self) -> tuple[nn.Module, Tensor, float]:
        """A copy of the model in evaluation mode, inputs that differ, and the tolerance of the comparison."""
        model, inputs = copy.deepcopy(self._structure.model).eval(), _inputs(self._structure)
        try:
            double, precise = copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs
            double(precise.clone())
            return double, precise, 1e-8
        except Exception:  # such as a module that converts its input to float32
            return model, inputs, math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in model.parameters()))


def _close(actual: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two outputs, which may be nested, have the same form and are equal up to a tolerance."""
    ours, theirs = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _patterns(order: Tensor) -> tuple[Tensor, ...]:
    """Return the units that stay in each pattern: every second one, all but one, half of them, and a single one."""
    size = len(order)
    return torch.arange(size) % 2 == 0, order < max(1, size - 1), order < (size + 1) // 2, order < 1


def _parameters(structure: ModelStructure, rng: torch.Generator) -> Params:
    """Return random parameters, of about the size of those of new layers."""
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(math.prod(shape[1:]))
        for name, shape in structure.shapes.items()
    }


def _inputs(structure: ModelStructure) -> Tensor:
    """Return the example and random inputs like it: equal inputs or equal tokens would hide faults of attention."""
    example = structure.example
    shape = (max(len(example), min(MOST_INPUTS, int(WORK / max(1.0, _work(structure))))), *example.shape[1:])
    blank = example.is_floating_point() and not bool(example.any())
    if example.is_floating_point():
        drawn = [torch.randn(shape).to(example), torch.rand(shape).to(example)]
    else:
        drawn = [torch.randint(_characters(structure), shape).to(example.dtype)]
    for random_inputs in drawn:
        inputs = random_inputs if blank else torch.cat([example, random_inputs])
        with suppress(Exception):  # some models refuse these, such as one that takes a logarithm of its input
            outputs = copy.deepcopy(structure.model).eval()(inputs.clone())
            if all(bool(scores.isfinite().all()) for scores in ([outputs] if isinstance(outputs, Tensor) else outputs)):
                return inputs
    return example


def _work(structure: ModelStructure) -> float:
    """Return the multiply-adds of the forward pass of one example."""
    return sum(math.prod(shape) * structure.macs[name] for name, shape in structure.shapes.items())


def _characters(structure: ModelStructure) -> int:
    """Return the number of tokens that a model can read."""
    tables = [layer.num_embeddings for layer in structure.model.modules() if isinstance(layer, nn.Embedding)]
    return min(tables, default=int(structure.example.max()) + 2)
