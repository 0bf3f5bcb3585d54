"""FS: a fixed sub-network, one of the paper's policies."""

from fedcover.policies.ranked import Ranked, unit_blocks
from fedcover.policies.registry import register


@register("FS")
def fixed_subnetwork() -> Ranked:
    """FS: each hidden layer keeps its first units, the same in every round."""
    return Ranked("FS", lambda structure: unit_blocks(structure, "FS", in_order=True))
