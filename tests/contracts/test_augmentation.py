"""Augmentation in the batches of every engine: the same images as in serial training, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import fedcover as fc
from fedcover.budgets import Budget
from fedcover.data.augment import RandomCropFlip, Views
from fedcover.data.inputs import Inputs
from fedcover.engines.vectorized.batch_data import RoundData, ViewedData, resident_data
from fedcover.engines.vectorized.batch_table import batch_table
from fedcover.engines.vectorized.client_indices import ClientIndices
from fedcover.models import LeNet
from fedcover.training.client import Job, augmentation_key, epoch_orders, training_batch, view_numbers
from tests.contracts.federations import TOLERANCE, furthest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENGINES: dict[str, Any] = {"processes": lambda: fc.Processes(2, shrink=False), "vectorized": fc.Vectorized}
if DEVICE.type == "cuda":  # a process that used a GPU cannot fork workers
    del ENGINES["processes"]


def examples(shape: tuple[int, ...] = (2, 7, 5), count: int = 60) -> fc.Examples:
    """Return images without a pixel of 0."""
    images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1)) + 1
    return fc.Examples(images, torch.arange(count) % 3, classes=3)


def jobs(data: fc.Examples, sizes: Sequence[int], recipe: fc.LocalSGD, index: int = 1) -> list[Job]:
    """Return jobs of clients of these sizes, which overlap."""
    clients = fc.data.from_parts(data, [range(n, n + size) for n, size in enumerate(sizes)])
    task, this_round = fc.Task(LeNet((1, 16, 16), 3)), fc.Round(index, seed=4)
    return [Job(task, clients, fc.Client(n, n, Budget(1.0)), {}, {}, recipe, this_round) for n in range(len(sizes))]


def serial_batches(job: Job) -> list[tuple[Inputs, Tensor]]:
    """Return the batches of serial training."""
    orders = epoch_orders(job, job.population.indices(job.client.id))
    rows = [rows for order in orders for rows in order.split(job.recipe.batch_size)]
    return [training_batch(job, chosen, step) for step, chosen in enumerate(rows)]


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("sizes", [(12, 12, 12), (9, 4, 1, 17)])
@pytest.mark.parametrize(
    ("padding", "flip", "shape"),
    [(4, True, (3, 8, 8)), (1, True, (2, 7, 5)), (0, True, (1, 3, 4)), (2, False, (1, 5, 3)), (0, False, (1, 4, 4)),
     (6, True, (1, 3, 5))],
)  # fmt: skip
def test_gathered_batches_are_those_of_serial_training(
    padding: int, flip: bool, shape: tuple[int, ...], sizes: Sequence[int], index: int
) -> None:
    data = examples(shape).augmented(fc.data.random_crop_flip(padding, flip))
    some = jobs(data, sizes, fc.LocalSGD(2, 4, local_steps=None if index == 1 else 7), index)
    table = batch_table(some, ClientIndices(DEVICE))
    gathered = resident_data(data, DEVICE)
    assert isinstance(gathered, ViewedData)
    rows = gathered.load(some, table)
    for client, job in enumerate(some):
        batches = serial_batches(job)
        for step in range(len(rows)):
            x, y, real = (part[client].cpu() for part in gathered.batch(rows[step]))  # type: ignore[index]
            if step >= len(batches):
                assert not bool(real.any())
                continue
            inputs, labels = batches[step]
            assert torch.equal(x[real], inputs)  # type: ignore[index]
            assert torch.equal(y[real], labels)


def test_views_do_not_depend_on_the_other_clients() -> None:
    data = examples().augmented(fc.data.random_crop_flip())
    some = jobs(data, (9, 4, 17), fc.LocalSGD(2, 4))
    gathered = ViewedData(data, fc.data.random_crop_flip(), DEVICE)
    together, alone = (gathered.load(part, batch_table(part, ClientIndices(DEVICE))) for part in (some, some[1:2]))
    assert torch.equal(together[: len(alone), 1:2], alone)


def test_a_client_on_its_own_device_sees_the_same_images() -> None:
    data = examples().augmented(fc.data.random_crop_flip())
    job = jobs(data, (9, 4, 17), fc.LocalSGD(2, 4))[2]
    alone = replace(job, population=fc.data.SingleClientPopulation(2, job.population.examples_of(2)))
    for (x, y), (a, b) in zip(serial_batches(job), serial_batches(alone), strict=True):
        assert torch.equal(x, a)  # type: ignore[arg-type]
        assert torch.equal(y, b)


def test_views_are_uniform_and_differ_between_steps_positions_clients_rounds_and_seeds() -> None:
    flip, data = RandomCropFlip(1), examples()
    keys = [
        augmentation_key(Job(None, None, fc.Client(c, 0, Budget(1.0)), {}, {}, None, fc.Round(r, s)))  # type: ignore[arg-type]
        for c in range(4)
        for r in range(4)
        for s in range(4)
    ]
    steps, positions = torch.arange(50).view(-1, 1, 1), torch.arange(18)
    views = view_numbers(flip, torch.tensor(keys).view(-1, 1), steps, positions)
    assert flip.views == 18
    counts = torch.bincount(views.flatten(), minlength=18).double()
    expected = views.numel() / 18
    assert len(counts) == 18
    assert float(((counts - expected) ** 2 / expected).sum()) < 43  # chi squared of 17 degrees of freedom, p > 0.0005
    for axis in range(3):
        pairs = views.narrow(axis, 1, views.shape[axis] - 1), views.narrow(axis, 0, views.shape[axis] - 1)
        assert float((pairs[0] == pairs[1]).double().mean()) == pytest.approx(1 / 18, rel=0.05)
    images = flip.source(data.inputs)(torch.zeros(18, dtype=torch.long), torch.arange(18))
    assert len({tuple(image.flatten().tolist()) for image in images}) == 18  # type: ignore[union-attr]


def test_a_view_is_a_part_of_the_padded_image() -> None:
    image, flip = examples((2, 4, 3)).inputs[:1], RandomCropFlip(1)  # type: ignore[index]
    padded = F.pad(image, [1] * 4)
    parts = [padded[:, :, y : y + 4, x : x + 3] for y in range(3) for x in range(3)]
    expected = {tuple(view.flatten().tolist()) for part in parts for view in (part, part.flip(3))}
    for stored in (image, image.contiguous(memory_format=torch.channels_last), image.double()):
        shown = flip.source(stored)(torch.zeros(18, dtype=torch.long), torch.arange(18))
        assert {tuple(view.flatten().tolist()) for view in shown} == expected  # type: ignore[union-attr]


def federation(engine: fc.Engine, data: Any, augment: Any, policy: str = "WP") -> fc.Federation:
    parts = torch.arange(60).split([9, 4, 1, 17, 16, 13])
    clients = fc.data.from_parts(data, parts).augmented(augment)
    recipe = fc.LocalSGD(epochs=2, batch_size=4, lr=0.05)
    torch.manual_seed(0)
    net = LeNet((1, 16, 16), 3)
    return fc.Federation(fc.Task(net), clients, policy, fc.by_slot("1247"), recipe, cohort=4, seed=5, engine=engine)


def lazy(data: fc.Examples) -> Any:
    """Return the same examples as a data set that is read when needed."""

    class Lazy(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(tensor[index] for tensor in self.tensors)

    dataset = torch.utils.data.Subset(Lazy(*data.tensors()), range(len(data)))  # type: ignore[arg-type]
    return fc.data.as_examples(dataset)


@pytest.mark.parametrize("policy", ["WP", "FedDST"])
@pytest.mark.parametrize("kind", ["in memory", "lazy"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_on_augmented_images(engine: str, kind: str, policy: str) -> None:
    data = examples((1, 16, 16))
    data = lazy(data) if kind == "lazy" else data
    assert data.in_memory == (kind == "in memory")
    crops = fc.data.random_crop_flip(2)
    expected = federation(fc.Serial(shrink=False), examples((1, 16, 16)), crops, policy).run(2)
    history = federation(ENGINES[engine](), data, crops, policy).run(2)
    assert furthest(expected, history) <= (TOLERANCE if engine == "vectorized" else 0.0)
    plain = federation(fc.Serial(shrink=False), examples((1, 16, 16)), None, policy).run(2)
    assert furthest(expected, plain) > 10 * TOLERANCE


@pytest.mark.parametrize("engine", ["serial", "vectorized"])
def test_an_augmented_run_resumes_to_the_same_bits(engine: str, tmp_path: Path) -> None:
    make = {"serial": lambda: fc.Serial(shrink=False), "vectorized": fc.Vectorized}[engine]
    data, crops = examples((1, 16, 16)), fc.data.random_crop_flip(2)
    whole = federation(make(), data, crops).run(3)
    federation(make(), data, crops).run(1, out=tmp_path / "run")
    resumed = federation(make(), data, crops).run(3, out=tmp_path / "run", resume=True)
    assert all(torch.equal(whole.theta[name], tensor) for name, tensor in resumed.theta.items())


class Scaled(Views):
    """Views of a user's own: an input times 1, 2 or 4."""

    views = 3

    def source(self, inputs: Inputs) -> Any:
        """Return a function that scales the inputs."""
        return lambda rows, views: inputs[rows] * (1 << views).to(inputs.dtype).view(-1, 1, 1, 1)  # type: ignore[index,union-attr]


class Halved(Scaled):
    """Views of another shape."""

    def source(self, inputs: Inputs) -> Any:
        """Return a function that drops rows of pixels."""
        return lambda rows, views: inputs[rows][:, :, ::2]  # type: ignore[index]


class Without(Scaled):
    """No views at all."""

    views = 0


def test_views_of_ones_own_run_on_every_engine() -> None:
    data = examples((1, 16, 16))
    expected = federation(fc.Serial(shrink=False), data, Scaled()).run(2)
    assert furthest(expected, federation(fc.Vectorized(), data, Scaled()).run(2)) < TOLERANCE


@pytest.mark.parametrize("engine", [lambda: fc.Serial(shrink=False), fc.Vectorized])
@pytest.mark.parametrize(
    ("augment", "why"), [(Halved(), "must return inputs of the same shape"), (Without(), "must have 1 to")]
)
def test_wrong_views_are_refused(engine: Any, augment: Views, why: str) -> None:
    with pytest.raises((fc.InputError, fc.ClientError), match=why):
        federation(engine(), examples((1, 16, 16)), augment).run(1)


def test_functions_and_lazy_data_are_read_before_the_round() -> None:
    data = examples((1, 16, 16))
    assert resident_data(data.augmented(lambda inputs, rng: inputs), DEVICE) is None
    read = lazy(data).augmented(fc.data.random_crop_flip(2))
    assert resident_data(read, DEVICE) is None
    some = jobs(read, (9, 4), fc.LocalSGD(2, 4))
    table = batch_table(some, ClientIndices(DEVICE))
    batches = RoundData(read, table.index.numel(), DEVICE)
    x, _, real = batches.batch(batches.load(some, table)[2])
    for client, job in enumerate(some[:1]):
        assert torch.equal(x[client][real[client]].cpu(), serial_batches(job)[2][0])  # type: ignore[index]
