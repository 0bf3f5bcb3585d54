"""PT: a pre-trained mask, one of the paper's policies."""

from fedcover.errors import check_whole
from fedcover.policies.ranked import FixedRanks
from fedcover.policies.registry import register
from fedcover.policies.weight_pruning import weight_pruning


@register("PT")
def pretrained_mask(freeze_after: int = 3) -> FixedRanks:
    """PT: the masks of WP, updated in the first rounds and frozen from then on.

    Args:
        freeze_after: Last round in which masks are updated; at least 1.
    """
    check_whole("freeze_after", freeze_after, 1)
    return FixedRanks(weight_pruning(), freeze_after)
