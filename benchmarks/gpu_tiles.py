"""The fastest tiles of the convolution kernels for the layers of ResNet-18, from which ``tiles_of`` was chosen.

PYTHONPATH=src python -m benchmarks.gpu_tiles --clients 20 4
"""

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product

import torch
import triton

from benchmarks.output import add_out, result_path, write_result
from fedcover.engines.vectorized import patch_products
from fedcover.engines.vectorized.convolutions import output_size
from fedcover.engines.vectorized.launch import compile_kernels
from fedcover.engines.vectorized.operands import ProductOperand
from fedcover.engines.vectorized.patch_products import Tiles

BATCH = 10
LAYERS = [(32, 64, 64, 3, 1), (16, 128, 128, 3, 1), (8, 256, 256, 3, 1), (4, 512, 512, 3, 1),
          (32, 64, 128, 3, 2), (16, 128, 256, 3, 2), (8, 256, 512, 3, 2), (8, 256, 512, 1, 2)]  # fmt: skip
"""Height, channels of the input and of the output, taps and stride."""
SHAPES = [(64, 64, 64), (128, 64, 64), (64, 128, 64), (128, 128, 64), (128, 256, 64), (64, 256, 64), (64, 64, 32),
          (128, 64, 32), (64, 128, 32), (128, 128, 32), (32, 64, 64),
          (64, 64, 128), (32, 64, 128), (32, 32, 128)]  # fmt: skip
CHOICES = [Tiles(*shape, *how) for shape, how in product(SHAPES, [(4, 2), (4, 3), (4, 4), (8, 3), (8, 4)])]

Kernel = Callable[[Tiles | None], object]


def kernels_of(layer: tuple[int, ...], clients: int) -> dict[str, Kernel]:
    """Return the three products of a layer, on random numbers."""
    size, c, oc, taps, stride = layer
    how = [stride, stride, taps // 2, taps // 2, 1, 1]
    out = output_size((size, size), (taps, taps), how)

    def numbers(*shape: int) -> ProductOperand:
        return ProductOperand(torch.randn(clients, *shape, device="cuda", dtype=torch.bfloat16))

    x, w, d = numbers(BATCH, size, size, c), numbers(oc, taps, taps, c), numbers(BATCH, *out, oc)
    return {
        "forward": lambda tiles: patch_products.forward(x, w, how, True, tiles),
        "input gradient": lambda tiles: patch_products.input_gradient(d, w, (size, size), how, tiles),
        "weight gradient": lambda tiles: patch_products.weight_gradient(d, x, (taps, taps), how, tiles),
    }


def seconds(kernel: Kernel, tiles: Tiles | None) -> float:
    """Return the median time of a kernel; infinite if the tiles do not fit."""
    try:
        return float(triton.testing.do_bench_cudagraph(partial(kernel, tiles), rep=5, return_mode="median")) / 1e3
    except Exception:
        return float("inf")


def measure(layer: tuple[int, ...], clients: int) -> list[dict[str, object]]:
    """Return a row for each kernel of a layer: the three best tiles and the present ones."""
    rows = []
    size, c, oc, taps, stride = layer
    work = 2 * clients * BATCH * (size // stride) ** 2 * c * oc * taps**2
    for name, kernel in kernels_of(layer, clients).items():
        times = sorted((seconds(kernel, tiles), tiles) for tiles in CHOICES)
        best = [f"{tuple(tiles)} {spent * 1e6:.1f}" for spent, tiles in times[:4]]
        now = seconds(kernel, None)
        rows.append({
            "layer": layer, "clients": clients, "kernel": name, "now_us": round(now * 1e6, 1), "best_us": best,
            "now_tflops": round(work / now / 1e12), "best_tflops": round(work / times[0][0] / 1e12),
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    return rows


def try_all(clients: int) -> None:
    """Launch every kernel with every choice of tiles, for ``compile_kernels``."""
    for layer in LAYERS:
        for kernel in kernels_of(layer, clients).values():
            for tiles in [None, *CHOICES]:
                kernel(tiles)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_out(parser, "gpu-tiles.json")
    parser.add_argument("--clients", type=int, nargs="*", default=[20, 4])
    args = parser.parse_args()
    with suppress(Exception):  # of tiles that do not fit
        compile_kernels([partial(try_all, clients) for clients in args.clients])
    rows = [row for clients in args.clients for layer in LAYERS for row in measure(layer, clients)]
    result = {
        "command": "PYTHONPATH=src python -m benchmarks.gpu_tiles",
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    write_result(result_path(parser, args, "gpu-tiles.json"), result)


if __name__ == "__main__":
    main()
