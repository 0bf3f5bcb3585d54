"""Grids of settings: which values are one, and which are several."""

from pathlib import Path

import pytest

import fedcover as fc
from fedcover.config.grid import split_axes
from fedcover.config.schema import read_config, read_raw, valid_keys


def axes_of(*changes: str, text: str = "", folder: Path | None = None) -> dict[str, list[object]]:
    path = None
    if folder is not None:
        path = folder / "config.toml"
        path.write_text(text)
    return split_axes(read_raw(path, changes), valid_keys())[1]


@pytest.mark.parametrize(
    ("changes", "axes"),
    [
        (["seed=0,1,2"], {"seed": [0, 1, 2]}),
        (["seed=[0, 1]"], {"seed": [0, 1]}),
        (["seed=3"], {}),
        (["local.lr=0.1, 0.01"], {"local.lr": [0.1, 0.01]}),
        (["policy.name=WP,NP"], {"policy.name": ["WP", "NP"]}),
        (["data.partition=iid,shards"], {"data.partition": ["iid", "shards"]}),
        (["shrink=true,false"], {"shrink": [True, False]}),
        (["budgets.code=4x1,6x0.75"], {}),
        (['budgets.code=["4x1,6x0.75", "10x1"]'], {"budgets.code": ["4x1,6x0.75", "10x1"]}),
        (["name=a,b"], {}),
        (["policy.name=HeteroFL", "policy.rates=[0.5, 0.25]"], {}),
        (["policy.name=HeteroFL", "policy.rates=[[0.5], [0.5, 0.25]]"], {"policy.rates": [[0.5], [0.5, 0.25]]}),
        (["local.epochs=[1, 2]"], {}),
        (["local.epochs=1,2"], {"local.epochs": [1, 2]}),
        (["local.epochs=[[1, 2], [3]]"], {"local.epochs": [[1, 2], [3]]}),
        (["policy.gamma=2,3", "policy.name=optimal"], {"policy.gamma": [2, 3]}),
        (["schedule.name=cosine", "schedule.rounds=8,16"], {"schedule.rounds": [8, 16]}),
        (["callbacks.early_stopping.patience=3,5"], {"callbacks.early_stopping.patience": [3, 5]}),
        (["callbacks.stop.name=early_stopping", "callbacks.stop.patience=[3, 5]"], {"callbacks.stop.patience": [3, 5]}),
        (["callbacks.stop.name=early_stopping,keep_best"], {"callbacks.stop.name": ["early_stopping", "keep_best"]}),
        (["callbacks.csv_log=true,false"], {"callbacks.csv_log": [True, False]}),
        (["callbacks.csv_log=true", "callbacks.early_stopping.patience=3"], {}),
    ],
)
def test_several_values_make_an_axis(changes: list[str], axes: dict[str, list[object]]) -> None:
    assert axes_of(*changes) == axes


def test_lists_in_toml_make_axes_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "seed = [0, 1]\nrounds = 3\n[policy]\nname = ['WP', 'NP']\n[local]\nlr = [0.1, 0.2]\nepochs = [1, 2]\n"
    axes = axes_of(text=text, folder=tmp_path)
    assert axes == {"seed": [0, 1], "policy.name": ["WP", "NP"], "local.lr": [0.1, 0.2]}
    assert list(axes) == ["seed", "policy.name", "local.lr"]
    assert axes_of("seed=5", text=text, folder=tmp_path).keys() == {"policy.name", "local.lr"}


def test_settings_of_callbacks_in_toml_make_axes(tmp_path: Path) -> None:
    text = "seed = [0, 1]\n[callbacks]\ncsv_log = true\n[callbacks.early_stopping]\nmetric = ['loss', 'accuracy']\n"
    axes = axes_of(text=text, folder=tmp_path)
    assert axes == {"seed": [0, 1], "callbacks.early_stopping.metric": ["loss", "accuracy"]}
    with pytest.raises(fc.InputError, match=r"callbacks\.early_stopping\.metric = loss, accuracy makes a grid"):
        read_config(tmp_path / "config.toml", ["seed=0"])


def test_a_path_with_a_comma_is_one_name(tmp_path: Path) -> None:
    file = tmp_path / "a,b.py"
    file.write_text("import fedcover as fc\nmine = fc.weight_pruning()\n")
    assert axes_of(f"policy.name={file}:mine") == {}
    assert read_config(None, [f"policy.name={file}:mine"]).policy.name == f"{file}:mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=0,0"], "seed has the value 0 twice"),
        (["seed=0,,1"], "seed has an empty value"),
        (["seed=[]"], "seed has an empty value"),
    ],
)
def test_wrong_axes_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        axes_of(*changes)


def test_one_run_refuses_a_grid() -> None:
    with pytest.raises(fc.InputError, match=r"seed = 0, 1, 2 makes a grid of runs; use `fedcover sweep`"):
        read_config(None, ["seed=0,1,2"])


def test_a_list_that_is_one_value_for_some_names_only_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import fedcover as fc\n"
        "def one(x: float = 0.5): return fc.weight_pruning()\n"
        "def many(x: list[float] = [0.5]): return fc.weight_pruning()\n"
    )
    with pytest.raises(fc.InputError, match=r"policy\.x is one value for some of policy\.name"):
        axes_of(f'policy.name=["{file}:one", "{file}:many"]', "policy.x=[0.1, 0.2]")
