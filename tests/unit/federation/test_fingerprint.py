"""A resumed run is the same run: what decides its bits is compared, and the error says what differs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import POLICIES, small_data, small_net
from torch import Tensor, nn

import fedcover as fc
from fedcover.config.python_file import load_factory
from fedcover.federation.checkpoint import State
from fedcover.federation.description import describe
from fedcover.federation.fingerprint import describe_method
from fedcover.federation.planned_round import RoundHook

pytestmark = pytest.mark.filterwarnings("ignore::fedcover.errors.CoverageWarning")
Changes = dict[str, Any]


@dataclass(frozen=True)
class Sparse(fc.Policy):
    threshold: float = 0.1

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        mask = {name: t.abs() > self.threshold for name, t in theta.items() if t.ndim > 1}
        return [fc.ClientPlan(client, mask) for client in cohort], state


class Plain(fc.Policy):
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
        return [fc.ClientPlan(client) for client in cohort], state


def closed_over(threshold: float) -> fc.Policy:
    @fc.policy
    def masks(theta, client, this_round):  # type: ignore[no-untyped-def]
        return {name: t.abs() > threshold for name, t in theta.items() if t.ndim > 1}

    return masks


class Scaled(nn.Module):
    """A loss with a plain attribute and a buffer."""

    def __init__(self, scale: float, weight: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weight", torch.tensor([1.0, weight, 1.0]))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(scores, labels, weight=self.weight)


class Halving(fc.Engine):
    """A user's own engine, which claims to be exact."""

    name = "halving"

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._inner = fc.Serial(shrink=False)

    def train(self, jobs: Sequence[Any]) -> Iterator[fc.ClientUpdate]:
        yield from self._inner.train(jobs)


class Doubling(RoundHook):
    """A hook that changes the state before each round."""

    def begun(self, state: State) -> State:
        return replace(state, theta={name: 2 * tensor for name, tensor in state.theta.items()})


def loaded(file: Path) -> Any:
    """Return the policy of a user's file."""
    return load_factory(f"{file}:mine", "policy", fc.Policy, "@fedcover.policy")()


def federation(
    loss: Callable[..., Tensor] = F.cross_entropy,
    policy: fc.Policy | None = None,
    activation: nn.Module | None = None,
    dropout: float = 0.2,
    engine: fc.Engine | None = None,
    frozen: bool = False,
    hook: RoundHook | None = None,
) -> fc.Federation:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), activation or nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    net[0].bias.requires_grad_(not frozen)
    clients = fc.data.iid(small_data(), 4, seed=1)
    return fc.Federation(
        fc.Task(net, loss), clients, policy or fc.full(), fc.by_slot("2x1"), cohort=2, local=fc.LocalSGD(1),
        engine=engine or fc.Serial(shrink=False),
        hook=hook or RoundHook(),
    )  # fmt: skip


def weighted(*weights: float) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor(weights, dtype=torch.float32))


CASES: dict[str, tuple[Changes, Changes, str]] = {
    "a field of a policy": ({"policy": Sparse(0.1)}, {"policy": Sparse(0.2)}, "=0.1) and is Sparse(threshold=0.2)"),
    "an attribute": ({"policy": Plain(1.0)}, {"policy": Plain(2.0)}, "the policy's threshold was 1.0 and is 2.0"),
    "a closure": ({"policy": closed_over(0.1)}, {"policy": closed_over(0.2)}, "threshold was 0.1 and is 0.2"),
    "another loss": ({}, {"loss": F.multi_margin_loss}, "the loss was torch.nn.functional.cross_entropy and is"),
    "weights of a loss": ({"loss": weighted(1, 1, 1)}, {"loss": weighted(1, 9, 1)}, "the loss's weight was"),
    "an option of a loss": (
        {"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        "the loss's label_smoothing was 0.0 and is 0.1",
    ),
    "a loss of one's own": ({"loss": Scaled(1.0)}, {"loss": Scaled(2.0)}, "the loss's scale was 1.0 and is 2.0"),
    "a buffer of a loss": ({"loss": Scaled(1.0)}, {"loss": Scaled(1.0, 5.0)}, "the loss's weight was"),
    "a partial": (
        {"loss": partial(F.cross_entropy, label_smoothing=0.1)},
        {"loss": partial(F.cross_entropy, label_smoothing=0.3)},
        "label_smoothing was 0.1 and is 0.3",
    ),
    "a lambda": (
        {"loss": lambda scores, labels: F.cross_entropy(scores, labels)},
        {"loss": lambda scores, labels: 2 * F.cross_entropy(scores, labels)},
        "the loss's code was",
    ),
    "another activation": ({}, {"activation": nn.GELU()}, "layer '1' of the model was ReLU(inplace=False) and is GELU"),
    "other dropout": ({}, {"dropout": 0.5}, "layer '2' of the model was Dropout(p=0.2, inplace=False) and is"),
    "a frozen tensor": ({}, {"frozen": True}, "layer '0' of the model was"),
    "an engine of one's own": ({}, {"engine": Halving(1.0)}, "the engine was serial and is Halving"),
    "its attributes": ({"engine": Halving(1.0)}, {"engine": Halving(0.5)}, "the engine's factor was 1.0 and is 0.5"),
    "shrunk models": ({}, {"engine": fc.Serial(shrink=True)}, "the engine's shrink was False and is True"),
    "untraced steps": ({}, {"engine": fc.Serial(traced=False)}, "the engine's traced was True and is False"),
    "a hook": ({}, {"hook": Doubling()}, "the hook was RoundHook and is Doubling"),
    "another arithmetic": ({}, {"engine": fc.Vectorized("cpu")}, "the engine was serial and is vectorized"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_another_method_is_refused_and_named(case: str, tmp_path: Path) -> None:
    before, after, phrase = CASES[case]
    federation(**before).run(1, out=tmp_path / "run")
    with pytest.raises(fc.InputError, match=re.escape(phrase)):
        federation(**after).run(2, out=tmp_path / "run", resume=True)
    assert len(federation(**before).run(2, out=tmp_path / "run", resume=True)) == 2


def test_how_random_weights_are_drawn_is_part_of_a_method(tmp_path: Path) -> None:
    """Runs that began with other draws cannot be resumed."""
    federation(policy=fc.random_weights()).run(1, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "method.json").read_text())["policy"]["draws"] == "'hash'"


def test_a_built_in_engine_may_change_if_its_bits_do_not(tmp_path: Path) -> None:
    federation().run(1, out=tmp_path / "run")
    assert len(federation(engine=fc.Processes(2, shrink=False)).run(2, out=tmp_path / "run", resume=True)) == 2


def own_tests(scale: float, last: int) -> fc.Federation:
    data, parts = small_data(), [range(15 * client, 15 * client + 15) for client in range(8)]
    tests = fc.Examples(scale * data.inputs, data.labels, data.classes), [*parts[:-1], range(105, last)]
    return fc.Federation(fc.Task(small_net()), fc.data.from_parts(data, parts, tests=tests), cohort=4)


@pytest.mark.parametrize("other", [(2.0, 120), (1.0, 119)])
def test_other_own_test_sets_are_refused(other: tuple[float, int], tmp_path: Path) -> None:
    own_tests(1.0, 120).run(1, small_data(), tmp_path)
    with pytest.raises(fc.InputError, match="the data or the initial model differ"):
        own_tests(*other).run(2, small_data(), tmp_path, resume=True)
    assert len(own_tests(1.0, 120).run(2, small_data(), tmp_path, resume=True)) == 2


def test_another_metric_is_refused(tmp_path: Path) -> None:
    def measured(value: float, name: str = "m") -> fc.Federation:
        task = fc.Task(small_net(), metrics={name: lambda scores, labels: value})
        return fc.Federation(task, fc.data.iid(small_data(), clients=8), cohort=4)

    measured(1.0).run(1, small_data(), tmp_path)
    for other in (measured(2.0), measured(1.0, "n")):
        with pytest.raises(fc.InputError, match="was started with other settings: the metric m"):
            other.run(2, small_data(), tmp_path, resume=True)
    stored = json.loads((tmp_path / "method.json").read_text())
    del stored["metrics"]  # as older versions wrote it
    (tmp_path / "method.json").write_text(json.dumps(stored))
    assert len(measured(2.0).run(2, small_data(), tmp_path, resume=True)) == 2


def test_a_federation_that_has_run_resumes_itself(tmp_path: Path) -> None:
    playing = federation(policy=fc.heterofl())
    playing.run(1, out=tmp_path / "run")
    assert len(playing.run(2, out=tmp_path / "run", resume=True)) == 2


def test_folders_of_older_versions_are_resumed(tmp_path: Path) -> None:
    federation().run(1, out=tmp_path / "run")
    method = tmp_path / "run" / "method.json"
    # A version without this setting would have written the same.
    assert "keep_moments" not in json.loads(method.read_text())["recipe"]
    method.unlink()
    assert len(federation().run(2, out=tmp_path / "run", resume=True)) == 2
    assert method.exists()


FILE = """
import torch
import fedcover as fc

SHARE = {share}

def scores(tensor):
    return tensor.abs() * {factor}

@fc.policy
def mine(theta, client, this_round):
    return {{name: scores(t) > SHARE for name, t in theta.items() if t.ndim > 1}}
"""


@pytest.mark.parametrize(
    ("share", "factor", "phrase"), [(0.2, 1, "SHARE was 0.1 and is 0.2"), (0.1, 2, "scores.code was")]
)
def test_an_edited_file_is_noticed(share: float, factor: int, phrase: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(FILE.format(share=0.1, factor=1))
    federation(policy=loaded(file)).run(1, out=tmp_path / "run")
    file.write_text("# a comment\n" + FILE.format(share=0.1, factor=1))
    federation(policy=loaded(file)).run(2, out=tmp_path / "run", resume=True)
    file.write_text(FILE.format(share=share, factor=factor))
    with pytest.raises(fc.InputError, match=re.escape(phrase)):
        federation(policy=loaded(file)).run(3, out=tmp_path / "run", resume=True)


@dataclass(frozen=True)
class Recipe:
    transforms: tuple[Any, ...]
    names: frozenset[str] = frozenset({"a", "b", "c"})
    spread: range = range(3)
    nested: dict[str, Any] = field(default_factory=dict)


def shifted(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + by


def test_recipes_of_transforms_are_compared() -> None:
    same = describe(Recipe((shifted(1.0), partial(torch.mul, other=2)), nested={"x": [Sparse(0.5)]}))
    assert same == describe(Recipe((shifted(1.0), partial(torch.mul, other=2)), nested={"x": [Sparse(0.5)]}))
    for other in (
        Recipe((shifted(2.0), partial(torch.mul, other=2)), nested={"x": [Sparse(0.5)]}),
        Recipe((shifted(1.0), partial(torch.mul, other=3)), nested={"x": [Sparse(0.5)]}),
        Recipe((shifted(1.0), partial(torch.mul, other=2)), nested={"x": [Sparse(0.6)]}),
        Recipe((shifted(1.0), partial(torch.mul, other=2)), spread=range(4), nested={"x": [Sparse(0.5)]}),
    ):
        assert describe(other) != same


class Selfish:
    """An object that contains itself, one without attributes, and one that can only be named."""

    def __init__(self) -> None:
        self.me, self.plain, self.generator = self, object(), torch.Generator()


def test_descriptions_have_no_addresses() -> None:
    texts = [describe(Selfish()), describe([print, len, nn.Linear, Selfish().__init__, re.compile("x")])]
    texts += [dict(federation(**changes).method) for changes, _, _ in CASES.values()]
    assert not re.search(r"0x[0-9a-f]{6}|object at", json.dumps(texts))


def test_descriptions_are_equal_in_every_process() -> None:
    """In two processes whose hashes of strings differ."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    script = "from tests.unit.federation.test_fingerprint import *\nprint(json.dumps([*all_methods()]))"
    other = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    assert json.loads(other.stdout) == json.loads(json.dumps([*all_methods()]))


def all_methods() -> Iterator[Any]:
    task, example = federation().task, small_data().inputs
    for policy in POLICIES.values():
        yield describe_method(task, policy().bind(fc.trace(task.model, example)), fc.LocalSGD(), fc.mean())
    yield describe(Recipe((shifted(1.0), lambda x: x in {"a", "b", "c"})))
