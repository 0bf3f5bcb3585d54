"""apple/pfl-research in one process: FederatedAveraging on a SimulatedBackend, users as in-memory tensors."""

import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.player import Player
from benchmarks.workload import Prepared


class Learner(nn.Module):
    """The model with the two methods that pfl requires."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that local training minimises."""
        self.train()
        return F.cross_entropy(self.net(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the loss in the form that pfl requires."""
        self.eval()
        return {"loss": Weighted(F.cross_entropy(self.net(images), labels, reduction="sum").item(), len(images))}


class OnDemand(TrainingProcessCallback):  # type: ignore[misc,unused-ignore]
    """A callback that starts the next iteration when the contest requests it."""

    def __init__(self, player: Player) -> None:
        self.player = player

    def on_train_begin(self, *, model: Any) -> Any:
        """Wait for the first round."""
        self.player.ready()
        if not self.player.wait():
            sys.exit()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Report this round and wait for the next; return True to stop the run."""
        self.player.done()
        return not self.player.wait(), Metrics()


def main() -> None:
    """Play rounds until stdin ends."""
    prepared = Prepared.open(sys.argv[1])
    work = prepared.workload
    np.random.seed(0)
    torch.manual_seed(0)
    images, labels, parts = (prepared.tensor(name) for name in ("train_images", "train_labels", "parts"))

    def user_data(user: int) -> Any:
        return PyTorchTensorDataset((images[parts[user]], labels[parts[user]]))

    cohorts = iter(prepared.array("cohorts").ravel().tolist())
    dataset = FederatedDataset(user_data, user_sampler=lambda: next(cohorts))
    net = prepared.model()
    learner = Learner(net)
    model = PyTorchModel(
        learner,
        local_optimizer_create=partial(torch.optim.SGD, momentum=work.momentum),
        central_optimizer=torch.optim.SGD(learner.parameters(), lr=1.0),
    )
    player = Player(lambda: prepared.accuracy(net), packages=("pfl",))
    FederatedAveraging().run(
        # Training users are evaluated only in round 0, which is the warm-up.
        NNAlgorithmParams(10**6, evaluation_frequency=10**6, train_cohort_size=work.cohort, val_cohort_size=None),
        SimulatedBackend(training_data=dataset, val_data=None),
        model,
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch_size),
        NNEvalHyperParams(local_batch_size=2000),
        callbacks=[OnDemand(player)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
