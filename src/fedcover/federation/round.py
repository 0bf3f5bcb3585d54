"""The walk of a round: state in, (state, record) out.

theta -> cohort -> plan (a ClientPlan per client) -> jobs -> engine trains -> updates
      -> aggregator and observers take each update as it arrives -> theta' -> evaluate -> record

A federation that screens its updates takes them after the last has arrived.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import step_towards
from fedcover.federation.averaged_round import Arrivals, AveragedRound
from fedcover.federation.checkpoint import State
from fedcover.federation.client_states import client_states, with_client_states
from fedcover.federation.cohort import Shares, draw_cohort
from fedcover.federation.complements import noise_of, outside_of, views_of, with_complement
from fedcover.federation.feedback import FeedbackSum
from fedcover.federation.history import RoundRecord
from fedcover.federation.observers import EndedRound, RoundObserver, fields_of, observers_of
from fedcover.federation.planned_round import Clock, PlannedRound, costs_of_plans, job_of
from fedcover.federation.planning import observe_round, plan_round
from fedcover.federation.scores import Evaluation, score_fields
from fedcover.federation.screening import RoundScreen, screen_round
from fedcover.seeding import Round
from fedcover.theory import check_coverage

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


def begin_round(
    federation: "Federation", state: State, device: torch.device, shares: Shares, views: bool = True
) -> PlannedRound:
    """Draw a cohort and plan its masks; return the round with one job per client, on a device.

    The theta of a job is what its client sees, or without ``views`` the global model: a caller that sends jobs to
    devices adds what is outside their masks, and does not need a model in memory for each of them.
    """
    return settle_round(federation, queue_round(federation, state, device, shares, views))


def queue_round(
    federation: "Federation", state: State, device: torch.device, shares: Shares, views: bool = True
) -> PlannedRound:
    """Draw a cohort and plan its masks, without waiting for a GPU; the round has no costs yet."""
    clock = Clock()
    state = federation.hook.begun(state).on_device(device)
    this_round = Round(state.round + 1, federation.seed)

    cohort = draw_cohort(federation, this_round, state, shares)
    plans, policy_state = plan_round(federation.policy, state, cohort, this_round)
    plans = with_client_states(federation, state, with_complement(federation, plans, policy_state))
    outside = outside_of(federation, state, plans)
    noise = noise_of(federation, state.theta, plans, outside)
    recipe = federation.local.in_round(this_round.index)
    starts = views_of(state.theta, plans, outside) if views else [state.theta] * len(plans)
    jobs = [job_of(federation, *planned, recipe, this_round) for planned in zip(plans, starts, strict=True)]
    clock.lap("plan")
    return PlannedRound(this_round, state, plans, policy_state, recipe, noise, jobs, clock)


def settle_round(federation: "Federation", planned: PlannedRound) -> PlannedRound:
    """Return a planned round with the costs of its masks, after they are checked."""
    this_round, theta, clock = planned.this_round, planned.state.theta, planned.clock
    clock.skip()
    planned.pruning.queue()
    planned = replace(planned, costs=costs_of_plans(federation, theta, planned.plans, this_round))
    if federation.require_coverage:
        check_coverage(planned.coverage, this_round.index, federation.remedy)
    planned = federation.hook.planned(federation, planned)
    clock.lap("plan")
    return planned


def end_round(
    federation: "Federation", planned: PlannedRound, arrivals: Arrivals, evaluation: Evaluation
) -> tuple[State, RoundRecord]:
    """Aggregate the updates of a planned round, evaluate the new model and record the round.

    Raises:
        ClientError: If no client's update is accepted.
    """
    averaged = average_round(federation, planned, arrivals)
    return averaged.recorded(score_fields(federation, averaged.state, planned.plans, evaluation))


def average_round(federation: "Federation", planned: PlannedRound, arrivals: Arrivals) -> AveragedRound:
    """Aggregate the updates of a planned round.

    Raises:
        ClientError: If no client's update is accepted.
    """
    this_round, before, clock = planned.this_round, planned.state, planned.clock
    clock.skip()
    aggregation = federation.aggregator.start(before.theta, planned.plans, before.server)
    observers = observers_of(federation, planned)
    feedback_sum, clients = FeedbackSum(planned), client_states(federation, planned)
    updates, screened = screen_round(federation, planned, federation.hook.updates(planned, arrivals.updates))
    for accepted in _accepted(planned, updates, screened, observers, arrivals.together):
        aggregation.add_together([screened.averaged(update) for update in accepted])
        for update in accepted:
            feedback_sum.add(update)
            clients.add(update)
            for observer in observers:
                observer.add(update)
        clock.lap("aggregate")
    if not feedback_sum.clients:
        raise screened.all_rejected(this_round.index, planned.recipe.lr)

    theta = step_towards(before.theta, aggregation.result(), federation.policy.server_step(this_round))
    theta |= {name: before.theta[name] for name in federation.structure.frozen}  # an average may round
    feedback = feedback_sum.feedback()
    policy_state = observe_round(federation.policy, theta, feedback, this_round, planned.policy_state)
    fields = fields_of(observers, EndedRound(theta, feedback), aggregation)
    theory = {name: tensor for observer in observers for name, tensor in observer.state().items()}
    state = State(this_round.index, theta, policy_state, theory, aggregation.state(), clients.state())
    clock.lap("aggregate")
    return AveragedRound(planned, arrivals, state, fields)


def _accepted(
    planned: PlannedRound,
    updates: Iterable[ClientUpdate],
    screened: RoundScreen,
    observers: Sequence[RoundObserver],
    together: int,
) -> Iterator[list[ClientUpdate]]:
    """Yield the accepted updates as they arrive, in groups; observers see the others, and what was cut."""
    stream = iter(updates)
    while group := list(islice(stream, together)):
        planned.clock.lap("train")
        accepted = []
        for update in group:
            reason = screened.rejected.get(update.client) if update.is_finite() else update.reason()
            if reason is None:
                accepted.append(screened.accepted(update))
            for observer in observers:
                if reason is not None:
                    observer.reject(update, reason)
                for limit in screened.limited.get(update.client, ()) if reason is None else ():
                    observer.limit(update, limit)
        yield accepted
