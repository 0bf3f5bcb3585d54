"""Calibrations: the line through timed steps, their file, and the command that measures."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedcover as fc
from fedcover.calibration import UNITS, Calibration, Line, calibrate, keep_for, timing, weight_seconds
from fedcover.errors import InputError
from fedcover.models import INPUT_SHAPES, build
from fedcover.params import params_of
from fedcover.structure.trace import trace

PAPER = {
    name: trace(build(name, INPUT_SHAPES[name], 10, 0), torch.zeros(2, *INPUT_SHAPES[name]))
    for name in ("mlp", "lenet")
}
MLP = PAPER["mlp"]
FAST = Calibration("a test", "mlp", 159010, False, 10, ((0.5, 0.5), (1.0, 1.0)), 1e6, 5e5)


points = st.lists(
    st.tuples(st.floats(0.01, 1), st.floats(1e-7, 1e3)), min_size=2, max_size=6, unique_by=lambda p: round(p[0], 2)
)


@given(points)
def test_a_line_is_never_negative_and_never_falls(some: list[tuple[float, float]]) -> None:
    line = Line.through(some)
    assert line.base >= 0 <= line.slope
    assert line.residual >= 0 < line.at(1e-6) + line.at(1)
    spread = max(s for _, s in some) - min(s for _, s in some)
    assert line.residual <= spread + 1e-12  # a flat line does at least this well, and one from 0 no worse


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0.05, 0.9))
def test_a_line_finds_a_line(base: float, slope: float, first: float) -> None:
    line = Line.through([(k, base + slope * k + 1e-3) for k in (first, (first + 1) / 2, 1.0)])
    assert line.at(0.3) == pytest.approx(base + slope * 0.3 + 1e-3)
    assert line.residual == pytest.approx(0, abs=1e-9)


@given(points, st.booleans(), st.none() | st.floats(1, 1e12))
def test_a_calibration_survives_json(some: list[tuple[float, float]], units: bool, rate: float | None) -> None:
    calibration = Calibration("devïce", "m", 3, units, 10, tuple(sorted(some)), rate, None)
    assert Calibration.from_json(calibration.to_json()) == calibration


def damage(**changes: object) -> str:
    return json.dumps({**json.loads(FAST.to_json()), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '"x"', "null", "[" * 100_000, FAST.to_json()[:-9],
        FAST.to_json().replace("device", "devise"),
        damage(more=1), damage(format="fedcover-calibration-0"), damage(device=3), damage(units=1), damage(batch=0),
        damage(spread=-1), damage(spread=None),
        damage(batch=True), damage(parameters=1.5), damage(down=-1), damage(up=math.nan), damage(up="fast"),
        damage(points=[]), damage(points=[[1, 1]]), damage(points=[[0.5, 1], [0.5, 2]]),
        damage(points=[[1, 1], [0.5, 1]]),
        damage(points=[[0.5, 1, 1], [1, 1, 1]]), damage(points=[[0, 1], [1, 1]]), damage(points=[[0.5, 0], [1, 1]]),
        damage(points=[[0.5, math.inf], [1, 1]]), damage(points={"a": 1}), damage(points="ab"), damage(points=7),
        damage(points=[[0.5, 10**400], [1, 1]]), damage(line=None), damage(line={}), damage(points=[[0.5, 1], [1, 1]]),
        damage(line={"base": "a", "slope": 1, "residual": 0}),
    ],
)  # fmt: skip
def test_damaged_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is not a calibration") as caught:
        Calibration.load(path)
    assert "fedcover calibrate steps --out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_an_older_version_is_for_clients_without_a_complement() -> None:
    new = Calibration("a test", "mlp", 159010, False, 10, ((0.5, 0.5), (1.0, 1.0)), None, None, 0.0, complement=True)
    raw = json.loads(new.to_json())
    assert Calibration.from_json(json.dumps(raw)) == new
    del raw["complement"]
    assert not Calibration.from_json(json.dumps(raw)).complement


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")
    (tmp_path / "odd").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="odd"):
        Calibration.load(tmp_path / "odd")


def test_the_finding_compares_keeps() -> None:
    assert "makes this device faster: keep 0.5 saves 50%" in FAST.finding
    flat = replace(FAST, points=((0.5, 1.0), (1.0, 0.9)), units=True)
    assert "pruning whole units does not make this device faster" in flat.finding
    noisy = replace(FAST, points=((0.25, 1.0), (0.5, 1.4), (0.75, 0.9), (1.0, 1.3)))
    assert "hardly" in noisy.finding
    two = replace(FAST, points=((0.5, 0.93), (1.0, 1.0)), units=True)  # two points are always on their line
    assert "makes this device faster: keep 0.5 saves 7%" in two.finding
    assert "hardly" in replace(two, spread=0.05).finding
    assert "hardly" not in replace(FAST, spread=0.05).finding


def test_the_spread_is_measured_over_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [(1.0, 3.0, 2.0, 2.0, 9.0), (4.0, 4.0, 4.5, 4.0, 4.0)]
    monkeypatch.setattr(timing, "timed", lambda engine, jobs, repeats: times)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    calibration = calibrate(net, torch.zeros(2, 4), keeps=(0.5, 1), repeats=5)
    assert (calibration.points, calibration.spread) == (((0.5, 2.0), (1.0, 4.0)), 1.0)
    assert "hardly" in calibration.finding
    earlier = {key: value for key, value in json.loads(calibration.to_json()).items() if key != "spread"}
    assert Calibration.from_json(json.dumps(earlier)) == replace(calibration, spread=0.0)


def test_a_real_calibration_is_sane() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 10))
    before = params_of(wide)
    for _ in range(4):  # on a busy machine the first try may be too noisy
        calibration = calibrate(wide, torch.zeros(2, 512), keeps=(1, 0.1, 0.5), batch=8, units=True, repeats=5)
        if calibration.line.slope > 0:
            break
    assert [keep for keep, _ in calibration.points] == [0.1, 0.5, 1]
    assert all(0 < seconds < 1 for _, seconds in calibration.points)
    assert calibration.line.slope > 0, "removing nine units of ten from a wide layer saves time on any machine"
    assert calibration.batch == 8
    assert calibration.model == "Sequential"
    assert "torch" in calibration.device
    assert all(torch.equal(before[name], tensor) for name, tensor in wide.named_parameters())
    seconds = calibration.seconds_of_round(0.5, 10)
    keep = keep_for(trace(wide, torch.zeros(2, 512)), "seconds", seconds, calibration, True, steps=10)
    assert keep == pytest.approx(0.5, abs=0.01)


def test_calibrate_refuses_invalid_arguments() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(InputError, match="two or more"):
        calibrate(net, torch.zeros(2, 4), keeps=[0.5, 0.5])
    with pytest.raises(InputError, match="batch must be"):
        calibrate(net, torch.zeros(2, 4), batch=0)
    with pytest.raises(InputError, match="nothing to prune"):
        calibrate(nn.Linear(4, 2), torch.zeros(2, 4))
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    assert len(calibrate(tokens, torch.zeros(2, 3, dtype=torch.long), repeats=1).points) == 4


def test_budgets_have_five_units() -> None:
    assert UNITS == ("fraction", "parameters", "macs", "bytes", "seconds")
    assert fc.Budget(keep_for(MLP, "macs", 100_000)).keep < 1


def test_seconds_of_a_weight_are_what_prunefl_takes() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 6), torch.nn.Linear(6, 2))
    seconds, fixed = weight_seconds(net, torch.zeros(2, 8), keeps=(0.5,), repeats=1)
    assert set(seconds) == {"0.weight", "2.weight"}
    assert all(value >= 0 for value in seconds.values())
    assert fixed > 0
    policy = fc.prunefl(seconds=seconds, fixed=fixed).bind(fc.trace(net, torch.zeros(2, 8)))
    fc.check_policy(policy, net, torch.zeros(2, 8))
    for keeps in ((), (0.5, 1.0)):
        with pytest.raises(fc.InputError, match="keeps must be one or more numbers between 0 and 1"):
            weight_seconds(net, torch.zeros(2, 8), keeps=keeps)


def test_seconds_of_weights_are_of_batch_norms_as_federations_train_them() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    seconds, fixed = weight_seconds(net, torch.zeros(2, 8), keeps=(0.5,), batch=2, repeats=1)
    assert list(seconds) == ["0.weight"]
    assert fixed > 0
    assert not bool(net[1].running_mean.any())  # the caller's model is unchanged


def test_a_model_of_any_scores_and_inputs_can_be_calibrated() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.out(torch.relu(self.a(a) + self.b(b)))
            return scores

    calibration = calibrate(Towers(), {"a": torch.zeros(2, 4), "b": torch.zeros(2, 3)}, units=False, repeats=1)
    assert all(seconds > 0 for _, seconds in calibration.points)
