"""Contracts of every engine: how one is chosen, and federations in lockstep."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fedcover as fc
from fedcover.engines.choose import choose_engine
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from tests.contracts.federations import TOLERANCE, furthest, images, serial


def test_auto_chooses_by_cores_and_cohort() -> None:
    assert str(choose_engine("auto", workers=4, cohort=3)) == "processes, 3 workers"
    assert str(choose_engine("auto", workers=1)) == "serial"
    assert str(choose_engine("auto", workers=4, cohort=1)) == "serial"
    assert str(choose_engine("processes", workers=4, cohort=3)) == "processes, 4 workers"
    with pytest.raises(fc.InputError, match=r"engine must be one of auto, serial, .*got 'gpu'"):
        choose_engine("gpu")
    with pytest.raises(fc.InputError, match="workers must be a whole number"):
        Processes(0, shrink=False)


ENGINES: dict[str, Callable[[], fc.Engine]] = {
    "serial": lambda: Serial(shrink=False),
    "processes": lambda: Processes(2, shrink=False),
    "vectorized": lambda: Vectorized("cpu"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_federations_in_lockstep_agree_with_separate_runs(name: str, tmp_path: Path) -> None:
    """With those of the serial engine, with which other engines agree run by run."""
    engine = ENGINES[name]
    rows = [("mlp", "WP"), ("mlp", "NP"), ("residual", "full"), ("mlp", "PT")]
    separate = [images(serial(), *row, shared=True).run(3) for row in rows]
    folders = [tmp_path / str(i) for i in range(len(rows))]
    rounds: list[tuple[int, int]] = []
    together = fc.run_many(
        [images(Serial(shrink=False), *row) for row in rows], 3, engine=engine(), out=folders,
        on_round=lambda number, record: rounds.append((number, record.round)),
    )  # fmt: skip
    assert rounds == [(number, index) for index in (1, 2, 3) for number in range(len(rows))]
    for a, b, folder in zip(separate, together, folders, strict=True):
        assert furthest(a, b) <= (TOLERANCE if name == "vectorized" else 0.0)
        assert fc.History.load(folder / "history.jsonl") == b
    # Runs at different rounds: two start again, the others resume, and all reach the same end.
    for folder in folders[:2]:
        shutil.rmtree(folder)
    again = fc.run_many(
        [images(Serial(shrink=False), *row) for row in rows], 5, engine=engine(), out=folders, resume=True
    )
    whole = [images(serial(), *row, shared=True).run(5) for row in rows]
    assert [len(history) for history in again] == [5] * len(rows)
    assert all(furthest(a, b) < TOLERANCE for a, b in zip(again, whole, strict=True))


def test_run_many_refuses_a_wrong_number_of_folders(tmp_path: Path) -> None:
    with pytest.raises(fc.InputError, match=r"one folder per federation.*got 2"):
        fc.run_many([images(Serial(shrink=False), "mlp", "WP")], 1, out=[tmp_path / "a", tmp_path / "b"])
    assert fc.run_many([], 3) == []


@pytest.mark.parametrize("name", ["serial", "vectorized"])
def test_runs_in_two_groups_agree_with_separate_runs(name: str, tmp_path: Path) -> None:
    """An engine with ``ahead`` of 2 gets its runs in two groups; they may have stopped at different rounds."""
    rows = ["WP", "NP", "PT"]
    separate = [images(ENGINES[name](), "mlp", row).run(4) for row in rows]
    folders = [tmp_path / row for row in rows]
    for row, rounds in (("WP", 2), ("PT", 3)):
        images(ENGINES[name](), "mlp", row).run(rounds, out=tmp_path / row)
    engine = ENGINES[name]()
    engine.ahead = 2
    together = fc.run_many(
        [images(Serial(shrink=False), "mlp", row) for row in rows], 4, engine=engine, out=folders, resume=True
    )
    assert [len(history) for history in together] == [4, 4, 4]
    close = TOLERANCE if name == "vectorized" else 0.0
    assert all(furthest(a, b) <= close for a, b in zip(separate, together, strict=True))
