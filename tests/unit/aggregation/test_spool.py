"""Updates on disk are those that were stored, and nothing is left of the file."""

import os
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.robust import RobustRegions
from fedcover.aggregation.spool import SpoolError, StoredTensors, UpdateSpool
from tests.laws.strategies import same

THETA = {"w": torch.randn(3, 5), "b": torch.randn(()), "half": torch.randn(4).bfloat16(), "none": torch.zeros(0, 2)}


def test_a_stored_update_has_the_tensors_of_the_original() -> None:
    mask = {"w": torch.rand(3, 5) < 0.5}
    original = ClientUpdate(
        2, THETA, mask, 7, 0.5, True, report=THETA, moments={"first": THETA}, discount=0.5, seconds=1.5
    )
    spool = UpdateSpool()
    stored, again = spool.store(original, with_mask=True), spool.store(original)
    assert isinstance(stored.theta, StoredTensors)
    assert again.mask is mask  # coverage of shared masks is counted once
    assert stored.moments is not None
    assert stored.report is not None
    assert all(same(dict(t), THETA) for t in (stored.theta, stored.report, stored.moments["first"], again.theta))
    assert same(dict(stored.mask), mask)
    assert torch.equal(stored.theta.part("w", 4, 9), THETA["w"].reshape(-1)[4:9])
    assert (stored.client, stored.examples, stored.discount, stored.seconds) == (2, 7, 0.5, 1.5)


def test_the_file_has_no_name_and_is_closed_with_its_last_update(tmp_path: Path) -> None:
    spool = UpdateSpool(tmp_path)
    update = spool.store(ClientUpdate(0, THETA, {}))
    file = spool._file
    assert not list(tmp_path.iterdir())
    del spool
    assert torch.equal(update.theta["w"], THETA["w"])
    del update
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_full_disk_is_reported_with_a_remedy() -> None:
    spool = UpdateSpool()
    os.dup2(os.open("/dev/full", os.O_RDWR), spool._file)
    with pytest.raises(SpoolError, match=r"the disk with .* is full; free some space"):
        spool.store(ClientUpdate(0, THETA, {}))


@pytest.mark.parametrize("trim", [0.2, 0.5])
def test_robust_averages_from_disk_have_the_same_bits(trim: float, monkeypatch: pytest.MonkeyPatch) -> None:
    theta = {"w": torch.randn(30, 5), "b": torch.randn(7)}
    updates = [
        ClientUpdate(i, {name: torch.randn(t.shape) for name, t in theta.items()}, {"w": torch.rand(30, 5) < 0.6})
        for i in range(9)
    ]

    def averaged(given: list[ClientUpdate]) -> dict[str, torch.Tensor]:
        total = RobustRegions(theta, trim)
        total.add_together(given)
        stored.append(sum(isinstance(update.theta, StoredTensors) for update in total._updates))
        return total.result()

    stored: list[int] = []
    expected = averaged(updates)
    spool = UpdateSpool()
    assert same(averaged([spool.store(update) for update in updates]), expected)
    monkeypatch.setattr("fedcover.aggregation.robust.MEMORY", 4 * 157 * 4)
    monkeypatch.setattr("fedcover.aggregation.robust.CHUNK", 50)
    assert same(averaged(updates), expected)
    assert stored == [0, 9, 5]


def test_a_mean_weights_an_update_by_its_discount() -> None:
    theta = {"w": torch.zeros(2)}
    mask = {"w": torch.tensor([True, False])}
    for aggregator in (fc.mean(), fc.mean("examples"), fc.zero_padded()):
        total = aggregator.start(theta, [], {})
        total.add(ClientUpdate(0, {"w": torch.tensor([1.0, 1.0])}, {}))
        total.add(ClientUpdate(1, {"w": torch.tensor([4.0, 0.0])}, mask, discount=0.5))
        assert aggregator.discounts
        second = 1 / 1.5 if aggregator == fc.zero_padded() else 1.0
        assert total.result()["w"].tolist() == pytest.approx([2.0, second])
    assert not fc.median().discounts
