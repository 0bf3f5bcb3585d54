"""The outcome of a run, as it is stored in its folder."""

from typing import TYPE_CHECKING, Any

from fedcover.data import DevicePopulation, Examples
from fedcover.engines.base import Engine
from fedcover.federation.history import History

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


def summary(
    federation: "Federation", history: History, name: str, test: Examples | None, engine: Engine
) -> dict[str, Any]:
    """Return the outcome of a run, as stored in summary.json."""
    last, clients = history.last, federation.clients
    return {
        "name": name,
        **({"clients": [device.number for device in clients.devices]} if isinstance(clients, DevicePopulation) else {}),
        "rounds": len(history),
        "accuracy": last.accuracy,
        "metrics": last.metrics,
        "loss": last.loss,
        "local_accuracy": last.local_accuracy,
        "gamma_min": history.gamma_min,
        "uncovered": max(history.column("uncovered")),
        "robust_to": min((f for f in history.column("robust_to") if f is not None), default=None),
        "limited": sum(len(limited) for limited in history.column("limited")),
        "pruning_noise": sum(history.column("pruning_noise")) / len(history),
        "keeps": [budget.keep for budget in federation.resolved_budgets],
        "parameters": sum(tensor.numel() for tensor in federation.task.model.parameters()),
        "bytes_down": sum(history.column("bytes_down")),
        "bytes_up": sum(history.column("bytes_up")),
        "bytes_full": sum(history.column("bytes_full")),
        "rejected": sum(len(rejected) for rejected in history.column("rejected")),
        "seconds": sum(sum(record.seconds.values()) for record in history),
        "engine": engine.name,
        "data": (test or federation.clients.examples).provenance,
        "licence": (test or federation.clients.examples).licence or None,
        "label_bias": _mean_bias(history),
        "certificate": history.last.certificate,
    }


def _mean_bias(history: History) -> dict[str, float] | None:
    """Return the mean label bias over the rounds that measured it, with the worst region of all."""
    biases = [bias for bias in history.column("label_bias") if bias]
    if not biases:
        return None
    worst = max(biases, key=lambda bias: float(bias["worst"]))
    return {**worst, **{key: sum(bias[key] for bias in biases) / len(biases) for key in ("before", "after")}}
