"""Many rounds: when to look, what to keep on disk, how to go on after a stop."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedcover.checkpoint import State
from fedcover.data import Examples
from fedcover.errors import InputError
from fedcover.history import History, RoundRecord
from fedcover.runfolder import RunFolder
from fedcover.settings import Settings, fingerprint

if TYPE_CHECKING:
    from fedcover.federation import Federation


def run_rounds(
    federation: "Federation",
    rounds: int,
    test: Examples | None,
    evaluate_every: int,
    local_every: int,
    out: str | os.PathLike[str] | None,
    resume: bool,
    checkpoint_every: int,
    settings: Settings | None,
    on_round: Callable[[RoundRecord], None],
) -> History:
    """The history of a federation's rounds; ``Federation.run`` says what the arguments mean."""
    for name, value, least in (
        ("rounds", rounds, 1),
        ("evaluate_every", evaluate_every, 1),
        ("local_every", local_every, 0),
        ("checkpoint_every", checkpoint_every, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number of {least} or more; got {value}")

    def play(state: State, history: History, keep: Callable[[State], None] = lambda state: None) -> History:
        for index in range(state.round + 1, rounds + 1):
            local = index == rounds or (local_every > 0 and index % local_every == 0)
            look = local or index % evaluate_every == 0
            state, record = federation.play_round(state, test if look else None, local)
            history.append(record)
            keep(state)
            on_round(record)
        return history

    if out is None:
        if resume:
            raise InputError("resume needs out, the folder of the run to go on with")
        return play(federation.start(), History())
    if settings is None:
        looks = {"every": evaluate_every, "local_every": local_every, "on": test.name if test else None}
        settings = {"rounds": rounds, **federation.describe(), "evaluate": looks}
    mark = fingerprint(settings, *federation.digests())
    with RunFolder(out) as folder:
        state, history = folder.open(settings, mark, resume) or (federation.start(), History())
        if state.round > rounds:
            raise InputError(f"{out} has played {state.round} rounds already; ask for {state.round} or more")

        def keep(state: State) -> None:
            folder.append(history.last)
            if state.round % checkpoint_every == 0 or state.round == rounds:
                folder.save(state, history, mark)

        play(state, history, keep)
        folder.finish(summary(federation, history, str(settings.get("name") or folder.path.name), test))
    return history


def summary(federation: "Federation", history: History, name: str, test: Examples | None) -> dict[str, Any]:
    """The outcome of a run, as its summary.json holds it."""
    last = history.last
    return {
        "name": name,
        "rounds": len(history),
        "accuracy": last.accuracy,
        "loss": last.loss,
        "local_accuracy": last.local_accuracy,
        "gamma_min": history.gamma_min,
        "uncovered": max(history.column("uncovered")),
        "pruning_noise": sum(history.column("pruning_noise")) / len(history),
        "parameters": sum(tensor.numel() for tensor in federation.task.model.parameters()),
        "bytes_down": sum(history.column("bytes_down")),
        "bytes_up": sum(history.column("bytes_up")),
        "bytes_full": sum(history.column("bytes_full")),
        "rejected": sum(len(left_out) for left_out in history.column("rejected")),
        "seconds": sum(sum(record.seconds.values()) for record in history),
        "engine": federation.engine.name,
        "data": (test or federation.clients.examples).provenance,
    }
