"""LeNet on one GPU: steps compiled by torch beside those of kernels for pooled convolutions, and the tiles of these.

PYTHONPATH=src python -m benchmarks.gpu_lenet

``tiles`` measures every kernel of a convolution with several sizes of tiles. ``step`` measures whole steps: compiled by
torch, by kernels with their default tiles, and by kernels with the fastest tiles. ``linear`` measures whole steps with
several sizes of tiles of the linear layers. ``kernels`` lists the kernels of one step of each path with their
microseconds.
"""

import argparse
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.gpu import BATCH, WORK, bandwidth, jobs_of, measure
from benchmarks.gpu_profile import activities_on, read_profile, start_profiler
from benchmarks.gpu_report import command_of
from benchmarks.output import add_out, result_path, save_result
from fedcover.engines.vectorized import chain_step
from fedcover.engines.vectorized import layers as choices
from fedcover.engines.vectorized.chain_layers import ChainLayers, chain_layers
from fedcover.engines.vectorized.chain_stacks import ChainStacks, ChainTiles, Clients
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.engines.vectorized.pooled_stacks import TILES, KernelTiles, PooledTiles
from fedcover.models import build
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.steps.chains import find_layers

NAME = "gpu-lenet.json"
PARTS = ("tiles", "step", "linear", "kernels")
EXAMPLES = 10_000
PROCESSES = 8
"""The number of processes that compile."""
PATHS: dict[str, tuple[bool, tuple[PooledTiles, ...]]] = {"compiled by torch": (False, TILES), "kernels": (True, TILES)}
"""For each path, whether it uses the kernels for pooled convolutions, and their tiles."""
FORWARD = [
    KernelTiles(128, 64),
    KernelTiles(128, 32),
    KernelTiles(128, 32, registers=168),
    KernelTiles(128, 64, registers=168),
    KernelTiles(128, 32, registers=128),
    KernelTiles(128, 16),
    KernelTiles(64, 32),
    KernelTiles(64, 32, warps=2),
    KernelTiles(256, 32, warps=8),
    KernelTiles(256, 64, warps=8),
]
SUMS = [
    KernelTiles(32, 128),
    KernelTiles(32, 128, stages=2),
    KernelTiles(32, 128, registers=168),
    KernelTiles(32, 128, warps=8, registers=128),
    KernelTiles(32, 64),
    KernelTiles(16, 64),
    KernelTiles(32, 256, warps=8),
    KernelTiles(64, 128, warps=8),
]
LINEAR = [
    ChainTiles(inner_rows=rows, inner_entries=entries, inner_warps=warps)
    for rows, entries in ((32, 1024), (64, 1024), (32, 2048), (64, 2048), (128, 1024))
    for warps in ((2, 4), (4, 4), (4, 8), (1, 2))
]
EACH = ((256, 512, 1024), (128, 256))
"""For each convolution, the places that a program sums over."""
IMAGES = [
    KernelTiles(128, 4),
    KernelTiles(128, 4, registers=168),
    KernelTiles(64, 4),
    KernelTiles(64, 4, registers=128),
    KernelTiles(128, 4, warps=8),
    KernelTiles(128, 4, warps=8, registers=128),
]


def layers_of() -> ChainLayers:
    """Return the layers of LeNet as kernels take them."""
    shape = WORK["lenet"][0]
    model, stream = with_keyed_dropout(build("lenet", shape, 10, 0), torch.zeros(1, *shape))
    layers = chain_layers(find_layers(model.train(), stream, torch.zeros(1, *shape)) or [])
    assert layers is not None
    return layers


def stacks_of(layers: ChainLayers, models: int, tiles: tuple[PooledTiles, ...], device: str = "cuda") -> ChainStacks:
    """Return stacks of clients that are ready for their first step, on random data, with masks."""
    rng = torch.Generator(device).manual_seed(0)
    shape = WORK["lenet"][0]
    x = torch.randn(EXAMPLES, shape[0] * shape[1] * shape[2], generator=rng, device=device)
    y = torch.randint(10, (EXAMPLES,), generator=rng, device=device)
    stacks = ChainStacks(layers.linear, (x, y), (1, models, BATCH), ChainTiles(pooled=tiles), layers.front)
    stacks.index[:1].copy_(torch.randint(EXAMPLES, (1, models, BATCH), generator=rng, device=device))
    theta = {n: torch.randn(s.shape[1:], generator=rng, device=device) * 0.1 for n, s in stacks.theta.items()}
    masks = [{n: torch.rand(t.shape, generator=rng, device=device) < 0.75 for n, t in theta.items()} for _ in range(4)]
    zeros, mask_of = torch.zeros(models, dtype=torch.long, device=device), torch.arange(models, device=device) % 4
    stacks.start(Clients([theta], zeros, masks, mask_of, [0.01] * models, list(range(models))))
    return stacks


def tile_choices(at: int) -> Iterator[tuple[str, PooledTiles]]:
    """Yield the name of a kernel of a convolution, and tiles of which only those of that kernel vary."""
    now = TILES[at]
    yield from (("forward", now._replace(forward=tiles)) for tiles in FORWARD)
    yield from (("sums", now._replace(sums=tiles, each=each)) for each in EACH[at] for tiles in SUMS)
    yield from (("images", now._replace(images=tiles)) for tiles in IMAGES if at)


def with_tiles(tiles: PooledTiles, kernel: str, own: KernelTiles) -> PooledTiles:
    """Return tiles in which those of one kernel are replaced."""
    return {
        "forward": tiles._replace(forward=own),
        "sums": tiles._replace(sums=own),
        "images": tiles._replace(images=own),
    }[kernel]


def launch_of(
    layers: ChainLayers, models: int, at: int, kernel: str, tiles: PooledTiles, device: str = "cuda"
) -> Callable[[], None]:
    """Return a function that launches a kernel of a convolution."""
    pooled = stacks_of(layers, models, (*TILES[:at], tiles, *TILES[at + 1 :]), device).pooled
    assert pooled is not None
    return {
        "forward": partial(pooled.forward_one, at, 0),
        "sums": partial(pooled.sum_gradients, at, 0),
        "images": partial(pooled.input_gradient, at, 0),
    }[kernel]


def compile_tiles(arguments: tuple[Any, ...]) -> None:
    """Compile a kernel into the cache that all processes share."""
    with suppress(Exception):  # of tiles that cannot be compiled
        launch_of(*arguments)()


def tile_rows(layers: ChainLayers, models: int) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of every kernel with every choice of tiles, from the fastest to the slowest."""
    from triton.testing import do_bench_cudagraph

    work = [(layers, 1, at, *choice) for at in range(2) for choice in tile_choices(at)]
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        list(pool.map(compile_tiles, work))
    for at in range(2):
        rows: dict[str, list[tuple[float, PooledTiles]]] = defaultdict(list)
        for kernel, tiles in tile_choices(at):
            try:
                launch = launch_of(layers, models, at, kernel, tiles)
                rows[kernel].append((1e3 * float(do_bench_cudagraph(launch, rep=5, return_mode="median")), tiles))
            except Exception as error:  # such as too much shared memory
                print(f"conv{at + 1} {kernel} {tiles}: {type(error).__name__}: {error}"[:200], flush=True)
        for kernel, times in rows.items():
            for microseconds, tiles in sorted(times, key=lambda entry: entry[0]):
                shape = {**getattr(tiles, kernel)._asdict(), **({"each": tiles.each} if kernel == "sums" else {})}
                yield {"convolution": at, "kernel": kernel, "us": round(microseconds, 1), **shape}


def fastest(rows: list[dict[str, Any]]) -> tuple[PooledTiles, ...]:
    """Return the tiles with which each kernel was fastest."""
    best = list(TILES)
    for at in range(2):
        for kernel in ("forward", "sums", "images"):
            own = [row for row in rows if row["convolution"] == at and row["kernel"] == kernel]
            if own:
                first = min(own, key=lambda row: row["us"])
                best[at] = with_tiles(best[at], kernel, KernelTiles(*(first[f] for f in KernelTiles._fields)))
                best[at] = best[at]._replace(each=first.get("each", best[at].each))
    return tuple(best)


def linear_rows(models: int, speed: float) -> Iterator[dict[str, Any]]:
    """Yield the speed of steps with every choice of tiles of the linear layers."""
    for tiles in LINEAR:
        choices.POOLED_KERNELS, chain_step.TILES = True, tiles
        shape = {"rows": tiles.inner_rows, "entries": tiles.inner_entries, "warps": tiles.inner_warps}
        yield {**shape, **measure("lenet", models, True, speed)}
        gc.collect()
        torch.cuda.empty_cache()


def use(path: tuple[bool, tuple[PooledTiles, ...]]) -> None:
    """Choose the path of further steps."""
    choices.POOLED_KERNELS, tiles = path
    chain_step.TILES = ChainTiles(pooled=tiles)
    if choices.POOLED_KERNELS:  # errors are shown here; an engine would take the other path
        stacks_of(layers_of(), 4, tiles).take_steps(1, 0.9)
    gc.collect()
    torch.cuda.empty_cache()


def kernel_rows(name: str, models: int) -> Iterator[dict[str, Any]]:
    """Yield the kernels of one step: launches and microseconds."""
    engine, jobs = Vectorized("cuda", most=models), jobs_of("lenet", models, 0.75)
    list(engine.train(jobs))
    step, steps = engine._steps.last, 20
    with profile(activities=activities_on("cuda")) as done:
        step.replay(steps)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for launch in read_profile(done, "cuda")[0]:
        times[launch.name].append(launch.end - launch.start)
    for kernel, spent in sorted(times.items(), key=lambda item: -sum(item[1])):
        launches, microseconds = round(len(spent) / steps, 1), round(sum(spent) / steps, 1)
        yield {"path": name, "kernel": kernel[:80], "launches": launches, "us": microseconds}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_lenet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_out(parser, NAME)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", type=int, nargs="+", default=[420, 2280], help="clients in the batch")
    args = parser.parse_args()
    path, speed, paths = result_path(parser, args, NAME), bandwidth(), dict(PATHS)
    result: dict[str, Any] = {
        "command": command_of(parser, args),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "bytes_per_second": round(speed),
    }  # fmt: skip

    def add(part: str, row: dict[str, Any]) -> None:
        result.setdefault(part, []).append(row)
        print(f"{part}: {row}", flush=True)
        save_result(path, result)

    if "tiles" in args.parts:
        for row in tile_rows(layers_of(), args.models[0]):
            add("tiles", row)
        paths["kernels, fastest tiles"] = (True, fastest(result.get("tiles", [])))
    for name, how in paths.items() if "step" in args.parts else ():
        use(how)
        for models in args.models:
            add("step", {"path": name, **measure("lenet", models, True, speed)})
    for row in linear_rows(args.models[-1], speed) if "linear" in args.parts else ():
        add("linear", row)
    if "kernels" in args.parts:
        start_profiler("cuda")  # before the graphs are captured that it is to see
    for name, how in paths.items() if "kernels" in args.parts else ():
        use(how)
        for row in kernel_rows(name, args.models[0]):
            add("kernels", row)
    for row in result.get("step", []):
        print(f"{row['path']:<24}{row['models']:>6}{row['client_steps_per_second']:>12,} client-steps/s  {row['step']}")
    print(f"tiles of {list(paths)[-1]}: {paths[list(paths)[-1]][1]}\nresult: {path}", flush=True)


if __name__ == "__main__":
    main()
