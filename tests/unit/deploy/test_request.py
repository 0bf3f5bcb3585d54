"""Requests: the round trip is exact, bytes are saved, and a client that follows one trains what serial would."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given

import fedcover as fc
from fedcover._threads import one_thread
from fedcover.data import SingleClientPopulation
from fedcover.deploy.wire import (
    Limits,
    PendingRequest,
    TrainRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    job_from_request,
    request_from_job,
)
from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.deploy.wire.recipe import encode_recipe
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.errors import InputError
from fedcover.masks.cost import cost_of
from fedcover.models import MLP, LeNet
from fedcover.params import params_of, prune
from fedcover.policies import POLICIES
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import trace
from fedcover.training.options import TrainingOptions
from fedcover.training.recipes import LocalSGD
from tests.conftest import plan_masks
from tests.contracts.federations import federation, images, serial
from tests.unit.deploy.requests import random_request, requests, same_bits, same_masks


@given(requests)
def test_a_request_is_decoded_as_it_was_encoded(train_request: TrainRequest) -> None:
    decoded = decode_request(encode_request(train_request), train_request.theta, train_request.frozen)
    for name in ("client", "slot", "round", "seed", "recipe", "shrink", "frozen"):
        assert getattr(decoded, name) == getattr(train_request, name)
    assert same_masks(decoded.mask, train_request.mask)
    pruned = prune(train_request.theta, train_request.mask)
    assert list(decoded.theta) == list(train_request.theta)
    assert all(same_bits(decoded.theta[name], pruned[name]) for name in pruned)
    assert (decoded.options is None) == (train_request.options is None)
    if decoded.options and train_request.options:
        for name in ("gains", "thresholds", "distil", "regrow", "report"):
            assert getattr(decoded.options, name) == getattr(train_request.options, name)
        assert list(decoded.options.shifts) == list(train_request.options.shifts)
        assert all(same_bits(t, decoded.options.shifts[n]) for n, t in train_request.options.shifts.items())
        assert len(decoded.options.widths) == len(train_request.options.widths)
        assert all(same_masks(a, b) for a, b in zip(decoded.options.widths, train_request.options.widths, strict=True))


@given(requests)
def test_values_outside_the_mask_are_not_sent(train_request: TrainRequest) -> None:
    elsewhere = {}
    for name, tensor in train_request.theta.items():
        kept = train_request.mask.get(name, torch.tensor(True)) | (name in train_request.frozen)
        elsewhere[name] = torch.where(kept, tensor, torch.full_like(tensor, float("nan")))
    assert encode_request(replace(train_request, theta=elsewhere)) == encode_request(train_request)


def test_nan_and_minus_zero_keep_their_bits() -> None:
    bits = torch.tensor([0x7FC00001, -(2**31), 0x7F800000, 1], dtype=torch.int32).view(torch.float32)
    train_request = TrainRequest(0, 0, 1, 0, LocalSGD(), False, {"w": bits}, {})
    assert same_bits(decode_request(encode_request(train_request), {"w": torch.zeros(4)}).theta["w"], bits)


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.25])
@pytest.mark.parametrize("model", [MLP(), LeNet((1, 28, 28))])
def test_bytes_saved_are_real(model: torch.nn.Module, keep: float) -> None:
    network = trace(model, torch.zeros(2, 1, 28, 28))
    policy = fc.neuron_pruning().bind(network)
    theta = params_of(model)
    client = fc.Client(0, 0, fc.Budget(keep))
    (mask,), _ = plan_masks(policy, theta, [client], fc.Round(1, 0), policy.start())
    train_request = TrainRequest(0, 0, 1, 0, LocalSGD(), True, theta, mask)
    cost, data = cost_of(network, mask), encode_request(train_request)
    overhead = 400 + 100 * len(theta)  # a head: the recipe, and a row for each tensor
    assert cost.bytes_down - len(mask) <= len(data) <= cost.bytes_down + overhead
    up = encode_reply(fc.ClientUpdate(0, theta, mask, 5, 0.5), train_request)
    assert cost.bytes_up <= len(up) <= cost.bytes_up + overhead
    small = Shrinker(network).shrink(mask).cut(theta)  # what travels is the smaller model, bit for bit
    _, parts = open_frame(data, 1 << 30)
    assert all(bytes(parts[f"theta/{name}"]) == tensor.numpy().tobytes() for name, tensor in small.items())


def test_fjords_widths_take_few_bytes() -> None:
    network = trace(MLP(), torch.zeros(2, 1, 28, 28))
    policy, theta = fc.fjord().bind(network), params_of(network.model)
    cohort = [fc.Client(0, 0, fc.Budget(0.75))]
    (plan,), _ = policy.plan(theta, cohort, fc.Round(1, 0), policy.start())
    mask, options = plan.mask, plan.options
    assert options is not None
    with_widths, plain = (TrainRequest(0, 0, 1, 0, LocalSGD(), True, theta, mask, each) for each in (options, None))
    assert len(options.widths) == 4
    assert len(encode_request(with_widths)) < len(encode_request(plain)) + 1000


MAKERS: dict[str, Callable[[], fc.Policy]] = {
    **{name: POLICIES[name] for name in ("full", "WP", "NP", "HeteroFL", "FIARSE")},
    "FedDST, every round": lambda: fc.feddst(every=1),
    "FjORD, distilled": lambda: fc.fjord((0.3, 0.6), distil=0.4),
    "PruneFL, every round": lambda: fc.prunefl(every=1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_client_on_its_own_trains_what_serial_trains(name: str) -> None:
    """Bit for bit, there and back, with only its own examples and its own trainer, under every kind of options.

    The test of the strategy does the same with shrunk models, for every policy.
    """
    policy = "full" if name == "full" else MAKERS[name]()
    _follow(federation(serial(), policy, shared=True), False, 3, apart=True)


@pytest.mark.parametrize("name", ["NP", "WP", "HeteroFL", "FjORD, distilled", "FedDST, every round", "FIARSE"])
def test_convolutions_are_trained_as_serial_trains_them(name: str) -> None:
    _follow(images(serial(True), "residual", MAKERS[name](), shared=True), True, 2, apart=False)


def _follow(playing: fc.Federation, shrink: bool, rounds: int, apart: bool) -> None:
    state, trainers = playing.start(), {}
    for _ in range(rounds):
        with one_thread():
            begun = playing.begin_round(state)
            updates = list(playing.engine.train(begun.jobs))
            back = []
            for job, update in zip(begun.jobs, updates, strict=True):
                train_request = request_from_job(job, shrink)
                trainer = trainers.setdefault(job.client.id if apart else 0, ClientTrainer(shrink))
                followed = decode_request(encode_request(train_request), playing.theta0)
                own = SingleClientPopulation(job.client.id, playing.clients.examples_of(job.client.id))
                decoded = trainer.train(job_from_request(followed, playing.task, own))
                sent = PendingRequest.of(train_request, playing.clients.size(job.client.id))
                back.append(decode_reply(encode_reply(decoded, followed), sent, Limits()))
                _same_update(decoded, update)
                _same_update(back[-1], update)
                if not (job.options and job.options.regrow):
                    assert back[-1].mask is job.mask
            expected, record = playing.end_round(begun, updates)
            state, again = playing.end_round(playing.begin_round(state), back)
        assert all(torch.equal(expected.theta[name], state.theta[name]) for name in state.theta)
        assert same_masks(expected.policy, state.policy)
        assert again == record


def _same_update(a: fc.ClientUpdate, b: fc.ClientUpdate) -> None:
    assert (a.client, a.examples, a.train_loss) == (b.client, b.examples, b.train_loss)
    assert same_masks(a.mask, b.mask)
    assert all(torch.equal(a.theta[name], b.theta[name]) for name in b.theta)
    assert (a.report is None) == (b.report is None)
    if a.report is not None and b.report is not None:
        assert all(torch.equal(a.report[name], b.report[name]) for name in b.report)


RECIPE = encode_recipe(LocalSGD())
REQUEST = TrainRequest(4, 1, 3, 5, LocalSGD(), True, {"a": torch.ones(2, 3), "b": torch.ones(3)}, {})


@pytest.mark.parametrize(
    ("like", "why"),
    [
        ({"a": torch.ones(3, 2), "b": torch.ones(3)}, r"'a' has the shape \(2, 3\) there and \(3, 2\) here"),
        ({"a": torch.ones(2, 3), "b": torch.ones(3).double()}, "'b' has the type float32 there and float64 here"),
        ({"x": torch.ones(())}, "it does not have 'x'"),
        ({"a": torch.ones(2, 3)}, "it has 'b', which is not"),
        ({"a": torch.ones(2, 3), "b": torch.ones(3), "c": torch.ones(1)}, "it does not have 'c'"),
    ],
)
def test_another_model_is_named(like: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(InputError, match=f"{why}.*same model"):
        decode_request(encode_request(REQUEST), like)


def test_another_and_much_larger_model_is_named_too() -> None:
    large = {f"layer{i}.weight": torch.ones(10) for i in range(3000)}
    with pytest.raises(InputError, match=r"it does not have 'a'.*same model"):
        decode_request(encode_request(replace(REQUEST, theta=large)), REQUEST.theta)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "reply"}, "is 'reply', not a request"),
        ({"round": 0}, "round of the message must be a whole number of 1 or more; got 0"),
        ({"round": True}, "round of the message must be a whole number of 1 or more; got True"),
        ({"client": -1}, "client of the message must be a whole number of 0 or more"),
        ({"recipe": {**RECIPE, "lr": "1"}}, "lr of the message must be a finite number; got '1'"),
        ({"recipe": {**RECIPE, "lr": 0}}, "lr must be a positive number"),
        ({"recipe": {**RECIPE, "optimizer": "Lion"}}, "unknown optimizer"),
        ({"recipe": {**RECIPE, "optimizer": []}}, "unknown optimizer"),
        ({"recipe": {**RECIPE, "more": 1}}, "unexpected setting 'more'"),
        ({"recipe": {**RECIPE, "clip": "x"}}, "clip of the message must be a finite number"),
        ({"recipe": None}, "must be its settings by name"),
        ({"shrink": 1}, "shrink of the message must be true or false; got 1"),
        ({"mask": "a"}, "names of a mask must be a list"),
        ({"mask": ["a", "a"]}, "a mask names 'a'"),
        ({"mask": ["c"]}, "a mask names 'c'"),
        ({"options": 1}, "training options of a request must be null"),
        ({"options": {}}, "gains in the training options"),
        ({"tensors": [["a"]]}, "not listed by name, type and shape"),
        ({"more": 1}, "unexpected field 'more'"),
        ({"frozen": {"names": ["a"], "digest": ""}}, r"does not freeze what this client freezes \(nothing\)"),
        ({"frozen": None}, "must freeze the same tensors"),
        ({"frozen": {"digest": "0"}}, "the frozen tensors have other values on the server"),
    ],
)
def test_invalid_requests_are_refused(changes: dict[str, object], why: str) -> None:
    head, parts = open_frame(encode_request(REQUEST), 1 << 20)
    data = pack_frame({**head, **changes}, {name: bytes(part) for name, part in parts.items()})
    with pytest.raises(InputError, match=why):
        decode_request(data, REQUEST.theta)


def test_frozen_values_are_not_sent_but_must_be_the_same() -> None:
    request = replace(REQUEST, frozen=("a",), mask={"a": torch.eye(2, 3, dtype=torch.bool)})
    data, other = encode_request(request), {**REQUEST.theta, "a": torch.ones(2, 3) * 2}
    assert "theta/a" not in open_frame(data, 1 << 20)[1]
    assert torch.equal(decode_request(data, REQUEST.theta, ("a",)).theta["a"], torch.eye(2, 3))
    with pytest.raises(InputError, match="load the same pre-trained model"):
        decode_request(data, other, ("a",))
    with pytest.raises(InputError, match="server and client must freeze the same tensors"):
        decode_request(data, REQUEST.theta)


@pytest.mark.parametrize("name", ["theta/a", "theta/b", "round", "seed", "mask", "tensors", "frozen"])
def test_no_field_may_be_missing(name: str) -> None:
    head, parts = open_frame(encode_request(REQUEST), 1 << 20)
    head.pop(name, None)
    with pytest.raises(InputError):
        decode_request(pack_frame(head, {n: bytes(p) for n, p in parts.items() if n != name}), REQUEST.theta)


def test_what_cannot_be_sent_is_refused_by_the_sender() -> None:
    nested = TrainingOptions(
        widths=({"b": torch.tensor([True, True, True])}, {"b": torch.tensor([True, False, False])})
    )
    for train_request, why in (
        (replace(REQUEST, seed=2**64), "must fit into 64 bits"),
        (replace(REQUEST, mask={"c": torch.ones(1).bool()}), "names 'c'"),
        (replace(REQUEST, options=nested), "give nested masks"),
        (replace(REQUEST, theta={"a": torch.ones(2, dtype=torch.complex64)}), "cannot be sent"),
        (replace(REQUEST, recipe=type("Mine", (LocalSGD,), {})()), "the recipe Mine is a class of your own"),
    ):
        with pytest.raises(InputError, match=why):
            encode_request(train_request)


def test_the_same_request_is_the_same_bytes() -> None:
    assert all(encode_request(random_request(seed)) == encode_request(random_request(seed)) for seed in range(20))
