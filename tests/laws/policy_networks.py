"""Small networks for the laws of policies, and rounds of a policy without training."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import fedcover as fc
from fedcover.clients import cohort_of
from fedcover.params import Mask, Params, params_of
from fedcover.seeding import ambient
from tests.conftest import plan_masks


class Bottleneck(nn.Module):
    """A residual net with a shortcut that is a convolution: its groups form a triangle."""

    def __init__(self, stem: int, inner: int, out: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, stem, 3, padding=1), nn.GroupNorm(1, stem)
        self.inner, self.back = nn.Conv2d(stem, inner, 3, padding=1), nn.Conv2d(inner, out, 3, padding=1)
        self.short, self.head = nn.Conv2d(stem, out, 1), nn.Linear(out, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        scores: Tensor = self.head(F.relu(self.short(x) + self.back(F.relu(self.inner(x)))).mean((2, 3)))
        return scores


class Tied(nn.Module):
    """A residual net whose inner convolution has the stream on both its axes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        scores: Tensor = self.head((x + F.relu(self.inner(x))).mean((2, 3)))
        return scores


class Dense(nn.Module):
    """Every layer feeds every later one: groups that need as many colours as there are layers."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(4, width) for width in widths])
        self.later = nn.ModuleList(
            [nn.ModuleList([nn.Linear(before, width) for before in widths[:i]]) for i, width in enumerate(widths)]
        )
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for first, later in zip(self.first, self.later, strict=True):
            total = first(x)
            for before, layer in zip(made, later, strict=True):  # type: ignore[call-overload]
                total = total + layer(before)
            made.append(torch.tanh(total))
        scores: Tensor = self.head(made[-1])
        return scores


Case = tuple[nn.Module, Tensor]
IMAGE = torch.zeros(2, 1, 6, 6)


def mlp(*widths: int) -> Case:
    sizes = [5, *widths]
    layers: list[nn.Module] = []
    for before, after in zip(sizes, widths, strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 3)), torch.zeros(2, 5)


def cnn(a: int, b: int, c: int) -> Case:
    return nn.Sequential(
        nn.Conv2d(1, a, 3), nn.ReLU(), nn.Conv2d(a, b, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * b, c), nn.ReLU(),
        nn.Linear(c, 3),
    ), IMAGE  # fmt: skip


@st.composite
def networks(draw: st.DrawFn) -> Case:
    """MLPs, CNNs, residual nets of both kinds and densely connected ones."""
    size = st.integers(2, 9)
    kind = draw(st.sampled_from(["mlp", "cnn", "bottleneck", "tied", "dense"]))
    with ambient(draw(st.integers(0, 99)), "law net"):
        if kind == "mlp":
            return mlp(*draw(st.lists(size, min_size=1, max_size=4)))
        if kind == "cnn":
            return cnn(draw(size), draw(size), draw(size))
        if kind == "bottleneck":
            return Bottleneck(draw(size), draw(size), draw(size)), IMAGE
        if kind == "tied":
            return Tied(draw(size)), IMAGE
        return Dense(draw(st.lists(size, min_size=2, max_size=5))), torch.zeros(2, 4)


def rounds(
    policy: fc.Policy, case: Case, keeps: Sequence[float], count: int, seed: int = 0, first: int = 1
) -> Iterator[tuple[Params, list[Mask]]]:
    """theta and the masks of each round; theta is shaken a little between rounds, as training would."""
    model, example = case
    bound = policy.bind(fc.trace(model, example))
    theta, state = params_of(model), bound.start()
    budgets = [fc.Budget(keep) for keep in keeps]
    for index in range(first, first + count):
        cohort = cohort_of(range(len(keeps)), [1] * len(keeps), budgets, "slot")
        masks, state = plan_masks(bound, theta, cohort, fc.Round(index, seed), state)
        yield theta, masks
        rng = torch.Generator().manual_seed(index)
        theta = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=rng) for name, tensor in theta.items()}
