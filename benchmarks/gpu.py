"""Client-steps per second on one GPU by the number of models in the batch, and the share of the memory floor.

PYTHONPATH=src python -m benchmarks.gpu
"""

import argparse
import gc
import time
from collections.abc import Callable

import torch

import fedcover as fc
from benchmarks.gpu_report import command_of
from benchmarks.output import add_out, result_path, write_result
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.models import build
from fedcover.params import params_of
from fedcover.training.client import Job

WORK = {"mlp": ((1, 28, 28), 600), "lenet": ((3, 32, 32), 500)}
"""For each model, the shape of an image and the number of images of a client."""
MODELS = {"mlp": [100, 420, 1140, 2280], "lenet": [100, 420, 2280]}
BATCH = 10
BYTES_PER_ENTRY = 21
"""The least that a step moves for an entry: read it, read and write it, the same for its momentum, read its mask."""


def bandwidth() -> float:
    """Return the bytes per second that a large copy on the device moves, counting reads and writes."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        b.copy_(a)
    torch.cuda.synchronize()
    return 2 * 20 * (1 << 30) / (time.perf_counter() - start)


def jobs_of(name: str, models: int, keep: float) -> list[Job]:
    """Return one epoch of training for each client, on random images; four masks in turn."""
    shape, each = WORK[name]
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(each * 20, *shape, generator=rng)
    data = fc.Examples(inputs, torch.randint(10, (len(inputs),), generator=rng), classes=10)
    clients = fc.data.from_parts(data, [torch.randperm(len(inputs), generator=rng)[:each] for _ in range(models)])
    model = build(name, shape, 10, 0)
    hidden = fc.trace(model, inputs[:2]).hidden
    theta = {key: tensor.cuda() for key, tensor in params_of(model).items()}
    masks = [{n: (torch.rand(theta[n].shape, generator=rng) < keep).cuda() for n in hidden} for _ in range(4)]
    task, recipe = fc.Task(model), fc.LocalSGD(epochs=1, batch_size=BATCH)
    return [
        Job(task, clients, fc.Client(i, i, fc.Budget()), theta, masks[i % 4], recipe, fc.Round(1, 0))
        for i in range(models)
    ]


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the best of several times."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def measure(name: str, models: int, compile: bool, speed: float, keep: float = 0.75) -> dict[str, object]:
    """Return the client-steps per second of the training loop only, and of the whole call with loading."""
    engine, jobs = Vectorized("cuda", compile=compile, most=models), jobs_of(name, models, keep)
    first = seconds_of(lambda: list(engine.train(jobs)), 1)
    torch.cuda.reset_peak_memory_stats()
    whole = seconds_of(lambda: list(engine.train(jobs)), 3)
    step, steps = engine._steps.last, jobs[0].recipe.steps(WORK[name][1])
    loop_seconds = seconds_of(lambda: step.replay(steps), 3)
    entries = sum(tensor.numel() for tensor in jobs[0].theta.values())
    floor = speed / (entries * BYTES_PER_ENTRY)
    return {
        "model": name, "models": models, "compiled": compile, "keep": keep,
        "step": type(step).__name__, "first_call_seconds": round(first, 2),
        "client_steps_per_second": round(models * steps / loop_seconds), "with_loading": round(models * steps / whole),
        "share_of_memory_floor": round(models * steps / loop_seconds / floor, 3),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add_out(parser, "gpu.json")
    parser.add_argument("--networks", nargs="*", default=list(WORK))
    parser.add_argument("--models", type=int, nargs="*", help="models in the batch; default: several for each network")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    speed = bandwidth()
    runs = []
    for name in args.networks:
        for models in args.models or MODELS[name]:
            for compile in (False, True):
                try:
                    row = measure(name, models, compile, speed)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"[:300]
                    row = {"model": name, "models": models, "compiled": compile, "error": reason}
                print(row, flush=True)
                runs.append(row)
                gc.collect()
                torch.cuda.empty_cache()
    result = {
        "command": command_of(parser, args),
        "what": "client-steps per second: one SGD step of one client on a batch of 10, keep 0.75 of the hidden weights",
        "memory_floor": f"{BYTES_PER_ENTRY} bytes for each parameter and step at the measured bandwidth",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes_per_second": round(speed),
        "runs": runs,
    }
    write_result(result_path(parser, args, "gpu.json"), result)


if __name__ == "__main__":
    main()
