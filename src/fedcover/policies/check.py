"""``check_policy``: find the law of the policy contract that a policy breaks."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcover.budgets import budgets_of, share
from fedcover.clients import Client, cohort_of
from fedcover.errors import InputError
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params, check_mask, count, params_of
from fedcover.policies.base import Policy, RoundFeedback, State, shown_in
from fedcover.seeding import Round
from fedcover.structure.trace import trace
from fedcover.training.options import TrainingOptions, check_options, regrown

KEEPS = (1.0, 0.75, 0.5, 0.25)
ROUNDS = 5

LAWS = {
    "runs": "plan must not raise for a cohort with budgets 1, 0.75, 0.5 and 0.25",
    "one mask each": "plan must return one mask per client of the cohort",
    "masks fit": "a mask must map parameter names to bool tensors of the parameter's shape",
    "something is kept": "a mask must keep at least one entry",
    "budgets are met": "a smaller budget must not get the whole model, nor more than a larger one",
    "theta is left alone": "plan, training_options and observe must not change theta",
    "same seed, same masks": "masks must depend only on theta, the cohort, the round and the state",
    "no global randomness": "draws must come from this_round.generator(...), never from torch's global generator",
    "state is tensors": "the state must be a dict of tensors, so that checkpoints can store it",
    "state is left alone": "plan, training_options and observe must leave the state they get unchanged",
    "options fit": "training_options must return per client None or TrainingOptions that fit its mask; one must train",
    "same seed, same state": "the result of observe must depend only on its arguments",
    "observes": "observe must not raise for the coverage and gradient reports of a round",
}
"""The laws that ``check_policy`` tests, each with its rule."""


def check_policy(policy: Policy, model: nn.Module, example: Tensor, seed: int = 0) -> None:
    """Raise InputError, naming the law, if a policy breaks a law of the policy contract.

    The policy plans a few rounds for four clients. Nothing is trained; theta is perturbed between rounds.

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
    bound = policy.bind(trace(model, example))
    cohort = cohort_of(range(len(KEEPS)), [10] * len(KEEPS), budgets_of(KEEPS), "slot")
    theta = params_of(model)
    state = bound.start()
    for index in range(1, ROUNDS + 1):
        this_round = Round(index, seed)
        broken = _breaker(policy, index)
        before = [_copied(theta), _copied(state)]
        ambient = torch.default_generator.get_state()
        masks, after = _plan(bound, theta, cohort, this_round, state, broken)
        if not torch.equal(ambient, torch.default_generator.get_state()):
            raise broken("no global randomness", "it moved torch's global generator")
        if not _same(before[0], theta):
            raise broken("theta is left alone", "theta was changed in place")
        again, _ = _plan(bound, theta, cohort, this_round, state, broken)
        _check_masks(masks, again, theta, broken, bound.dense_in_turn)
        _check_state(after, theta, broken)
        training_options = _options(bound, theta, cohort, masks, this_round, after, broken)
        theta, after = _played(bound, theta, masks, training_options, this_round, after, broken)
        if not torch.equal(ambient, torch.default_generator.get_state()):
            raise broken("no global randomness", "training_options or observe moved torch's global generator")
        if not _same(before[1], state):
            raise broken("state is left alone", "a tensor of the state was changed in place")
        state = after


def _check_state(state: object, theta: Params, broken: Callable[[str, str], InputError]) -> None:
    if not isinstance(state, dict) or any(not isinstance(value, Tensor) for value in state.values()):
        raise broken("state is tensors", f"it returned a {type(state).__name__} with other values")
    try:
        check_mask(shown_in(state), theta, "the mask under shown/ in its state")
    except InputError as error:
        raise broken("masks fit", str(error)) from None


def _copied(tensors: Params) -> Params:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _options(
    policy: Policy,
    theta: Params,
    cohort: Sequence[Client],
    masks: Sequence[Mask],
    this_round: Round,
    state: State,
    broken: Callable[[str, str], InputError],
) -> list[TrainingOptions | None]:
    """Return the training options, which must fit, be reproducible, and leave theta and the state unchanged."""
    before = [_copied(theta), _copied(state)]
    try:
        training_options, again = (
            list(policy.training_options(theta, cohort, masks, this_round, dict(state))) for _ in range(2)
        )
    except Exception as error:
        raise broken("runs", f"training_options: {type(error).__name__}: {error}") from error
    if len(training_options) != len(cohort):
        raise broken("options fit", f"{len(training_options)} options for {len(cohort)} clients")
    for place, (options, same) in enumerate(zip(training_options, again, strict=True)):
        try:
            check_options(options, theta, masks[place], f"options {place}")
        except InputError as error:
            raise broken("options fit", str(error)) from None
        if not _alike(options, same):
            raise broken("same seed, same masks", f"options {place} differ in a second call")
    if all(options is not None and options.rest for options in training_options):
        raise broken("options fit", "every client rests")
    if not _same(before[0], theta):
        raise broken("theta is left alone", "training_options changed theta in place")
    if not _same(before[1], state):
        raise broken("state is left alone", "training_options changed a tensor of the state in place")
    return training_options


def _alike(a: TrainingOptions | None, b: TrainingOptions | None) -> bool:
    if a is None or b is None:
        return a is b
    plain = ("gains", "thresholds", "distil", "regrow", "report", "rest")
    widths = len(a.widths) == len(b.widths) and all(_same(x, y) for x, y in zip(a.widths, b.widths, strict=True))
    return widths and all(getattr(a, name) == getattr(b, name) for name in plain)


def _played(
    policy: Policy,
    theta: Params,
    masks: Sequence[Mask],
    training_options: Sequence[TrainingOptions | None],
    this_round: Round,
    state: State,
    broken: Callable[[str, str], InputError],
) -> tuple[Params, State]:
    """Return a perturbed theta, as if trained, and the state after the policy has observed the round."""
    shake = this_round.generator("check")
    theta = {k: t + 0.01 * torch.randn(t.shape, generator=shake).to(t) for k, t in theta.items()}
    sent = [
        _regrown(theta, mask, options.regrow.share, shake) if options and options.regrow else mask
        for mask, options in zip(masks, training_options, strict=True)
        if options is None or not options.rest
    ]
    report = None
    if any(options and options.report for options in training_options):
        report = {k: torch.randn(t.shape, generator=shake).to(t).double().square() for k, t in theta.items()}
    feedback = RoundFeedback(len(sent), coverage_of(sent, theta), report)
    before = [_copied(theta), _copied(state)]
    try:
        after, again = (policy.observe(theta, feedback, this_round, dict(state)) for _ in range(2))
    except Exception as error:
        raise broken("observes", f"{type(error).__name__}: {error}") from error
    _check_state(after, theta, broken)
    if not _same(before[0], theta):
        raise broken("theta is left alone", "observe changed theta in place")
    if not _same(before[1], state):
        raise broken("state is left alone", "observe changed a tensor of the state in place")
    if not _same(after, again):
        raise broken("same seed, same state", "observe returned another state in a second call")
    return theta, after


def _regrown(theta: Params, mask: Mask, share: float, rng: torch.Generator) -> Mask:
    gradients = {k: torch.randn(kept.shape, generator=rng).to(theta[k]) for k, kept in mask.items()}
    return {k: regrown(theta[k], kept, gradients[k], share) for k, kept in mask.items()}


def _breaker(policy: Policy, index: int) -> Callable[[str, str], InputError]:
    def broken(law: str, what: str) -> InputError:
        return InputError(f"policy {policy} breaks the law '{law}' in round {index}: {what}; {LAWS[law]}")

    return broken


def _plan(
    policy: Policy,
    theta: Params,
    cohort: Sequence[Client],
    this_round: Round,
    state: State,
    broken: Callable[[str, str], InputError],
) -> tuple[list[Mask], State]:
    try:
        masks, after = policy.plan(theta, cohort, this_round, dict(state))
        masks = list(masks)
    except Exception as error:
        raise broken("runs", f"{type(error).__name__}: {error}") from error
    if len(masks) != len(cohort):
        raise broken("one mask each", f"{len(masks)} masks for {len(cohort)} clients")
    return masks, after


def _check_masks(
    masks: Sequence[Mask],
    again: Sequence[Mask],
    theta: Params,
    broken: Callable[[str, str], InputError],
    dense_in_turn: bool,
) -> None:
    sizes = []
    for place, (mask, same) in enumerate(zip(masks, again, strict=True)):
        try:
            check_mask(mask, theta, f"mask {place}")
        except InputError as error:
            raise broken("masks fit", str(error)) from None
        if set(mask) != set(same) or any(not torch.equal(mask[name], same[name]) for name in mask):
            raise broken("same seed, same masks", f"mask {place} differs in a second call")
        sizes.append(count(theta, mask))
        if sizes[-1] == 0:
            raise broken("something is kept", f"mask {place} keeps nothing")
        touched = {name: kept.numel() for name, kept in mask.items() if not bool(kept.all())}
        kept_entries = sum(int(mask[name].sum()) for name in touched)
        most = sum(size * _rounded(KEEPS[place], theta[name]) for name, size in touched.items())
        if kept_entries > most + 3 * most**0.5:  # room for masks that are drawn at random
            reason = f"keep {KEEPS[place]} got {kept_entries} of the {sum(touched.values())} entries it prunes"
            raise broken("budgets are met", reason)
    if dense_in_turn:  # what a client holds whole does not come from its budget: compare only what it prunes
        return
    total = count(theta)
    for place in range(1, len(sizes)):
        if sizes[place] == total and KEEPS[place] < 1 and sizes[0] == total and not _ignores_budgets(sizes, total):
            raise broken("budgets are met", f"keep {KEEPS[place]} got all {total} entries")
        if sizes[place] > sizes[place - 1] + 0.02 * total:
            raise broken(
                "budgets are met",
                f"keep {KEEPS[place]} got {sizes[place]} entries and keep {KEEPS[place - 1]} only {sizes[place - 1]}",
            )


def _rounded(keep: float, tensor: Tensor) -> float:
    """Return the largest share that keep may round up to along any axis of a tensor: 5 of 6 for 0.75."""
    return max(share(keep, n) / n for n in tensor.shape if n)


def _ignores_budgets(sizes: Sequence[int], total: int) -> bool:
    """Return whether every client gets the whole model, as in FedAvg."""
    return all(size == total for size in sizes)
