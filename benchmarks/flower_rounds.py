"""What fedcover adds to Flower: rounds of 10 of 100 clients on Ray, beside plain Flower with the same model.

python -m benchmarks.flower_rounds [--repeats 7]: the paper's MNIST round, by FedAvg, by fedcover with full models,
and by fedcover with sub-models, in turn; and the seconds of what the server does besides waiting, in one process.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine, prepare
from benchmarks.contenders.fedcover_ray import config_of
from benchmarks.contest import ROOT, Entry, hold
from benchmarks.workload import WORKLOADS
from fedcover.deploy.wire import (
    Limits,
    PendingRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    request_from_job,
)
from fedcover.engines.serial import Serial

CODES = {"full": "1111111111", "NP": "1111444444", "WP": "1111223344"}


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """The best of a few times."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def overheads(policy: str) -> dict[str, float]:
    """Seconds of one round of ten clients that are neither training nor Flower, on one thread."""
    config = config_of("mnist", policy, CODES[policy])
    federation, _ = config.build()
    state = federation.start()
    begun = federation.begin_round(state)
    requests = [request_from_job(job, True) for job in begun.jobs]
    frames = [encode_request(request) for request in requests]
    updates = list(Serial(shrink=True).train(begun.jobs))
    replies = [encode_reply(update, request) for update, request in zip(updates, requests, strict=True)]
    pending = [PendingRequest.of(request) for request in requests]
    return {
        "plan": seconds_of(lambda: federation.begin_round(state)),
        "encode requests": seconds_of(lambda: [encode_request(request) for request in requests]),
        "decode requests": seconds_of(lambda: [decode_request(frame, federation.theta0) for frame in frames]),
        "encode replies": seconds_of(
            lambda: [encode_reply(update, request) for update, request in zip(updates, requests, strict=True)]
        ),
        "check replies": seconds_of(
            lambda: [decode_reply(reply, request, Limits()) for reply, request in zip(replies, pending, strict=True)]
        ),
        "average": seconds_of(lambda: federation.end_round(federation.begin_round(state), updates))
        - seconds_of(lambda: federation.begin_round(state)),
        "MB down": sum(map(len, frames)) / 1e6,
        "MB up": sum(map(len, replies)) / 1e6,
    }


def main() -> None:
    """Hold the contest and write results/flower.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "flower.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare.prepare(WORKLOADS["mnist"], folder / "mnist")
        entries = [Entry("Flower, FedAvg", "flower_ray", (str(folder / "mnist"),))]
        entries += [
            Entry(f"fedcover on Flower, {policy} {code}", "fedcover_ray", ("mnist", "--policy", policy, "--code", code))
            for policy, code in CODES.items()
        ]
        results = hold(entries, args.repeats, folder, score_after=3)
    base = results[0]
    rows = [
        {
            "label": one.label,
            "median": round(statistics.median(one.seconds), 4) if one.seconds else None,
            "best": round(min(one.seconds), 4) if one.seconds else None,
            "of_flower": round(statistics.median(one.seconds) / base.median, 3) if one.seconds else None,
            "accuracy_after_3": one.accuracy,
            "error": one.error,
        }
        for one in results
    ]
    added = {policy: {key: round(value, 5) for key, value in overheads(policy).items()} for policy in CODES}
    found = {
        "command": "python -m benchmarks.flower_rounds",
        "machine": machine.facts(),
        "rounds": rows,
        "added": added,
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
