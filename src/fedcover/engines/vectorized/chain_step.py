"""A fast path on a GPU: steps of many clients whose model is a chain of layers, in kernels of their own.

A chain has linear layers, and before them convolutions that are each followed by ReLU and max-pooling of 2 x 2. Nothing
is vmapped, traced or compiled by torch, and each weight is written once per step. Anything else than float32, SGD with
momentum, cross-entropy and data in memory is left to ``BatchedStep``. Gradients may have shifts (SCAFFOLD) and a
proximal term (FedProx).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.engines.vectorized import layers as choices
from fedcover.engines.vectorized.batch_data import BatchData, WholeData
from fedcover.engines.vectorized.batch_table import BatchTable, to_device
from fedcover.engines.vectorized.batched_step import StepKind, TrainedStacks
from fedcover.engines.vectorized.chain_layers import ChainLayers, chain_layers
from fedcover.engines.vectorized.chain_stacks import AHEAD, ChainStacks, ChainTiles, Clients, Correction
from fedcover.engines.vectorized.launch import LAUNCHING, compile_kernels
from fedcover.engines.vectorized.layers import Arithmetic
from fedcover.engines.vectorized.side_stream import behind
from fedcover.engines.vectorized.stacks import StackResults, distinct, first_rows, prune_stacks
from fedcover.params import Params
from fedcover.structure.dropout import Stream, with_keyed_dropout
from fedcover.training.client import Job, dropout_key
from fedcover.training.options import PLAIN
from fedcover.training.recipes import LocalSGD, Recipe
from fedcover.training.steps.agreement import RECIPE, STEP, agree, defined_steps
from fedcover.training.steps.chains import find_layers, random_values

MOST_EXAMPLES = 64
"""The largest batch: tiles have a row for each example."""
MOST_CLASSES = 128
"""The largest number of classes: one program has the scores of a client's whole batch."""
TILES = ChainTiles()
SUPPORTED = ("shifts", "complement")
"""The training options that kernels support."""


def try_chain(
    model: nn.Module, jobs: Sequence[Job], kind: StepKind, data: BatchData, arithmetic: Arithmetic
) -> "ChainStep | None":
    """Return the fast path for jobs; None if it does not support their model, data, recipe or options.

    Args:
        model: The model of these clients, which may be a sub-model.
        jobs: The first jobs to be trained; later ones must be of the same kind, and ``takes`` must accept them.
        kind: The kind of the jobs.
        data: The examples, on the device.
        arithmetic: The device to train on and the precision.
    """
    recipe, device, batch_size = jobs[0].recipe, arithmetic.device, jobs[0].recipe.batch_size
    if not has_kernels(device) or arithmetic.precision.name != "fp32" or batch_size > MOST_EXAMPLES:
        return None
    if not _is_supported(recipe) or any(kind.options._replace(**dict.fromkeys(SUPPORTED, False))) or not takes(jobs):
        return None
    if jobs[0].loss is not F.cross_entropy or (tensors := _tensors(data)) is None:
        return None
    correction = Correction(kind.options.shifts, recipe.proximal)
    layers = _agreeing_layers(model, jobs[0], correction, device)
    if layers is None or not _are_classes(tensors[1], layers.linear[-1].outputs):
        return None
    size = kind.steps, kind.clients, batch_size
    return ChainStep(ChainStacks(layers.linear, tensors, size, TILES, layers.front, correction), kind, recipe.decay)


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    return device.type == "cuda" and find_spec("triton") is not None


def takes(jobs: Sequence[Job]) -> bool:
    """Return whether no job has training options other than those that kernels support."""
    return not any(job.options and job.options.has_beyond(*SUPPORTED) for job in jobs)


def _is_supported(recipe: Recipe) -> bool:
    """Return whether a recipe is SGD with momentum, and maybe control variates or a proximal term, and nothing else."""
    return isinstance(recipe, LocalSGD) and replace(recipe, control_variates=False, proximal=0.0).is_plain


def _tensors(data: BatchData) -> tuple[Tensor, Tensor] | None:
    """Return the inputs, one row for each example, and the labels; None if kernels cannot read them."""
    if not isinstance(data, WholeData):
        return None
    inputs, labels = data.tensors
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.float32 or inputs.ndim < 2:
        return None
    if labels.dtype != torch.int64 or labels.ndim != 1 or not (inputs.is_contiguous() and labels.is_contiguous()):
        return None
    return inputs.flatten(1), labels


def _are_classes(labels: Tensor, classes: int) -> bool:
    """Return whether all labels are classes: the kernels do not ignore any."""
    return len(labels) > 0 and bool(((labels >= 0) & (labels < classes)).all())


def _agreeing_layers(model: nn.Module, job: Job, correction: Correction, device: torch.device) -> ChainLayers | None:
    """Return the layers of a chain whose steps agree with the definition; None if there is any doubt."""
    example = job.population.examples.example()
    if not isinstance(example, Tensor):
        return None
    keyed, stream = with_keyed_dropout(model, example)
    layers = chain_layers(find_layers(keyed.train(), stream, example.cpu()) or [])
    if layers is None or layers.linear[-1].outputs > MOST_CLASSES:
        return None
    if layers.front is not None and not choices.POOLED_KERNELS:
        return None
    check = _Check(keyed, stream, example.shape[1:], job.recipe.batch_size, correction)
    return layers if _agrees(layers, check, device) else None


class _Check(NamedTuple):
    """What steps of kernels are compared with: two steps of a model on a full and on a short batch."""

    model: nn.Module
    stream: Stream
    """The stream of the model's dropout."""
    shape: torch.Size
    """The shape of an example."""
    rows: int
    """The examples of the full batch."""
    correction: Correction

    @property
    def short(self) -> int:
        """The examples of the short batch."""
        return -(-self.rows // 2)

    @property
    def recipe(self) -> LocalSGD:
        """The recipe of the two steps. A proximal term of any mu must be large enough to be noticed."""
        return replace(RECIPE, proximal=float(self.correction.proximal > 0))

    def values(self, classes: int, seed: int) -> tuple[Params, Params, Tensor, Tensor]:
        """Return random parameters, shifts, inputs and labels."""
        theta, x, y = random_values(self.model, self.shape, self.rows + self.short, classes, seed)
        shifts = {name: tensor.flip(0) for name, tensor in theta.items()} if self.correction.shifts else {}
        return theta, shifts, x, y


def _agrees(layers: ChainLayers, check: _Check, device: torch.device) -> bool:
    """Return whether two steps of the kernels agree with the definition."""
    rows, short, recipe, classes = check.rows, check.short, check.recipe, layers.linear[-1].outputs
    correction = Correction(check.correction.shifts, recipe.proximal)

    def fast(seed: int) -> list[Tensor]:
        theta, shifts, x, y = check.values(classes, seed)
        data = x.flatten(1).to(device), y.to(device)
        stacks = ChainStacks(layers.linear, data, (STEP + 2, 1, rows), TILES, layers.front, correction)
        stacks.index[STEP, 0].copy_(torch.arange(rows))
        stacks.index[STEP + 1, 0, :short].copy_(torch.arange(rows, rows + short))
        zero = torch.zeros(1, dtype=torch.long, device=device)
        stacks.start(Clients([theta], zero, [{}], zero, [recipe.lr], [seed], shifts=[shifts]), first=STEP)
        stacks.take_steps(2, recipe.momentum)
        trained = [stack[0].cpu() for name in theta for stack in (stacks.theta[name], stacks.velocity[name])]
        return [stacks.losses[STEP : STEP + 2, 0].cpu(), *trained]

    def defined(seed: int) -> Sequence[Tensor]:
        theta, shifts, x, y = check.values(classes, seed)
        check.stream.key, batches = seed, [(x[:rows], y[:rows]), (x[rows:], y[rows:])]
        return defined_steps(check.model, check.stream, F.cross_entropy, theta, batches, recipe, shifts)

    with LAUNCHING:
        if device.type == "cuda":
            with suppress(Exception):  # what fails here fails again below
                compile_kernels([lambda: fast(0)])
        return agree(fast, defined)


class ChainStep:
    """Steps of many clients, captured once and replayed for all batches of clients that fit into the stacks.

    Args:
        stacks: The stacks.
        kind: The kind of the jobs.
        momentum: The factor by which momentum decays at each step.
    """

    def __init__(self, stacks: ChainStacks, kind: StepKind, momentum: float) -> None:
        self._stacks, self.kind, self._momentum = stacks, kind, momentum
        self._device = stacks.index.device
        self._graph: Any = None
        self.stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def queued(self) -> AbstractContextManager[None]:
        """Return a context that is, on a GPU, the stream of this step, behind the work of the current stream."""
        return behind(self.stream)

    def run(self, jobs: Sequence[Job], table: BatchTable) -> TrainedStacks:
        """Train these jobs, and return copies of the results."""
        steps, clients = table.index.shape[:2]
        with LAUNCHING:
            self._load(jobs, table)
            if self._device.type == "cuda" and self._graph is None:
                self._capture()
                self._load(jobs, table)
            self._take(steps)
        stacks = self._stacks
        theta = first_rows(stacks.theta, clients)
        if self.kind.options.complement:
            prune_stacks(theta, {name: ~pruned[:clients] for name, pruned in stacks.pruned().items()})
        return TrainedStacks(StackResults(theta, {}, {}), stacks.losses[:steps, :clients].clone(), {})

    def replay(self, steps: int) -> None:
        """Take the first steps of the last jobs again, from where they ended, for measurements."""
        self._stacks.restart()
        self._take(steps)

    def _take(self, steps: int) -> None:
        """Take some steps of all clients, and up to ``AHEAD`` more, for which no client has a batch."""
        for _ in range(0, steps, AHEAD):
            if self._graph is None:
                self._stacks.take_steps(AHEAD, self._momentum)
            else:
                self._graph.replay()

    def _load(self, jobs: Sequence[Job], table: BatchTable) -> None:
        """Reset the stacks to the start of these jobs. Rows without a job take no steps."""
        stacks, steps = self._stacks, len(table.index)
        stacks.index.fill_(-1)
        stacks.index[:steps, : len(jobs)].copy_(table.index)
        thetas, theta_of = distinct([job.theta for job in jobs])
        masks, mask_of = distinct([job.mask for job in jobs])
        numbers = [to_device(of, self._device) for of in (theta_of, mask_of)]
        lr, keys = [job.recipe.lr for job in jobs], [dropout_key(job) for job in jobs]
        shifts = [(job.options or PLAIN).shifts for job in jobs]
        clients = Clients(thetas, numbers[0], masks, numbers[1], lr, keys, self.kind.options.complement, shifts)
        stacks.start(clients)

    def _capture(self) -> None:
        """Capture some steps as a CUDA graph, after they were taken once."""
        self._stacks.take_steps(AHEAD, self._momentum)
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._stacks.take_steps(AHEAD, self._momentum)
        self._graph = graph  # only now: a graph whose capture failed must not be replayed
