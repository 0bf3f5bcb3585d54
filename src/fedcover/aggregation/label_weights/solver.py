"""Client weights whose mixture of labels is nearest to the population's, and label counts with privacy noise."""

import torch
from torch import Tensor

from fedcover.data import Population
from fedcover.errors import InputError, check_number

RIDGE = 1e-10
"""Cost of a squared distance to the prior relative to one to the target; so small that it only decides ties."""


def nearest_weights(
    mixes: Tensor, target: Tensor, prior: Tensor | None = None, ridge: float = RIDGE
) -> tuple[Tensor, float]:
    """Return the weights whose mixture of label distributions is nearest to the target, and the remaining distance.

    The weights solve

        min ||mixes^T w - target||^2 + ridge ||w - prior||^2   subject to   w >= 0,  sum_n w_n = 1.

    Equal clients get equal weights, bit for bit. The distance is total variation, half the sum of absolute differences.

    Args:
        mixes: The label distribution of each client, one row per client.
        target: The label distribution of the population.
        prior: Weights to prefer; uniform by default.
        ridge: The weight of the prior. The default only decides between equal optima. A larger value trades more bias
            for less variance, that is, a smaller sum of w^2.

    >>> weights, distance = nearest_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.25, 0.75]))
    >>> weights.round(decimals=6).tolist(), round(distance, 6)
    ([0.25, 0.75], 0.0)
    """
    mixes, target = checked(mixes, target)
    clients = len(mixes)
    if prior is None:
        prior = torch.full((clients,), 1 / clients, dtype=torch.float64)
    else:
        prior = prior.detach().to("cpu", torch.float64) / float(prior.sum())
    if prior.shape != (clients,) or not bool(((prior >= 0) & (prior < torch.inf)).all()):
        raise InputError(f"prior must be {clients} non-negative numbers, not all 0; got {prior.tolist()}")
    # Equal clients form one kind, with the sum of their weights.
    rows = [(*mix, weight) for mix, weight in zip(mixes.tolist(), prior.tolist(), strict=True)]
    kind_of = {row: kind for kind, row in enumerate(sorted(set(rows)))}
    group = torch.tensor([kind_of[row] for row in rows])
    count = torch.bincount(group).double()
    kinds = torch.tensor(list(kind_of), dtype=torch.float64)
    share = kinds[:, -1] * count
    # The weights sum to 1, so mixes^T w - target is a convex combination of the rows of (mixes - target): the problem
    # is to find the point of their convex hull nearest to 0. The same holds for w - prior, and for both together.
    ties = (torch.eye(len(count), dtype=torch.float64) - share) * (ridge / count).sqrt()
    weights = (_nearest_to_zero(torch.cat([kinds[:, :-1] - target, ties], 1), share) / count)[group]
    return weights, _total_variation(weights, mixes, target)


def checked(mixes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return mixes and target in double precision on the CPU; raise InputError if they are invalid."""
    mixes, target = mixes.detach().to("cpu", torch.float64), target.detach().to("cpu", torch.float64)
    if mixes.ndim != 2 or not len(mixes) or target.shape != mixes.shape[1:]:
        shapes = f"{tuple(mixes.shape)} and {tuple(target.shape)}"
        raise InputError(f"mixes must have one row per client, as long as the target; got shapes {shapes}")
    if not bool(torch.isfinite(mixes).all()):
        raise InputError("mixes must be finite; leave out clients without examples")
    return mixes, target


def _total_variation(weights: Tensor, mixes: Tensor, target: Tensor) -> float:
    return float((weights @ mixes - target).abs().sum()) / 2


def _nearest_to_zero(points: Tensor, weights: Tensor) -> Tensor:
    """Return the weights of the point of the rows' convex hull nearest to 0, by Wolfe's method.

    The method starts at the given weights. The rows must be affinely independent, which any ridge ensures. The nearest
    point of the affine hull of some rows is a least-squares problem. A row is dropped if that point leaves the convex
    hull; a row is added if it lies closer to 0 than the hyperplane through that point.
    """
    weights, used = weights.clone(), weights > 0
    entered = None
    for _ in range(10 * len(points) + 10):
        rows = used.nonzero().flatten()
        first, others = points[rows[0]], points[rows[1:]]
        tail = torch.linalg.lstsq((others - first).T, -first[:, None], driver="gels").solution.flatten()
        best, old = torch.cat([1 - tail.sum(0, keepdim=True), tail]), weights[rows]
        outside = best <= 0
        if bool(outside.any()):
            steps = torch.where(outside, old / (old - best).clamp_min(1e-300), torch.inf)
            leaving = int(steps.argmin())
            weights[rows] = (old + steps[leaving] * (best - old)).clamp_min(0)
            weights[rows[leaving]], used[rows[leaving]] = 0.0, False
            if int(rows[leaving]) == entered and float(steps[leaving]) == 0:
                break  # it entered because of rounding
            continue
        weights[rows] = best
        nearest = weights @ points
        slack = torch.where(used, torch.inf, points @ nearest - nearest @ nearest)
        entered = int(slack.argmin())
        if float(slack[entered]) >= -1e-15:
            break
        used[entered] = True
    return weights / weights.sum()


def chance(target: Tensor, examples: float) -> float:
    """Return the expected squared distance between the target and a sample of n labels from it, (1 - sum p^2) / n.

    Smaller differences between clients do not justify unequal weights.

    >>> chance(torch.tensor([0.5, 0.5]), 100)
    0.005
    """
    return float(1 - target.double().square().sum()) / examples


def population_mix(clients: Population) -> Tensor:
    """Return the fraction of all clients' examples in each class (float64, one entry per class)."""
    totals = clients.label_totals()
    return totals.double() / totals.sum()


def label_skew(clients: Population, most: int = 100) -> float:
    """Return how far clients' labels are from the population's, beyond what chance explains.

    The statistic is the squared distance of the clients' label distributions, each weighted by its n examples. If a
    client's labels are drawn from a distribution at distance d from the population's, its expectation is
    n d^2 + n ``chance`` - d^2. Chance and two of its standard deviations are subtracted, and the rest is divided by the
    sum of n - 1. The result is converted to a total variation, sqrt(C d^2) / 2, as if all C classes deviated equally.

    Args:
        clients: The population.
        most: The number of clients to measure; the first ones are taken.
    """
    target = population_mix(clients)
    measured = range(min(most, len(clients)))
    sizes = torch.tensor([clients.size(client) for client in measured]).to(target)
    mixes = torch.stack([clients.label_mix(client) for client in measured]).to(target)
    second, third = float(target.square().sum()), float(target.pow(3).sum())
    deviation = (2 * len(measured) * max(0.0, second - 2 * third + second**2)) ** 0.5
    excess = float(sizes @ (mixes - target).square().sum(1)) - len(measured) * chance(target, 1) - 2 * deviation
    squared = max(0.0, excess / max(1.0, float((sizes - 1).sum())))
    return float((int((target > 0).sum()) * squared) ** 0.5) / 2


def noisy_counts(counts: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Return label counts with noise that hides each single example; negative counts are clipped to 0.

    The noise k of each count is an integer with probability proportional to exp(-epsilon |k|), the two-sided geometric
    or discrete Laplace distribution. Adding or removing one example changes one count by 1 (sensitivity 1), so one
    release is epsilon-differentially private, up to the 2^-53 grid of the draws. Releases in r rounds cost r epsilon,
    so release once. Changing an example's label changes two counts and costs 2 epsilon. Clipping costs no privacy, but
    raises small counts on average.

    Args:
        counts: The number of examples of each label.
        epsilon: The privacy parameter, above 0; smaller hides more.
        generator: The source of randomness.

    >>> noisy_counts(torch.tensor([500, 0]), 50.0, torch.Generator().manual_seed(0)).tolist()
    [500, 0]
    """
    check_number("epsilon", epsilon, 0, float("inf"), "a number above 0; smaller hides more")
    draws = 1 - torch.rand(2, *counts.shape, dtype=torch.float64, generator=generator, device=generator.device)
    ups = (-draws.log() / epsilon).floor()  # two geometric draws each, P(g) = (1 - e^-epsilon) e^(-epsilon g)
    noise = (ups[0] - ups[1]).to(counts.device, torch.int64)
    return (counts + noise).clamp_min(0)
