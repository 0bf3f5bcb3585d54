"""The time that fedcover adds to Flower: rounds of 10 of 100 clients on Ray, compared with plain Flower.

python -m benchmarks.flower_rounds [--repeats 7]: the paper's MNIST round with FedAvg, with fedcover and full models,
and with fedcover and sub-models, in turn; and the seconds of the server's own work, in one process.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine, prepare
from benchmarks.contenders.fedcover_ray import config_of
from benchmarks.contest import Entry, run_contest
from benchmarks.output import add_out, result_path, write_result
from benchmarks.workload import WORKLOADS
from fedcover.config.build import build_federation
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
    """Return the best of several times."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def overheads(policy: str) -> dict[str, float]:
    """Return the seconds of a round of ten clients that are neither training nor Flower, on one thread."""
    config = config_of("mnist", policy, CODES[policy])
    federation, _ = build_federation(config)
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
    """Run the contest, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    add_out(parser, "flower.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare.prepare(WORKLOADS["mnist"], folder / "mnist")
        entries = [Entry("Flower, FedAvg", "flower_ray", (str(folder / "mnist"),))]
        entries += [
            Entry(f"fedcover on Flower, {policy} {code}", "fedcover_ray", ("mnist", "--policy", policy, "--code", code))
            for policy, code in CODES.items()
        ]
        results = run_contest(entries, args.repeats, folder, score_after=3)
    base = results[0]
    rows = [
        {
            "label": result.label,
            "median": round(result.median, 4) if result.seconds else None,
            "best": round(min(result.seconds), 4) if result.seconds else None,
            "of_flower": round(result.median / base.median, 3) if result.seconds else None,
            "accuracy_after_3": result.accuracy,
            "error": result.error,
        }
        for result in results
    ]
    added = {policy: {key: round(value, 5) for key, value in overheads(policy).items()} for policy in CODES}
    report = {
        "command": "python -m benchmarks.flower_rounds",
        "machine": machine.facts(),
        "rounds": rows,
        "added": added,
    }
    write_result(result_path(parser, args, "flower.json"), report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
