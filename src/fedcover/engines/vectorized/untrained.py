"""Tensors that no client of a batch trains, as with FedPart: a step computes and stores nothing for them.

They have no gradient and no moments, and no backward pass goes below the lowest tensor that a client trains.
"""

import math
from collections.abc import Sequence

from fedcover.engines.vectorized import sub_models
from fedcover.masks.cost import kept_entries
from fedcover.structure.trace import ModelStructure
from fedcover.training.client import Job
from fedcover.training.steps.partial import KNOWN

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
    structures = [job.task.structure(job.population.examples.example()) for job in jobs]
    if compiled and structures[0].work < sub_models.WORTHWHILE:
        return frozenset()
    kept = kept_entries([(structure, job.mask) for structure, job in zip(structures, jobs, strict=True)])
    untrained = frozenset.intersection(*(frozenset(n for n, count in one.items() if not count) for one in kept))
    return untrained if _saved(structures[0], untrained) >= LEAST_SAVED else frozenset()


def _sees_whole(job: Job) -> bool:
    """Return whether a client sees the whole model, and nothing but its update needs gradients outside its mask."""
    options = job.options
    return bool(options and options.complement and not options.has_beyond(*KNOWN) and not job.recipe.transforms)


def _saved(structure: ModelStructure, untrained: frozenset[str]) -> float:
    """Return the share of the parameters, or of the multiply-adds, that some tensors have; the larger one."""
    sizes = {name: math.prod(shape) for name, shape in structure.shapes.items()}
    entries = sum(sizes[name] for name in untrained) / sum(sizes.values())
    work = sum(structure.macs[name] * sizes[name] for name in untrained)
    return max(entries, work / structure.work if structure.work else 0.0)
