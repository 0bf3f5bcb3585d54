"""Federations on convex losses: frozen complements reach the minimum where pruned clients stall at their floor."""

import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.params import Params
from tests.contracts.federations import serial


class Linear(nn.Module):
    """A linear model in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0, -4.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def squares(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets).square().mean() / 2


@fc.policy
def halves(theta: Params, client: fc.Client, this_round: fc.Round) -> dict[str, Tensor]:
    """Keep two of four weights; the cohort covers every weight twice."""
    first = 2 * (client.slot % 2) + this_round.index
    kept = torch.zeros(4, dtype=torch.bool)
    kept[[first % 4, (first + 1) % 4]] = True
    return {"weight": kept.view(1, 4)}


def gradient_after(complement: fc.Complement, rounds: int, **options: object) -> float:
    """Return the norm of the gradient of the loss over all data, after some rounds of whole batches."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=rng, dtype=torch.float64)
    y = x @ torch.tensor([[0.5, 1.0, -1.0, 2.0]], dtype=torch.float64).T
    clients = fc.data.from_parts((x, y), [torch.arange(40)] * 4)
    federation = fc.Federation(
        fc.Task(Linear(), squares), clients, halves, "4x0.5", fc.LocalSGD(5, 40, 0.2, 0.0), cohort=4,
        complement=complement, engine=serial(), **options,  # type: ignore[arg-type]
    )  # fmt: skip
    theta = federation.run(rounds).theta
    assert theta is not None
    return float((x.T @ (x @ theta["weight"].T - y) / len(x)).norm())


def test_frozen_complements_reach_the_minimum_and_pruned_clients_do_not() -> None:
    assert gradient_after(fc.Frozen(), 150) < 1e-10
    assert gradient_after(fc.Zero(), 150) > 0.1


def test_kept_copies_reach_the_minimum_where_masks_move() -> None:
    assert gradient_after(fc.Kept(), 400) < 1e-10


def test_the_floor_of_quantized_complements_falls_with_their_bits() -> None:
    floors = [gradient_after(fc.Quantized(bits), 150) for bits in (2, 4, 8)]
    assert floors[0] > 3 * floors[1] > 9 * floors[2] > 1e-10, floors
