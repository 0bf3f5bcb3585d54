"""CoCoFL trains whole layers, in runs that fit the budget and could not be longer."""

from hypothesis import given
from hypothesis import strategies as st

import fedcover as fc
from tests.laws.policy_networks import Case, networks, rounds
from tests.laws.strategies import kept_of


@given(networks(), st.floats(0.01, 1), st.integers(0, 9))
def test_clients_draw_among_the_longest_runs_that_fit(case: Case, keep: float, seed: int) -> None:
    policy = fc.cocofl().bind(fc.trace(*case))
    ends, most = range(len(policy.sizes) + 1), keep * sum(policy.sizes) + 1
    fitting = [range(a, b) for b in ends for a in ends[:b] if sum(policy.sizes[a:b]) < most]
    longest = {run for run in fitting if not any(set(run) < set(other) for other in fitting)}
    assert set(policy.runs(keep)) == (longest or {range(n := policy.sizes.index(min(policy.sizes)), n + 1)})
    ((theta, masks),) = rounds(fc.cocofl(), case, [keep] * 4, 1, seed)
    for kept in (kept_of(mask, theta) for mask in masks):
        shares = [{float(kept[name].double().mean()) for name in layer.tensors} for layer in policy.layers]
        assert [number for number, of_layer in enumerate(shares) if of_layer == {1.0}] in map(list, policy.runs(keep))
        assert {share for of_layer in shares for share in of_layer} <= {0.0, 1.0}
