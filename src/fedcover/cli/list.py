"""``fedcover list``: policies and other objects that settings name, models, code digits, data sets and settings."""

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from fedcover.budgets import QUARTERS
from fedcover.cli.console import friendly, out, settings_line, show_table
from fedcover.cli.data import data_rows
from fedcover.cli.options import JsonOption
from fedcover.config.choices import (
    AGGREGATION,
    CALLBACK,
    COMPLEMENT,
    LOCAL,
    MODEL,
    POLICY,
    SAMPLING,
    SCHEDULE,
    SERVER,
    Section,
)
from fedcover.config.describe import describe_keys
from fedcover.errors import InputError

Rows = list[dict[str, Any]]


def _first_line(factory: Any) -> str:
    return str((factory.__doc__ or "").strip().splitlines()[0]).replace("``", "")


def _named(section: Section[Any]) -> Rows:
    return [
        {
            section.noun: name,
            "what it does": _first_line(make),
            "settings": {option.name: option.default for option in section.options(make).values()},
        }
        for name, make in section.registry.items()
    ]


def _codes() -> Rows:
    return [
        {
            "digit": digit,
            "keep": f"{budget.keep:g}",
            "quarters": " ".join(f"S{i}" for i, on in enumerate(budget.bands or (True,) * 4, 1) if on),
        }
        for digit, budget in QUARTERS.items()
    ]


def _settings() -> Rows:
    return [
        {"setting": key, "default": "" if value is None else repr(value), "what it means": text}
        for key, value, text in describe_keys()
    ]


def _cell(value: Any) -> str:
    return settings_line(value, "\n") if isinstance(value, dict) else str(value)


TOPICS: dict[str, Callable[[], Rows]] = {
    "policies": partial(_named, POLICY),
    "aggregation": partial(_named, AGGREGATION),
    "server": partial(_named, SERVER),
    "local": partial(_named, LOCAL),
    "schedule": partial(_named, SCHEDULE),
    "sampling": partial(_named, SAMPLING),
    "complement": partial(_named, COMPLEMENT),
    "callbacks": partial(_named, CALLBACK),
    "models": partial(_named, MODEL),
    "codes": _codes,
    "data": data_rows,
    "settings": _settings,
}


@friendly
def list_(
    topic: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join([*TOPICS][:-1])} or settings; default: all."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what settings can name: policies, optimizers, callbacks, models, data sets and others; and all settings."""
    if topic is not None and topic not in TOPICS:
        raise InputError(f"there is no topic '{topic}'; use one of {', '.join(TOPICS)}")
    chosen = {topic: TOPICS[topic]()} if topic else {name: make() for name, make in TOPICS.items()}
    if as_json:
        out.print_json(json.dumps(chosen, default=str))
        return
    for name, rows in chosen.items():
        shown = [{key: _cell(value) for key, value in row.items()} for row in rows]
        show_table(shown, title=name if topic is None else None)
        out.print()
