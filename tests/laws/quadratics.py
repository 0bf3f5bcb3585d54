"""Quadratic federations whose constants are known, and Algorithm 1 played on them exactly.

F_n(theta) = 1/2 (theta - a_n)^T A (theta - a_n), with gradient noise of known variance, in double precision. Many
copies are played at once that differ only by noise; means over the copies stand for expectations. Clients may see the
whole model, and averages may be damped, as a ``Scheme`` declares.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedcover.theory import Scheme, Steps

momenta = st.sampled_from([0.0, 0.5, 0.9])
dampings = st.sampled_from([0.0, 0.4, 1.0])
PRUNED = Scheme()


@dataclass(frozen=True)
class Quadratic:
    """A federation whose constants are known; ``centres`` has a row a_n for each client."""

    curvature: Tensor
    centres: Tensor
    sigma: float
    """Root of the variance of one stochastic gradient."""
    start: Tensor

    @property
    def smoothness(self) -> float:
        return float(torch.linalg.matrix_norm(self.curvature, 2))

    @cached_property
    def centre(self) -> Tensor:
        """The minimum of F."""
        return self.centres.mean(0)

    @property
    def gap(self) -> float:
        away = self.start - self.centre
        return float(away @ self.curvature @ away) / 2

    def gradient(self, theta: Tensor) -> Tensor:
        """grad F."""
        return (theta - self.centre) @ self.curvature

    def loss(self, theta: Tensor) -> Tensor:
        """F - F_inf."""
        away = theta - self.centre
        return (away * (away @ self.curvature)).sum(-1) / 2

    @property
    def heterogeneity(self) -> float:
        """zeta^2."""
        away = (self.centres - self.centre) @ self.curvature
        return float(away.square().sum(-1).mean())


@dataclass(frozen=True)
class Played:
    """What was measured while Algorithm 1 was played; means over copies."""

    squared: float
    """(1/Q) sum_q E||grad F(theta_q)||^2."""
    error: float
    """(1/Q) sum_q sum_n E e_{q,n}."""
    gradient: float
    """G: the largest mean squared norm of a stochastic gradient inside the mask."""
    strayed: list[float]
    """For each round sum_t sum_n E||theta_{q,n,t-1} - theta_q||^2."""
    errors: list[list[float]]
    """For each round E e_{q,n} of each client."""
    deviations: list[float]
    """For each round E||P^(1/2) D||^2, D the region average of gradients at local models less grad F(theta_q)."""
    noises: list[float]
    """For each round E||P Z||^2, Z the region average of gradient noise, P = diag (c_i/N)^p."""
    gradients: list[float]
    """For each round sum_n E||m_n o grad F(theta_q)||^2."""
    losses: list[float]
    """E F(theta_q) - F_inf for each round, and after the last."""
    client_losses: list[float]
    """For each round the mean over clients of E F(theta_q + Delta_n) - F_inf."""
    last: float
    """||grad F|| after the last round, at its largest of all copies."""


class Complements:
    """What clients have outside their masks: [copy, client, entry]."""

    def __init__(self, kind: str, bits: int, whole: Tensor, clients: int) -> None:
        self.kind, self.bits, self.copy = kind, bits, whole.expand(-1, clients, -1)

    def values(self, whole: Tensor) -> Tensor:
        """The complements at the start of a round."""
        if self.kind == "quantized":
            low, high = whole.amin(-1, keepdim=True), whole.amax(-1, keepdim=True)
            step = (high - low).clamp_min(1e-300) / (2**self.bits - 1)
            return low + ((whole - low) / step).round() * step
        return {"pruned": torch.zeros_like(whole), "frozen": whole, "kept": self.copy}[self.kind]

    def refresh(self, local: Tensor, kept: Tensor) -> None:
        """Replace what clients have trained."""
        self.copy = torch.where(kept, local, self.copy)


def play(
    case: Quadratic,
    masks: Tensor,
    steps: Steps,
    copies: int = 48,
    seed: int = 0,
    scheme: Scheme = PRUNED,
    bits: int = 4,
    drawn: bool = False,
) -> Played:
    """Algorithm 1, or another scheme, with the masks [round, client, entry]; each round may draw its clients."""
    rng, count = torch.Generator().manual_seed(seed), steps.count
    theta, centres, shape = case.start.expand(copies, -1), case.centres.expand(1, -1, -1), (copies, *masks.shape[1:])
    complements, several = Complements(scheme.complement, bits, theta[:, None, :], shape[1]), list[Round]()
    coverage = masks.double().sum(1)
    damping = (coverage / shape[1]) ** scheme.damping
    noise = torch.zeros(count, *shape, dtype=torch.float64)
    for kept, holders, damped in zip(masks, coverage, damping, strict=True):
        if drawn:
            centres = case.centres[torch.randint(len(case.centres), shape[:2], generator=rng)]
        if case.sigma:
            drawings = [torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(count)]
            noise = torch.stack(drawings) * case.sigma / shape[-1] ** 0.5
        outside = complements.values(theta[:, None, :])
        local, velocity, path = torch.where(kept, theta[:, None, :], outside), 0.0, []
        for error in noise:
            path.append(local)
            velocity = steps.momentum * velocity + ((local - centres) @ case.curvature + error) * kept
            local = local - steps.size * velocity
        several.append(Round(theta, outside.expand(shape), centres, noise, torch.stack(path), local))
        complements.refresh(local, kept)
        theta = theta + damped * ((local * kept).sum(1) / holders - theta)
    return measured(case, masks, steps, damping, Round(*map(torch.stack, zip(*several, strict=True))), theta)


class Round(NamedTuple):
    """A round, or many, with an axis for them before all others."""

    theta: Tensor
    """[copy, entry]."""
    outside: Tensor
    """What clients have outside their masks: [copy, client, entry]."""
    centres: Tensor
    noise: Tensor
    """[step, copy, client, entry]."""
    path: Tensor
    """The local models before each step: [step, copy, client, entry]."""
    local: Tensor
    """Those after the last step."""


def measured(case: Quadratic, masks: Tensor, steps: Steps, damping: Tensor, played: Round, last: Tensor) -> Played:
    """Measure all rounds at once."""
    kept, thetas = masks.double(), torch.cat([played.theta, last[None]])
    slopes, whole, holders = case.gradient(played.theta), played.theta[:, :, None, :], kept.sum(1)[:, None, :]
    drift = (played.path - played.centres[:, None]) @ case.curvature
    weights = [(1 - steps.momentum ** (steps.count - t)) / steps.weight for t in range(steps.count)]
    exact, random = (
        torch.einsum("t,qtcne,qne->qce", torch.tensor(weights, dtype=torch.float64), part, kept) / holders
        for part in (drift, played.noise)
    )
    stochastic = (drift + played.noise) * kept[:, None, None]
    errors = ((whole - played.outside) * (1 - kept[:, None])).square().sum(-1).mean(1)
    gradients = (slopes[:, :, None, :] * kept[:, None]).square().sum((-1, -2)).mean(1)
    trained = torch.where(masks[:, None], played.local, whole)
    return Played(
        float(slopes.square().sum(-1).mean()),
        float(errors.sum(1).mean()),
        float(stochastic.square().sum(-1).mean(2).max()),
        (played.path - whole[:, None]).square().sum(-1).mean(2).sum((1, 2)).tolist(),
        errors.tolist(),
        (damping[:, None] * (exact - slopes).square()).sum(-1).mean(1).tolist(),
        (damping[:, None] * random).square().sum(-1).mean(1).tolist(),
        gradients.tolist(),
        case.loss(thetas).mean(1).tolist(),
        case.loss(trained).mean((1, 2)).tolist(),
        float(case.gradient(last).norm(dim=-1).max()),
    )


def spd(rng: torch.Generator, entries: int, low: float, high: float) -> Tensor:
    """A symmetric matrix with eigenvalues from low to high."""
    turn, _ = torch.linalg.qr(torch.randn(entries, entries, generator=rng, dtype=torch.float64))
    values = torch.linspace(low, high, entries, dtype=torch.float64)
    curvature: Tensor = turn @ torch.diag(values) @ turn.T
    return curvature


def random_masks(rng: torch.Generator, rounds: int, clients: int, entries: int) -> Tensor:
    """Masks [round, client, entry] with Gamma 1 or more: each entry gets one client for certain."""
    keep = torch.rand(rounds, clients, 1, generator=rng)
    kept = torch.rand(rounds, clients, entries, generator=rng) < keep
    return kept.scatter(1, torch.randint(clients, (rounds, 1, entries), generator=rng), True)


def iid_case(
    seed: int, clients: int, entries: int, smoothness: float, sigma: float
) -> tuple[Quadratic, torch.Generator]:
    rng = torch.Generator().manual_seed(seed)
    curvature = spd(rng, entries, 0.1 * smoothness, smoothness)
    centre = 2 * torch.randn(entries, generator=rng, dtype=torch.float64)
    start = torch.randn(entries, generator=rng, dtype=torch.float64)
    return Quadratic(curvature, centre.expand(clients, -1), sigma, start), rng


def paired_case(
    seed: int, pairs: int, entries: int, smoothness: float, sigma: float
) -> tuple[Quadratic, torch.Generator]:
    """Non-IID clients in pairs that lie opposite each other around the common centre."""
    case, rng = iid_case(seed, 2 * pairs, entries, smoothness, sigma)
    away = torch.randn(pairs, entries, generator=rng, dtype=torch.float64)
    return replace(case, centres=case.centres + torch.cat([away, -away])), rng


def least_coverage(masks: Tensor) -> int:
    return int(masks.sum(1).min())
