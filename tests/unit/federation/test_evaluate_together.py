"""Evaluation of several runs at once against that of each of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.federation import evaluate_together as module
from fedcover.federation import lockstep
from fedcover.federation.evaluate_together import EvaluationRequest, evaluate_together
from fedcover.federation.evaluator import Evaluator, LocalTest
from fedcover.models import CNN, MLP
from fedcover.params import FULL, Params


def images(count: int, ignored: int = 0) -> fc.Examples:
    inputs = torch.randn(count, 1, 8, 8)
    labels = inputs.flatten(1)[:, :3].argmax(1)  # the last of four classes is never tested
    labels[:ignored] = -100
    return fc.Examples(inputs, labels, classes=4)


def request(seed: int, model: nn.Module, data: fc.Examples, clients: int = 3) -> EvaluationRequest:
    """Return one run: other parameters and masks than those of other runs, and a client whose class is not tested."""
    rng = torch.Generator().manual_seed(seed)
    task = fc.Task(model).fitted(data)
    theta: Params = {n: torch.randn(p.shape, generator=rng) / 8 for n, p in model.named_parameters()}
    half = [{n: torch.rand(t.shape, generator=rng) < 0.5 for n, t in theta.items() if t.ndim > 1} for _ in range(2)]
    masks = [half[0], half[1], half[0], FULL][:clients]
    mixes = [[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4], [0, 0, 0, 1.0], [0.2, 0.2, 0.6, 0]]
    mix = [torch.tensor(one, dtype=torch.float64) for one in mixes]
    tests = [LocalTest(mask, mix[i], 10 + i) for i, mask in enumerate(masks)]
    evaluator = Evaluator(task, fc.trace(model, data.inputs), data)
    return EvaluationRequest(evaluator, theta, half[0] if seed % 2 else FULL, tests)


def alone(one: EvaluationRequest, test: fc.Examples) -> tuple[float, float | None, float | None]:
    score, local = one.evaluator.evaluate(one.theta, test, one.shown, one.clients)
    return score.loss, score.accuracy, local


@pytest.mark.parametrize("at_once", [2, 64])
@pytest.mark.parametrize(("clients", "ignored"), [(0, 0), (4, 0), (3, 7)])
def test_results_are_those_of_single_runs(
    clients: int, ignored: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    test, data = images(50, ignored), images(30)
    requests = [request(seed, MLP((1, 8, 8), 4, hidden=9), data, clients) for seed in range(5)]
    results = evaluate_together(requests, test)
    assert results is not None
    for one, (score, local) in zip(requests, results, strict=True):
        loss, accuracy, own = alone(one, test)
        assert score.loss == pytest.approx(loss, rel=1e-6)
        assert score.accuracy == accuracy
        assert local == (None if own is None else pytest.approx(own, rel=1e-9))


class Branching(nn.Module):
    """A network that reads values, which cannot be batched."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x.flatten(1))
        return scores if scores.sum() > 0 else -scores


def others() -> list[Sequence[nn.Module]]:
    return [
        [MLP((1, 8, 8), 4, hidden=9), MLP((1, 8, 8), 4, hidden=10)],  # other shapes
        [CNN((1, 8, 8), 4), CNN((1, 8, 8), 4)],  # batch norm
        [Branching(), Branching()],
    ]


@pytest.mark.parametrize("models", others())
def test_models_that_cannot_be_one_batch_are_left_to_single_evaluations(models: Sequence[nn.Module]) -> None:
    data = images(30)
    requests = [request(seed, model, data) for seed, model in enumerate(models)]
    assert evaluate_together(requests, images(20)) is None
    assert evaluate_together([], images(20)) is None


def test_metrics_are_left_to_single_evaluations() -> None:
    data = images(30)
    one = request(0, MLP((1, 8, 8), 4, hidden=9), data)
    task = fc.Task(MLP((1, 8, 8), 4, hidden=9), metrics=["f1"]).fitted(data)
    other = one._replace(evaluator=Evaluator(task, fc.trace(task.model, data.inputs), data))
    assert evaluate_together([other], images(20)) is None


def test_runs_in_lockstep_have_the_records_of_single_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    data, test = images(60), images(40)
    clients = fc.data.iid(data, clients=6, seed=0)

    def federation(seed: int) -> fc.Federation:
        return fc.Federation(
            fc.Task(MLP((1, 8, 8), 4, hidden=9)), clients, fc.weight_pruning(), fc.by_slot("1,0.5,0.5"),
            fc.LocalSGD(1, 5), cohort=3, seed=seed,
        )  # fmt: skip

    torch.manual_seed(1)
    expected = fc.run_many([federation(seed) for seed in range(3)], 3, test, engine=fc.Vectorized("cpu"))
    calls = []

    def watched(*arguments: Any) -> Any:
        calls.append(1)
        return together(*arguments)

    together = lockstep.scores_of_many
    monkeypatch.setattr(lockstep, "scores_of_many", watched)
    engine = fc.Vectorized("cpu")
    monkeypatch.setattr(lockstep, "SINGLE", ())
    torch.manual_seed(1)
    actual = fc.run_many([federation(seed) for seed in range(3)], 3, test, engine=engine)
    assert len(calls) == 3
    for one, other in zip(expected, actual, strict=True):
        for before, after in zip(one, other, strict=True):
            assert (after.accuracy, after.rejected) == (before.accuracy, before.rejected)
            assert after.loss == pytest.approx(before.loss, rel=1e-6)
            assert after.local_accuracy == (
                None if before.local_accuracy is None else pytest.approx(before.local_accuracy, rel=1e-9)
            )
