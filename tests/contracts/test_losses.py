"""Losses of any kind: equal in every engine, or refused with the reason."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from tests.contracts.federations import TOLERANCE, furthest


def contrastive(scores: Tensor, labels: Tensor) -> Tensor:
    """A loss between the examples of a batch."""
    near = F.normalize(scores) @ F.normalize(scores).T
    return F.mse_loss(near, (labels.unsqueeze(0) == labels.unsqueeze(1)).to(scores.dtype))


JOINT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 3.0])),
    "an ignored class": partial(F.cross_entropy, ignore_index=2),
    "contrastive": contrastive,
    "normalised": lambda scores, labels: F.cross_entropy(scores - scores.mean(0), labels),
}
SEPARATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "likelihood": lambda scores, labels: F.nll_loss(scores.log_softmax(1), labels),
}


def federation(loss: Callable[[Tensor, Tensor], Tensor], sizes: tuple[int, ...], engine: fc.Engine) -> fc.Federation:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(sum(sizes), 5)
    parts = list(torch.arange(sum(sizes)).split(list(sizes)))
    return fc.Federation(
        fc.Task(net, loss), fc.data.from_parts((x, x[:, :3].argmax(1)), parts), cohort=len(sizes), engine=engine,
        local=fc.LocalSGD(2, 4, 0.05),
    )  # fmt: skip


@pytest.mark.parametrize("name", JOINT)
def test_a_joint_loss_needs_full_batches(name: str) -> None:
    with pytest.raises(fc.InputError, match=r"is not the mean of its examples' losses.*multiple of 4"):
        federation(JOINT[name], (8, 5, 12), fc.Vectorized("cpu")).run(1)
    serial, batch = (
        federation(JOINT[name], (8, 12, 4), engine).run(1) for engine in (fc.Serial(shrink=False), fc.Vectorized("cpu"))
    )
    assert furthest(serial, batch) < TOLERANCE


@pytest.mark.parametrize("name", SEPARATE)
def test_a_mean_over_examples_is_right_for_unequal_clients(name: str) -> None:
    serial, batch = (
        federation(SEPARATE[name], (8, 5, 11), engine).run(1)
        for engine in (fc.Serial(shrink=False), fc.Vectorized("cpu"))
    )
    assert furthest(serial, batch) < TOLERANCE


def test_rounding_in_16_bits_is_not_taken_for_a_joint_loss() -> None:
    """Data that are numbers of tokens, so that only the parameters have 16 bits."""
    torch.manual_seed(18)  # the two ways to compute the loss differ by 1 % here
    net = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Flatten(), torch.nn.Linear(24, 3)).bfloat16()
    tokens = torch.randint(9, (40, 4))
    clients = fc.data.from_parts(fc.Examples(tokens, tokens[:, 0] % 3, classes=3), [range(7), range(7, 40)])
    federation = fc.Federation(fc.Task(net), clients, local=fc.LocalSGD(1, 10, 0.1), cohort=2)
    jobs = federation.begin_round(federation.start()).jobs
    for a, b in zip(fc.Serial(shrink=False).train(jobs), fc.Vectorized("cpu").train(jobs), strict=True):
        for name, tensor in a.theta.items():
            torch.testing.assert_close(b.theta[name], tensor, rtol=0.05, atol=0.02)
