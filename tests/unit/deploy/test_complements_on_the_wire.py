"""Complements over Flower: bits are those of the serial engine, whatever happens to the devices' copies."""

from dataclasses import replace
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.engines.serial import Serial
from tests.conftest import small_data
from tests.contracts.federations import federation
from tests.laws.strategies import same
from tests.unit.deploy.loop import grid_of
from tests.unit.deploy.playing import play, remote

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")

SEEN: dict[str, fc.Complement] = {
    "frozen": fc.Frozen(), "8 bits": fc.Quantized(8), "4 bits": fc.Quantized(4), "2 bits": fc.Quantized(2),
    "kept": fc.Kept(),
}  # fmt: skip


def seeing(complement: fc.Complement, policy: str = "FedRolex", **changes: object) -> fc.Federation:
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
