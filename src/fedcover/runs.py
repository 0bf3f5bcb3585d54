"""Many rounds: when to look, what to keep on disk, how to go on after a stop."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedcover.checkpoint import State, digest_of
from fedcover.data import Examples
from fedcover.errors import InputError, check_whole
from fedcover.history import History, RoundRecord
from fedcover.runfolder import RunFolder
from fedcover.settings import Settings, fingerprint

if TYPE_CHECKING:
    from fedcover.federation import Federation


@dataclass(frozen=True)
class Schedule:
    """How many rounds, and every how many of them something is done. The last round is always looked at."""

    rounds: int
    evaluate_every: int = 1
    local_every: int = 0
    """Rounds between looks at local accuracy; 0 means after the last alone."""
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1)
        check_whole("evaluate_every", self.evaluate_every, 1)
        check_whole("local_every", self.local_every, 0)
        check_whole("checkpoint_every", self.checkpoint_every, 1)

    def looks(self, index: int) -> bool:
        """Whether this round is evaluated."""
        return self.looks_locally(index) or index % self.evaluate_every == 0

    def looks_locally(self, index: int) -> bool:
        """Whether this round's local accuracy is measured."""
        return index == self.rounds or (self.local_every > 0 and index % self.local_every == 0)

    def keeps(self, index: int) -> bool:
        """Whether this round ends with a checkpoint."""
        return index == self.rounds or index % self.checkpoint_every == 0

    def trim(self, record: RoundRecord) -> RoundRecord:
        """A record of a shorter run's last round, without the looks that this schedule would not have taken."""
        if not self.looks(record.round):
            return replace(record, loss=None, accuracy=None, local_accuracy=None)
        return record if self.looks_locally(record.round) else replace(record, local_accuracy=None)


def run_rounds(
    federation: "Federation",
    schedule: Schedule,
    *,
    test: Examples | None,
    on_round: Callable[[RoundRecord], None],
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    settings: Settings | None = None,
) -> History:
    """The history of a federation's rounds; ``Federation.run`` says what the arguments mean."""

    def play(state: State, history: History, keep: Callable[[State], None] = lambda state: None) -> None:
        for index in range(state.round + 1, schedule.rounds + 1):
            look, local = schedule.looks(index), schedule.looks_locally(index)
            state, record = federation.play_round(state, test if look else None, local)
            history.append(record)
            keep(state)
            on_round(record)
        history.theta = state.theta

    history = History()
    if out is None:
        if resume:
            raise InputError("resume needs out, the folder of the run to go on with")
        play(federation.start(), history)
        return history
    if settings is None:
        looks = {"every": schedule.evaluate_every, "local_every": schedule.local_every}
        settings = {"rounds": schedule.rounds, **describe(federation), "evaluate": looks}
    mark = fingerprint(settings, *digests(federation, test))
    with RunFolder(out) as folder:
        state = federation.start()
        found = folder.open(settings, mark, resume, schedule.rounds, schedule.trim)
        if found:
            state, history = found

        def keep(state: State) -> None:
            folder.append(history.last)
            if schedule.keeps(state.round):
                folder.save(state, history, mark)

        play(state, history, keep)
        folder.finish(summary(federation, history, str(settings.get("name") or folder.path.name), test))
    return history


def describe(federation: "Federation") -> dict[str, Any]:
    """What a federation knows of itself, as settings."""
    return {
        "seed": federation.seed,
        "cohort": federation.cohort,
        "weighting": federation.weighting,
        "engine": federation.engine.name,
        "data": {"name": federation.clients.examples.name, "clients": len(federation.clients)},
        "model": {"name": type(federation.task.model).__name__},
        "policy": {"name": str(getattr(federation.policy, "name", federation.policy))},
        "budgets": {"by": federation.by, "items": [str(budget) for budget in federation.budgets]},
        "local": asdict(federation.local),
    }


def digests(federation: "Federation", test: Examples | None) -> list[str]:
    """Digests of theta_0, of all data and who has which, and of the loss's name: they decide a run too."""
    clients, train = federation.clients, federation.clients.examples
    tensors = {"inputs": train.inputs, "labels": train.labels}
    if test is not None:
        tensors |= {"test inputs": test.inputs, "test labels": test.labels}
    tensors["sizes"] = torch.tensor([clients.size(i) for i in range(len(clients))])
    tensors["parts"] = torch.cat([clients.indices(i) for i in range(len(clients))])
    loss = federation.task.loss
    return [digest_of(federation.theta0), digest_of(tensors, getattr(loss, "__qualname__", type(loss).__name__))]


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
