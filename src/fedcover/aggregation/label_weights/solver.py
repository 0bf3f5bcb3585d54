"""Weights on clients whose labels, mixed, are nearest to the population's; and label counts that may be shown."""

import torch
from torch import Tensor

from fedcover.data import Population
from fedcover.errors import InputError, check_number

RIDGE = 1e-10
"""What a squared distance to the prior costs beside a squared distance to the target: it decides ties alone."""


def nearest_weights(
    mixes: Tensor, target: Tensor, prior: Tensor | None = None, ridge: float = RIDGE
) -> tuple[Tensor, float]:
    """Weights on the clients whose mixed histogram is nearest to the target, and the distance left.

    The weights solve  min ||mixes^T w - target||^2 + ridge ||w - prior||^2  over w >= 0, sum w = 1, with one
    row of ``mixes`` for each client and a uniform prior unless one is given. The tiny ridge decides between
    equal optima; a larger one buys less variance (a smaller sum of w^2) with more bias. Equal clients get
    equal weights, bit for bit. The distance is total variation, half the sum of absolute differences.

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
        raise InputError(f"the prior is {prior.tolist()}; give {clients} numbers, none negative, not all 0")
    # Equal clients are one, which weighs as much as they do together.
    rows = [(*mix, own) for mix, own in zip(mixes.tolist(), prior.tolist(), strict=True)]
    places = {row: place for place, row in enumerate(sorted(set(rows)))}
    group = torch.tensor([places[row] for row in rows])
    count = torch.bincount(group).double()
    kinds = torch.tensor(list(places), dtype=torch.float64)
    share = kinds[:, -1] * count
    # As the weights sum to 1, mixes^T w - target mixes the rows of (mixes - target): what is sought is
    # the point of their convex hull that is nearest to 0. So it is for w - prior, and for both together.
    ties = (torch.eye(len(count), dtype=torch.float64) - share) * (ridge / count).sqrt()
    weights = (_nearest_to_zero(torch.cat([kinds[:, :-1] - target, ties], 1), share) / count)[group]
    return weights, _total_variation(weights, mixes, target)


def checked(mixes: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes and target in double precision on the CPU, or an error that says what is wrong with them."""
    mixes, target = mixes.detach().to("cpu", torch.float64), target.detach().to("cpu", torch.float64)
    if mixes.ndim != 2 or not len(mixes) or target.shape != mixes.shape[1:]:
        shapes = f"{tuple(mixes.shape)} and {tuple(target.shape)}"
        raise InputError(f"mixes and target have shapes {shapes}; give one row for each client, as long as the target")
    if not bool(torch.isfinite(mixes).all()):
        raise InputError("the clients' mixes must be finite numbers; leave out clients that have no examples")
    return mixes, target


def _total_variation(weights: Tensor, mixes: Tensor, target: Tensor) -> float:
    return float((weights @ mixes - target).abs().sum()) / 2


def _nearest_to_zero(points: Tensor, weights: Tensor) -> Tensor:
    """Weights of the point of the rows' convex hull that is nearest to 0, by Wolfe's method from given weights.

    The rows must be affinely independent, as any ridge makes them. The least point of the affine hull of
    some rows is a least-squares problem; where it leaves the convex hull a row is dropped, and where another
    row lies on the near side of the point found, that row is taken in.
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
                break  # what made it enter was rounding
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
    """How much a mix of so many labels varies by chance alone, (1 - sum p^2) / n: less is not worth a weight.

    >>> chance(torch.tensor([0.5, 0.5]), 100)
    0.005
    """
    return float(1 - target.double().square().sum()) / examples


def population_mix(clients: Population) -> Tensor:
    """The fraction of all clients' examples in each class (float64, one entry per class)."""
    totals = clients.label_totals()
    return totals.double() / totals.sum()


def label_skew(clients: Population, most: int = 100) -> float:
    """How far clients' labels are from the population's, beyond what chance makes of few examples.

    It is measured on the first clients by the squared distance of their mixes, each weighed by its n examples. If a
    client's labels are drawn at distance d from the population's, that is n d^2 + n ``chance`` - d^2 on average: chance
    and two of its standard deviations are taken off, and n - 1 is what is left of n. It is read as a total variation:
    what that is if all C classes are off alike, half the root of C d^2.
    """
    target = population_mix(clients)
    looked = range(min(most, len(clients)))
    sizes = torch.tensor([clients.size(client) for client in looked]).to(target)
    mixes = torch.stack([clients.label_mix(client) for client in looked]).to(target)
    second, third = float(target.square().sum()), float(target.pow(3).sum())
    deviation = (2 * len(looked) * max(0.0, second - 2 * third + second**2)) ** 0.5
    off = float(sizes @ (mixes - target).square().sum(1)) - len(looked) * chance(target, 1) - 2 * deviation
    squared = max(0.0, off / max(1.0, float((sizes - 1).sum())))
    return float((int((target > 0).sum()) * squared) ** 0.5) / 2


def noisy_counts(counts: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """Label counts that hide each single example: whole-number noise is added, then what is below 0 becomes 0.

    The noise k of each count has probability proportional to exp(-epsilon |k|), the two-sided geometric or
    discrete Laplace law. Adding or removing one example changes one count by 1 (sensitivity 1), so one
    release is epsilon-differentially private for it, up to the 2^-53 grid of the draws; releases in r rounds
    cost r epsilon, so release once. Changing an example's label changes two counts and costs 2 epsilon.
    Clipping costs no privacy but raises small counts on average.

    >>> noisy_counts(torch.tensor([500, 0]), 50.0, torch.Generator().manual_seed(0)).tolist()
    [500, 0]
    """
    check_number("epsilon", epsilon, 0, float("inf"), "a number above 0; smaller hides more")
    draws = 1 - torch.rand(2, *counts.shape, dtype=torch.float64, generator=generator, device=generator.device)
    ups = (-draws.log() / epsilon).floor()  # two geometric numbers each, P(g) = (1 - e^-epsilon) e^(-epsilon g)
    noise = (ups[0] - ups[1]).to(counts.device, torch.int64)
    return (counts + noise).clamp_min(0)
