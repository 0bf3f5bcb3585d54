"""Evaluation: shrunk sub-models and threads give what whole models on one thread give."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.contracts.federations import DEVICES
from torch import Tensor, nn

import fedcover as fc
from fedcover._threads import one_thread
from fedcover.federation.evaluate import evaluate
from fedcover.federation.evaluator import Evaluator, LocalTest
from fedcover.masks.content import content_keys
from fedcover.models import CNN, MLP
from fedcover.params import FixedMask, Mask, Params, on_device, params_of, prune
from fedcover.structure import layouts
from fedcover.structure.batch_norm import spread_over, static_form

Masks = list[Mask]


def norm_inputs(data: fc.Examples) -> Tensor:
    inputs = data.read(spread_over(len(data)))[0]
    assert isinstance(inputs, Tensor)
    return inputs


def images(count: int = 60) -> fc.Examples:
    inputs = torch.randn(count, 1, 8, 8)
    return fc.Examples(inputs, inputs.flatten(1)[:, :4].argmax(1), classes=4)


def setting(model: nn.Module, count: int = 60) -> tuple[fc.Task, fc.ModelStructure, Params, fc.Examples]:
    data = images(count)
    model = static_form(fc.trace(model, data.inputs), model)
    return fc.Task(model), fc.trace(model, data.inputs), params_of(model), data


def masks_of(structure: fc.ModelStructure, theta: Params, *keeps: float) -> Masks:
    policy = fc.heterofl().bind(structure)
    clients = [fc.Client(slot, slot, fc.Budget(keep)) for slot, keep in enumerate(keeps)]
    return [plan.mask for plan in policy.plan(theta, clients, fc.Round(1, 0), policy.start())[0]]


def local(masks: Masks) -> list[LocalTest]:
    mix = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    return [LocalTest(mask, mix.roll(number), 10 + number) for number, mask in enumerate(masks)]


class Remembering(nn.Module):
    """A network that keeps a value of its forward pass as an attribute, so that threads must not share it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 300), nn.Linear(300, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.relu(self.first(x.flatten(1)))
        torch.randn(200, 200) @ torch.randn(200, 200)  # time for another thread
        scores: Tensor = self.last(self.hidden)
        return scores


NETWORKS: list[Callable[[], nn.Module]] = [lambda: MLP((1, 8, 8), 4, hidden=20), lambda: CNN((1, 8, 8), 4), Remembering]


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("workers", [1, 3])
def test_the_global_model_has_the_bits_of_the_definition(
    make: Callable[[], nn.Module], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcover.federation.evaluate.BATCH", 16)
    task, structure, theta, data = setting(make())
    evaluator = Evaluator(task, structure, data)
    evaluator.workers = workers
    with one_thread():  # as runs are evaluated: sums of several threads differ
        expected = evaluate(task.model, task.loss, theta, data, norm_inputs(data))
        score, _ = evaluator.evaluate(theta, data, clients=local(masks_of(structure, theta, 1.0, 0.5)))
    assert (score.loss, score.accuracy) == (expected.loss, expected.accuracy)
    assert torch.equal(score.by_class, expected.by_class)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("shrink", [True, False])
def test_local_accuracy_is_that_of_whole_masked_models(make: Callable[[], nn.Module], shrink: bool) -> None:
    task, structure, theta, data = setting(make())
    clients = local(masks_of(structure, theta, 1.0, 0.5, 0.25, 0.5))
    expected = 0.0
    for client in clients:
        score = evaluate(task.model, task.loss, prune(theta, client.mask), data, norm_inputs(data))
        expected += client.examples * float((client.mix * score.by_class).sum())
    expected /= sum(client.examples for client in clients)
    accuracies = []
    for workers in (1, 2):
        evaluator = Evaluator(task, structure, data, shrink)
        evaluator.workers = workers
        accuracies.append(evaluator.evaluate(theta, data, clients=clients)[1])
    assert accuracies[0] == accuracies[1] == pytest.approx(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree(device: str) -> None:
    task, structure, theta, data = setting(CNN((1, 8, 8), 4))
    masks = masks_of(structure, theta, 1.0, 0.5, 0.25)
    there = [on_device(mask, torch.device(device)) for mask in masks]
    evaluator = Evaluator(task, structure, data)
    score, accuracy = evaluator.evaluate(theta, data, clients=local(masks))
    other, other_accuracy = evaluator.evaluate(on_device(theta, torch.device(device)), data, clients=local(there))
    assert other.loss == pytest.approx(score.loss, rel=1e-4)
    assert other_accuracy == pytest.approx(accuracy, abs=0.05)


def test_sub_models_are_shrunk_and_equal_masks_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task, structure, theta, data = setting(MLP((1, 8, 8), 4, hidden=20))
    half, quarter = masks_of(structure, theta, 0.5, 0.25)
    copied = {name: kept.clone() for name, kept in half.items()}
    whole = {"fc1.weight": torch.ones(20, 64, dtype=torch.bool)}
    widths = []
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: widths.append(self.out_features) or linear(self, x))
    Evaluator(task, structure, data).evaluate(theta, data, clients=local([half, whole, copied, quarter, half]))
    assert widths == [20, 4, 10, 4, 5, 4]  # the global model, which the client with the whole model has too; two more


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def test_the_global_model_may_be_pruned() -> None:
    task, structure, theta, data = setting(MLP((1, 8, 8), 4, hidden=20))
    (shown,) = masks_of(structure, theta, 0.5)
    score, accuracy = Evaluator(task, structure, data).evaluate(theta, data, shown, local([shown]))
    expected = evaluate(task.model, task.loss, prune(theta, shown), data)
    assert score.loss == expected.loss
    assert accuracy == pytest.approx(float((local([shown])[0].mix * expected.by_class).sum()))


def test_large_models_are_evaluated_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """But their loss is still that of a whole batch, for losses that are not means of single examples' losses."""
    monkeypatch.setattr("fedcover.federation.evaluator.LARGEST_VALUE", 1)
    monkeypatch.setattr("fedcover.federation.evaluator.SMALLEST_CHUNK", 7)
    task, structure, theta, data = setting(MLP((1, 8, 8), 4, hidden=20))
    task = fc.Task(task.model, lambda scores, labels: F.cross_entropy(scores - scores.mean(0), labels))
    score = Evaluator(task, structure, data).score(theta, data)
    assert score.loss == pytest.approx(evaluate(task.model, task.loss, theta, data).loss, abs=1e-6)


def test_progress_goes_to_the_end_and_only_forward() -> None:
    task, structure, theta, data = setting(CNN((1, 8, 8), 4))
    evaluator = Evaluator(task, structure, data)
    evaluator.workers = 2
    calls: list[tuple[int, int]] = []
    evaluator.on_progress = lambda done, total: calls.append((done, total))
    evaluator.evaluate(theta, data, clients=local(masks_of(structure, theta, 0.5, 0.25)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {3 * 2 * 60}
    assert calls[-1][0] == 360


def test_a_run_evaluates_with_the_workers_of_its_engine_and_reports_progress() -> None:
    federation = fc.Federation(
        fc.Task(MLP((1, 8, 8), 4, hidden=20)), fc.data.iid(images(), 4), fc.heterofl(), fc.by_slot("1,2x0.5"),
        fc.LocalSGD(1), cohort=3, engine=fc.Processes(2, shrink=False),
    )  # fmt: skip
    calls: list[tuple[int, int]] = []
    federation.evaluator.on_progress = lambda done, total: calls.append((done, total))
    federation.run(2, evaluate_on=images(30))
    assert federation.evaluator.workers == 2
    assert (30, 30) in calls  # the first round: only the global model
    assert calls[-1] == (60, 60)  # the last round: the sub-models too


def test_different_masks_have_different_keys() -> None:
    theta = {"a": torch.zeros(40, 30), "b": torch.zeros(40)}
    masks = [{name: torch.rand(t.shape) < 0.5 for name, t in theta.items()} for _ in range(50)]
    masks += [{"a": mask["a"]} for mask in masks] + [{"b": mask["b"]} for mask in masks]
    keys = content_keys([*masks, *({n: k.clone() for n, k in mask.items()} for mask in masks)], theta)
    assert len(set(keys)) == len(masks)
    assert keys[: len(masks)] == keys[len(masks) :]


class Limited(nn.Module):
    """A network for which a GPU has memory for a few examples at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most, self.passes = nn.Linear(64, 4), most, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        scores: Tensor = self.layer(x.flatten(1))
        return scores


def test_passes_that_do_not_fit_into_memory_are_divided() -> None:
    data, model = images(), Limited(10_000)
    theta = params_of(model)
    evaluator = Evaluator(fc.Task(model), fc.trace(model, data.inputs), data)
    mask = {"layer.weight": torch.rand(4, 64) > 0.5}
    expected = evaluator.evaluate(theta, data, clients=local([mask]))
    scratch = next(iter(evaluator._scratches.values()))
    assert isinstance(scratch, Limited)
    scratch.most = 17
    scratch.passes.clear()
    score, accuracy = evaluator.evaluate(theta, data, clients=local([mask]))
    assert scratch.passes[:4] == [60, 30, 15, 15]  # the second model is not tried with more than fits
    assert scratch.passes[4:] == [15] * 6
    assert score.loss == pytest.approx(expected[0].loss, rel=1e-6)
    assert (score.accuracy, accuracy) == (expected[0].accuracy, expected[1])
    scratch.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluator.evaluate(theta, data)


class Convolved(nn.Module):
    """A network with views, which notes whether the channels of its inputs are last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(2, 6, 3), nn.Linear(6 * 36, 4)
        self.kind, self.last = kind, list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(not x.is_contiguous())
        if self.kind == "refuses" and self.last[-1]:
            raise RuntimeError("a kernel of its own wants the channels first")
        hidden = self.conv(x)
        if self.kind == "writes":
            hidden.view(x.size(0), -1)[:, ::2] = 1.0
        scores: Tensor = self.layer(hidden.view(x.size(0), -1))
        return scores


@pytest.mark.parametrize(
    ("kind", "layouts_seen"),
    [("reads", [True, False, True, True]), ("refuses", [True, False, False]), ("writes", [True, False, False, False])],
)
def test_images_have_their_channels_last_where_that_is_faster(
    kind: str, layouts_seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that refuses them, or writes through a view of them, is tried with a few of them only."""
    inputs, results = torch.randn(60, 2, 8, 8), []
    data, model = fc.Examples(inputs, torch.arange(60) % 4, classes=4), Convolved(kind)
    theta, masks = params_of(model), [{"layer.weight": torch.rand(4, 216) > 0.5}]
    for device in ("none", "cpu"):
        monkeypatch.setattr(layouts, "GAINING", (device,))
        evaluator = Evaluator(fc.Task(model), fc.trace(model, data.inputs), data)
        score, accuracy = evaluator.evaluate(theta, data, clients=local(masks))
        (scratch,) = evaluator._scratches.values()
        assert isinstance(scratch, Convolved)
        results.append((score.accuracy, accuracy, score.loss, scratch.last))
    plain, last = results
    assert plain[:2] == last[:2]
    assert plain[2] == pytest.approx(last[2], rel=1e-6)
    seen = last[3][len(plain[3]) - 2 :]
    assert not any(plain[3])
    assert seen == layouts_seen


def test_the_number_of_a_mask_does_not_depend_on_other_masks() -> None:
    theta = {"a": torch.zeros(3), "b": torch.zeros(4)}
    last, first = torch.tensor([True, False, True, True]), torch.tensor([True, False, False])
    kept = FixedMask({"b": last})
    (alone,) = content_keys([kept], theta)
    (beside, _) = content_keys([{"b": last.clone()}, {"a": first}], theta)
    assert alone == beside == content_keys([kept, {"a": first}], theta)[0] != 0


class Watched(nn.Module):
    """A network that notes whether products may be in tf32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.allowed = nn.Linear(64, 4), set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.allowed |= {torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32}
        scores: Tensor = self.layer(x.flatten(1))
        return scores


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", {False}), ("tf32", {True}), ("bf16", {True})])
def test_models_are_evaluated_in_the_precision_of_their_run(precision: str, allowed: set[bool]) -> None:
    """torch lets cuDNN use tf32 by default, which nobody asked for in fp32."""
    clients = fc.data.iid(images(40), clients=4, seed=0)
    federation = fc.Federation(
        fc.Task(Watched()), clients, fc.full(), fc.by_slot("2x1"), fc.LocalSGD(1, 5), cohort=2, seed=0,
        engine=fc.Vectorized("cpu", precision=precision),
    )  # fmt: skip
    federation.run(1, evaluate_on=images(30))
    (scratch,) = federation.evaluator._scratches.values()
    assert scratch.allowed == allowed
