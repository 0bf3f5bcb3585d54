"""A run of many rounds: when to evaluate, what to store, and how to resume."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, get_type_hints

import torch

from fedcover.data import Examples
from fedcover.engines.base import Engine
from fedcover.errors import InputError, StoppedWarning, check_whole
from fedcover.federation.callbacks.base import Callback, RoundView, RunView
from fedcover.federation.callbacks.calls import RunCallbacks, describe_callback
from fedcover.federation.checkpoint import Checkpoint
from fedcover.federation.cohort import NO_SHARES, Shares
from fedcover.federation.fingerprint import Method, describe_engine, fingerprint
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.planned_round import PlannedRound
from fedcover.federation.round import queue_round, settle_round
from fedcover.federation.run_description import describe, describe_data, digests
from fedcover.federation.run_folder import RunFolder
from fedcover.federation.run_summary import summary
from fedcover.federation.run_warnings import RunWarnings, warn_of_old_copies, warn_of_whole_layers
from fedcover.federation.scores import Evaluation, score_fields
from fedcover.params import on_device, prune
from fedcover.policies.base import ClientPlan, shown_in
from fedcover.toml import Settings

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


CPU = torch.device("cpu")


@dataclass(frozen=True)
class RunSchedule:
    """The number of rounds, and how often a run evaluates and stores. The last round is always evaluated."""

    rounds: int
    evaluate_every: int = 1
    """Rounds between evaluations on the test set."""
    local_every: int = 0
    """Rounds between measurements of local accuracy; 0 for only after the last round."""
    checkpoint_every: int = 1
    """Rounds between checkpoints."""

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1)
        check_whole("evaluate_every", self.evaluate_every, 1)
        check_whole("local_every", self.local_every, 0)
        check_whole("checkpoint_every", self.checkpoint_every, 1)

    def evaluates(self, index: int) -> bool:
        """Return whether a round is evaluated."""
        return self.evaluates_locally(index) or index % self.evaluate_every == 0

    def evaluates_locally(self, index: int) -> bool:
        """Return whether a round's local accuracy is measured."""
        return index == self.rounds or (self.local_every > 0 and index % self.local_every == 0)

    def checkpoints(self, index: int) -> bool:
        """Return whether a round ends with a checkpoint."""
        return index == self.rounds or index % self.checkpoint_every == 0

    def trim(self, record: RoundRecord) -> RoundRecord:
        """Return the last record of a shorter run without evaluations that this schedule would not have made."""
        if not self.evaluates(record.round):
            return replace(record, loss=None, accuracy=None, local_accuracy=None, metrics={})
        return record if self.evaluates_locally(record.round) else replace(record, local_accuracy=None)

    def longer(self) -> "RunSchedule":
        """Return the same schedule with one more round."""
        return replace(self, rounds=self.rounds + 1)


class ScheduleOptions(TypedDict, total=False):
    """The fields of ``RunSchedule`` that are keyword options of ``Federation.run`` and ``run_many``."""

    evaluate_every: int
    local_every: int
    checkpoint_every: int


class ProgressOptions(ScheduleOptions, total=False):
    """The keyword options of ``Federation.run``."""

    progress: bool


def check_options(function: str, options: Mapping[str, object], allowed: type[ProgressOptions]) -> None:
    """Raise TypeError, which lists the keyword options of a function, if one of them does not exist."""
    names = sorted(get_type_hints(allowed))
    for name in options:
        if name not in names:
            raise TypeError(
                f"{function}() got an unexpected keyword argument '{name}'; it also takes {', '.join(names)}"
            )


@dataclass
class Run:
    """One run of a federation, with its test set, its folder and its callbacks."""

    federation: "Federation"
    test: Examples | None
    on_round: Callable[[RoundRecord], None]
    out: str | os.PathLike[str] | None = None
    resume: bool = False
    settings: Settings | None = None
    callbacks: Sequence[Callback] | Callback = ()

    def __post_init__(self) -> None:
        self._callbacks = RunCallbacks(self.callbacks)
        self.error: Exception | None = None
        """The error of this run's own round, if one ended it."""
        self.state = self.federation.start()
        self.history = History()
        self._folder: RunFolder | None = None
        self._fingerprint = ""
        self._warnings = RunWarnings(self.federation)
        if self.out is None and self.resume:
            raise InputError("resume needs out, the folder of the run to continue")

    @property
    def callback_list(self) -> list[Callback]:
        """The callbacks, in the order in which they are called."""
        return self._callbacks.callbacks

    @property
    def stopped(self) -> bool:
        """Whether a callback has stopped the run."""
        return self._callbacks.stopped is not None

    @property
    def ended(self) -> bool:
        """Whether the run plays no further round: a callback has stopped it, or it has failed."""
        return self.stopped or self.error is not None

    def check(self, engine: Engine) -> None:
        """Raise InputError if the engine cannot train for the policy; warn about masks that do not fit the model."""
        policy = self.federation.policy
        if policy.traits().one_by_one and not engine.trains_one_by_one:
            raise InputError(f"policy {policy} needs clients trained one by one; use engine=processes or engine=serial")
        warn_of_whole_layers(self.federation)
        warn_of_old_copies(self.federation)

    def open(self, schedule: RunSchedule, engine: Engine) -> None:
        """Lock the folder, if there is one, restore the run that it holds, and start the callbacks."""
        if self.out is None:
            self._callbacks.start(self._view(schedule), {})
            return
        method: Method = {**self.federation.method, "engine": describe_engine(engine)}
        if self.settings is None:  # settings of the command line say what the data and their partition are
            method["data"] = describe_data(self.federation, self.test)
            evaluations = {"every": schedule.evaluate_every, "local_every": schedule.local_every}
            self.settings = {"rounds": schedule.rounds, **describe(self.federation, engine), "evaluate": evaluations}
        arithmetic = "serial" if engine.exact else engine.name
        self._fingerprint = fingerprint(self.settings, arithmetic, *digests(self.federation, self.test))
        self._folder = RunFolder(self.out)
        stored = self._folder.open(
            self.settings, self._fingerprint, self.resume, schedule.rounds, partial(self._trimmed, schedule), method
        )
        if stored:
            self.state, self.history = stored.state, stored.history
        self._start_callbacks(schedule, stored.callbacks if stored else {})

    def _trimmed(self, schedule: RunSchedule, stored: Checkpoint) -> History:
        """Return a stored history without evaluations of a shorter or stopped run, unless the stop holds."""
        longer = schedule.rounds > stored.state.round
        stop = self._callbacks.held_stop((stored.callbacks.get("before") if longer else None) or stored.callbacks)
        last = stop["round"] if stop else 0
        return History([record if record.round == last else schedule.trim(record) for record in stored.history])

    def compare(self, data: bool = True) -> None:
        """Raise InputError if the folder holds a run of other settings, code or data; the engine may be another.

        Args:
            data: Whether data and the initial model are compared too; the server of a simulation has no clients' data.
        """
        assert self.out is not None
        assert self.settings is not None
        folder, settings = RunFolder(self.out), self.settings
        if not data:
            folder.compare(settings, self.federation.method)
            return
        read = digests(self.federation, self.test)
        folder.compare(settings, self.federation.method, lambda arithmetic: fingerprint(settings, arithmetic, *read))

    def _start_callbacks(self, schedule: RunSchedule, stored: Mapping[str, Any]) -> None:
        """Start the callbacks of a run with a folder, with the state that its checkpoint stored."""
        before = stored.get("before")
        if before is not None and schedule.rounds > self.state.round:
            # A longer run would not have evaluated this round, so callbacks see its trimmed record instead.
            *earlier, last = self.history
            self._callbacks.start(replace(self._view(schedule), history=History(earlier)), before)
            self._callbacks.on_round(self._round_view(last))
        else:
            self._callbacks.start(self._view(schedule), stored)
        if stop := self._callbacks.stopped:
            warnings.warn(
                f"the run has ended: {stop['by']} stopped it after round {stop['round']}, since {stop['reason']};"
                f" to continue it, leave this callback out or change it",
                StoppedWarning,
                stacklevel=5,
            )

    def _view(self, schedule: RunSchedule) -> RunView:
        return RunView(
            self.federation,
            self.history,
            schedule.rounds,
            self.name,
            self._folder.path if self._folder else None,
            self.resume,
            self.test,
            self.state,
            self.settings or {},
        )

    def _round_view(self, record: RoundRecord) -> RoundView:
        folder = self._folder.path if self._folder else None
        return RoundView(self.federation, self.state, record, self.history, folder)

    @property
    def name(self) -> str:
        """The name of the run in its settings, or that of its folder."""
        return str((self.settings or {}).get("name") or (Path(self.out).name if self.out is not None else ""))

    def begin_round(self, device: torch.device = CPU, shares: Shares = NO_SHARES, views: bool = True) -> PlannedRound:
        """Plan the next round on a device, see ``settle_round``."""
        return self.settle_round(self.queue_round(device, shares, views))

    def queue_round(self, device: torch.device = CPU, shares: Shares = NO_SHARES, views: bool = True) -> PlannedRound:
        """Plan the next round on a device, as far as the host need not wait for a GPU."""
        return queue_round(self.federation, self.state, device, shares, views)

    def settle_round(self, planned: PlannedRound) -> PlannedRound:
        """Return the planned round with costs; warn if a policy of the user's own exceeds budgets."""
        planned = settle_round(self.federation, planned)
        self._warnings.check_plans(planned)
        return planned

    def store(self, record: RoundRecord, schedule: RunSchedule, plans: Sequence[ClientPlan]) -> None:
        """Store a record with the state of callbacks that have seen it; warn if it shows something unexpected.

        A round after which a callback stops the run is evaluated like the last one.
        """
        last = self.state.round == schedule.rounds
        before = self._callbacks.state() if last and schedule.longer().trim(record) != record else {}
        self.history.append(record)
        try:
            self._callbacks.on_round(self._round_view(record))
        except Exception:
            self.history.remove_last()  # the folder does not have it either
            raise
        if self.stopped and self.test is not None and not schedule.evaluates_locally(record.round):
            scores = score_fields(self.federation, self.state, plans, Evaluation(self.test, local=True))
            record = replace(record, **scores)
            self.history.replace_last(record)
        if self._folder:
            self._folder.append(record)
            if schedule.checkpoints(self.state.round) or self.stopped:
                callbacks = self._callbacks.state() | ({"before": before} if before else {})
                self._folder.save(self.state, self.history, self._fingerprint, callbacks)
        self.on_round(record)
        self._warnings.check(record, self.state)

    def finish(self, schedule: RunSchedule, engine: Engine) -> History:
        """Write the summary and return the history, with the summary and the trained model."""
        self.history.theta = prune(on_device(self.state.theta, CPU), on_device(shown_in(self.state.policy), CPU))
        self.history.state = self.state
        self.history.summary = summary(self.federation, self.history, self.name, self.test, engine)
        if self._callbacks.stopped:
            self.history.summary["stopped"] = self._callbacks.stopped
        if self._folder:
            self._folder.finish(self.history.summary)
        self._callbacks.end(self._view(schedule))
        return self.history

    def close(self) -> None:
        """Close the callbacks and release the folder."""
        self._callbacks.close()
        if self._folder:
            self._folder.close()


def check_callbacks(runs: Sequence[Run]) -> None:
    """Raise InputError if runs share a callback, whose state belongs to one run."""
    seen: set[int] = set()
    for run in runs:
        for callback in run.callback_list:
            if id(callback) in seen:
                raise InputError(
                    f"the callback {describe_callback(callback)} is there twice, but its state belongs to one run;"
                    f" create one object for each, such as [[fedcover.EarlyStopping()] for _ in federations]"
                )
            seen.add(id(callback))


def move_tests(runs: Sequence[Run], device: torch.device) -> None:
    """Move the runs' test sets to a device, each once."""
    moved: dict[tuple[int, int], tuple[Examples, Examples]] = {}
    for run in runs:
        if run.test is not None:
            key = id(run.test.inputs), id(run.test.labels)
            if key not in moved:
                moved[key] = (run.test, run.test.on_device(device))  # keep the original, so that its id is not reused
            on_device_test = moved[key][1]
            run.test = replace(run.test, inputs=on_device_test.inputs, labels=on_device_test.labels)
