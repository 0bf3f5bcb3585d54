"""The data and the capacity of a node: its part of a data set or its own file, and what a budget buys."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcover as fc
from fedcover.calibration import CostModel
from fedcover.data.loading import source_of
from fedcover.deploy.flower.apps import client as stock_client
from fedcover.deploy.node.configured_client import local_client
from tests.unit.deploy.loop import LoopGrid
from tests.unit.deploy.playing import gathered

Cli = Callable[..., tuple[int, str, str]]


def test_a_node_has_its_part_of_the_data_or_its_own_examples(tmp_path: Path) -> None:
    config = '[data]\nname = "digits"\nclients = 5'
    part = local_client(config, None, 3).examples
    assert len(part) == fc.data.iid(fc.data.load("digits").train, 5).size(3)
    with pytest.raises(fc.InputError, match=r"client 5 must be below 5.*data.clients"):
        local_client(config, None, 5)
    own = tmp_path / "own.npz"
    np.savez(own, inputs=part.inputs.numpy(), labels=part.labels.numpy())
    assert torch.equal(local_client(config, str(own), 99).examples.inputs, part.inputs)
    np.savez(own, inputs=part.inputs.double().numpy(), labels=part.labels.numpy())
    assert torch.equal(local_client(config, str(own), 99).examples.inputs, part.inputs)  # numpy's default is doubles
    assert local_client(config, str(own), 99).examples.inputs.dtype == torch.float32
    np.savez(own, inputs=np.array([object()]), labels=np.array([1]))
    with pytest.raises(fc.InputError, match=r"is not an \.npz file"):
        local_client(config, str(own), 0)
    np.savez(own, inputs=np.zeros((3, 5), np.float32), labels=np.array([1, 2, 0]))
    with pytest.raises(fc.InputError, match=r"shape \(1, 8, 8\), as digits has; got \(5,\)"):
        local_client(config, str(own), 0)


def test_a_nodes_budget_buys_a_share_of_the_runs_model() -> None:
    text = '[data]\nname = "digits"\nclients = 2\n[policy]\nname = "NP"'
    whole = fc.cost_of(fc.trace(local_client(text, None, 0).task.model, torch.zeros(2, 1, 8, 8)), {})
    grid = LoopGrid(
        dict.fromkeys(range(2), stock_client),
        {
            0: {"budget": whole.macs / 2, "budget-unit": "macs"},
            1: {"budget": float(whole.parameters), "budget-unit": "parameters"},
        },
        {"settings": text},
    )
    registry, _ = gathered(grid, 2)
    half, full = registry.devices[0].capacity, registry.devices[1].capacity
    assert half == pytest.approx(0.5, abs=0.01)
    assert full == 1.0


def test_a_nodes_budget_in_bytes_pays_for_moments() -> None:
    text = '[data]\nname = "digits"\nclients = 2\n[policy]\nname = "NP"\n[local]\nname = "Adam"\nkeep_moments = true'
    structure = fc.trace(local_client(text, None, 0).task.model, torch.zeros(2, 1, 8, 8))
    amount = 4.0 * CostModel(structure, units=True).at(0.5).bytes  # each value with three moments, both ways
    grid = LoopGrid({0: stock_client}, {0: {"budget": amount, "budget-unit": "bytes"}}, {"settings": text})
    registry, _ = gathered(grid, 1)
    assert registry.devices[0].capacity == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("policy", ["random_weights", "FedPLT"])
@pytest.mark.parametrize("complement", ["frozen", "quantized", "kept"])
def test_a_nodes_budget_in_bytes_pays_for_what_it_sees(policy: str, complement: str) -> None:
    text = f'[data]\nname = "digits"\nclients = 2\n[policy]\nname = "{policy}"\n[complement]\nname = "{complement}"'
    client = local_client(text, None, 0)
    whole = fc.cost_of(fc.trace(client.task.model, torch.zeros(2, 1, 8, 8)), {})
    amount = 0.8 * (whole.bytes_down + whole.bytes_up)
    grid = LoopGrid({0: stock_client}, {0: {"budget": amount, "budget-unit": "bytes"}}, {"settings": text})
    keep = gathered(grid, 1)[0].devices[0].capacity
    assert keep is not None
    clients = fc.data.iid(client.examples, clients=1)
    federation = fc.Federation(client.task, clients, policy, [fc.Budget(keep)], cohort=1, complement=complement)
    (cost,) = federation.begin_round(federation.start()).costs
    assert 0.9 * amount < cost.bytes_down + cost.bytes_up <= amount


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--budget", "3"], "needs --calibration"),
        (["--budget", "3", "--capacity", "0.5"], "exclude each other"),
        (["--budget", "3", "--budget-unit", "fraction"], "with --capacity"),
        (["--budget", "3", "--budget-unit", "apples"], "'apples'"),
        (["--calibration", "x.json"], "needs --budget"),
        (["--budget", "3", "--calibration", "x.json"], "x.json"),
    ],
)
def test_budgets_of_nodes_are_checked_before_the_node_starts(options: list[str], fragment: str, cli: Cli) -> None:
    code, _, err = cli("deploy", "client", "--server", "127.0.0.1:1", "--insecure", *options)
    assert code == 2
    assert fragment in err


def test_pixels_are_normalised_as_the_data_sets_reader_does(tmp_path: Path) -> None:
    config, own = '[data]\nname = "digits"\nclients = 5', tmp_path / "own.npz"
    part = local_client(config, None, 3).examples
    source = source_of("digits")
    pixels = ((part.inputs * source.std[0] + source.mean[0]) * source.top).round().to(torch.uint8).numpy()
    np.savez(own, inputs=pixels, labels=part.labels.numpy())
    assert torch.equal(local_client(config, str(own), 0).examples.inputs, part.inputs)
    np.savez(own, inputs=pixels * 15, labels=part.labels.numpy())
    with pytest.raises(fc.InputError, match=r"own.npz .*240"):
        local_client(config, str(own), 0)
    np.savez(own, inputs=pixels.astype(np.int64), labels=part.labels.numpy())
    with pytest.raises(fc.InputError, match=r"uint8.*int64"):
        local_client(config, str(own), 0)
    stories = fc.data.load("stories").train
    text = '[data]\nname = "stories"\nclients = 5\n[model]\nname = "transformer"'
    np.savez(own, inputs=stories.inputs[:3].numpy().astype(np.uint8), labels=stories.labels[:3].numpy())
    assert torch.equal(local_client(text, str(own), 0).examples.inputs, stories.inputs[:3])
    np.savez(own, inputs=stories.inputs[:3].float().numpy(), labels=stories.labels[:3].numpy())
    with pytest.raises(fc.InputError, match="stories"):
        local_client(text, str(own), 0)
