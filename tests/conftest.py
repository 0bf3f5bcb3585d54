"""What tests share: small federations, the real data's folder, and the command line."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU; Triton reads it when it is imported, maybe by torch

import hypothesis
import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.params import Mask, Params
from fedcover.policies import POLICIES as ALL_POLICIES
from fedcover.policies.base import State
from fedcover.seeding import ambient

EXAMPLES = 60 if os.environ.get("FEDCOVER_SLOW") else 25
hypothesis.settings.register_profile("fedcover", deadline=None, max_examples=EXAMPLES, derandomize=True)
hypothesis.settings.load_profile("fedcover")
gc.set_threshold(200_000, 50, 100)  # a process has thousands of tests on its heap, which are garbage only at the end
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

POLICIES = {name: make for name, make in ALL_POLICIES.items() if not make().traits().needs_exits}
"""The policies for any model; those for models with exits are in tests/contracts/test_depth_policies.py."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random numbers, whatever ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture
def mnist_folder() -> str:
    """The folder that --data names, if real MNIST is in it or in the cache."""
    if fc.data.describe("mnist").where is None:
        pytest.skip("real MNIST is not here: set FEDCOVER_DATA or run `fedcover data get mnist`")
    return os.environ.get("FEDCOVER_DATA", "")


def plan_masks(
    policy: fc.Policy, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State
) -> tuple[list[Mask], State]:
    """Return the masks of the clients that train, and the policy's next state."""
    plans, state = policy.plan(theta, cohort, this_round, state)
    return [plan.mask for plan in plans], state


def small_net(seed: int = 0) -> nn.Module:
    with ambient(seed, "test net"):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def small_data(examples: int = 120, seed: int = 0) -> fc.Examples:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 6, generator=rng)
    return fc.Examples(inputs, inputs[:, :3].argmax(1), classes=3)


@pytest.fixture
def small_federation() -> Callable[..., fc.Federation]:
    """A maker of quick federations; keyword arguments go to Federation."""

    def make(**changes: object) -> fc.Federation:
        settings: dict[str, object] = {
            "policy": fc.weight_pruning(),
            "budgets": fc.by_slot("1247"),
            "local": fc.LocalSGD(epochs=2, batch_size=8, lr=0.1),
            "cohort": 4,
            "seed": 3,
        }
        clients = fc.data.iid(small_data(), clients=8, seed=1)
        return fc.Federation(fc.Task(small_net()), clients, **{**settings, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def fedcover_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command, in a process and a folder of its own."""

    def call(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(env or {})}
        command = [sys.executable, "-m", "fedcover", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)

    return call


@pytest.fixture
def cli() -> Callable[..., tuple[int, str, str]]:
    """The command line called in this process: (exit code, stdout, stderr). Quick, for many small calls."""
    from typer.testing import CliRunner

    from fedcover.cli import app

    def call(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, list(arguments), prog_name="fedcover")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return call
