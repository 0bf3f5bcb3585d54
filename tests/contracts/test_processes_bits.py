"""Worker processes give the bits of the serial engine, for every policy and any number of workers."""

import pytest

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from tests.conftest import POLICIES, small_data
from tests.contracts.federations import federation, serial
from tests.laws.strategies import same

FEWER_OR_MORE_WORKERS = (1, 4)
UNIT_POLICIES = (
    "NP", "FS", "optimal_units", "HeteroFL", "random_submodels", "FedRolex", "FedEcover", "weight_complete", "FjORD",
)  # fmt: skip
"""Policies whose masks leave whole units to remove: models of the others are not shrunk."""


def assert_equal(actual: fc.History, expected: fc.History) -> None:
    assert actual == expected
    assert actual.theta is not None
    assert expected.theta is not None
    assert same(actual.theta, expected.theta)


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
@pytest.mark.parametrize(
    ("policy", "shrink"),
    [*((policy, False) for policy in POLICIES), *((policy, True) for policy in ("WP", *UNIT_POLICIES))],
)
def test_processes_equal_serial_bit_for_bit(policy: str, shrink: bool, processes: dict[bool, Processes]) -> None:
    test = small_data(40, seed=9)
    expected = federation(serial(shrink), policy, shared=True).run(3, evaluate_on=test)
    assert_equal(federation(processes[shrink], policy, shared=True).run(3, evaluate_on=test), expected)


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
@pytest.mark.parametrize("workers", FEWER_OR_MORE_WORKERS)
@pytest.mark.parametrize("policy", ["WP", "HeteroFL", "FjORD"])
def test_the_number_of_workers_does_not_change_a_bit(policy: str, workers: int) -> None:
    """One policy of weights, one of units, and one whose clients draw while they train."""
    test = small_data(40, seed=9)
    expected = federation(serial(True), policy, shared=True).run(3, evaluate_on=test)
    assert_equal(federation(Processes(workers, True), policy, shared=True).run(3, evaluate_on=test), expected)
