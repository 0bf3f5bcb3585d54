"""Write a workload to disk for the peers: the data, partition, cohorts and theta_0 that fedcover uses."""

from pathlib import Path

import numpy as np
import torch

from benchmarks.tensors import tensors_of
from benchmarks.workload import Prepared, Workload
from fedcover import data
from fedcover.clients import sample_ids
from fedcover.data.catalogue import SOURCES
from fedcover.errors import InputError
from fedcover.models import build
from fedcover.seeding import Round

ROUNDS = 1000


def available(name: str) -> bool:
    """Return whether a data set is on this machine or can be downloaded."""
    try:
        if data.describe(name).where is None:
            data.get(name, progress=print)
    except InputError as error:
        print(error)
        return False
    return True


def prepare(work: Workload, folder: Path) -> Prepared:
    """Write the workload into a folder that peers can read."""
    split, source = data.load(work.data), SOURCES[work.data]
    clients = data.iid(split.train, work.clients, seed=work.seed)
    mean, std = (np.array(values, dtype=np.float32) for values in (source.mean, source.std))
    scale = torch.tensor(std).view(-1, 1, 1), torch.tensor(mean).view(-1, 1, 1)
    (train_images, train_labels), (test_images, test_labels) = tensors_of(split.train), tensors_of(split.test)
    pixels = (train_images * scale[0] + scale[1]).mul_(255).round_().to(torch.uint8)
    model = build(work.model, split.train.input_shape, split.train.classes, work.seed)
    prepared = Prepared(folder, work)
    prepared.write(
        train_images=train_images.numpy(),
        train_labels=train_labels.numpy(),
        train_bytes=pixels.permute(0, 2, 3, 1).squeeze(-1).contiguous().numpy(),
        test_images=test_images.numpy(),
        test_labels=test_labels.numpy(),
        parts=np.stack([clients.indices(i).numpy() for i in range(work.clients)]),
        cohorts=np.array([sample_ids(work.clients, work.cohort, Round(q, work.seed)) for q in range(1, ROUNDS + 1)]),
        theta=torch.cat([tensor.detach().flatten() for tensor in model.parameters()]).numpy(),
        mean=mean,
        std=std,
    )
    return prepared
