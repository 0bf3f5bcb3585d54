"""What a smaller model saves: a training step of ResNet-18 shrunk to 1/2 and 1/4 of its width, and of the whole model.

python -m benchmarks.shrinking [--repeats 7]: steps by plain autograd on one thread, the models in turn. Memory is that
of parameters, gradients and tensors that are saved for the backward pass.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedcover as fc
from benchmarks import machine
from benchmarks.output import add_out, result_path, write_result
from fedcover.models import default_model
from fedcover.structure.batch_norm import static_form

KEEPS = (1.0, 0.5, 0.25)
BATCH = 32


def cut_to(model: str, keep: float) -> tuple[nn.Module, dict[str, float]]:
    """Return the model with only the first units of every layer, and its cost as shares of the whole model's."""
    whole_model, example = default_model(model)
    module = static_form(fc.trace(whole_model, example), whole_model)
    structure = fc.trace(module, example)
    policy = fc.fixed_subnetwork().bind(structure)
    client = fc.Client(0, 0, fc.Budget(keep))
    theta = {name: tensor.detach() for name, tensor in module.named_parameters()}
    (plan,), _ = policy.plan(theta, [client], fc.Round(1, 0), policy.start())
    mask = plan.mask
    cost, whole = fc.cost_of(structure, mask), fc.cost_of(structure, {})
    sub = fc.shrink(module, mask, example)
    facts = {
        "keep": keep,
        "macs_ratio": round(cost.macs / whole.macs, 4),
        "parameters_ratio": round(sum(p.numel() for p in sub.model.parameters()) / whole.parameters, 4),
        "bytes_ratio": round((cost.bytes_down + cost.bytes_up) / (whole.bytes_down + whole.bytes_up), 4),
    }
    return sub.model.train(), facts


def step(module: nn.Module, example: torch.Tensor) -> None:
    """Take one SGD step on random data."""
    loss = F.cross_entropy(module(example), torch.arange(len(example)) % 10)
    loss.backward()
    with torch.no_grad():
        for tensor in module.parameters():
            assert tensor.grad is not None
            tensor.sub_(tensor.grad, alpha=0.01)
            tensor.grad = None


def memory(module: nn.Module, images: torch.Tensor) -> float:
    """Return the MiB of parameters, gradients, and tensors that the forward pass saves for the backward pass."""
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = F.cross_entropy(module(images), torch.arange(len(images)) % 10)
    activations = sum(size for address, size in kept.items() if address not in parameters)
    del loss
    return round((2 * sum(parameters.values()) + activations) / 2**20, 1)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shrinking", description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--repeats", type=int, default=7)
    add_out(parser, "shrinking.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [cut_to(args.model, keep) for keep in KEEPS]
    images = torch.randn(BATCH, 3, 32, 32)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(args.repeats + 1):
        for (module, _), spent in zip(models, times, strict=True):
            start = time.perf_counter()
            step(module, images)
            spent.append(time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for (module, facts), spent in zip(models, times, strict=True):
        used = memory(module, images)
        rows.append({**facts, "seconds": round(statistics.median(spent[1:]), 4), "memory_mib": used})
    for row in rows:
        row["seconds_ratio"] = round(row["seconds"] / rows[0]["seconds"], 4)
        row["memory_ratio"] = round(row["memory_mib"] / rows[0]["memory_mib"], 4)
    result = {
        "command": f"python -m benchmarks.shrinking --model {args.model} --repeats {args.repeats}",
        "machine": machine.facts(),
        "batch": BATCH,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    write_result(result_path(parser, args, "shrinking.json"), result)


if __name__ == "__main__":
    main()
