"""Tasks in several processes: while the runs of one wait for the CPU, those of another use the GPU."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from typing import TypeVar

import torch

from fedcover._threads import usable_cores
from fedcover.errors import InputError, check_whole

Task = TypeVar("Task")
Result = TypeVar("Result")


def results_of(function: Callable[[Task], Result], tasks: Sequence[Task], processes: int = 1) -> Iterator[Result]:
    """Yield the result of each task as soon as it ends; with one process, tasks are run in their order in this one.

    Args:
        function: What to call. With several processes it, the tasks and the results must be picklable.
        tasks: The tasks.
        processes: The number of processes, among which the usable cores are divided.

    Raises:
        InputError: If the number of processes is not a whole number of 1 or more, or one of them dies.
    """
    check_whole("processes", processes, 1)
    if processes == 1:
        yield from map(function, tasks)
        return
    others = set(multiprocessing.active_children())
    # A process that has used a GPU cannot be forked.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (cores_of(processes),))
    try:
        for future in as_completed([pool.submit(function, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool as error:
        raise InputError(
            f"one of {processes} processes has died; the machine may be out of memory: use fewer processes"
        ) from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def cores_of(processes: int) -> int:
    """Return how many cores each of several processes may use."""
    return max(1, usable_cores() // processes)


def _begin(cores: int) -> None:
    """Prepare a process: it uses some of the cores, and ends with the calling process, which alone handles Ctrl-C."""
    torch.set_num_threads(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the calling process ends, and end this one at once: nobody waits for its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
