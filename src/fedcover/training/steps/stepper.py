"""Fast SGD steps of one client: traced once to plain operations, then replayed on flat buffers.

A step on a small batch is little arithmetic; calling modules and autograd costs several times as much.
Therefore the operations of loss and gradients are traced once for each batch shape. Parameters and momenta are
in one flat buffer each, so that the update is one operation, and the product that computes the gradient of a
weight matrix adds directly to its momentum. A model that cannot be traced is trained by autograd, and a chain
of simple layers is trained by the C library, one epoch per call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs
from fedcover.params import Mask, Params, params_of, prune, put_params
from fedcover.structure.calls import call_model
from fedcover.structure.dropout import DropoutCall, Stream, scales
from fedcover.training.client import batches_of
from fedcover.training.steps.agreement import RECIPE, STEP, agree, defined_steps, repeats
from fedcover.training.steps.native import ChainState, Matcher
from fedcover.training.steps.rule import Rule
from fedcover.training.steps.traced import TracedStep, trace_step
from fedcover.training.transforms import TINY

Loss = Callable[[Tensor, Tensor], Tensor]

ALIGN = 16
"""Tensors begin at multiples of this many entries."""
NONE: Mapping[str, float] = MappingProxyType({})
MOST_TENSORS = 24
"""The largest number of trained tensors of a model that is traced.

Tracing takes tenths of a second for each batch shape, more for deeper models; what it saves is the time to call
operations, which matters only where they are small. Deeper models are left to autograd.
"""
AHEAD = 1 << 16
"""The approximate number of dropout entries that are drawn at once, at most."""
FIRST = 16
"""The number of steps for which dropout is drawn at first; each later draw is twice as long, up to ``AHEAD``."""


@dataclass
class Flat:
    """The trained parameters of one dtype, their momenta and their mask, each as one flat buffer."""

    names: list[str]
    theta: Tensor
    velocity: Tensor
    momenta: list[Tensor]
    """The velocity as one view per name."""
    places: list[tuple[int, int]]
    """For each name, the first of its entries and their number."""
    kept: Tensor | None = None
    """1 where an entry is kept and 0 where it is pruned; None if all are kept. With gains g, g^2 where kept."""
    gain: Tensor | None = None
    """The factor of ``theta`` during training; None for 1."""
    anchor: Tensor | None = None
    """The rule's anchors, times ``gain``; None for 0."""
    shift: Tensor | None = None
    """The rule's shifts, divided by ``gain``; None for 0."""

    def over(self, values: Mapping[str, Tensor] | Mapping[str, float], fill: float = 1.0) -> Tensor | None:
        """Return values by name in the layout of theta, with ``fill`` for missing names; None if all are missing."""
        if not any(name in values for name in self.names):
            return None
        flat = torch.full_like(self.theta, fill)
        for name, (at, size) in zip(self.names, self.places, strict=True):
            if name in values:
                value = values[name]
                flat[at : at + size] = value.reshape(-1) if isinstance(value, Tensor) else value
        return flat

    def descend(self, direction: Tensor, lr: float) -> None:
        """Step along a direction, inside the mask."""
        if self.kept is None:
            self.theta.sub_(direction, alpha=lr)
        else:
            self.theta.addcmul_(direction, self.kept, value=-lr)

    def split(self, values: Tensor) -> Params:
        """Return copies of the parts of a buffer in the layout of theta, by name."""
        shapes = zip(self.names, self.places, self.momenta, strict=True)
        return {name: values[at : at + size].view_as(v).clone() for name, (at, size), v in shapes}


class Stepper:
    """A taker of SGD steps on a scratch model, whose parameters it moves into flat buffers, ``flats``.

    Args:
        model: The scratch model, with keyed dropout.
        stream: The stream of the model's dropout.
        loss: A function from (scores, labels) to the mean loss.
        trace: Whether to trace steps; False leaves every step to autograd.
    """

    def __init__(self, model: nn.Module, stream: Stream, loss: Loss, trace: bool = True) -> None:
        self.model, self.stream, self.loss = model.train(), stream, loss
        self._trace = trace
        self.flats = _lay_out(model)
        self._matcher = Matcher(model, stream, loss)
        self._traced_steps: dict[object, TracedStep | None] = {}
        self.rule = Rule(0.0, 0.0)
        self._gains: Mapping[str, float] = NONE
        self._frozen: Params = {}
        """Frozen tensors with gains: multiplying by a gain and dividing by it may round."""
        self.number = 0
        """The number of steps taken since the start."""
        self._dropout: dict[DropoutCall, tuple[int, Sequence[Tensor]]] = {}
        """For each dropout layer, the first step and the multipliers from that step on."""

    def start(
        self,
        theta: Params,
        mask: Mask,
        rule: Rule,
        key: int,
        gains: Mapping[str, float] = NONE,
        complement: bool = False,
    ) -> None:
        """Reset to theta o m with zero momentum, or with a complement to theta, of which only theta o m is trained.

        A tensor with gain g is trained as theta' = g theta with the step size times g^2, which is equivalent, and
        ``params`` divides by g.

        Args:
            theta: The parameters.
            mask: The client's mask.
            rule: The rule of the steps.
            key: The key of the client's dropout.
            gains: The factors of tensors in forward passes, by name.
            complement: Whether entries outside the mask stay at their values in theta, instead of 0.
        """
        self.rule, self._gains = rule, gains
        self.stream.key, self.number = key, 0
        self._dropout.clear()
        fixed = [name for name, p in self.model.named_parameters() if name in gains and not p.requires_grad]
        self._frozen = prune({name: theta[name] for name in fixed}, mask)
        theta = {name: t * gains[name] if name in gains else t for name, t in theta.items()} if gains else theta
        put_params(self.model, theta if complement else prune(theta, mask))
        for flat in self.flats:
            flat.velocity.zero_()
            flat.kept = flat.over(mask)
            flat.gain = flat.over(gains)
            if flat.gain is not None:
                squared = flat.gain.square()
                flat.kept = squared if flat.kept is None else flat.kept.mul_(squared)
            flat.anchor, flat.shift = flat.over(rule.anchors, fill=0.0), flat.over(rule.shifts, fill=0.0)
            if flat.gain is not None:
                flat.anchor = None if flat.anchor is None else flat.anchor.mul_(flat.gain)
                flat.shift = None if flat.shift is None else flat.shift.div_(flat.gain)

    def remask(self, old: Mask, new: Mask) -> None:
        """Continue with another mask; entries that it drops or adds become 0, with zero momentum."""
        for flat in self.flats:
            before, after = flat.over(old), flat.over(new)
            if before is None or after is None:
                continue
            stays = (before != 0) & (after != 0)
            flat.theta.masked_fill_(~stays, 0.0)
            flat.velocity.masked_fill_(~stays, 0.0)
            flat.kept = after if flat.gain is None else after.mul_(flat.gain.square())

    def step(self, x: Inputs, y: Tensor) -> Tensor:
        """Take one step on a batch, and return the loss before it."""
        if self.rule.is_apart:
            return self._step_apart(x, y)
        loss = self._gradients_into_momenta(x, y, self.rule.momentum)
        for flat in self.flats:
            self._correct(flat)
            flat.descend(flat.velocity, self.rule.lr)
        self.number += 1
        return loss

    def _step_apart(self, x: Inputs, y: Tensor) -> Tensor:
        """Take one step for which the gradients of all tensors must be known."""
        momentum, before = self.rule.momentum, [flat.velocity.clone() for flat in self.flats]
        loss = self.gradients(x, y)
        scale = self._clipping() if self.rule.clip else None
        for flat, velocity in zip(self.flats, before, strict=True):
            grads = flat.velocity if scale is None else flat.velocity.mul_(scale)
            self._correct(flat)
            velocity.mul_(momentum).add_(grads)
            flat.descend(grads.add_(velocity, alpha=momentum) if self.rule.nesterov else velocity, self.rule.lr)
            flat.velocity.copy_(velocity)
        self.number += 1
        return loss

    def _clipping(self) -> Tensor:
        """Return the factor that clips the gradients; ``kept`` has the squares of gains, which they lack."""
        norm = torch.stack([_square_sum(flat) for flat in self.flats]).sum().sqrt()
        return (self.rule.clip / norm.clamp_min(TINY)).clamp(max=1.0)

    def _correct(self, flat: Flat) -> None:
        """Add to the momenta what the rule adds. With a gain they are gradients by ``gain`` times a parameter."""
        if self.rule.strength:
            away = flat.theta if flat.anchor is None else flat.theta - flat.anchor
            if flat.gain is None:
                flat.velocity.add_(away, alpha=self.rule.strength)
            else:
                flat.velocity.addcdiv_(away, flat.gain.square(), value=self.rule.strength)
        if flat.shift is not None:
            flat.velocity.add_(flat.shift)

    def epochs(self, inputs: Inputs, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor:
        """Take the steps of several epochs, each with its own order of the examples; return the losses of the last."""
        losses = self._by_chain(inputs, labels, orders, batch_size) if isinstance(inputs, Tensor) else None
        if losses is not None:
            return losses
        for order in orders:
            steps = [self.step(x, y) for x, y in batches_of(inputs, labels, order, batch_size)]
        return torch.stack(steps)

    def gradients(self, x: Inputs, y: Tensor, loss: Loss | None = None) -> Tensor:
        """Return the loss on a batch, and replace the momenta by the gradients, at pruned entries too.

        Args:
            x: The inputs.
            y: The labels.
            loss: Another loss function than the stepper's; it is left to autograd.
        """
        for flat in self.flats:
            flat.velocity.zero_()
        return self._gradients_into_momenta(x, y, 0.0) if loss is None else self._by_autograd(x, y, 0.0, loss)

    def _gradients_into_momenta(self, x: Inputs, y: Tensor, momentum: float) -> Tensor:
        """Add the gradients on a batch to the decayed momenta, and return the loss."""
        if isinstance(x, Tensor) and (traced := self._traced_step(x, y)) is not None:
            return self._by_traced(traced, x, y, momentum)
        return self._by_autograd(x, y, momentum)

    @property
    def trained(self) -> list[str]:
        """The names of the tensors that are trained."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def show(self, theta: Params) -> None:
        """Set the parameters of the model."""
        put_params(self.model, theta)

    def velocities(self) -> Params:
        """Return the momenta, by name; they are views, which the next step overwrites."""
        return {name: v for flat in self.flats for name, v in zip(flat.names, flat.momenta, strict=True)}

    def params(self) -> Params:
        """Return a copy of the model's parameters, divided by their gains."""
        theta = params_of(self.model)
        theta = {name: t / self._gains[name] if name in self._gains else t for name, t in theta.items()}
        return {name: self._frozen.get(name, t) for name, t in theta.items()}

    def _by_chain(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor | None:
        """Take the steps of several epochs by the C library; return None, with nothing done, if it cannot."""
        if not self._trace or len(self.flats) != 1:
            return None
        (flat,) = self.flats
        if flat.gain is not None:  # the library only distinguishes kept and pruned
            return None
        places = dict(zip(flat.names, flat.places, strict=True))
        chain = self._matcher.find(inputs, labels, orders, batch_size, places, self.rule)
        if chain is None:
            return None
        state = ChainState(
            *(flat.theta, flat.velocity, flat.kept, flat.anchor, flat.shift),
            *(self.rule, self.stream.key, self.number),
        )
        losses = chain.epochs(state, inputs, labels, orders, batch_size)
        self.number += 0 if losses is None else len(orders) * len(losses)
        return losses

    def _traced_step(self, x: Tensor, y: Tensor) -> TracedStep | None:
        """Return the traced step for batches of this shape, cached; None if they are left to autograd."""
        key = (x.shape, x.dtype, y.shape, y.dtype)
        if key not in self._traced_steps:
            pays = self._trace and len(self.trained) <= MOST_TENSORS and repeats(self.model, x)
            traced = trace_step(self.model, self.stream, self.loss, x, y, self.velocities()) if pays else None
            self._traced_steps[key] = traced if traced is not None and self._agrees(traced, x, y) else None
        return self._traced_steps[key]

    def _agrees(self, traced: TracedStep, x: Tensor, y: Tensor) -> bool:
        """Return whether a traced step agrees with the definition on a batch; the state stays as it is."""
        before = [(flat.theta.clone(), flat.velocity.clone(), flat.kept) for flat in self.flats]
        settings = self.number, self.stream.key
        theta = params_of(self.model)

        def fast(seed: int) -> list[Tensor]:
            put_params(self.model, theta)
            self.number, self.stream.key = STEP, seed
            self._dropout.clear()
            for flat in self.flats:
                flat.velocity.zero_()
                flat.kept = None
            losses = []
            for _ in range(2):
                losses.append(self._by_traced(traced, x.clone(), y, RECIPE.momentum))
                for flat in self.flats:
                    flat.descend(flat.velocity, RECIPE.lr)
                self.number += 1
            values, velocities = params_of(self.model), self.velocities()
            return [torch.stack(losses), *(t.clone() for n in self.trained for t in (values[n], velocities[n]))]

        def defined(seed: int) -> Sequence[Tensor]:
            self.stream.key = seed
            return defined_steps(self.model, self.stream, self.loss, theta, [(x, y), (x, y)])

        try:
            return agree(fast, defined)
        finally:
            self._dropout.clear()
            self.number, self.stream.key = settings
            for flat, (values, velocity, kept) in zip(self.flats, before, strict=True):
                flat.theta.copy_(values)
                flat.velocity.copy_(velocity)
                flat.kept = kept

    def _by_traced(self, traced: TracedStep, x: Tensor, y: Tensor, momentum: float) -> Tensor:
        return traced.run(x, y, momentum, *[self._scale(call, x.device) for call in traced.calls])

    def _scale(self, call: DropoutCall, device: torch.device) -> Tensor:
        """Return the multipliers of a dropout layer at this step; they are drawn for many steps at once."""
        first, drawn = self._dropout.get(call, (0, ()))
        if not first <= self.number < first + len(drawn):
            ahead = max(1, min(AHEAD // torch.Size(call.shape).numel(), max(FIRST, 2 * len(drawn))))
            first = self.number
            steps = torch.arange(first, first + ahead, device=device)
            drawn = scales(self.stream.key, steps, call, device).unbind()
            self._dropout[call] = (first, drawn)
        return drawn[self.number - first]

    def _by_autograd(self, x: Inputs, y: Tensor, momentum: float, loss_function: Loss | None = None) -> Tensor:
        self.stream.step = self.number
        with torch.enable_grad():
            trained = [p for p in self.model.parameters() if p.requires_grad]
            loss = (loss_function or self.loss)(call_model(self.model, x), y)
            gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        grads = dict(zip(names, gradients, strict=True))
        for flat in self.flats:
            for name, v in zip(flat.names, flat.momenta, strict=True):
                v.mul_(momentum).add_(grads[name])
        return loss.detach()


def _lay_out(model: nn.Module) -> list[Flat]:
    """Move the trained parameters of a model into flat buffers, one for each dtype."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    flats = []
    for dtype in dict.fromkeys(p.dtype for _, p in trained):
        of_dtype = [(name, p) for name, p in trained if p.dtype == dtype]
        places, at = [], 0
        for _, p in of_dtype:
            places.append((at, p.numel()))
            at += -(-p.numel() // ALIGN) * ALIGN
        theta, velocity = of_dtype[0][1].new_zeros(at).detach(), of_dtype[0][1].new_zeros(at).detach()
        momenta = []
        with torch.no_grad():
            for (_, p), (start, size) in zip(of_dtype, places, strict=True):
                view = theta[start : start + size].view(p.shape)
                view.copy_(p)
                p.data = view
                momenta.append(velocity[start : start + size].view(p.shape))
        flats.append(Flat([name for name, _ in of_dtype], theta, velocity, momenta, places))
    return flats


def _square_sum(flat: Flat) -> Tensor:
    """Return the sum of the squares of the gradients in a flat buffer's momenta, inside the mask."""
    squares = flat.velocity.to(torch.promote_types(flat.velocity.dtype, torch.float32)).square()
    if flat.kept is not None:
        squares = torch.where(flat.kept != 0, squares * flat.kept, 0.0)
    return squares.sum(dtype=torch.float64)
