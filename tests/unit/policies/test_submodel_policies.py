"""The field's policies in federations: classes, the server's step, and state that a stopped run takes up again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import plan_masks, small_data, small_net
from tests.laws.strategies import same
from torch import nn

import fedcover as fc
from fedcover.params import FULL, params_of
from fedcover.policies import POLICIES

Make = Callable[..., fc.Federation]
NEW = ["HeteroFL", "random_submodels", "FedRolex", "FedEcover", "weight_complete", "S-GaP", "P-GaP"]


def theta_of(history: fc.History) -> dict[str, torch.Tensor]:
    assert history.theta is not None
    return history.theta


@pytest.mark.parametrize("name", NEW)
def test_a_run_goes_on_to_the_same_bits(name: str, small_federation: Make, tmp_path: Path) -> None:
    whole = small_federation(policy=POLICIES[name]()).run(5)
    small_federation(policy=POLICIES[name]()).run(2, out=tmp_path / "run")
    resumed = small_federation(policy=POLICIES[name]()).run(5, out=tmp_path / "run", resume=True)
    assert resumed == whole
    assert same(theta_of(resumed), theta_of(whole))


@pytest.mark.parametrize("name", NEW)
def test_same_seed_same_history_and_another_seed_another(name: str, small_federation: Make) -> None:
    a, b, c = (small_federation(policy=POLICIES[name](), seed=seed).run(2) for seed in (3, 3, 4))
    assert a == b
    assert same(theta_of(a), theta_of(b))
    assert not same(theta_of(a), theta_of(c))


def one_class_each(policy: fc.Policy, seed: int = 0) -> fc.Federation:
    """Two clients, with classes 0 and 1 of three; nobody has class 2."""
    data = small_data()
    parts = [(data.labels == label).nonzero().flatten()[:20] for label in (0, 1)]
    return fc.Federation(
        fc.Task(small_net()), fc.data.from_parts(data, parts), policy, fc.by_slot([1.0, 0.5]), cohort=2, seed=seed
    )


def test_output_rows_are_averaged_over_those_who_have_the_class() -> None:
    federation = one_class_each(fc.heterofl())
    begun = federation.begin_round(federation.start())
    assert sorted(client.classes for client in begun.cohort if client.classes is not None) == [(0,), (1,)]
    state, record = federation.play_round(federation.start())
    for name in ("5.weight", "5.bias"):
        changed = (state.theta[name] != federation.theta0[name]).reshape(3, -1).any(1)
        assert changed.tolist() == [True, True, False]
    assert record.gamma_min == 0


def test_classes_are_asked_for_by_those_who_want_them_alone() -> None:
    for policy in (fc.heterofl(label_aware=False), fc.fedrolex()):
        federation = one_class_each(policy)
        assert all(client.classes is None for client in federation.begin_round(federation.start()).cohort)


def test_the_servers_step_goes_part_of_the_way(small_federation: Make) -> None:
    whole, half = (small_federation(policy=fc.fedecover(step=step), budgets=fc.by_slot([0.5, 0.25, 0.25, 0.5]))
                   for step in (1.0, 0.5))  # fmt: skip
    (far, record), (near, _) = (one.play_round(one.start()) for one in (whole, half))
    assert record.gamma_min == 0
    for name, old in whole.theta0.items():
        moved = far.theta[name] != old
        assert torch.equal(near.theta[name][~moved], old[~moved])
        torch.testing.assert_close(near.theta[name][moved], torch.lerp(old, far.theta[name], 0.5)[moved])


def test_no_certificate_speaks_of_part_of_a_step(small_federation: Make) -> None:
    for step, part in ((1.0, False), (0.5, True)):
        record = small_federation(policy=fc.fedecover(step=step), certify=True).run(1).last
        assert record.certificate is not None
        assert ("partial step" in record.certificate["sentence"]) == part


class Heads(nn.Module):
    """Scores of two layers, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.some, self.others = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.hidden(x))
        return torch.cat([self.some(x), self.others(x)], 1)


def test_heterofls_classes_lie_along_the_outputs_of_the_last_layer() -> None:
    up = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2))
    policy = fc.heterofl().bind(fc.trace(up, torch.zeros(2, 1, 8, 8)))
    two = [fc.Client(0, 0, fc.Budget(), classes=(0, 2))]
    (mask,), _ = plan_masks(policy, params_of(up), two, fc.Round(1, 0), {})
    assert mask["2.bias"].tolist() == [True, False, True, False]
    assert all(one.tolist() == [True, False, True, False] for one in mask["2.weight"].permute(0, 2, 3, 1).flatten(0, 2))


def test_heterofl_refuses_classes_that_it_cannot_find_among_its_rows() -> None:
    policy = fc.heterofl().bind(fc.trace(Heads(), torch.zeros(2, 5)))
    theta = params_of(Heads())
    everything, two = (fc.Client(0, 0, fc.Budget(), classes=classes) for classes in (tuple(range(7)), (0, 2)))
    assert plan_masks(policy, theta, [everything], fc.Round(1, 0), {})[0] == [FULL]
    with pytest.raises(fc.InputError, match=r"'others.weight'.*7 classes"):
        policy.plan(theta, [two], fc.Round(1, 0), {})


def test_the_servers_step_decays() -> None:
    policy = fc.fedecover(step=0.8, decay=0.5, every=10)
    assert [policy.server_step(fc.Round(q, 0)) for q in (1, 10, 11, 21)] == [0.8, 0.8, 0.4, 0.2]
    assert fc.fedrolex().server_step(fc.Round(500, 0)) == 1.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fc.fedecover(step=1.5), r"step must be a number in \(0, 1\]; got 1.5"),
        (lambda: fc.fedecover(every=0), "every must be a whole number of 1 or more; got 0"),
        (lambda: fc.heterofl(rates=[]), "give rates such as 1, 0.5, 0.25"),
        (lambda: fc.heterofl(rates=[2.0]), r"rates must be widths in \(0, 1\]; got 2.0"),
        (lambda: fc.s_gap(kappa=0), "kappa must be a whole number of 1 or more; got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], fc.Policy], says: str) -> None:
    with pytest.raises(fc.InputError, match=says):
        make()
