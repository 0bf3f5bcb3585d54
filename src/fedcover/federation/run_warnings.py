"""Warnings of a run: layers that stay whole, masks beyond budgets, uncovered rounds, and steps beyond the theorem."""

import warnings
from typing import TYPE_CHECKING

from fedcover.errors import BudgetWarning, CoverageWarning, SamplingWarning, StepSizeWarning, WholeLayersWarning
from fedcover.federation.advice import output_sentence, whole_sentence
from fedcover.federation.checkpoint import State
from fedcover.federation.cohort import draw_budgets
from fedcover.federation.history import RoundRecord
from fedcover.federation.planned_round import PlannedRound
from fedcover.params import count
from fedcover.policies.base import is_built_in, shown_in
from fedcover.policies.plan_checks import over_budget
from fedcover.seeding import Round
from fedcover.structure.exits import ExitModel
from fedcover.theory import step_sentence, uncovered_sentence

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

STACKLEVEL = 6
"""The warnings about records point at the caller of ``Federation.run`` or ``run_many``."""


def warn_of_whole_layers(federation: "Federation") -> None:
    """Warn if a policy of units leaves layers whole in every round."""
    message = whole_sentence(federation.policy, federation.structure, federation.resolved_budgets)
    if message:  # the warning points at the caller of Federation.run or run_many
        warnings.warn(message, WholeLayersWarning, stacklevel=5)


def warn_of_old_copies(federation: "Federation") -> None:
    """Warn if clients keep copies of the model, most of which their masks never renew."""
    pruned = not all(budget.full for budget in federation.resolved_budgets)
    if federation.complement.keeps_copies and pruned and not federation.policy.traits().moves:
        warnings.warn(
            f"complement {federation.complement} shows each client its own copy of the model, which is renewed only"
            f" where it trains, and the masks of policy {federation.policy} do not move: most of every copy stays as it"
            f" was at the start; use a policy whose masks move, such as random_weights, or complement 'frozen'",
            CoverageWarning,
            stacklevel=5,
        )


class RunWarnings:
    """Warns once in a run about uncovered masks, and once about large steps, since both usually recur."""

    def __init__(self, federation: "Federation") -> None:
        self._federation = federation
        self._warned: set[type[Warning]] = set()
        self._looks_at_shares = True

    def check_plans(self, planned: PlannedRound) -> None:
        """Warn about the first round in which a policy that is not built in keeps more than budgets allow."""
        policy, traits = self._federation.policy, self._federation.policy.traits()
        if is_built_in(policy) or traits.ignores_budgets or traits.dense_in_turn or BudgetWarning in self._warned:
            return
        index, theta, hidden = planned.this_round.index, planned.state.theta, self._federation.structure.hidden
        if self._federation.budgets is None:
            if index == 1 and hidden and all(count(theta, plan.mask) == count(theta) for plan in planned.plans):
                self._warn_once(
                    BudgetWarning,
                    f"policy {policy} prunes nothing in round 1, and there are no budgets, so that every client has the"
                    f" budget 1: give budgets, or declare ignores_budgets in its traits",
                )
            return
        distinct = {(id(plan.mask), plan.client.budget): plan for plan in reversed(planned.plans)}
        for plan in reversed(distinct.values()):
            if reason := over_budget(plan, theta, hidden, whole_counts=traits.needs_complement):
                self._warn_once(
                    BudgetWarning,
                    f"policy {policy} exceeds the budget of client {plan.client.number} in round {index}: {reason};"
                    f" fedcover.check_policy names what a policy must keep to; one that ignores budgets declares"
                    f" ignores_budgets in its traits",
                )
                return

    def check(self, record: RoundRecord, state: State) -> None:
        """Warn about the first uncovered round, and the first step size beyond the theorem's limit."""
        self._check_shares(record)
        # A policy with one pruned mask for all leaves the rest to no client on purpose, as do those that take turns.
        shares = {layer: cover.uncovered for layer, cover in record.coverage.items() if cover.uncovered}
        without_effect = bool(shares) and all(map(self._is_exit_without_effect, shares))
        meant = shown_in(state.policy) or _takes_turns(self._federation) or without_effect
        if record.uncovered > 0 and not meant and CoverageWarning not in self._warned:
            self._warned.add(CoverageWarning)
            sentence = uncovered_sentence(shares, record.round, self._federation.remedy)
            warnings.warn(sentence, CoverageWarning, stacklevel=STACKLEVEL)
        if not self._federation.sampling.uniform and len(record.cohort) < self._federation.cohort:
            self._warn_once(
                SamplingWarning,
                f"round {record.round} has {len(record.cohort)} clients instead of {self._federation.cohort}: no more"
                f" were drawn, or the policy left some out",
            )
        certificate = record.certificate
        if certificate and certificate["step_holds"] is False and StepSizeWarning not in self._warned:
            self._warned.add(StepSizeWarning)
            sentence = step_sentence(
                certificate["step_size"], certificate["largest_step"], certificate["steps"], estimated=True
            )
            warnings.warn(f"after round {record.round} {sentence}", StepSizeWarning, stacklevel=STACKLEVEL)

    def _is_exit_without_effect(self, tensor: str) -> bool:
        """Return whether the global model predicts by its last exit, which does not depend on a tensor."""
        model, exits = self._federation.task.model, self._federation.structure.exits
        return isinstance(model, ExitModel) and model.prediction == "last" and tensor not in exits[-1]

    def _check_shares(self, record: RoundRecord) -> None:
        """Warn if the clients of the run's first round keep much more than they were asked for."""
        if not self._looks_at_shares:
            return
        self._looks_at_shares = False
        federation = self._federation
        budgets = draw_budgets(federation, Round(record.round, federation.seed))
        if len(budgets) == len(record.kept):  # otherwise some clients sat out
            sentence = output_sentence(federation.policy, federation.structure, budgets, record.kept)
            if sentence:
                warnings.warn(sentence, WholeLayersWarning, stacklevel=STACKLEVEL + 1)

    def _warn_once(self, kind: type[Warning], sentence: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(sentence, kind, stacklevel=STACKLEVEL + 1)


def _takes_turns(federation: "Federation") -> bool:
    """Return whether clients train parts of the whole model that a policy of this package moves without end.

    Masks that depend on theta may move too, but nothing ensures that they move to every entry.
    """
    traits = federation.policy.traits()
    moves = traits.moves and not traits.reads_theta
    return is_built_in(federation.policy) and federation.complement.sees and moves
