"""What a node has and can afford: its part of the data or its own, and what a budget buys there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcover as fc
from fedcover.data.loading import source_of
from fedcover.deploy.flower.apps import client as stock_client
from fedcover.deploy.flower.apps import device_of
from tests.flower.loop import LoopGrid
from tests.flower.playing import gathered

Cli = Callable[..., tuple[int, str, str]]


def test_a_node_has_its_part_of_the_data_or_examples_of_its_own(tmp_path: Path) -> None:
    config = '[data]\nname = "digits"\nclients = 5'
    part = device_of(config, None, 3).examples
    assert len(part) == fc.data.iid(fc.data.load("digits").train, 5).size(3)
    with pytest.raises(fc.InputError, match=r"client 5 has no part of data for 5 clients; see data.clients"):
        device_of(config, None, 5)
    own = tmp_path / "own.npz"
    np.savez(own, inputs=part.inputs.numpy(), labels=part.labels.numpy())
    assert torch.equal(device_of(config, str(own), 99).examples.inputs, part.inputs)
    np.savez(own, inputs=part.inputs.double().numpy(), labels=part.labels.numpy())
    assert torch.equal(device_of(config, str(own), 99).examples.inputs, part.inputs)  # numpy's default is doubles
    assert device_of(config, str(own), 99).examples.inputs.dtype == torch.float32
    np.savez(own, inputs=np.array([object()]), labels=np.array([1]))
    with pytest.raises(fc.InputError, match=r"is no \.npz file with inputs and labels"):
        device_of(config, str(own), 0)
    np.savez(own, inputs=np.zeros((3, 5), np.float32), labels=np.array([1, 2, 0]))
    with pytest.raises(fc.InputError, match=r"has inputs of shape \(5,\), and those of digits have \(1, 8, 8\)"):
        device_of(config, str(own), 0)


def test_a_budget_of_a_node_is_what_it_buys_of_the_runs_model() -> None:
    text = '[data]\nname = "digits"\nclients = 2\n[policy]\nname = "NP"'
    whole = fc.cost_of(fc.trace(device_of(text, None, 0).task.model, torch.zeros(2, 1, 8, 8)), {})
    grid = LoopGrid(
        dict.fromkeys(range(2), stock_client),
        {0: {"budget": whole.macs / 2, "unit": "macs"}, 1: {"budget": float(whole.parameters), "unit": "parameters"}},
        {"settings": text},
    )
    registry, _ = gathered(grid, 2)
    half, full = registry.devices[0].capacity, registry.devices[1].capacity
    assert half == pytest.approx(0.5, abs=0.01)
    assert full == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--budget", "3"], "a budget in seconds needs --calibration FILE"),
        (["--budget", "3", "--capacity", "0.5"], "both say what the node can afford"),
        (["--budget", "3", "--unit", "fraction"], "give a share of the model with --capacity"),
        (["--budget", "3", "--unit", "apples"], "got 'apples'"),
        (["--calibration", "x.json"], "--calibration is for --budget in seconds"),
        (["--budget", "3", "--calibration", "x.json"], "x.json"),
    ],
)
def test_budgets_of_nodes_are_checked_where_they_are_typed(options: list[str], sentence: str, cli: Cli) -> None:
    code, _, err = cli("deploy", "client", "--server", "127.0.0.1:1", "--insecure", *options)
    assert code == 2
    assert sentence in err


def test_bytes_of_pixels_are_what_the_data_sets_own_reader_makes_of_them(tmp_path: Path) -> None:
    config, own = '[data]\nname = "digits"\nclients = 5', tmp_path / "own.npz"
    part = device_of(config, None, 3).examples
    source = source_of("digits")
    pixels = ((part.inputs * source.std[0] + source.mean[0]) * source.top).round().to(torch.uint8).numpy()
    np.savez(own, inputs=pixels, labels=part.labels.numpy())
    assert torch.equal(device_of(config, str(own), 0).examples.inputs, part.inputs)
    np.savez(own, inputs=pixels * 15, labels=part.labels.numpy())
    with pytest.raises(fc.InputError, match=r"bytes of .*own.npz must be at most 16.* got 240"):
        device_of(config, str(own), 0)
    np.savez(own, inputs=pixels.astype(np.int64), labels=part.labels.numpy())
    with pytest.raises(fc.InputError, match=r"bytes \(uint8, 0 to 16\), or floats.* got int64"):
        device_of(config, str(own), 0)
    stories = fc.data.load("stories").train
    text = '[data]\nname = "stories"\nclients = 5\n[model]\nname = "transformer"'
    np.savez(own, inputs=stories.inputs[:3].numpy().astype(np.uint8), labels=stories.labels[:3].numpy())
    assert torch.equal(device_of(text, str(own), 0).examples.inputs, stories.inputs[:3])
    np.savez(own, inputs=stories.inputs[:3].float().numpy(), labels=stories.labels[:3].numpy())
    with pytest.raises(fc.InputError, match="must be whole numbers, as those of stories"):
        device_of(text, str(own), 0)
