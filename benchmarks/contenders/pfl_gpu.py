"""apple/pfl-research on one device, written as its own CIFAR-10 benchmark is.

Users are tensors on the device, central evaluation is a callback, and the postprocessors are those of its benchmark
without privacy. pfl imports packages for the accounting of privacy that nothing here calls; where they are not
installed, empty modules take their place.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNUSED = (
    "scipy", "scipy.special", "scipy.stats", "dp_accounting", "dp_accounting.pld", "dp_accounting.rdp",
    "prv_accountant",
)  # fmt: skip
"""Modules that pfl imports to account for privacy."""


class _Unused(ModuleType):
    """A module without content, any name of which can be imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def find_pfl(folder: str | None) -> str:
    """Make pfl importable, from a folder if there is one, and return its version."""
    if folder:
        sys.path.insert(0, folder)
    missing = {name for name in ("scipy", "dp_accounting", "prv_accountant") if importlib.util.find_spec(name) is None}
    for name in UNUSED:
        if name.partition(".")[0] in missing:
            sys.modules.setdefault(name, _Unused(name))
    from pfl.version import __version__

    return str(__version__)


class Learner(nn.Module):
    """The model with the two methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, images: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        """Return the loss that local training minimises."""
        self.train(not eval)
        return F.cross_entropy(self.net(images), labels.long())

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor, eval: bool = True) -> dict[str, Any]:
        """Return loss and accuracy, as pfl's benchmark does."""
        from pfl.metrics import Weighted

        self.train(not eval)
        scores, labels = self.net(images), labels.long()
        correct = (scores.argmax(-1) == labels).float().sum().item()
        loss = F.cross_entropy(scores, labels, reduction="sum").item()
        return {"loss": Weighted(loss, len(images)), "accuracy": Weighted(correct, len(images))}


@dataclass(frozen=True)
class PflRun:
    """One run of federated averaging; ``evaluate_every`` is None without evaluation of users and test set."""

    users: Sequence[tuple[Tensor, Tensor]]
    cohorts: Iterator[int]
    cohort: int
    test: tuple[Tensor, Tensor]
    iterations: int
    lr: float
    batch_size: int
    device: str
    evaluate_every: int | None = None

    def play(self, net: nn.Module, on_iteration: Callable[[int], None]) -> nn.Module:
        """Train a model, call a function after each iteration, and return the trained model."""
        os.environ["PFL_PYTORCH_DEVICE"] = self.device
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByUser
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel
        from pfl.privacy import CentrallyAppliedPrivacyMechanism, NoPrivacy

        np.random.seed(0)
        torch.manual_seed(0)
        learner = Learner(net).to(self.device)
        optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
        model = PyTorchModel(learner, local_optimizer_create=torch.optim.SGD, central_optimizer=optimizer)
        users = FederatedDataset.from_slices(list(self.users), lambda: next(self.cohorts))
        privacy = [NoPrivacy(), CentrallyAppliedPrivacyMechanism(NoPrivacy())]
        evaluation = NNEvalHyperParams(local_batch_size=10_000)
        FederatedAveraging().run(
            # Training users are evaluated in the first iteration at least.
            NNAlgorithmParams(self.iterations, self.evaluate_every or 10**9, self.cohort, val_cohort_size=0),
            SimulatedBackend(training_data=users, val_data=None, postprocessors=[WeightByUser(), *privacy]),
            model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=self.lr, local_batch_size=self.batch_size),
            evaluation,
            callbacks=self._callbacks(evaluation, on_iteration),
            send_metrics_to_platform=False,
        )
        return net

    def _callbacks(self, evaluation: Any, on_iteration: Callable[[int], None]) -> list[Any]:
        from pfl.callback.base import TrainingProcessCallback
        from pfl.callback.central_evaluation import CentralEvaluationCallback
        from pfl.callback.stopwatch import StopwatchCallback
        from pfl.data.dataset import Dataset
        from pfl.metrics import Metrics

        class Watch(TrainingProcessCallback):  # type: ignore[misc,unused-ignore]
            def after_central_iteration(
                self, aggregate_metrics: Any, model: Any, *, central_iteration: int
            ) -> tuple[bool, Any]:
                on_iteration(central_iteration + 1)
                return False, Metrics()

        if self.evaluate_every is None:
            return [Watch()]
        central = Dataset(raw_data=[tensor.numpy() for tensor in self.test])
        evaluate = CentralEvaluationCallback(central, model_eval_params=evaluation, frequency=self.evaluate_every)
        return [StopwatchCallback(), evaluate, Watch()]


def seconds_since_warm_up(
    warm_up: int, last: int, wait: Callable[[], None]
) -> tuple[Callable[[int], None], list[float]]:
    """Return a function to call after each iteration, and the list of the times at which two of them had ended.

    Args:
        warm_up: The iteration at whose end the first time is taken.
        last: The iteration at whose end the second is taken.
        wait: A function that waits until the device has finished.
    """
    times: list[float] = []

    def on_iteration(iteration: int) -> None:
        if iteration in (warm_up, last):
            wait()
            times.append(time.perf_counter())

    return on_iteration, times
