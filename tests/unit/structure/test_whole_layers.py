"""Layers that a policy of units cannot prune: a run names them once, with the reason and an alternative."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.cli.console import plain_warnings
from fedcover.policies import POLICIES
from tests.conftest import small_data

UNITS = ["NP", "FS", "optimal_units", "HeteroFL", "FedRolex", "weight_complete", "FjORD"]


def federation(policy: str, keep: float = 0.5, mixed: bool = True) -> fc.Federation:
    """A network whose second layer is mixed by a softmax."""
    between = nn.Softmax(1) if mixed else nn.Tanh()
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6), between, nn.Linear(6, 3))
    clients = fc.data.from_parts(small_data(20), [torch.arange(10), torch.arange(10, 20)])
    local = fc.LocalSGD(1, 5, 0.1, 0.5)
    return fc.Federation(fc.Task(net), clients, POLICIES[policy](), fc.by_slot([1.0, keep]), local, cohort=2)


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
@pytest.mark.parametrize("policy", UNITS)
def test_a_run_names_the_layers_the_reason_and_an_alternative(policy: str) -> None:
    with pytest.warns(fc.WholeLayersWarning) as caught:
        federation(policy).run(2)
    (warning,) = caught
    message = str(warning.message)
    assert "1 of the 2 hidden layers: '2'" in message
    assert "a Softmax, computes each of them from all the others" in message
    assert "clients therefore keep 0.671 where 0.5 is asked" in message
    assert "such as WP" in message
    assert "--" not in message
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.parametrize(
    ("policy", "keep", "mixed"), [("WP", 0.5, True), ("PT", 0.5, True), ("FS", 1.0, True), ("FS", 0.5, False)]
)
def test_there_is_no_warning_where_nothing_is_left_whole(policy: str, keep: float, mixed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation(policy, keep, mixed).run(1)


def test_the_error_comes_before_anything_is_written(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fc.WholeLayersWarning):
            federation("FS").run(1, out=tmp_path / "run")
        with pytest.raises(fc.WholeLayersWarning):  # of several runs, none
            fc.run_many([federation("WP"), federation("FS")], 1, out=[tmp_path / "first", tmp_path / "run"])
    assert not list(tmp_path.iterdir())


def test_the_command_line_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with plain_warnings(shown):
            federation("FS").run(1)
        lines = [line for line in capsys.readouterr().err.splitlines() if line]
        assert [line[:27] for line in lines] == ["warning: FS prunes no units"] * shown


def wide(policy: str, keep: float = 0.25, outputs: int = 400, **choice: list[str]) -> fc.Federation:
    """A network whose output layer is larger than the others."""
    net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, outputs))
    clients = fc.data.from_parts(small_data(20), [torch.arange(10), torch.arange(10, 20)])
    local = fc.LocalSGD(1, 5, 0.1, 0.5)
    return fc.Federation(
        fc.Task(net), clients, POLICIES[policy](**choice), fc.by_slot([1.0, keep]), local, cohort=2, seed=1
    )


@pytest.mark.parametrize("policy", ["WP", "optimal"])
def test_a_large_output_layer_is_named_with_the_share_that_is_kept(policy: str) -> None:
    with pytest.warns(fc.WholeLayersWarning) as caught:
        history = wide(policy).run(2)
    (warning,) = caught
    message = str(warning.message)
    assert f"{policy[0].upper()}{policy[1:]} keeps the output layer '2' whole, 0.96 of all parameters" in message
    assert history[0].kept[1] == pytest.approx(0.9892, abs=1e-3)
    assert f"clients therefore keep {history[0].kept[1]:.3g} where 0.25 is asked" in message
    assert "such as HeteroFL" in message
    assert "--" not in message
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.filterwarnings("ignore::fedcover.CoverageWarning")
@pytest.mark.parametrize(
    ("policy", "keep", "outputs", "choice"),
    [
        ("HeteroFL", 0.25, 400, {}),  # it removes inputs of the output layer
        ("full", 1.0, 400, {}),
        ("WP", 0.97, 400, {}),  # 0.03 of the model
        ("WP", 0.25, 3, {}),  # a tiny model: 0.3 of it are 150 parameters
        ("WP", 0.25, 400, {"only": ["0"]}),  # the user chose
    ],
)
def test_no_warning_of_the_output_layer(policy: str, keep: float, outputs: int, choice: dict[str, list[str]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fc.WholeLayersWarning)
        wide(policy, keep, outputs, **choice).run(1)
