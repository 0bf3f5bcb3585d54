"""Random models, masks and updates for the laws."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.params import Mask, Params

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3)
seeds = st.integers(0, 2**32)


def random_theta(sizes: list[tuple[int, int]], seed: int) -> Params:
    rng = torch.Generator().manual_seed(seed)
    theta = {f"layer{i}.weight": torch.randn(size, generator=rng) for i, size in enumerate(sizes)}
    return theta | {f"layer{i}.bias": torch.randn(size[0], generator=rng) for i, size in enumerate(sizes)}


def random_mask(theta: Params, seed: int) -> Mask:
    """Any mask: any density, some tensors left out, some wholly pruned."""
    rng = torch.Generator().manual_seed(seed)
    mask: Mask = {}
    for name, tensor in theta.items():
        kind = int(torch.randint(5, (), generator=rng))
        if kind == 0:
            continue
        density = float(torch.rand((), generator=rng)) if kind < 4 else 0.0
        mask[name] = torch.rand(tensor.shape, generator=rng) < density
    return mask


@st.composite
def thetas(draw: st.DrawFn) -> Params:
    return random_theta(draw(shapes), draw(seeds))


@st.composite
def theta_and_masks(draw: st.DrawFn, most: int = 6) -> tuple[Params, list[Mask]]:
    theta = draw(thetas())
    return theta, [random_mask(theta, seed) for seed in draw(st.lists(seeds, min_size=1, max_size=most))]


@st.composite
def theta_and_updates(draw: st.DrawFn) -> tuple[Params, list[ClientUpdate]]:
    theta, masks = draw(theta_and_masks())
    updates = []
    for client, mask in enumerate(masks):
        rng = torch.Generator().manual_seed(draw(seeds))
        values = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in theta.items()}
        updates.append(ClientUpdate(client, values, mask, examples=draw(st.integers(1, 50))))
    return theta, updates


def kept_of(mask: Mask, theta: Params) -> dict[str, Tensor]:
    """The mask with nothing left out."""
    return {name: mask.get(name, torch.ones_like(tensor, dtype=torch.bool)) for name, tensor in theta.items()}


def same(a: Params, b: Params) -> bool:
    """Whether two models are equal bit for bit."""
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
