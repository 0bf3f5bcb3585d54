"""The first round of deep networks on unequal clients, with and without traced steps.

python -m benchmarks.tracing [--quick]: a MobileNet and a vision transformer on 8 Dirichlet clients, whose last batches
have many different sizes. Tracing a step takes time for each size, so steps are traced only where that pays. The first
round of a new engine is timed; the two ways take turns. Data are random.
"""

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor, nn

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover._threads import one_thread

CLIENTS, EXAMPLES = 8, 480
NAME = "tracing.json"


def separable(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return a depthwise convolution and a pointwise one, each with its norm, as in MobileNet."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.GroupNorm(4, inputs), nn.ReLU(),
        nn.Conv2d(inputs, outputs, 1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU(),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """Return MobileNet's thirteen blocks at a quarter of their widths, for images of 32 x 32."""
    widths = [8, 16, 32, 32, 64, 64, 128, 128, 128, 128, 128, 128, 256, 256]
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1]
    blocks = [separable(a, b, stride) for a, b, stride in zip(widths, widths[1:], strides, strict=False)]
    first = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.GroupNorm(4, 8), nn.ReLU())
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class VisionTransformer(nn.Module):
    """A vision transformer of four layers on patches of 4 x 4."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 64, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores for a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.head(self.layers(tokens).mean(1))
        return scores


MODELS = {"mobilenet": mobilenet, "vision transformer": VisionTransformer}


def first_round(model: nn.Module, traced: bool) -> float:
    """Return the seconds of the training of a first round."""
    rng = torch.Generator().manual_seed(0)
    data = fc.Examples(torch.randn(EXAMPLES, 3, 32, 32, generator=rng), torch.arange(EXAMPLES) % 10, classes=10)
    clients = fc.data.dirichlet(data, clients=CLIENTS, alpha=0.5, seed=0)
    federation = fc.Federation(
        fc.Task(model), clients, fc.weight_pruning(), fc.by_slot("4x1,4x0.5"), fc.LocalSGD(epochs=1), cohort=CLIENTS
    )
    planned = federation.begin_round(federation.start())
    with one_thread():
        start = time.perf_counter()
        list(fc.Serial(traced=traced).train(planned.jobs))
        return time.perf_counter() - start


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each way once")
    parser.add_argument("--repeats", type=int, default=3)
    add_out(parser, NAME)
    args = parser.parse_args()
    models: dict[str, Any] = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        times: dict[str, list[float]] = {"traced": [], "untraced": []}
        for _ in range(1 if args.quick else args.repeats):
            for way, spent in times.items():
                spent.append(first_round(model, way == "traced"))
        best = {way: round(min(spent), 2) for way, spent in times.items()}
        models[name] = {"seconds": best, "ratio": round(best["traced"] / best["untraced"], 2)}
    result = {
        "command": "python -m benchmarks.tracing" + (" --quick" if args.quick else ""),
        "machine": machine.facts(),
        "load": machine.load(),
        "models": models,
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, NAME), result)


if __name__ == "__main__":
    main()
