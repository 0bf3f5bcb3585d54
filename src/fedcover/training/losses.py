"""The losses by name; each maps (scores, labels) to the mean over the batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.data.examples import IGNORED
from fedcover.registry import Registry
from fedcover.training.exits import ExitLoss, with_loss
from fedcover.training.targets import Loss

LOSSES: Registry[Tensor] = Registry("loss")
LOSSES.register("cross_entropy")(F.cross_entropy)
LOSSES.register("bce_with_logits")(F.binary_cross_entropy_with_logits)
LOSSES.register("mse")(F.mse_loss)
LOSSES.register("l1")(F.l1_loss)
LOSSES.register("smooth_l1")(F.smooth_l1_loss)
LOSSES.register("nll")(F.nll_loss)


def batchable(loss: Loss) -> Loss:
    """Return a loss that ``torch.func.vmap`` maps without further imports.

    Its rule for ``F.cross_entropy`` of class numbers imports sympy, for a check of shapes. The same operations without
    that check take its place; they have the same results. Other losses are returned as they are.

    Args:
        loss: The loss of a task.

    >>> scores, labels = torch.tensor([[1.0, 2.0], [0.0, 3.0]]), torch.tensor([1, 0])
    >>> bool(batchable(F.cross_entropy)(scores, labels) == F.cross_entropy(scores, labels))
    True
    """
    if isinstance(loss, ExitLoss):
        return with_loss(loss, batchable(loss.loss))
    return _cross_entropy if loss is F.cross_entropy else loss


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return ``F.cross_entropy``, which takes all cases but class numbers itself."""
    if (scores.ndim, labels.ndim, labels.dtype) != (2, 1, torch.int64) or len(scores) != len(labels):
        return F.cross_entropy(scores, labels)
    counted = labels != IGNORED
    classes = torch.where(counted, labels, 0).unsqueeze(1)
    losses = -F.log_softmax(scores, 1).gather(1, classes).squeeze(1)
    return torch.where(counted, losses, 0.0).sum() / counted.sum().to(losses)
