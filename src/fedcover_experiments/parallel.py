"""Tasks in several processes: while the runs of one wait for the CPU, those of another use the GPU."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def results_of(function: Callable[[Task], Result], tasks: Sequence[Task], processes: int = 1) -> Iterator[Result]:
    """Yield the result of each task as soon as it ends; with one process, tasks are run in their order in this one.

    Args:
        function: What to call. With several processes it, the tasks and the results must be picklable.
        tasks: The tasks.
        processes: The number of processes, among which the CPU's cores are divided.
    """
    if processes == 1:
        yield from map(function, tasks)
        return
    cores = max(1, (os.cpu_count() or 1) // processes)
    others = set(multiprocessing.active_children())
    # A process that has used a GPU cannot be forked.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (cores,))
    try:
        for future in as_completed([pool.submit(function, task) for task in tasks]):
            yield future.result()
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(cores: int) -> None:
    """Prepare a process: it uses some of the cores, and after Ctrl-C the calling process ends it."""
    torch.set_num_threads(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
