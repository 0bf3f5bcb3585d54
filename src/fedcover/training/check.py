"""``check_transform``: find the law that a gradient transform breaks."""

import torch
from torch.func import vmap

from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.transforms import GradientTransform, StepView

LAWS = {
    "runs": "a transform must not raise for gradients of any shape",
    "names and shapes": "a transform must return a gradient of the same shape and type for every tensor",
    "inputs are left alone": "a transform must not change the tensors or dicts that it gets",
    "pure": "a transform must return the same gradients for the same arguments, and draw no random numbers",
    "finite": "a transform must return finite gradients for finite arguments",
    "one client alone": "a transform must give each of several clients what it gives the client alone",
}
"""The laws that ``check_transform`` tests, each with its rule."""
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}
CLOSE = 1e-5


def check_transform(transform: GradientTransform, seed: int = 0) -> None:
    """Raise InputError, naming the law, if a gradient transform breaks a law of its contract.

    Args:
        transform: The transform, from ``gradient_transform``.
        seed: Seed of the random gradients and values.

    Raises:
        InputError: If a law is broken.

    >>> from fedcover.training.transforms import gradient_transform
    >>> check_transform(gradient_transform(lambda gradients, at: {name: -g for name, g in gradients.items()}))
    """
    if not isinstance(transform, GradientTransform):
        raise InputError(f"{transform!r} is not a gradient transform; decorate it with @fedcover.gradient_transform")
    clients = [_Case(seed + number) for number in range(3)]
    alone = [_checked(transform, case) for case in clients]

    def one(grads: Params, theta: Params, start: Params) -> Params:
        return transform(dict(grads), StepView(theta, start, torch.tensor(1)))

    stacks = [
        {name: torch.stack([getattr(case, part)[name] for case in clients]) for name in SHAPES}
        for part in ("grads", "theta", "start")
    ]
    try:
        together = vmap(one)(*stacks)
    except Exception as error:
        raise _broken(transform, "one client alone", f"mapped over clients it raised {error}") from error
    for number, expected in enumerate(alone):
        for name, grad in expected.items():
            if not torch.allclose(together[name][number], grad, rtol=CLOSE, atol=CLOSE):
                raise _broken(transform, "one client alone", f"'{name}' differs")


class _Case:
    """The arguments of one call."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.grads, self.theta, self.start = (
            {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()} for _ in range(3)
        )

    def call(self, transform: GradientTransform) -> Params:
        return transform(self.grads, StepView(self.theta, self.start, 1))


def _checked(transform: GradientTransform, case: _Case) -> Params:
    """Return the transformed gradients of one client, after checking them."""
    before = [{name: t.clone() for name, t in part.items()} for part in (case.grads, case.theta, case.start)]
    generator = torch.default_generator.get_state()
    try:
        grads = case.call(transform)
    except Exception as error:
        raise _broken(transform, "runs", f"it raised {type(error).__name__}: {error}") from error
    if not isinstance(grads, dict) or set(grads) != set(SHAPES):
        got = sorted(grads) if isinstance(grads, dict) else type(grads).__name__
        raise _broken(transform, "names and shapes", f"it returned {got} for {sorted(SHAPES)}")
    for name, grad in grads.items():
        like = before[0][name]
        if not isinstance(grad, torch.Tensor) or (grad.shape, grad.dtype) != (like.shape, like.dtype):
            raise _broken(transform, "names and shapes", f"'{name}' has another shape or type")
        if not bool(torch.isfinite(grad).all()):
            raise _broken(transform, "finite", f"'{name}' is not finite")
    for part, old in zip((case.grads, case.theta, case.start), before, strict=True):
        if set(part) != set(old) or not all(torch.equal(part[name], old[name]) for name in old):
            raise _broken(transform, "inputs are left alone", "a tensor or a dict changed")
    again = case.call(transform)
    drew = not torch.equal(generator, torch.default_generator.get_state())
    if drew or not all(torch.equal(again[name], grad) for name, grad in grads.items()):
        raise _broken(transform, "pure", "it drew random numbers" if drew else "a second call gave another result")
    return grads


def _broken(transform: GradientTransform, law: str, reason: str) -> InputError:
    return InputError(f"gradient transform {transform!r} breaks the law '{law}': {LAWS[law]}; {reason}")
