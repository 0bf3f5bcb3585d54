"""``fedcover calibrate``: steps, weights, link and serve."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fedcover.calibration import Calibration, timing
from fedcover.config.schema import parse_config, read_config
from fedcover.deploy import bandwidth
from fedcover.policies.prunefl import PruneFl
from fedcover.training.client import Job

Cli = Callable[..., tuple[int, str, str]]


def test_steps_are_shown_and_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    code, shown, err = cli("calibrate", "steps", "--whole-units", "--keeps", "0.1,1", "--out", str(path))
    assert code == 0, err
    assert "seconds per step" in shown
    assert "pruning whole units" in shown
    calibration = Calibration.load(path)
    assert (calibration.model, calibration.units, calibration.down) == ("mlp", True, None)
    code, shown, _ = cli("calibrate", "steps", "--keeps", "0.5,1", "--json")
    assert code == 0
    assert not Calibration.from_json(shown).units
    assert not Calibration.from_json(shown).complement


def test_steps_of_clients_that_see_the_whole_model_are_timed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def timed(engine: object, some: Sequence[Job], repeats: int) -> list[tuple[float, ...]]:
        jobs.extend(some)
        return [(1.0,), (2.0,)]

    monkeypatch.setattr(timing, "timed", timed)
    for units in ([], ["--whole-units"]):
        code, shown, err = cli("calibrate", "steps", "--complement", *units, "--keeps", "0.5,1")
        assert code == 0, err
        line, kind = " ".join(shown.split()), "units" if units else "weights"
        assert f"a share of the {kind} trained, the whole model seen" in line
        assert f"leaving out {'whole units' if units else 'weights'} makes this device faster" in line
    assert all(job.options is not None and job.options.complement for job in jobs)
    rows = jobs[2].mask["fc1.weight"]
    assert rows.all(1).equal(rows.any(1))


def test_a_link_is_shown_and_added_to_a_calibration(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda host, port: (2e6, 1e6))
    code, shown, err = cli("calibrate", "link", "5201")
    assert code == 0, err
    assert "link: 2.00 MB/s down, 1.00 MB/s up" in shown
    assert json.loads(cli("calibrate", "link", "5201", "--json")[1]) == {"down": 2e6, "up": 1e6}
    path = tmp_path / "device.json"
    before = Calibration("a test", "mlp", 159010, False, 10, ((0.5, 0.5), (1.0, 1.0)), None, None)
    path.write_text(before.to_json())
    code, shown, err = cli("calibrate", "link", "5201", "--out", str(path))
    assert code == 0, err
    assert "2.00 MB/s down" in shown
    after = Calibration.load(path)
    assert (after.points, after.down, after.up) == (before.points, 2e6, 1e6)


def test_a_link_is_not_measured_for_a_file_that_is_not_a_calibration(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda host, port: pytest.fail("the link was measured"))
    code, _, err = cli("calibrate", "link", "5201", "--out", str(tmp_path / "none.json"))
    assert code == 2
    assert "none.json cannot be read" in err


def test_serve_answers_one_link(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str]] = []

    def serve(port: int, host: str, ready: Callable[[int], None]) -> None:
        calls.append((port, host))
        ready(port)

    monkeypatch.setattr(bandwidth, "serve", serve)
    code, shown, err = cli("calibrate", "serve", "5201")
    assert (code, calls) == (0, [(5201, "127.0.0.1")])
    assert "127.0.0.1:5201" in err
    assert "link measured" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("steps", "--batch", "100000000000"), "use a smaller batch"),
        (("steps", "--keeps", "half"), "--keeps must be fractions"),
        (("steps", "--keeps", "0.5,2"), "keep must be in"),
        (("steps", "--model", "mpl"), "did you mean 'mlp'"),
        (("link", "nowhere"), "HOST:PORT"),
        (("serve", "99999"), "HOST:PORT"),
        (("weights", "--keeps", "1"), "keeps must be one or more numbers between 0 and 1"),
    ],
)
def test_invalid_options_get_one_sentence(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = cli("calibrate", *arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("command", ["steps", "weights"])
def test_a_file_that_cannot_be_written_is_reported_before_timing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(timing, "timed", lambda *job: pytest.fail("steps were timed"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x.json"):
        code, _, err = cli("calibrate", command, "--out", str(path))
        assert code == 2
        assert "folder" in err
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = cli("calibrate", command, "--out", str(tmp_path / "new" / "x.json"))
    assert code == 2
    assert "you may not write to" in err
    assert not (tmp_path / "new").exists()


def test_weights_are_written_as_settings_that_a_run_takes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A device on which half of the weights take half of the time.
    def steps(engine: object, jobs: Sequence[Job], repeats: int) -> list[tuple[float, ...]]:
        return [(sum(int(kept.sum()) for kept in job.mask.values()) * 1e-6 or 0.1568,) for job in jobs]

    monkeypatch.setattr(timing, "timed", steps)
    path = tmp_path / "prunefl.toml"
    code, shown, err = cli("calibrate", "weights", "--out", str(path))
    assert code == 0, err
    assert f"`fedcover run {path}`" in shown
    config = read_config(path)
    assert (config.model.name, config.policy.name) == ("mlp", "PruneFL")
    policy = config.policy.choice.build()
    assert isinstance(policy, PruneFl)
    assert policy.seconds == pytest.approx({"fc1.weight": 1e-6})
    assert (config.data.name, config.local.batch_size) == ("mnist", 10)
    code, shown, _ = cli("calibrate", "weights", "--model", "lenet", "--batch", "4")
    assert code == 0
    config = parse_config(shown)  # the run trains what was timed
    assert (config.model.name, config.data.name, config.local.batch_size) == ("lenet", "cifar10", 4)
    code, shown, _ = cli("calibrate", "weights", "--json")
    assert json.loads(shown)["seconds"] == pytest.approx({"fc1.weight": 1e-6})
