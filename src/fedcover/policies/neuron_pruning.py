"""NP: neuron pruning by the norm of incoming weights, one of the paper's policies."""

from fedcover.policies.ranked import Ranked, unit_blocks
from fedcover.policies.registry import register


@register("NP")
def neuron_pruning() -> Ranked:
    """NP: each hidden layer keeps the units with the largest L1 norm of incoming weights."""
    return Ranked("NP", lambda structure: unit_blocks(structure, "NP", in_order=False))
