"""Many rounds: when to look, what to keep on disk, how to go on after a stop."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from fedcover._threads import one_thread
from fedcover.data import DevicePopulation, Examples
from fedcover.engines.base import Engine
from fedcover.errors import CoverageWarning, InputError, StepSizeWarning, WholeLayersWarning, check_whole
from fedcover.federation.advice import whole_sentence
from fedcover.federation.checkpoint import digest_of
from fedcover.federation.evaluate import test_on
from fedcover.federation.fingerprint import fingerprint
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.run_folder import RunFolder
from fedcover.params import on_device, prune
from fedcover.policies.base import shown_in
from fedcover.theory import step_sentence, uncovered_sentence
from fedcover.toml import Settings

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


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


@dataclass
class Run:
    """One federation on its way through the rounds, with its test set, its folder and who is told."""

    federation: "Federation"
    test: Examples | None
    on_round: Callable[[RoundRecord], None]
    out: str | os.PathLike[str] | None = None
    resume: bool = False
    settings: Settings | None = None

    def __post_init__(self) -> None:
        self.state = self.federation.start()
        self.history = History()
        self._folder: RunFolder | None = None
        self._mark = ""
        self._warned: set[type[Warning]] = set()
        if self.out is None and self.resume:
            raise InputError("resume needs out, the folder of the run to go on with")

    def check(self, engine: Engine) -> None:
        """An error if the engine cannot train as the policy asks, and a warning of layers that it never prunes."""
        policy = self.federation.policy
        if policy.one_by_one and not engine.trains_one_by_one:
            raise InputError(f"policy {policy} needs clients trained one by one; use engine=processes or engine=serial")
        whole = whole_sentence(policy, self.federation.structure, self.federation.budgets)
        if whole:
            # It points at whoever called Federation.run or run_many.
            warnings.warn(whole, WholeLayersWarning, stacklevel=4)

    def open(self, schedule: Schedule, engine: Engine) -> None:
        """Take the folder, if there is one, and what an earlier run left in it."""
        if self.out is None:
            return
        if self.settings is None:
            looks = {"every": schedule.evaluate_every, "local_every": schedule.local_every}
            self.settings = {"rounds": schedule.rounds, **describe(self.federation, engine), "evaluate": looks}
        arithmetic = "serial" if engine.exact else engine.name
        self._mark = fingerprint(self.settings, arithmetic, *digests(self.federation, self.test))
        self._folder = RunFolder(self.out)
        found = self._folder.open(self.settings, self._mark, self.resume, schedule.rounds, schedule.trim)
        if found:
            self.state, self.history = found

    def keep(self, record: RoundRecord, schedule: Schedule) -> None:
        """Write the round down, and say so if it is the first with a hole, or with steps that the theorem forbids."""
        self.history.append(record)
        if self._folder:
            self._folder.append(record)
            if schedule.keeps(self.state.round):
                self._folder.save(self.state, self.history, self._mark)
        self.on_round(record)
        # A policy that shows a pruned model leaves the rest to nobody on purpose.
        meant = bool(shown_in(self.state.policy))
        # Once each: masks that leave holes, or steps that are too large, mostly are so always.
        # The warnings point at whoever called Federation.run or run_many.
        if record.uncovered > 0 and not meant and CoverageWarning not in self._warned:
            self._warned.add(CoverageWarning)
            shares = {layer: cover.uncovered for layer, cover in record.coverage.items() if cover.uncovered}
            sentence = uncovered_sentence(shares, record.round, self.federation.remedy)
            warnings.warn(sentence, CoverageWarning, stacklevel=5)
        made = record.certificate
        if made and made["step_holds"] is False and StepSizeWarning not in self._warned:
            self._warned.add(StepSizeWarning)
            sentence = step_sentence(made["step_size"], made["largest_step"], made["steps"], estimated=True)
            warnings.warn(f"after round {record.round} {sentence}", StepSizeWarning, stacklevel=5)

    def finish(self, engine: Engine) -> History:
        """The history, once the summary is written."""
        cpu = torch.device("cpu")
        self.history.theta = prune(on_device(self.state.theta, cpu), on_device(shown_in(self.state.policy), cpu))
        if self._folder:
            name = str((self.settings or {}).get("name") or self._folder.path.name)
            self._folder.finish(summary(self.federation, self.history, name, self.test, engine))
        return self.history

    def close(self) -> None:
        """Let go of the folder."""
        if self._folder:
            self._folder.close()


def run_all_rounds(runs: Sequence[Run], schedule: Schedule, engine: Engine) -> list[History]:
    """The histories of federations played in lockstep: one call of the engine for all their clients a round.

    An engine that can be asked ahead gets the lanes in as many groups, and trains one while the next is planned.
    """
    with ExitStack() as stack:
        if not engine.keep_open:
            stack.callback(engine.close)
        for run in runs:  # all of them, before any has a folder
            run.check(engine)
        for run in runs:
            stack.callback(run.close)  # first, since opening may fail once the folder is locked
            run.open(schedule, engine)
        # One thread, so that the records' sums are the same on every machine.
        stack.enter_context(one_thread())
        stack.enter_context(engine.playing())
        _move_tests(runs, engine.device)
        each = -(-len(runs) // engine.ahead)
        groups = [runs[start : start + each] for start in range(0, len(runs), each)]
        begun: deque[_Begun] = deque()
        for index in range(min(run.state.round for run in runs) + 1, schedule.rounds + 1):
            for group in groups:
                if len(begun) == len(groups):
                    begun.popleft().end(schedule)
                begun.append(_Begun(index, [run for run in group if run.state.round < index], engine))
        for one in begun:
            one.end(schedule)
        return [run.finish(engine) for run in runs]


def run_many(
    federations: Sequence["Federation"],
    rounds: int,
    evaluate_on: Any = None,
    evaluate_every: int = 1,
    local_every: int = 0,
    out: Sequence[str | os.PathLike[str]] | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    engine: Engine | None = None,
    on_round: Callable[[int, RoundRecord], None] = lambda number, record: None,
) -> list[History]:
    """The histories of several federations played in lockstep, all their clients in one engine call a round.

    A sweep over rows and seeds becomes one batch on a GPU. Each federation's result is the same alone or
    in company. ``out`` has one folder for each; ``on_round`` gets the federation's number too.
    """
    if out is not None and len(out) != len(federations):
        raise InputError(f"{len(federations)} federations need as many folders; got {len(out)}")
    if not federations:
        return []
    runs = [
        Run(
            federation,
            federation.test_set(evaluate_on) if evaluate_on is not None else None,
            partial(on_round, number),
            out[number] if out is not None else None,
            resume,
        )
        for number, federation in enumerate(federations)
    ]
    schedule = Schedule(rounds, evaluate_every, local_every, checkpoint_every)
    return run_all_rounds(runs, schedule, engine or federations[0].engine)


class _Begun:
    """A round of several lanes whose clients are being trained."""

    def __init__(self, index: int, runs: Sequence[Run], engine: Engine) -> None:
        self._index, self._runs, self._together = index, runs, engine.together
        self._rounds = [run.federation.begin_round(run.state, engine.device) for run in runs]
        self._updates = engine.train([job for one in self._rounds for job in one.jobs])

    def end(self, schedule: Schedule) -> None:
        """Take the updates in, and write the round down."""
        look, local = schedule.looks(self._index), schedule.looks_locally(self._index)
        for run, begun in zip(self._runs, self._rounds, strict=True):
            own, test = islice(self._updates, len(begun.jobs)), run.test if look else None
            run.state, record = run.federation.end_round(begun, own, test, local, self._together)
            run.keep(record, schedule)


def _move_tests(runs: Sequence[Run], device: torch.device) -> None:
    """Put the lanes' test sets on a device, each once."""
    moved: dict[int, tuple[Examples, Examples]] = {}
    for run in runs:
        if run.test is not None:
            key = id(run.test.inputs)
            if key not in moved:
                moved[key] = (run.test, test_on(run.test, device))  # the first is kept, so that its id stays its own
            there = moved[key][1]
            run.test = replace(run.test, inputs=there.inputs, labels=there.labels)


def describe(federation: "Federation", engine: Engine) -> dict[str, Any]:
    """What a federation knows of itself, as settings, and the engine that plays it."""
    return {
        "seed": federation.seed,
        "cohort": federation.cohort,
        "weighting": federation.weighting,
        "assign": federation.assign,
        "certify": federation.certify,
        "average": federation.average,
        "trim": federation.trim,
        "engine": engine.name,
        "data": {"name": federation.clients.examples.name, "clients": len(federation.clients)},
        "model": {"name": type(federation.task.model).__name__},
        "policy": {"name": str(getattr(federation.policy, "name", federation.policy))},
        "budgets": {"by": federation.by, "items": [budget.exact for budget in federation.budgets]},
        "local": asdict(federation.local),
    }


def digests(federation: "Federation", test: Examples | None) -> list[str]:
    """Digests of theta_0, of all data and who has which, and of the loss's name: they decide a run too."""
    clients, train = federation.clients, federation.clients.examples
    tensors = {"inputs": train.inputs, "labels": train.labels}
    if test is not None:
        tensors |= {"test inputs": test.inputs, "test labels": test.labels}
    tensors["sizes"] = torch.tensor([clients.size(i) for i in range(len(clients))])
    tensors["parts"] = clients.parts
    loss = federation.task.loss
    return [digest_of(federation.theta0), digest_of(tensors, getattr(loss, "__qualname__", type(loss).__name__))]


def summary(
    federation: "Federation", history: History, name: str, test: Examples | None, engine: Engine
) -> dict[str, Any]:
    """The outcome of a run, as its summary.json holds it."""
    last, clients = history.last, federation.clients
    return {
        "name": name,
        **({"clients": [one.number for one in clients.devices]} if isinstance(clients, DevicePopulation) else {}),
        "rounds": len(history),
        "accuracy": last.accuracy,
        "loss": last.loss,
        "local_accuracy": last.local_accuracy,
        "gamma_min": history.gamma_min,
        "uncovered": max(history.column("uncovered")),
        "pruning_noise": sum(history.column("pruning_noise")) / len(history),
        "keeps": [budget.keep for budget in federation.budgets],
        "parameters": sum(tensor.numel() for tensor in federation.task.model.parameters()),
        "bytes_down": sum(history.column("bytes_down")),
        "bytes_up": sum(history.column("bytes_up")),
        "bytes_full": sum(history.column("bytes_full")),
        "rejected": sum(len(left_out) for left_out in history.column("rejected")),
        "seconds": sum(sum(record.seconds.values()) for record in history),
        "engine": engine.name,
        "data": (test or federation.clients.examples).provenance,
        "label_bias": _mean_bias(history),
        "certificate": history.last.certificate,
    }


def _mean_bias(history: History) -> dict[str, float] | None:
    """The bias of labels, mean over the rounds that measured it; of the worst region the worst."""
    found = [bias for bias in history.column("label_bias") if bias]
    if not found:
        return None
    worst = max(found, key=lambda bias: float(bias["worst"]))
    return {**worst, **{key: sum(bias[key] for bias in found) / len(found) for key in ("before", "after")}}
