"""One client's SGD step, fast: traced once to plain operations, then replayed on flat buffers.

A step on a small batch is little arithmetic; calling modules and autograd costs several times as much.
So the operations of loss and gradients are found once for each shape of batch. Parameters and momenta lie
in one stretch of memory each, so the update is one operation, and a product that makes the gradient of a
weight matrix adds straight to its momentum. A model that cannot be traced is trained by autograd, and one
that is a chain of simple layers by the C library, an epoch at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedcover.params import Mask, Params, params_of, prune, put_params
from fedcover.seeding import ambient
from fedcover.structure.dropout import DropoutCall, Stream, scales
from fedcover.training.steps.native import ChainState, Matcher
from fedcover.training.steps.traced import TracedStep, trace_step

Loss = Callable[[Tensor, Tensor], Tensor]

ALIGN = 16
NONE: Mapping[str, float] = MappingProxyType({})
CLOSE = 1e-3
"""How far a program may be from autograd, as a share of the largest value; an error is far larger, rounding smaller."""
AHEAD = 1 << 16
"""About how many places of dropout are drawn at once."""


@dataclass
class Flat:
    """The trained parameters of one type, their momenta and their mask, each as one stretch of memory."""

    names: list[str]
    theta: Tensor
    velocity: Tensor
    momenta: list[Tensor]
    """The velocity as views, one for each name."""
    places: list[tuple[int, int]]
    """Where each name's entries begin, and how many there are."""
    kept: Tensor | None = None
    """1 where an entry is kept and 0 where it is pruned; None if nothing is. Under gains g it is g^2 where kept."""
    gain: Tensor | None = None
    """What ``theta`` is multiplied by while it is trained; None for 1."""

    def over(self, values: Mapping[str, Tensor] | Mapping[str, float]) -> Tensor | None:
        """Values by name laid out as theta is, 1 where there are none; None if there are none at all."""
        if not any(name in values for name in self.names):
            return None
        found = torch.ones_like(self.theta)
        for name, (at, size) in zip(self.names, self.places, strict=True):
            if name in values:
                value = values[name]
                found[at : at + size] = value.reshape(-1) if isinstance(value, Tensor) else value
        return found

    def split(self, values: Tensor) -> Params:
        """A stretch laid out as theta is, by name, as copies."""
        shapes = zip(self.names, self.places, self.momenta, strict=True)
        return {name: values[at : at + size].view_as(v).clone() for name, (at, size), v in shapes}


class Stepper:
    """Takes SGD steps on a scratch model, whose parameters it moves into memory of its own, ``flats``.

    ``trace=False`` leaves every step to autograd.
    """

    def __init__(self, model: nn.Module, stream: Stream, loss: Loss, trace: bool = True) -> None:
        self.model, self.stream, self.loss = model.train(), stream, loss
        self._trace = trace
        self.flats = _lay_out(model)
        self._recogniser = Matcher(model, stream, loss)
        self._traced_steps: dict[object, TracedStep | None] = {}
        self.lr = self.momentum = 0.0
        self.exact = False
        self._gains: Mapping[str, float] = NONE
        self._still: Params = {}
        """What is not trained and has a gain: a product with it and a division by it may round."""
        self.number = 0
        """Steps taken so far."""
        self._drawn: dict[DropoutCall, tuple[int, Sequence[Tensor]]] = {}

    def start(
        self,
        theta: Params,
        mask: Mask,
        lr: float,
        momentum: float,
        key: int,
        exact: bool = False,
        gains: Mapping[str, float] = NONE,
    ) -> None:
        """Be theta o m, at rest, before step 0; ``key`` is that of the client's dropout.

        Pruned gradients are multiplied by 0, which a gradient that is not finite survives. ``exact`` cuts them out
        instead, and is slower. A model whose tensor is used as g theta is trained as theta' = g theta with the step
        size times g^2, which is the same, and ``params`` divides by g.
        """
        self.lr, self.momentum, self.exact, self._gains = lr, momentum, exact, gains
        self.stream.key, self.number = key, 0
        self._drawn.clear()
        fixed = [name for name, p in self.model.named_parameters() if name in gains and not p.requires_grad]
        self._still = prune({name: theta[name] for name in fixed}, mask)
        theta = {name: t * gains[name] if name in gains else t for name, t in theta.items()} if gains else theta
        put_params(self.model, prune(theta, mask))
        for flat in self.flats:
            flat.velocity.zero_()
            flat.kept = flat.over(mask)
            flat.gain = flat.over(gains)
            if flat.gain is not None:
                squared = flat.gain.square()
                flat.kept = squared if flat.kept is None else flat.kept.mul_(squared)

    def remask(self, old: Mask, new: Mask) -> None:
        """Go on under another mask: what it drops is 0, and what it adds begins at 0 and at rest."""
        for flat in self.flats:
            before, after = flat.over(old), flat.over(new)
            if before is None or after is None:
                continue
            stays = (before != 0) & (after != 0)
            flat.theta.masked_fill_(~stays, 0.0)
            flat.velocity.masked_fill_(~stays, 0.0)
            flat.kept = after if flat.gain is None else after.mul_(flat.gain.square())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step on a batch; its loss before the step."""
        traced = None if self.exact else self._traced_step(x, y)
        loss = self._by_autograd(x, y) if traced is None else self._by_traced(traced, x, y)
        for flat in self.flats:
            if flat.kept is None:
                flat.theta.sub_(flat.velocity, alpha=self.lr)
            else:
                flat.theta.addcmul_(flat.velocity, flat.kept, value=-self.lr)
        self.number += 1
        return loss

    def epochs(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor:
        """Take the steps of several epochs, each over the examples in an order of its own; the losses of the last."""
        losses = self._by_chain(inputs, labels, orders, batch_size)
        if losses is not None:
            return losses
        for order in orders:
            xs, ys = (data.index_select(0, order).split(batch_size) for data in (inputs, labels))
            found = [self.step(x, y) for x, y in zip(xs, ys, strict=True)]
        return torch.stack(found)

    def gradients(self, x: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
        """The loss on a batch; its gradients, those of pruned entries too, now stand where the momenta were.

        Another ``loss`` than the stepper's own is left to autograd.
        """
        momentum, exact = self.momentum, self.exact
        for flat in self.flats:
            flat.velocity.zero_()
        self.momentum, self.exact = 0.0, False
        try:
            traced = self._traced_step(x, y) if loss is None else None
            return self._by_autograd(x, y, loss) if traced is None else self._by_traced(traced, x, y)
        finally:
            self.momentum, self.exact = momentum, exact

    def params(self) -> Params:
        """A copy of the model's parameters as they stand."""
        found = params_of(self.model)
        found = {name: t / self._gains[name] if name in self._gains else t for name, t in found.items()}
        return {name: self._still.get(name, t) for name, t in found.items()}

    def _by_chain(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int) -> Tensor | None:
        """The same by the C library; None, with nothing done, if it cannot."""
        if not self._trace or self.exact or len(self.flats) != 1:
            return None
        (flat,) = self.flats
        if flat.gain is not None:  # the library knows kept and pruned alone
            return None
        places = dict(zip(flat.names, flat.places, strict=True))
        chain = self._recogniser.find(inputs, labels, orders, batch_size, places)
        if chain is None:
            return None
        state = ChainState(flat.theta, flat.velocity, flat.kept, self.lr, self.momentum, self.stream.key, self.number)
        losses = chain.epochs(state, inputs, labels, orders, batch_size)
        self.number += 0 if losses is None else len(orders) * len(losses)
        return losses

    def _traced_step(self, x: Tensor, y: Tensor) -> TracedStep | None:
        """The program for batches of this shape, found once; None if steps on them are left to autograd."""
        key = (x.shape, x.dtype, y.shape, y.dtype)
        if key not in self._traced_steps:
            momenta = {name: v for flat in self.flats for name, v in zip(flat.names, flat.momenta, strict=True)}
            found = trace_step(self.model, self.stream, self.loss, x, y, momenta) if self._trace else None
            self._traced_steps[key] = found if found is not None and self._agrees(found, x, y) else None
        return self._traced_steps[key]

    def _agrees(self, traced: TracedStep, x: Tensor, y: Tensor) -> bool:
        """Whether a program's loss and gradients on a batch are autograd's; momenta are left as they were."""
        before = [flat.velocity.clone() for flat in self.flats]
        found = []
        for take in (self._by_autograd, partial(self._by_traced, traced)):
            for flat in self.flats:
                flat.velocity.zero_()
            with ambient(0, "agree"):
                loss = take(x.clone(), y)
            found.append([loss, *(flat.velocity.clone() for flat in self.flats)])
        for flat, velocity in zip(self.flats, before, strict=True):
            flat.velocity.copy_(velocity)
        # Where autograd's own values are not finite there is nothing to compare.
        return all(
            bool((a - b).abs().max() <= CLOSE * a.abs().max()) or not bool(torch.isfinite(a).all())
            for a, b in zip(*found, strict=True)
        )

    def _by_traced(self, traced: TracedStep, x: Tensor, y: Tensor) -> Tensor:
        return traced.run(x, y, self.momentum, *[self._scale(ask, x.device) for ask in traced.asks])

    def _scale(self, ask: DropoutCall, device: torch.device) -> Tensor:
        """A layer's dropout at this step, drawn for many steps at once."""
        first, drawn = self._drawn.get(ask, (0, ()))
        if not first <= self.number < first + len(drawn):
            ahead = max(1, AHEAD // torch.Size(ask.shape).numel())
            first = self.number
            steps = torch.arange(first, first + ahead, device=device)
            drawn = scales(self.stream.key, steps, ask, device).unbind()
            self._drawn[ask] = (first, drawn)
        return drawn[self.number - first]

    def _by_autograd(self, x: Tensor, y: Tensor, other: Loss | None = None) -> Tensor:
        self.stream.step = self.number
        with torch.enable_grad():
            trained = [p for p in self.model.parameters() if p.requires_grad]
            loss = (other or self.loss)(self.model(x), y)
            found = torch.autograd.grad(loss, trained, materialize_grads=True)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        grads = dict(zip(names, found, strict=True))
        for flat in self.flats:
            for name, v, (at, size) in zip(flat.names, flat.momenta, flat.places, strict=True):
                if self.exact and flat.kept is not None:
                    grads[name].masked_fill_(flat.kept[at : at + size].view_as(v) == 0, 0.0)
                v.mul_(self.momentum).add_(grads[name])
        return loss.detach()


def _lay_out(model: nn.Module) -> list[Flat]:
    """Move the trained parameters of a model into flat stretches, one for each type."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    flats = []
    for dtype in dict.fromkeys(p.dtype for _, p in trained):
        of_type = [(name, p) for name, p in trained if p.dtype == dtype]
        places, at = [], 0
        for _, p in of_type:
            places.append((at, p.numel()))
            at += -(-p.numel() // ALIGN) * ALIGN
        theta, velocity = of_type[0][1].new_zeros(at).detach(), of_type[0][1].new_zeros(at).detach()
        momenta = []
        with torch.no_grad():
            for (_, p), (start, size) in zip(of_type, places, strict=True):
                view = theta[start : start + size].view(p.shape)
                view.copy_(p)
                p.data = view
                momenta.append(velocity[start : start + size].view(p.shape))
        flats.append(Flat([name for name, _ in of_type], theta, velocity, momenta, places))
    return flats
