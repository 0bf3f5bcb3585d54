"""The check that every fast path passes before it is used: two of its steps agree with the definition."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs, copy_of
from fedcover.params import Params
from fedcover.seeding import generator_states, seeded
from fedcover.structure.calls import call_model, call_with
from fedcover.structure.dropout import Stream
from fedcover.structure.state import plain_attributes
from fedcover.training.memory import is_out_of_memory
from fedcover.training.recipes import LocalSGD
from fedcover.training.step import StepData, start_state, take_step

RECIPE = LocalSGD(lr=0.1, momentum=0.5)
"""The recipe of the two steps."""
STEP = 7
"""The number of the first of the two steps, which dropout depends on."""
CLOSE = 1e-3
"""The largest accepted difference, relative to a tensor's largest value: larger than rounding, far below an error."""
SEEDS = (0, 1)
"""Keys of dropout, and of random values: rounding may move values next to the kink of a ReLU to either side, so one
agreement of two is enough."""

NO_SHIFTS: Params = {}
Batch = tuple[Inputs, Tensor]
Drawn = TypeVar("Drawn")
Result = Sequence[Tensor]
"""The losses of two steps, and all parameters and momenta after them, in the order of the model's parameters."""


def defined_steps(
    model: nn.Module,
    stream: Stream,
    loss: Callable[[Tensor, Tensor], Tensor],
    theta: Params,
    batches: Sequence[Batch],
    recipe: LocalSGD = RECIPE,
    shifts: Params = NO_SHIFTS,
) -> Result:
    """Return the result of two steps by autograd and the definition, with the stream's present key.

    Args:
        model: The model, with keyed dropout.
        stream: The stream of the model's dropout.
        loss: A function from (scores, labels) to the mean loss.
        theta: All parameters; those that require gradients in the model are trained.
        batches: The batch of each step.
        recipe: The recipe.
        shifts: What is added to the gradients of tensors.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = {name: theta[name] for name in names}
    state = start_state(recipe, trained, widths=False, report=False)
    frozen = {name: tensor for name, tensor in theta.items() if name not in names}
    data = StepData(recipe.lr, frozen, *({} for _ in StepData._fields[2:]))
    data = data._replace(start=trained, shifts={name: shifts[name] for name in names if name in shifts})
    losses = []
    for number, (x, y) in enumerate(batches):
        stream.step = STEP + number

        def gradients(shown: Params, x: Inputs = x, y: Tensor = y) -> tuple[Params, Tensor]:
            with torch.enable_grad():
                leaves = {name: shown[name].detach().clone().requires_grad_() for name in names}
                value = loss(call_with(model, {**shown, **leaves}, copy_of(x)), y)
                grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            return dict(zip(names, grads, strict=True)), value.detach()

        state, value = take_step(recipe, gradients, state, data, STEP + number, {})
        losses.append(value)
    return [torch.stack(losses), *(t for name in names for t in (state.theta[name], state.moments[name]["velocity"]))]


def agree(fast: Callable[[int], Result | None], defined: Callable[[int], Result]) -> bool:
    """Return whether a fast path agrees with the definition for one of the seeds; False if it fails.

    Args:
        fast: The result of the fast path for a seed; None if it cannot take the steps.
        defined: The result of the definition for a seed.
    """
    try:
        return any(
            (result := _drawn(fast, seed)) is not None and _close(result, _drawn(defined, seed)) for seed in SEEDS
        )
    except Exception as error:  # such as an operation that a traced step cannot replay
        if is_out_of_memory(error):
            raise
        return False


def _drawn(steps: Callable[[int], Drawn], seed: int) -> Drawn:
    """Return the result for a seed, with the random numbers that a model draws itself the same for every caller."""
    with seeded(seed, "agree"):
        return steps(seed)


def _close(actual: Result, expected: Result) -> bool:
    # Where the definition's values are not finite there is nothing to compare.
    return all(
        bool((a - b).abs().max() <= CLOSE * b.abs().max()) or not bool(torch.isfinite(b).all())
        for a, b in zip(actual, expected, strict=True)
        if b.numel()
    )


def repeats(model: nn.Module, x: Inputs) -> bool:
    """Return whether forward passes depend only on input, parameters and buffers, so that one can be replayed.

    They do not if they draw from Python's or numpy's generators, or change attributes of modules, such as a counter.
    """
    with seeded(0, "repeats"), torch.no_grad():
        before = generator_states(), plain_attributes(model)
        call_model(model, copy_of(x))
        return before == (generator_states(), plain_attributes(model))
