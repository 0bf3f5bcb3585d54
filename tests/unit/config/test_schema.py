"""Settings of runs: their names, their descriptions, and the title of a run."""

import pytest

import fedcover as fc
from fedcover.config.describe import describe_keys
from fedcover.config.schema import check_config, parse_client_config, parse_config, valid_keys


def test_every_setting_has_a_default_and_a_description() -> None:
    rows = {key: (default, text) for key, default, text in describe_keys()}
    assert all(text for _, text in rows.values())
    assert {key: default for key, (default, _) in rows.items() if not key.endswith(".*")} == valid_keys()


@pytest.mark.parametrize(
    ("budgets", "title"),
    [
        ({"code": "1111223344"}, "WP-1111223344-mnist-iid-seed0"),
        ({"code": "4x1,6x0.75"}, "WP-4x1_6x0.75-mnist-iid-seed0"),
        ({"code": "1" * 30}, f"WP-{'1' * 20}...-mnist-iid-seed0"),
        ({"code": "159010", "unit": "parameters"}, "WP-159010-parameters-mnist-iid-seed0"),
    ],
)
def test_a_run_is_named_after_its_settings(budgets: dict[str, str], title: str) -> None:
    assert check_config({"budgets": budgets}).title == title
    assert check_config({"budgets": budgets, "name": "mine"}).title == "mine"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rounds = = 3", ["TOML", "fedcover list settings"]),
        ("rouns = 3", ["'rouns'", "did you mean 'rounds'?"]),
        ("rounds = 2.5", ["rounds must be", "2.5"]),
        ("[aggregation]\nname = 'trimmed'\ntrim = 'much'", ["aggregation.trim must be a number", "'much'"]),
        ("[aggregation]\ntrim = 0.1", ["aggregation rule mean does not take aggregation.trim", "or use trimmed"]),
        ("[server]\nname = 'FedAdm'", ["server optimizer 'FedAdm'", "did you mean 'FedAdam'?"]),
        ("weighting = 'labels'", ["no setting 'weighting'", "use aggregation.weighting"]),
        ("average = 'median'", ["no setting 'average'", "use aggregation.name"]),
        ("trim = 0.3", ["no setting 'trim'", "use aggregation.trim, with aggregation.name=trimmed"]),
        ("[policy]\nname = 'WP'\nkappa = 2", ["policy WP", "policy.kappa", "S-GaP"]),
    ],
)
def test_invalid_settings_are_named(text: str, parts: list[str]) -> None:
    with pytest.raises(fc.InputError) as caught:
        parse_config(text)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_clients_do_not_need_the_files_of_the_server() -> None:
    text = "[sampling]\nname = 'none.py:mine'\n[callbacks.mine]\nname = 'none.py:Mine'\n"
    with pytest.raises(fc.InputError, match=r"none\.py"):
        parse_config(text)
    assert parse_client_config(text).sampling.name == "uniform"
