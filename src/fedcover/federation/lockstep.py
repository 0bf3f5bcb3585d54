"""Runs in lockstep: one call of the engine per round for the clients of all of them."""

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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


OnFailure = Callable[[Run, Exception], None]
"""A callback that receives a run with the error that ended it."""


class RunOptions(ProgressOptions, total=False):
    """The keyword options of ``run_many``."""

    resume: bool
    callbacks: Sequence[Sequence[Callback] | Callback]
    on_failure: Callable[[int, Exception], None] | None


def run_all_rounds(
    runs: Sequence[Run], schedule: RunSchedule, engine: Engine, on_failure: OnFailure | None = None
) -> list[History]:
    """Play runs in lockstep and return their histories: one call of the engine per round for all their clients.

    An engine that works ahead gets the runs in groups, and trains one while the next is planned.

    Args:
        runs: The runs.
        schedule: Their rounds, and when to evaluate and store.
        engine: What trains all clients.
        on_failure: Called when a run ends with an error of its own, such as clients that have diverged; the others
            continue, and its history has the rounds that it completed, without a summary and a model. By default, such
            an error ends all runs. An error of the engine always does.
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
                playing = [run for run in group if run.state.round < index and not run.ended]
                in_training.append(GroupRound(index, playing, engine, interrupts, on_failure))
        for group_round in in_training:
            group_round.end(schedule)
        return [run.finish(schedule, engine) if run.error is None else run.history for run in runs]


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
            ``on_failure``, called with a federation's position and the error that ended its run, while the others
            continue (by default, all end); ``evaluate_every``, ``local_every`` and ``checkpoint_every``, see
            ``RunSchedule``; and ``progress=True``, which prints a line about the runs to stderr every few seconds.

    Returns:
        One history per federation; that of a run that has failed has the rounds that it completed, without a summary
        and a model.
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
    on_failure = options.pop("on_failure", None)
    if on_failure is not None and not callable(on_failure):
        raise InputError(f"on_failure must be a function of a position and an error; got {shown(on_failure)}")
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
    schedule = RunSchedule(rounds, **cast(ScheduleOptions, options))
    numbers = {id(run): number for number, run in enumerate(runs)}
    failed = None if on_failure is None else lambda run, error: on_failure(numbers[id(run)], error)
    return run_all_rounds(runs, schedule, engine or federations[0].engine, failed)


class GroupRound:
    """One round of several runs whose clients are being trained."""

    def __init__(
        self,
        index: int,
        runs: Sequence[Run],
        engine: Engine,
        interrupts: Interrupts,
        on_failure: OnFailure | None = None,
    ) -> None:
        self._index, self._engine, self._interrupts, self._on_failure = index, engine, interrupts, on_failure
        self._engine_failed = False
        queued: list[tuple[Run, PlannedRound]] = []
        for run in runs:
            with self._errors_of(run):
                queued.append((run, run.queue_round(engine.device)))
        with _shared_time([planned for _, planned in queued]):
            # Masks store their costs and noise.
            costs_together([(run.federation.structure, m) for run, planned in queued for m in planned.masks])
            queue_noise([planned for _, planned in queued])
        self._rounds: list[tuple[Run, PlannedRound]] = []
        for run, planned in queued:
            with self._errors_of(run):
                self._rounds.append((run, run.settle_round(planned)))
        settled = [planned for _, planned in self._rounds]
        with _shared_time(settled):
            queue_coverage(settled)
        jobs = [job for planned in settled for job in planned.jobs]
        self._updates = self._watched(engine.train(jobs)) if jobs else iter(())

    def end(self, schedule: RunSchedule) -> None:
        """Average the updates, evaluate the models and store the records."""
        evaluates, local = schedule.evaluates(self._index), schedule.evaluates_locally(self._index)
        averaged: Iterable[tuple[Run, AveragedRound]] = self._averaged()
        scores: dict[int, dict[str, Any]] = {}
        if evaluates and self._engine.device.type not in SINGLE:
            averaged = list(averaged)
            scores = self._evaluate_together(averaged, local)
        for number, (run, one) in enumerate(averaged):
            with self._errors_of(run):
                plans, evaluation = one.planned.plans, Evaluation(run.test if evaluates else None, local)
                one.planned.clock.skip()
                fields = scores.get(number) or score_fields(run.federation, one.state, plans, evaluation)
                run.state, record = one.recorded(fields)
                run.store(record, schedule, plans)
            self._interrupts.check()

    def _averaged(self) -> Iterator[tuple[Run, AveragedRound]]:
        """Average the updates of each run, which follow one another."""
        for run, planned in self._rounds:
            updates = islice(self._updates, len(planned.jobs))
            arrivals, averaged = Arrivals(updates, self._engine.together, self._engine.precision), None
            with self._errors_of(run):
                averaged = average_round(run.federation, planned, arrivals)
            deque(updates, maxlen=0)  # those that a failed run has not read
            if averaged is not None:
                yield run, averaged

    def _evaluate_together(
        self, averaged: Sequence[tuple[Run, AveragedRound]], local: bool
    ) -> dict[int, dict[str, Any]]:
        """Return the scores of runs by their numbers, as far as they can be evaluated at once."""
        start = time.perf_counter()
        by_test: dict[Any, list[int]] = {}
        for number, (run, _) in enumerate(averaged):
            key = run.test and (id(run.test.inputs), id(run.test.labels), run.test.classes)  # move_tests shares them
            by_test.setdefault(key, []).append(number)
        scores: dict[int, dict[str, Any]] = {}
        for numbers in by_test.values():
            some = [averaged[n] for n in numbers]
            rounds = [(run.federation, one.state, one.planned.plans) for run, one in some]
            of_test = scores_of_many(rounds, Evaluation(some[0][0].test, local))
            scores |= zip(numbers, of_test, strict=True) if of_test is not None else ()
        for _, one in averaged:
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
        """Record an error in the block as the run's own, unless it is the engine's, and pass it to ``on_failure``."""
        try:
            yield
        except Exception as error:
            run.error = None if self._engine_failed else error
            if run.error is None or self._on_failure is None:
                raise
            self._on_failure(run, error)


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
