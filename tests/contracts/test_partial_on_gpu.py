"""Partial training on a GPU: steps do not wait for it, and are chosen where launches are saved."""

from dataclasses import replace

import pytest
import torch

from fedcover.params import FixedMask, params_of
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.training.steps.partial import PartialModel, PartialSteps, trained_parts
from fedcover.training.steps.partial_choice import pays_on_gpu
from tests.conftest import small_net
from tests.contracts.test_partial_training import EXAMPLES, SEEN, entries, job_of, made, mask_of


def test_where_partial_steps_pay_on_a_gpu() -> None:
    some, none, every = torch.tensor([True, False]), torch.tensor([False]), torch.tensor([True])
    assert pays_on_gpu({"v": none, "w": every})  # fewer launches
    assert not pays_on_gpu({"v": some, "w": every})  # more launches
    assert pays_on_gpu({"a": none, "b": none, "w": some})


META = torch.device("meta")
"""A device whose values cannot be read, as those of a GPU should not be while it computes."""


@pytest.mark.parametrize("kind", ["window", "entries", "FedRolex"])
def test_steps_do_not_wait_for_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the device, and no index is copied to it: both fail on this one."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    task, clients = made("residual")
    job = job_of(task, clients, mask_of(kind, task.structure(clients.examples.example())))
    job = replace(job, theta={name: t.to(META) for name, t in job.theta.items()})
    parts = trained_parts(list(job.theta), job.mask, job.theta)
    assert {t.device for p in parts.values() for t in (p.rows, p.columns, p.entries) if t is not None} <= {META}
    model, stream = with_keyed_dropout(task.model)
    steps = PartialSteps(PartialModel(model.to(META), stream, task.loss), job, SEEN, parts)
    inputs, labels = (tensor.to(META) for tensor in clients.examples.tensors())
    losses = steps.epochs(inputs, labels, [torch.arange(EXAMPLES)], 4)
    assert losses.shape == (3,)
    assert all(tensor.device == META for tensor in steps.finish().theta.values())


def test_indices_on_a_gpu_are_computed_once_for_each_mask() -> None:
    theta = {name: t.to(META) for name, t in params_of(small_net()).items()}
    mask = FixedMask(entries(params_of(small_net())))
    first, again = (trained_parts(list(theta), mask, theta) for _ in range(2))
    assert first
    assert all(first[name] is again[name] for name in first)
