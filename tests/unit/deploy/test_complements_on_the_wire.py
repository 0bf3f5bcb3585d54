"""Complements over Flower: bits are those of the serial engine, whatever happens to the devices' copies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from safetensors.torch import load_file
from torch import Tensor, nn

import fedcover as fc
from fedcover._threads import one_thread
from fedcover.config.build import build_federation
from fedcover.config.schema import check_config
from fedcover.deploy.flower.client import COPY
from fedcover.deploy.flower.round_rules import RoundRules
from fedcover.deploy.node import configured_client
from fedcover.deploy.node.copies import CopyFile, copy_finder, store_copy
from fedcover.deploy.node.worker import COPY_FOLDER
from fedcover.deploy.wire import (
    ExactValues,
    KeptCopy,
    SentComplement,
    TrainRequest,
    encode_request,
    open_frame,
    request_from_job,
)
from fedcover.deploy.wire.tensors import encode_values
from fedcover.engines.serial import Serial
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.checkpoint import digest_of
from fedcover.params import Params
from fedcover.toml import to_toml
from fedcover.training.recipes import LocalSGD
from tests.conftest import small_data
from tests.contracts.federations import federation
from tests.laws.strategies import same
from tests.unit.deploy.loop import LoopGrid, grid_of
from tests.unit.deploy.playing import QUICK, play, remote
from tests.unit.deploy.test_strategy_bits import low_rank

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")

SEEN: dict[str, fc.Complement] = {
    "frozen": fc.Frozen(), "8 bits": fc.Quantized(8), "4 bits": fc.Quantized(4), "2 bits": fc.Quantized(2),
    "kept": fc.Kept(),
}  # fmt: skip


HEAD = 1500
"""The most bytes of a message that are not values or masks."""


def seeing(complement: fc.Complement, policy: str = "FedRolex", **changes: Any) -> fc.Federation:
    """Return a federation whose clients see values outside their masks."""
    return replace(federation(Serial(shrink=True), policy, shared=True), complement=complement, **changes)


def equal(a: fc.History, b: fc.History) -> bool:
    assert a.theta is not None
    assert b.theta is not None
    return a == b and same(a.theta, b.theta)


@pytest.mark.parametrize("policy", ["FedRolex", "WP", "FIARSE"])
@pytest.mark.parametrize("complement", SEEN)
def test_a_run_on_the_wire_is_bit_identical_to_the_serial_engine(complement: str, policy: str, tmp_path: Path) -> None:
    """Also after the run was stopped and resumed, and with gradients that are corrected."""
    local = fc.LocalSGD(2, 8, 0.1, control_variates=policy == "WP")
    playing = seeing(SEEN[complement], policy, local=local)
    expected = playing.run(4, evaluate_on=small_data(40, seed=9))
    grid, far = grid_of(playing), remote(playing, playing.policy)
    play(grid, far, 3, out=tmp_path / "run")
    assert equal(play(grid, far, 4, out=tmp_path / "run", resume=True), expected)


@pytest.mark.parametrize("complement", SEEN)
def test_tensors_that_are_not_trained_have_the_same_complement(complement: str) -> None:
    playing = seeing(SEEN[complement], "WP", task=low_rank(0))
    expected = playing.run(3, evaluate_on=small_data(40, seed=9))
    assert equal(play(grid_of(playing), remote(playing, playing.policy), 3), expected)


@dataclass(frozen=True)
class Halves(fc.Complement):
    """A complement of the user's own, which devices do not have: half of theta and half of the client's copy."""

    copies: bool

    @property
    def keeps_copies(self) -> bool:  # type: ignore[override]
        return self.copies

    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        return {name: (tensor + copy.get(name, 0)) / 2 for name, tensor in theta.items()}

    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        return 4 * sent


@pytest.mark.parametrize("copies", [False, True])
def test_the_values_of_a_complement_of_your_own_are_sent(copies: bool) -> None:
    playing = seeing(Halves(copies), task=low_rank(0))
    expected = playing.run(3, evaluate_on=small_data(40, seed=9))
    assert equal(play(grid_of(playing), remote(playing, playing.policy), 3), expected)


def test_planning_for_devices_needs_no_model_for_each_client() -> None:
    for complement in SEEN.values():
        playing = seeing(complement)
        state, _ = playing.play_round(playing.start())
        planned, seen = playing.begin_round(state, views=False), playing.begin_round(state)
        assert all(job.theta is planned.state.theta for job in planned.jobs)
        assert planned.pruning.each == seen.pruning.each
        assert (len({id(job.theta) for job in seen.jobs}) == 1) == complement.exact


# Copies that devices keep --------------------------------------------------------------------------------------------


def sizes(history: fc.History) -> list[dict[int, int]]:
    """Return the bytes of the request to each client, round by round."""
    return [dict(zip(record.cohort, (record.wire or {})["down"], strict=True)) for record in history]


def without(playing: fc.Federation, absent: list[set[int]]) -> Params:
    """Return the model after rounds by the serial engine in which some clients are left out."""
    state = playing.start()
    for clients in absent:
        with one_thread():
            planned = playing.begin_round(state)
            updates = [u for u in Serial(shrink=True).train(planned.jobs) if u.client not in clients]
            state, _ = playing.end_round(planned, Arrivals(updates))
    return state.theta


def test_the_copy_of_a_device_is_sent_once() -> None:
    """The next requests have only its part, as if it saw zeros."""
    torch.manual_seed(0)
    playing = seeing(fc.Kept(), task=fc.Task(nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 3))))
    whole, far = 4 * sum(tensor.numel() for tensor in playing.theta0.values()), remote(playing, playing.policy)
    kept = sizes(play(grid_of(playing), far, 4))
    zero = sizes(play(grid_of(playing), replace(far, complement=fc.Zero(), aggregator=fc.mean("examples")), 4))
    reached, again = set[int](), 0
    for now, zeros in zip(kept, zero, strict=True):
        for client, size in now.items():
            expected = zeros[client] if client in reached else max(whole, zeros[client])
            assert abs(size - expected) < HEAD, f"client {client}: {size}, not {expected}"
            again += client in reached and zeros[client] < whole - HEAD
        reached |= set(now)
    assert again > 3


def damage(grid: LoopGrid, client: int) -> None:
    """Flip a bit of the last value in a device's copy."""
    record = grid.states[client].array_records[COPY]
    data = record[COPY].numpy().copy()
    data[-1] ^= 1
    grid.states[client][COPY] = ArrayRecord({COPY: Array(data)})


@pytest.mark.parametrize("loss", ["lost", "damaged"])
def test_a_device_without_its_copy_is_left_out_once_and_gets_it_again(loss: str) -> None:
    playing = seeing(fc.Kept())
    cohorts = playing.run(4).column("cohort")
    client = next(c for c in cohorts[0] if all(c in cohort for cohort in cohorts))
    grid, far = grid_of(playing), remote(playing, playing.policy)

    def lose(record: fc.RoundRecord) -> None:
        if record.round == 2:
            damage(grid, client) if loss == "damaged" else grid.states[client].clear()

    history = play(grid, far, 4, on_round=lose)
    assert [[row["client"] for row in record.rejected] for record in history] == [[], [], [client], []]
    assert "the client's copy of the model is missing, or is not the one that the" in history[2].rejected[0]["reason"]
    down = [size[client] for size in sizes(history)]
    assert down[3] > max(down[1], down[2])
    assert history.theta is not None
    assert same(history.theta, without(playing, [set(), set(), {client}, set()]))


def test_a_reply_that_is_lost_or_rejected_renews_no_copy() -> None:
    """The device has trained, the server has not accepted it: its copy is that of the server again."""
    playing = seeing(fc.Kept())
    cohorts = playing.run(4).column("cohort")
    lost, wrong = [c for c in cohorts[0] if all(c in cohort for cohort in cohorts)][:2]
    grid, far = grid_of(playing), remote(playing, playing.policy)

    def tamper(client: int, number: int, reply: Message) -> Message | None:
        if number == 1 and client == lost:
            return None
        if number == 1 and client == wrong:
            reply.content.array_records["body"]["body"] = Array(torch.zeros(9, dtype=torch.uint8).numpy())
        return reply

    grid.tamper = tamper
    history = play(grid, far, 4)
    rejected = [{row["client"] for row in record.rejected} for record in history]
    assert rejected == [set(), {lost, wrong}, set(), set()]
    assert history.theta is not None
    assert same(history.theta, without(playing, rejected))


def test_a_copy_of_clipped_values_is_the_servers() -> None:
    """What a screened update is cut to is not what its device trained, so its values are sent again."""
    playing = seeing(fc.Kept(), screening=fc.Screening(1.1, action="clip"))
    expected = playing.run(4, evaluate_on=small_data(40, seed=9))
    assert any(record.limited for record in expected)
    history = play(grid_of(playing), replace(remote(playing, playing.policy), screening=playing.screening), 4)
    assert equal(history, expected)


def test_a_round_that_is_tried_again_starts_from_the_same_copies() -> None:
    playing = seeing(fc.Kept())
    expected = playing.run(3)
    grid = grid_of(playing)
    grid.tamper = lambda client, number, reply: None if number == 1 and client % 4 else reply
    rules = RoundRules(deadline=0.2, quorum=1.0, tries=4)
    history = play(grid, remote(playing, playing.policy), 3, rules)
    assert max((record.wire or {})["attempts"] for record in history) > 1
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)


def test_copies_and_late_replies_are_refused_together() -> None:
    playing = seeing(fc.Kept(), aggregator=fc.mean())
    with pytest.raises(fc.InputError, match="copies of the model need the replies of the round itself"):
        play(grid_of(playing), remote(playing, playing.policy), 1, replace(QUICK, late="next"))


def test_a_copy_in_a_file_is_found_by_its_digest(tmp_path: Path) -> None:
    """It is of this model, whole, and written by the same training; a full disk is one sentence."""
    theta, mask = {"w": torch.arange(4.0), "still": torch.ones(2)}, {"w": torch.tensor([True, False, True, False])}
    request = TrainRequest(0, 0, 1, 0, LocalSGD(), True, theta, mask, frozen=("still",), keeps_copy=True)
    update = fc.ClientUpdate(0, {"w": torch.tensor([9.0, 0.0, 8.0, 0.0]), "still": torch.ones(2)}, mask)
    path = tmp_path / "node" / "copy.safetensors"
    store, expected = CopyFile(path), {"w": torch.tensor([9.0, 1.0, 8.0, 3.0])}
    digest = digest_of(expected)
    assert copy_finder(store, {"w": theta["w"]})(digest) is None
    store_copy(store, request, update)
    found = copy_finder(store, {"w": theta["w"]})(digest)
    assert found is not None
    assert same(found, expected)
    assert copy_finder(store, {"w": theta["w"]})("0" * 64) is None
    for other in ({"w": torch.zeros(5)}, {"w": torch.zeros(4).double()}, {"v": torch.zeros(4)}, theta):
        assert copy_finder(store, other)(digest) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert copy_finder(store, {"w": theta["w"]})(digest) is None
    path.unlink()
    path.mkdir()
    with pytest.raises(fc.InputError, match="is a folder"):
        store_copy(store, request, update)


def test_a_node_keeps_its_copy_in_its_folder(tmp_path: Path) -> None:
    """A restarted node has it again; it is replaced by each training, and never used for another digest."""
    raw = {"cohort": 2, "data": {"name": "digits", "clients": 2}, "budgets": {"code": "0.5,0.5"}}
    config = check_config({**raw, "policy": {"name": "FedRolex"}, "complement": {"name": "kept"}})
    playing, _ = build_federation(config)
    job = playing.begin_round(playing.start(), views=False).jobs[0]
    request, path = request_from_job(job, True, keeps_copy=True), tmp_path / "copy.safetensors"
    run, node = {"settings": to_toml(config.complete())}, {"client": job.client.id, COPY_FOLDER: str(tmp_path)}

    def train(sent: SentComplement, node: dict[str, Any] = node) -> dict[str, bytes]:
        _, parts = open_frame(configured_client.train(run, node, encode_request(request, sent)), 1 << 30)
        return {name: bytes(part) for name, part in parts.items()}

    first = train(ExactValues(playing.theta0))
    copy = load_file(path)
    assert all(torch.equal(copy[name][~kept], playing.theta0[name][~kept]) for name, kept in job.mask.items())
    assert all(encode_values(copy[name], kept) == first[f"theta/{name}"] for name, kept in job.mask.items())
    assert train(KeptCopy(digest_of(copy))) == train(ExactValues(copy))
    with pytest.raises(fc.InputError, match="copy of the model is missing"):
        train(KeptCopy(digest_of({name: tensor + 1 for name, tensor in copy.items()})))
    with pytest.raises(fc.InputError, match="this client has no folder for its copy"):
        train(ExactValues(copy), {"client": job.client.id})
