"""Studies: the policies they compare have equal budgets, and the verdict follows from the numbers."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.conftest import plan_masks

import fedcover as fc
from fedcover.data import Split
from fedcover.errors import InputError
from fedcover.models import MLP, build
from fedcover.params import count, params_of
from fedcover.policies import POLICIES
from fedcover_experiments import results, runner
from fedcover_experiments.results import Outcome, Results, load, provenance_of, save
from fedcover_experiments.runner import Experiment, ExperimentRun
from fedcover_experiments.studies import STUDIES, coverage, methods
from fedcover_experiments.studies.figures import study_figure
from fedcover_experiments.studies.report import cells, data_titles, rows
from fedcover_experiments.studies.selection import StudyRunner, StudySelection

DOCS = Path(__file__).parents[3] / "docs" / "study"
Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("code", coverage.BUDGETS)
def test_all_kinds_of_masks_have_the_same_budgets(code: str) -> None:
    theta, structure = params_of(MLP()), fc.trace(MLP(), torch.zeros(2, 1, 28, 28))
    keeps = [budget.keep for budget in fc.parse_code(code)]
    fixed = count(theta) - theta["fc1.weight"].numel()
    gammas = {}
    for kind in coverage.KINDS:
        budgets = fc.parse_code(coverage.star_code(code) if kind == "star" else code)
        cohort = [fc.Client(slot, slot, budget) for slot, budget in enumerate(budgets)]
        masks = plan_masks(coverage.policy_of(kind, code).bind(structure), theta, cohort, fc.Round(1, 0), {})[0]
        kept = [(count(theta, mask) - fixed) / theta["fc1.weight"].numel() for mask in masks]
        assert kept == pytest.approx(keeps, abs=1e-5), kind
        gammas[kind] = fc.gamma_min(fc.coverage_of(masks, theta))
    assert gammas["most"] == int(sum(keeps))
    assert gammas["nested"] == sum(keep == 1 for keep in keeps)
    assert gammas["nested"] <= gammas["optimal"] <= gammas["most"]


def test_random_masks_differ_between_clients_and_rounds() -> None:
    theta, structure = params_of(MLP()), fc.trace(MLP(), torch.zeros(2, 1, 28, 28))
    policy = coverage.policy_of("random", "2x0.5").bind(structure)
    cohort = [fc.Client(n, n, fc.Budget(0.5)) for n in range(2)]
    (one, two), _ = plan_masks(policy, theta, cohort, fc.Round(1, 0), {})
    (later, _), _ = plan_masks(policy, theta, cohort, fc.Round(2, 0), {})
    assert not torch.equal(one["fc1.weight"], two["fc1.weight"])
    assert not torch.equal(one["fc1.weight"], later["fc1.weight"])


def test_outcomes_of_several_writers_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rounds, read = tmp_path / "results.json", 1, load

    def slowly(*arguments: Path) -> Results:
        stored = read(*arguments)
        time.sleep(0.02)  # in which another writer would replace the file
        return stored

    monkeypatch.setattr(results, "load", slowly)
    runs = [ExperimentRun(Experiment("mnist", "iid", "WP", "10x0.5"), seed) for seed in range(8)]

    def add(run: ExperimentRun) -> None:
        outcome = Outcome("mnist", "iid", "WP", "10x0.5", run.seed, [0.5], [1.0], None, 0, 0.0, 1.0, 1.0)
        entry = provenance_of(f"seed {run.seed}", 1, 0.1, fc.Serial(), {"mnist": "official"})
        save(path, {run: outcome}, rounds, entry)

    with ThreadPoolExecutor(4) as writers:
        list(writers.map(add, runs))
    assert set(read(path).outcomes) == set(runs)
    assert len(read(path).provenance) == len(runs)


def results_with(gains: dict[str, float], code: str = "10x0.5") -> Results:
    outcomes = {}
    for kind, gain in {"nested": 0.0, **gains}.items():
        for seed in range(5):
            accuracy = [0.9 + 0.01 * seed + gain + 0.0001 * ((seed * 7) % 3)] * 12
            outcome = Outcome("mnist", "iid", kind, code, seed, list(accuracy), [0.1] * 12, 0.9, 3, 0.2, 1.0, 1.0)
            outcomes[outcome.run] = outcome
    return Results(12, [], outcomes)


def test_the_verdict_follows_from_the_numbers() -> None:
    study = STUDIES["coverage"]
    results = results_with({"star": 0.02, "random": -0.03})
    assert data_titles(study, results) == ["MNIST IID"]
    by_policy = {cell.experiment.policy: cell for cell in cells(study, results, "MNIST IID")}
    assert by_policy["star"].gain is not None
    assert by_policy["star"].gain.mean == pytest.approx(2)
    assert by_policy["random"].gain is not None
    assert by_policy["random"].gain.mean == pytest.approx(-3)
    assert by_policy["nested"].gain is None
    shown = {row["policy"]: row for row in rows(study, results, "MNIST IID")}
    assert shown["star"]["gain over nested [95 %]"].startswith("**+2.00")
    assert len(study_figure(study, results).axes) == 1


def test_a_study_runs_and_reports(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(500, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, inputs.flatten(1)[:, :10].argmax(1), classes=10)
    monkeypatch.setattr(runner, "load", lambda name, folder: Split(examples, examples))
    code, _, err = cli("study", "labels", "--seeds", "2", "--rounds", "1", "--out", str(tmp_path))
    assert code == 0, err
    text = (tmp_path / "labels.md").read_text()
    assert f"# {STUDIES['labels'].question}" in text
    assert "| 1111223344 | assigned | 8 |" in text
    assert (tmp_path / "labels.svg").exists()
    again, _, _ = cli(
        "study", "labels", "--results", str(tmp_path / "labels.json"), "--out", str(tmp_path / "more"), "-q"
    )
    assert again == 0
    assert (tmp_path / "more" / "labels.md").read_text() == text
    assert "no study 'cover'; use one of coverage, labels, methods" in cli("study", "cover")[2]
    assert "has no runs of svhn; use some of mnist, uniform" in cli("study", "labels", "--on", "svhn")[2]


@pytest.mark.parametrize("name", [path.stem for path in sorted(DOCS.glob("*.json"))])
def test_the_committed_report_follows_from_its_results(name: str, cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("study", name, "--results", str(DOCS / f"{name}.json"), "--out", str(tmp_path), "-q")
    assert code == 0, err
    assert (tmp_path / f"{name}.md").read_text() == (DOCS / f"{name}.md").read_text()


def test_results_of_another_study_are_rejected(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("study", "coverage", "--results", str(DOCS / "labels.json"), "--out", str(tmp_path), "-q")
    assert code == 2
    assert "no runs of the study 'coverage'" in err


def test_the_experiments_of_the_studies() -> None:
    assert len(STUDIES["coverage"].experiments()) == 4 * (1 + 6 * 5)
    assert (
        ExperimentRun(Experiment("mnist", "non-iid", "assigned", "1111223344"), 0).experiment
        in STUDIES["labels"].experiments()
    )


def test_the_methods_of_the_study_have_the_same_average_budget() -> None:
    """Counted in parameters of HeteroFL's model; grow-and-prune also holds a part of the model whole."""
    model = build(methods.MODEL, methods.IMAGES["mnist"], methods.CLASSES, 0)
    structure, theta = fc.trace(model, torch.zeros(2, 1, 28, 28)), params_of(model)
    shares = {}
    for name in ("HeteroFL", "FedRolex", "WP", "optimal", "FIARSE", "FedDST"):
        policy = POLICIES[name]().bind(structure)
        code = next(e.code for e in methods.experiments() if e.policy == name)
        cohort = [fc.Client(slot, slot, budget) for slot, budget in enumerate(fc.parse_code(code))]
        masks, _ = plan_masks(policy, theta, cohort, fc.Round(1, 0), policy.start())
        shares[name] = sum(count(theta, mask) for mask in masks) / len(masks) / count(theta)
    assert shares == pytest.approx(dict.fromkeys(shares, 0.2664), abs=0.01)


def test_the_committed_study_of_methods_has_every_policy_on_all_data() -> None:
    study, results = STUDIES["methods"], load(DOCS / "methods.json")
    titles = data_titles(study, results)
    assert titles == ["MNIST IID", "MNIST non-IID", "CIFAR-10 IID", "CIFAR-10 non-IID"]
    for title in titles:
        table = rows(study, results, title)
        assert [row["policy"] for row in table] == [
            "HeteroFL",
            *(name for name in methods.METHODS if name != "HeteroFL"),
        ]
        assert all(float(row["s per round"]) > 0 for row in table)  # each policy was timed in a batch of its own


def test_the_page_of_methods_names_the_policies_that_it_leaves_out() -> None:
    page = (DOCS.parent / "results" / "methods.md").read_text()
    assert not [name for name in POLICIES if name not in methods.METHODS and name not in page]


def test_files_keep_their_key_for_the_policy(tmp_path: Path) -> None:
    """Committed results name the policy ``technique``, and so do files that are written now."""
    results = results_with({"star": 0.02})
    entry = provenance_of("fedcover study coverage", 10, 1.0, fc.Serial(shrink=False), {"mnist": "random"})
    save(tmp_path / "results.json", results.outcomes, 12, {**entry, "policy": "star", "round_seconds": 0.5})
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["made"][0]["technique"] == "star"
    assert all("technique" in item and "policy" not in item for item in stored["outcomes"])
    loaded = load(tmp_path / "results.json")
    assert loaded.outcomes == results.outcomes
    assert loaded.provenance[0]["policy"] == "star"


def test_a_policy_of_ones_own_joins_the_study_of_methods(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import fedcover as fc\ndef half(scaler: bool = False):\n    return fc.heterofl(scaler=scaler)\n")
    selection = StudySelection("methods", 1, 1, on="mnist", only=f"HeteroFL,{mine}:half")
    assert {e.policy for e in selection.experiments()} == {"HeteroFL", f"{mine}:half"}
    own = [run for run in selection.runs if run.experiment.policy != "HeteroFL"]
    inputs = torch.randn(100, 1, 28, 28)
    clients = fc.data.iid((inputs, torch.arange(100) % 10), 10)
    settings = {"clients": clients, "budgets": fc.by_slot(own[0].experiment.code), "cohort": 10}
    federation = STUDIES["methods"].federation_of(own[0], settings)
    assert federation.policy.scaler is False
    with pytest.raises(InputError, match="the study 'coverage' has no runs of"):
        StudySelection("coverage", 1, 1, only=f"{mine}:half").experiments()


def test_a_selection_states_its_precision() -> None:
    selection = StudySelection("complements-resnet", 3, 100, only="full", precision="bf16")
    assert selection.options == "complements-resnet --only full --precision bf16 --seeds 3 --rounds 100"
    assert {batch.precision for batch in selection.batches()} == {"bf16"}
    with pytest.raises(InputError, match="engine 'serial' computes in fp32 only"):
        StudyRunner("fedcover study", Path("none.json"), "serial").run(selection)
