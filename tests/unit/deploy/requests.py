"""Random models, masks, training options, requests and replies for the laws of messages and for the fuzzer."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.deploy.wire import TrainRequest
from fedcover.params import Mask, Params, prune
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.recipes import LocalSGD

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 4), (0, 5), (2, 3, 2), (9, 17))


def random_params(rng: torch.Generator) -> Params:
    """Return tensors of any shape and type, including scalars and empty ones."""
    theta = {}
    for i in range(1 + _below(4, rng)):
        shape, dtype = SHAPES[_below(len(SHAPES), rng)], TYPES[_below(len(TYPES), rng)]
        theta[f"layer{i}.weight" if i else "Größe"] = torch.randn(shape, generator=rng).to(dtype)
    return theta


def random_kept(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Return a mask of everything, nothing, units or single entries."""
    kind = _below(5, rng)
    if kind < 2:
        return torch.full(shape, kind == 0)
    if kind == 2 and len(shape) > 1:
        kept = torch.ones(shape, dtype=torch.bool)
        for axis, size in enumerate(shape):
            index = (torch.rand(size, generator=rng) < 0.6).view([-1 if a == axis else 1 for a in range(len(shape))])
            kept = kept & index
        return kept
    return torch.rand(shape, generator=rng) < torch.rand((), generator=rng)


def random_mask(theta: Params, rng: torch.Generator) -> Mask:
    return {name: random_kept(t.shape, rng) for name, t in theta.items() if _below(4, rng)}


def random_options(theta: Params, mask: Mask, rng: torch.Generator) -> TrainingOptions | None:
    """Return any training options: gains and thresholds, and nested widths or a regrowth."""
    kind = _below(4, rng)
    if kind == 0:
        return None
    names = list(theta)
    gains = {name: 10 * float(torch.rand((), generator=rng)) + 1e-9 for name in names if _below(2, rng)}
    thresholds = {name: float(torch.rand((), generator=rng)) / 3 for name in names if _below(2, rng)}
    report = bool(_below(2, rng))
    if kind == 1:
        return TrainingOptions(gains, thresholds, report=report)
    if kind == 2:
        regrow = Regrow(float(torch.rand((), generator=rng)), 1 + _below(3, rng))
        return TrainingOptions(gains, thresholds, regrow=regrow, report=report)
    widths: list[Mask] = []
    wider: Mask = mask
    for _ in range(1 + _below(4, rng)):
        new = {name: kept if _below(2, rng) else kept & random_kept(kept.shape, rng) for name, kept in wider.items()}
        more = {n: random_kept(theta[n].shape, rng) for n in names if n not in wider and _below(2, rng)}
        wider = {**new, **more}
        widths.insert(0, wider)
    return TrainingOptions(gains, thresholds, tuple(widths), distil=0.0 if _below(2, rng) else 0.25, report=report)


def random_request(seed: int) -> TrainRequest:
    rng = torch.Generator().manual_seed(seed)
    theta = random_params(rng)
    mask = random_mask(theta, rng)
    lr, momentum = (float(torch.rand((), generator=rng, dtype=torch.float64)) for _ in range(2))
    recipe = LocalSGD(
        1 + _below(9, rng), 1 + _below(99, rng), lr + 1e-9, momentum,
        local_steps=1 + _below(9, rng) if _below(2, rng) else None, clip=lr + 1e-9 if _below(2, rng) else None,
        proximal=lr * _below(2, rng), keep_moments=bool(_below(2, rng)),
    )  # fmt: skip
    options = random_options(theta, mask, rng)
    if options is not None and _below(2, rng):
        shifts, velocity = (
            {name: torch.rand(t.shape, generator=rng).to(t.dtype) for name, t in theta.items() if _below(2, rng)}
            for _ in range(2)
        )
        options = replace(options, shifts=prune(shifts, mask), moments={"velocity": prune(velocity, mask)})
    numbers = _below(99, rng), _below(9, rng), 1 + _below(999, rng), _below(2**40, rng) - 2**39
    frozen = tuple(name for name in theta if not _below(4, rng))
    return TrainRequest(*numbers, recipe, bool(_below(2, rng)), theta, mask, options, frozen)


def seeing(request: TrainRequest) -> TrainRequest:
    """Return a request whose client sees values outside its mask."""
    options = request.options or TrainingOptions()
    return replace(request, options=replace(options, gains={}, widths=(), distil=0.0, regrow=None, complement=True))


def reply_to(request: TrainRequest, seed: int = 0) -> ClientUpdate:
    """Return a valid update, as a client might send it."""
    rng = torch.Generator().manual_seed(seed)
    mask = request.mask
    if request.options and request.options.regrow:
        mask = {name: _shuffled(kept, rng) for name, kept in mask.items()}
    theta = {}
    for name, tensor in request.theta.items():
        kept = request.mask.get(name, torch.ones_like(tensor, dtype=torch.bool)) & mask.get(name, torch.tensor(True))
        moved = tensor + (torch.rand(tensor.shape, generator=rng) / 100).to(tensor.dtype) * (name not in request.frozen)
        theta[name] = torch.where(kept, moved, torch.zeros_like(tensor))
    report = None
    if request.options and request.options.report:
        report = {name: torch.rand(t.shape, generator=rng).to(t.dtype) for name, t in request.theta.items()}
    moments = None
    if request.recipe.keep_moments:
        trained = {name: tensor.abs() for name, tensor in theta.items() if name not in request.frozen}
        moments = {moment: prune(trained, mask) for moment in request.recipe.moment_names}
    loss = float(torch.rand((), generator=rng))
    return ClientUpdate(request.client, theta, mask, 1 + _below(50, rng), loss, report=report, moments=moments)


def _shuffled(kept: Tensor, rng: torch.Generator) -> Tensor:
    return kept.reshape(-1)[torch.randperm(kept.numel(), generator=rng)].view(kept.shape)


def _below(limit: int, rng: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=rng))


requests = st.integers(0, 2**32).map(random_request)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and every bit."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(whole), b.view(whole))


def same_masks(a: Mask, b: Mask) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
