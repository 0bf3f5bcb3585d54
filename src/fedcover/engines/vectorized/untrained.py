"""Tensors that no client of a batch trains, as with FedPart: a step computes and stores nothing for them.

They have no gradient and no moments, and no backward pass goes below the lowest tensor that a client trains.
"""

import math
from collections.abc import Sequence

from fedcover.engines.vectorized import sub_models
from fedcover.masks.cost import kept_entries
from fedcover.structure.trace import ModelStructure
from fedcover.training.client import Job
from fedcover.training.steps.partial import SUPPORTED

LEAST_SAVED = 0.25
"""The share of the parameters, or of the multiply-adds, from which a step of its own pays. Masks that leave out some
small tensors by chance would otherwise need a new step in every round."""


def untrained_tensors(jobs: Sequence[Job], compiled: bool) -> frozenset[str]:
    """Return the tensors of which no job trains an entry; none if too little would be saved without them.

    Args:
        jobs: The jobs of a batch.
        compiled: Whether steps may be compiled, which costs more than small models gain.
    """
    if not all(map(_sees_whole, jobs)):
        return frozenset()
    first = {id(job.task): job for job in jobs}.values()
    structures = {id(job.task): job.task.structure(job.population.examples.example()) for job in first}
    one = structures[id(jobs[0].task)]
    if compiled and one.work < sub_models.WORTHWHILE:
        return frozenset()
    kept = kept_entries([(structures[id(job.task)], job.mask) for job in jobs])
    untrained = frozenset.intersection(*(frozenset(n for n, count in each.items() if not count) for each in kept))
    return untrained if _saved(one, untrained) >= LEAST_SAVED else frozenset()


def _sees_whole(job: Job) -> bool:
    """Return whether a client sees the whole model, and nothing but its update needs gradients outside its mask."""
    options = job.options
    return bool(options and options.complement and not options.has_beyond(*SUPPORTED) and not job.recipe.transforms)


def _saved(structure: ModelStructure, untrained: frozenset[str]) -> float:
    """Return the share of the parameters, or of the multiply-adds, that some tensors have; the larger one."""
    sizes = {name: math.prod(shape) for name, shape in structure.shapes.items()}
    entries = sum(sizes[name] for name in untrained) / sum(sizes.values())
    work = sum(structure.macs[name] * sizes[name] for name in untrained)
    return max(entries, work / structure.work if structure.work else 0.0)
