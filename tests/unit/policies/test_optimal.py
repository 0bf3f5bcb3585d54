"""optimal_masks: on the frontier in every round, within budget, on any network and of whole units too."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import plan_masks
from torch import nn

import fedcover as fc
from fedcover.errors import DesignWarning
from fedcover.masks.design import frontier, uniform_weights
from fedcover.masks.design.ranking import Ranking
from fedcover.models import MLP, LeNet
from fedcover.params import FULL, Mask, Params, params_of
from fedcover.policies.optimal import Optimal, designed

SMALL = "1444777777"


def cohort(code: str = SMALL) -> list[fc.Client]:
    return [fc.Client(slot, slot, budget) for slot, budget in enumerate(fc.parse_code(code))]


def planned(policy: Optimal, model: nn.Module, shape: tuple[int, ...], index: int = 1) -> tuple[Params, list[Mask]]:
    theta = params_of(model)
    bound = policy.bind(fc.trace(model, torch.zeros(2, *shape)))
    return theta, plan_masks(bound, theta, cohort(), fc.Round(index, 0), {})[0]


@pytest.mark.parametrize("gamma", [1, 3, 5, 6])
def test_coverage_noise_and_budgets_are_those_of_the_design(gamma: int) -> None:
    theta, masks = planned(fc.optimal_masks(gamma=gamma), MLP(), (1, 28, 28))
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == gamma
    assert masks[0] is FULL
    for mask, client in zip(masks[1:], cohort()[1:], strict=True):
        assert int(mask["fc1.weight"].sum()) == client.budget.keep * theta["fc1.weight"].numel()
        assert set(mask) == {"fc1.weight"}
    # Fresh weights are uniform, so the noise in the pruned tensor is that of the frontier for uniform weights.
    share = float(theta["fc1.weight"].square().sum() / sum(t.square().sum() for t in theta.values()))
    expected = frontier([uniform_weights([c.budget.keep for c in cohort()])]).at(gamma).mean_noise
    assert sum(fc.pruning_noise(theta, masks)) / 10 == pytest.approx(share * expected, rel=0.01)


def test_the_least_pruning_term_chooses_where_nobody_does() -> None:
    theta, masks = planned(fc.optimal_masks(), MLP(), (1, 28, 28))
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == 3  # the paper's level S: neither 1 nor all of 6
    theta, masks = planned(fc.optimal_masks(noise=0.17), MLP(), (1, 28, 28))
    assert sum(fc.pruning_noise(theta, masks)) / 10 <= 0.17  # Gamma 4 has 0.14 and Gamma 5 has 0.20, for any weights
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == 4


def test_better_than_the_paper_s_codes_at_their_own_coverage() -> None:
    """At equal budgets and equal Gamma_min the design has less noise than WP by code, or as much."""
    for code in ("1111223344", "1234556677", "1111444444", "1444777777", "1455666777"):
        theta = params_of(MLP())
        network = fc.trace(MLP(), torch.zeros(2, 1, 28, 28))
        by_code = plan_masks(fc.weight_pruning().bind(network), theta, cohort(code), fc.Round(1, 0), {})[0]
        gamma = fc.gamma_min(fc.coverage_of(by_code, theta))
        ours = plan_masks(fc.optimal_masks(gamma).bind(network), theta, cohort(code), fc.Round(1, 0), {})[0]
        assert fc.gamma_min(fc.coverage_of(ours, theta)) == gamma
        assert sum(fc.pruning_noise(theta, ours)) <= sum(fc.pruning_noise(theta, by_code)) + 1e-9


def test_layers_share_one_gamma_and_shares_move_from_round_to_round() -> None:
    theta, first = planned(fc.optimal_masks(), LeNet(), (3, 32, 32))
    _, second = planned(fc.optimal_masks(), LeNet(), (3, 32, 32), index=2)
    counts = fc.coverage_of(first, theta)
    assert len({int(counts[name].min()) for name in ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight")}) == 1
    assert not torch.equal(first[9]["fc1.weight"], second[9]["fc1.weight"])


def test_whole_units() -> None:
    _, masks = planned(fc.optimal_masks(gamma=5, units=True), MLP(), (1, 28, 28))
    held = torch.stack([mask.get("fc1.bias", torch.ones(200, dtype=torch.bool)) for mask in masks])
    assert int(held.sum(0).min()) == 5
    assert held.sum(1).tolist() == [200] + [150] * 3 + [100] * 6
    assert torch.equal(masks[9]["fc1.weight"].all(1), held[9])  # rows go whole
    assert torch.equal(masks[9]["fc2.weight"].all(0), held[9])


def test_ties_go_by_index() -> None:
    ranking = Ranking(torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0, 0.0]))
    assert ranking.first(3).tolist() == [True, True, True, False, False, False]
    assert ranking.between(3, 6).tolist() == [3, 4, 5]
    assert [None if held is None else int(held.sum()) for held in designed(ranking, [6, 3, 2], 1)] == [None, 3, 2]


def test_bad_wishes_name_the_remedy() -> None:
    with pytest.raises(fc.InputError, match="either gamma or noise"):
        fc.optimal_masks(gamma=2, noise=0.1)
    with pytest.raises(fc.InputError, match="gamma must be a whole number"):
        fc.optimal_masks(gamma=2.5)  # type: ignore[arg-type]
    with pytest.raises(fc.InputError, match=r"not bound.*policy\.bind"):
        fc.optimal_masks().plan({}, cohort(), fc.Round(1, 0), {})


def test_a_cohort_that_cannot_do_what_was_asked_does_its_best() -> None:
    """Cohorts differ where budgets belong to clients; a run does not stop in the middle."""
    with pytest.warns(DesignWarning, match="coverage 9 is out of reach.*at most 6"):
        theta, masks = planned(fc.optimal_masks(gamma=9), MLP(), (1, 28, 28))
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == 6
    theta, masks = planned(fc.optimal_masks(noise=0.0), MLP(), (1, 28, 28))
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == 1  # the least noise there is


def test_a_run_says_once_that_it_falls_short(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    settings = ["data.name=digits", "data.clients=20", "local.epochs=1", "policy.name=optimal", "policy.gamma=9"]
    arguments = ["run", "--set", "rounds=3", *(part for one in settings for part in ("--set", one))]
    by_client = ["--set", "budgets.code=4x1,0.5,3x0.25", "--set", "budgets.by=client", "--out", str(tmp_path / "run")]
    code, _, err = cli(*arguments, *by_client)
    assert code == 0, err
    assert err.count("out of reach") == 1
    assert "warning: coverage 9 is out of reach" in err
    assert "UserWarning" not in err
    code, _, err = cli(*arguments, "--set", f"budgets.code={SMALL}", "--out", str(tmp_path / "none"))
    assert code == 2  # budgets by slot: known before the first round
    assert "error: coverage 9 is out of reach: the budgets allow at most 6" in err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["policy.noise=-0.5"], "policy.noise must be 0 or more; got -0.5; it may be left out"),
        (["assign=true"], "assign has no effect"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    cli: Callable[..., tuple[int, str, str]], changes: list[str], sentence: str
) -> None:
    changes = ["data.name=digits", "data.clients=20", "policy.name=optimal", *changes]
    code, _, err = cli("run", *(part for one in changes for part in ("--set", one)))
    assert code == 2
    assert sentence in err


@pytest.mark.parametrize("policy", [fc.optimal_masks(), fc.weight_pruning()])
def test_a_budget_for_a_layer_that_is_not_there(policy: fc.Policy) -> None:
    bound = policy.bind(fc.trace(MLP(), torch.zeros(2, 1, 28, 28)))
    clients = [fc.Client(0, 0, fc.Budget(0.5, layers=(("nolayer", 3),), name="odd"))]
    with pytest.raises(fc.InputError, match=r"budget 'odd' has a part for 'nolayer', .* use fc1.weight"):
        bound.plan(params_of(MLP()), clients, fc.Round(1, 0), {})


def test_budgets_of_single_layers_are_met() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    budget = fc.Budget(0.5, layers=(("0.weight", 10),))
    clients = [fc.Client(0, 0, fc.Budget()), fc.Client(1, 1, budget)]
    bound = fc.optimal_masks().bind(fc.trace(model, torch.zeros(2, 8)))
    (_, mask), _ = plan_masks(bound, params_of(model), clients, fc.Round(1, 0), {})
    assert (int(mask["0.weight"].sum()), int(mask["2.weight"].sum())) == (10, 64)


def test_pairs_of_units_meet_over_the_rounds() -> None:
    """A weight between two hidden layers is held by who holds both its ends; over rounds every pair meets."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    theta = params_of(model)
    bound = fc.optimal_masks(units=True).bind(fc.trace(model, torch.zeros(2, 8)))
    clients = [fc.Client(n, n, fc.Budget(0.25)) for n in range(10)]
    ever = torch.zeros(64, 64, dtype=torch.bool)
    for index in range(1, 101):
        masks, _ = plan_masks(bound, theta, clients, fc.Round(index, 0), {})
        ever |= torch.stack([mask["2.weight"] for mask in masks]).any(0)
    assert bool(ever.all())


def test_of_equal_points_the_one_with_more_coverage_is_chosen() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    theta = {name: torch.zeros_like(tensor) for name, tensor in params_of(model).items()}
    bound = fc.optimal_masks().bind(fc.trace(model, torch.zeros(2, 8)))
    clients = [fc.Client(0, 0, fc.Budget())] + [fc.Client(n, n, fc.Budget(0.5)) for n in (1, 2)]
    masks, _ = plan_masks(bound, theta, clients, fc.Round(1, 0), {})
    assert fc.gamma_min(fc.coverage_of(masks, theta)) == 2


def test_eleven_million_parameters_are_designed_in_seconds() -> None:
    ranking_of = torch.rand(11_173_962, generator=torch.Generator().manual_seed(0))
    began = time.process_time()  # what other processes do meanwhile does not count
    held = designed(Ranking(ranking_of), [len(ranking_of) * keep // 4 for keep in (4, 3, 3, 3, 2, 2, 2, 2, 2, 2)], 5)
    assert time.process_time() - began < 3 * 3  # a third of that on a quiet machine
    assert int(sum(11_173_962 if mine is None else int(mine.sum()) for mine in held)) == sum(
        11_173_962 * keep // 4 for keep in (4, 3, 3, 3, 2, 2, 2, 2, 2, 2)
    )
