"""Recurrent layers of stacks against torch's own; on a CPU their kernels run in Triton's interpreter."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import fedcover as fc
from fedcover.engines.vectorized import recurrent_cells
from fedcover.engines.vectorized.gradients import grad_and_value
from fedcover.engines.vectorized.recurrent import use_stacked_recurrence
from fedcover.models import build
from fedcover.params import Params, on_device, params_of
from tests.contracts.federations import DEVICES, furthest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Triton either compiles kernels or interprets them, for the whole process."""
CLIENTS, BATCH, TIME, INPUTS, UNITS = 3, 4, 5, 5, 6
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "ReLU": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {"batch_first": True},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "no biases": {"num_layers": 2, "bias": False, "batch_first": True},
}


class Net(nn.Module):
    """Scores that depend on all outputs of a recurrent layer, among them its last states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, first: Any) -> Tensor:
        outputs, last = self.layer(x, first)
        states = last if isinstance(last, tuple) else (last,)
        total: Tensor = outputs.sin().sum() + sum((n + 2) * state.cos().sum() for n, state in enumerate(states))
        return total


def _loss(net: nn.Module) -> Callable[..., Tensor]:
    """Return the loss as a function of parameters, inputs and, in the same dict, first states."""

    def loss(tensors: Params) -> Tensor:
        firsts = tuple(tensors[name] for name in ("h", "c") if name in tensors)
        parameters = {name: tensor for name, tensor in tensors.items() if "." in name}
        first = firsts if len(firsts) > 1 else firsts[0] if firsts else None
        result: Tensor = functional_call(net, parameters, (tensors["x"], first))
        return result

    return loss


def _furthest(layer: nn.RNNBase, dtype: torch.dtype, given: bool = True, device: str = "cpu") -> float:
    """Return how far the stacked layer's losses and gradients are from torch's, client by client."""
    own, plain = Net(copy.deepcopy(layer)).to(device, dtype), Net(layer).to(device, dtype)
    assert use_stacked_recurrence(own)
    draw = torch.Generator().manual_seed(1)

    def stack(*shape: int) -> Tensor:
        return (torch.randn(CLIENTS, *shape, generator=draw) * 0.4).to(device, dtype)

    stacks = {name: stack(*p.shape) for name, p in plain.named_parameters()}
    stacks["x"] = stack(*((BATCH, TIME) if layer.batch_first else (TIME, BATCH)), INPUTS)
    rows = layer.num_layers * (1 + layer.bidirectional)
    for name in ("h", "c")[: (2 if layer.mode == "LSTM" else 1) * given]:
        stacks[name] = stack(rows, BATCH, UNITS)
    gradients, losses = vmap(grad_and_value(_loss(own)))(stacks)
    distance = 0.0
    for n in range(CLIENTS):
        tensors = {name: one[n].clone().requires_grad_() for name, one in stacks.items()}
        loss = _loss(plain)(tensors)
        each = torch.autograd.grad(loss, list(tensors.values()))
        pairs = [(losses[n], loss.detach()), *((gradients[k][n], g) for k, g in zip(tensors, each, strict=True))]
        distance = max(distance, *(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs))
    return distance


@pytest.mark.parametrize("given", [True, False], ids=["first states", "zeros"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_what_torch_computes_for_each_client(kind: str, form: str, given: bool) -> None:
    assert _furthest(KINDS[kind](INPUTS, UNITS, **FORMS[form]), torch.float64, given) < 1e-12


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_kernels_are_what_torch_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(recurrent_cells, "has_kernels", lambda x: True)
    monkeypatch.setattr(recurrent_cells, "BLOCK", 32)  # several programs, of which the last is not full
    layer = KINDS[kind](INPUTS, UNITS, **FORMS["both directions"])
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert _furthest(layer, torch.float32, device=DEVICE) < 5e-6


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_bfloat16_rounds_products_but_not_cell_states(
    kind: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(recurrent_cells, "has_kernels", lambda x: True)
    device = DEVICE if kernels else "cpu"
    net = Net(KINDS[kind](INPUTS, UNITS, batch_first=True))
    tensors = {**params_of(net), "x": torch.randn(BATCH, 40, INPUTS)}
    expected, _ = grad_and_value(_loss(net))(tensors)
    use_stacked_recurrence(net.to(device))
    tensors = on_device(tensors, torch.device(device))
    with torch.autocast(device, torch.bfloat16):
        gradients, _ = grad_and_value(_loss(net))(tensors)
        _, last = net.layer(tensors["x"])
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert float((gradient.cpu() - expected[name]).norm() / expected[name].norm()) < 0.02
    if isinstance(last, tuple):
        assert (last[0].dtype, last[1].dtype) == (torch.bfloat16, torch.float32)


def test_a_sequence_without_a_batch_has_its_own_shapes() -> None:
    for kind, make in KINDS.items():
        layer, x = make(INPUTS, UNITS, 2), torch.randn(TIME, INPUTS)
        states = torch.randn(2, UNITS), torch.randn(2, UNITS)
        first = states if kind == "LSTM" else states[0]
        expected = layer(x, first)
        use_stacked_recurrence(layer)
        outputs, last = layer(x, first)
        torch.testing.assert_close(outputs, expected[0])
        torch.testing.assert_close(last, expected[1])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
def test_cells_are_layers_of_one_time_step(kind: Callable[..., nn.Module], biased: bool) -> None:
    cell = kind(INPUTS, UNITS, bias=biased).double()
    own = copy.deepcopy(cell)
    assert use_stacked_recurrence(own)
    draws = [torch.randn(BATCH, size, dtype=torch.float64) for size in (INPUTS, UNITS, UNITS)]

    def results(layer: nn.Module, given: bool, rows: Any) -> tuple[Tensor, ...]:
        x, *states = (draw[rows].clone().requires_grad_() for draw in draws)
        first = (tuple(states) if isinstance(layer, nn.LSTMCell) else states[0]) if given else None
        last = layer(x, first)
        lasts = last if isinstance(last, tuple) else (last,)
        total = sum((state.sin() * (n + 2)).sum() for n, state in enumerate(lasts))
        inputs = [*layer.parameters(), x, *(states[: len(lasts)] if given else ())]
        return *lasts, *torch.autograd.grad(total, inputs)

    for given in (True, False):
        for rows in (slice(None), 1):  # a batch, and an example by itself
            torch.testing.assert_close(results(own, given, rows), results(cell, given, rows), rtol=0, atol=1e-12)


def test_unused_outputs_need_no_gradient() -> None:
    layer = nn.LSTM(INPUTS, UNITS)
    x = torch.randn(TIME, BATCH, INPUTS)

    def gradients(pick: Callable[[Any], Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(pick(layer(x)).square().sum(), list(layer.parameters())))

    picks: list[Callable[[Any], Tensor]] = [lambda out: out[0], lambda out: out[1][0], lambda out: out[1][1]]
    expected = [gradients(pick) for pick in picks]
    use_stacked_recurrence(layer)
    for pick, each in zip(picks, expected, strict=True):
        torch.testing.assert_close(gradients(pick), each)


def test_what_stacks_do_not_support_stays_with_torch() -> None:
    hooked = nn.GRU(INPUTS, UNITS)
    hooked.register_forward_hook(lambda layer, inputs, outputs: None)

    class Own(nn.GRU):
        pass

    others = [nn.LSTM(INPUTS, UNITS, proj_size=2), nn.LSTM(INPUTS, UNITS, 2, dropout=0.5), hooked, Own(INPUTS, UNITS)]
    assert not any(use_stacked_recurrence(layer) for layer in others)
    with warnings.catch_warnings(action="ignore"):  # dropout of one layer does nothing
        assert use_stacked_recurrence(nn.LSTM(INPUTS, UNITS, dropout=0.5))
    layer = nn.LSTM(INPUTS, UNITS, batch_first=True)
    packed = pack_padded_sequence(torch.randn(2, TIME, INPUTS), torch.tensor([TIME, 2]), batch_first=True)
    expected, _ = layer(packed)
    use_stacked_recurrence(layer)
    torch.testing.assert_close(layer(packed)[0].data, expected.data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["HeteroFL", "WP"])
def test_text_is_trained_as_by_the_serial_engine(policy: str, device: str) -> None:
    text = torch.randint(20, (48, 9), generator=torch.Generator().manual_seed(0))
    clients = fc.data.iid((text[:, :-1], text[:, 1:]), clients=4, seed=0)
    task = fc.Task(build("lstm", (8,), 20, 0))

    def run(engine: fc.Engine) -> fc.History:
        recipe = fc.LocalSGD(1, 4, 0.5, momentum=0.9, clip=1.0)
        federation = fc.Federation(task, clients, policy, "1,0.5,1,0.5", recipe, cohort=4, seed=0, engine=engine)
        return federation.run(2, evaluate_on=(text[:, :-1], text[:, 1:]))

    expected = run(fc.Serial(shrink=False))
    for shrink in (True, False):
        history = run(fc.Vectorized(device, shrink=shrink))
        assert furthest(expected, history) < 2e-5
        assert history.last.loss == pytest.approx(expected.last.loss, abs=1e-4)


def test_steps_of_recurrent_networks_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *arguments, **options: pytest.fail("a step is compiled"))
    text = torch.randint(20, (16, 9))
    clients = fc.data.iid((text[:, :-1], text[:, 1:]), clients=2, seed=0)
    engine = fc.Vectorized("cpu", compile=True)
    fc.Federation(fc.Task(build("lstm", (8,), 20, 0)), clients, cohort=2, engine=engine).run(1)
