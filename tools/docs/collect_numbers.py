"""Collect the numbers of studies, audits and designs into small JSON files, for ``fill_numbers.py``.

``python tools/docs/collect_numbers.py`` writes ``docs/results/*.json``, and the map of costs in the package, again from
the committed outcomes of runs and from commands that train nothing. ``mnist-iid.json`` is measured, not collected.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from repository import ROOT

if TYPE_CHECKING:
    from fedcover_experiments.paper.claim_tests import Comparison
    from fedcover_experiments.results import Results
    from fedcover_experiments.studies.registry import Study

FOLDER = ROOT / "docs" / "results"
STUDY, PAPER = ROOT / "docs" / "study", ROOT / "docs" / "paper" / "results"
DIGITS = 6
"""Significant digits that are kept, so that rounding does not differ between machines."""
AUDITS = {
    f"{policy}_{model}": f"audit rounds --policy {policy} --model {model} --budgets {budgets} --rounds {rounds}"
    for policy, budgets, lengths in (
        ("heterofl", "10x0.25", {"lenet": 100, "resnet18": 10}),
        ("fedrolex", "10x0.25", {"lenet": 1200, "resnet18": 512}),
        ("weight_complete", "0.25", {"lenet": 16, "resnet18": 16}),
    )
    for model, rounds in lengths.items()
}
CODES = (
    "1111114444 1111144447 1111223344 1111234444 1111234567 1111444444 1111444477 1111556677 1114556677 1234556677"
    " 1455666777 2233445677 1444777777 1111444777 1111777777 1114777777 1477777777"
)
"""The codes of the paper's MNIST tables that leave nothing to nobody."""
UNITS = "design --budgets 10x0.25 --model lenet --whole-units --window 10"


def run_json(command: str) -> Any:
    """Return what ``fedcover COMMAND --json`` prints."""
    from typer.testing import CliRunner

    from fedcover.cli import app

    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, [*command.split(), "--json"])
    if result.exit_code:
        raise RuntimeError(f"fedcover {command} failed: {result.output}")
    return json.loads(result.stdout)


def audits() -> dict[str, Any]:
    """Return what policies cover over many rounds, before anything is trained."""
    keys = ("weights_covered", "units_covered", "rounds_to_cover")
    printed = {name: run_json(command) for name, command in AUDITS.items()}
    return {
        name: {"command": f"fedcover {AUDITS[name]}", **{key: audit[key] for key in keys}}
        for name, audit in printed.items()
    }


def designs() -> dict[str, Any]:
    """Return the frontier of the paper's level S, where the paper's codes lie, and the coverage of designed units."""
    codes = []
    for code in CODES.split():
        design = run_json(f"design --budgets {code}")
        own, best = _point(design["patterns"]), _point(design["chosen"])
        least = next(point["mean_noise"] for point in design["frontier"] if point["gamma"] == own["gamma"])
        codes.append({"code": code, **own, "least_noise": least, "best": best})
    level_s = [_point(point) for point in run_json("design --budgets 1444777777")["frontier"]]
    window = run_json(UNITS)["window"]
    pairs = [layer for layer in window["layers"] if layer["pairs"]]
    return {"codes": codes, "level_s": level_s, "units": {"command": f"fedcover {UNITS}", "pairs": pairs}}


def _point(point: dict[str, Any]) -> dict[str, Any]:
    return {key: point[key] for key in ("gamma", "mean_noise", "noise_factor")}


def studies() -> dict[str, Any]:
    """Return how the policies of the studies compare with each other, and the rows of studies of single policies."""
    from fedcover_experiments.results import load
    from fedcover_experiments.studies import STUDIES
    from fedcover_experiments.studies.report import data_titles, rows

    results = {name: load(path) for name in STUDIES if (path := STUDY / f"{name}.json").exists()}
    separate = {
        name: {
            _key(title): _by_policy(rows(study, results[name], title)) for title in data_titles(study, results[name])
        }
        for name, study in STUDIES.items()
        if study.across_codes and name in results and not study.findings
    }
    return {
        "runs": {name: sum(entry["runs"] for entry in result.provenance) for name, result in results.items()},
        "coverage": _compared(STUDIES["coverage"], results["coverage"]),
        "labels": _compared(STUDIES["labels"], results["labels"]),
        **separate,
    }


def _by_policy(table: list[dict[str, str]]) -> dict[str, Any]:
    """Return the numbers of rows by policy and, where a policy has several budgets, by budgets."""
    counts = Counter(row["policy"] for row in table)
    keys = [row["policy"] + (f", {row['budgets']}" if counts[row["policy"]] > 1 else "") for row in table]
    return dict(sorted(zip(keys, map(_numbers, table), strict=True)))


def _compared(study: "Study", results: "Results") -> dict[str, Any]:
    """Return, by part, policy and what it is compared with, the counts of the report and the significant gains."""
    from fedcover_experiments.studies.report import tally

    compared: dict[str, Any] = {}
    for part in study.parts:
        sides = compared[_key(part)] = {}
        for row in tally(study, results, part):
            for base in (base for base in (study.base, study.second_base) if row.get(f"compared with {base}")):
                counts = _counts(row[f"compared with {base}"])
                gains = _gains(replace(study, base=base), results, study.parts[part], row["policy"])
                sides.setdefault(row["policy"], {})[base] = counts | gains
    return compared


def _counts(text: str) -> dict[str, int]:
    """Return the counts of a cell of the report as numbers.

    >>> _counts("4 better, 0 worse of 12")
    {'better': 4, 'worse': 0, 'settings': 12}
    """
    numbers = (int(word) for word in text.split() if word.isdigit())
    return dict(zip(("better", "worse", "settings"), numbers, strict=True))


def _gains(study: "Study", results: "Results", codes: Sequence[str], policy: str) -> dict[str, Any]:
    """Return the differences from the study's base: all by code, and by data set those that are significant."""
    from fedcover.report.statistics import holm
    from fedcover_experiments.studies.report import cells, data_titles

    some = [
        (cell.experiment, cell.gain)
        for title in data_titles(study, results)
        for cell in cells(study, results, title)
        if cell.gain and cell.experiment.policy == policy and cell.experiment.code in codes
    ]
    sure: dict[str, dict[str, list[float]]] = {}
    for (experiment, gain), p in zip(some, holm([gain.p for _, gain in some]), strict=True):
        lists = sure.setdefault(experiment.data, {"gains": [], "losses": []})
        if p < 0.05:
            lists["gains" if gain.mean > 0 else "losses"].append(abs(gain.mean))
    by_data = {data: {kind: sorted(values) for kind, values in lists.items()} for data, lists in sure.items()}
    if len({experiment.data_title for experiment, _ in some}) > 1:
        return by_data
    intervals = {e.code: {"mean": gain.mean, "low": gain.low, "high": gain.high} for e, gain in some}
    return by_data | {"codes": intervals}


def _key(title: str) -> str:
    """Return a name for a title of the report.

    >>> _key("with one full client in ten"), _key("CIFAR-10 non-IID"), _key("CIFAR-10 Dirichlet 0.3")
    ('one_full', 'cifar10_non_iid', 'cifar10_dirichlet')
    """
    short = {"with one full client in ten": "one_full", "with no full client": "no_full", "of all codes": "all"}
    plain = title.lower().replace("cifar-10", "cifar10").removesuffix(" 0.3")
    return short.get(title) or plain.replace("-", "_").replace(" ", "_")


def _numbers(row: dict[str, str]) -> dict[str, float]:
    """Return the numbers of a row; those in percent are numbers of percent, and a mean ± its deviation is the mean.

    >>> _numbers({"policy": "WP", "accuracy, %": "71.4 ± 0.3", "MB up": "1.7", "uncovered": "0.2%"})
    {'accuracy': 71.4, 'mb_up': 1.7, 'uncovered': 0.2}
    """
    names = {head: head.partition(",")[0].lower().replace(" ", "_") for head in row}
    cells = {names[head]: text.partition(" ± ")[0].removesuffix("%") for head, text in row.items()}
    return {name: float(text) for name, text in cells.items() if text.replace(".", "", 1).isdigit()}


def paper() -> dict[str, Any]:
    """Return how the paper's claims came out, and how far its WP column is from Algorithm 1."""
    from fedcover_experiments.paper.claims import claims
    from fedcover_experiments.paper.compare import departure_rows
    from fedcover_experiments.results import load_all

    results = load_all(sorted(PAPER.glob("*.json")))
    judged = {claim.title: claim.comparisons for claim in claims(results) if claim.comparisons}
    stars = judged["Higher coverage at equal cost does better"]
    levels = {"M": "1111223344", "S": "1234556677"}
    mean = next(row for row in departure_rows("iid", results) if row["row"] == "mean distance")
    return {
        "claims": {title: _verdicts(comparisons) for title, comparisons in judged.items()},
        "stars": {level: _verdicts([c for c in stars if c.first.code == code]) for level, code in levels.items()},
        "distance": {head: float(text) for head, text in mean.items() if text.replace(".", "").isdigit()},
    }


def _verdicts(comparisons: Sequence["Comparison"]) -> dict[str, int]:
    verdicts = [comparison.verdict for comparison in comparisons]
    published = [(c.published, c.difference) for c in comparisons if c.published is not None and c.difference]
    return {
        "comparisons": len(verdicts),
        "claimed": verdicts.count("as claimed"),
        "opposite": verdicts.count("the opposite"),
        "published": len(published),
        "outside": sum(not difference.low <= value <= difference.high for value, difference in published),
    }


def cost_map() -> dict[str, Any]:
    """Return the map of the study of costs, which ships with the package."""
    from fedcover_experiments.results import load
    from fedcover_experiments.studies.cost_report import map_as_dict

    return map_as_dict(load(STUDY / "costs.json"))


def memory() -> dict[str, Any]:
    """Return how far the model of training costs is from what was measured of one client of ResNet-18."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.partial_clients import CONTENDERS, MODEL, make_masks
    from benchmarks.partial_training import BATCH

    from fedcover.masks.training_cost import TrainingCosts
    from fedcover.models import default_model
    from fedcover.params import params_of
    from fedcover.structure.trace import trace

    model, example = default_model(MODEL)
    masks, costs = make_masks(params_of(model)), TrainingCosts(trace(model, example), BATCH)
    full, rows = costs.of({}), []
    for measured in json.loads((ROOT / "benchmarks/results/partial-training.json").read_text())["rows"]:
        one = CONTENDERS[measured["contender"]]
        if one.frozen and one.dense:
            continue  # gradients of the whole model that are masked: not how clients train
        cost = costs.of(masks[one.mask] if one.mask else {}, one.frozen)
        rows.append(
            {
                "name": measured["contender"],
                "what": measured["what"],
                "memory": cost.memory / full.memory,
                "measured_memory": measured["peak_ratio"],
                "compute": cost.flops_per_example / full.flops_per_example,
                "measured_seconds": measured["seconds_ratio"],
            }
        )
    return {
        "rows": rows,
        "below": sum(row["memory"] < row["measured_memory"] for row in rows),
        "off_memory": max(abs(row["memory"] - row["measured_memory"]) for row in rows),
        "off_compute": max(abs(row["compute"] - row["measured_seconds"]) for row in rows),
    }


def rounded(value: Any) -> Any:
    """Return a JSON value whose numbers have six significant digits.

    >>> rounded({"a": [1 / 3, 2]})
    {'a': [0.333333, 2]}
    """
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return value


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "audits.json": audits,
    "designs.json": designs,
    "studies.json": studies,
    "paper.json": paper,
    "memory.json": memory,
    "cost_map.json": cost_map,
}
"""What each file is collected by."""


def path_of(name: str) -> Path:
    """Return where a file is: in ``docs/results``, but for the map of costs, which is a part of the package."""
    return (ROOT / "src/fedcover/calibration" if name == "cost_map.json" else FOLDER) / name


def collected(name: str) -> str:
    """Return the content that a file should have."""
    return json.dumps(rounded(FILES[name]()), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all files, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[*FILES, []], help="some of the files; all if left out")
    for name in parser.parse_args().names or FILES:
        path_of(name).write_text(collected(name))
        print(path_of(name).relative_to(ROOT))


if __name__ == "__main__":
    main()
