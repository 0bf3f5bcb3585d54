"""ResNet-18 on one GPU: client-steps per second of a plain loop over clients and of the vectorized engine.

PYTHONPATH=src python -m benchmarks.gpu_resnet

The loop is what published codes do: autograd and torch.optim.SGD in float32, one client after another. Triton's cache
is a new folder, so that first calls compile all kernels.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.nn.functional as F

import fedcover as fc
from benchmarks.gpu import seconds_of
from benchmarks.output import add_out, result_path, write_result
from benchmarks.tensors import tensors_of
from fedcover.models import build
from fedcover.training.client import Job

CLIENTS, EACH, BATCH = 20, 500, 10
WIDTHS = "1,0.5,0.25,0.125,0.0625"
SHAPE = (3, 32, 32)
FLOPS = 6 * 555_422_720 * BATCH
"""The arithmetic of a step: two operations for each multiply-add, forward, and twice that backward."""
BYTES = 11_173_962 * 20
"""The least that a step in bfloat16 moves for parameters: read and write each, and its momentum; gradient and copy."""


def federation(engine: fc.Engine, policy: fc.Policy, code: str, augment: bool = False) -> fc.Federation:
    """Return a federation of 20 clients with random images, all of which train in every round."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS * EACH, *SHAPE, generator=rng)
    data = fc.Examples(inputs, torch.randint(10, (len(inputs),), generator=rng), classes=10)
    clients = fc.data.from_parts(data, list(torch.arange(len(inputs)).split(EACH)))
    clients = clients.augmented(fc.data.random_crop_flip()) if augment else clients
    recipe = fc.LocalSGD(epochs=1, batch_size=BATCH, lr=0.01, momentum=0.9)
    task = fc.Task(build("resnet18", SHAPE, 10, 0))
    return fc.Federation(task, clients, policy, fc.by_slot(code), recipe, cohort=CLIENTS, seed=0, engine=engine)


def plain_loop(steps: int) -> float:
    """Return the client-steps per second of a loop over clients."""
    playing = federation(fc.Serial(), fc.full(), f"{CLIENTS}x1")
    model = playing.task.model.cuda().train()
    inputs, labels = (tensor.cuda() for tensor in tensors_of(playing.clients.examples))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(count: int) -> None:
        for at in range(count):
            rows = slice(at * BATCH, (at + 1) * BATCH)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()

    train(10)
    return steps / seconds_of(lambda: train(steps), 2)


def measure(what: str, policy: fc.Policy, code: str, precision: str, augment: bool = False) -> dict[str, Any]:
    """Return the speed of training only, and of whole rounds from planning to record."""
    engine = fc.Vectorized("cuda", precision=precision)
    with engine, torch.cuda.stream(torch.cuda.Stream()):
        playing = federation(engine, policy, code, augment)
        state = playing.start()
        jobs: list[Job] = playing.begin_round(state, engine.device).jobs
        steps = sum(job.recipe.steps(job.examples) for job in jobs)
        torch.cuda.reset_peak_memory_stats()
        first = seconds_of(lambda: list(engine.train(jobs)), 1)
        train = seconds_of(lambda: list(engine.train(jobs)), 3)
        rounds = seconds_of(lambda: playing.play_round(state), 3)
        record = playing.play_round(state)[1]
    return {
        "what": what, "precision": precision, "clients": CLIENTS, "client_steps": steps,
        "client_steps_per_second": round(steps / train), "whole_rounds": round(steps / rounds),
        "first_call_seconds": round(first, 1), "round_seconds": {k: round(v, 4) for k, v in record.seconds.items()},
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser, "gpu-resnet.json")
    args = parser.parse_args()
    loop = round(plain_loop(200))
    rows: list[dict[str, Any]] = [
        {"what": "a loop over clients, fp32", "client_steps_per_second": loop, "first_call_seconds": ""}
    ]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for precision in ("bf16", "tf32", "fp32"):
            rows.append(measure(f"20 full models, {precision}", fc.full(), f"{CLIENTS}x1", precision))
            print(rows[-1], flush=True)
        widths = ",".join([WIDTHS] * (CLIENTS // 5))
        rows.append(measure("20 sub-models of HeteroFL's five widths, bf16", fc.heterofl(), widths, "bf16"))
        print(rows[-1], flush=True)
        rows.append(
            measure("20 full models with crops and flips, bf16", fc.full(), f"{CLIENTS}x1", "bf16", augment=True)
        )
        print(rows[-1], flush=True)
    result = {
        "command": "PYTHONPATH=src python -m benchmarks.gpu_resnet",
        "what": "one epoch of 20 clients with 500 images each, batch 10; loading and copies of results included",
        "caches": "cold for the first of each kernel: a new folder for Triton",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "floors": {"flops_per_client_step": FLOPS, "bytes_per_client_step": BYTES},
        "rows": rows,
    }
    write_result(result_path(parser, args, "gpu-resnet.json"), result)


if __name__ == "__main__":
    main()
