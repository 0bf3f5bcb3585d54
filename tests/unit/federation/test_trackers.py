"""Runs logged to TensorBoard, MLflow and Weights & Biases, by the real packages, and read back."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import small_data
from tests.unit.federation.test_callbacks import Crash, Killed

import fedcover as fc
from fedcover.federation.callbacks.metrics import numbers_of

Make = Callable[..., fc.Federation]
Points = dict[str, list[tuple[int, float]]]
TEST = small_data(60, seed=9)
OPTIONS = {"evaluate_on": TEST, "evaluate_every": 2, "checkpoint_every": 2}
pytestmark = pytest.mark.filterwarnings("ignore:::sqlalchemy", "ignore:::mlflow", "ignore:The ``noload``")


def expected(history: fc.History) -> Points:
    points: Points = {}
    for record in history:
        for name, value in numbers_of(record).items():
            if value is not None:
                points.setdefault(name, []).append((record.round, value))
    return points


def same_points(logged: Points, history: fc.History, tolerance: float = 0.0) -> None:
    """Compare all points but the seconds, which a killed run measures twice."""
    wanted = expected(history)
    assert set(logged) == set(wanted)
    for name, points in wanted.items():
        assert [step for step, _ in logged[name]] == [step for step, _ in points], name
        if name != "seconds":
            assert [v for _, v in logged[name]] == pytest.approx([v for _, v in points], rel=tolerance, abs=0), name


def killed_and_resumed(make: Make, folder: Path, callback: Callable[[], fc.Callback]) -> fc.History:
    """Play 5 rounds with two kills: before the first checkpoint, and between two."""
    for resume, at in ((False, 1), (True, 4)):
        with pytest.raises(Killed):
            make().run(5, out=folder, resume=resume, callbacks=[callback(), Crash(at)], **OPTIONS)
    history = make().run(5, out=folder, resume=True, callbacks=[callback()], **OPTIONS)
    assert history == make().run(5, **OPTIONS)
    return history


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(small_federation: Make, tmp_path: Path) -> None:
    history = killed_and_resumed(small_federation, tmp_path / "run", fc.TensorBoard)
    same_points(tensorboard_points(tmp_path / "run" / "tensorboard"), history, tolerance=1e-6)  # events have 32 bits
    again = small_federation().run(5, out=tmp_path / "run", resume=True, callbacks=[fc.TensorBoard()], **OPTIONS)
    same_points(tensorboard_points(tmp_path / "run" / "tensorboard"), again, tolerance=1e-6)


def test_tensorboard_does_not_mix_runs(small_federation: Make, tmp_path: Path) -> None:
    logs = fc.TensorBoard(str(tmp_path / "logs"))
    small_federation().run(1, callbacks=[logs])
    with pytest.raises(fc.InputError, match="already has the events of a run"):
        small_federation().run(1, callbacks=[logs])
    with pytest.raises(fc.InputError, match="needs a folder"):
        small_federation().run(1, callbacks=[fc.TensorBoard()])


def mlflow_points(uri: str, experiment: str = "fedcover") -> tuple[Points, dict[str, str], str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    stored = client.get_experiment_by_name(experiment)
    assert stored is not None
    (run,) = client.search_runs([stored.experiment_id])
    points = {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return points, run.data.params, run.info.status


def test_mlflow(small_federation: Make, tmp_path: Path) -> None:
    history = killed_and_resumed(small_federation, tmp_path / "run", fc.MLflow)
    points, params, status = mlflow_points(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    same_points(points, history)
    assert params["local.lr"] == "0.1"
    assert params["policy.name"] == "WP"
    assert status == "FINISHED"


def test_mlflow_in_a_store_of_ones_own(small_federation: Make, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'all.db'}"
    history = small_federation().run(2, callbacks=[fc.MLflow(uri, "mine")], **OPTIONS)
    points, _, _ = mlflow_points(uri, "mine")
    same_points(points, history)
    with pytest.raises(fc.InputError, match="needs a place"):
        small_federation().run(1, callbacks=[fc.MLflow()])


def wandb_points(folder: Path) -> Points:
    """Return the points of the only offline run in a folder."""
    import json

    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    points: Points = {}
    for data in records_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                if not name.startswith("_"):
                    points.setdefault(name, []).append((values["_step"], value))
    return points


def records_of(content: bytes) -> list[bytes]:
    """Return the records of a file in the log format of LevelDB, after W&B's header of 7 bytes."""
    block, place, records, part = 32768, 7, list[bytes](), b""
    while place + 7 <= len(content):
        left = block - place % block
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        data = content[place + 7 : place + 7 + length]
        part = data if kind in (1, 2) else part + data
        if kind in (1, 4):
            records.append(part)
        place += 7 + length
    return records


def test_wandb_offline(small_federation: Make, tmp_path: Path) -> None:
    history = killed_and_resumed(small_federation, tmp_path / "run", fc.WandB)
    same_points(wandb_points(tmp_path / "run"), history)
    with pytest.raises(fc.InputError, match="needs a run folder"):
        small_federation().run(1, callbacks=[fc.WandB()])


def test_without_its_package_a_tracker_names_the_extra(tmp_path: Path) -> None:
    """And importing fedcover imports none of them."""
    script = """
import importlib.util, sys
import torch, fedcover as fc
trackers = {"tensorboard": fc.TensorBoard, "mlflow": fc.MLflow, "wandb": fc.WandB}
assert not {*trackers, "optuna"} & set(sys.modules)
find = importlib.util.find_spec
x = torch.randn(60, 4)
clients = fc.data.iid((x, (x[:, 0] > 0).long()), clients=5)
for package, tracker in trackers.items():
    importlib.util.find_spec = lambda name, *rest: None if name == package else find(name, *rest)
    federation = fc.Federation(fc.Task(torch.nn.Linear(4, 2)), clients, cohort=2)
    try:
        federation.run(1, out=f"run-{package}", callbacks=[tracker()])
    except fc.MissingExtraError as error:
        print(error)
assert not set(trackers) & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    for line, package in zip(done.stdout.splitlines(), ("tensorboard", "mlflow", "wandb"), strict=True):
        assert line.endswith(f"install it with: pip install 'fedcover[{package}]'")


@pytest.mark.timeout(240)
def test_kill_9_leaves_no_point_out_and_none_twice(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """The real command with both trackers, killed while databases are created and while rounds are played."""
    changes = [
        "data.name=digits", "data.clients=12", "cohort=4", "policy.name=full", "budgets.code=1111", "rounds=6",
        "local.local_steps=300", "engine=serial", "callbacks.mlflow=true", "callbacks.tensorboard=true",
    ]  # fmt: skip
    (tmp_path / "config.toml").write_text("")  # with a file, --resume begins a run where there is none
    sets = [part for change in changes for part in ("--set", change)]
    out = tmp_path / "run"
    run = [sys.executable, "-m", "fedcover", "run", str(tmp_path / "config.toml"), *sets, "--resume", "--quiet",
           "--no-report", "--out", str(out)]  # fmt: skip
    for marks in (".mlflow.db.*", "mlflow.db", "checkpoints/round-000002.*"):
        process = subprocess.Popen(run)
        while not list(out.glob(marks)):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
    code, _, err = cli(*run[3:])
    assert code == 0, err
    history = fc.History.load(out / "history.jsonl")
    assert len(history) == 6
    same_points(mlflow_points(f"sqlite:///{out / 'mlflow.db'}")[0], history)
    same_points(tensorboard_points(out / "tensorboard"), history, tolerance=1e-6)
