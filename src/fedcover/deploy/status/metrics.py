"""The state of a fleet as metrics, in the text format of Prometheus and in that of OpenMetrics."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from fedcover.deploy.status.fleet_status import FleetStatus

STATES = ("online", "offline", "revoked")
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Sample = tuple[dict[str, str], float | None]
"""The labels of a value, and the value; None is left out."""


@dataclass(frozen=True)
class MetricFamily:
    """A metric with its samples; the name of a counter ends in ``_total``."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Iterable[Sample]


def families(status: FleetStatus) -> Iterator[MetricFamily]:
    """Yield all metrics of a server; those of a run only once it has recorded a round."""
    nodes = [(node, {"node": node.name}) for node in status.nodes]
    states: list[Sample] = [({"state": state}, status.count(state)) for state in STATES]
    yield MetricFamily("fedcover_nodes", "gauge", "Nodes by state.", states)
    online: list[Sample] = [(label, float(node.state == "online")) for node, label in nodes]
    yield MetricFamily("fedcover_node_online", "gauge", "1 if the node is online.", online)
    seen: list[Sample] = [(label, node.last_seen) for node, label in nodes]
    yield MetricFamily("fedcover_node_last_seen_timestamp_seconds", "gauge", "Time of the node's last request.", seen)
    received: list[Sample] = [(label, node.received) for node, label in nodes]
    yield MetricFamily("fedcover_node_received_bytes_total", "counter", "Bytes received from the node.", received)
    sent: list[Sample] = [(label, node.sent) for node, label in nodes]
    yield MetricFamily("fedcover_node_sent_bytes_total", "counter", "Bytes sent to the node.", sent)
    flagged: list[Sample] = [(label, float(bool(node.flag))) for node, label in nodes]
    yield MetricFamily("fedcover_node_flagged", "gauge", "1 if the node is unusual; see deploy status.", flagged)
    lost: list[Sample] = [(label, node.uncovered_without) for node, label in nodes]
    text = "Share of the model that nobody would train in the planned round without the node."
    yield MetricFamily("fedcover_node_uncovered_without_ratio", "gauge", text, lost)
    taken: list[Sample] = [(label, node.seconds) for node, label in nodes]
    yield MetricFamily("fedcover_node_round_seconds", "gauge", "Seconds of the node in the last round.", taken)
    refused: list[Sample] = [({"reason": reason}, count) for reason, count in sorted(status.refusals.items())]
    yield MetricFamily("fedcover_gate_refused_requests_total", "counter", "Requests refused by the gate.", refused)
    text = "How often the SuperLink was started again."
    yield MetricFamily("fedcover_superlink_restarts_total", "counter", text, [({}, status.restarts)])
    text = "Time of the server's start."
    yield MetricFamily("fedcover_server_start_timestamp_seconds", "gauge", text, [({}, status.started)])
    running = sum(not run.status.startswith("finished") for run in status.runs)
    yield MetricFamily("fedcover_runs_active", "gauge", "Runs that have not finished.", [({}, running)])
    yield from _run_families(status)


def _run_families(status: FleetStatus) -> Iterator[MetricFamily]:
    newest = status.newest
    if newest is None or not status.runs:
        return
    label = {"run": status.runs[0].id}
    for name, text, value in (
        ("fedcover_run_round", "Rounds that the newest run has recorded.", newest.round),
        ("fedcover_run_planned_rounds", "Rounds of the newest run in its settings.", newest.rounds),
        ("fedcover_run_round_seconds", "Seconds of its last round.", newest.seconds),
        ("fedcover_run_accuracy_ratio", "Test accuracy after its last round.", newest.accuracy),
        ("fedcover_run_gamma_min", "Least number of clients that held any one entry in it.", newest.gamma_min),
        ("fedcover_run_uncovered_ratio", "Share of the model that no client held in it.", newest.uncovered),
        ("fedcover_run_robust_to", "Malicious clients that its averages tolerate.", newest.robust_to),
        ("fedcover_run_down_bytes", "Bytes that all clients received in it.", newest.down),
        ("fedcover_run_up_bytes", "Bytes that all clients sent in it.", newest.up),
        ("fedcover_run_recent_rejections", "Updates rejected in the last ten rounds.", newest.total_rejections),
    ):
        yield MetricFamily(name, "gauge", text, [(label, value)])


def metrics_text(status: FleetStatus, open_metrics: bool = False) -> str:
    """Return all metrics as text.

    Args:
        status: The state of the fleet.
        open_metrics: Whether to write the OpenMetrics format instead of Prometheus's older one.
    """
    lines = []
    for family in families(status):
        samples = [(labels, value) for labels, value in family.samples if value is not None]
        if not samples:
            continue
        described = family.name.removesuffix("_total") if open_metrics else family.name
        lines += [f"# HELP {described} {family.help}", f"# TYPE {described} {family.kind}"]
        lines += [f"{family.name}{_labels(labels)} {float(value)!r}" for labels, value in samples]
    return "\n".join([*lines, *(["# EOF"] if open_metrics else [])]) + "\n"


def _labels(labels: dict[str, str]) -> str:
    """Return labels in braces.

    >>> _labels({"node": 'a"b'}), _labels({})
    ('{node="a\\\\"b"}', '')
    """
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return re.sub(r'[\\"\n]', lambda match: "\\n" if match[0] == "\n" else "\\" + match[0], value)
