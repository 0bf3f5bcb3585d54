"""``fedcover design --scarce``: masks and a complement for what is scarce at the clients, from a study."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting, load_cost_map, parse_limits
from fedcover.cli.console import out, show_table
from fedcover.errors import InputError
from fedcover.report.format import mean_and_deviation, rough_percent
from fedcover.toml import toml_value

SHOWN = 5
"""The settings that are shown: the best, and those next to it."""
HEADS = {"downlink": "down", "uplink": "up"}
"""Short heads of columns."""


def design_for_scarce(scarce: str, split: str, model: str, as_json: bool) -> None:
    """Show the settings that a study found best for scarce resources.

    Args:
        scarce: Resources with the shares of a full client's cost that clients can afford, such as ``uplink=0.25``; of
            a resource without a share the whole front is shown.
        split: How data are split; all splits of the study if empty.
        model: The user's model; it must be that of the study, or empty.
        as_json: Whether to print JSON.

    Raises:
        InputError: If the study does not cover the question.
    """
    costs, limits = load_cost_map(), parse_limits(scarce)
    _check_model(costs, model)
    tables = {name: _tables(costs, name, limits) for name in ([split] if split else costs.full)}
    if as_json:
        out.print_json(json.dumps({"study": costs.study, "splits": _as_data(costs, tables)}))
        return
    _show_study(costs.study)
    for name, by_title in tables.items():
        for title, settings in by_title.items():
            rows = [_row(setting) for setting in settings]
            full = f"full FedAvg reaches {costs.full_accuracy(name):.1f} %"
            out.print()
            show_table(rows, f"{name}, {title}; {full}")
            best = max(settings, key=lambda setting: setting.accuracy)
            out.print(f"the most accurate, {_distance(best.accuracy - costs.full_accuracy(name))} full FedAvg:")
            out.print(f"its settings, to be added to those of your run: {_options(best.settings)}")


def _check_model(costs: CostMap, model: str) -> None:
    """Raise InputError if the study is about another model."""
    network = str(costs.study["network"])
    if model and model.lower() != network.lower():
        raise InputError(
            f"the study of costs covers {network} on {costs.study['data']} only; got --model {model}; compare settings"
            f" on your own model with `fedcover sweep`"
        )


def _tables(costs: CostMap, split: str, limits: Mapping[str, float | None]) -> dict[str, Sequence[MappedSetting]]:
    """Return the settings to show by title: the best within limits, or fronts of resources without a limit."""
    shares = {name: share for name, share in limits.items() if share is not None}
    if not shares:
        return {f"front of {name}, cheapest first": costs.front(split, name) for name in limits}
    if len(shares) < len(limits):
        raise InputError("give a share to all scarce resources, as in uplink=0.25,memory=0.75, or to none of them")
    within = " and ".join(f"{rough_percent(share)} of {name}" for name, share in shares.items())
    return {f"within {within}, best first": costs.within(split, shares)[:SHOWN]}


def _show_study(study: Mapping[str, Any]) -> None:
    seeds = "1 seed" if study["seeds"] == 1 else f"{study['seeds']} seeds"
    out.print(
        f"`fedcover study costs`: {study['network']} on {study['data']} {study['splits']}, {study['clients']} clients,"
        f" {study['cohort']} per round, {study['rounds']} rounds, {seeds}, keeps {study['keeps']}",
        style="bold",
    )
    out.print(
        "Costs are those of one client, as shares of a client that trains the whole model. Other data, networks and"
        " numbers of rounds may have another order."
    )


def _row(setting: MappedSetting) -> dict[str, str]:
    return {
        "masks": setting.masks,
        "complement": setting.complement,
        "keep": f"{setting.keep:g}",
        "accuracy, %": mean_and_deviation(list(setting.accuracies.values())),
        **{HEADS.get(name, name): rough_percent(setting.costs[name]) for name in RESOURCES},
    }


def _distance(gain: float) -> str:
    """Return how far above or below an accuracy is.

    >>> _distance(-2.04), _distance(0.3)
    ('2.0 points below', '0.3 points above')
    """
    return f"{abs(gain):.1f} points {'below' if gain < 0 else 'above'}"


def _options(settings: Mapping[str, Any]) -> str:
    """Return settings as options of ``fedcover run``.

    >>> _options({"policy.name": "WP", "budgets.code": "10x0.25", "complement.bits": 4})
    '--set policy.name=WP --set budgets.code=10x0.25 --set complement.bits=4'
    """
    values = {name: value if isinstance(value, str) else toml_value(value) for name, value in settings.items()}
    return " ".join(f"--set {name}={value}" for name, value in values.items())


def _as_data(costs: CostMap, tables: Mapping[str, Mapping[str, Sequence[MappedSetting]]]) -> dict[str, Any]:
    """Return the tables as plain data, for JSON."""
    return {
        split: {
            "full": round(costs.full_accuracy(split), 4),
            "tables": {
                title: [
                    {
                        "masks": setting.masks,
                        "complement": setting.complement,
                        "keep": setting.keep,
                        "accuracy": round(setting.accuracy, 4),
                        "costs": dict(setting.costs),
                        "settings": dict(setting.settings),
                    }
                    for setting in settings
                ]
                for title, settings in by_title.items()
            },
        }
        for split, by_title in tables.items()
    }
