"""Rounds over Flower have the bits of the serial engine, and send what they count."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.deploy.flower.client import client_app
from fedcover.engines.serial import Serial
from tests.conftest import POLICIES, small_data
from tests.contracts.federations import federation, serial
from tests.laws.strategies import same
from tests.unit.deploy.loop import grid_of
from tests.unit.deploy.playing import play, remote
from tests.unit.structure.test_frozen import LowRank

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_on_the_wire_is_bit_identical_to_the_serial_engine(name: str) -> None:
    """Every policy, unequal clients, weights by examples, replies in another sequence."""
    options = {"every": 1} if name == "FedDST" else {}
    playing = federation(serial(shrink=True), POLICIES[name](**options), shared=True)
    expected = playing.run(3, evaluate_on=small_data(40, seed=9))
    history = play(grid_of(playing), remote(playing, POLICIES[name](**options)), 3)
    assert history == expected
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)


@pytest.mark.parametrize("kind", [fc.weighted("examples"), fc.availability([range(1, 8), range(7)], repeat=True)])
def test_sampling_and_callbacks_on_the_wire_are_those_of_the_serial_engine(kind: fc.Sampling, tmp_path: Path) -> None:
    playing = replace(federation(serial(shrink=True), fc.weight_pruning(), shared=True), sampling=kind)
    stop = fc.EarlyStopping("loss", patience=1, min_delta=1e9)
    expected = playing.run(5, evaluate_on=small_data(40, seed=9), callbacks=[stop])
    far = remote(playing, fc.weight_pruning())
    history = play(grid_of(playing), far, 5, out=tmp_path / "run", callbacks=[stop])
    assert history == expected
    assert len(history) == 2
    assert history.summary["stopped"]["round"] == 2


@pytest.mark.parametrize(
    "aggregator", [fc.FedAdam(fc.mean("examples")), fc.FedAvgM(fc.trimmed(0.2)), fc.mean("labels")]
)
def test_aggregators_on_the_wire_are_those_of_the_serial_engine(aggregator: fc.Aggregator, tmp_path: Path) -> None:
    """Also after the run was stopped and resumed."""
    playing = replace(federation(serial(shrink=True), fc.weight_pruning(), shared=True), aggregator=aggregator)
    expected = playing.run(3, evaluate_on=small_data(40, seed=9))
    far = remote(playing, fc.weight_pruning())
    play(grid_of(playing), far, 2, out=tmp_path / "run")
    history = play(grid_of(playing), far, 3, out=tmp_path / "run", resume=True)
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)
    assert history.column("label_bias") == expected.column("label_bias")


@pytest.mark.parametrize(
    "local",
    [
        fc.LocalAdam(2, 8, 0.01, keep_moments=True),
        fc.LocalSGD((3, 1), 8, 0.1, control_variates=True),
        fc.LocalSGD(batch_size=8, lr=0.1, local_steps=(5, 2), clip=1.0, schedule=fc.schedules.Cosine(3)),
    ],
    ids=["kept moments", "control variates", "schedule"],
)
def test_recipes_on_the_wire_are_those_of_the_serial_engine(local: fc.Recipe, tmp_path: Path) -> None:
    """Also after the run was stopped and resumed."""
    serial = replace(federation(Serial(shrink=True), fc.weight_pruning()), local=local)
    expected = serial.run(4, evaluate_on=small_data(40, seed=9))
    far = remote(serial, fc.weight_pruning())
    play(grid_of(serial), far, 2, out=tmp_path / "run")
    history = play(grid_of(serial), far, 4, out=tmp_path / "run", resume=True)
    assert history == expected
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)


@pytest.mark.parametrize("local", [fc.LocalSGD(2, 8, 0.1), fc.LocalAdam(2, 8, 0.01, keep_moments=True)])
def test_bytes_on_the_wire_are_counted_beside_the_whole_models(local: fc.Recipe) -> None:
    playing = replace(federation(Serial(shrink=False), "NP"), local=local)
    record = play(grid_of(playing), remote(playing, fc.neuron_pruning()), 2).last
    assert record.wire is not None
    numbers = 4 if local.keep_moments else 1  # a value and Adam's three moments
    assert record.wire["full"] <= 4 * numbers * sum(t.numel() for t in playing.theta0.values())
    assert 2 * len(record.cohort) * record.wire["full"] == pytest.approx(record.bytes_full, rel=1e-4)
    down, up = record.wire["down"], record.wire["up"]
    assert len(down) == len(up) == 6
    by_size = sorted(range(6), key=lambda slot: record.kept[slot])
    assert record.kept[by_size[0]] < record.kept[by_size[-1]]
    assert [up[slot] // 20 for slot in by_size] == sorted(size // 20 for size in up)  # the heads differ a little
    # Beyond values, masks and moments there is a head of at most two kilobytes each.
    assert 0 < sum(down) - record.bytes_down < 6 * 2000
    assert 0 < sum(up) - record.bytes_up < 6 * 2000


def low_rank(seed: int) -> fc.Task:
    torch.manual_seed(seed)
    return fc.Task(LowRank())


def test_frozen_values_are_not_sent() -> None:
    """And bits are those of the serial engine; a device with other frozen values is left out."""
    serial = replace(federation(Serial(shrink=True), fc.weight_pruning()), task=low_rank(0))
    expected = serial.run(2, evaluate_on=small_data(40, seed=9))
    grid = grid_of(serial)
    history = play(grid, remote(serial, fc.weight_pruning()), 2)
    assert history == expected
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)
    wire = history.last.wire
    assert wire is not None
    assert 0 < sum(wire["down"]) - history.last.bytes_down < 6 * 2000
    assert 0 < sum(wire["up"]) - history.last.bytes_up < 6 * 2000

    examples = serial.clients.examples_of(2)
    grid._apps[2] = client_app(low_rank(1), lambda context: examples, None, True)
    record = play(grid, remote(serial, fc.weight_pruning()), 1).last
    assert [left_out["client"] for left_out in record.rejected] == [2]
    assert "the same pre-trained model" in record.rejected[0]["reason"]
