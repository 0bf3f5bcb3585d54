"""Timing of training steps on this device."""

import copy
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.budgets import Budget
from fedcover.calibration.calibration import Calibration
from fedcover.clients import Client
from fedcover.data import Inputs, Population, from_parts
from fedcover.data.inputs import copy_of, map_inputs, parts_of
from fedcover.engines.serial import Serial
from fedcover.errors import InputError, check_whole
from fedcover.params import params_of
from fedcover.policies.base import Policy
from fedcover.policies.neuron_pruning import neuron_pruning
from fedcover.policies.random_parts import random_units, random_weights
from fedcover.policies.weight_pruning import weight_pruning
from fedcover.seeding import Round, generator
from fedcover.structure.batch_norm import static_form
from fedcover.structure.calls import call_model
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task

BATCHES, MOST_STEPS, CALL = 20, 300, 0.05
"""Batches of synthetic data, the most steps of one timed call, and the intended seconds of a call."""


def calibrate(
    model: nn.Module,
    example: Inputs,
    keeps: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    batch: int = 10,
    units: bool = False,
    name: str = "",
    repeats: int = 7,
    link: tuple[float, float] | None = None,
    complement: bool = False,
) -> Calibration:
    """Calibrate this device: time training steps of the engine ``Serial`` on one thread and synthetic data.

    After a warm-up each keep is timed ``repeats`` times, alternating with the others, and the median is used. The
    set-up of a client is spread over its steps. The spread of the repeats is recorded too.

    Args:
        model: The model to train; it is not changed.
        example: A batch of inputs.
        keeps: The fractions of the model to time; at least two.
        batch: The batch size.
        units: Whether whole units are pruned instead of single weights.
        name: The name of the model in the calibration; by default that of its class.
        repeats: The number of timings of each keep.
        link: Bytes per second down and up, as ``fedcover.deploy.bandwidth.measure`` returns them.
        complement: Whether clients see the whole model, and train a part of it.

    Returns:
        The calibration, from which budgets in seconds are computed; see ``keep_for``.
    """
    check_whole("batch", batch, 1)
    check_whole("repeats", repeats, 1)
    budgets = [Budget(keep) for keep in sorted(set(keeps))]
    if len(budgets) < 2:
        raise InputError(f"keeps must be two or more different numbers, to fit a line; got {list(keeps)}")
    structure = training_structure(model, example)
    policy = _policy(units, complement).bind(structure)
    theta = params_of(structure.model)
    cohort = [Client(0, slot, budget) for slot, budget in enumerate(budgets)]
    plans, _ = policy.plan(theta, cohort, Round(1, 0), policy.start())
    (task, clients), engine = synthetic_task(structure, batch), Serial(shrink=True)
    recipe = LocalSGD(1, batch, lr=1e-4)
    options = TrainingOptions(complement=True) if complement else None
    jobs = [Job(task, clients, cohort[0], theta, plan.mask, recipe, Round(1, 0), options) for plan in plans]
    times = timed(engine, jobs, repeats)
    medians = [statistics.median(timings) for timings in times]
    deviations = [
        statistics.median(abs(seconds - middle) for seconds in timings)
        for timings, middle in zip(times, medians, strict=True)
    ]
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
        max(deviations),
        complement,
    )


def _policy(units: bool, complement: bool) -> Policy:
    """Return the policy whose masks are timed."""
    if complement:
        return random_units() if units else random_weights()
    return neuron_pruning() if units else weight_pruning()


def this_device() -> str:
    """Return a description of the device on which steps are timed."""
    return f"{platform.platform()}, {platform.machine()}, torch {torch.__version__}, 1 thread"


def training_structure(model: nn.Module, example: Inputs) -> ModelStructure:
    """Return the structure of the model as federations train it: batch norms use only statistics of the batch."""
    structure = trace(model, example)
    return trace(static_form(structure, model), example) if structure.moving else structure


def median_seconds(engine: Serial, jobs: Sequence[Job], repeats: int) -> list[float]:
    """Return the seconds of a step of each job, the median of ``repeats`` calls."""
    return [statistics.median(timings) for timings in timed(engine, jobs, repeats)]


def timed(engine: Serial, jobs: Sequence[Job], repeats: int) -> list[tuple[float, ...]]:
    """Return the seconds of a step of each job in each of ``repeats`` calls; jobs alternate, after a warm-up."""
    steps = 1
    for _ in range(3):  # approach the number of steps; the first calls have few steps, so set-up dominates
        steps = max(1, min(MOST_STEPS, int(CALL / seconds_of_step(engine, jobs[-1], steps))))
    for job in jobs:
        seconds_of_step(engine, job, steps)
    times = [[seconds_of_step(engine, job, steps) for job in jobs] for _ in range(repeats)]
    return list(zip(*times, strict=True))


def seconds_of_step(engine: Serial, job: Job, steps: int) -> float:
    """Return the seconds of a call of about this many steps, divided by its exact number of steps."""
    batches = min(steps, BATCHES)
    epochs = steps // batches
    job = replace(job, client=replace(job.client, id=batches - 1), recipe=replace(job.recipe, epochs=epochs))
    start = time.perf_counter()
    list(engine.train([job]))
    return (time.perf_counter() - start) / (epochs * batches)


def synthetic_task(structure: ModelStructure, batch: int) -> tuple[Task, Population]:
    """Return a task for a model of any scores, and clients 0, 1, ... with 1, 2, ... batches of random data."""
    rng, examples, like = generator(0, "calibrate"), BATCHES * batch, structure.example
    with torch.no_grad():
        scores = call_model(copy.deepcopy(structure.model).eval(), copy_of(like))
    size = examples * sum(part[0].numel() * part.element_size() for part in parts_of(like).values())
    if size > (most := _memory() // 4):
        raise InputError(
            f"{BATCHES} batches of {batch} examples take {size / 1e9:,.1f} GB, and this machine can spare"
            f" {most / 1e9:,.1f}; use a smaller batch"
        )

    def drawn(part: Tensor) -> Tensor:
        if part.is_floating_point():
            return torch.randn((examples, *part.shape[1:]), generator=rng).to(part.dtype)
        return part.repeat(-(-examples // len(part)), *[1] * (part.ndim - 1))[:examples]

    inputs = map_inputs(drawn, like)
    if scores.ndim == 2 and scores.shape[1] > 1:
        task, labels = Task(structure.model), torch.randint(scores.shape[1], (examples,), generator=rng)
    else:
        task = Task(structure.model, F.mse_loss)
        labels = torch.zeros((examples, *scores.shape[1:]), dtype=scores.dtype)
    return task, from_parts((inputs, labels), [torch.arange(batch * (i + 1)) for i in range(BATCHES)])


def _memory() -> int:
    """Return the bytes of memory of this machine; 4 GiB if the system does not report them."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**32
