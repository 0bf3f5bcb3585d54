"""Exits travel with the training options: rounds over Flower have the bits of the serial engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.deploy.wire.training_options import decode_options, encode_options
from fedcover.seeding import ambient
from fedcover.training.exits import Exits
from tests.conftest import small_data
from tests.contracts.federations import serial
from tests.laws.strategies import same
from tests.networks import ExitNet
from tests.unit.deploy.loop import grid_of
from tests.unit.deploy.playing import play, remote

POLICIES: dict[str, Callable[[], fc.Policy]] = {
    "DepthFL": lambda: fc.depthfl(ramp_up=3),
    "ScaleFL": fc.scalefl,
    "InclusiveFL": fc.inclusivefl,
    "FeDepth": lambda: fc.fedepth(batch_size=512),
}
EXITS = (Exits((1, 2, 5), (0.2, 0.3, 0.5), 0.4, "last", 3.0), Exits((2, 4), in_turn=True))


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_a_run_on_the_wire_is_bit_identical_to_the_serial_engine(name: str) -> None:
    with ambient(4, "wire"):
        task = fc.Task(ExitNet())
    clients = fc.data.iid(small_data(64), clients=8, seed=1)
    budgets = fc.by_slot("124567")
    recipe = fc.LocalSGD(epochs=1, batch_size=8, lr=0.1, momentum=0.5)
    playing = fc.Federation(task, clients, POLICIES[name](), budgets, recipe, cohort=6, seed=5, engine=serial(True))
    expected = playing.run(2, evaluate_on=small_data(40, seed=9))
    far = remote(playing, POLICIES[name]())
    history = play(grid_of(playing), far, 2)
    assert history.column("accuracy") == expected.column("accuracy")
    assert history.theta is not None
    assert expected.theta is not None
    assert same(history.theta, expected.theta)


@pytest.mark.parametrize("exits", [*EXITS, None])
def test_exits_arrive_as_they_were_sent(exits: Exits | None) -> None:
    options, like = fc.TrainingOptions(exits=exits, report=True), {"w": torch.zeros(3)}
    parts: dict[str, bytes] = {}
    fields = encode_options(options, like, {}, parts)
    decoded = decode_options(fields, like, {}, {name: memoryview(part) for name, part in parts.items()})
    assert decoded is not None
    assert decoded.exits == exits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": 3}, "must have numbers, weights and teachers"),
        ({"numbers": [2, 1]}, "ascending"),
        ({"numbers": ["a"]}, "whole number"),
        ({"weights": ["a", 1, 2]}, "weight of an exit"),
        ({"distil": "much"}, "finite number"),
        ({"in_turn": 1}, "true or false"),
        ({"depth": 3}, "unexpected field 'depth' of exits"),
    ],
)
def test_malformed_exits_are_refused(change: dict[str, Any], message: str) -> None:
    like = {"w": torch.zeros(3)}
    fields = encode_options(fc.TrainingOptions(exits=EXITS[0]), like, {}, {})
    assert fields is not None
    with pytest.raises(fc.InputError, match=message):
        decode_options({**fields, "exits": {**fields["exits"], **change}}, like, {}, {})
    with pytest.raises(fc.InputError, match="must be null or their fields"):
        decode_options({**fields, "exits": 3}, like, {}, {})
