"""Results stay as they are, bit for bit on the kind of machine that recorded them, and to rounding elsewhere."""

import json
from typing import Any

import pytest

from tests.golden.cases import GOLDEN, every_case, machine

RECORDED = json.loads(GOLDEN.read_text())
CLOSE = 2e-3
"""Share by which sums may differ on another kind of processor, whose products round differently."""


def bits(case: Any) -> Any:
    """Return what must not change on the same machine; sums of a model's entries depend on the number of threads."""
    parts = {part: value for part, value in case.items() if part != "machine"}
    return {part: value["digest"] if isinstance(value, dict) else value for part, value in parts.items()}


def agree(name: str, recorded: Any, computed: Any) -> None:
    if bits(recorded["cases"][name]) == bits(computed):
        return
    where = recorded["cases"][name].get("machine", recorded["machine"])
    assert where != machine(), f"{name} changed: {recorded['cases'][name]} became {computed}"
    for part, before in recorded["cases"][name].items():
        if isinstance(before, dict):
            assert computed[part]["numbers"] == before["numbers"]
            assert computed[part]["size"] == pytest.approx(before["size"], rel=CLOSE)


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_results_have_not_changed(name: str) -> None:
    agree(name, RECORDED, every_case()[name]())


def test_every_case_is_recorded() -> None:
    assert set(RECORDED["cases"]) == set(every_case())


def test_a_change_is_noticed() -> None:
    changed = json.loads(json.dumps(RECORDED))
    changed["machine"] = machine()
    changed["cases"]["serial WP"]["theta"]["digest"] = "0"
    with pytest.raises(AssertionError, match="serial WP changed"):
        agree("serial WP", changed, RECORDED["cases"]["serial WP"])
