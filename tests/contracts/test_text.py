"""Models of text with a label per position: every engine against the serial one, whole and shrunk."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fedcover as fc
from fedcover.data import load
from fedcover.models import LSTM, Transformer
from fedcover.policies import POLICIES
from fedcover.seeding import ambient
from tests.contracts.federations import DEVICES, TOLERANCE, furthest

# The residual stream stays whole under its layer norms, of which a run with FS warns.
pytestmark = pytest.mark.filterwarnings("ignore::fedcover.WholeLayersWarning")
ROW = 8
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "transformer": lambda classes: Transformer((ROW,), classes, width=8, head=4),
    "lstm": lambda classes: LSTM((ROW,), classes, hidden=8),
}


def federation(engine: fc.Engine, policy: str = "FS", model: str = "transformer") -> fc.Federation:
    """Three authors with few rows of eight characters; in batches of 4, one of which is short."""
    stories = load("stories").train
    rows = [torch.arange(author * 50, author * 50 + size) for author, size in enumerate((8, 5, 12))]
    text = fc.Examples(stories.inputs[:, :ROW].clone(), stories.labels[:, :ROW].clone(), stories.classes)
    with ambient(0, "text"):
        task = fc.Task(MODELS[model](stories.classes))
    return fc.Federation(
        task, fc.data.from_parts(text, rows), POLICIES[policy](), fc.by_slot("1,0.5,0.5"),
        fc.LocalSGD(2, 4, 0.1, 0.5), cohort=3, seed=1, engine=engine,
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["WP", "FS"])
def test_processes_and_shrunk_models_agree_with_serial(policy: str) -> None:
    expected = federation(fc.Serial(shrink=False), policy).run(2)
    assert furthest(expected, federation(fc.Processes(2, shrink=False), policy).run(2)) == 0.0
    assert furthest(expected, federation(fc.Serial(shrink=True), policy).run(2)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["WP", "FS"])
def test_vectorized_agrees_with_serial(policy: str, device: str) -> None:
    expected, actual = (
        federation(engine, policy).run(2) for engine in (fc.Serial(shrink=False), fc.Vectorized(device))
    )
    assert furthest(expected, actual) < TOLERANCE


def test_engines_agree_on_an_lstm() -> None:
    expected = federation(fc.Serial(shrink=False), model="lstm").run(2)
    for engine in (fc.Serial(shrink=True), fc.Vectorized("cpu")):
        assert furthest(expected, federation(engine, model="lstm").run(2)) < TOLERANCE


def test_a_transformer_learns_from_stories() -> None:
    """Better than always predicting the most frequent character, on rows that are not in the training data."""
    test = load("stories").test
    rows = fc.Examples(test.inputs[:30, :ROW].clone(), test.labels[:30, :ROW].clone(), test.classes)
    accuracy = federation(fc.Serial(shrink=False)).run(20, evaluate_on=rows, evaluate_every=20).last.accuracy
    assert accuracy is not None
    assert accuracy > 1.2 * float(rows.label_counts().max() / rows.label_counts().sum())
