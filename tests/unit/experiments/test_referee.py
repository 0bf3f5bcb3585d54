"""The referee: budgets of methods, the search for step sizes, rows that are run once, and what is measured."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.calibration.cost_model import CostModel
from fedcover.data import Split
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.federation.run_folder import lock_folder, unlock_folder
from fedcover.params import count, params_of
from fedcover_experiments.__main__ import main
from fedcover_experiments.referee import running
from fedcover_experiments.referee.budgets import keeps_of, structure_of, within_budget
from fedcover_experiments.referee.cells import RefereeCell, Selection, federations_of, tuned_setting
from fedcover_experiments.referee.measures import measure
from fedcover_experiments.referee.methods import METHODS, method_of
from fedcover_experiments.referee.rows import LevelRow, RefereeResults, RefereeRow, load_results
from fedcover_experiments.referee.running import Referee, tuned_lr
from fedcover_experiments.referee.settings import HELD_OUT, MIXES, SETTINGS, select_settings

Cli = Callable[..., tuple[int, str, str]]
EVEN, NOBODY = (SETTINGS[f"mnist_writers-mlp/natural/{mix}"] for mix in ("25-25-25-25", "nobody-full"))


def small_split() -> Split:
    """200 examples that can be learned, of 20 clients."""
    inputs = torch.randn(200, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, inputs.flatten(1)[:, :10].argmax(1), classes=10)
    return Split(examples, examples, fc.data.from_parts(examples, [range(10 * i, 10 * i + 10) for i in range(20)]))


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "load", lambda name, folder: small_split())
    monkeypatch.setattr(running, "_splits", {})  # other tests read the whole data


def selection(methods: str, rounds: int = 4, seeds: int = 2) -> Selection:
    return Selection.of("mnist_writers-mlp/natural/25-25-25-25,*-mlp/natural/nobody-full", methods, seeds, rounds)


def test_batches_of_a_large_network_are_small() -> None:
    for settings, most in (("*resnet18/*/short", 4), ("cifar10-lenet", 20)):
        chosen = Selection.of(settings, "HeteroFL,FedRolex", 0, 0)
        cells = [cell for method in chosen.methods for s in chosen.settings for cell in chosen.cells(s, method, 0.1)]
        batches = running._batches(cells)
        assert sorted(cell.name for batch in batches for cell in batch) == sorted(cell.name for cell in cells)
        assert max(map(len, batches)) == most
        assert all(len({cell.method.name for cell in batch}) == 1 for batch in batches)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_tuned_with_its_own_training(name: str) -> None:
    setting = SETTINGS[name]
    tuned = tuned_setting(setting)
    assert (tuned.problem, tuned.partition, tuned.training) == (setting.problem, setting.partition, setting.training)
    assert tuned.mix == setting.tuned_at


@pytest.mark.parametrize("name", [name for name in METHODS if within_budget(METHODS[name], EVEN)])
def test_no_client_holds_more_than_its_level(name: str) -> None:
    method = METHODS[name]
    (federation,) = federations_of([RefereeCell(EVEN, method, 0, 0.1, 4)], small_split(), Serial())
    reference = CostModel(structure_of(EVEN.problem), units=True)
    planned = federation.begin_round(federation.start())
    for plan in planned.plans:
        allowed = reference.at(EVEN.width_of(plan.client.id)).parameters
        assert count(params_of(federation.task.model), plan.mask) <= allowed


def test_methods_that_exceed_their_level_are_over_budget() -> None:
    over = {name for name in METHODS if not within_budget(METHODS[name], EVEN)}
    assert over >= {"FedAvg", "S-GaP", "P-GaP", "FedPart", "FedPLT", "depth_windows"}
    assert not over & {"smallest", "HeteroFL", "FedRolex", "FjORD", "FS", "WP", "FIARSE", "FedDST", "optimal"}


def test_a_limit_on_memory_gives_pruned_weights_nothing() -> None:
    """On dense kernels only removed units save memory, so that masks of single weights cannot fit."""
    small = replace(EVEN, constraint="memory")
    assert within_budget(METHODS["FedRolex"], small)
    assert keeps_of(METHODS["FedRolex"], small) == {1: 1.0, 0.5: 0.5, 0.25: 0.25, 0.125: 0.125}
    assert not within_budget(METHODS["WP"], small)


def test_mixes_have_the_published_shares() -> None:
    shares = {name: [count for _, count in mix] for name, mix in MIXES.items()}
    for name in ("25-25-25-25", "10-20-30-40", "5-10-25-60"):
        total = sum(shares[name])
        assert [100 * number / total for number in shares[name]] == [float(part) for part in name.split("-")]
    assert max(NOBODY.widths) < 1
    assert [EVEN.width_of(client) for client in range(5)] == [1, 0.5, 0.25, 0.125, 1]


def test_runs_with_one_seed_have_the_same_clients_and_parameters_for_all_methods() -> None:
    cells = [
        RefereeCell(setting, METHODS[name], 3, 0.1, 4) for name in ("HeteroFL", "WP") for setting in (EVEN, NOBODY)
    ]
    first, *others = federations_of(cells, small_split(), Serial())
    for other in others:
        assert other.clients is first.clients
        assert all(torch.equal(other.theta0[name], tensor) for name, tensor in first.theta0.items())
        assert other.begin_round(other.start()).cohort[0].id == first.begin_round(first.start()).cohort[0].id


@pytest.mark.usefixtures("small_data")
def test_cells_are_tuned_measured_and_run_once(tmp_path: Path) -> None:
    path, batches = tmp_path / "referee.json", []
    referee = Referee(path, "command", "serial", on_batch=lambda rows, seconds: batches.append(len(rows)))
    results = referee.run(selection("HeteroFL,smallest"))
    assert batches == [3, 3, 4, 4]  # three step sizes each, then two mixes with two seeds each
    tried = [row for row in results.rows if row.seed == HELD_OUT]
    assert {row.lr for row in tried} == set(EVEN.training.lrs)
    assert {row.rounds for row in tried} == {1}
    best = max((row for row in tried if row.method == "HeteroFL"), key=lambda row: row.accuracy or 0)
    assert {row.lr for row in results.rows if row.method == "HeteroFL" and row.seed != HELD_OUT} == {best.lr}
    row = next(row for row in results.rows if (row.setting, row.method, row.seed) == (EVEN.name, "HeteroFL", 0))
    assert [level.width for level in row.levels] == [1, 0.5, 0.25, 0.125]
    assert [round(level.kept, 3) for level in row.levels] == pytest.approx([1, 0.5, 0.25, 0.125], abs=0.01)
    assert row.worst_level == min(level.accuracy for level in row.levels)
    assert row.client_steps == 4 * 10 * 1  # rounds, clients, batches
    assert row.wall_seconds > 0
    assert [index for index, _ in row.curve] == [1, 2, 3, 4]
    assert row.certificate
    batches.clear()
    more = referee.run(selection("HeteroFL,smallest,FedRolex"))
    assert batches == [3, 4]
    assert {row.key for row in results.rows} < {row.key for row in more.rows}
    assert load_results(path).rows == more.rows


@pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")  # of classes that no client of a round has
def test_levels_are_tested_with_the_output_rows_of_all_classes() -> None:
    """HeteroFL's clients leave out the rows of classes that they lack; the largest level is the whole model."""
    cell, split = RefereeCell(EVEN, METHODS["HeteroFL"], 0, 0.1, 4), small_split()
    (federation,) = federations_of([cell], split, Serial())
    assert len(federation.clients.classes_of(0)) < 10
    row = measure(cell, federation, federation.run(4, evaluate_on=split.test), split.test)
    assert row.levels[0].accuracy == row.curve[-1][1]
    assert row.levels[0].kept < 1


@pytest.mark.usefixtures("small_data")
def test_cells_that_another_command_has_run_in_the_meantime_are_not_run_again(tmp_path: Path) -> None:
    path, batches = tmp_path / "referee.json", []
    other, first = Referee(path, "other", "serial"), Referee(path, "first", "serial")

    def note(rows: Sequence[RefereeRow], seconds: float) -> None:
        batches.append(rows)
        other.run(selection("FS,smallest", 1, 1))

    first.on_batch = note
    results = first.run(selection("FS,smallest", 1, 1))
    assert len(batches) == 1
    assert [batch["command"] for batch in results.batches].count("first") == 1


@pytest.mark.usefixtures("small_data")
def test_a_run_folder_in_use_is_not_a_failure_of_the_method(tmp_path: Path) -> None:
    """Another command runs this cell: a row with an error would leave the step size out of the search for good."""
    path, chosen = tmp_path / "referee.json", selection("FS", 1, 1)
    folder = tmp_path / "runs" / chosen.tuning_cells()[0].name
    folder.mkdir(parents=True)
    lock = lock_folder(folder)
    try:
        with pytest.raises(InputError, match="is in use by process"):
            Referee(path, "command", "serial", out=tmp_path / "runs").run(chosen)
    finally:
        unlock_folder(lock)
    assert not any(row.error for row in load_results(path).rows)
    assert Referee(path, "command", "serial", out=tmp_path / "runs").run(chosen).rows


@pytest.mark.usefixtures("small_data")
def test_the_smallest_model_is_evaluated_without_the_rest(tmp_path: Path) -> None:
    results = Referee(tmp_path / "referee.json", "command", "serial").run(selection("smallest"))
    row = results.rows[0]
    assert {level.kept for level in row.levels} == {row.levels[0].kept}
    assert row.levels[0].kept < 0.13
    assert row.levels[0].accuracy == pytest.approx(row.curve[-1][1], abs=1e-4)


@pytest.mark.usefixtures("small_data")
def test_a_run_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import torch\nimport fedcover as fc\n\n\ndef broken():\n    @fc.policy\n"
        "    def masks(theta, client, this_round):\n"
        "        return {'no.such': torch.ones(1, dtype=torch.bool)}\n    return masks\n"
    )
    results = Referee(tmp_path / "referee.json", "command", "serial").run(selection(f"{own}:broken,FS"))
    errors = {row.method: row.error for row in results.rows}
    assert "no.such" in errors[f"{own}:broken"]
    assert errors["FS"] == ""
    assert load_results(tmp_path / "referee.json").rows == results.rows
    again: list[str] = []
    referee = Referee(tmp_path / "referee.json", "command", "serial")
    referee.on_batch = lambda rows, seconds: again.append(rows[0].method)
    referee.run(selection(f"{own}:broken,FS"))
    assert again == [f"{own}:broken"]  # but not its search for a step size


@pytest.mark.usefixtures("small_data")
def test_every_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the step sizes."""
    monkeypatch.setattr(type(EVEN.training), "lrs", EVEN.training.lrs[:1])
    names = [name for name, method in METHODS.items() if method.kind != "depth"]  # this network has one hidden layer
    chosen = Selection.of("mnist_writers-mlp/natural/25-25-25-25", ",".join(names), 1, 2)
    results = Referee(tmp_path / "referee.json", "command", "serial").run(chosen)
    assert {row.method: row.error for row in results.rows} == dict.fromkeys(names, "")


def test_rounds_bytes_and_work_are_counted_up_to_the_target() -> None:
    split, setting = small_split(), replace(EVEN, problem=replace(EVEN.problem, target=0.05))
    cell = RefereeCell(setting, METHODS["FedAvg"], 0, 0.1, 3)
    (federation,) = federations_of([cell], split, Serial())
    history = federation.run(3, split.test)
    row = measure(cell, federation, history, split.test)
    assert (row.rounds_to_target, row.bytes_to_target) == (1, history[0].bytes_down + history[0].bytes_up)
    assert row.macs_to_target == pytest.approx(3 * 10 * history[0].macs, rel=1e-3)  # passes, examples of one batch
    never = replace(cell, setting=replace(setting, problem=replace(EVEN.problem, target=1.1)))
    assert measure(never, federation, history, split.test).rounds_to_target is None


def test_levels_are_tested_on_all_data_and_clients_on_their_own() -> None:
    split = small_split()
    assert split.clients is not None
    single = fc.data.from_parts(split.test, [[10 * client] for client in range(20)])
    own = Split(split.train, split.test, split.clients.with_tests(single))
    cell = RefereeCell(EVEN, METHODS["FedAvg"], 0, 0.1, 3)
    (federation,) = federations_of([cell], own, Serial())
    row = measure(cell, federation, federation.run(3, own.test), own.test)
    assert [level.accuracy for level in row.levels] == pytest.approx([row.curve[-1][1]] * 4, abs=1e-4)
    assert row.local is not None
    assert 20 * row.local == pytest.approx(round(20 * row.local), abs=1e-2)  # one example each
    assert row.local_deviation == pytest.approx((row.local * (1 - row.local)) ** 0.5, abs=1e-3)


def test_the_step_size_with_the_highest_accuracy_is_used() -> None:
    def tried(lr: float, accuracy: float | None, rounds: int = 1) -> RefereeRow:
        return RefereeRow(
            EVEN.name, "FS", HELD_OUT, lr, rounds, accuracy=accuracy, error="" if accuracy else "diverged"
        )

    rows = [tried(0.033, 0.5), tried(0.1, 0.6), tried(0.3, None), tried(0.3, 0.9, rounds=7)]
    results = RefereeResults({}, [], rows)
    assert tuned_lr(results, NOBODY, METHODS["FS"], selection("FS")) == 0.1
    assert tuned_lr(results, NOBODY, METHODS["WP"], selection("WP")) == EVEN.training.lr


def test_damaged_files_and_unknown_names_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "referee.json"
    level = LevelRow(1.0, 1, 1.0, 0.5, 0.5)
    row = RefereeRow(EVEN.name, "FS", 0, 0.1, 4, accuracy=0.5, levels=[level], curve=[(4, 0.5)])
    RefereeResults({}, [], []).add([RefereeCell(EVEN, METHODS["FS"], 0, 0.1, 4)], [row], {"command": "x"}).save(path)
    assert load_results(path).rows == [row]
    assert load_results(path).settings[EVEN.name]["training"]["lrs"] == list(EVEN.training.lrs)
    content = json.loads(path.read_text())
    for change in ({"accuracy": None}, {"lr": float("nan")}, {"levels": [{}]}, {"colour": 1}):
        path.write_text(json.dumps({**content, "rows": [{**content["rows"][0], **change}]}))
        with pytest.raises(InputError, match="damaged"):
            load_results(path)
    with pytest.raises(InputError, match=r"no setting matches 'svhn'; use some of core, published"):
        select_settings("svhn")
    with pytest.raises(InputError, match="no method 'FedRolx'; use some of FedAvg"):
        method_of("FedRolx")


@pytest.mark.usefixtures("small_data")
def test_both_commands_run_the_referee(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["study", "referee", "--settings", EVEN.name, "--seeds", "2", "--rounds", "2", "--engine", "serial"]
    code, out, err = cli(*options, "--methods", "FS,HeteroFL", "--out", str(tmp_path))
    assert code == 0, err
    assert "leaderboard.html" in out.replace("\n", "")
    assert "| FS |" in (tmp_path / "referee.md").read_text()
    assert len(list((tmp_path / "runs").rglob("summary.json"))) == 10
    capsys.readouterr()
    main([*options, "--methods", "FS,FedRolex", "--out", str(tmp_path / "referee.json")])
    assert "FedRolex" in capsys.readouterr().out
    again = load_results(tmp_path / "referee.json")
    assert [batch["runs"] for batch in again.batches] == [3, 3, 2, 2, 3, 2]
    assert "no study 'refere'" in cli("study", "refere")[2]


@pytest.mark.parametrize("name", ["DepthFL", "ScaleFL", "InclusiveFL"])
def test_methods_by_depth_get_a_network_with_exits_and_hold_at_most_their_level(name: str) -> None:
    method, setting = METHODS[name], SETTINGS["cifar10-resnet18/dirichlet-0.3/25-25-25-25"]
    structure = structure_of(setting.problem, method.network("resnet18"))
    policy, theta = method.build(setting.widths).bind(structure), params_of(structure.model)
    keeps, reference = keeps_of(method, setting), CostModel(structure_of(setting.problem), units=True)
    assert within_budget(method, setting)
    for width in setting.widths[1:]:
        (plan,), _ = policy.plan(theta, [fc.Client(0, 0, fc.Budget(keeps[width]))], fc.Round(1, 0), policy.start())
        assert count(theta, plan.mask) <= reference.at(width).parameters
    assert keeps[1] == 1.0


def test_a_method_by_depth_does_not_apply_to_a_network_without_exits(tmp_path: Path, small_data: None) -> None:
    chosen = Selection.of("mnist_writers-mlp/natural/25-25-25-25", "DepthFL", 1, 2)
    results = Referee(tmp_path / "referee.json", "command", "serial").run(chosen)
    assert {row.error for row in results.rows} == {"DepthFL needs a network with exits, and there is no mlp_exits"}
