"""The map of costs, and ``fedcover design --scarce``, which looks settings up in it."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting, load_cost_map, parse_limits
from fedcover.cli import scarce
from fedcover.errors import InputError
from fedcover.policies.registry import POLICIES

Cli = Callable[..., tuple[int, str, str]]
STUDY = {"data": "CIFAR-10", "network": "LeNet", "clients": 100, "cohort": 10, "rounds": 7, "seeds": 2, "runs": 8,
         "splits": "IID", "keeps": "0.25"}  # fmt: skip


def setting(masks: str, complement: str, accuracy: float, **costs: float) -> MappedSetting:
    shares = dict.fromkeys(RESOURCES, 1.0) | costs
    chosen = {"policy.name": masks, "complement.name": complement, "budgets.code": "10x0.25"}
    return MappedSetting("iid", masks, complement, 0.25, {"0": accuracy, "1": accuracy + 1}, shares, chosen)


MAP = CostMap(
    STUDY,
    {"iid": {"0": 54.0, "1": 55.0}},
    [
        setting("WP", "zero", 40.0, downlink=0.3, uplink=0.25),
        setting("random_weights", "frozen", 52.0, uplink=0.25, memory=0.7),
        setting("random_submodels", "zero", 30.0, uplink=0.1, memory=0.2, compute=0.2, downlink=0.1),
        setting("depth_windows", "frozen", 45.0, uplink=0.5, memory=0.6, compute=0.5),
    ],
)


@pytest.fixture
def _small_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarce, "load_cost_map", lambda: MAP)


def test_the_best_settings_within_limits_come_first() -> None:
    assert [s.masks for s in MAP.within("iid", {"uplink": 0.25})] == ["random_weights", "WP", "random_submodels"]
    assert [s.masks for s in MAP.within("iid", {"uplink": 0.25, "memory": 0.5})] == ["random_submodels"]
    assert [s.masks for s in MAP.front("iid", "compute")] == ["random_submodels", "depth_windows", "random_weights"]
    assert CostMap.from_dict(json.loads(json.dumps(MAP.as_dict()))) == MAP


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (
            {"uplink": 0.05},
            "no setting of the study costs at most 0.05 of a full client's uplink; give at least 0.1",
        ),
        ({"battery": 0.5}, "must be one of compute, memory, downlink, uplink; got 'battery'"),
        ({"uplink": -1.0}, "must be positive and at most 2"),
        ({"uplink": 25.0}, "such as 0.25 for a quarter; got 25"),
    ],
)
def test_what_the_study_does_not_cover_is_refused(limits: dict[str, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        MAP.within("iid", limits)


def test_limits_that_hold_only_one_by_one_are_refused() -> None:
    cheap = CostMap(STUDY, MAP.full, [MAP.settings[0], MAP.settings[3]])
    with pytest.raises(InputError, match=r"no setting of the study is within 0.3 of uplink and 0.7 of memory at once"):
        cheap.within("iid", {"uplink": 0.3, "memory": 0.7})


def test_limits_are_parsed() -> None:
    assert parse_limits("uplink=0.25, memory=0.5") == {"uplink": 0.25, "memory": 0.5}
    with pytest.raises(InputError, match="'uplink=x' is not a limit"):
        parse_limits("uplink=x")
    with pytest.raises(InputError, match="uplink is limited twice"):
        parse_limits("uplink=0.9,uplink=0.25")


def test_the_share_that_a_message_names_is_enough() -> None:
    (least,) = {min(setting.costs["uplink"] for setting in MAP.settings)}
    costly = CostMap(
        STUDY, MAP.full, [replace(s, costs={**s.costs, "uplink": s.costs["uplink"] + 0.0004}) for s in MAP.settings]
    )
    with pytest.raises(InputError, match="give at least") as refused:
        costly.within("iid", {"uplink": least})
    assert costly.within("iid", {"uplink": float(str(refused.value).split()[-1])})


@pytest.mark.usefixtures("_small_map")
def test_design_shows_the_best_its_runners_up_and_the_study(cli: Cli) -> None:
    code, shown, err = cli("design", "--scarce", "uplink=0.25")
    assert code == 0, err
    assert "LeNet on CIFAR-10 IID, 100 clients, 10 per round, 7 rounds, 2 seeds, keeps 0.25" in shown
    assert "full FedAvg reaches 54.5 %" in shown
    assert shown.index("random_weights") < shown.index("WP") < shown.index("random_submodels")
    assert "2.0 points below full FedAvg" in shown
    assert "its settings, to be added to those of your run:" in shown
    assert "--set policy.name=random_weights --set complement.name=frozen --set budgets.code=10x0.25" in shown


@pytest.mark.usefixtures("_small_map")
def test_design_shows_the_front_of_a_resource(cli: Cli) -> None:
    code, shown, err = cli("design", "--scarce", "compute", "--json")
    assert code == 0, err
    (rows,) = json.loads(shown)["splits"]["iid"]["tables"].values()
    assert [row["masks"] for row in rows] == ["random_submodels", "depth_windows", "random_weights"]
    assert rows[0]["costs"]["memory"] == 0.2


@pytest.mark.usefixtures("_small_map")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scarce", "uplink=0.25", "--budgets", "1,0.5"], "it takes only --split, --model and --json"),
        (["--scarce", "uplink=0.25", "--split", "dirichlet"], "no results for the split 'dirichlet'; use one of iid"),
        (["--scarce", "uplink=0.25", "--model", "mlp"], "covers LeNet on CIFAR-10 only; got --model mlp"),
        (["--scarce", "uplink=0.25,memory"], "give a share to all scarce resources"),
        (["--scarce", "battery"], "got 'battery'"),
        (["--split", "iid"], "give --budgets, what each client can keep, or --scarce"),
        ([], "give --budgets, what each client can keep, or --scarce"),
    ],
)
def test_questions_that_have_no_answer_are_refused(cli: Cli, arguments: list[str], sentence: str) -> None:
    code, _, err = cli("design", *arguments)
    assert code == 2
    assert sentence in err


def test_the_map_of_this_version_is_sound() -> None:
    costs = load_cost_map()
    assert costs.settings
    for split in costs.full:
        for resource in RESOURCES:
            front = costs.front(split, resource)
            assert all(not (s.costs[resource] <= f.costs[resource] and s.accuracy > f.accuracy)
                       for f in front for s in costs.of_split(split))  # fmt: skip
    assert all(POLICIES.find(setting.settings["policy.name"]) for setting in costs.settings)
    assert all(0 < share < 1.1 for setting in costs.settings for share in setting.costs.values())
