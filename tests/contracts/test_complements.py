"""Every complement with every policy: in every engine, after a stop; and what is refused, with its reason."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.federation.complements import copy_of, seen_by
from fedcover.params import prune
from fedcover.theory import complement_error
from fedcover.training.complements import COMPLEMENTS, Complement
from tests.conftest import POLICIES, small_data
from tests.contracts.federations import DEVICES, TOLERANCE, federation, furthest, images, serial
from tests.laws.strategies import same

SEEN: dict[str, Complement] = {"frozen": fc.Frozen(), "quantized": fc.Quantized(4), "kept": fc.Kept()}
REFUSED = {
    "HeteroFL": "needs clients that see zeros outside their masks, for its scaler",
    "FjORD": "needs clients that see zeros outside their masks, for its widths",
    "FedDST": "prunes the global model itself",
    "PruneFL": "prunes the global model itself",
}
"""The policies for which values outside the mask have no meaning, and the beginning of the reason."""


pytestmark = pytest.mark.filterwarnings("ignore:complement Kept:fedcover.CoverageWarning")


def with_complement(one: fc.Federation, complement: Complement) -> fc.Federation:
    return replace(one, complement=complement)


def test_every_complement_is_tested() -> None:
    assert set(COMPLEMENTS) == {"zero", *SEEN}


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("complement", SEEN)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in REFUSED])
def test_processes_equal_serial_bit_for_bit(
    name: str, complement: str, shrink: bool, processes: dict[bool, Processes]
) -> None:
    test = small_data(40, seed=9)
    expected, actual = (
        with_complement(federation(engine, name, shared=True), SEEN[complement]).run(3, evaluate_on=test)
        for engine in (serial(shrink), processes[shrink])
    )
    assert actual == expected
    assert expected.theta is not None
    assert actual.theta is not None
    assert same(actual.theta, expected.theta)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("complement", SEEN)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in REFUSED])
def test_vectorized_agrees_with_serial(name: str, complement: str, device: str) -> None:
    expected, actual = (
        with_complement(federation(engine, name, shared=True), SEEN[complement]).run(2)
        for engine in (serial(), Vectorized(device))
    )
    assert furthest(expected, actual) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("complement", SEEN)
@pytest.mark.parametrize("network", ["mlp", "lenet", "residual"])
def test_vectorized_agrees_with_serial_on_images(network: str, complement: str, device: str) -> None:
    expected, actual = (
        with_complement(images(engine, network, "FedRolex", shared=True), SEEN[complement]).run(2)
        for engine in (serial(), Vectorized(device))
    )
    assert furthest(expected, actual) < TOLERANCE


RECIPES = {
    "weight decay": fc.LocalSGD(1, 8, 0.1, weight_decay=0.1),
    "Nesterov": fc.LocalSGD(1, 8, 0.1, nesterov=True),
    "proximal": fc.LocalSGD(1, 8, 0.1, proximal=0.5),
    "clip": fc.LocalSGD(1, 8, 0.1, clip=0.5),
    "SCAFFOLD": fc.LocalSGD(1, 8, 0.1, control_variates=True),
    "kept moments": fc.LocalSGD(1, 8, 0.1, keep_moments=True),
    "AdamW": fc.LocalAdam(1, 8, decoupled=True, weight_decay=0.1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("complement", SEEN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_agree_in_every_engine(
    recipe: str, complement: str, device: str, processes: dict[bool, Processes]
) -> None:
    engines: list[fc.Engine] = [serial(), Vectorized(device)]
    if device == "cpu":  # after gradients on a GPU, torch's processes cannot be forked
        engines.append(processes[False])
    expected, actual, *forked = [
        replace(federation(engine, shared=True), complement=SEEN[complement], local=RECIPES[recipe]).run(3)
        for engine in engines
    ]
    assert furthest(expected, actual) < TOLERANCE
    assert all(furthest(expected, other) == 0.0 for other in forked)


@pytest.mark.parametrize("complement", SEEN)
def test_entries_outside_the_mask_are_seen_and_do_not_move(complement: str) -> None:
    """The loss and the gradient are those of m o y + (1 - m) o c, and the update is 0 outside the mask."""
    one = with_complement(federation(serial()), SEEN[complement])
    state = one.start()
    state, _ = one.play_round(state)
    planned = one.begin_round(state)
    for job in planned.jobs:
        (update,) = serial().train([job])
        for name, kept in job.mask.items():
            assert not bool(update.theta[name][~kept].any())
            assert torch.equal(job.theta[name][kept], state.theta[name][kept])
    seen = {id(job.theta) for job in planned.jobs}
    assert (seen == {id(planned.state.theta)}) == (complement == "frozen")


def test_one_step_is_the_gradient_at_the_whole_model() -> None:
    """With a single step of SGD, theta_n - theta_q is -lr times the gradient of FedAvg, inside the mask."""
    one = federation(serial())
    one = replace(one, local=fc.LocalSGD(local_steps=1, batch_size=64, lr=0.1, momentum=0.0), complement=fc.Frozen())
    state = one.start()
    masked = one.begin_round(state).jobs
    whole = [replace(job, mask={}, options=None) for job in masked]
    for update, full in zip(serial().train(masked), serial().train(whole), strict=True):
        for name, tensor in prune(full.theta, update.mask).items():
            torch.testing.assert_close(update.theta[name], tensor, rtol=0, atol=1e-6)


def test_a_federation_of_kept_copies() -> None:
    """A copy is the initial model until its client trains, and then what it trained, inside its mask."""
    one = with_complement(federation(serial(), "FedRolex"), fc.Kept())
    state = one.start()
    planned = one.begin_round(state)
    assert all(complement_error(state.theta, plan.mask, view) == 0 for plan, view in _views(one, state, planned.plans))
    updates = {update.client: update for update in serial().train(planned.jobs)}
    after, _ = one.end_round(planned, updates.values())
    for client in range(len(one.clients)):
        copy = copy_of(one, after, client)
        for name, start in one.theta0.items():
            expected = start
            if client in updates:
                kept = updates[client].mask.get(name, torch.ones_like(start, dtype=torch.bool))
                expected = torch.where(kept, updates[client].theta[name], start)
            assert torch.equal(copy[name], expected)
    later = one.begin_round(after)
    errors = [complement_error(after.theta, plan.mask, view) for plan, view in _views(one, after, later.plans)]
    assert max(errors) > 0
    assert later.pruning.each == pytest.approx([error / later.pruning.norm2 for error in errors])


def _views(
    one: fc.Federation, state: fc.federation.checkpoint.State, plans: list[fc.ClientPlan]
) -> list[tuple[fc.ClientPlan, dict[str, torch.Tensor]]]:
    return list(zip(plans, seen_by(one, state, plans), strict=True))


@pytest.mark.parametrize("complement", SEEN)
def test_a_stopped_run_resumes_to_the_same_bits(complement: str, tmp_path: Path) -> None:
    def run(rounds: int, out: Path, resume: bool = False) -> fc.History:
        one = replace(federation(serial()), local=fc.LocalSGD(1, 8, 0.1, control_variates=True))
        return with_complement(one, SEEN[complement]).run(rounds, out=out, resume=resume)

    expected = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    actual = run(4, tmp_path / "parts", resume=True)
    assert furthest(expected, actual) == 0.0
    with pytest.raises(fc.InputError, match="complement"):
        with_complement(federation(serial()), fc.Zero()).run(5, out=tmp_path / "parts", resume=True)


@pytest.mark.parametrize("name", REFUSED)
def test_policies_without_a_meaning_of_it_are_refused(name: str) -> None:
    with pytest.raises(fc.InputError, match=REFUSED[name]):
        with_complement(federation(serial(), name), fc.Frozen()).run(1)


def test_the_default_damping_follows_the_complement() -> None:
    plain = federation(serial())
    assert plain.aggregator.damping is None
    assert with_complement(plain, fc.Frozen()).aggregator.damping == 1.0
    undamped = replace(plain, aggregator=fc.mean(damping=0.0), complement=fc.Frozen())
    assert undamped.aggregator.damping == 0.0
    wrapped = replace(plain, aggregator=fc.FedAdam(fc.median()), complement=fc.Frozen())
    assert wrapped.aggregator.damping == 1.0
    assert isinstance(wrapped.aggregator, fc.FedAdam)


def test_zero_is_algorithm_one() -> None:
    expected, actual = federation(serial()).run(2), with_complement(federation(serial()), fc.Zero()).run(2)
    assert furthest(expected, actual) == 0.0
