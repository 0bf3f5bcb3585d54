"""The interface of callbacks, and what they see of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedcover.data import Examples
from fedcover.federation.checkpoint import State
from fedcover.federation.history import History, RoundRecord
from fedcover.params import Params, on_device, prune
from fedcover.policies.base import shown_in
from fedcover.registry import Registry
from fedcover.toml import Settings

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


@dataclass(frozen=True)
class Stop:
    """Return this from ``Callback.on_round`` to end the run after the round.

    Args:
        reason: Why the run ends; it is in summary.json and on the console.
    """

    reason: str


@dataclass(frozen=True)
class RunView:
    """A run, as callbacks see it when it starts and when it ends."""

    federation: "Federation"
    history: History
    """The records so far: those of the rounds before a resume when the run starts, all when it ends."""
    rounds: int
    """The number of rounds that are planned."""
    name: str
    """The name of the run; "" if it has none."""
    folder: Path | None
    """The run folder; None if the run keeps nothing on disk."""
    resumed: bool
    """Whether the run in the folder may have been started before."""
    test: Examples | None
    """The test set; None if the run is not evaluated."""
    state: State
    """The state of the federation, with the global model ``state.theta``."""
    settings: Settings
    """The settings that config.toml records; empty without a run folder."""


@dataclass(frozen=True)
class RoundView:
    """A round that has just ended, as callbacks see it."""

    federation: "Federation"
    state: State
    """The state after the round, with the new global model ``state.theta``."""
    record: RoundRecord
    """The record of the round, with its evaluation if it was evaluated."""
    history: History
    """The records of all rounds so far; this one is the last."""
    folder: Path | None
    """The run folder; None if the run keeps nothing on disk."""

    @property
    def theta(self) -> Params:
        """The global model on the CPU, pruned if the policy has one mask for all clients."""
        cpu = torch.device("cpu")
        return prune(on_device(self.state.theta, cpu), on_device(shown_in(self.state.policy), cpu))


class Callback:
    """The base class of callbacks. Override what you need.

    The order of calls is ``on_start``, ``load_state_dict`` if the run is resumed, ``on_round`` after every round,
    ``on_end`` once the run is complete or was stopped, and ``close``. What a callback must remember over a resume is in
    ``state_dict``. It is stored in the same file as the model, so both are always of the same round.

    >>> class Patience(Callback):
    ...     def on_round(self, view):
    ...         return Stop("the loss is below 0.1") if (view.record.train_loss or 1) < 0.1 else None
    """

    state_of: ClassVar[tuple[str, ...]] = ()
    """Attributes that the state depends on: it is restored only if they are equal."""

    def on_start(self, run: RunView) -> None:
        """Prepare for a run; forget an earlier one. ``run.history`` has the rounds before a resume."""

    def on_round(self, view: RoundView) -> Stop | None:
        """See a round; return ``Stop`` to end the run after it."""
        return None

    def on_end(self, run: RunView) -> None:
        """See the end of a run; ``run.history.summary`` is its outcome."""

    def close(self) -> None:
        """Release files and connections; also called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


CALLBACKS: Registry[Callback] = Registry("callback")
"""The built-in callbacks by name."""
