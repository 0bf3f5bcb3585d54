"""Attention in single operations, and dropout inside attention and by functions, in every engine."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.params import params_of
from fedcover.structure.attention import ExplicitAttention, attend
from fedcover.structure.dropout import with_keyed_dropout
from fedcover.structure.units import unit_structure
from tests.conftest import small_data

ROWS = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 7, "vdim": 9}, {"batch_first": False}])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.randn(5, 5)},
        {"attn_mask": torch.randn(9, 5, 5)},
        {"key_padding_mask": torch.tensor([[False] * 4 + [True]] * 3)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_explicit_attention_is_torchs_own(options: dict[str, Any], call: dict[str, Any]) -> None:
    whole = nn.MultiheadAttention(12, 3, **{"batch_first": True, **options})
    explicit = nn.MultiheadAttention(12, 3, **{"batch_first": True, **options})
    explicit.load_state_dict(whole.state_dict())
    ExplicitAttention.replace(explicit)
    widths = (12, options.get("kdim", 12), options.get("vdim", 12))
    inputs = [torch.randn(3, 5, width) for width in widths]
    if not whole.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    for expected, actual in zip(whole(*inputs, **call), explicit(*inputs, **call), strict=True):
        if expected is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_single_sequence_is_attended() -> None:
    layer = nn.MultiheadAttention(12, 3)
    expected = layer(*[ROWS[0]] * 3)
    ExplicitAttention.replace(layer)
    for a, b in zip(layer(*[ROWS[0]] * 3), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()},
        {"attn_mask": torch.randn(4, 4)},
        {"scale": 0.3},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_attending_is_torchs_function(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 3, 4, 5) for _ in range(3))
    torch.testing.assert_close(
        attend(q, k, v, lambda x: x, **options), F.scaled_dot_product_attention(q, k, v, **options)
    )
    few = (k[:, :1], v[:, :1])
    expected = F.scaled_dot_product_attention(q, *few, enable_gqa=True, **options)
    torch.testing.assert_close(attend(q, *few, lambda x: x, **options), expected)


class Attending(nn.Module):
    """Attention over five tokens, with dropout of some kind."""

    def __init__(self, kind: str, p: float = 0.3) -> None:
        super().__init__()
        self.kind, self.p = kind, p
        self.first, self.out = nn.Linear(6, 12), nn.Linear(12, 3)
        if kind != "function":
            inside = p if kind in ("layer", "row") else 0.0
            self.attention = nn.MultiheadAttention(12, 3, inside, batch_first=True, add_bias_kv=kind == "row")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).unsqueeze(1) * torch.linspace(0.5, 1.5, 5, device=x.device, dtype=x.dtype)[:, None]
        p = self.p if self.training else 0.0
        if self.kind == "function":
            heads = x.unflatten(2, (3, 4)).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).transpose(1, 2).flatten(2)
        else:
            x = self.attention(x, x, x)[0]
        if self.kind == "call":
            x = F.dropout(x, self.p, self.training)
        if self.kind == "twice":
            x = torch.dropout(F.dropout(x, training=self.training), self.p, self.training)
        scores: Tensor = self.out(x.mean(1))
        return scores


def run(kind: str, engine: fc.Engine, p: float = 0.3) -> dict[str, Tensor]:
    torch.manual_seed(0)
    federation = fc.Federation(
        fc.Task(Attending(kind, p)), fc.data.iid(small_data(24), 3, seed=1), fc.weight_pruning(), fc.by_slot("1,2x0.5"),
        fc.LocalSGD(2, 4, 0.1, 0.5), cohort=3, engine=engine,
    )  # fmt: skip
    theta = federation.run(2).theta
    assert theta is not None
    return theta


@pytest.mark.parametrize("kind", ["layer", "function", "call", "twice"])
def test_engines_drop_the_same_entries(kind: str) -> None:
    serial = run(kind, fc.Serial(shrink=False))
    for engine in (fc.Serial(shrink=False, traced=False), fc.Processes(2, shrink=False), fc.Vectorized("cpu")):
        for name, tensor in run(kind, engine).items():
            torch.testing.assert_close(tensor, serial[name], rtol=1e-4, atol=1e-5)
    without = run(kind, fc.Serial(shrink=False), p=0.0 if kind != "twice" else 0.9)
    assert not torch.allclose(without["out.weight"], serial["out.weight"], atol=1e-3)


@pytest.mark.filterwarnings("ignore:the multiply-adds")
def test_what_cannot_be_separated_by_client_is_refused_with_the_reason() -> None:
    run("row", fc.Serial(shrink=False))
    with pytest.raises(fc.InputError, match="draws random numbers other than by dropout"):
        run("row", fc.Vectorized("cpu"))


@pytest.mark.parametrize("kind", ["layer", "function", "call"])
def test_the_share_that_drops_is_p_and_the_mean_stays(kind: str) -> None:
    model, stream = with_keyed_dropout(Attending(kind), torch.zeros(2, 6))
    stream.key = 12345
    inputs = torch.randn(2, 6)
    total, calls = torch.zeros(2, 3), 400
    with torch.no_grad():
        for step in range(calls):
            stream.step = step
            total += model.train()(inputs)
        expected = model.eval()(inputs)
    torch.testing.assert_close(total / calls, expected, rtol=0.1, atol=0.1)
    assert {call.p for call in stream.recorded} == {0.3}


def test_the_model_itself_and_the_global_generator_stay_as_they_are() -> None:
    model = Attending("layer")
    before, state = params_of(model), torch.default_generator.get_state()
    with_keyed_dropout(model, torch.zeros(2, 6))
    assert type(model.attention) is nn.MultiheadAttention
    assert all(torch.equal(tensor, before[name]) for name, tensor in params_of(model).items())
    assert torch.equal(state, torch.default_generator.get_state())


def test_an_attention_that_cannot_be_cut_has_the_true_reason() -> None:
    left = unit_structure(fc.trace(Attending("row", 0.0), torch.zeros(2, 6))).left_whole
    assert left["attention"] == "it adds a row to keys and values (add_bias_kv or add_zero_attn)"
    groups = unit_structure(fc.trace(Attending("layer"), torch.zeros(2, 6))).groups
    assert [(group.name, group.size) for group in groups] == [
        ("first", 12),
        ("attention", 3),
        ("attention.out_proj", 12),
    ]


def test_engines_drop_the_same_entries_of_gpt2() -> None:
    """A model of transformers with the dropout of its default configuration: of layers and of attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def scores_loss(scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2), labels.flatten())

    config = GPT2Config(
        vocab_size=20, n_positions=6, n_embd=16, n_layer=1, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(20, (16, 6), generator=torch.Generator().manual_seed(0))
    clients = fc.data.iid(fc.Examples(tokens, tokens.roll(-1, 1), 20), 4, seed=0)
    results = []
    for engine in (fc.Serial(shrink=False), fc.Vectorized("cpu")):
        torch.manual_seed(0)
        task, local = fc.Task(GPT2LMHeadModel(config), scores_loss), fc.LocalSGD(1, 4, 0.05, 0.5)
        federation = fc.Federation(
            task, clients, fc.weight_pruning(), fc.by_slot("1,0.5"), local, cohort=2, engine=engine
        )
        results.append(federation.run(1).theta)
    first, second = results
    assert first is not None
    assert second is not None
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-6)
