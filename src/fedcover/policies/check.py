"""``check_policy``: find the law of the policy contract that a policy breaks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.budgets import budgets_of
from fedcover.clients import cohort_of
from fedcover.data.inputs import Inputs
from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params, check_mask, count, params_of, prune
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback, State, Traits, shown_in
from fedcover.policies.plan_checks import check_clients, check_masks, check_training_options, over_budget
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, carries, trace
from fedcover.training.options import regrown

KEEPS = (1.0, 0.75, 0.5, 0.25)
ROUNDS = 5
SMALL = 0.5
"""The largest keep that must prune something; a larger one, such as 0.75, may round up to 2 of 2 units."""
SLACK = 0.02
"""The share of the model by which masks that are drawn at random may exceed those of a larger budget."""

LAWS = {
    "runs": "plan must not raise for cohorts with budgets 1, 0.75, 0.5 and 0.25",
    "one plan each": "plan must return one ClientPlan for each client that trains, in the order of the cohort",
    "masks fit": "a mask must map parameter names to bool tensors of the parameter's shape",
    "options fit": "the options of a ClientPlan must be None or TrainingOptions that fit its mask",
    "something is kept": "a mask must keep at least one entry",
    "input reaches the output": "a mask must not remove a layer through which every input passes, unless traits"
    " declares needs_complement",
    "budgets are met": "a mask must keep no more of what it prunes than the budget (with needs_complement, of all"
    " tensors that it names), and a small budget must keep less than the whole model, unless traits declares"
    " ignores_budgets or limits_memory",
    "traits are true": "masks must not depend on theta, or on the round, if traits declares so",
    "theta is left alone": "plan and observe must not change theta",
    "same seed, same masks": "plans must depend only on theta, the cohort, the round and the state",
    "no global randomness": "draws must come from this_round.generator(...), never from torch's global generator",
    "state is tensors": "the state must be a dict of tensors, so that checkpoints can store it",
    "state is left alone": "plan and observe must leave the state they get unchanged",
    "same seed, same state": "the result of observe must depend only on its arguments",
    "observes": "observe must not raise for the coverage and gradient reports of a round",
}
"""The laws that ``check_policy`` tests, each with its rule."""


def check_policy(policy: Policy, model: nn.Module, example: Inputs, seed: int = 0) -> None:
    """Raise InputError, naming the law, if a policy breaks a law of the policy contract.

    The policy plans a few rounds for three cohorts of four clients: with different budgets, with whole models only,
    and with quarters only. Nothing is trained; theta is perturbed between rounds.

    Args:
        policy: The policy, not yet bound.
        model: The model to bind it to.
        example: A batch of inputs for the model.
        seed: Seed of the rounds.

    Raises:
        InputError: If a law is broken; ``fedcover.policies.check.LAWS`` lists them.

    >>> from fedcover.policies.weight_pruning import weight_pruning
    >>> check_policy(weight_pruning(), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(2, 8))
    """
    structure = trace(model, example)
    bound, least = policy.bind(structure), min(KEEPS)
    trials = [_Trial(bound, structure, keeps, seed) for keeps in (KEEPS, [1.0] * len(KEEPS), [least] * len(KEEPS))]
    mixed, whole, small = (trial.play() for trial in trials)
    if reason := _budget_violation(bound.traits(), mixed, whole[1.0], small[least]):
        raise _broken(policy, "budgets are met", reason)


def _budget_violation(traits: Traits, mixed: Mapping[float, float], whole: float, small: float) -> str:
    """Return how budgets are ignored, from the mean shares of the model that clients hold; empty if they are not.

    What a client holds dense in turn does not come from its budget, so such policies are not compared.

    Args:
        traits: The traits of the policy.
        mixed: The share of each keep in a cohort of different budgets.
        whole: The share in a cohort in which every client can hold the whole model.
        small: The share in a cohort in which every client has the least keep.
    """
    if traits.ignores_budgets and traits.needs_complement:
        alike = len({*mixed.values(), whole, small}) == 1
        return "" if alike else "it declares ignores_budgets, but clients with different budgets get different shares"
    if traits.ignores_budgets:
        return "" if min(*mixed.values(), small) == 1 else "it declares ignores_budgets, but prunes"
    if traits.dense_in_turn or traits.limits_memory:
        return ""
    for keep, kept in mixed.items():
        if keep <= SMALL and kept == 1:
            return f"keep {keep} got the whole model in every round"
    if mixed.get(min(KEEPS), 0) > mixed.get(1.0, 1) + SLACK:
        return f"keep {min(KEEPS)} got {mixed[min(KEEPS)]:.3g} of the model, and keep 1 only {mixed[1.0]:.3g}"
    if small >= whole:
        return f"clients with keep {min(KEEPS)} got {small:.3g} of the model, and clients with keep 1 got {whole:.3g}"
    return ""


class _Trial:
    """Some rounds of one cohort, in which every law of a single round is tested."""

    def __init__(self, policy: Policy, structure: ModelStructure, keeps: Sequence[float], seed: int) -> None:
        self.policy, self.structure, self.seed = policy, structure, seed
        self.cohort = cohort_of(range(len(keeps)), [10] * len(keeps), budgets_of(keeps), "slot")

    def play(self) -> dict[float, float]:
        """Return the mean share of the model that clients of each keep hold."""
        theta, state = params_of(self.structure.model), self.policy.start()
        shares: dict[float, list[float]] = {}
        for index in range(1, ROUNDS + 1):
            self.round = Round(index, self.seed)
            plans, after = self.plan(theta, state)
            for plan in plans:
                self.check_mask(plan, theta)
                shares.setdefault(plan.client.budget.keep, []).append(count(theta, plan.mask) / count(theta))
            self.check_traits(plans, theta, state, after)
            theta, state = self.observe(theta, plans, after)
        return {keep: fmean(each) for keep, each in shares.items()}

    def broken(self, law: str, what: str) -> InputError:
        """Return the error for a law that is broken in this round."""
        return _broken(self.policy, law, what, f" in round {self.round.index}")

    def plan(self, theta: Params, state: State) -> tuple[list[ClientPlan], State]:
        """Return what the policy plans; it must fit, be reproducible, and leave its arguments unchanged."""
        with self.pure("plan", theta, state):
            try:
                (plans, after), (again, _) = (
                    self.policy.plan(theta, self.cohort, self.round, dict(state)) for _ in range(2)
                )
            except Exception as error:
                raise self.broken("runs", f"{type(error).__name__}: {error}") from error
        with self.law("one plan each"):
            check_clients(self.policy, plans, self.cohort, self.round)
        with self.law("masks fit"):
            check_masks(self.policy, plans, theta, self.round)
        with self.law("options fit"):
            check_training_options(self.policy, plans, theta, self.round)
        if not _alike(plans, again):
            raise self.broken("same seed, same masks", "masks or options differ in a second call")
        self.check_state(after, theta)
        return plans, after

    def observe(self, theta: Params, plans: Sequence[ClientPlan], state: State) -> tuple[Params, State]:
        """Return a perturbed theta, as if trained, and the state after the policy has observed the round."""
        rng = self.round.generator("check")
        theta = {k: t + 0.01 * torch.randn(t.shape, generator=rng).to(t) for k, t in theta.items()}
        sent = [
            _regrown(theta, plan.mask, plan.options.regrow.share, rng)
            if plan.options and plan.options.regrow
            else plan.mask
            for plan in plans
        ]
        report = None
        if any(plan.options and plan.options.report for plan in plans):
            report = {k: torch.randn(t.shape, generator=rng).to(t).double().square() for k, t in theta.items()}
        feedback = RoundFeedback(len(sent), coverage_of(sent, theta), report)
        with self.pure("observe", theta, state):
            try:
                after, again = (self.policy.observe(theta, feedback, self.round, dict(state)) for _ in range(2))
            except Exception as error:
                raise self.broken("observes", f"{type(error).__name__}: {error}") from error
        self.check_state(after, theta)
        if not _alike(after, again):
            raise self.broken("same seed, same state", "observe returned another state in a second call")
        return theta, after

    def check_mask(self, plan: ClientPlan, theta: Params) -> None:
        """Raise InputError if a mask is empty, cuts the output off from the input, or exceeds the budget."""
        mask, keep, traits = plan.mask, plan.client.budget.keep, self.policy.traits()
        if count(theta, mask) == 0:
            raise self.broken("something is kept", f"the mask of keep {keep} keeps nothing")
        needed = () if traits.needs_complement else self.structure.weights
        empty = [name for name in needed if name in mask and not bool(mask[name].any())]
        if empty and carries(self.structure, theta) and not carries(self.structure, prune(theta, mask)):
            raise self.broken("input reaches the output", f"the mask of keep {keep} keeps nothing of '{empty[0]}'")
        if traits.ignores_budgets or traits.limits_memory:
            return
        # Whole models are compared over several rounds.
        if reason := over_budget(plan, theta, (), whole_counts=traits.needs_complement):
            raise self.broken("budgets are met", reason)

    def check_traits(self, plans: Sequence[ClientPlan], theta: Params, state: State, after: State) -> None:
        """Raise InputError if masks depend on theta or on the round although traits declares that they do not."""
        traits, masks = self.policy.traits(), [plan.mask for plan in plans]
        later = Round(self.round.index + 1, self.seed)
        other = {name: -2 * tensor.flip(*range(tensor.ndim)) for name, tensor in theta.items()}
        for declared, values, this_round, before, what in (
            (traits.reads_theta, other, self.round, state, "reads_theta=False, but masks differ with another theta"),
            (traits.moves, theta, later, after, "moves=False, but masks differ in the next round"),
        ):
            if not declared:
                again, _ = self.policy.plan(values, self.cohort, this_round, dict(before))
                if not _alike(masks, [plan.mask for plan in again]):
                    raise self.broken("traits are true", f"it declares {what}")

    def check_state(self, state: object, theta: Params) -> None:
        """Raise InputError unless a state is a dict of tensors, and the mask in it, if any, fits theta."""
        if not isinstance(state, dict) or any(not isinstance(value, Tensor) for value in state.values()):
            raise self.broken("state is tensors", f"it returned a {type(state).__name__} with other values")
        with self.law("masks fit"):
            check_mask(shown_in(state), theta, "the mask under shown/ in its state")

    @contextmanager
    def law(self, law: str) -> Iterator[None]:
        """Name the law in an InputError that is raised within the context."""
        try:
            yield
        except InputError as error:
            raise self.broken(law, str(error)) from None

    @contextmanager
    def pure(self, hook: str, theta: Params, state: State) -> Iterator[None]:
        """Raise InputError if a hook changes theta, the state or torch's global generator within the context."""
        before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (theta, state)]
        generator = torch.default_generator.get_state()
        yield
        if not torch.equal(generator, torch.default_generator.get_state()):
            raise self.broken("no global randomness", f"{hook} moved torch's global generator")
        if not _alike(before[0], theta):
            raise self.broken("theta is left alone", f"{hook} changed theta in place")
        if not _alike(before[1], state):
            raise self.broken("state is left alone", f"{hook} changed a tensor of the state in place")


def _broken(policy: Policy, law: str, what: str, when: str = "") -> InputError:
    return InputError(f"policy {policy} breaks the law '{law}'{when}: {what}; {LAWS[law]}")


def _alike(a: Any, b: Any) -> bool:
    """Return whether two values are equal, tensors by their entries."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(map(_alike, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(_alike(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a == b)


def _regrown(theta: Params, mask: Mask, share: float, rng: torch.Generator) -> Mask:
    gradients = {k: torch.randn(kept.shape, generator=rng).to(theta[k]) for k, kept in mask.items()}
    return {k: regrown(theta[k], kept, gradients[k], share) for k, kept in mask.items()}
