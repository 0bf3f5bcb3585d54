"""The comparison of a round's updates with each other, before they are averaged.

Screening needs medians over the cohort, and ``require_robustness`` needs the coverage by the accepted updates. Both are
known only after the last update, so updates are read twice: once to measure them, once to average them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedcover.aggregation.base import Aggregator, ClientUpdate
from fedcover.aggregation.screening import LEAST, ChangeSizes, Screening, change_sizes, clipped, excess
from fedcover.errors import ClientError, DivergedError, InputError, check_whole
from fedcover.federation.control_variates import uses_control_variates
from fedcover.federation.planned_round import PlannedRound
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


@dataclass
class RoundScreen:
    """What happens to each update of a round; by default nothing."""

    theta: Params = field(default_factory=dict)
    """The global model before the round."""
    sizes: Mapping[int, ChangeSizes] = field(default_factory=dict)
    """The sizes of the clients' changes."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """The largest change of each layer."""
    rejected: dict[int, str] = field(default_factory=dict)
    """The reason for each rejected client."""
    limited: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """What was cut of each client, for the record."""
    most_examples: float = math.inf
    """The largest number of examples with which a client counts."""
    enough: dict[str, Tensor] = field(default_factory=dict)
    """Where a layer has entries with too few holders: which of its entries have enough."""
    _masks: dict[int, tuple[Mask, Mask]] = field(default_factory=dict)

    def accepted(self, update: ClientUpdate) -> ClientUpdate:
        """Return an update as everything that follows sees it: its change is clipped."""
        size = self.sizes.get(update.client)
        return clipped(update, self.theta, size, self.bounds) if size is not None and self.bounds else update

    def averaged(self, update: ClientUpdate) -> ClientUpdate:
        """Return an accepted update as the aggregator sees it: with capped examples, where enough clients hold entries.

        The record still counts the client as a holder of all its entries.
        """
        if update.examples > self.most_examples:
            update = replace(update, examples=max(1, math.floor(self.most_examples)))
        return replace(update, mask=self._robust(update.mask)) if self.enough else update

    def all_rejected(self, index: int, lr: float) -> ClientError:
        """Return the error of a round in which no update was accepted, with the remedy."""
        if not self.rejected:
            return DivergedError(
                f"every client of round {index} diverged: no trained values are finite; lower lr (now {lr}) and start"
                f" again",
                index,
            )
        return ClientError(
            f"no client of round {index} is accepted: {next(iter(self.rejected.values()))}; raise screening.change, or"
            f" use screening.action=clip"
        )

    def _robust(self, mask: Mask) -> Mask:
        """Return the part of a mask that has enough holders; once for each mask object."""
        if id(mask) not in self._masks:
            cut = {name: mask[name] & enough if name in mask else enough for name, enough in self.enough.items()}
            self._masks[id(mask)] = (mask, {**mask, **cut})
        return self._masks[id(mask)][1]


def screen_round(
    federation: "Federation", planned: PlannedRound, updates: Iterable[ClientUpdate]
) -> tuple[Iterable[ClientUpdate], RoundScreen]:
    """Return the updates of a round and what happens to each; they are compared only if the federation asks for it.

    A sequence of updates is then read twice, and a stream is kept in memory.
    """
    if federation.screening is None and not federation.require_robustness:
        return updates, RoundScreen()
    updates = updates if isinstance(updates, Sequence) else list(updates)
    planned.clock.lap("train")
    screened = screen(federation, planned, updates)
    planned.clock.lap("aggregate")
    return updates, screened


def sizes_of(planned: PlannedRound, updates: Iterable[ClientUpdate]) -> Iterator[tuple[ClientUpdate, ChangeSizes]]:
    """Yield each finite update with the sizes of its changes, by which clients are compared."""
    gains = {plan.client.id: plan.options.gain for plan in planned.plans if plan.options}
    for update in updates:
        if update.is_finite():
            gain = gains.get(update.client, 1.0) if update.gain is None else update.gain
            yield update, change_sizes(update, planned.state.theta, gain)


def screen(federation: "Federation", planned: PlannedRound, updates: Iterable[ClientUpdate]) -> RoundScreen:
    """Compare the finite updates of a round with each other, and return what happens to each.

    Args:
        federation: The federation, with its screening and the robustness that it requires.
        planned: The round.
        updates: The updates of the round. They are read once, and not kept.
    """
    theta, rule = planned.state.theta, federation.screening or Screening(math.inf, examples=math.inf)
    result = RoundScreen(theta)
    masks, examples, sizes = dict[int, Mask](), dict[int, int](), dict[int, ChangeSizes]()
    for update, size in sizes_of(planned, updates):
        masks[update.client], examples[update.client], sizes[update.client] = update.mask, update.examples, size
    bounds = rule.bounds(sizes, theta)
    for client, size in sizes.items():
        if worst := excess(size, bounds):
            _judge(result, rule, client, *worst)
    if rule.action == "clip":
        result.sizes, result.bounds = sizes, bounds
    accepted = [client for client in masks if client not in result.rejected]
    if federation.aggregator.uses_examples and len(accepted) >= LEAST:
        result.most_examples = rule.examples * median(examples[client] for client in accepted)
        for client in accepted:
            if examples[client] > result.most_examples:
                reason = (
                    f"its {examples[client]} examples count as {math.floor(result.most_examples)},"
                    f" {rule.examples:g} times the median of the cohort"
                )
                factor = result.most_examples / examples[client]
                result.limited.setdefault(client, []).append({"factor": factor, "reason": reason})
    if need := holders_needed(federation.aggregator, federation.require_robustness, len(accepted)):
        counts = coverage_of([masks[client] for client in accepted], theta)
        enough = {name: count >= need for name, count in counts.items()}
        result.enough = {name: kept for name, kept in enough.items() if not bool(kept.all())}
    return result


def _judge(result: RoundScreen, rule: Screening, client: int, layer: str, ratio: float) -> None:
    """Reject or limit a client whose change of a layer is ``ratio`` times the bound."""
    reason = f"its change of '{layer}' is {ratio:.3g} times the limit by the median of its cohort"
    if rule.action == "reject":
        result.rejected[client] = reason
    else:
        result.limited.setdefault(client, []).append({"factor": 1 / ratio, "reason": f"{reason}; it is cut to that"})


def holders_needed(aggregator: Aggregator, liars: int, clients: int) -> int:
    """Return the least number of holders with which an entry tolerates so many liars; 0 if there are none to tolerate.

    Args:
        aggregator: The aggregation rule.
        liars: The number of malicious clients.
        clients: The number of clients whose updates are aggregated.

    >>> from fedcover.aggregation.robust import median, trimmed
    >>> holders_needed(median(), 2, 10), holders_needed(trimmed(0.2), 1, 10), holders_needed(trimmed(0.2), 3, 10)
    (5, 5, 11)
    """
    if not liars:
        return 0
    return next((count for count in range(1, clients + 1) if aggregator.tolerates(count) >= liars), clients + 1)


def tolerated(federation: "Federation", holders: int) -> int:
    """Return how many malicious holders of an entry a round tolerates; none with control variates.

    They are a plain mean over clients that is added to the gradients of all, so that one client moves the values of
    the others, and with them any average.
    """
    return 0 if uses_control_variates(federation.local) else federation.aggregator.tolerates(holders)


def check_robustness(federation: "Federation") -> None:
    """Raise InputError if no entry could ever tolerate as many malicious clients as the federation requires."""
    liars, rule, cohort = federation.require_robustness, federation.aggregator, federation.cohort
    check_whole("require_robustness", liars, 0)
    if liars and uses_control_variates(federation.local):
        raise InputError(
            f"require_robustness is {liars}, but control variates are a plain mean over clients, by which one malicious"
            f" client moves the training of all others; set control_variates=False, or require_robustness=0"
        )
    if rule.tolerates(cohort) >= liars:
        return
    if not rule.tolerates(10**6):
        raise InputError(
            f"require_robustness is {liars}, but {rule} tolerates no malicious client however many hold an entry; use"
            f" aggregation.name=median or trimmed"
        )
    raise InputError(
        f"require_robustness is {liars}, but with a cohort of {cohort} {rule} tolerates {rule.tolerates(cohort)}"
        f" malicious clients even where all hold an entry; raise cohort"
        f" to {holders_needed(rule, liars, 100 * cohort + 100 * liars)}, or use aggregation.name=median"
    )
