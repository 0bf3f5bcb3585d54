"""``only`` and ``skip``: every policy prunes the selected layers and no others."""

import math
from pathlib import Path

import pytest
import torch
from tests.conftest import POLICIES, small_data
from torch import nn

import fedcover as fc
from fedcover.cli import app
from fedcover.config.choices import POLICY, choose
from fedcover.params import Mask, params_of
from fedcover.policies import check_policy, selected

NAMES = [name for name in POLICIES if name != "full"]
KEEPS = (1.0, 0.5, 0.25)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def masks_of(policy: fc.Policy, rounds: int = 3) -> list[Mask]:
    """The masks of a client with a keep of 0.25, over some rounds."""
    net = network()
    bound, theta = policy.bind(fc.trace(net, torch.zeros(2, 6))), params_of(net)
    cohort, state, masks = [fc.Client(i, i, fc.Budget(keep)) for i, keep in enumerate(KEEPS)], bound.start(), []
    for index in range(1, rounds + 1):
        plans, state = bound.plan(theta, cohort, fc.Round(index, 0), state)
        masks += [plan.mask for plan in plans if plan.client.number == 2]
    return masks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", [{"skip": ["2"]}, {"only": ["0.*"]}, {"only": ["*"], "skip": ["2.weight"]}])
def test_layers_that_are_left_out_keep_all_their_outputs(name: str, choice: dict[str, list[str]]) -> None:
    for mask in masks_of(POLICIES[name](**choice)):
        assert "2.bias" not in mask
        if "2.weight" in mask:  # units of layer 0 that are gone take their inputs to layer 2 with them
            rows = mask["2.weight"]
            assert bool((rows == rows[:1]).all())
            assert bool((rows[0] == mask["0.bias"]).all())


ELSEWHERE = ("S-GaP", "P-GaP", "PruneFL", "FedPart", "CoCoFL", "depth_windows")
"""Policies whose budgets are not a share of each layer."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_budgets_count_the_selected_layers(name: str) -> None:
    for mask in masks_of(POLICIES[name](skip=["2"])):
        assert int(mask["0.weight"].sum()) == math.ceil(0.25 * 48)


def test_windows_of_depth_count_the_selected_layers_together() -> None:
    for mask in masks_of(POLICIES["depth_windows"](skip=["2"])):
        assert set(mask) == {"0.weight", "0.bias", "4.weight", "4.bias"}
        assert sum(int(kept.sum()) for kept in mask.values()) in (math.floor(0.25 * 95), math.ceil(0.25 * 95))


def test_layers_that_fedpart_skips_are_trained_in_every_round() -> None:
    masks = masks_of(POLICIES["FedPart"](skip=["2"], warmup=0, rounds_per_layer=1, rounds_between=0))
    assert [sorted(mask) for mask in masks] == [["4.bias", "4.weight"], ["0.bias", "0.weight"], ["4.bias", "4.weight"]]
    assert not any(bool(kept.any()) for mask in masks for kept in mask.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_restricted_policy_keeps_the_contract_of_policies(name: str) -> None:
    check_policy(POLICIES[name](skip=["2"]), network(), torch.zeros(2, 6))


def test_a_group_of_units_stays_whole_if_one_of_its_layers_does() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.inner = nn.Linear(6, 8), nn.Linear(10, 8), nn.Linear(8, 10)
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x + self.branch(torch.relu(self.inner(x))))  # type: ignore[no-any-return]

    structure = fc.trace(Residual(), torch.zeros(2, 6))
    assert [group.name for group in fc.heterofl(skip=["branch"]).bind(structure).inner.groups] == ["inner"]
    with pytest.raises(fc.InputError, match="every group of units has a layer that only and skip leave out"):
        fc.heterofl(only=["first"]).bind(structure)


@pytest.mark.parametrize(
    ("choice", "pruned"),
    [
        ({"skip": ["4"]}, False),
        ({"skip": ["4.bias"]}, False),  # a logit without weights would not be 0
        ({"only": ["2"]}, False),
        ({"only": ["2"], "skip": ["4"]}, False),
        ({"only": ["2", "4"]}, True),
        ({"skip": ["0"]}, True),
    ],
)
def test_the_output_layer_loses_rows_of_absent_classes_only_if_it_is_selected(
    choice: dict[str, list[str]], pruned: bool
) -> None:
    net = network()
    bound, theta = fc.heterofl(**choice).bind(fc.trace(net, torch.zeros(2, 6))), params_of(net)
    cohort = [fc.Client(0, 0, fc.Budget(0.5), classes=(0, 2))]
    mask = bound.plan(theta, cohort, fc.Round(1, 0), bound.start())[0][0].mask
    assert mask["4.weight"].any(1).tolist() == [True, not pruned, True]
    assert ("4.bias" in mask) == pruned


def test_names_are_checked_and_the_nearest_is_suggested() -> None:
    structure = fc.trace(network(), torch.zeros(2, 6))
    with pytest.raises(fc.InputError, match=r"skip has '2.weigth', which matches no layer.*did you mean '2.weight'"):
        fc.heterofl(skip=["2.weigth"]).bind(structure)
    with pytest.raises(fc.InputError, match="leave no hidden layer to prune"):
        fc.weight_pruning(only=["4"]).bind(structure)
    with pytest.raises(fc.InputError, match=r"write skip=\['2'\]"):
        fc.weight_pruning(skip="2")
    with pytest.raises(fc.InputError, match="prunes nothing"):
        selected(POLICIES["full"](), skip=["2"])
    with pytest.raises(fc.InputError, match="the policy full prunes nothing"):
        fc.full(only=["2"])


def test_a_policy_of_ones_own_is_restricted_too() -> None:
    @fc.policy
    def first_half(theta: fc.params.Params, client: fc.Client, this_round: fc.Round) -> Mask:
        return {name: torch.arange(t.numel()).reshape(t.shape) < t.numel() // 2 for name, t in theta.items()}

    assert all(set(mask) == {"0.weight", "0.bias"} for mask in masks_of(selected(first_half, only=["0"])))


def test_settings_select_layers(tmp_path: Path) -> None:
    assert repr(choose(POLICY, "WP", {"skip": ["fc2.*"]}).build()) == "Ranked(name='WP') with skip=['fc2.*']"
    file = tmp_path / "mine.py"
    file.write_text("import fedcover\n\ndef mine():\n    return fedcover.weight_pruning()\n")
    assert repr(choose(POLICY, f"{file}:mine", {"only": ["fc1"]}).build()) == "Ranked(name='WP') with only=['fc1']"


def test_a_run_trains_under_the_selection_and_records_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    settings = [
        "data.name=digits", "data.clients=40", "model.name=cnn", "policy.name=WP", 'policy.skip=["features.0"]',
        "budgets.code=1,3x0.5", "rounds=1", "cohort=4", "local.epochs=1",
    ]  # fmt: skip
    arguments = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", *arguments, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert 'skip = ["features.0"]' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("engine", [fc.Serial(shrink=False), fc.Serial(shrink=True), fc.Vectorized("cpu")])
def test_engines_train_restricted_policies(engine: fc.Engine) -> None:
    federation = fc.Federation(
        fc.Task(network()), fc.data.iid(small_data(), 8, seed=1), fc.fedrolex(skip=["2"]), fc.by_slot("1,3x0.5"),
        cohort=4, engine=engine,
    )  # fmt: skip
    record = federation.run(2).last
    assert record.coverage["2.bias"].mean == 4
    assert record.coverage["0.bias"].mean == 2.5
