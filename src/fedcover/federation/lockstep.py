"""Runs in lockstep: one call of the engine per round for the clients of all of them."""

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack, cast

from fedcover._threads import one_thread
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.errors import InputError, shown
from fedcover.federation.averaged_round import Arrivals, AveragedRound
from fedcover.federation.callbacks.base import Callback
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.interrupts import Interrupts, noted_interrupts
from fedcover.federation.measure_together import queue_coverage, queue_noise
from fedcover.federation.planned_round import PlannedRound
from fedcover.federation.progress_lines import OnRound, with_progress
from fedcover.federation.round import average_round
from fedcover.federation.runs import (
    ProgressOptions,
    Run,
    RunSchedule,
    ScheduleOptions,
    check_callbacks,
    check_options,
    move_tests,
)
from fedcover.federation.scores import Evaluation, score_fields, scores_of_many
from fedcover.masks.cost import costs_together

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


MANY = 16
"""The number of runs from which it pays that the garbage collector skips what exists before them."""
SINGLE = ("cpu",)
"""Devices on which the models of runs are evaluated one by one: launches cost little there, and results are exact."""


class RunOptions(ProgressOptions, total=False):
    """The keyword options of ``run_many``."""

    resume: bool
    callbacks: Sequence[Sequence[Callback] | Callback]


def run_all_rounds(runs: Sequence[Run], schedule: RunSchedule, engine: Engine) -> list[History]:
    """Play runs in lockstep and return their histories: one call of the engine per round for all their clients.

    An engine that works ahead gets the runs in groups, and trains one while the next is planned.
    """
    with ExitStack() as stack:
        interrupts = stack.enter_context(noted_interrupts())
        if not engine.keep_open:
            stack.callback(engine.close)
        check_callbacks(runs)
        for run in runs:  # check all of them before any folder is touched
            run.check(engine)
        for run in runs:
            stack.callback(run.close)  # before opening, which may fail after the folder is locked
            run.open(schedule, engine)
        # One thread makes the records' sums equal on every machine.
        stack.enter_context(one_thread())
        stack.enter_context(engine.playing())
        stack.enter_context(_heap_at_rest() if len(runs) >= MANY else nullcontext())
        move_tests(runs, engine.device)
        for run in runs:
            run.federation.evaluator.workers = engine.workers
            run.federation.evaluator.precision = engine.precision
        size = -(-len(runs) // engine.groups(sum(run.federation.cohort for run in runs)))
        groups = [runs[start : start + size] for start in range(0, len(runs), size)]
        in_training: deque[GroupRound] = deque()
        for index in range(min(run.state.round for run in runs) + 1, schedule.rounds + 1):
            for group in groups:
                if len(in_training) == len(groups):
                    in_training.popleft().end(schedule)
                playing = [run for run in group if run.state.round < index and not run.stopped]
                in_training.append(GroupRound(index, playing, engine, interrupts))
        for group_round in in_training:
            group_round.end(schedule)
        return [run.finish(schedule, engine) for run in runs]


def follow_rounds(on_round: OnRound, rounds: int, options: ProgressOptions) -> tuple[OnRound, RunSchedule]:
    """Return what is called after each round, with lines of progress if they are asked for, and the run's schedule."""
    check_options("run", options, ProgressOptions)
    follow = with_progress(on_round, options.pop("progress", False), rounds)
    return follow, RunSchedule(rounds, **cast(ScheduleOptions, options))


def run_many(
    federations: Sequence["Federation"],
    rounds: int,
    evaluate_on: Any = None,
    out: Sequence[str | os.PathLike[str]] | None = None,
    engine: Engine | None = None,
    on_round: Callable[[int, RoundRecord], None] = lambda number, record: None,
    **options: Unpack[RunOptions],
) -> list[History]:
    """Play several federations in lockstep, with one engine call per round for all their clients.

    A sweep over settings and seeds becomes one batch on a GPU. Each federation's result is the same as if it ran by
    itself.

    Args:
        federations: The federations; their engines are not used, except the first one's by default.
        rounds: Number of rounds.
        evaluate_on: A test set for all of them.
        out: One folder per federation.
        engine: What trains all clients.
        on_round: Called with the federation's position in the list and the record of each round.
        options: ``resume``, to continue the runs in ``out``; ``callbacks``, one list of callbacks per federation;
            ``evaluate_every``, ``local_every`` and ``checkpoint_every``, see ``RunSchedule``; and ``progress=True``,
            which prints a line about the runs to stderr every few seconds.

    Returns:
        One history per federation.
    """
    if not isinstance(federations, Sequence):
        raise InputError(f"federations must be a list of federations; got {shown(federations)}")
    if isinstance(out, str | os.PathLike) or (out is not None and len(out) != len(federations)):
        got = f"'{out}'" if isinstance(out, str | os.PathLike) else len(out)
        raise InputError(f"out must be a list of one folder per federation, {len(federations)}; got {got}")
    check_options("run_many", options, RunOptions)
    if not federations:
        return []
    resume = options.pop("resume", False)
    callbacks = options.pop("callbacks", [()] * len(federations))
    if not isinstance(callbacks, Sequence) or len(callbacks) != len(federations):
        got = len(callbacks) if isinstance(callbacks, Sequence) else shown(callbacks)
        raise InputError(f"callbacks must have one list per federation, {len(federations)}; got {got}")
    follow = with_progress(on_round, options.pop("progress", False), rounds, len(federations))
    runs = [
        Run(
            federation,
            federation.test_set(evaluate_on),
            partial(follow, number),
            out[number] if out is not None else None,
            resume,
            callbacks=callbacks[number],
        )
        for number, federation in enumerate(federations)
    ]
    return run_all_rounds(runs, RunSchedule(rounds, **cast(ScheduleOptions, options)), engine or federations[0].engine)


class GroupRound:
    """One round of several runs whose clients are being trained."""

    def __init__(self, index: int, runs: Sequence[Run], engine: Engine, interrupts: Interrupts) -> None:
        self._index, self._runs, self._engine, self._interrupts = index, runs, engine, interrupts
        self._engine_failed = False
        queued: list[PlannedRound] = []
        for run in runs:
            with self._errors_of(run):
                queued.append(run.queue_round(engine.device))
        with _shared_time(queued):
            pairs = [(run.federation.structure, m) for run, one in zip(runs, queued, strict=True) for m in one.masks]
            costs_together(pairs)  # which the masks store
            queue_noise(queued)
        self._rounds: list[PlannedRound] = []
        for run, planned in zip(runs, queued, strict=True):
            with self._errors_of(run):
                self._rounds.append(run.settle_round(planned))
        with _shared_time(self._rounds):
            queue_coverage(self._rounds)
        jobs = [job for planned in self._rounds for job in planned.jobs]
        self._updates = self._watched(engine.train(jobs)) if jobs else iter(())

    def end(self, schedule: RunSchedule) -> None:
        """Average the updates, evaluate the models and store the records."""
        evaluates, local = schedule.evaluates(self._index), schedule.evaluates_locally(self._index)
        averaged: list[AveragedRound] = []
        scores: dict[int, dict[str, Any]] = {}
        if evaluates and self._engine.device.type not in SINGLE:
            averaged = self._average_all()
            scores = self._evaluate_together(averaged, local)
        for number, (run, planned) in enumerate(zip(self._runs, self._rounds, strict=True)):
            with self._errors_of(run):
                one = averaged[number] if averaged else self._average(run, planned)
                evaluation = Evaluation(run.test if evaluates else None, local)
                planned.clock.skip()
                fields = scores.get(number) or score_fields(run.federation, one.state, planned.plans, evaluation)
                run.state, record = one.recorded(fields)
                run.store(record, schedule, planned.plans)
            self._interrupts.check()

    def _average(self, run: Run, planned: PlannedRound) -> AveragedRound:
        """Average the updates of a run, which are the next ones."""
        updates = islice(self._updates, len(planned.jobs))
        return average_round(run.federation, planned, Arrivals(updates, self._engine.together, self._engine.precision))

    def _average_all(self) -> list[AveragedRound]:
        """Average the updates of all runs."""
        averaged = []
        for run, planned in zip(self._runs, self._rounds, strict=True):
            with self._errors_of(run):
                averaged.append(self._average(run, planned))
        return averaged

    def _evaluate_together(self, averaged: Sequence[AveragedRound], local: bool) -> dict[int, dict[str, Any]]:
        """Return the scores of runs by their numbers, as far as they can be evaluated at once."""
        start = time.perf_counter()
        by_test: dict[Any, list[int]] = {}
        for number, run in enumerate(self._runs):
            key = run.test and (id(run.test.inputs), id(run.test.labels), run.test.classes)  # move_tests shares them
            by_test.setdefault(key, []).append(number)
        scores: dict[int, dict[str, Any]] = {}
        for numbers in by_test.values():
            rounds = [(self._runs[n].federation, averaged[n].state, averaged[n].planned.plans) for n in numbers]
            of_test = scores_of_many(rounds, Evaluation(self._runs[numbers[0]].test, local))
            scores |= zip(numbers, of_test, strict=True) if of_test is not None else ()
        for one in averaged:
            one.planned.clock.seconds["evaluate"] += (time.perf_counter() - start) / len(averaged)
        return scores

    def _watched(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        """Yield the engine's updates; its error need not be that of the run which waits for an update."""
        try:
            yield from updates
        except Exception:
            self._engine_failed = True
            raise

    @contextmanager
    def _errors_of(self, run: Run) -> Iterator[None]:
        """Note an error in the block as that of the run, unless it is the engine's."""
        try:
            yield
        except Exception as error:
            run.error = None if self._engine_failed else error
            raise


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """Enter a context in which the garbage collector skips all objects that exist at its start.

    They are nearly all of the heap, modules included. With hundreds of runs it saves a tenth of the host's time.
    """
    if gc.get_freeze_count():  # the caller did that before
        yield
        return
    gc.collect()  # or garbage of earlier runs would be kept too
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _shared_time(rounds: Sequence[PlannedRound]) -> Iterator[None]:
    """Add the time of the block to the planning of rounds, in equal shares."""
    start = time.perf_counter()
    yield
    for planned in rounds:
        planned.clock.seconds["plan"] += (time.perf_counter() - start) / len(rounds)
