"""check_transform names the law that a transform breaks."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

import fedcover as fc

CALLS = count()


def in_place(grads: Any, at: Any) -> Any:
    for grad in grads.values():
        grad.mul_(2)
    return grads


BROKEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "raises": (lambda grads, at: {n: g @ g for n, g in grads.items()}, "runs"),
    "drops a tensor": (lambda grads, at: {"weight": grads["weight"]}, "names and shapes"),
    "another shape": (lambda grads, at: {n: g.sum() for n, g in grads.items()}, "names and shapes"),
    "another type": (lambda grads, at: {n: g.double() for n, g in grads.items()}, "names and shapes"),
    "in place": (in_place, "inputs are left alone"),
    "random": (lambda grads, at: {n: g + torch.randn_like(g) for n, g in grads.items()}, "pure"),
    "counts": (lambda grads, at: {n: g + next(CALLS) for n, g in grads.items()}, "pure"),
    "divides by 0": (lambda grads, at: {n: g / (at.step - 1) for n, g in grads.items()}, "finite"),
    "depends on data in Python": (
        lambda grads, at: {n: g if float(g.sum()) > 0 else -g for n, g in grads.items()}, "one client alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_law_is_named(name: str) -> None:
    function, law = BROKEN[name]
    with pytest.raises(fc.InputError, match=f"breaks the law '{law}'"):
        fc.check_transform(fc.gradient_transform(function))


def test_good_transforms_pass_and_functions_are_refused() -> None:
    @fc.gradient_transform
    def signs(grads: Any, at: fc.StepView) -> Any:
        return {name: grad.sign() + at.theta[name] - at.start[name] for name, grad in grads.items()}

    fc.check_transform(signs)
    with pytest.raises(fc.InputError, match=r"decorate it with @fedcover\.gradient_transform"):
        fc.check_transform(print)  # type: ignore[arg-type]
