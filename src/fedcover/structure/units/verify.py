"""Verification of units: a smaller copy must give the outputs of the masked model, or the units stay whole."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.data.inputs import Inputs, copy_of, count, join, map_inputs, parts_of, take
from fedcover.params import Params, prune, put_params
from fedcover.seeding import ambient, generator
from fedcover.structure.attention import CannotCutError
from fedcover.structure.calls import call_model, first_line
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.candidates import Candidate
from fedcover.structure.units.group import UnitGroup
from fedcover.structure.units.modes import WithoutDropout, set_mode
from fedcover.structure.units.slicing import cuts_of, smaller_copy

PATTERNS = 4
MORE_RUNS = 8
"""Additional dry runs of a small model, in which each group has its own pattern."""
TRIAL_RUNS = 2
"""Dry runs of a candidate by itself: every second unit, which an even number of heads can share, and all but one."""
MOST_INPUTS = 16
WORK = 3e7
"""About the number of multiply-adds that a dry run may take for more inputs than the example has."""
FAILS = "their number is fixed in the code: a smaller copy of the model fails in a dry run with"
MIXED = (
    "a smaller copy of the model has other outputs in a dry run: each of them depends on the others or on their number"
)

MIXED_IN_TRAINING = f"in training mode, {MIXED}, or on random numbers"


def verify_groups(
    structure: ModelStructure, candidates: Sequence[Candidate], modes: Sequence[bool]
) -> tuple[tuple[UnitGroup, ...], dict[str, str]]:
    """Return the groups that can be cut, and the layers of all others with the reason.

    Units that can only be removed together, such as the channels of an attention head, are first tried one by one;
    where that fails, the larger units of ``Candidate.coarser`` are tried.

    Args:
        structure: Structure of the model.
        candidates: Groups that may be cut.
        modes: For each mode of the model that must be tried, whether it is training mode.
    """
    finest, dry_run = tuple(group for candidate in candidates for group in candidate.finest), DryRun(structure, modes)
    if not finest or not dry_run.fault_of(finest):
        return finest, {}
    # Equal candidates, as the layers of a transformer have, are tried once and briefly; all together must then pass.
    tried: dict[object, tuple[int, str]] = {}
    chosen: list[tuple[UnitGroup, ...]] = []
    faults: dict[str, str] = {}
    for candidate in candidates:
        if candidate.key not in tried:
            tried[candidate.key] = _first_without_fault(partial(dry_run.fault_of, runs=TRIAL_RUNS), candidate, ())
        place, fault = tried[candidate.key]
        chosen.append(() if fault else _option(candidate, place))
        faults |= dict.fromkeys(candidate.layers, fault) if fault else {}
    groups = tuple(group for option in chosen for group in option)
    if not groups or not dry_run.fault_of(groups):
        return groups, faults
    return _one_after_another(dry_run, candidates)


def _one_after_another(
    dry_run: "DryRun", candidates: Sequence[Candidate]
) -> tuple[tuple[UnitGroup, ...], dict[str, str]]:
    """Return the groups that can be cut together with all earlier ones, and the layers of all others."""
    groups: tuple[UnitGroup, ...] = ()
    faults: dict[str, str] = {}
    for candidate in candidates:
        place, fault = _first_without_fault(dry_run.fault_of, candidate, groups)
        groups += () if fault else _option(candidate, place)
        faults |= dict.fromkeys(candidate.layers, fault) if fault else {}
    return groups, faults


def _options(candidate: Candidate) -> Iterator[tuple[UnitGroup, ...]]:
    """Yield the groups of a candidate, those with the smallest units first."""
    yield candidate.finest
    yield from candidate.coarser()


def _option(candidate: Candidate, place: int) -> tuple[UnitGroup, ...]:
    return next(islice(_options(candidate), place, None))


def _first_without_fault(
    fault_of: Callable[[tuple[UnitGroup, ...]], str], candidate: Candidate, beside: tuple[UnitGroup, ...]
) -> tuple[int, str]:
    """Return the place of the first option that can be cut beside other groups, or the fault of the last one."""
    fault = ""
    for place, option in enumerate(_options(candidate)):
        fault = fault_of((*beside, *option))
        if not fault:
            return place, ""
    return 0, fault


class DryRun:
    """A comparison of smaller copies of a model with the masked model, on random parameters and inputs."""

    def __init__(self, structure: ModelStructure, modes: Sequence[bool]) -> None:
        self._structure, self._modes = structure, modes

    def fault_of(self, groups: Sequence[UnitGroup], runs: int | None = None) -> str:
        """Return the reason why these groups cannot be cut together; an empty string if they can.

        Parameters are random, since an output layer that starts at zero would hide every fault, and are drawn again
        for every run: a maximum over units shows a fault only where the other units are below 0.

        Args:
            groups: Groups to cut.
            runs: Number of runs; all patterns, if it is left out, and more of them for a small model.
        """
        structure, rng = self._structure, generator(0, "dry run")
        runs = runs or PATTERNS + (MORE_RUNS if structure.work < WORK / MOST_INPUTS else 0)
        orders = [torch.randperm(group.size, generator=rng) for group in groups]
        try:
            with torch.no_grad(), one_thread(), ambient(0, "dry run"):
                dense, inputs, tolerance = self._setup
                for run in range(runs):
                    theta = _parameters(structure, rng)
                    mask: dict[str, Tensor] = {}
                    for group, order in zip(groups, orders, strict=True):
                        # A narrow model may hide a fault, as behind a ReLU that is 0; mixed patterns show it.
                        pattern = run if run < PATTERNS else int(torch.randint(PATTERNS, (), generator=rng))
                        group.restrict(mask, theta, _patterns(order)[pattern])
                    put_params(dense, prune(theta, mask))
                    small = smaller_copy(dense, cuts_of(groups, mask))
                    for training in self._modes:
                        if not _close(*_outputs(dense, small, inputs, training), tolerance):
                            return MIXED_IN_TRAINING if training else MIXED
        except CannotCutError as error:
            return str(error)
        except Exception as error:
            return f"{FAILS} '{first_line(error)}'"
        return ""

    @cached_property
    def _setup(self) -> tuple[nn.Module, Inputs, float]:
        """A copy of the model in evaluation mode, inputs that differ, and the tolerance of the comparison."""
        model, inputs = copy.deepcopy(self._structure.model).eval(), _inputs(self._structure)
        try:
            double = copy.deepcopy(model).double()
            precise = map_inputs(lambda part: part.double() if part.is_floating_point() else part, inputs)
            call_model(double, copy_of(precise))
            return double, precise, 1e-8
        except Exception:  # such as a module that converts its input to float32
            return model, inputs, math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in model.parameters()))


def _outputs(dense: nn.Module, small: nn.Module, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs of a smaller copy and of the masked model; in training, with the same random numbers."""
    outputs = []
    for model in (dense, small):
        set_mode(model, training, batch_norm=True)
        with warnings.catch_warnings(), ambient(0, "training") if training else nullcontext():
            if model is small:
                warnings.simplefilter("error")
            with WithoutDropout() if training else nullcontext():
                outputs.append(call_model(model, copy_of(inputs)))  # a model may write to its input
    return outputs[1], outputs[0]


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two outputs have the same shape and are equal up to a tolerance."""
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _patterns(order: Tensor) -> tuple[Tensor, ...]:
    """Return the units that stay in each pattern: every second one, all but one, half of them, and a single one."""
    size = len(order)
    return torch.arange(size) % 2 == 0, order < max(1, size - 1), order < (size + 1) // 2, order < 1


def _parameters(structure: ModelStructure, rng: torch.Generator) -> Params:
    """Return random parameters, of about the size of those of new layers."""
    return {  # drawn in float32, which takes a third of the time
        name: (torch.randn(shape, generator=rng) / math.sqrt(math.prod(shape[1:]))).double()
        for name, shape in structure.shapes.items()
    }


def _inputs(structure: ModelStructure) -> Inputs:
    """Return the example and random inputs like it: equal inputs or equal tokens would hide faults of attention."""
    example = structure.example
    rows = max(count(example), min(MOST_INPUTS, int(WORK / max(1.0, structure.work))))
    blank = not any(bool(part.any()) for part in parts_of(example).values())
    if not blank and structure.work > WORK:  # of a large model, one input of each kind
        example, rows = take(example, slice(1)), 1
    for draw in (torch.randn, torch.rand):
        random_inputs = map_inputs(partial(_like, structure, rows, draw), example)
        inputs = random_inputs if blank else join([example, random_inputs])
        with suppress(Exception):  # some models refuse these, such as one that takes a logarithm of its input
            if bool(call_model(copy.deepcopy(structure.model).eval(), copy_of(inputs)).isfinite().all()):
                return inputs
    return structure.example


def _like(structure: ModelStructure, rows: int, draw: Callable[..., Tensor], part: Tensor) -> Tensor:
    """Return random rows like those of a part of the example."""
    shape = (rows, *part.shape[1:])
    if part.is_floating_point():
        return draw(shape).to(part)
    several = not isinstance(structure.example, Tensor)
    if part.dtype == torch.bool or (several and int(part.max()) <= 1):  # such as a mask of attention
        return part[:1].expand(shape).clone()
    return torch.randint(_characters(structure, part), shape).to(part.dtype)


def _characters(structure: ModelStructure, part: Tensor) -> int:
    """Return the number of tokens that a model can read."""
    tables = [layer.num_embeddings for layer in structure.model.modules() if isinstance(layer, nn.Embedding)]
    return min(tables, default=int(part.max()) + 2)
