"""The tables of the leaderboard: entries, settings and batches as texts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fedcover.report.format import MISSING, mean_and_deviation, megabytes, p_value, percent, signed
from fedcover.report.statistics import Difference
from fedcover_experiments.referee.leaderboard import Entry, Value
from fedcover_experiments.referee.methods import METHODS, own_method
from fedcover_experiments.referee.rows import RefereeResults

ACCURACY, CERTIFICATE = "accuracy, %", "certificate"
WORDS = ("setting", "kind", "note", "what differs", "source", "training", "data", "command", "what")
Table = list[dict[str, str]]


@dataclass
class MarkedTable:
    """Rows with classes and titles of single cells, by row number and header."""

    rows: Table
    marks: dict[tuple[int, str], str] = field(default_factory=dict)
    titles: dict[tuple[int, str], str] = field(default_factory=dict)


def entries_table(entries: Sequence[Entry]) -> MarkedTable:
    """Return the leaderboard, with the values of seeds as titles of accuracies."""
    table = MarkedTable([_row(entry) for entry in entries])
    for number, entry in enumerate(entries):
        table.titles[number, ACCURACY] = _seeds(entry)
        table.titles[number, CERTIFICATE] = entry.rows[0].certificate if entry.rows else ""
        if entry.verdict != "undecided":
            table.marks[number, "gain over HeteroFL"] = "clear" if entry.verdict == "better" else "bad"
    return table


def _row(entry: Entry) -> dict[str, str]:
    kind = METHODS[entry.method].kind if entry.method in METHODS else "own"
    least = min((row.gamma_min or 0 for row in entry.rows), default=0)
    return {
        "method": entry.method,
        "setting": entry.setting,
        "kind": kind,
        ACCURACY: mean_and_deviation([100 * (row.accuracy or 0.0) for row in entry.rows]) if entry.rows else MISSING,
        "gain over HeteroFL": _gain(entry.against_base),
        "p (Holm)": p_value(entry.p) if entry.against_base else MISSING,
        "gain over smallest": _gain(entry.gain),
        "worst level, %": _percent(entry, lambda row: row.worst_level),
        "mean level, %": _percent(entry, lambda row: row.mean_level),
        "local, %": _percent(entry, lambda row: row.local),
        "± clients": _percent(entry, lambda row: row.local_deviation),
        "rounds to target": _number(entry.mean(lambda row: row.rounds_to_target), ".0f"),
        "MB to target": _megabytes(entry.mean(lambda row: row.bytes_to_target)),
        "GMACs to target": _number(entry.mean(lambda row: row.macs_to_target), ".3g", 1e-9),
        "Γmin": f"{least}" if entry.rows else MISSING,
        "uncovered": percent(entry.mean(lambda row: row.uncovered), 1),
        "noise": _number(entry.mean(lambda row: row.noise), ".3f"),
        CERTIFICATE: ("covered" if least else "not covered") if entry.rows else MISSING,
        "MB per round": _megabytes(entry.mean(lambda row: row.bytes_per_round)),
        "step size": f"{entry.rows[0].lr:g}" if entry.rows else MISSING,
        "rounds": f"{entry.rounds}",
        "note": _note(entry),
    }


def _seeds(entry: Entry) -> str:
    return ", ".join(f"seed {row.seed}: {100 * (row.accuracy or 0.0):.2f}" for row in entry.rows)


def _note(entry: Entry) -> str:
    notes = [f"reduced: {entry.rounds} of {entry.whole_rounds} rounds"] if entry.reduced else []
    notes += ["over budget"] if entry.over_budget else []
    notes += [f"{len(entry.errors)} failed: {entry.errors[0]}"] if entry.errors else []
    return "; ".join(notes)


def _gain(gain: Difference | None) -> str:
    return f"{signed(gain.mean)} [{signed(gain.low)}, {signed(gain.high)}]" if gain else MISSING


def _percent(entry: Entry, value: Value) -> str:
    return _number(entry.mean(value), ".2f", 100)


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return MISSING if value is None else f"{factor * value:{form}}"


def _megabytes(value: float | None) -> str:
    return MISSING if value is None else megabytes(value)


def settings_table(results: RefereeResults, entries: Sequence[Entry]) -> Table:
    """Return the settings that have entries, with the sources of their training."""
    rows = []
    for name in dict.fromkeys(entry.setting for entry in entries):
        setting = results.settings[name]
        training = setting["training"]
        local = f"{training['local_steps']} steps" if training["local_steps"] else f"{training['epochs']} epochs"
        rows.append(
            {
                "setting": name,
                "clients": f"{setting['clients']}",
                "levels": ", ".join(f"{count} x {width}" for width, count in setting["levels"].items()),
                "limited by": setting["constraint"],
                "local": f"{local} of batches of {training['batch_size']}",
                "momentum": f"{training['momentum']:g}",
                "weight decay": f"{training['weight_decay']:g}",
                "step sizes tried": ", ".join(f"{lr:g}" for lr in training["lrs"]),
                "target, %": f"{100 * setting['target']:g}",
                "training": training["source"],
            }
        )
    return rows


def methods_table(entries: Sequence[Entry]) -> Table:
    """Return the methods that have entries, with their sources."""
    names = dict.fromkeys(entry.method for entry in entries)
    methods = [METHODS.get(name) or own_method(name) for name in names]
    return [{"method": method.name, "kind": method.kind, "source": method.source} for method in methods]


def provenance(results: RefereeResults) -> list[str]:
    """Return sentences on where and how long cells were run, and on the data."""
    devices: dict[str, float] = {}
    data: dict[str, str] = {}
    for batch in results.batches:
        where = f"{batch['device']} (engine {batch['engine']}, {batch['precision']})"
        devices[where] = devices.get(where, 0.0) + batch["seconds"]
        data |= batch["data"]
    steps = sum(row.client_steps for row in results.rows)
    ran = [f"{seconds:,.0f} s on {device}" for device, seconds in devices.items()]
    cells = f"{len(results.rows):,} runs with {steps:,} local steps of clients took {' and '.join(ran)}."
    return [cells, *(f"{name}: {text}." for name, text in data.items())]
