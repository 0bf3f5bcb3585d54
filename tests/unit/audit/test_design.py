"""`fedcover design`: the frontier in JSON, the clients' shares, and the paper's codes compared with the frontier."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.audit.design import design_report
from fedcover.calibration import CostModel
from fedcover.models import MLP, build, default_model
from fedcover.params import params_of
from fedcover.theory import Constants, Steps, theorem1
from fedcover_experiments.paper.published import tables
from tests.conftest import plan_masks

Cli = Callable[..., tuple[int, str, str]]


def test_json_has_the_frontier(cli: Cli) -> None:
    code, shown, err = cli("design", "--budgets", "1,0.75,0.75,0.75,0.5,0.5,0.5,0.5,0.5,0.5", "--json")
    assert code == 0, err
    found = json.loads(shown)
    assert [(p["gamma"], round(p["noise_factor"], 3)) for p in found["frontier"]] == [
        (1, 0.797), (2, 0.428), (3, 0.359), (4, 0.366), (5, 0.422), (6, 0.549),
    ]  # fmt: skip
    assert all(p["mean_noise"] == pytest.approx(p["noise_factor"] * p["gamma"] / 10) for p in found["frontier"])
    assert found["chosen"]["gamma"] == 3
    assert found["patterns"] is None


def test_shares_add_up(cli: Cli, tmp_path: Path) -> None:
    code, shown, err = cli("design", "--budgets", "1234556677", "--gamma", "5", "--figure", str(tmp_path / "d.svg"))
    assert code == 0, err
    assert "the code itself: Γ 5, mean δ² 0.2109; the frontier has 0.2109 there" in shown
    assert (tmp_path / "d.svg").read_text().startswith("<?xml")
    found = design_report(fc.parse_code("1234556677"), gamma=5)
    for client, keep in enumerate(found.keeps):
        assert sum((h.end - h.start) * h.parts[client] for h in found.holdings) == pytest.approx(keep)
    assert all(sum(h.parts) == pytest.approx(h.holders) for h in found.holdings)


def test_no_code_of_the_paper_is_better_than_the_frontier() -> None:
    """For uniform weights; the stars of levels M and S lie on it."""
    codes = {row.code for key in ("mnist-wp", "mnist-np") for row in tables()[key].rows}
    assert len(codes) == 14
    on_it = set()
    for code in codes:
        found = design_report(fc.parse_code(code))
        if found.patterns is None:
            continue
        same = next(point for point in found.frontier if point.gamma == found.patterns.gamma)
        assert found.patterns.mean_noise >= same.mean_noise - 1e-6
        if found.patterns.mean_noise < same.mean_noise + 1e-6:
            on_it.add(code)
    assert {"1111223344", "1234556677", "1111444444", "1444777777"} <= on_it


def test_a_model_s_own_weights() -> None:
    model = MLP()
    found = design_report(
        fc.parse_code("4x1,6x0.75"), model=model, example=torch.zeros(2, 1, 28, 28), weights="mlp, fresh"
    )
    assert {holding.layer for holding in found.holdings} == {"fc1.weight"}
    theta = {name: p.detach() for name, p in model.named_parameters()}
    share = float(theta["fc1.weight"].square().sum() / sum(t.square().sum() for t in theta.values()))
    assert found.chosen.noise_factor == pytest.approx(0.0234 * share, rel=0.02)


def measured(model: nn.Module, shape: tuple[int, ...], code: str, gamma: int, units: bool) -> tuple[float, int]:
    """Return the mean noise and the coverage of weights of the policy's own masks."""
    theta = params_of(model)
    policy = fc.optimal_masks(gamma, units=units).bind(fc.trace(model, torch.zeros(2, *shape)))
    clients = [fc.Client(n, n, budget) for n, budget in enumerate(fc.parse_code(code))]
    masks, _ = plan_masks(policy, theta, clients, fc.Round(1, 0), {})
    return sum(fc.pruning_noise(theta, masks)) / len(masks), fc.gamma_min(fc.coverage_of(masks, theta))


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize(("name", "code"), [("mlp", "1444777777"), ("lenet", "10x0.25"), ("lenet", "2x1,0.5,0.25")])
def test_the_noise_that_is_shown_is_that_of_the_masks(name: str, code: str, units: bool) -> None:
    """A weight between two hidden layers is pruned once, even if neither of its units is held."""
    model, example = default_model(name)
    found = design_report(fc.parse_code(code), model=model, example=example, units=units, window=1)
    for point in found.frontier:
        noise, gamma = measured(model, tuple(example.shape[1:]), code, point.gamma, units)
        assert point.mean_noise == pytest.approx(noise, rel=1e-6)
        assert point.mean_noise <= 1
        assert (point.weights_gamma, point.gamma) == ((gamma, point.gamma) if units else (None, gamma))
        if point.noise_factor is not None:
            assert point.noise_factor == pytest.approx(len(found.keeps) / point.gamma * noise, rel=1e-6)
    middle = found.frontier[len(found.frontier) // 2]
    asked = design_report(
        fc.parse_code(code), noise=middle.mean_noise, model=model, example=example, units=units, window=1
    )
    assert asked.chosen == max((p for p in found.frontier if p.mean_noise <= middle.mean_noise), key=lambda p: p.gamma)


def test_a_code_of_whole_units_is_measured_too() -> None:
    model, example = default_model("lenet")
    found = design_report(fc.parse_code("10x1100"), model=model, example=example, units=True, window=1)
    assert found.patterns is not None
    assert found.patterns == found.frontier[0]  # all keep the largest units, and no client the others
    assert (found.patterns.gamma, found.patterns.weights_gamma) == (0, 0)


@pytest.mark.parametrize("constants", [(0.01, 50.0, 2.0), (0.05, 0.1, 200.0), (2.0, 0.1, 0.1)])
@pytest.mark.parametrize("units", [False, True])
def test_the_whole_bound_chooses_where_its_constants_are_given(
    cli: Cli, constants: tuple[float, float, float], units: bool
) -> None:
    options = ["--constants", ",".join(map(str, constants)), "--lr", "0.05", "--steps", "8"]
    more = ["--whole-units", "--window", "1"] if units else []
    code, shown, err = cli("design", "--budgets", "1444777777", "--model", "mlp", *options, *more, "--json")
    assert code == 0, err
    found = json.loads(shown)
    model, example = default_model("mlp")
    norm2 = sum(float(t.double().square().sum()) for t in params_of(model).values())
    totals = {}
    for gamma in range(1, 7):
        noise, weights = measured(model, tuple(example.shape[1:]), "1444777777", gamma, units)
        bound = theorem1(Constants(*constants, gap=0), Steps(8, 0.05), 1, 10, weights, 10 * noise * norm2)
        totals[gamma] = bound.variance + bound.drift + bound.pruning
    assert {p["gamma"]: p["bound"] for p in found["frontier"]} == pytest.approx(totals, rel=1e-6)
    assert found["chosen"]["gamma"] == min(totals, key=lambda gamma: totals[gamma])
    if constants[0] == 0.01:
        assert found["chosen"]["gamma"] == 6  # gradient noise favours coverage; the pruning term by itself gives 3
    code, shown, _ = cli("design", "--budgets", "1444777777", "--model", "mlp", *options, *more)
    assert code == 0
    assert "the least bound at step size 0.05 and 8 local steps" in shown
    assert ("the theorem covers step sizes up to" in shown) == (constants[0] > 1 / (6 * 8 * 0.05))


def test_less_coverage_than_the_frontier_has_gives_its_least(cli: Cli) -> None:
    """As the policy chooses."""
    code, shown, err = cli("design", "--budgets", "4x1,6x0.75", "--gamma", "3")
    assert code == 0, err
    assert "chosen: Γ 4, the nearest to the requested 3" in shown


def test_coverage_of_weights_with_whole_units(cli: Cli) -> None:
    arguments = ["--budgets", "10x0.25", "--model", "lenet", "--whole-units", "--window", "4"]
    code, shown, err = cli("design", *arguments, "--json")
    assert code == 0, err
    found = json.loads(shown)
    assert [set(point) for point in found["frontier"]] == [
        {"gamma", "mean_noise", "noise_factor", "weights_gamma", "bound"}
    ] * 3
    assert found["units"]
    assert (found["chosen"]["gamma"], found["keeps"]) == (2, [0.25] * 10)
    assert list(dict.fromkeys(h["layer"] for h in found["holdings"])) == ["conv1", "conv2", "fc1", "fc2"]
    # Compare with masks planned by the policy itself.
    model = build("lenet", (3, 32, 32), 10, 0)
    theta = {name: tensor.detach() for name, tensor in model.named_parameters()}
    policy = fc.optimal_masks(units=True).bind(fc.trace(model, torch.zeros(2, 3, 32, 32)))
    clients = [fc.Client(n, n, fc.Budget(0.25)) for n in range(10)]
    planned = [plan_masks(policy, theta, clients, fc.Round(index, 0), {})[0] for index in range(1, 5)]
    counts = [fc.coverage_of(masks, theta) for masks in planned]
    together = {name: sum(one[name] for one in counts) for name in theta}
    window = found["window"]
    assert window["rounds"] == 4
    assert window["covered"] == pytest.approx(1 - fc.uncovered(together))
    assert window["covered_each"] == pytest.approx(1 - max(fc.uncovered(one) for one in counts))
    assert window["mean_noise"] == pytest.approx(sum(sum(fc.pruning_noise(theta, masks)) for masks in planned) / 40)
    assert window["gamma_min"] == fc.gamma_min(together)
    layers = {layer["layer"]: layer for layer in window["layers"]}
    assert {name for name, layer in layers.items() if layer["pairs"]} == {"conv2.weight", "fc1.weight", "fc2.weight"}
    for name, layer in layers.items():
        assert layer["gamma_min"] == int(together[name].min())
        assert layer["gamma_min_each"] == min(int(one[name].min()) for one in counts) == (0 if layer["pairs"] else 2)
        assert layer["covered"] == pytest.approx(float((together[name] > 0).float().mean()))
    # Units are covered in every round, pairs of them only over several rounds, since shares move.
    pairs = layers["fc2.weight"]
    assert pairs["covered_each"] < 0.5 < pairs["covered"]
    code, shown, _ = cli("design", *arguments)
    assert code == 0
    assert "chosen: coverage of units Γ 2" in shown
    assert "of conv1, largest units first" in shown
    assert "single weights in 4 rounds: " in shown
    assert "never held" in shown
    assert "between units of two hidden layers" in shown


def test_budgets_for_whole_units_buy_whole_units(cli: Cli) -> None:
    half = CostModel(fc.trace(MLP(), torch.zeros(2, 1, 28, 28)), units=True).at(0.5).parameters
    for units, keep in ((["--whole-units", "--window", "1"], 0.5), ([], 0.4930)):
        arguments = ["--model", "mlp", "--budget-unit", "parameters", "--budgets", f"159010,{half}", *units, "--json"]
        code, shown, err = cli("design", *arguments)
        assert code == 0, err
        assert json.loads(shown)["keeps"] == pytest.approx([1, keep], abs=1e-4)
        assert (json.loads(shown)["window"] is None) == (not units)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budgets", ""], "the code is empty; give one digit for each client"),
        (["--budgets", "1,0.5", "--gamma", "4"], "use 1, the only one"),
        (["--budgets", "1,0.5", "--gamma", "-1"], "gamma must be a whole number of 0 or more; got -1"),
        (["--budgets", "0x1,0.5"], "item '0x1' of code '0x1,0.5'"),
        (["--budgets", "1,0.5", "--steps", "9"], "--steps is for --constants and for budgets in seconds; give one of"),
        (["--budgets", "1,0.5", "--lr", "0.1"], "--lr is for --constants"),
        (["--budgets", "1,0.5", "--constants", "1,2"], "--constants must be three numbers L,SIGMA2,G"),
        (["--budgets", "1,0.5", "--constants", "1,2,3", "--lr", "1"], "--constants needs --lr and --steps"),
        (["--budgets", "1,0.5", "--constants", "1,2,3", "--lr", "1", "--steps", "2"], "--constants needs --model"),
        (
            [
                "--budgets",
                "10x0.25",
                "--model",
                "lenet",
                "--whole-units",
                "--constants",
                "1,2,3",
                "--lr",
                "1",
                "--steps",
                "2",
            ],
            "the bound is infinite at every point",
        ),
        (["--budgets", "1,0.5", "--gamma", "1", "--noise", "0.1"], "gamma and noise must not both be set"),
        (["--budgets", "1,0.5", "--run", "runs/x"], "--run needs --model"),
        (["--budgets", "1,0.5", "--whole-units"], "--whole-units needs --model"),
        (
            ["--budgets", "1,0.5", "--model", "mlp", "--window", "3"],
            "--window is for masks of whole units; give",
        ),
        (
            ["--budgets", "1,0.5", "--model", "mlp", "--whole-units", "--window", "0"],
            "window must be a whole number of 1",
        ),
        (
            ["--budgets", "1,0.5", "--calibration", "x.json"],
            "a calibration needs budgets in seconds",
        ),
        (["--budgets", "1,0.5", "--figure", "x.gif"], "must end in .svg, .png, .pdf; got 'x.gif'"),
        (["--budgets", "1,0.5", "--model", "mpl"], "mpl"),
        (["--budgets", "1,0.5", "--budget-unit", "euros"], "got 'euros'"),
        (["--budgets", "9,9", "--budget-unit", "macs"], "budgets in macs need --model"),
        (["--budgets", "9,x", "--budget-unit", "macs", "--model", "mlp"], "'x' is not an amount"),
        (
            ["--budgets", "99999999999999x5", "--budget-unit", "macs", "--model", "mlp"],
            "got 99999999999999",
        ),
        (["--budgets", "9", "--budget-unit", "seconds", "--model", "mlp"], "fedcover calibrate"),
    ],
)
def test_bad_input_is_refused(cli: Cli, arguments: list[str], sentence: str) -> None:
    code, _, err = cli("design", *arguments)
    assert code == 2
    assert sentence in err


def test_budgets_in_parameters_buy_what_they_buy(cli: Cli) -> None:
    """119,810 parameters are the paper's WP client at 75 %, 80,610 that at 50 %."""
    code, shown, err = cli(
        "design", "--model", "mlp", "--budget-unit", "parameters", "--budgets", "159010,3x119810,6x80610", "--json"
    )
    assert code == 0, err
    found = json.loads(shown)
    assert found["keeps"] == pytest.approx([1] + [0.75] * 3 + [0.5] * 6)
    assert found["chosen"]["gamma"] == 3


def test_budgets_below_one_model_are_reported(cli: Cli) -> None:
    code, shown, _ = cli("design", "--budgets", "0.25,0.5")
    assert code == 0
    assert "do not sum to one whole model" in shown
