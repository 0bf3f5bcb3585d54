"""Local training as published: the recipes of the settings, each with its source."""

from dataclasses import dataclass, replace
from typing import Any

from fedcover.training.recipes import LocalSGD
from fedcover.training.schedules import Cosine, LrSchedule, Milestones

FACTORS = (1 / 3, 1.0, 3.0)
"""The step sizes that are tried, as multiples of the published one."""


@dataclass(frozen=True)
class Training:
    """A published local training: SGD with its step size, schedule, and number of rounds."""

    source: str
    """Where it is published, and what is not."""
    rounds: int
    lr: float
    batch_size: int
    epochs: int = 5
    local_steps: int | None = None
    """The number of steps in a round, instead of epochs."""
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    decay_at: tuple[float, ...] = ()
    """Shares of the rounds after which the step size falls to a tenth."""
    cosine: bool = False
    """Whether the step size falls along half a cosine."""
    evaluations: int = 50
    """How often a run is evaluated."""
    tested_clients: int = 40
    """The clients whose sub-models are tested after the last round."""
    label: str = ""
    """The last part of a setting's name; empty unless another setting has the same data and mix."""

    @property
    def late(self) -> int:
        """The evaluations at the end of a run over which accuracy is averaged: those of a tenth of the rounds."""
        return max(1, self.evaluations // 10)

    @property
    def lrs(self) -> tuple[float, ...]:
        """The step sizes that are tried."""
        return tuple(float(f"{self.lr * factor:.2g}") for factor in FACTORS)

    def schedule(self, rounds: int) -> LrSchedule | None:
        """Return the schedule, stretched to a number of rounds."""
        if self.cosine:
            return Cosine(rounds)
        return Milestones(tuple(max(1, round(at * rounds)) for at in self.decay_at)) if self.decay_at else None

    def recipe(self, lr: float, rounds: int) -> LocalSGD:
        """Return the recipe of clients.

        >>> HETEROFL_CIFAR10.recipe(0.1, 400).schedule
        Milestones(rounds=(150, 250), factor=0.1)
        """
        return LocalSGD(
            self.epochs,
            self.batch_size,
            lr,
            self.momentum,
            self.weight_decay,
            local_steps=self.local_steps,
            clip=self.clip,
            schedule=self.schedule(rounds),
        )

    def steps(self, examples: float) -> float:
        """Return the local steps of a client with this many examples in a round."""
        return self.local_steps or self.epochs * examples / self.batch_size


_HETEROFL = "Diao, Ding and Tarokh, HeteroFL, ICLR 2021, and its code: gradients are clipped at norm 1"
HETEROFL_MNIST = Training(_HETEROFL, 200, 0.01, 10, 5, None, 0.9, 5e-4, 1.0, (0.5,))
HETEROFL_MNIST_SHARDS = Training(_HETEROFL, 400, 0.01, 10, 5, None, 0.9, 5e-4, 1.0, (0.5,))
HETEROFL_CIFAR10 = Training(_HETEROFL, 400, 0.1, 10, 5, None, 0.9, 5e-4, 1.0, (0.375, 0.625))
HETEROFL_CIFAR10_SHARDS = Training(_HETEROFL, 800, 0.1, 10, 5, None, 0.9, 5e-4, 1.0, (0.375, 0.625))
FIARSE = Training(
    "Wu et al., FIARSE, NeurIPS 2024, and its code: 100 steps of plain SGD per round",
    800,
    0.1,
    20,
    local_steps=100,
)
FEDLASE = Training(
    "FedLASE (submitted to NeurIPS 2025), Table 2: rounds, epochs and batch size; momentum 0 to 0.9 there, 0.9 here;"
    " the step size could not be confirmed, since no code of the authors was found",
    2000,
    0.03,
    20,
    momentum=0.9,
)
FEDOPT_SHAKESPEARE = Training(
    "Reddi et al., Adaptive federated optimization, ICLR 2021, and its code: one epoch of plain SGD; the step sizes are"
    " those tuned for FedAvg there, 1 for clients and 1 for the server",
    1200,
    1.0,
    4,
    1,
)
OURS = Training(
    "not published: HeteroFL's training with a cosine schedule",
    200,
    0.03,
    10,
    5,
    None,
    0.9,
    5e-4,
    1.0,
    cosine=True,
)
OURS_HALF = replace(OURS, rounds=100)
OURS_SHORT = Training("not published: one epoch of plain SGD with a cosine schedule", 100, 0.1, 10, 1, cosine=True)
_SHORT: Any = {"evaluations": 20, "tested_clients": 12, "label": "short"}
SHORT = replace(
    OURS,
    source="not published: one epoch of HeteroFL's training with a cosine schedule",
    rounds=100,
    epochs=1,
    **_SHORT,
)
SHAKESPEARE_SHORT = replace(
    FEDOPT_SHAKESPEARE, source=f"{FEDOPT_SHAKESPEARE.source}; a twelfth of its rounds", rounds=100, **_SHORT
)
