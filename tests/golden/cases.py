"""Runs and reports whose numbers must not change, and how they are condensed to compare them.

Record ``golden.json`` with ``python -m tests.golden.cases``; do that only when a result is meant to change.
"""

import hashlib
import json
import math
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedcover as fc
from fedcover.cli import app
from fedcover.training.complements import COMPLEMENTS
from tests.conftest import POLICIES

GOLDEN = Path(__file__).with_name("golden.json")
SMALL = (
    "data.name=digits", "data.partition=dirichlet", "data.clients=12", "cohort=5", "seed=3", "model.name=mlp",
    "budgets.code=2x1,2x0.5,0.25", "local.epochs=2", "local.lr=0.05", "evaluate.local_every=1",
)  # fmt: skip
"""Settings of a run of a second."""
CONVOLUTIONS = ("model.name=cnn", "data.partition=iid", "data.clients=60", "local.epochs=1", "local.batch_size=8")
WITHOUT_BUDGETS = ("full", "FedPart")

RUNS: dict[str, tuple[str, ...]] = {
    **{f"serial {name}": ("engine=serial", f"policy.name={name}") for name in POLICIES if name not in WITHOUT_BUDGETS},
    "serial full": ("engine=serial", "policy.name=full", "budgets.code=5x1"),
    "serial FedPart": ("engine=serial", "policy.name=FedPart", "policy.warmup=1", "budgets.code=5x1"),
    "serial WP certified": ("engine=serial", "policy.name=WP", "certify=true"),
    "serial WP by labels": ("engine=serial", "policy.name=WP", "aggregation.weighting=labels"),
    "serial NP median": ("engine=serial", "policy.name=NP", "aggregation.name=median"),
    "serial HeteroFL cnn": ("engine=serial", "policy.name=HeteroFL", *CONVOLUTIONS),
    "serial WP cnn": ("engine=serial", "policy.name=WP", *CONVOLUTIONS),
    **{
        f"serial FedRolex {name}": ("engine=serial", "policy.name=FedRolex", f"complement.name={name}")
        for name in COMPLEMENTS
        if name != "zero"
    },
    **{
        f"{engine} {name}": (f"engine={engine}", f"policy.name={name}", "workers=2")
        for engine in ("processes", "vectorized")
        for name in ("WP", "HeteroFL", "FedDST")
    },
}
ROUNDS = 3

REPORTS: dict[str, tuple[str, ...]] = {
    "audit code": ("audit", "code", "1111223344", "--json"),
    "audit rounds": ("audit", "rounds", "--policy", "fedrolex", "--model", "lenet", "--budgets", "10x0.25", "--rounds",
                     "40", "--json"),
    "design": ("design", "--budgets", "1,3x0.75,6x0.5", "--json"),
    "design units": ("design", "--budgets", "1,3x0.75,6x0.5", "--model", "mlp", "--whole-units", "--window", "5",
                     "--json"),
    "paper audit": ("paper", "audit", "--json"),
}  # fmt: skip


def machine() -> str:
    """Return the kind of processor and version of torch: bits are compared only where these are equal."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    digest = hashlib.sha256((flags.group(1) if flags else "").encode()).hexdigest()[:12]
    kind = named.group(1) if named else platform.machine()
    return f"{kind}, {digest}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def numbers(value: Any) -> Iterator[float | None]:
    """Yield the numbers of a nested value in document order; words are left out, so that prose may change.

    Cells of the paper's tables are text, so the numbers in them count too.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("code", "printed", "correct") and isinstance(inner, str):
                yield from (float(cell.replace(",", "")) for cell in re.findall(r"\d[\d,]*\.?\d*", inner))
            elif key not in ("seconds", "wire", "robust_to", "withheld"):
                yield from numbers(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, bool | int | float):
        yield float(value)
    elif value is None:
        yield None


def condense(values: list[float | None]) -> dict[str, Any]:
    """Return what is compared: a digest of the bits, and sums that also agree on another processor."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return {
        "numbers": len(values),
        "sum": math.fsum(finite),
        "size": math.sqrt(math.fsum(value * value for value in finite)),
        "digest": hashlib.sha256(json.dumps(values).encode()).hexdigest(),
    }


def condense_theta(theta: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the same for a model."""
    total = hashlib.sha256()
    for name in sorted(theta):
        total.update(name.encode())
        total.update(theta[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    flat = torch.cat([theta[name].detach().double().flatten() for name in sorted(theta)])
    return {
        "numbers": flat.numel(), "sum": float(flat.sum()), "size": float(flat.norm()), "digest": total.hexdigest()
    }  # fmt: skip


def call(*arguments: str) -> str:
    """Return what a command prints, or raise."""
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(app, list(arguments), prog_name="fedcover")
    if result.exit_code != 0:
        raise RuntimeError(f"{arguments}: {result.stderr}") from result.exception
    return result.stdout


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a run folder holds, condensed."""
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    newest = max(folder.glob("checkpoints/*.safetensors"))
    theta = {n.removeprefix("theta/"): t for n, t in load_file(newest).items() if n.startswith("theta/")}
    return {
        "accuracy": records[-1]["accuracy"],
        "history": condense(list(numbers(records))),
        "theta": condense_theta(theta),
    }


def play(name: str) -> dict[str, Any]:
    """Return the outcome of one run of ``RUNS``."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(*_command([*SMALL, *RUNS[name], f"rounds={ROUNDS}"], Path(folder)))
        return outcome(Path(folder))


def play_resumed() -> dict[str, Any]:
    """Return the outcome of PT over four rounds, stopped after two and resumed."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = [*SMALL, "engine=serial", "policy.name=PT"]
        call(*_command([*settings, "rounds=2"], Path(folder)))
        call(*_command([*settings, "rounds=4"], Path(folder)), "--resume")
        return outcome(Path(folder))


def play_over_flower(name: str) -> dict[str, Any]:
    """Return the outcome of two rounds over Flower's messages, all nodes in this process."""
    from tests.contracts.federations import federation
    from tests.unit.deploy.loop import grid_of
    from tests.unit.deploy.playing import play as play_on
    from tests.unit.deploy.playing import remote

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        playing = federation(fc.Serial(shrink=True), POLICIES[name]())
        history = play_on(grid_of(playing), remote(playing, POLICIES[name]()))
    assert history.theta is not None
    return {
        "accuracy": history.last.accuracy,
        "history": condense(list(numbers([json.loads(record.to_json()) for record in history]))),
        "theta": condense_theta(history.theta),
    }


def report(name: str) -> dict[str, Any]:
    """Return the numbers of a command that prints JSON, condensed."""
    return {"json": condense(list(numbers(json.loads(call(*REPORTS[name])))))}


def every_case() -> dict[str, Any]:
    """Map the name of each case to the function that computes it."""
    return {
        **{name: lambda name=name: play(name) for name in RUNS},
        "resumed PT": play_resumed,
        **{f"flower {name}": lambda name=name: play_over_flower(name) for name in ("WP", "HeteroFL", "FedDST")},
        **{name: lambda name=name: report(name) for name in REPORTS},
    }


def _command(settings: list[str], folder: Path) -> list[str]:
    return [
        "run",
        *(part for one in settings for part in ("--set", one)),
        "--out",
        str(folder),
        "--quiet",
        "--no-report",
    ]


def record_new() -> None:
    """Add the cases that are not recorded yet, each with the machine that it is recorded on."""
    recorded = json.loads(GOLDEN.read_text())
    new = {name: compute() for name, compute in every_case().items() if name not in recorded["cases"]}
    own = {} if recorded["machine"] == machine() else {"machine": machine()}
    recorded["cases"] |= {name: {**own, **case} for name, case in new.items()}
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record_new()
