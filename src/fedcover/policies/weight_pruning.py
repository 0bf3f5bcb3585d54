"""WP: weight pruning by magnitude, one of the paper's policies."""

from fedcover.budgets import Codebook
from fedcover.policies.ranked import Block, Kernels, Ranked, Weights, codebook_of
from fedcover.policies.registry import register
from fedcover.structure.trace import ModelStructure


@register("WP")
def weight_pruning() -> Ranked:
    """WP: each hidden weight tensor keeps its largest weights, ranked again every round."""
    return Ranked("WP", _blocks)


def _blocks(structure: ModelStructure) -> tuple[tuple[Block, ...], Codebook]:
    """Return one block per hidden weight tensor, and the model's codebook.

    A model may declare, as the paper's LeNet does, that its convolutions are pruned by whole kernels.
    """
    by_kernel = bool(getattr(structure.model, "prunes_kernels", False))
    kernels = {name for name in structure.hidden if by_kernel and len(structure.shapes[name]) > 2}
    blocks = tuple(Kernels(name) if name in kernels else Weights(name) for name in structure.hidden)
    return blocks, codebook_of(structure, "WP")
