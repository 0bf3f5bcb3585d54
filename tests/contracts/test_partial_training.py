"""Partial training: steps on the part that a client trains agree with the definition, and compute nothing else."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fedcover as fc
from fedcover.data.inputs import map_inputs
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.engines.processes.pool import Processes
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.models import MLP, LeNet, Transformer
from fedcover.params import Mask, Params, params_of
from fedcover.policies import POLICIES
from fedcover.seeding import ambient
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.client import ClientSteps, Job, train_client
from fedcover.training.options import TrainingOptions
from fedcover.training.steps import partial as partial_steps
from fedcover.training.steps.defined import DefinedSteps
from fedcover.training.steps.part_gradients import PartLinear
from fedcover.training.steps.partial import PartialModel, start_values, trained_parts, try_partial_steps
from fedcover.training.steps.partial_choice import pays
from fedcover.training.steps.stepper import Stepper
from tests.conftest import small_net
from tests.contracts.federations import TOLERANCE, Residual, furthest, serial
from tests.contracts.test_complements import RECIPES
from tests.contracts.test_zoo_engines import LOSSES, data
from tests.laws.strategies import same
from tests.networks import narrow_resnet18
from tests.zoo import ZOO, network

EXAMPLES = 9
"""The last of three batches is a short one."""
SEEN = TrainingOptions(complement=True)
SGD = fc.LocalSGD(1, 4, 0.05, 0.5)
CLOSE = 1e-10
"""The largest accepted difference from the definition in double precision, relative to a tensor's largest value."""


def text_model() -> nn.Module:
    return Transformer((7,), 5, width=8, head=4, layers=2)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((1, 6, 6), 3, hidden=20), (1, 6, 6)),
    "dropout": (small_net, (6,)),
    "lenet": (lambda: LeNet((1, 16, 16), 3), (1, 16, 16)),
    "residual": (Residual, (1, 6, 6)),
    "resnet18_gn": (lambda: narrow_resnet18("group"), (3, 16, 16)),
    "resnet18": (lambda: narrow_resnet18("batch"), (3, 16, 16)),
    "transformer": (text_model, (7,)),
}
LARGE = ("resnet18_gn", "resnet18")


def kinds_for(name: str) -> tuple[str, ...]:
    """Return the kinds of masks for a network; in a large one, the units of one policy stand for those of others."""
    return (*(["HeteroFL"] if name in LARGE else ["NP", "random_submodels"]), "FedRolex", "WP", "entries", "window")


@cache
def made(name: str) -> tuple[fc.Task, fc.Population]:
    """Return a task in double precision, and the data of one client."""
    make, shape = NETWORKS[name]
    with ambient(1, "partial"):
        model = make().double()
    rng = torch.Generator().manual_seed(0)
    if len(shape) == 1 and name != "dropout":
        x = torch.randint(5, (EXAMPLES, *shape), generator=rng)
        y = torch.randint(5, (EXAMPLES, *shape), generator=rng)
    else:
        x = torch.randn(EXAMPLES, *shape, generator=rng, dtype=torch.float64)
        y = x.flatten(1)[:, :3].argmax(1)
    clients = fc.data.from_parts((x, y), [torch.arange(EXAMPLES)])
    return fc.Task(model).fitted(clients.examples), clients


def window(theta: Params) -> Mask:
    """Return a mask of the last tensors, about a quarter of the entries."""
    names, total = list(theta), sum(t.numel() for t in theta.values())
    last = max(1, sum(sum(theta[n].numel() for n in names[at:]) <= total / 4 for at in range(len(names))))
    return {name: torch.zeros_like(theta[name], dtype=torch.bool) for name in names[:-last]}


def entries(theta: Params) -> Mask:
    """Return a mask of single entries, with empty rows."""
    rng = torch.Generator().manual_seed(3)
    return {name: _entries(tensor, rng) for name, tensor in theta.items()}


def mask_of(kind: str, structure: ModelStructure, keep: float = 0.5) -> Mask:
    """Return a mask of some kind: a window of the last layers, entries with empty rows, or that of a policy."""
    theta = params_of(structure.model)
    if kind in ("window", "entries"):
        return window(theta) if kind == "window" else entries(theta)
    policy = POLICIES[kind]().bind(structure)
    (plan,), _ = policy.plan(theta, [fc.Client(0, 0, fc.Budget(keep))], fc.Round(2, 0), policy.start())
    return plan.mask


def _entries(tensor: Tensor, rng: torch.Generator) -> Tensor:
    kept = torch.rand(tensor.shape, generator=rng) < 0.4
    kept[: len(kept) // 3] = False
    kept.view(-1)[-1] = True
    return kept


def job_of(task: fc.Task, clients: fc.Population, mask: Mask, recipe: fc.LocalSGD | fc.LocalAdam = SGD) -> Job:
    client = fc.Client(0, 0, fc.Budget(0.5))
    return Job(task, clients, client, params_of(task.model), mask, recipe, fc.Round(1, 0), SEEN)


def partial_of(job: Job) -> ClientSteps | None:
    model, stream = with_keyed_dropout(job.task.model, job.population.examples.example())
    return try_partial_steps(PartialModel(model, stream, job.task.loss), job)


def check_agreement(job: Job) -> None:
    """Raise AssertionError unless partial steps are taken and agree with the definition."""
    model, stream = with_keyed_dropout(job.task.model, job.population.examples.example())
    expected = train_client(DefinedSteps(Stepper(model, stream, job.task.loss, trace=False), job), job)
    steps = partial_of(job)
    assert steps is not None
    actual = train_client(steps, job)
    assert actual.train_loss == pytest.approx(expected.train_loss, rel=1e-9)
    moved = 0.0
    for name, tensor in expected.theta.items():
        kept = job.mask.get(name, torch.ones_like(tensor, dtype=torch.bool))
        assert float((actual.theta[name] - tensor).abs().max()) <= CLOSE * (1 + float(tensor.abs().max())), name
        assert not bool(actual.theta[name][~kept].any())
        moved += float((tensor - job.theta[name])[kept].abs().sum())
    assert moved > 0
    assert (actual.moments is None) == (expected.moments is None)
    for moment, tensors in (expected.moments or {}).items():
        assert actual.moments is not None
        assert set(actual.moments[moment]) == set(tensors)
        for name, tensor in tensors.items():
            kept, moment_now = job.mask.get(name, torch.tensor(True)), actual.moments[moment][name]
            assert moment_now.dtype == tensor.dtype
            assert float(torch.where(kept, moment_now - tensor, 0.0).abs().max()) <= CLOSE * (1 + tensor.abs().max())


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NETWORKS for kind in kinds_for(name)])
def test_partial_steps_agree_with_the_definition(name: str, kind: str) -> None:
    task, clients = made(name)
    check_agreement(job_of(task, clients, mask_of(kind, task.structure(clients.examples.example()))))


@pytest.mark.parametrize("kind", ["NP", "WP"])
@pytest.mark.parametrize("recipe", [*RECIPES, "kept moments of Adam", "clip and decay"])
def test_recipes_agree_with_the_definition(recipe: str, kind: str) -> None:
    more = {
        "kept moments of Adam": fc.LocalAdam(2, 4, keep_moments=True),
        "clip and decay": fc.LocalSGD(2, 4, 0.1, weight_decay=0.1, clip=0.2, proximal=0.3),
    }
    task, clients = made("dropout")
    job = job_of(task, clients, mask_of(kind, task.structure(clients.examples.example())), {**RECIPES, **more}[recipe])
    inside = {n: torch.where(job.mask[n], 1.0, 0.0) if n in job.mask else torch.ones(()) for n in job.theta}
    options = TrainingOptions(complement=True, thresholds={"0.weight": 0.1})
    if recipe == "SCAFFOLD":
        options = replace(options, shifts={n: torch.randn_like(t) * inside[n] for n, t in job.theta.items()})
    if job.recipe.keep_moments:
        started = {n: torch.rand_like(t) * inside[n] for n, t in job.theta.items()}
        options = replace(options, moments=dict.fromkeys(job.recipe.moment_names, started))
    check_agreement(replace(job, options=options))


@pytest.mark.filterwarnings("ignore:the multiply-adds")
@pytest.mark.parametrize("kind", ["entries", "window", "NP"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_agrees_with_the_definition(name: str, kind: str) -> None:
    model, example = network(name)
    inputs, labels = data(name)
    inputs = map_inputs(lambda part: part.double() if part.is_floating_point() else part, inputs)
    labels = labels.double() if labels.is_floating_point() else labels
    clients = fc.data.from_parts((inputs, labels), [torch.arange(8)])
    mask = mask_of(kind, trace(model, example))
    task = fc.Task(copy.deepcopy(model).double(), LOSSES.get(name, F.cross_entropy)).fitted(clients.examples)
    check_agreement(job_of(task, clients, mask))


class Watch(TorchDispatchMode):
    """Records the shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = func.is_view or func._schema.name.endswith("_")  # these create no tensor
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not views:
                self.shapes.add(tuple(tensor.shape))
        return out


def watched(job: Job, narrow: bool) -> set[tuple[int, ...]]:
    """Return the shapes of all tensors that the computation of gradients creates."""
    model, stream = with_keyed_dropout(job.task.model, job.population.examples.example())
    partial = PartialModel(model, stream, job.task.loss)
    parts = trained_parts(partial.trained, job.mask, job.theta)
    compact, whole = start_values(job.theta, parts)
    with Watch() as watch:
        grads, _ = partial.gradients(compact, whole, parts, job.population.examples.read(slice(4)), narrow)
    assert {n: g.shape for n, g in grads.items()} == {n: parts[n].cut(job.theta[n]).shape for n in parts}
    return watch.shapes


@pytest.mark.parametrize("name", ["lenet", "resnet18_gn", "transformer"])
def test_no_gradient_of_a_whole_weight_is_computed(name: str) -> None:
    task, clients = made(name)
    job = job_of(task, clients, mask_of("FedRolex", task.structure(clients.examples.example()), 0.3))
    cut = {tuple(job.theta[n].shape) for n, kept in job.mask.items() if kept.ndim > 1 and not kept.all()}
    activations = watched(replace(job, mask=window(job.theta)), narrow=True)
    assert not (watched(job, narrow=True) & cut) - activations
    assert (watched(job, narrow=False) & cut) - activations == cut - activations != set()


def test_nothing_is_saved_below_the_lowest_trained_layer() -> None:
    job = job_of(*made("resnet18_gn"), {})
    last = list(job.theta).index("blocks.7.conv2.weight")
    mask = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in list(job.theta.items())[:last]}
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        watched(replace(job, mask=mask), narrow=True)
    images = [tensor for tensor in saved if tensor.ndim == 4 and tensor.shape[0] == 4]
    assert len(images) == 3  # the inputs of the last convolution and of its norm, and the output of the last ReLU
    assert {tuple(tensor.shape[1:]) for tensor in images} == {(128, 2, 2)}


class Cached(nn.Module):
    """A model that keeps a reference to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)
        self.cache = {"weight": self.a.weight}

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.b(torch.tanh(F.linear(x, self.cache["weight"], self.a.bias)))
        return scores


class Counting(nn.Module):
    """A model whose passes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.a(x) * self.calls
        return scores


class Checkpointed(nn.Module):
    """A model that computes activations again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.tanh(self.b(torch.tanh(self.a(x)))), x, use_reentrant=False)
        scores: Tensor = self.c(x)
        return scores


def own_job(model: nn.Module) -> Job:
    job = job_of(fc.Task(model.double()), made("dropout")[1], {})
    return replace(job, mask=entries(job.theta))


@pytest.mark.parametrize("make", [Cached, Counting, Checkpointed])
def test_models_are_refused(make: Callable[[], nn.Module]) -> None:
    assert partial_of(own_job(make())) is None


@fc.gradient_transform
def double(gradients: Params, at: Any) -> Params:
    """Double the gradients."""
    return {name: 2 * grad for name, grad in gradients.items()}


def test_jobs_are_refused() -> None:
    job = own_job(small_net())
    assert partial_of(job) is not None
    assert partial_of(replace(job, options=None)) is None
    assert partial_of(replace(job, options=replace(SEEN, report=True))) is None
    assert partial_of(replace(job, recipe=replace(SGD, transforms=(double,)))) is None
    nothing = {name: torch.zeros_like(kept) for name, kept in job.mask.items()}
    assert partial_of(replace(job, mask=nothing)) is None


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PartLinear.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        x, compact, *rest = real(ctx, grad)
        return x, 1.01 * compact, *rest

    monkeypatch.setattr(PartLinear, "backward", staticmethod(wrong))
    assert partial_of(own_job(small_net())) is None


class Deep(nn.Module):
    """A residual network of more tensors than are traced."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(13))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = x + 0.5 * F.relu(layer(x))
        scores: Tensor = self.out(x.mean((2, 3)))
        return scores


@cache
def deep_parts() -> tuple[fc.Task, fc.Population]:
    x = torch.randn(30, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with ambient(1, "deep"):
        model = Deep()
    return fc.Task(model), fc.data.from_parts((x, x.flatten(1)[:, :3].argmax(1)), torch.arange(30).split(6))


def deep(engine: fc.Engine, policy: str, complement: fc.Complement) -> fc.Federation:
    task, clients = deep_parts()
    return fc.Federation(
        task, clients, POLICIES[policy](), fc.by_slot("1,0.75,0.5"), fc.LocalSGD(2, 4, 0.05, 0.5), cohort=3, seed=2,
        engine=engine, complement=complement,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:complement Kept:fedcover.errors.CoverageWarning")  # masks of NP and WP do not move
@pytest.mark.parametrize("complement", [fc.Frozen(), fc.Quantized(4), fc.Kept()], ids=repr)
@pytest.mark.parametrize("policy", ["FedRolex", "NP", "WP"])
def test_engines_agree_where_partial_steps_are_taken(
    policy: str, complement: fc.Complement, processes: dict[bool, Processes]
) -> None:
    expected, bits, close = (
        deep(engine, policy, complement).run(2) for engine in (serial(True), processes[True], Vectorized("cpu"))
    )
    assert expected.theta is not None
    assert bits.theta is not None
    assert same(bits.theta, expected.theta)
    assert furthest(expected, close) < TOLERANCE


def test_partial_steps_are_taken_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    real = partial_steps.PartialSteps.finish

    def finish(self: partial_steps.PartialSteps) -> Any:
        taken.append(self)
        return real(self)

    monkeypatch.setattr(partial_steps.PartialSteps, "finish", finish)
    task, clients = deep_parts()
    job = job_of(task, clients, mask_of("FedRolex", task.structure(clients.examples.example())))
    ClientTrainer(shrink=True).train(job)
    assert len(taken) == 1
    ClientTrainer(shrink=True).train(replace(job, options=None))
    ClientTrainer(shrink=True).train(own_job(small_net()))
    assert len(taken) == 1


def test_where_partial_steps_pay() -> None:
    some, none = {"w": torch.tensor([True, False])}, {"w": torch.tensor([False, False])}
    assert pays(Deep(), some)
    assert not pays(Deep(4), some)
    assert pays(Deep(4), none)  # the backward pass is shorter
    assert not pays(nn.Linear(2000, 2000), none)  # the C library takes it
    assert pays(nn.Conv2d(256, 256, 3), some)
