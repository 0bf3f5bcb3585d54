"""The settings of the field: data sets with networks, partitions, mixes of levels, and trainings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from fedcover.errors import InputError
from fedcover_experiments.referee import trainings
from fedcover_experiments.referee.trainings import Training

COHORT, CLIENTS = 10, 100
HELD_OUT = 1000
"""The seed with which step sizes are tuned."""
TUNING_SHARE = 0.25
"""The share of the rounds in which step sizes are tuned."""
EVEN, FIVE = "25-25-25-25", "a-b-c-d-e"
MIXES: Mapping[str, tuple[tuple[float, int], ...]] = {
    EVEN: ((1, 1), (0.5, 1), (0.25, 1), (0.125, 1)),
    "10-20-30-40": ((1, 1), (0.5, 2), (0.25, 3), (0.125, 4)),
    "5-10-25-60": ((1, 1), (0.5, 2), (0.25, 5), (0.125, 12)),
    "nobody-full": ((0.5, 1), (0.25, 1), (0.125, 1)),
    FIVE: ((1, 1), (0.5, 1), (0.25, 1), (0.125, 1), (0.0625, 1)),
}
"""The widths of the levels of a mix, and how many clients have each of them, in turn."""
FOUR = ("25-25-25-25", "10-20-30-40", "5-10-25-60", "nobody-full")
CONSTRAINTS = ("parameters", "compute", "memory", "bandwidth")
"""What limits the clients; parameters unless a setting names another."""


@dataclass(frozen=True)
class Problem:
    """A data set with a network."""

    data: str
    network: str
    target: float
    """The accuracy up to which rounds, bytes and multiply-adds are counted."""
    clients: int = CLIENTS
    examples: int = 60_000
    """Training examples, for planning."""
    seeds: int = 5
    crop_flip: bool = False
    """Whether images are cropped and flipped in training."""
    together: int = 20
    """The most runs of a batch, which is stored when it ends."""

    @property
    def name(self) -> str:
        """The name, such as ``mnist-cnn``."""
        return f"{self.data}-{self.network}"


@dataclass(frozen=True)
class Setting:
    """A problem with a partition, a mix of levels, and a training."""

    problem: Problem
    partition: str
    """``iid``, ``shards-2``, ``dirichlet-ALPHA`` or ``natural``."""
    mix: str
    training: Training
    group: str = "published"
    """``core``, ``published``, ``constraints``, ``small`` or ``short``."""
    constraint: str = "parameters"

    @property
    def name(self) -> str:
        """A unique name, such as ``mnist-cnn/iid/25-25-25-25``."""
        limit = "" if self.constraint == "parameters" else self.constraint
        return "/".join(filter(None, (self.problem.name, self.partition, self.mix, limit, self.training.label)))

    @property
    def tuned_at(self) -> str:
        """The mix at which step sizes are tuned."""
        return FIVE if self.mix == FIVE else EVEN

    @property
    def widths(self) -> tuple[float, ...]:
        """The widths of the levels, the largest first."""
        return tuple(width for width, _ in MIXES[self.mix])

    @property
    def cycle(self) -> tuple[float, ...]:
        """The widths of clients 0, 1, 2, ..., which then repeat."""
        return tuple(width for width, count in MIXES[self.mix] for _ in range(count))

    def width_of(self, client: int) -> float:
        """Return the width of a client's level."""
        return self.cycle[client % len(self.cycle)]

    def client_steps(self, rounds: int | None = None) -> int:
        """Return the local steps of all clients in a run, about.

        >>> SETTINGS["cifar10-resnet18/dirichlet-0.3/25-25-25-25"].client_steps()
        800000
        """
        examples = self.problem.examples / self.problem.clients
        return round((rounds or self.training.rounds) * COHORT * self.training.steps(examples))

    def describe(self) -> dict[str, Any]:
        """Return the setting as plain data, with the grid of step sizes."""
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("problem", "training")},
            **asdict(self.problem),
            "levels": {f"{width:g}": count for width, count in MIXES[self.mix]},
            "training": {**asdict(self.training), "lrs": list(self.training.lrs)},
            "tuning": {"seed": HELD_OUT, "share_of_rounds": TUNING_SHARE, "mix": self.tuned_at},
        }


MNIST_CNN = Problem("mnist", "cnn", 0.98)
WRITERS_CNN = Problem("mnist_writers", "cnn", 0.98, clients=539)
QUICKDRAW_CNN = Problem("quickdraw", "cnn", 0.5, examples=27_600)
CIFAR10_RESNET18 = Problem("cifar10", "resnet18", 0.6, examples=50_000, seeds=3, crop_flip=True, together=4)
SHAKESPEARE_LSTM = Problem("shakespeare", "lstm", 0.45, clients=631, examples=40_067)
WRITERS_MLP = Problem("mnist_writers", "mlp", 0.85, clients=539)
MNIST_MLP = Problem("mnist", "mlp", 0.85)
CIFAR10_LENET = Problem("cifar10", "lenet", 0.45, examples=50_000)
QUICKDRAW_LENET = Problem("quickdraw", "lenet", 0.1, examples=27_600)


def _of(
    problem: Problem,
    partition: str,
    mixes: Sequence[str],
    training: Training,
    group: str = "published",
    constraints: Sequence[str] = ("parameters",),
) -> list[Setting]:
    """Return the settings of one problem and partition."""
    return [Setting(problem, partition, mix, training, group, limit) for mix in mixes for limit in constraints]


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        *_of(WRITERS_CNN, "natural", FOUR, trainings.OURS, "core"),
        *_of(QUICKDRAW_CNN, "iid", FOUR, trainings.OURS, "core"),
        *_of(CIFAR10_RESNET18, "dirichlet-0.3", FOUR, trainings.FIARSE, "core"),
        *_of(SHAKESPEARE_LSTM, "natural", FOUR, trainings.FEDOPT_SHAKESPEARE, "core"),
        *_of(MNIST_CNN, "iid", (FIVE,), trainings.HETEROFL_MNIST),
        *_of(MNIST_CNN, "shards-2", (FIVE,), trainings.HETEROFL_MNIST_SHARDS),
        *_of(CIFAR10_RESNET18, "iid", (FIVE,), trainings.HETEROFL_CIFAR10),
        *_of(CIFAR10_RESNET18, "shards-2", (FIVE,), trainings.HETEROFL_CIFAR10_SHARDS),
        *_of(CIFAR10_RESNET18, "dirichlet-0.1", (EVEN, "5-10-25-60"), trainings.FEDLASE),
        *_of(CIFAR10_RESNET18, "dirichlet-0.3", (EVEN,), trainings.FIARSE, "constraints", CONSTRAINTS[1:]),
        *_of(WRITERS_MLP, "natural", FOUR, trainings.OURS_SHORT, "small"),
        *_of(MNIST_MLP, "dirichlet-0.3", FOUR, trainings.OURS_SHORT, "small"),
        *_of(CIFAR10_LENET, "dirichlet-0.3", FOUR, trainings.OURS_SHORT, "small"),
        *_of(QUICKDRAW_LENET, "iid", FOUR, trainings.OURS_HALF, "small"),
        *_of(CIFAR10_RESNET18, "dirichlet-0.3", FOUR, trainings.SHORT, "short"),
        *_of(SHAKESPEARE_LSTM, "natural", FOUR, trainings.SHAKESPEARE_SHORT, "short"),
    )
}
"""All settings by name."""


def select_settings(wanted: str) -> list[Setting]:
    """Return the settings that a list of groups, names, beginnings of names or patterns selects; all if it is empty.

    A whole name selects no other setting whose name begins with it.

    Raises:
        InputError: If an item of the list selects nothing.

    >>> [setting.mix for setting in select_settings("mnist-cnn,*resnet18/dirichlet-0.1/*60")]
    ['a-b-c-d-e', 'a-b-c-d-e', '5-10-25-60']
    >>> [len(select_settings(f"cifar10-resnet18/dirichlet-0.3{mix}")) for mix in ("", "/25-25-25-25", "/*/short")]
    [11, 1, 4]
    """
    chosen: dict[str, Setting] = {}
    for item in map(str.strip, wanted.split(",")):
        matching = {name: setting for name, setting in SETTINGS.items() if item in ("", name)}
        matching = matching or {name: setting for name, setting in SETTINGS.items() if _matches(setting, item)}
        if not matching:
            groups = dict.fromkeys(setting.group for setting in SETTINGS.values())
            raise InputError(f"no setting matches '{item}'; use some of {', '.join([*groups, *SETTINGS])}")
        chosen |= matching
    return list(chosen.values())


def _matches(setting: Setting, item: str) -> bool:
    return item == setting.group or f"{setting.name}/".startswith(f"{item}/") or fnmatchcase(setting.name, item)
