"""What a process imports before its first vectorized step: seconds on a machine without bytecode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUND = """
import sys
import torch
import fedcover as fc
from torch import nn
{kernels}
rng = torch.Generator().manual_seed(0)
images, labels = torch.randn(16, 2, 4, 4, generator=rng), torch.arange(16) % 3
net = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
    nn.Linear(128, 3),
)
clients = fc.data.iid((images, labels), clients=4, seed=0)
for recipe in {recipes}:
    federation = fc.Federation(fc.Task(net), clients, fc.heterofl(), fc.by_slot("2x1,2x0.5"), recipe, cohort=4, seed=0,
                               engine=fc.Vectorized("cpu"), require_coverage=False)
    record = federation.run(1, evaluate_on=(images, labels)).last
    assert record.train_loss is not None, record
for name in ("torch._dynamo", "sympy", "torch.fx.experimental.symbolic_shapes", "matplotlib", "scipy", "networkx",
             "fedcover.engines.vectorized.patch_kernels", "fedcover.engines.vectorized.sgd_kernels"):
    if name in sys.modules:
        print(name)
"""
KERNELS = """
from fedcover.engines.vectorized import prepared_model
from fedcover.engines.vectorized.channels_last import use_channels_last
from fedcover.engines.vectorized.fusion import fuse_norms, trace_layers
from fedcover.engines.vectorized.layers import Layers
def choose(model, example, arithmetic):
    traced = trace_layers(model, example)
    use_channels_last(traced, torch.float32, 2)
    assert fuse_norms(traced)
    return Layers(traced, False, channels_last=True, kernels=True)
prepared_model.choose_layers = choose
"""
"""The layers of a GPU; the interpreter of Triton runs their kernels."""


def imported(tmp_path: Path, recipes: str, kernels: str = "") -> list[str]:
    """Return which of some large packages, and of our kernels, a new process imports for a round of each recipe."""
    script = ROUND.replace("{kernels}", kernels).replace("{recipes}", recipes)
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_round_imports_no_compiler(tmp_path: Path) -> None:
    assert imported(tmp_path, "fc.LocalSGD(1, 4), fc.LocalAdam(1, 4)") == []


def test_a_round_with_kernels_imports_no_compiler(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    kernels = [f"fedcover.engines.vectorized.{name}" for name in ("patch_kernels", "sgd_kernels")]
    assert imported(tmp_path, "[fc.LocalSGD(1, 4)]", KERNELS) == kernels
