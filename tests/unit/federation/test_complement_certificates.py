"""Certificates of federations whose clients see the whole model: which terms are there, and on what they stand."""

from typing import Any

import pytest
import torch
from tests.conftest import small_data
from torch import nn

import fedcover as fc


def certificate(complement: fc.Complement, aggregator: fc.Aggregator | None = None) -> dict[str, Any]:
    """Return the certificate of a run without noise: all clients have the same data, and take whole batches."""
    data = small_data(40)
    clients = fc.data.from_parts(data, [torch.arange(40)] * 4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    policy = "random_weights" if complement.sees else "WP"  # L cannot be estimated if pruned points jump
    one = fc.Federation(
        model, clients, policy, "1,3x0.5", fc.LocalSGD(2, 40, 0.3, 0.0), cohort=4, certify=True,
        complement=complement, aggregator=aggregator or fc.mean(),
    )  # fmt: skip
    last = one.run(6).last.certificate
    assert last is not None
    return last


@pytest.mark.parametrize(
    ("complement", "term"),
    [(fc.Zero(), "pruning"), (fc.Frozen(), None), (fc.Quantized(8), "complement"), (fc.Kept(), "complement")],
)
def test_a_certificate_names_the_terms_of_its_complement(complement: fc.Complement, term: str | None) -> None:
    terms = certificate(complement)["terms"]
    assert set(terms) == {"start", "variance", "drift", *([term] if term else [])}
    if term:
        assert terms[term] > 0


def test_damping_is_in_the_certificate_and_in_the_bound() -> None:
    damped, undamped = certificate(fc.Frozen()), certificate(fc.Frozen(), fc.mean(damping=0.0))
    assert damped["damping"] == 1.0
    assert damped["complement"] == undamped["complement"] == "frozen"
    assert "damping" not in undamped or undamped["damping"] == 0.0
    assert damped["terms"]["start"] > undamped["terms"]["start"]
