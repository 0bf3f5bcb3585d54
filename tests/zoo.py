"""A zoo of networks of many kinds, each with an example of its inputs: tests of units and of engines share it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, PLACES, CLASSES = 20, 6, 4


@dataclass(frozen=True)
class Animal:
    """A network of the zoo."""

    title: str
    """What it is, in the words of the documentation."""
    build: Callable[[], nn.Module]
    example: Tensor | dict[str, Tensor]


class VisionTransformer(nn.Module):
    """Patches of an image, learnt positions, and encoder layers with torch's own attention."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.places = nn.Parameter(torch.randn(1, 5, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        scores: Tensor = self.head(self.norm(self.encoder(x))[:, 0])
        return scores


class PlainAttention(nn.Module):
    """``nn.MultiheadAttention`` without layer norm, so that the width of the stream can be cut too."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(PLACES, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.wide, self.back, self.head = nn.Linear(width, 16), nn.Linear(16, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device))
        x = x + self.attention(x, x, x)[0]
        x = x + self.back(torch.relu(self.wide(x)))
        scores: Tensor = self.head(x.mean(1))
        return scores


class Recurrent(nn.Module):
    """A text classifier with a recurrent layer of some kind."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 1, both: bool = False, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 7)
        self.rnn = kind(7, width, layers, batch_first=True, bidirectional=both)  # type: ignore[arg-type, misc]
        self.head = nn.Linear(width * (1 + both), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.rnn(self.emb(x))[0][:, -1])
        return scores


class Cells(nn.Module):
    """A GRU cell in a loop over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), self.cell.hidden_size, dtype=x.dtype, device=x.device)
        for step in x.unbind(1):
            state = self.cell(step, state)
        scores: Tensor = self.head(state)
        return scores


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, and add the input if shapes agree."""

    def __init__(self, before: int, after: int, stride: int, expand: int = 3) -> None:
        super().__init__()
        inner = before * expand
        self.residual = stride == 1 and before == after
        self.layers = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.layers(x)
        return x + after if self.residual else after


class MobileNet(nn.Module):
    """Inverted residuals, as in MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2), InvertedResidual(12, 12, 1))
        self.last = nn.Sequential(nn.Conv2d(12, 20, 1, bias=False), nn.BatchNorm2d(20), nn.ReLU6())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(20, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.last(self.blocks(self.stem(x))).mean((2, 3)))
        return scores


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up, with transposed convolutions and skip connections; one class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _twice(3, 6), _twice(6, 8), _twice(8, 12)
        self.up2, self.join2 = nn.ConvTranspose2d(12, 8, 2, stride=2), _twice(16, 8)
        self.up1, self.join1 = nn.ConvTranspose2d(8, 6, 2, stride=2), _twice(12, 6)
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        low = self.bottom(F.max_pool2d(second, 2))
        second = self.join2(torch.cat([second, self.up2(low)], 1))
        first = self.join1(torch.cat([first, self.up1(second)], 1))
        scores: Tensor = self.head(first)
        return scores


class Dense(nn.Module):
    """A dense block, in which each layer reads all earlier ones, as in DenseNet."""

    def __init__(self, growth: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(6 + i * growth), nn.ReLU(), nn.Conv2d(6 + i * growth, growth, 3, padding=1, bias=False)
            )
            for i in range(layers)
        )
        self.norm, self.head = nn.BatchNorm2d(6 + layers * growth), nn.Linear(6 + layers * growth, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        scores: Tensor = self.head(torch.relu(self.norm(x)).mean((2, 3)))
        return scores


class TwoTowers(nn.Module):
    """An image and a row of numbers, each with its own tower, joined by ``torch.cat``; the inputs are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.row = nn.Sequential(nn.Linear(5, 9), nn.ReLU())
        self.join = nn.Sequential(nn.Linear(15, 10), nn.ReLU())
        self.head = nn.Linear(10, CLASSES)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        scores: Tensor = self.head(self.join(torch.cat([self.image(image), self.row(row)], 1)))
        return scores


class Probe(nn.Module):
    """A frozen backbone that runs without gradients, and a trained head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ).requires_grad_(False)
        self.hidden, self.head = nn.Linear(10, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        scores: Tensor = self.head(torch.relu(self.hidden(features)))
        return scores


def bert(attention: str = "sdpa") -> nn.Module:
    """Return a tiny BERT classifier from a configuration of transformers."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=PLACES, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    """Return a tiny GPT-2 language model from a configuration of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=PLACES, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _mlp(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Linear(before, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, after))


def _tokens() -> Tensor:
    return torch.arange(2 * PLACES).reshape(2, PLACES) % WORDS


_IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
_ROWS = torch.linspace(-1, 1, 10).reshape(2, 5)

ZOO: dict[str, Animal] = {
    "vit": Animal("ViT with `nn.MultiheadAttention`", VisionTransformer, _IMAGES),
    "attention": Animal("`nn.MultiheadAttention` without layer norm", PlainAttention, _tokens()),
    "rnn": Animal("`nn.RNN` text model", lambda: Recurrent(nn.RNN), _tokens()),
    "gru": Animal("GRU text model", lambda: Recurrent(nn.GRU), _tokens()),
    "gru2": Animal("GRU of two layers, both directions", lambda: Recurrent(nn.GRU, 2, both=True), _tokens()),
    "lstm": Animal("LSTM text model", lambda: Recurrent(nn.LSTM, 2), _tokens()),
    "cell": Animal("`nn.GRUCell` in a loop", Cells, torch.linspace(-1, 1, 2 * 3 * 5).reshape(2, 3, 5)),
    "mobilenet": Animal("MobileNetV2 (inverted residuals)", MobileNet, _IMAGES),
    "unet": Animal("U-Net with dense labels", UNet, _IMAGES),
    "densenet": Animal("DenseNet", Dense, _IMAGES),
    "towers": Animal("two towers with dict inputs", TwoTowers, {"image": _IMAGES, "row": _ROWS}),
    "bert": Animal("BERT (transformers)", bert, _tokens()),
    "bert_eager": Animal(
        'BERT with `attn_implementation="eager"` and an `attention_mask`',
        lambda: bert("eager"),
        {"input_ids": _tokens(), "attention_mask": torch.ones(2, PLACES, dtype=torch.long)},
    ),
    "gpt2": Animal("GPT-2 (transformers)", gpt2, _tokens()),
    "frozen": Animal("frozen backbone, trained head", Probe, _IMAGES),
    "regression": Animal("MLP for a regression", lambda: _mlp(5, 1), _ROWS),
    "multilabel": Animal("MLP for several labels at once", lambda: _mlp(5, CLASSES), _ROWS),
}
"""The networks by name. They return scores, or an object that has them as ``logits``."""

NOT_VECTORIZED = {"bert": "reads the values of tensors"}
"""The networks that ``vectorized`` refuses, with the reason in its message; tests/contracts/test_zoo_engines.py."""


def network(name: str) -> tuple[nn.Module, Tensor | dict[str, Tensor]]:
    """Return a network of the zoo and an example of its inputs; the network is the same every time."""
    torch.manual_seed(0)
    return ZOO[name].build(), ZOO[name].example
