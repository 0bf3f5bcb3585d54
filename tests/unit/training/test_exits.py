"""The loss over several exits: its value and its gradient against formulas by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedcover as fc
from fedcover.training.exits import ExitLoss, Exits, exit_loss, loss_of
from fedcover.training.losses import batchable
from fedcover.training.targets import Decision

ROWS, CLASSES = 5, 4


def scores_and_labels(exits: int, *more: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(ROWS, exits, CLASSES, *more, generator=rng, dtype=torch.float64)
    return scores, torch.randint(CLASSES, (ROWS, *more), generator=rng)


def gradient(loss: ExitLoss, scores: Tensor, labels: Tensor) -> Tensor:
    at = scores.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(at, labels), [at])
    return grad


def of_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean cross-entropy: (softmax - one hot) / rows."""
    return (scores.softmax(1) - F.one_hot(labels, CLASSES)) / ROWS


def test_each_exit_of_depthfl_is_drawn_to_the_mean_of_the_others() -> None:
    """The gradient of KL(p_j || q_i) by the scores of the student i is q_i - p_j, and teachers get none."""
    scores, labels = scores_and_labels(3)
    grad = gradient(exit_loss(F.cross_entropy, Decision(), Exits((1, 2, 3), distil=0.7)), scores, labels)
    for i in range(3):
        others = torch.stack([scores[:, j].softmax(1) for j in range(3) if j != i]).mean(0)
        pull = 0.7 * (scores[:, i].softmax(1) - others) / ROWS
        torch.testing.assert_close(grad[:, i], of_cross_entropy(scores[:, i], labels) + pull)


def test_earlier_exits_of_scalefl_are_drawn_to_the_last_one_at_a_temperature() -> None:
    scores, labels = scores_and_labels(3)
    exits, weights = Exits((1, 2, 3), (1 / 6, 2 / 6, 3 / 6), 0.3, "last", 3.0), (1 / 6, 2 / 6, 3 / 6)
    grad = gradient(exit_loss(F.cross_entropy, Decision(), exits), scores, labels)
    for i in range(2):
        softened = (scores[:, i] / 3).softmax(1) - (scores[:, 2] / 3).softmax(1)
        expected = of_cross_entropy(scores[:, i], labels) + 0.3 * 3 * softened / ROWS  # T^2, and 1 / T from the chain
        torch.testing.assert_close(grad[:, i], weights[i] * expected)
    torch.testing.assert_close(grad[:, 2], weights[2] * of_cross_entropy(scores[:, 2], labels))


def test_divergences_are_those_of_torch() -> None:
    """Summed over classes, and not divided by their number as by the reduction ``mean`` of ``nn.KLDivLoss``."""
    scores, labels = scores_and_labels(2)
    loss = exit_loss(F.cross_entropy, Decision(), Exits((1, 2), distil=0.5))(scores, labels)
    logs = [F.log_softmax(scores[:, i], 1) for i in range(2)]
    divergence = sum(F.kl_div(logs[i], logs[1 - i], reduction="batchmean", log_target=True) for i in range(2))
    torch.testing.assert_close(loss, sum(F.cross_entropy(scores[:, i], labels) for i in range(2)) + 0.5 * divergence)


@pytest.mark.parametrize("axis", [1, -1])
def test_positions_of_texts_count_alike(axis: int) -> None:
    scores, labels = scores_and_labels(2, 6)
    flat = scores.permute(0, 3, 1, 2).reshape(ROWS * 6, 2, CLASSES)
    expected = exit_loss(F.cross_entropy, Decision(), Exits((1, 2), distil=1.0))(flat, labels.flatten())

    def loss(at: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(at.movedim(axis, 1), labels)

    placed = scores.movedim(2, axis) if axis == -1 else scores
    actual = exit_loss(loss, Decision(axis=axis), Exits((1, 2), distil=1.0))(placed, labels)
    torch.testing.assert_close(actual, expected)


def test_the_weight_of_distillation_can_be_changed_in_place() -> None:
    scores, labels = scores_and_labels(2)
    task = fc.Task(torch.nn.Linear(2, 2))
    one, other = loss_of(task, Exits((1, 2), distil=0.2)), loss_of(task, Exits((1, 2), distil=0.9))
    assert one is other  # steps that were traced with one serve the other too
    assert isinstance(one, ExitLoss)
    for distil in (0.2, 0.9):
        one.set_distil(distil)
        expected = exit_loss(F.cross_entropy, Decision(), Exits((1, 2), distil=distil))(scores, labels)
        torch.testing.assert_close(one(scores, labels), expected)
        torch.testing.assert_close(batchable(one)(scores, labels), expected)
    assert loss_of(task, Exits((1, 2))) is not one
    assert loss_of(task, None) is task.loss


@pytest.mark.parametrize(
    ("numbers", "settings", "message"),
    [
        ((), {}, "ascending"),
        ((2, 1), {}, "ascending"),
        ((0, 1), {}, "whole number of 1"),
        ((1, 2), {"weights": (1.0,)}, "2 exits"),
        ((1,), {"distil": -1.0}, "0 or more"),
        ((1,), {"temperature": 0.0}, "positive"),
        ((1,), {"teachers": "first"}, "others or last"),
    ],
)
def test_exits_out_of_range_are_refused(numbers: tuple[int, ...], settings: dict[str, object], message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        Exits(numbers, **settings)  # type: ignore[arg-type]


def test_values_have_no_classes_to_distil() -> None:
    assert exit_loss(F.mse_loss, None, Exits((1, 2)))(torch.zeros(3, 2, 1), torch.ones(3, 1)) == 2
    with pytest.raises(fc.InputError, match=r"mse_loss has no score for each class; set distil=0"):
        exit_loss(F.mse_loss, None, Exits((1, 2), distil=1.0))
