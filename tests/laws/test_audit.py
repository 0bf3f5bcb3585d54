"""Laws of audits over rounds: the fast counts agree with counts from masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcover as fc
from fedcover.audit import RoundsAudit, audit_rounds
from fedcover.clients import cohort_of
from fedcover.masks.coverage import coverage_of
from fedcover.params import params_of
from tests.conftest import POLICIES, plan_masks
from tests.laws.policy_networks import Case, mlp, networks

KEEPS = [1.0, 0.5, 1 / 3, 0.25, 0.125]


def counted(policy: fc.Policy, case: Case, keeps: list[float], rounds: int) -> list[dict[str, torch.Tensor]]:
    """Return the coverage of each round, computed from the masks of the clients that train."""
    bound = policy.bind(fc.trace(*case))
    theta, state = params_of(case[0]), bound.start()
    cohort = cohort_of(range(len(keeps)), [1] * len(keeps), [fc.Budget(keep) for keep in keeps], "slot")
    coverages = []
    for index in range(1, rounds + 1):
        masks, state = plan_masks(bound, theta, cohort, fc.Round(index, 0), state)
        coverages.append(coverage_of(masks, theta))
    return coverages


def least(counts: list[dict[str, torch.Tensor]]) -> int:
    return min(int(torch.stack([each[name] for each in counts]).sum(0).min()) for name in counts[0])


@given(
    networks(), st.sampled_from(list(POLICIES)), st.lists(st.sampled_from(KEEPS), min_size=1, max_size=3),
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=80)
@pytest.mark.filterwarnings("ignore:coverage")
def test_an_audit_counts_what_masks_cover(
    case: Case, name: str, keeps: list[float], rounds: int, window: int, times: int
) -> None:
    window = min(window, rounds)
    audit = audit_rounds(POLICIES[name](), fc.trace(*case), keeps, rounds, window, times)
    plain = counted(POLICIES[name](), case, keeps, rounds)
    assert audit.gamma_rounds == [least([each]) for each in plain]
    assert audit.gamma_min == min(audit.gamma_rounds)
    assert audit.gamma_window == min(least(plain[at : at + window]) for at in range(rounds - window + 1))
    assert audit.gamma_total == least(plain)
    reached = [index for index in range(1, rounds + 1) if least(plain[:index]) >= times]
    assert audit.rounds_to_cover == (reached[0] if reached else None)
    total = {tensor: sum(each[tensor] for each in plain) for tensor in plain[0]}
    for layer in audit.layers:
        counts = torch.as_tensor(total[layer.name])
        assert (layer.entries, layer.gamma) == (counts.numel(), int(counts.min()))
        assert layer.weights_covered == pytest.approx(float((counts > 0).double().mean()))
    entries = sum(layer.entries for layer in audit.layers)
    covered = sum(int((torch.as_tensor(counts) > 0).sum()) for counts in total.values())
    assert audit.weights_covered == pytest.approx(covered / entries)
    worst = next(layer for layer in audit.layers if layer.name == audit.worst_layer)
    assert worst.weights_covered == min(layer.weights_covered for layer in audit.layers)


@given(networks(), st.sampled_from(KEEPS))
@settings(max_examples=25)
def test_units_and_weights_of_policies_in_audits(case: Case, keep: float) -> None:
    """Prefixes leave the tail of every group at 0; weight-complete rolling leaves nothing."""
    sizes = [group.size for group in fc.heterofl().bind(fc.trace(*case)).groups]
    kept = sum(max(1, math.ceil(keep * size - 1e-9)) for size in sizes)
    for policy in (fc.heterofl(), fc.fixed_subnetwork()):
        audit = audit_rounds(policy, fc.trace(*case), [keep] * 3, 50)
        assert audit.units_covered == pytest.approx(kept / sum(sizes))
        assert (audit.gamma_total == 0) == (kept < sum(sizes))
        assert not audit.reads_theta


def test_policies_declare_whether_they_read_theta() -> None:
    readers = {name for name in POLICIES if audit_rounds(name, "mlp", "1,0.5", 1).reads_theta}
    assert readers == {
        *("WP", "NP", "PT", "optimal", "optimal_units", "S-GaP", "P-GaP", "FIARSE", "FedDST", "PruneFL"),
    }


def test_clients_that_sit_out_cover_nothing() -> None:
    audit = audit_rounds("PruneFL", "mlp", "3x1", 4)  # in the first round only one client trains
    assert audit.gamma_rounds == [1, 3, 3, 3]


def audit_of(name: str, keep: float, *widths: int) -> RoundsAudit:
    return audit_rounds(POLICIES[name](), fc.trace(*mlp(*widths)), [keep], math.lcm(*widths))


def test_fedrolex_covers_all_units_and_not_all_weights() -> None:
    audit = audit_of("FedRolex", 0.25, 40, 40)
    assert audit.units_covered == 1.0
    hidden = next(layer for layer in audit.layers if layer.name == "2.weight")
    assert hidden.weights_covered == pytest.approx(19 / 40)  # (10 + 10 - 1) of 40 differences of indices
    assert audit.worst_layer == "2.weight"
    assert audit.rounds_to_cover is None
    complete = audit_rounds(fc.weight_complete(), fc.trace(*mlp(40, 40)), [0.25], 16)
    assert (complete.weights_covered, complete.rounds_to_cover) == (1.0, 16)


def test_long_audits_are_counted_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (fc.fedecover(), fc.trace(*mlp(7, 5)), "3x0.5,0.25", 20, 4, 3)
    expected = audit_rounds(*arguments)
    monkeypatch.setattr("fedcover.audit.rounds.EXACT", 1)
    assert audit_rounds(*arguments) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of 1 or more; got 0"),
        ({"window": 11}, "window must be at most rounds, 10; got 11"),
        ({"times": 0}, "times must be a whole number of 1 or more; got 0"),
    ],
)
def test_audits_refuse_invalid_arguments(changes: dict[str, int], message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        audit_rounds("fedrolex", fc.trace(*mlp(3)), "1,0.5", **{"rounds": 10, **changes})
