"""Steps of a client that sees the whole model and trains a part of it: nothing else has gradients or moments.

The step is the definition itself, ``take_step``, on compact tensors that hold only the entries inside the mask. What
is computed less is in ``training/steps/part_gradients.py``. Tensors without a trained entry have no gradient, so that
autograd does not go back below the lowest layer that is trained, and saves none of the activations there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcover.data.inputs import Inputs
from fedcover.errors import InputError
from fedcover.params import FixedMask, Mask, Params, device_of
from fedcover.seeding import seeded
from fedcover.structure.calls import call_model
from fedcover.structure.dropout import Stream
from fedcover.structure.state import copy_with_same_parameters
from fedcover.training.client import Job, TrainedClient, batches_of, dropout_key
from fedcover.training.options import PLAIN, TrainingOptions
from fedcover.training.recipes import moment_dtype
from fedcover.training.step import StepData, StepState, reads_start, start_state, take_step
from fedcover.training.steps.agreement import STEP, agree, repeats
from fedcover.training.steps.part_gradients import PartGradients, cut_gradient
from fedcover.training.steps.parts import TrainedPart, part_of
from fedcover.training.steps.stepper import Loss

SUPPORTED = ("complement", "exits", "shifts", "moments", "thresholds")
"""The options that these steps support."""
FLOOR = 1e-3
"""The share of the largest gradient of all tensors relative to which smaller ones are compared: that of a bias before
a batch norm is rounding only."""
NO_REGROWTH = "clients that see the whole model cannot regrow their masks; use complement 'zero'"


def try_partial_steps(model: "PartialModel", job: Job) -> "PartialSteps | None":
    """Return partial steps for a job; None if they do not know its recipe, its options or its model."""
    options = job.options or PLAIN
    if not options.complement or options.has_beyond(*SUPPORTED) or job.recipe.transforms:
        return None
    parts = trained_parts(model.trained, job.mask, job.theta)
    if not parts or not model.agrees(job, parts):
        return None
    return PartialSteps(model, job, options, parts)


def trained_parts(trained: Sequence[str], mask: Mask, theta: Params) -> dict[str, TrainedPart]:
    """Return the part of each trained tensor that a mask keeps; tensors of which it keeps nothing are left out."""
    masked = _masked_parts(mask, device_of(theta))
    parts = {name: masked[name] if name in masked else TrainedPart(None, None, None) for name in trained}
    return {name: part for name, part in parts.items() if part is not None and theta[name].numel()}


def _masked_parts(mask: Mask, device: torch.device) -> Mapping[str, TrainedPart | None]:
    """Return the part of each tensor in a mask, with indices on a device.

    Those on a GPU are computed on the CPU, since each index would be one more wait for the GPU, and a mask that does
    not change stores them.
    """
    if device.type == "cpu":
        return {name: part_of(kept) for name, kept in mask.items()}
    key = ("parts", device)
    stored: dict[str, TrainedPart | None] | None = mask.stored(key) if isinstance(mask, FixedMask) else None
    if stored is None:
        parts = {name: part_of(kept.cpu()) for name, kept in mask.items()}
        stored = {name: part and part.on_device(device) for name, part in parts.items()}
    return mask.keep(key, stored) if isinstance(mask, FixedMask) else stored


class PartialModel:
    """A model that computes gradients of parts of its parameters.

    Args:
        model: The scratch model, with keyed dropout. Its parameters are neither read nor changed.
        stream: The stream of the model's dropout.
        loss: A function from (scores, labels) to the mean loss.
    """

    def __init__(self, model: nn.Module, stream: Stream, loss: Loss) -> None:
        self._pass = _Pass(copy_with_same_parameters(model).train(), loss)
        self.stream = stream
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._agrees: dict[frozenset[str], bool] = {}

    def gradients(
        self,
        shown: Params,
        whole: Params,
        parts: Mapping[str, TrainedPart],
        batch: tuple[Inputs, Tensor],
        narrow: bool = True,
    ) -> tuple[Params, Tensor]:
        """Return the gradients of the parts on a batch, and the loss.

        Args:
            shown: The values of the parts.
            whole: All parameters. The values of parts are written into them, in place.
            parts: The parts.
            batch: The inputs and the labels.
            narrow: Whether to compute the gradients of weights only where they are needed; otherwise they are cut.
        """
        for name, part in parts.items():
            if not part.is_whole:
                part.put(whole[name], shown[name])
        cut: Params = {}
        with torch.enable_grad():
            leaves = {n: (shown if part.is_whole else whole)[n].detach().requires_grad_() for n, part in parts.items()}
            for name, part in parts.items():
                if not part.is_whole:
                    cut_gradient(leaves[name], part, partial(cut.__setitem__, name))
            narrowed = {n: shown[n].detach().requires_grad_() for n, part in parts.items() if narrow and part.is_narrow}
            with PartGradients(narrowed, leaves, parts) if narrowed else nullcontext():
                loss, grads = self._pass.gradients({**whole, **leaves}, batch, [*leaves.values(), *narrowed.values()])
        dense, products = dict(zip(leaves, grads, strict=False)), dict(zip(narrowed, grads[len(leaves) :], strict=True))
        dense |= {name: cut.get(name) for name, part in parts.items() if not part.is_whole}
        return {name: _sum(shown[name], dense[name], products.get(name)) for name in parts}, loss

    def agrees(self, job: Job, parts: Mapping[str, TrainedPart]) -> bool:
        """Return whether gradients on two examples agree with those that are computed whole and cut.

        Answers are kept by the layers whose products are smaller. Steps need no further check, since they are those of
        the definition.
        """
        layers = frozenset(name for name, part in parts.items() if part.is_narrow)
        if layers not in self._agrees:
            with seeded(0, "example"):
                batch = job.population.examples.read(slice(2))
            self._agrees[layers] = repeats(self._pass.model, batch[0]) and agree(
                self._checked(job.theta, parts, batch, True), self._checked(job.theta, parts, batch, False)
            )
        return self._agrees[layers]

    def _checked(
        self, theta: Params, parts: Mapping[str, TrainedPart], batch: tuple[Inputs, Tensor], narrow: bool
    ) -> Callable[[int], Sequence[Tensor]]:
        """Return a function from a seed to the loss and the gradients of the parts."""

        def gradients(seed: int) -> Sequence[Tensor]:
            self.stream.key, self.stream.step = seed, STEP
            compact, whole = start_values(theta, parts)
            grads, loss = self.gradients(compact, whole, parts, batch, narrow)
            floor = FLOOR * torch.stack([grad.abs().max() for grad in grads.values()]).max()
            return [loss, *(torch.cat([grad.flatten(), floor.view(1).to(grad)]) for grad in grads.values())]

        return gradients


class _Pass(nn.Module):
    """A forward and a backward pass under other parameters than the model's own."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss
        self._own = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(
        self, values: Params, batch: tuple[Inputs, Tensor], leaves: list[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the loss on a batch, and the gradients of leaves; None for those that it does not depend on."""
        named = {f"model.{name}": tensor for name, tensor in values.items()}
        loss, grads = functional_call(self, named, (*batch, leaves))
        return loss, grads

    def forward(self, x: Inputs, y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the loss on a batch, and the gradients of leaves; None for those that it does not depend on."""
        loss = self._loss(call_model(self.model, x), y)
        if not loss.requires_grad:
            return loss, [None] * len(leaves)
        grads = torch.autograd.grad(loss, [*leaves, *self._own], allow_unused=True)
        if any(grad is not None for grad in grads[len(leaves) :]):
            raise RuntimeError("the model has references to its parameters, so that others cannot replace them")
        return loss.detach(), grads[: len(leaves)]


def _sum(like: Tensor, *terms: Tensor | None) -> Tensor:
    """Return the sum of terms, some of which may be None for 0."""
    some = [term for term in terms if term is not None]
    return sum(some[1:], some[0]) if some else torch.zeros_like(like)


def start_values(theta: Params, parts: Mapping[str, TrainedPart]) -> tuple[Params, Params]:
    """Return the values of parts, and all parameters, with copies of those into which parts are written."""
    compact = {name: part.cut(theta[name]) for name, part in parts.items()}
    written = {name for name, part in parts.items() if not part.is_whole}
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in theta.items() if name in written
    }
    return compact, {**theta, **copies}


class PartialSteps:
    """The steps of one client, each a call of ``take_step`` on what is inside the mask."""

    def __init__(
        self, model: PartialModel, job: Job, options: TrainingOptions, parts: Mapping[str, TrainedPart]
    ) -> None:
        self._model, self._recipe, self._parts, self._number = model, job.recipe, parts, 0
        model.stream.key = dropout_key(job)
        compact, self._whole = start_values(job.theta, parts)
        self._like = job.theta
        first = next(iter(compact.values()))
        self._data = StepData(
            lr=job.recipe.lr,
            frozen={},
            kept={},
            start=compact if reads_start(job.recipe) else {},
            gains={},
            taus={name: first.new_tensor(tau) for name, tau in options.thresholds.items() if name in parts and tau},
            shifts=self._cut(options.shifts),
            complement={},
        )
        self._state: StepState = start_state(job.recipe, compact, widths=False, report=False)
        for moment, tensors in options.moments.items():
            for name, tensor in self._cut(tensors).items():
                self._state.moments[name][moment] = tensor

    def epochs(self, inputs: Inputs, labels: Tensor, orders: Sequence[Tensor], batch_size: int) -> Tensor:
        """Take the steps of several epochs, and return the losses of the last."""
        losses: list[Tensor] = []
        for order in orders:
            losses = [self._step(batch) for batch in batches_of(inputs, labels, order, batch_size)]
        return torch.stack(losses)

    def values(self, inputs: Inputs, labels: Tensor) -> tuple[Params, Params]:
        """Refuse: only a readjustment of the mask needs it, which is not for clients that see the whole model."""
        raise InputError(NO_REGROWTH)

    def remask(self, old: Mask, new: Mask) -> None:
        """Refuse, for the same reason."""
        raise InputError(NO_REGROWTH)

    def finish(self) -> TrainedClient:
        """Return all parameters, with their complement, and kept moments; there is no gradient report."""
        names = list(self._whole)  # their memory is free as soon as the caller does not need them
        theta = {name: self._restored(name, self._whole.pop(name)) for name in names}
        if not self._recipe.keep_moments:
            return TrainedClient(theta)
        moments = {
            moment: {name: self._expanded(name, moment) for name in self._model.trained}
            for moment in self._recipe.moment_names
        }
        return TrainedClient(theta, None, moments)

    def _cut(self, tensors: Mapping[str, Tensor]) -> Params:
        return {name: part.cut(tensors[name]) for name, part in self._parts.items() if name in tensors}

    def _restored(self, name: str, whole: Tensor) -> Tensor:
        """Return a parameter with the present values of its part."""
        part = self._parts.get(name)
        if part is None or part.is_whole:
            return whole if part is None else self._state.theta[name]
        part.put(whole, self._state.theta[name])
        return whole

    def _expanded(self, name: str, moment: str) -> Tensor:
        """Return a moment in the shape of its tensor, with 0 outside the mask."""
        shape, dtype = self._like[name].shape, moment_dtype(moment, self._like[name].dtype)
        whole = torch.zeros(shape, dtype=dtype, device=self._like[name].device)
        if name in self._parts:
            self._parts[name].put(whole, self._state.moments[name][moment])
        return whole

    def _step(self, batch: tuple[Inputs, Tensor]) -> Tensor:
        def gradients(shown: Params) -> tuple[Params, Tensor]:
            return self._model.gradients(shown, self._whole, self._parts, batch)

        self._model.stream.step = self._number
        self._state, loss = take_step(self._recipe, gradients, self._state, self._data, self._number, {})
        self._number += 1
        return loss
