"""Client-steps a second on one GPU, against the number of models in the batch, and the memory floor.

PYTHONPATH=src python benchmarks/gpu.py --out results.json
"""

import argparse
import json
import time
from pathlib import Path

import torch

import fedcover as fc
from fedcover.engines.vectorized import Vectorized
from fedcover.local import Job
from fedcover.models import build
from fedcover.params import params_of

IMAGES = {"mlp": ((1, 28, 28), 600), "lenet": ((3, 32, 32), 500)}


def bandwidth() -> float:
    """Bytes a second that a large copy on the device moves, reads and writes counted."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(20):
        b.copy_(a)
    torch.cuda.synchronize()
    return 2 * 20 * (1 << 30) / (time.perf_counter() - begun)


def jobs_of(name: str, models: int, keep: float) -> list[Job]:
    """Jobs of the paper's size: one epoch less data than a round, random images."""
    shape, each = IMAGES[name]
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(each * 20, *shape, generator=rng)
    data = fc.Examples(inputs, torch.randint(10, (len(inputs),), generator=rng), classes=10)
    clients = fc.data.from_parts(data, [torch.randperm(len(inputs), generator=rng)[:each] for _ in range(models)])
    model = build(name, shape, 10, 0)
    theta = params_of(model)
    hidden = fc.trace(model, inputs[:2]).hidden
    masks = [{n: torch.rand(theta[n].shape, generator=rng) < keep for n in hidden} for _ in range(4)]
    task, recipe = fc.Task(model), fc.LocalSGD(epochs=1)
    return [
        Job(
            task, clients, fc.Client(i, i, fc.Budget()), theta, masks[i % 4] if keep < 1 else {}, recipe, fc.Round(1, 0)
        )
        for i in range(models)
    ]


def measure(name: str, models: int, compile: bool, keep: float = 0.75, repeats: int = 3) -> dict[str, object]:
    """Client-steps a second of the training loop alone and of the whole call."""
    engine = Vectorized("cuda", compile=compile, most=models)
    jobs = jobs_of(name, models, keep)
    begun = time.perf_counter()
    list(engine.train(jobs))
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        list(engine.train(jobs))
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    machine = next(iter(engine._machines.values()))
    steps = jobs[0].recipe.steps(IMAGES[name][1])
    loop = float("inf")
    for _ in range(repeats):
        machine._at.step.zero_()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            machine._graph.replay()
        torch.cuda.synchronize()
        loop = min(loop, time.perf_counter() - begun)
    return {
        "model": name, "models": models, "compiled": compile, "keep": keep, "first_call_seconds": round(first, 2),
        "client_steps_per_second": round(models * steps / loop), "with_loading": round(models * steps / best),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--models", type=int, nargs="*", default=[100, 420, 2280])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes_per_second": bandwidth(),
        "runs": [],
    }
    print({k: v for k, v in found.items() if k != "runs"}, flush=True)
    for name in IMAGES:
        for models in arguments.models:
            for compile in (False, True):
                try:
                    row = measure(name, models, compile)
                except Exception as error:
                    row = {
                        "model": name,
                        "models": models,
                        "compiled": compile,
                        "error": f"{type(error).__name__}: {error}"[:400],
                    }
                print(row, flush=True)
                found["runs"].append(row)
                torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
