"""What is kept of clients rests beside the model while a GPU has room: nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover import params
from fedcover.engines.vectorized import Vectorized
from fedcover.federation.checkpoint import State

KINDS: dict[str, dict[str, Any]] = {
    "control variates": {"local": fc.LocalSGD(epochs=1, control_variates=True)},
    "moments": {"local": fc.LocalAdam(epochs=1, keep_moments=True)},
    "copies": {"complement": fc.Kept()},
    "copies and control variates": {
        "local": fc.LocalSGD(epochs=1, control_variates=True),
        "complement": fc.Kept(),
    },
}


def federation(kind: str, device: str) -> fc.Federation:
    rng = torch.Generator().manual_seed(0)
    clients = fc.data.iid((torch.randn(120, 10, generator=rng), torch.arange(120) % 3), clients=6, seed=0)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    engine = Vectorized(device)
    budgets, policy = fc.by_slot("3x0.5"), fc.random_weights()
    return fc.Federation(fc.Task(net), clients, policy, budgets, cohort=3, engine=engine, **KINDS[kind])


def last_state(kind: str, device: str) -> State:
    """Play three rounds, the last of them with what is kept of clients back on the CPU, as after a checkpoint."""
    one = federation(kind, device)
    state = one.start()
    for number in range(3):
        if number == 2:
            state = replace(state, clients={name: tensor.cpu() for name, tensor in state.clients.items()})
        state, _ = one.play_round(state)
    return state


def test_a_cpu_is_never_a_place_beside_a_gpu() -> None:
    theta = {"w": torch.zeros(2)}
    assert not params.has_room(torch.device("cpu"))
    assert params.storage_of(theta) == torch.device("cpu")


@pytest.mark.parametrize("reserved", [60, 10])
def test_states_stay_on_a_gpu_while_a_quarter_of_it_is_free(monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
    """Memory that torch has reserved and does not use is free."""
    monkeypatch.setattr(params, "device_of", lambda theta: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    assert params.storage_of({}).type == ("cuda" if reserved == 60 else "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_states_have_the_same_bits_on_a_gpu_and_beside_it_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near = last_state(kind, "cuda")
    monkeypatch.setattr(params, "has_room", lambda device, share=0.5: False)
    far = last_state(kind, "cuda")
    assert {tensor.device.type for tensor in far.clients.values()} == {"cpu"}
    assert "cuda" in {tensor.device.type for tensor in near.clients.values()}  # of clients in the last cohort
    assert near.clients.keys() == far.clients.keys() != set()
    assert all(torch.equal(tensor.cpu(), far.clients[name]) for name, tensor in near.clients.items())
    assert all(torch.equal(tensor, far.theta[name]) for name, tensor in near.theta.items())
