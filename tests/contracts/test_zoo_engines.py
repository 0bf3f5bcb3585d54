"""The zoo in every engine: each network with a task, under six policies, agrees with ``Serial`` or is refused.

The serial engine on masked models is the reference. Worker processes give the same bits; shrunk models and the
vectorized engine agree up to rounding.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.data.inputs import map_inputs
from fedcover.federation.advice import kept_share
from fedcover.structure.calls import call_model
from fedcover.structure.units import unit_structure
from tests.contracts.federations import TOLERANCE, furthest
from tests.zoo import CLASSES, NOT_VECTORIZED, PLACES, WORDS, ZOO, network

EXAMPLES, CLIENTS, BATCH = 24, 3, 4
KEEPS = (1.0, 0.5, 0.25)
POLICIES = ("full", "WP", "NP", "HeteroFL", "FedRolex", "optimal")
LOSSES = {"regression": F.mse_loss, "multilabel": F.binary_cross_entropy_with_logits}
METRICS = {"regression": {"rmse"}, "multilabel": {"accuracy", "f1"}}


@dataclass(frozen=True)
class Engines:
    """The engines, which stay open for all networks, so that each traces a model once for all policies."""

    masked: fc.Engine
    shrunk: fc.Engine
    processes: fc.Engine
    vectorized: fc.Engine


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with (
        fc.Serial(shrink=False) as masked,
        fc.Serial(shrink=True, traced=False) as shrunk,
        fc.Processes(2, shrink=False) as processes,
        fc.Vectorized("cpu") as vectorized,
    ):
        yield Engines(masked, shrunk, processes, vectorized)


@cache
def data(name: str) -> tuple[fc.data.Inputs, Tensor]:
    """Return random inputs like the network's example, and targets of its task."""
    model, example = network(name)
    rng = torch.Generator().manual_seed(1)

    def drawn(part: Tensor) -> Tensor:
        shape = (EXAMPLES, *part.shape[1:])
        if part.is_floating_point():
            return torch.randn(shape, generator=rng)
        return torch.randint(int(part.min()), int(part.max()) + 1, shape, generator=rng)

    inputs = map_inputs(drawn, example)
    with torch.no_grad():
        scores = call_model(model.eval(), inputs)
    if name == "regression":
        return inputs, torch.randn(EXAMPLES, generator=rng)
    if name == "multilabel":
        return inputs, torch.randint(2, scores.shape, generator=rng)
    if name == "gpt2":  # the next token of each place, every one of them for each client, and none at the last place
        tokens = (5 * torch.arange(EXAMPLES)[:, None] + torch.arange(PLACES)) % WORDS
        return tokens, F.pad(tokens[:, 1:], (0, 1), value=-100)
    if scores.ndim > 2:  # a class for each pixel
        return inputs, torch.randint(CLASSES, (EXAMPLES, *scores.shape[2:]), generator=rng)
    return inputs, torch.arange(EXAMPLES) % CLASSES


@cache
def task(name: str, dropout: bool) -> tuple[fc.Task, fc.Population]:
    """Return the task and the clients that all policies of a network share."""
    model, _ = network(name)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not dropout:
            layer.p = 0.0
    clients = fc.data.from_parts(data(name), torch.arange(EXAMPLES).split(EXAMPLES // CLIENTS))
    return fc.Task(model, LOSSES.get(name, F.cross_entropy)).fitted(clients.examples), clients


def federation(name: str, policy: str, dropout: bool = True) -> fc.Federation:
    budgets = fc.by_slot([1.0] * CLIENTS if policy == "full" else list(KEEPS))
    return fc.Federation(
        *task(name, dropout), fc.policies.POLICIES[policy](), budgets, fc.LocalSGD(1, BATCH, 0.02, 0.5), CLIENTS, seed=3
    )


def played(playing: fc.Federation, engine: fc.Engine, name: str) -> tuple[fc.History, list[str]]:
    """Play a round; return the history and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (history,) = fc.run_many([playing], 1, data(name), engine=engine)
    assert {warning.category for warning in caught} <= {fc.WholeLayersWarning}
    return history, [str(warning.message) for warning in caught]


@pytest.mark.filterwarnings("ignore:the multiply-adds")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_every_engine_trains_every_network_or_refuses_it(name: str, policy: str, engines: Engines) -> None:
    playing = federation(name, policy)
    expected, messages = played(playing, engines.masked, name)
    check_budgets(playing, expected, messages)
    assert measured(expected) == METRICS.get(name, {"accuracy"})
    for engine in (engines.processes, engines.vectorized):
        if engine is engines.vectorized and name in NOT_VECTORIZED:
            with pytest.raises(
                fc.InputError, match=rf"engine=vectorized cannot .*{NOT_VECTORIZED[name]}.*; use engine="
            ):
                played(playing, engine, name)
        else:
            check_agreement((expected, messages), played(playing, engine, name), 0.0 if engine.exact else TOLERANCE)
    if has_dropout(playing.task.model):  # a smaller model draws for fewer units
        playing = federation(name, policy, dropout=False)
        expected, messages = played(playing, engines.masked, name)
    check_agreement((expected, messages), played(playing, engines.shrunk, name), TOLERANCE)


Played = tuple[fc.History, list[str]]


def check_agreement(expected: Played, actual: Played, tolerance: float) -> None:
    """Check that two engines train the same model, measure the same and warn of the same."""
    assert furthest(expected[0], actual[0]) <= tolerance
    assert expected[1] == actual[1]
    ours, theirs = actual[0].last, expected[0].last
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)
    assert ours.accuracy == pytest.approx(theirs.accuracy)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    assert (ours.kept, ours.cohort, ours.bytes_down) == (theirs.kept, theirs.cohort, theirs.bytes_down)


def measured(history: fc.History) -> set[str]:
    return {*history.last.metrics, *(["accuracy"] if history.last.accuracy is not None else [])}


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Dropout) for layer in model.modules())


def check_budgets(playing: fc.Federation, history: fc.History, messages: list[str]) -> None:
    """Check the shares that clients keep, and that a warning is given only where layers stay whole."""
    structure, units = playing.structure, playing.policy.traits().units
    total = sum(math.prod(shape) for shape in structure.shapes.values())
    for budget, kept in zip(playing.resolved_budgets, history.last.kept, strict=True):
        if units:
            assert kept == pytest.approx(kept_share(budget, structure), abs=0.15)
        else:
            pruned = sum(math.floor((1 - budget.keep) * math.prod(structure.shapes[n])) for n in structure.hidden)
            assert kept == pytest.approx(1 - pruned / total)
    whole = unit_structure(structure).left_whole if units else {}
    assert len(messages) == bool(whole)
    for message in messages:
        assert f"prunes no units of {len(whole)} of the {len(structure.hidden)} hidden layers" in message
        for budget in playing.resolved_budgets[1:]:
            assert f"{kept_share(budget, structure):.3g} where {budget.keep:g} is asked" in message
