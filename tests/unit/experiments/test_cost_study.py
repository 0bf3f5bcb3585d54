"""The study of costs: its grid, the sentences that follow from its map, and one tiny run of it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting
from fedcover.config.schema import read_config
from fedcover.data import Split
from fedcover_experiments import runner
from fedcover_experiments.results import load
from fedcover_experiments.runner import Experiment
from fedcover_experiments.studies import costs
from fedcover_experiments.studies.cost_report import cost_map, map_as_dict
from fedcover_experiments.studies.cost_sentences import comparisons, sentences
from fedcover_experiments.studies.planned_costs import planned_cost

Cli = Callable[..., tuple[int, str, str]]


def test_the_grid_has_no_client_that_trains_the_whole_model() -> None:
    experiments = costs.experiments()
    assert 3 * len(experiments) <= 500
    assert len(set(experiments)) == len(experiments)
    whole = {e.policy for e in experiments if costs.keep_of(e) == 1}
    assert whole == {costs.FULL, "FedPart-frozen"}  # FedPart has no budgets
    for complement, (masks, _) in costs.GRID.items():
        traits = [costs.policy_of(name).traits() for name in masks]
        assert complement != costs.ZERO or not any(one.needs_complement for one in traits)
        assert complement != "kept" or all(one.moves for one in traits)


@pytest.mark.parametrize("policy", ["ordered_widths-zero", "random_weights-quantized", "depth_windows-kept"])
def test_a_setting_of_the_study_can_be_run_by_its_options(policy: str) -> None:
    chosen = costs.options_of(Experiment("cifar10", "iid", policy, "10x0.25"))
    config = read_config(
        None, [f"{name}={str(value).lower() if value is False else value}" for name, value in chosen.items()]
    )
    assert config.budgets.code == "10x0.25"
    assert config.complement.name == policy.partition("-")[2]


def cost_of(policy: str, code: str) -> dict[str, float]:
    planned = planned_cost(Experiment("cifar10", "iid", policy, code))
    return {"compute": planned.compute, "memory": planned.memory}


def test_planned_costs_are_those_of_dense_kernels() -> None:
    assert cost_of("full", "10x1") == cost_of("WP-zero", "10x0.25") == {"compute": 1, "memory": 1}
    pruned, frozen = cost_of("ordered_widths-zero", "10x0.25"), cost_of("random_submodels-frozen", "10x0.25")
    assert pruned["compute"] < 0.25 < 0.5 < frozen["compute"] < 1  # the forward pass stays whole
    assert pruned["memory"] < frozen["memory"] < 1
    fedpart = cost_of("FedPart-frozen", "10x1")
    assert fedpart["memory"] == 1  # that of its rounds of full training
    assert fedpart["compute"] < 1


def setting(complement: str, accuracies: list[float], masks: str = "WP", **shares: float) -> MappedSetting:
    shares = dict.fromkeys(RESOURCES, 1.0) | shares
    return MappedSetting("iid", masks, complement, 0.5, {str(i): a for i, a in enumerate(accuracies)}, shares, {})


def map_of(*settings: MappedSetting) -> CostMap:
    return CostMap({}, {"iid": {"0": 60.0, "1": 60.0, "2": 60.0}}, settings)


def test_the_largest_loss_of_a_complement_is_searched_and_tested() -> None:
    costs = map_of(
        setting("zero", [50.0, 51.0, 52.5], compute=0.5, uplink=0.5),
        setting("zero", [58.0, 58.0, 58.0], masks="HeteroFL", compute=0.5),  # changes averages too: not compared
        setting("frozen", [40.0, 41.0, 42.0], compute=0.5, memory=0.6, masks="FedPLT"),
        setting("frozen", [55.0, 56.0, 57.0], compute=0.7, uplink=0.25),
    )
    worst, *others = comparisons(costs)
    assert (worst.resource, worst.pruned, worst.other) == ("compute", costs.settings[0], costs.settings[2])
    assert worst.loss == pytest.approx(10 + 1 / 6)
    assert worst.test is not None
    assert worst.p == pytest.approx(min(1, worst.test.p * (1 + len(others))))
    assert all(one.loss < 0 for one in others)
    text = sentences(costs)[2]
    assert text.startswith(
        "Complements lose most where compute is scarce (IID): with 50 % of a full client's, WP, zero"
    )
    assert f"after Holm's correction over {1 + len(others)} comparisons" in text
    assert text.endswith(
        "complements cost at least 50 % of compute, 60 % of memory, 100 % of downlink, 25 % of uplink."
    )


def test_one_seed_has_no_test_and_no_loss_is_a_sentence_too() -> None:
    single = map_of(setting("zero", [50.0]), setting("frozen", [45.0]))
    assert "without a test for a single seed" in sentences(single)[2]
    assert sentences(map_of(setting("zero", [50.0])))[2].startswith("No complement was run")
    better = map_of(setting("zero", [50.0, 51.0]), setting("kept", [55.0, 56.0]))
    assert sentences(better)[2].startswith("Complements lose to pruned models at equal cost in none of 4 comparisons")


def test_sentences_name_the_best_at_a_quarter_and_the_members_of_fronts() -> None:
    costs = map_of(
        setting("zero", [40.0, 42.0], uplink=0.2, compute=0.2),
        setting("frozen", [50.0, 52.0], uplink=0.25),
    )
    first, second, _ = sentences(costs)
    assert first == (
        "IID, full FedAvg reaches 60.0 %; with at most 25 % of a full client's compute the best is WP, zero, keep 0.5"
        " (41.0 %), of its memory none, of its downlink none, of its uplink WP, frozen, keep 0.5 (51.0 %)."
    )
    assert second == (
        "IID, the settings on the front of compute are 1 zero and 1 frozen, of memory 1 frozen, of downlink 1 frozen,"
        " of uplink 1 zero and 1 frozen."
    )


def test_a_tiny_run_of_the_study_is_mapped(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, torch.arange(200) % 10, classes=10)
    monkeypatch.setattr(runner, "load", lambda name, folder: Split(examples, examples))
    command = ["study", "costs", "--on", "cifar10/iid", "--seeds", "1", "--rounds", "1", "--out", str(tmp_path), "-q"]
    for only, budgets in ((costs.FULL, "10x1"), ("ordered_widths-zero,random_weights-frozen", "10x0.5")):
        code, _, err = cli(*command, "--only", only, "--budgets", budgets)
        assert code == 0, err
    results = load(tmp_path / "costs.json")
    mapped = cost_map(results)
    assert mapped.study == {
        "data": "CIFAR-10", "network": "LeNet", "clients": 100, "cohort": 10, "splits": "IID",
        "keeps": "0.5", "rounds": 1, "seeds": 1, "runs": 3,
    }  # fmt: skip
    pruned, frozen = mapped.settings
    assert pruned.costs["uplink"] == pytest.approx(0.2567, abs=1e-4)
    assert frozen.costs["downlink"] > 1 > frozen.costs["uplink"]
    report = (tmp_path / "costs.md").read_text()
    assert all(f"- {text}" in report for text in map_as_dict(results)["sentences"])
    assert (tmp_path / "costs.svg").exists()
    assert "has no runs of cifar10/iid and 10x0.3; use some of" in cli(*command, "--budgets", "10x0.3")[2]


def test_studies_need_only_torch_and_numpy() -> None:
    """Machines with a GPU may have nothing else."""
    script = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "typer", "rich", "matplotlib", "click", "PIL"}:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import fedcover_experiments.__main__
from fedcover_experiments.studies.selection import StudySelection
print(len(StudySelection("costs", seeds=3, rounds=100).runs))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3 * len(costs.experiments())
