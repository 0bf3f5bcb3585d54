"""The check of fast paths: errors of memory are not taken for a disagreement, nor for a model that is refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import fedcover as fc
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.training.steps.agreement import agree


def defined(seed: int) -> Sequence[Tensor]:
    return [torch.tensor([1.0, 2.0])]


def raises(error: Exception) -> Callable[..., Sequence[Tensor]]:
    def steps(*arguments: object) -> Sequence[Tensor]:
        raise error

    return steps


def exhausts(*arguments: object) -> Sequence[Tensor]:
    return [torch.empty(1 << 50)]


EXHAUSTED = {
    "Python": (raises(MemoryError()), MemoryError),
    "GPU": (raises(torch.OutOfMemoryError("CUDA out of memory")), torch.OutOfMemoryError),
    "CPU": (exhausts, RuntimeError),
}


@pytest.mark.parametrize("kind", EXHAUSTED)
def test_exhausted_memory_is_not_a_disagreement(kind: str) -> None:
    fast, error = EXHAUSTED[kind]
    for steps in ((fast, defined), (defined, fast)):
        with pytest.raises(error):
            agree(*steps)


def test_other_errors_are_a_disagreement() -> None:
    assert agree(defined, defined)
    assert not agree(raises(RuntimeError("shapes differ")), defined)
    assert not agree(lambda seed: None, defined)
    assert not agree(lambda seed: [torch.tensor([1.0, 2.1])], defined)


def test_exhausted_memory_is_not_a_model_that_cannot_be_batched(
    small_federation: Callable[..., fc.Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedStep, "run", exhausts)
    with pytest.raises(fc.ClientError, match="can't allocate memory"):
        small_federation(engine=fc.Vectorized("cpu")).run(1)


@pytest.mark.parametrize("kind", EXHAUSTED)
def test_a_worker_that_exhausts_memory_says_so(
    kind: str, small_federation: Callable[..., fc.Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcover.engines.processes.worker._train", EXHAUSTED[kind][0])
    with (
        fc.Processes(1) as engine,
        pytest.raises(fc.ClientError, match="its worker ran out of memory; use fewer workers"),
    ):
        small_federation(engine=engine).run(1)
