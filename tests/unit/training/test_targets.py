"""Losses get targets in a form that they take, and only if it means the same; what scores predict follows from both."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc

N = 60
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
BINARY = (X[:, 0] > 0).long()


def net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, outputs))


def last(task: fc.Task, labels: Tensor, test: Any = None, rounds: int = 3, inputs: Tensor = X) -> fc.RoundRecord:
    clients = fc.data.from_parts((inputs, labels), torch.arange(N).split(20))
    playing = fc.Federation(task, clients, local=fc.LocalSGD(5, 10, lr=0.1), cohort=3)
    record: fc.RoundRecord = playing.run(rounds, evaluate_on=test or (inputs, labels)).last
    return record


@pytest.mark.parametrize("form", ["float", "column", "one-hot"])
def test_classes_in_other_forms_have_an_accuracy(form: str) -> None:
    labels = {"float": BINARY.float(), "column": BINARY[:, None], "one-hot": F.one_hot(BINARY, 2).float()}[form]
    plain, other = last(fc.Task(net(2)), BINARY), last(fc.Task(net(2)), labels)
    assert other.accuracy == pytest.approx(plain.accuracy)
    assert other.loss == pytest.approx(plain.loss, rel=1e-5)
    assert not other.metrics


def test_fractions_are_not_cut_to_class_numbers() -> None:
    ratings = torch.tensor([4.0, 3.0, 3.5] * 20)
    with pytest.raises(fc.InputError, match="cross_entropy does not take"):
        last(fc.Task(net(5)), ratings)


def test_axes_are_not_scrambled() -> None:
    images = torch.randn(N, 3, 4, 4)
    task = fc.Task(nn.Conv2d(3, 3, 1), F.mse_loss)
    with pytest.raises(fc.InputError, match=r"labels of shape \(2, 4, 4, 3\)"):
        last(task, images.permute(0, 2, 3, 1).contiguous(), inputs=images)


def own_mse(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores - labels).square().mean()


@pytest.mark.parametrize("loss", [own_mse, F.poisson_nll_loss, F.huber_loss])
def test_scores_are_never_compared_with_the_labels_of_others(loss: Any) -> None:
    values = X.sum(1).abs()
    flat, column = last(fc.Task(net(1), loss), values), last(fc.Task(net(1), loss), values[:, None])
    assert flat.loss == pytest.approx(column.loss, rel=1e-5)


def test_a_loss_of_all_pairs_is_left_alone() -> None:
    def spread(scores: Tensor, labels: Tensor) -> Tensor:
        same = (labels[:, None] == labels[None]).float()
        return (torch.cdist(scores, scores) * same).mean() - 0.1 * scores.std()

    assert last(fc.Task(net(2), spread), BINARY, rounds=1).loss is not None


@pytest.mark.parametrize(
    ("task", "labels", "why"),
    [
        (lambda: fc.Task(net(4)), (X > 0).long(), "not probabilities of the classes.*for several labels use BCE"),
        (lambda: fc.Task(net(4)), (X > 0).float(), "not probabilities of the classes.*for several labels use BCE"),
        (
            lambda: fc.Task(net(2), nn.CrossEntropyLoss(reduction="sum")),
            BINARY,
            "is a sum over the batch",
        ),
        (lambda: fc.Task(net(1)), BINARY.float(), "its gradient is 0|does not take"),
        (lambda: fc.Task(net(2)), BINARY + 3, "has the class number 4, but the model has only 2 scores|does not take"),
        (lambda: fc.Task(net(2)), torch.full((N,), -100), "all labels of examples are -100"),
        (lambda: fc.Task(net(1), F.mse_loss, metrics="accuracy"), X.sum(1), "metric 'accuracy' needs classes"),
        (lambda: fc.Task(net(2), nn.CrossEntropyLoss), BINARY, r"got a class; write CrossEntropyLoss\(\)"),
        (lambda: fc.Task(net(2), metrics=3), BINARY, "metrics must be functions or names"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused(task: Any, labels: Tensor, why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        last(task(), labels, rounds=1)


@pytest.mark.parametrize("form", ["flat", "column"])
def test_test_sets_may_have_labels_in_another_form(form: str) -> None:
    values = X.sum(1)
    test = values if form == "flat" else values[:, None]
    train = values[:, None] if form == "flat" else values
    record = last(fc.Task(net(1), F.mse_loss), train, (X, test))
    assert record.loss == pytest.approx(record.metrics["rmse"] ** 2, rel=1e-4)
    whole = last(fc.Task(net(1), F.binary_cross_entropy_with_logits), BINARY.float()[:, None], (X, BINARY))
    assert whole.accuracy is not None


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ((torch.zeros(4, 5), [0, 1, 0, 1]), r"the model cannot run on the test set: inputs of shape \(2, 5\)"),
        ((X, BINARY + 1), "has the class number 2, but the model has only 2 scores"),
        ((X, torch.rand(N)), "labels of the test set .* give both in one form"),
        (({"x": X}, BINARY), "the model cannot run on the test set"),
    ],
)
def test_test_sets_are_checked_before_training(test: Any, why: str) -> None:
    with pytest.raises(fc.InputError, match=why):
        last(fc.Task(net(2)), BINARY, test)


def test_test_sets_may_have_classes_that_training_lacks() -> None:
    labels = X.argmax(1)
    few = torch.where(labels == 3, 0, labels)
    record = last(fc.Task(net(4)), few, (X, labels))
    assert record.local_accuracy is not None


def test_own_metrics_get_the_labels_that_the_user_gave() -> None:
    def worst(scores: Tensor, labels: Tensor) -> Tensor:
        return (scores.squeeze(1) - labels).abs().max()

    values = X.sum(1)
    record = last(fc.Task(net(1), F.mse_loss, metrics=["rmse", worst]), values)
    assert record.metrics["rmse"] <= record.metrics["worst"] < 6 * record.metrics["rmse"]


def test_named_metrics_use_the_threshold_of_the_loss() -> None:
    model = nn.Sequential(net(1), nn.Sigmoid())
    record = last(fc.Task(model, nn.BCELoss(), metrics=["accuracy", "f1", "auc"]), BINARY.float(), rounds=12)
    assert record.metrics["accuracy"] == record.accuracy
    assert record.metrics["f1"] > 0.8


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(5, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.words(tokens)))
        return scores


def test_as_many_positions_as_classes() -> None:
    tokens = torch.randint(5, (N, 5), generator=torch.Generator().manual_seed(1))
    labels = (tokens + 1) % 5
    moved = fc.Task(Language(), lambda scores, y: F.cross_entropy(scores.transpose(1, 2), y))
    assert last(moved, labels, inputs=tokens, rounds=8).accuracy == 1.0
    with pytest.warns(UserWarning, match="the classes are taken to be the first axis"):
        last(fc.Task(Language()), labels, inputs=tokens, rounds=1)
