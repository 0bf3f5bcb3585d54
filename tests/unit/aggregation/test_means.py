"""Zero-padded and norm-weighted means, and what the theorem covers."""

from typing import Any

import pytest
import torch

import fedcover as fc

THETA = {"w": torch.tensor([8.0, 8.0, 8.0]), "b": torch.tensor([1.0])}
FIRST = {"w": torch.tensor([True, True, False])}


def result(aggregator: fc.Aggregator, updates: list[fc.ClientUpdate]) -> dict[str, Any]:
    aggregation = aggregator.start(THETA, [], {})
    for update in updates:
        aggregation.add(update)
    return {name: tensor.tolist() for name, tensor in aggregation.result().items()}


def update(client: int, w: list[float], b: float, mask: Any = None, examples: int = 1) -> fc.ClientUpdate:
    return fc.ClientUpdate(client, {"w": torch.tensor(w), "b": torch.tensor([b])}, mask or {}, examples)


def test_zero_padding_divides_by_all_clients() -> None:
    """Two of four clients hold the second entry: it shrinks to half of their mean; nobody holds the third."""
    one = {"w": torch.tensor([True, False, False])}
    updates = [update(i, [4.0, 6.0, 99.0], 2.0, FIRST if i < 2 else one) for i in range(4)]
    assert result(fc.zero_padded(), updates) == {"w": [4.0, 3.0, 8.0], "b": [2.0]}
    assert result(fc.mean(), updates) == {"w": [4.0, 6.0, 8.0], "b": [2.0]}


def test_zero_padding_by_examples() -> None:
    updates = [update(0, [4.0, 6.0, 99.0], 2.0, FIRST, examples=3), update(1, [4.0, 6.0, 4.0], 2.0, examples=1)]
    assert result(fc.zero_padded("examples"), updates) == {"w": [4.0, 6.0, 1.0], "b": [2.0]}


def test_norms_are_those_of_updates_inside_masks() -> None:
    """The first client changes w by (3, 4) inside its mask, so its weight is 5; the second one's is 10."""
    updates = [update(0, [11.0, 12.0, 1e9], 1.0, FIRST), update(1, [8.0, 8.0, 18.0], 1.0)]
    new = result(fc.norm_weighted(), updates)
    assert new["w"] == pytest.approx([(5 * 11 + 10 * 8) / 15, (5 * 12 + 10 * 8) / 15, 18.0])
    assert new["b"] == [1.0]


def test_updates_without_a_change_leave_the_model() -> None:
    unchanged = fc.ClientUpdate(0, THETA, {})
    assert result(fc.norm_weighted(), [unchanged, unchanged]) == {name: t.tolist() for name, t in THETA.items()}


@pytest.mark.parametrize(
    ("aggregator", "examples", "word"),
    [
        (fc.mean(), [1, 2], None),
        (fc.mean("examples"), [2, 2], None),
        (fc.mean("examples"), [1, 2], "weights its clients"),
        (fc.mean("labels"), [2, 2], "weights its clients"),
        (fc.median(), [2, 2], "robust"),
        (fc.zero_padded(), [2, 2], "ZeroPaddedMean"),
        (fc.norm_weighted(), [2, 2], "NormMean"),
        (fc.FedAdam(), [2, 2], "FedAdam"),
    ],
)
def test_what_the_theorem_covers(aggregator: fc.Aggregator, examples: list[int], word: str | None) -> None:
    reason = aggregator.beyond(examples)
    assert reason is None if word is None else word in str(reason)


def test_unknown_weightings_are_refused() -> None:
    with pytest.raises(fc.InputError, match="weighting must be one of uniform, examples; got 'labels'"):
        fc.zero_padded("labels")  # type: ignore[arg-type]


def test_labels_need_a_population() -> None:
    with pytest.raises(fc.InputError, match="not bound to a population"):
        fc.mean("labels").start(THETA, [], {})
