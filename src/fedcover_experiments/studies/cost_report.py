"""The map of costs of a study's results: as data for ``fedcover design --scarce``, and as a figure."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting
from fedcover.report.format import rough_percent
from fedcover_experiments.measures import late_accuracy
from fedcover_experiments.results import Outcome, Results
from fedcover_experiments.runner import CLIENTS, COHORT, DATA, SPLIT_TITLES, Experiment
from fedcover_experiments.studies import costs
from fedcover_experiments.studies.cost_sentences import comparisons, sentences
from fedcover_experiments.studies.planned_costs import planned_cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIGITS = 4
"""Decimals of shares and accuracies in the map."""


def cost_map(results: Results) -> CostMap:
    """Return the map of costs; a split on which full FedAvg was not run is left out."""
    outcomes = {experiment: results.of(experiment) for experiment in costs.experiments()}
    full = {e.split: several for e, several in outcomes.items() if e.policy == costs.FULL and several}
    settings = [
        _setting(experiment, several, full[experiment.split])
        for experiment, several in outcomes.items()
        if several and experiment.split in full and experiment.policy != costs.FULL
    ]
    splits = {setting.split for setting in settings}
    seeds = {outcome.seed for several in outcomes.values() for outcome in several}
    study = {
        "data": DATA[costs.DATA],
        "network": "LeNet",
        "clients": CLIENTS,
        "cohort": COHORT,
        "splits": " and ".join(SPLIT_TITLES[split] for split in costs.SPLITS if split in splits),
        "keeps": ", ".join(f"{keep:g}" for keep in sorted({setting.keep for setting in settings if setting.keep < 1})),
        "rounds": results.rounds,
        "seeds": len(seeds),
        "runs": sum(len(several) for several in outcomes.values()),
    }
    return CostMap(study, {split: _accuracies(full[split]) for split in full if split in splits}, settings)


def _setting(experiment: Experiment, outcomes: Sequence[Outcome], full: Sequence[Outcome]) -> MappedSetting:
    planned = planned_cost(experiment)
    shares = {
        "compute": planned.compute,
        "memory": planned.memory,
        "downlink": _mean(outcomes, "bytes_down") / _mean(full, "bytes_down"),
        "uplink": _mean(outcomes, "bytes_up") / _mean(full, "bytes_up"),
    }
    masks, complement = costs.parts_of(experiment)
    return MappedSetting(
        split=experiment.split,
        masks=masks,
        complement=complement,
        keep=costs.keep_of(experiment),
        accuracies=_accuracies(outcomes),
        costs={name: round(share, DIGITS) for name, share in shares.items()},
        settings=costs.options_of(experiment),
    )


def _accuracies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {str(outcome.seed): round(late_accuracy(outcome), DIGITS) for outcome in outcomes}


def _mean(outcomes: Sequence[Outcome], field: str) -> float:
    return fmean(getattr(outcome, field) for outcome in outcomes)


def map_as_dict(results: Results) -> dict[str, Any]:
    """Return the map, its fronts by split and resource, three sentences and the largest loss, for JSON."""
    mapped = cost_map(results)
    worst = comparisons(mapped)[:1]
    return mapped.as_dict() | {
        "fronts": {
            split: {resource: [_row(one, resource) for one in mapped.front(split, resource)] for resource in RESOURCES}
            for split in mapped.full
        },
        "sentences": sentences(mapped),
        "loss": worst[0].as_dict() if worst else None,
    }


def _row(setting: MappedSetting, resource: str) -> dict[str, Any]:
    """Return a setting of a front as a row of a table."""
    return {
        "name": setting.title,
        "masks": setting.masks,
        "complement": setting.complement,
        "keep": f"{setting.keep:g}",
        "share": rough_percent(setting.costs[resource]),
        "accuracy": round(setting.accuracy, 1),
    }


def findings(results: Results) -> list[str]:
    """Return the three sentences of the report; none if only full FedAvg was run."""
    mapped = cost_map(results)
    return sentences(mapped) if mapped.settings else []


def figure(results: Results) -> "Figure":
    """Return the figure of the report."""
    from fedcover_experiments.studies.cost_figure import cost_map_figure

    return cost_map_figure(cost_map(results), SPLIT_TITLES)
