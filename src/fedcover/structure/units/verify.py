"""Trying units out: a smaller copy must give what the masked model gives, or its units are left whole."""

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.params import Params, prune, put_params
from fedcover.seeding import ambient, generator
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.dependency_graph import Found
from fedcover.structure.units.group import UnitGroup, layer_of
from fedcover.structure.units.slicing import cuts_of, smaller_copy

PATTERNS = 4
MORE_RUNS = 8
"""Runs of a small network in which each group has a pattern of its own."""
MOST_INPUTS = 16
WORK = 3e7
"""About how many multiply-adds a dry run may take for more inputs than the example has."""
MIXED = "its outputs differ; units are mixed on their way, as by a softmax or a layer norm"


def verify_groups(structure: ModelStructure, found: Sequence[Found]) -> tuple[tuple[UnitGroup, ...], dict[str, str]]:
    """The groups that can be cut, and for the layers of all others the reason.

    Units that can only go together, such as the channels of an attention head, are first met one by one; where that
    fails, the coarser ones of ``Found.coarser`` are tried.
    """
    first, stage = tuple(one.finest for one in found), DryRun(structure)
    if not first or not stage.fault_of(first):
        return first, {}
    groups: tuple[UnitGroup, ...] = ()
    faults: dict[str, str] = {}
    for one in found:
        reason = ""
        for group in (one.finest, *one.coarser()):
            fault = stage.fault_of((*groups, group))
            if not fault:
                groups += (group,)
                break
            reason = reason or fault
        else:
            faults |= {layer_of(member.tensor): reason for member in one.finest.members if member.incoming}
    return groups, faults


class DryRun:
    """Where units of a network are tried out against the masked model."""

    def __init__(self, structure: ModelStructure) -> None:
        self._structure = structure

    def fault_of(self, groups: Sequence[UnitGroup]) -> str:
        """Why these groups cannot be cut together, by dry runs against the masked model; empty if they can.

        Parameters are random, since an output layer that starts at zero would hide every fault, and drawn anew for
        every run: what a maximum mixes shows only where the others are below 0.
        """
        structure, rng = self._structure, generator(0, "dry run")
        orders = [torch.randperm(group.size, generator=rng) for group in groups]
        try:
            with torch.no_grad(), one_thread(), ambient(0, "dry run"):
                dense, inputs, tolerance = self._props
                for run in range(PATTERNS + (MORE_RUNS if _work(structure) < WORK / MOST_INPUTS else 0)):
                    theta = _parameters(structure, rng)
                    mask: dict[str, Tensor] = {}
                    for group, order in zip(groups, orders, strict=True):
                        # What a narrow network hides, as behind a ReLU that is 0, shows in one of mixed widths.
                        pattern = run if run < PATTERNS else int(torch.randint(PATTERNS, (), generator=rng))
                        group.restrict(mask, theta, _patterns(order)[pattern])
                    put_params(dense, prune(theta, mask))
                    small = smaller_copy(dense, cuts_of(groups, mask))
                    expected = dense(inputs)
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        got = small(inputs)
                    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=MIXED)
        except Exception as error:
            return "a smaller copy fails a dry run: " + str(error).partition("\n")[0]
        return ""

    @cached_property
    def _props(self) -> tuple[nn.Module, Tensor, float]:
        """A copy of the model in evaluation mode, inputs that differ, and how well results must agree."""
        model, inputs = copy.deepcopy(self._structure.model).eval(), _inputs(self._structure)
        try:
            double, precise = copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs
            double(precise)
            return double, precise, 1e-8
        except Exception:  # such as a module that makes its input float32
            return model, inputs, math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in model.parameters()))


def _patterns(order: Tensor) -> tuple[Tensor, ...]:
    """Units to try: every second one, all but one, half of them, and one alone."""
    size = len(order)
    return torch.arange(size) % 2 == 0, order < max(1, size - 1), order < (size + 1) // 2, order < 1


def _parameters(structure: ModelStructure, rng: torch.Generator) -> Params:
    """Random ones, of about the size at which layers start."""
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(math.prod(shape[1:]))
        for name, shape in structure.shapes.items()
    }


def _inputs(structure: ModelStructure) -> Tensor:
    """The example and random inputs like it: where all inputs or all tokens are alike, attention hides its faults."""
    given = structure.example
    shape = (max(len(given), min(MOST_INPUTS, int(WORK / max(1.0, _work(structure))))), *given.shape[1:])
    blank = given.is_floating_point() and not bool(given.any())
    if given.is_floating_point():
        drawn = [torch.randn(shape).to(given), torch.rand(shape).to(given)]
    else:
        drawn = [torch.randint(_characters(structure), shape).to(given.dtype)]
    for more in drawn:
        found = more if blank else torch.cat([given, more])
        with suppress(Exception):  # a model may not take these, such as one that takes a logarithm of its input
            scores = copy.deepcopy(structure.model).eval()(found)
            if all(bool(one.isfinite().all()) for one in ([scores] if isinstance(scores, Tensor) else scores)):
                return found
    return given


def _work(structure: ModelStructure) -> float:
    """Multiply-adds of one example's pass."""
    return sum(math.prod(shape) * structure.macs[name] for name, shape in structure.shapes.items())


def _characters(structure: ModelStructure) -> int:
    """Whole numbers below this are inputs that a model can read."""
    tables = [layer.num_embeddings for layer in structure.model.modules() if isinstance(layer, nn.Embedding)]
    return min(tables, default=int(structure.example.max()) + 2)
