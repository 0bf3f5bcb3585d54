"""Units of the zoo: the groups found, the layers left whole with the reason, and the share that budgets keep.

The table of docs/explanation/networks.md is checked against these networks.
"""

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.audit.tally import EntryTally, UnitTally
from fedcover.calibration import CostModel
from fedcover.data.inputs import Inputs, cast_inputs, map_inputs
from fedcover.params import count, params_of, prune, put_params
from fedcover.policies import POLICIES, check_policy
from fedcover.structure.calls import call_model
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure, trace
from fedcover.structure.units import UnitStructure, unit_structure
from tests.zoo import NOT_VECTORIZED, ZOO, network

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "networks.md"
LAYER_NORM = "a LayerNorm, normalises over all of them"

GROUPS: dict[str, list[int]] = {
    "vit": [4, 24, 4, 24],
    "attention": [12, 3, 16],
    "rnn": [7, 8],
    "gru": [7, 8],
    "gru2": [7, 8],
    "lstm": [7, 8],
    "cell": [8],
    "mobilenet": [8, 24, 24, 12, 36, 20],
    "unet": [6, 6, 8, 8, 12, 12, 8, 8, 8, 6, 6, 6],
    "densenet": [6, 4, 4, 4],
    "towers": [6, 9, 10],
    "bert": [4, 24, 4, 24, 16],
    "bert_eager": [4, 24, 4, 24, 16],
    "gpt2": [4, 64, 4, 64],
    "frozen": [8, 10, 12],
    "regression": [16, 8],
    "multilabel": [16, 8],
}
"""The sizes of the groups of units."""

STREAMS: dict[str, list[str]] = {
    "vit": [
        "patches", "cls", "places", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear2",
        "encoder.layers.1.self_attn.out_proj", "encoder.layers.1.linear2",
    ],
    "bert": [
        "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings",
        "bert.embeddings.token_type_embeddings", "bert.encoder.layer.0.attention.output.dense",
        "bert.encoder.layer.0.output.dense", "bert.encoder.layer.1.attention.output.dense",
        "bert.encoder.layer.1.output.dense",
    ],
    "gpt2": [
        f"transformer.{name}"
        for name in ("wpe", "h.0.attn.c_proj", "h.0.mlp.c_proj", "h.1.attn.c_proj", "h.1.mlp.c_proj")
    ],
}  # fmt: skip
STREAMS["bert_eager"] = STREAMS["bert"]
"""The layers that are left whole; in the zoo only because of layer norms."""


@cache
def followed(name: str) -> tuple[ModelStructure, UnitStructure]:
    net, example = network(name)
    structure = trace(net, example)
    return structure, unit_structure(structure)


@pytest.mark.parametrize("name", ZOO)
def test_groups_and_layers_left_whole(name: str) -> None:
    _, units = followed(name)
    assert [group.size for group in units.groups] == GROUPS[name]
    assert set(units.left_whole) == set(STREAMS.get(name, []))
    assert all(LAYER_NORM in reason for reason in units.left_whole.values())


def inputs_like(example: Inputs, rng: torch.Generator) -> Inputs:
    """Five random inputs: numbers of double precision, or tokens."""

    def drawn(part: Tensor) -> Tensor:
        shape = (5, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=torch.float64)
        return torch.randint(int(part.max()) + 1, shape, generator=rng)

    return map_inputs(drawn, example)


@pytest.mark.parametrize("name", ZOO)
def test_the_smaller_network_is_the_masked_one(name: str) -> None:
    """For random units: outputs in evaluation, and gradients in training, in double precision."""
    net, example = network(name)
    net.double()
    structure = trace(net, cast_inputs(example, torch.float64, whole_numbers=False))
    shrinker, rng = Shrinker(structure), torch.Generator().manual_seed(0)
    theta = {
        n: torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(max(1, math.prod(shape[1:])))
        for n, shape in structure.shapes.items()
    }
    for share in (0.7, 0.5, 0.2):
        mask: dict[str, Tensor] = {}
        for group in shrinker.groups:
            kept = torch.rand(group.size, generator=rng) < share
            kept[int(torch.randint(group.size, (), generator=rng))] = True
            group.restrict(mask, theta, kept)
        sub, inputs = shrinker.shrink(mask), inputs_like(example, rng)
        assert not sub.mask
        assert sum(p.numel() for p in sub.model.parameters()) == count(theta, mask)
        dense, small = structure.model, sub.model
        put_params(dense, prune(theta, mask))
        put_params(small, sub.cut(theta))
        with torch.no_grad():
            actual, expected = (call_model(model.eval(), inputs) for model in (small, dense))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        full = sub.restore(gradients(small, inputs), theta)
        for n, gradient in prune(gradients(dense, inputs), mask).items():
            torch.testing.assert_close(full[n], gradient, rtol=1e-7, atol=1e-8)


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The gradients of a sum of squares, in training mode without dropout."""
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    named = dict(model.named_parameters())
    trained = {n: p for n, p in named.items() if p.requires_grad}
    found = torch.autograd.grad(call_model(model, inputs).square().sum(), list(trained.values()), allow_unused=True)
    by_name = dict(zip(trained, found, strict=True))
    return {n: torch.zeros_like(p) if by_name.get(n) is None else by_name[n] for n, p in named.items()}  # type: ignore[misc]


POLICIES_HERE = ("NP", "HeteroFL", "FedRolex", "WP", "optimal")


@cache
def kept_shares(name: str, keep: float) -> dict[str, float]:
    """The share of the parameters that a client with this keep holds in the first round, by policy."""
    structure, _ = followed(name)
    theta, shares = params_of(structure.model), {}
    for policy in POLICIES_HERE:
        bound = POLICIES[policy]().bind(structure)
        cohort = [fc.Client(i, i, fc.Budget(k)) for i, k in enumerate((1.0, keep, keep))]
        plans, _ = bound.plan(theta, cohort, fc.Round(1, 0), bound.start())
        shares[policy] = count(theta, plans[1].mask) / count(theta)
    return shares


@pytest.mark.parametrize("keep", [0.5, 0.25])
@pytest.mark.parametrize("name", ZOO)
def test_budgets_are_kept_as_far_as_layers_can_be_pruned(name: str, keep: float) -> None:
    """Every policy of units keeps the same share, which the message about whole layers gives."""
    structure, _ = followed(name)
    shares = kept_shares(name, keep)
    assert shares["NP"] == pytest.approx(shares["HeteroFL"], abs=0.15)  # NP's units of a bigger layer may be unequal
    assert shares["HeteroFL"] == pytest.approx(shares["FedRolex"], abs=0.02)
    hidden = sum(math.prod(structure.shapes[n]) for n in structure.hidden)
    total = sum(math.prod(shape) for shape in structure.shapes.values())
    exact = (total - hidden + sum(math.ceil(keep * math.prod(structure.shapes[n])) for n in structure.hidden)) / total
    assert shares["WP"] == pytest.approx(exact)
    assert shares["optimal"] == pytest.approx(exact)
    message = fc.federation.advice.whole_sentence(fc.heterofl().bind(structure), structure, [fc.Budget(keep)])
    assert bool(message) == (name in STREAMS)
    if message:
        assert f"{shares['HeteroFL']:.3g} where {keep:g} is asked" in message


@pytest.mark.parametrize("name", ["densenet", "unet", "towers", "gru2", "vit", "gpt2"])
def test_costs_and_audits_count_units_as_masks_do(name: str) -> None:
    """Also where an axis has units of several groups, as behind ``torch.cat``."""
    structure, _ = followed(name)
    policy, theta = fc.fedrolex().bind(structure), params_of(structure.model)
    cohort = [fc.Client(i, i, fc.Budget(keep)) for i, keep in enumerate((0.5, 0.5, 0.25))]
    hold = policy.traits().hold
    assert hold is not None
    by_unit, by_entry = UnitTally(policy, structure, cohort, hold), EntryTally(policy, structure, cohort)
    for index in (1, 2, 3):
        units, entries = (tally.cells(tally.plan(fc.Round(index, 0))) for tally in (by_unit, by_entry))
        assert by_unit.units(units) == by_entry.units(entries)
        for tensor in theta:
            assert by_unit.covered(units, tensor) == by_entry.covered(entries, tensor)
    for keep in (1.0, 0.5, 0.25):
        plans, _ = policy.plan(theta, [fc.Client(0, 0, fc.Budget(keep))], fc.Round(1, 0), {})
        exact, cost = fc.cost_of(structure, plans[0].mask), CostModel(structure, units=True).at(keep)
        assert (cost.parameters, cost.macs) == (exact.parameters, pytest.approx(exact.macs))
        assert cost.bytes_down >= exact.bytes_down


@pytest.mark.parametrize(
    "policy", ["NP", "optimal_units", "HeteroFL", "FedRolex", "weight_complete", "FjORD", "FedEcover"]
)
@pytest.mark.parametrize("name", ["densenet", "gru2", "attention"])
def test_policies_of_units_keep_their_contract(name: str, policy: str) -> None:
    check_policy(POLICIES[policy](), *network(name))


def table() -> list[str]:
    """The table of the page, one row for each network."""
    rows = []
    for name, animal in ZOO.items():
        _, units = followed(name)
        shares = kept_shares(name, 0.25)
        whole = f"{len(units.left_whole)}: layer norm" if units.left_whole else "none"
        rows.append(
            f"| {animal.title} | {len(units.groups)} | {whole} | {shares['HeteroFL']:.2f} | {shares['WP']:.2f} |"
            f" {'not vectorized' if name in NOT_VECTORIZED else 'all'} |"
        )
    return rows


def test_the_page_has_the_table_of_the_zoo() -> None:
    text = PAGE.read_text()
    found = re.findall(r"^\| .* \| \d+ \| .* \| \d\.\d\d \| \d\.\d\d \| [a-z ]+ \|$", text, re.MULTILINE)
    assert found == table(), "\n".join(table())
