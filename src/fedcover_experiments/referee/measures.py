"""What is measured of a finished cell."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from fedcover.data import Examples
from fedcover.federation.client_evaluation import ClientScore, evaluate_clients
from fedcover.federation.federation import Federation
from fedcover.federation.history import History
from fedcover_experiments.referee.budgets import within_budget
from fedcover_experiments.referee.cells import WHOLE_TEST, RefereeCell
from fedcover_experiments.referee.rows import LevelRow, RefereeRow

DIGITS = 4
PASSES = 3
"""Forward passes that a training step costs: one forward, and about two for the gradients."""


def measure(cell: RefereeCell, federation: Federation, history: History, test: Examples) -> RefereeRow:
    """Return the row of a finished run, without the time that it took as a part of its batch."""
    curve = [(record.round, round(record.accuracy, DIGITS)) for record in history if record.accuracy is not None]
    certificate = history.last.certificate or {}
    sent = sum(len(record.cohort) for record in history)
    return RefereeRow(
        cell.setting.name,
        cell.method.name,
        cell.seed,
        cell.lr,
        cell.rounds,
        accuracy=_rounded(fmean(value for _, value in curve[-cell.setting.training.late :])),
        **(_by_clients(cell, federation, history, test) if not cell.tuning else {}),
        **_to_target(cell, federation, history),
        gamma_min=history.gamma_min,
        uncovered=_rounded(fmean(history.column("uncovered"))),
        noise=_rounded(fmean(history.column("pruning_noise"))),
        certificate=str(certificate.get("sentence", "")),
        covered=certificate.get("covered"),
        bytes_per_round=round(sum(record.bytes_down + record.bytes_up for record in history) / sent),
        macs=_rounded(fmean(record.macs / record.macs_full for record in history)),
        over_budget=not within_budget(cell.method, cell.setting),
        client_steps=sum(_steps_of(federation, record.cohort) for record in history),
        device_seconds=round(sum(sum(record.seconds.values()) for record in history), 2),
        curve=curve,
    )


def _by_clients(cell: RefereeCell, federation: Federation, history: History, test: Examples) -> dict[str, Any]:
    """Return accuracies by level, and local accuracies with their deviation over clients."""
    clients = list(range(min(cell.setting.training.tested_clients, len(federation.clients))))
    scores = evaluate_clients(federation, history, test, clients=clients).clients
    whole = scores
    if federation.clients.tests is not None or federation.policy.traits().wants_classes:
        # The scores are those on the clients' own test sets, or of sub-models without rows of classes that they lack.
        without = replace(federation, clients=federation.clients.with_tests(None))
        whole = evaluate_clients(without, history, test, clients=clients, all_classes=True).clients
    groups: dict[float, list[tuple[ClientScore, ClientScore]]] = {}
    for pair in zip(scores, whole, strict=True):
        groups.setdefault(cell.setting.width_of(pair[0].client), []).append(pair)
    local = [score.accuracy or 0.0 for score in scores]
    levels = [_level(width, groups[width]) for width in sorted(groups, reverse=True)]
    return {"levels": levels, "local": _rounded(fmean(local)), "local_deviation": _rounded(pstdev(local))}


def _level(width: float, scores: Sequence[tuple[ClientScore, ClientScore]]) -> LevelRow:
    """Return the means over the clients of a level, from their local scores and those on the whole test set."""
    kept, whole, local = (
        _rounded(fmean(values))
        for values in (
            [score.kept for score, _ in scores],
            [score.metrics.get(WHOLE_TEST) or 0.0 for _, score in scores],
            [score.accuracy or 0.0 for score, _ in scores],
        )
    )
    return LevelRow(width, len(scores), kept, whole, local)


def _to_target(cell: RefereeCell, federation: Federation, history: History) -> dict[str, Any]:
    """Return rounds, bytes of all clients and multiply-adds of an average client up to the target accuracy."""
    target = cell.setting.problem.target
    reached = [n for n, record in enumerate(history) if record.accuracy is not None and record.accuracy >= target]
    if not reached:
        return {}
    records = list(history)[: reached[0] + 1]
    sent = list(accumulate(record.bytes_down + record.bytes_up for record in records))[-1]
    batch = cell.setting.training.batch_size
    steps = [_steps_of(federation, record.cohort) / len(record.cohort) for record in records]
    macs = sum(PASSES * record.macs * batch * count for record, count in zip(records, steps, strict=True))
    return {"rounds_to_target": len(records), "bytes_to_target": sent, "macs_to_target": float(f"{macs:.4g}")}


def _steps_of(federation: Federation, cohort: Sequence[int]) -> int:
    """Return the local steps of all clients of a cohort in one round."""
    return sum(federation.local.steps(federation.clients.size(client)) for client in cohort)


def _rounded(value: float) -> float:
    return round(value, DIGITS)
