"""Steps of many clients by their definition: ``training/step.py``, mapped over the clients."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedcover.engines.vectorized.stacks import (
    ClientKeys,
    OptionsKind,
    StackResults,
    column,
    first_rows,
    load_shifts,
    stack_like,
)
from fedcover.params import Params
from fedcover.training.client import Job, width_draws
from fedcover.training.options import MOST_WIDTHS, PLAIN, levels_of
from fedcover.training.recipes import Recipe
from fedcover.training.step import StepData, StepState, reads_start, shown_values, start_state, take_step

ClientGradients = Callable[..., tuple[Params, Tensor]]
"""(trained, frozen, x, y, real, key, step) -> (gradients, loss), of one client."""


class MappedSteps:
    """Stacks of everything that ``take_step`` reads and writes.

    Args:
        recipe: The recipe, which all clients share, apart from the step size.
        kind: The training options that need stacks.
        theta: The stacks of all parameters.
        masks: The stacks of all masks; empty if no client has one.
        trained: The names of the tensors that are trained.
        num_steps: The number of steps of the client with the most.
        gradients: The gradients of one client.
    """

    def __init__(
        self,
        recipe: Recipe,
        kind: OptionsKind,
        theta: Params,
        masks: Params,
        trained: Sequence[str],
        num_steps: int,
        gradients: ClientGradients,
    ) -> None:
        self.theta, self.masks = theta, masks
        self._recipe, self._trained, self._gradients = recipe, tuple(trained), gradients
        values = {name: theta[name] for name in trained}
        self._state = start_state(recipe, values, kind.widths, kind.report, stacked=True)
        numbers = {name: stack.new_zeros(len(stack)) for name, stack in theta.items()}
        first = next(iter(theta.values()))
        self._data = StepData(
            lr=torch.zeros(len(first), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device),
            frozen={name: stack for name, stack in theta.items() if name not in values},
            kept={name: masks[name] for name in trained if masks},
            start=stack_like(theta, trained if reads_start(recipe) else ()),
            gains=dict(numbers) if kind.gains else {},
            taus={name: numbers[name].clone() for name in trained if kind.thresholds},
            shifts=stack_like(theta, trained if kind.shifts else ()),
            complement=stack_like(theta, trained if kind.complement and masks else ()),
        )
        # For each entry the number of the client's widths that contain it.
        self._levels = stack_like(theta, list(theta) if kind.widths else (), torch.uint8)
        self._least_level = torch.zeros((num_steps, len(first)), dtype=torch.uint8, device=first.device)

    def load(self, jobs: Sequence[Job]) -> None:
        """Fill the stacks with the clients' options; reports, and moments that are not kept, become 0."""
        options = [job.options or PLAIN for job in jobs]
        for stack in pytree.tree_leaves((self._state.moments, self._state.squares)):
            stack.zero_()
        assert isinstance(self._data.lr, Tensor)
        self._data.lr.copy_(torch.tensor([job.recipe.lr for job in jobs], dtype=torch.float64))
        for name, stack in self._data.complement.items():
            stack.copy_(self.theta[name]).masked_fill_(self.masks[name], 0.0)
            self.theta[name].masked_fill_(~self.masks[name], 0.0)
        for name, stack in self._data.start.items():
            stack.copy_(self.theta[name])
        for name, gains in self._data.gains.items():
            gains.copy_(torch.tensor([one.gains.get(name, 1.0) for one in options], dtype=torch.float64))
        for name, taus in self._data.taus.items():
            taus.copy_(torch.tensor([one.thresholds.get(name, 0.0) for one in options], dtype=torch.float64))
        load_shifts(self._data.shifts, [one.shifts for one in options])
        for row, one in enumerate(options):
            for moment, tensors in one.moments.items():
                for name in tensors.keys() & self._state.moments.keys():
                    self._state.moments[name][moment][row].copy_(tensors[name])
        self._load_widths(jobs)

    def sync(self) -> None:
        """Do nothing: nothing is derived from theta."""

    def _load_widths(self, jobs: Sequence[Job]) -> None:
        """Fill the levels of entries, and the table of the least level that is inside the width drawn at each step."""
        levels = {id(job.options): levels_of(job.options.widths) for job in jobs if job.options and job.options.widths}
        for name, stack in self._levels.items():
            stack.fill_(MOST_WIDTHS)
            for row, job in zip(stack, jobs, strict=True):
                if name in levels.get(id(job.options), {}):
                    row.copy_(levels[id(job.options)][name])
        self._least_level.zero_()
        for client, job in enumerate(jobs):
            if job.options is not None and job.options.widths:
                draws = width_draws(job, job.examples)
                self._least_level[: len(draws), client] = (len(job.options.widths) - draws).to(self._least_level)

    def arguments(self, step: Tensor) -> tuple[Any, ...]:
        """Return the state, what steps read, the levels of entries, and the width thresholds of this step."""
        return self._state, self._data, self._levels, self._least_level.index_select(0, step.view(1)).squeeze(0)

    def update(self, tensors: tuple[Any, ...], batch: tuple[Tensor, ...], keys: ClientKeys, step: Tensor) -> Tensor:
        """Take one step of every client that has not finished."""
        take_steps: Any = vmap(self._step, in_dims=(0, 0, 0, 0, 0, 0, None), randomness="different")
        state, losses = take_steps(*tensors, batch, keys, step)
        for before, after in zip(pytree.tree_leaves(tensors[0]), pytree.tree_leaves(state), strict=True):
            before.copy_(after)
        return cast(Tensor, losses)

    def _step(
        self,
        state: StepState,
        data: StepData,
        levels: Params,
        width: Tensor,
        batch: tuple[Tensor, ...],
        key: ClientKeys,
        step: Tensor,
    ) -> tuple[StepState, Tensor]:
        """Take one step of one client; a client that has finished its steps stays as it is."""

        def gradients(shown: Params) -> tuple[Params, Tensor]:
            trained = {name: shown[name] for name in self._trained}
            return self._gradients(trained, {n: shown[n] for n in data.frozen}, *batch, key, step)

        inside = {name: level >= width for name, level in levels.items()}
        after, loss = take_step(self._recipe, gradients, state, data, step, inside)
        active = batch[2].any()
        return pytree.tree_map(lambda new, old: torch.where(active, new, old), after, state), loss

    def shown(self, rows: Tensor) -> Params:
        """Return the parameters of some clients, times their gains."""
        gains = {name: column(stack[rows], self.theta[name][rows]) for name, stack in self._data.gains.items()}
        return shown_values({name: stack[rows] for name, stack in self.theta.items()}, {}, gains, {})

    def moments(self, name: str) -> list[Tensor]:
        """Return the moments of a tensor that have a number for each entry."""
        return [stack for stack in self._state.moments[name].values() if stack.shape == self.theta[name].shape]

    def results(self, clients: int) -> StackResults:
        """Return copies of the results of the first clients; sums of squared gradients that are not finite become 0."""
        theta, reports, moments = first_rows(self.theta, clients), {}, {}
        if self._state.squares:
            zeros = {name: torch.zeros_like(theta[name]) for name in self._data.frozen}
            squares = {**zeros, **first_rows(self._state.squares, clients)}
            reports = {name: torch.where(squares[name].isfinite(), squares[name], 0.0) for name in theta}
        if self._recipe.keep_moments:
            kept = self._state.moments
            names = self._recipe.moment_names
            moments = {m: first_rows({name: kept[name][m] for name in kept}, clients) for m in names}
        return StackResults(theta, reports, moments)
