"""The callbacks of one run: their calls, their state in checkpoints, and the stop that one asked for."""

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedcover.errors import CallbackStateWarning, InputError, shown
from fedcover.federation.callbacks.base import Callback, RoundView, RunView, Stop


class RunCallbacks:
    """The callbacks of one run.

    Args:
        callbacks: The callbacks, in the order in which they are called.

    Attributes:
        callbacks: The callbacks.
        stopped: The round, the reason and the callback of a stop, as summary.json shows it; None if there was none.
    """

    def __init__(self, callbacks: Sequence[Callback] | Callback = ()) -> None:
        listed: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        for callback in listed:
            if not isinstance(callback, Callback):
                raise InputError(
                    f"callbacks must be objects such as fedcover.EarlyStopping(patience=5), or of a subclass of"
                    f" fedcover.Callback; got {shown(callback)}; on_round takes a plain function of the record"
                )
        self.callbacks: list[Callback] = listed
        counts: Counter[str] = Counter()
        self._keys: list[str] = []
        for callback in self.callbacks:
            name = _state_key(callback)
            self._keys.append(f"{name} #{counts[name]}" if counts[name] else name)
            counts[name] += 1
        self.stopped: dict[str, Any] | None = None

    def start(self, run: RunView, stored: Mapping[str, Any]) -> None:
        """Start the callbacks, and restore those that a checkpoint has the state of.

        A stop holds as long as the callback that asked for it is there with the same arguments.
        """
        states = stored.get("states", {})
        for key, callback in zip(self._keys, self.callbacks, strict=True):
            callback.on_start(run)
            if key in states:
                callback.load_state_dict(states[key])
            elif other := [k for k in states if k not in self._keys and _class_of(k) == type(callback).__name__]:
                warnings.warn(
                    f"the run was started with {other[0]}, and {key} does not know its rounds before the resume;"
                    f" it starts again after round {len(run.history)}",
                    CallbackStateWarning,
                    stacklevel=6,
                )
        self.stopped = self.held_stop(stored)

    def held_stop(self, stored: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the stop that a checkpoint stores, if the callback that asked for it is still there; or None."""
        stop: dict[str, Any] | None = stored.get("stopped")
        return stop if stop and stop["by"] in map(describe_callback, self.callbacks) else None

    def on_round(self, view: RoundView) -> None:
        """Call all callbacks after a round; the first that asks for a stop gives the reason."""
        for callback in self.callbacks:
            answer: object = callback.on_round(view)
            if isinstance(answer, Stop) and self.stopped is None:
                self.stopped = {
                    "round": view.record.round, "reason": answer.reason, "by": describe_callback(callback)
                }  # fmt: skip
            elif answer is not None and not isinstance(answer, Stop):
                raise InputError(
                    f"on_round of {type(callback).__name__} must return None or fedcover.Stop(reason); got"
                    f" {shown(answer)}"
                )

    def end(self, run: RunView) -> None:
        """Call all callbacks at the end of the run."""
        for callback in self.callbacks:
            callback.on_end(run)

    def close(self) -> None:
        """Close all callbacks."""
        for callback in self.callbacks:
            callback.close()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores; an empty dict without callbacks."""
        if not self.callbacks:
            return {}
        states = {key: callback.state_dict() for key, callback in zip(self._keys, self.callbacks, strict=True)}
        for key, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise InputError(f"state_dict of callback {key} must have JSON values only ({error})") from error
        return {"states": states, **({"stopped": self.stopped} if self.stopped else {})}


def describe_callback(callback: Callback) -> str:
    """Return the class of a callback with its arguments.

    >>> describe_callback(Callback())
    'Callback'
    """
    name = type(callback).__name__
    if not is_dataclass(callback):
        return name
    arguments = ", ".join(f"{field.name}={getattr(callback, field.name)!r}" for field in fields(callback) if field.init)
    return f"{name}({arguments})"


def _state_key(callback: Callback) -> str:
    """Return the name of a callback's state in a checkpoint: its class, and the arguments that the state is of."""
    name = type(callback).__name__
    arguments = ", ".join(f"{argument}={getattr(callback, argument)!r}" for argument in callback.state_of)
    return f"{name}({arguments})" if arguments else name


def _class_of(key: str) -> str:
    """Return the class in the name of a state."""
    return key.partition(" #")[0].partition("(")[0]
