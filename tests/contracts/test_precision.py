"""The precision of the vectorized engine against the serial one, with stated tolerances."""

import pytest
import torch

import fedcover as fc
from fedcover.engines.choose import choose_engine
from tests.conftest import POLICIES
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, images, serial

CHANGE = {"fp32": 1e-4, "tf32": 0.03, "bf16": 0.1}
"""The largest accepted distance between the changes of theta in a round, relative to the change."""


def change(engine: fc.Engine, network: str, policy: str) -> torch.Tensor:
    """Return the change of theta in the first round."""
    playing = images(engine, network, policy, shared=True)
    theta = playing.run(1).theta
    assert theta is not None
    return torch.cat([(theta[name].cpu() - start).flatten() for name, start in playing.start().theta.items()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", [name for name, make in POLICIES.items() if not make().traits().one_by_one])
@pytest.mark.parametrize("precision", CHANGE)
def test_a_round_agrees_with_serial(precision: str, policy: str, network: str, device: str) -> None:
    if device == "cpu" and precision != "bf16":
        pytest.skip("on a CPU this is the arithmetic of test_vectorized.py")
    expected = change(serial(), network, policy)
    actual = change(fc.Vectorized(device, precision=precision, compile=False), network, policy)
    if policy not in ("FedDST", "PruneFL"):  # which entries are regrown depends on the last bits of gradients
        assert float((actual - expected).norm() / expected.norm()) < CHANGE[precision]
    assert bool(torch.isfinite(actual).all())


def test_a_lower_precision_is_used_and_recorded() -> None:
    engine = fc.Vectorized("cpu", precision="bf16")
    history = images(engine, "mlp", "WP").run(1)
    assert history.last.precision == "bf16"
    assert repr(engine) == "vectorized on cpu in bf16"
    assert all(tensor.dtype == torch.float32 for tensor in (history.theta or {}).values())
    exact, rounded = (change(fc.Vectorized("cpu", precision=name), "mlp", "WP") for name in ("fp32", "bf16"))
    assert float((exact - rounded).abs().max()) > TOLERANCE


def test_records_of_other_engines_say_fp32() -> None:
    assert images(serial(), "mlp", "WP", shared=True).run(1).last.precision == "fp32"


@pytest.mark.parametrize("name", ["serial", "processes"])
def test_other_engines_refuse_a_lower_precision(name: str) -> None:
    with pytest.raises(fc.InputError, match=f"engine '{name}' computes in fp32 only; use engine=vectorized"):
        choose_engine(name, workers=2, precision="bf16")
    assert choose_engine("auto", precision="bf16").name == "vectorized"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(fc.InputError, match="precision must be one of fp32, tf32, bf16; got 'fp16'"):
        fc.Vectorized("cpu", precision="fp16")
