"""Steps of training, timed on this device."""

import copy
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedcover.budgets import Budget
from fedcover.calibration.calibration import Calibration
from fedcover.clients import Client
from fedcover.data import Population, from_parts
from fedcover.engines.serial import Serial
from fedcover.errors import InputError, check_whole
from fedcover.params import params_of
from fedcover.policies.neuron_pruning import neuron_pruning
from fedcover.policies.weight_pruning import weight_pruning
from fedcover.seeding import Round, generator
from fedcover.structure.batch_norm import static_form
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.client import Job
from fedcover.training.task import LocalSGD, Task

BATCHES, MOST_STEPS, CALL = 20, 300, 0.05
"""Batches of made-up data, the most steps of one timed call, and the seconds that a call is to last."""


def calibrate(
    model: nn.Module,
    example: Tensor,
    keeps: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    batch: int = 10,
    units: bool = False,
    name: str = "",
    repeats: int = 7,
    link: tuple[float, float] | None = None,
) -> Calibration:
    """The calibration of this device: training as ``Serial`` does it, on one thread and made-up data.

    Each keep is timed ``repeats`` times, in turn with the others, after a warm-up, and the median counts. A client's
    set-up is spread over its steps, and by how much the repeats differ is kept too. ``link`` is what
    ``fedcover.deploy.bandwidth.measure`` found.
    """
    check_whole("batch", batch, 1)
    check_whole("repeats", repeats, 1)
    budgets = [Budget(keep) for keep in sorted(set(keeps))]
    if len(budgets) < 2:
        raise InputError(f"keeps must be two or more different ones, for a line through them; got {list(keeps)}")
    structure = trained_form(model, example)
    policy = (neuron_pruning() if units else weight_pruning()).bind(structure)
    theta = params_of(structure.model)
    cohort = [Client(0, slot, budget) for slot, budget in enumerate(budgets)]
    masks, _ = policy.plan(theta, cohort, Round(1, 0), policy.start())
    task, clients, engine = Task(structure.model), made_up(structure, batch), Serial(shrink=True)
    jobs = [Job(task, clients, cohort[0], theta, mask, LocalSGD(1, batch, lr=1e-4), Round(1, 0)) for mask in masks]
    times = timed(engine, jobs, repeats)
    medians = [statistics.median(own) for own in times]
    down, up = link or (None, None)
    return Calibration(
        this_device(),
        name or type(model).__name__,
        sum(tensor.numel() for tensor in theta.values()),
        units,
        batch,
        tuple((budget.keep, seconds) for budget, seconds in zip(budgets, medians, strict=True)),
        down,
        up,
        max(statistics.median(abs(one - middle) for one in own) for own, middle in zip(times, medians, strict=True)),
    )


def this_device() -> str:
    """What the steps are timed on, in words."""
    return f"{platform.platform()}, {platform.machine()}, torch {torch.__version__}, 1 thread"


def trained_form(model: nn.Module, example: Tensor) -> ModelStructure:
    """The network as federations train it: batch norms go by their batch alone."""
    structure = trace(model, example)
    return trace(static_form(structure, model), example) if structure.moving else structure


def median_seconds(engine: Serial, jobs: Sequence[Job], repeats: int) -> list[float]:
    """The seconds of a step of each job: the median of ``repeats`` calls."""
    return [statistics.median(own) for own in timed(engine, jobs, repeats)]


def timed(engine: Serial, jobs: Sequence[Job], repeats: int) -> list[tuple[float, ...]]:
    """The seconds of a step of each job in each of ``repeats`` calls, taken in turn after a warm-up."""
    steps = 1
    for _ in range(3):  # the first calls take few steps and set-up shows: come nearer
        steps = max(1, min(MOST_STEPS, int(CALL / seconds_of_step(engine, jobs[-1], steps))))
    for job in jobs:
        seconds_of_step(engine, job, steps)
    times = [[seconds_of_step(engine, job, steps) for job in jobs] for _ in range(repeats)]
    return list(zip(*times, strict=True))


def seconds_of_step(engine: Serial, job: Job, steps: int) -> float:
    """The seconds of a call that takes about this many steps, divided by how many it takes."""
    batches = min(steps, BATCHES)
    epochs = steps // batches
    job = replace(job, client=replace(job.client, id=batches - 1), recipe=replace(job.recipe, epochs=epochs))
    begun = time.perf_counter()
    list(engine.train([job]))
    return (time.perf_counter() - begun) / (epochs * batches)


def made_up(structure: ModelStructure, batch: int) -> Population:
    """Clients 0, 1, ... with 1, 2, ... batches of data of no meaning."""
    rng, many = generator(0, "calibrate"), BATCHES * batch
    with torch.no_grad():
        scores = copy.deepcopy(structure.model).eval()(structure.example)
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        raise InputError("a model to calibrate must give one row of class scores for each example; wrap it so")
    like = structure.example
    if (size := many * like[0].numel() * like.element_size()) > (most := _memory() // 4):
        raise InputError(
            f"{BATCHES} batches of {batch} examples take {size / 1e9:,.1f} GB, and this machine can spare"
            f" {most / 1e9:,.1f}; use a smaller batch"
        )
    inputs = like.repeat(-(-many // len(like)), *[1] * (like.ndim - 1))[:many]
    if like.is_floating_point():
        inputs = torch.randn(inputs.shape, generator=rng).to(like.dtype)
    labels = torch.randint(scores.shape[1], (many,), generator=rng)
    return from_parts((inputs, labels), [torch.arange(batch * (i + 1)) for i in range(BATCHES)])


def _memory() -> int:
    """The bytes of memory of this machine; without a word from it those of a small one."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**32
