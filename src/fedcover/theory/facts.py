"""What a server measures exactly: the facts of one round, and how long ago each entry was last held."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of, gamma_min
from fedcover.masks.holders import holder_sets
from fedcover.masks.noise import pruning_noise
from fedcover.params import Mask, Params, norm2
from fedcover.theory.sentences import Remedy, default_remedy, uncovered_sentence

NEVER = torch.iinfo(torch.int16).max - 1
"""The age of an entry that no client has held yet, or not for that many rounds."""


@dataclass(frozen=True)
class Facts:
    """The exact measurements of one round."""

    round: int
    clients: int
    """N: the number of clients whose updates were used."""
    gamma_min: int
    error: float
    """sum_n e_n: the clients' pruning errors ||theta - theta o m_n||^2, or the errors of their complements."""
    uncovered: Mapping[str, float]
    """For each tensor with entries that no client held, their share of it."""
    regions: int | None = None
    """K; None unless it was counted, which takes a pass over all entries for each mask."""


def measure(
    theta: Params,
    masks: Sequence[Mask],
    round: int = 1,
    count_regions: bool = False,
    counts: Mapping[str, Tensor] | None = None,
    errors: Sequence[float] | None = None,
) -> Facts:
    """Return the facts of a round.

    Args:
        theta: theta_q, the model before the round.
        masks: The masks of the clients whose updates were used.
        round: The number of the round.
        count_regions: Whether to count regions, which Theorem 2 needs.
        counts: The coverage by the masks, if it has been computed already.
        errors: The error of each client's complement (``complement_error``), or nothing if complements are frozen. By
            default the pruning errors.

    >>> theta = {"w": torch.tensor([3.0, 4.0])}
    >>> measure(theta, [{"w": torch.tensor([False, True])}, {"w": torch.tensor([False, True])}])
    Facts(round=1, clients=2, gamma_min=0, error=18.0, uncovered={'w': 0.5}, regions=None)
    """
    if not masks:
        raise InputError("masks must have at least one mask, of a client of the round; got none")
    counts = coverage_of(masks, theta) if counts is None else counts
    error = norm2(theta) * math.fsum(pruning_noise(theta, masks)) if errors is None else math.fsum(errors)
    regions = len(holder_sets(masks, theta).sizes) if count_regions else None
    return Facts(round, len(masks), gamma_min(counts), error, _uncovered_shares(counts), regions)


def check_coverage(counts: Mapping[str, Tensor], round: int, remedy: Remedy = default_remedy) -> None:
    """Raise InputError if an entry has no holder; the message names the tensor with the largest uncovered share."""
    if shares := _uncovered_shares(counts):
        raise InputError(uncovered_sentence(shares, round, remedy))


def _uncovered_shares(counts: Mapping[str, Tensor]) -> dict[str, float]:
    shares = {name: float((total == 0).double().mean()) for name, total in counts.items() if total.numel()}
    return {name: share for name, share in shares.items() if share}


@dataclass
class Ages:
    """For each entry the number of rounds since it was last held, for schedules that cover the model in turns.

    It takes two bytes for each entry, however many rounds are added.

    >>> ages = Ages()
    >>> for counts in ([2, 0], [0, 1], [3, 0], [1, 0], [1, 1]):
    ...     ages.add({"w": torch.tensor(counts)})
    ...     print(ages.window(), ages.longest)
    None None
    2 2
    2 2
    3 3
    1 3
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    rounds: int = 0
    longest: int | None = None
    """The least number such that any that many rounds in a row cover every entry; None if there is none yet."""

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Add the coverage of a round, as ``coverage_of`` returns it."""
        for name, covered in counts.items():
            age = self.by_name.get(name, torch.full_like(covered, NEVER, dtype=torch.int16))
            self.by_name[name] = torch.where(covered > 0, 0, (age + 1).clamp_max(NEVER)).to(torch.int16)
        self.rounds += 1
        window = self.window()
        # The first time that all entries are covered, the last of them had no holder in any earlier round.
        first = self.rounds if self.longest is None else self.longest
        self.longest = None if window is None else max(window, first)

    def window(self) -> int | None:
        """Return the least number of rounds, up to the last, that together cover every entry; None if none does."""
        if not self.by_name:
            raise InputError("the ages are empty: add the coverage of a round first")
        oldest = max(int(age.max()) for age in self.by_name.values() if age.numel())
        return 1 + oldest if oldest < NEVER else None
