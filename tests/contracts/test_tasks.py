"""Tasks of every kind: inputs, targets and outputs of any form, in every engine, with the metrics that they ask for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.base import Engine

N = 96
ENGINES: dict[str, Callable[[], Engine]] = {
    "processes": lambda: fc.Processes(2, shrink=False),
    "vectorized": lambda: fc.Vectorized("cpu"),
}


if torch.cuda.is_available():  # a process that used a GPU cannot fork workers
    del ENGINES["processes"]
    ENGINES["vectorized on cuda"] = lambda: fc.Vectorized("cuda")


def features() -> Tensor:
    return torch.randn(N, 6, generator=torch.Generator().manual_seed(0))


def mlp(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, outputs))


class Towers(nn.Module):
    """Two inputs by name, and an output with logits, as of Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.age, self.out = nn.Embedding(7, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, text: Tensor, age: Tensor) -> Any:
        hidden = torch.relu(self.words(text).mean(1) + self.age(age))
        return SimpleNamespace(logits=self.out(hidden), hidden=hidden)


class Positions(nn.Module):
    """Scores N x C x T, and a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Any:
        return self.out(torch.relu(self.words(tokens))).transpose(1, 2), "anything else"


class LanguageModel(nn.Module):
    """Scores N x T x C, as of Hugging Face's language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=self.out(torch.relu(self.words(tokens))))


class Pixels(nn.Module):
    """Dense scores of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.body(x)))
        return scores


def tokens() -> Tensor:
    return torch.randint(7, (N, 5), generator=torch.Generator().manual_seed(1))


def padded() -> Tensor:
    targets = tokens().clone()
    targets[:, 3:] = -100
    return targets


def bce(scores: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores.squeeze(1), labels.float())


def images() -> Tensor:
    return torch.randn(N, 3, 6, 6, generator=torch.Generator().manual_seed(2))


TASKS: dict[str, tuple[Callable[[], fc.Task], Callable[[], Any], set[str]]] = {
    "classes": (lambda: fc.Task(mlp(3)), lambda: (features(), features()[:, :3].argmax(1)), {"accuracy"}),
    "one logit": (lambda: fc.Task(mlp(1), bce), lambda: (features(), (features()[:, 0] > 0).long()), {"accuracy"}),
    "one logit, float labels": (
        lambda: fc.Task(mlp(1), F.binary_cross_entropy_with_logits),
        lambda: (features(), (features()[:, 0] > 0).float()),
        {"accuracy"},
    ),
    "several labels": (
        lambda: fc.Task(mlp(4), nn.BCEWithLogitsLoss()),
        lambda: (features(), (features()[:, :4] > 0.3).long()),
        {"accuracy", "f1"},
    ),
    "values": (lambda: fc.Task(mlp(1), F.mse_loss), lambda: (features(), features().sum(1)), {"rmse"}),
    "vectors": (lambda: fc.Task(mlp(2), F.l1_loss), lambda: (features(), features()[:, :2]), {"rmse"}),
    "dict inputs": (
        lambda: fc.Task(Towers()),
        lambda: ({"text": tokens(), "age": features()[:, :2]}, tokens()[:, 0] % 3),
        {"accuracy"},
    ),
    "padding": (
        lambda: fc.Task(Positions(), metrics=["perplexity"]),
        lambda: (tokens(), padded()),
        {"accuracy", "perplexity"},
    ),
    "classes last": (
        lambda: fc.Task(LanguageModel(), metrics=["perplexity"]),
        lambda: (tokens(), padded()),
        {"accuracy", "perplexity"},
    ),
    "dense": (lambda: fc.Task(Pixels()), lambda: (images(), (images()[:, 0] > 0).long()), {"accuracy"}),
}


def federation(name: str, engine: Engine, policy: str = "WP") -> fc.Federation:
    task, data, _ = TASKS[name]
    clients = fc.data.from_parts(data(), torch.arange(N).split(24))
    budgets = fc.by_slot("1,2x0.5,0.25")
    recipe = fc.LocalSGD(epochs=2, batch_size=8, lr=0.1)
    return fc.Federation(task(), clients, fc.policies.POLICIES[policy](), budgets, recipe, 4, engine=engine)


@pytest.mark.parametrize("name", TASKS)
def test_engines_agree(name: str) -> None:
    expected = federation(name, fc.Serial(shrink=False)).run(2, evaluate_on=TASKS[name][1](), local_every=1)
    for make in ENGINES.values():
        history = federation(name, make()).run(2, evaluate_on=TASKS[name][1](), local_every=1)
        for ours, theirs in zip(history.theta.values(), expected.theta.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert history.last.loss == pytest.approx(expected.last.loss, rel=1e-4)
        for metric, value in expected.last.metrics.items():
            assert history.last.metrics[metric] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_the_metrics_are_those_of_the_targets(name: str) -> None:
    playing = federation(name, fc.Serial(shrink=False))
    task, data, expected = TASKS[name]
    history = playing.run(2, evaluate_on=data())
    record = history.last
    assert set(record.metrics) | ({"accuracy"} if record.accuracy is not None else set()) == expected
    model = task().model.eval()
    model.load_state_dict(history.theta)
    inputs, targets = data()
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    scores = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if name == "classes last":
        scores = scores.transpose(1, 2)
    counted = targets != -100
    if name.startswith("one logit"):
        assert record.accuracy == pytest.approx(float(((scores[:, 0] > 0) == targets.bool()).double().mean()))
    elif name == "several labels":
        assert record.accuracy == pytest.approx(float(((scores > 0) == targets.bool()).double().mean()))
        both = float(((scores > 0) & targets.bool()).sum())
        assert record.metrics["f1"] == pytest.approx(2 * both / float((scores > 0).sum() + targets.sum()))
    elif "rmse" in expected:
        distance = scores.reshape(targets.shape).double() - targets.double()
        assert record.metrics["rmse"] == pytest.approx(float(distance.square().mean().sqrt()))
        assert record.accuracy is None
    else:
        right = (scores.argmax(1) == targets)[counted]
        assert record.accuracy == pytest.approx(float(right.double().mean()))
    if "perplexity" in expected:
        assert record.metrics["perplexity"] == pytest.approx(float(F.cross_entropy(scores, targets).exp()), rel=1e-5)
        assert record.loss == pytest.approx(float(F.cross_entropy(scores, targets)), rel=1e-5)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("policy", ["NP", "HeteroFL", "optimal"])
def test_policies_of_units_train_every_task(name: str, policy: str) -> None:
    record = federation(name, fc.Serial(shrink=False), policy).run(1, evaluate_on=TASKS[name][1]()).last
    assert record.loss is not None


def test_probabilities_are_cut_at_a_half() -> None:
    model = nn.Sequential(mlp(1), nn.Sigmoid())
    labels = (features()[:, 0] > 0).float()
    clients = fc.data.from_parts((features(), labels), torch.arange(N).split(24))
    playing = fc.Federation(fc.Task(model, nn.BCELoss()), clients, local=fc.LocalSGD(20, 8, lr=0.5), cohort=4)
    accuracy = playing.run(3, evaluate_on=(features(), labels)).last.accuracy
    assert accuracy is not None
    assert accuracy > 0.9


def test_targets_that_would_be_broadcast_are_brought_into_shape() -> None:
    # F.mse_loss of scores (N, 1) and targets (N,) is the mean over all N x N pairs, with a warning only.
    playing = federation("values", fc.Serial(shrink=False))
    inputs, targets = TASKS["values"][1]()
    record = playing.run(1, evaluate_on=(inputs, targets)).last
    assert record.loss == pytest.approx(record.metrics["rmse"] ** 2, rel=1e-4)


def test_a_metric_of_your_own_is_measured_by_its_name() -> None:
    def spread(scores: Tensor, targets: Tensor) -> Tensor:
        assert len(scores) == len(targets) == N
        return scores.std()

    task = fc.Task(mlp(3), metrics={"spread": spread, "right": "accuracy"})  # type: ignore[dict-item]
    clients = fc.data.from_parts(TASKS["classes"][1](), torch.arange(N).split(24))
    record = fc.Federation(task, clients, cohort=4).run(1, evaluate_on=TASKS["classes"][1]()).last
    assert record.metrics["right"] == record.accuracy
    assert record.metrics["spread"] is not None


def test_a_metric_that_fails_is_named() -> None:
    task = fc.Task(mlp(3), metrics={"wrong": lambda scores, targets: scores})
    clients = fc.data.from_parts(TASKS["classes"][1](), torch.arange(N).split(24))
    with pytest.raises(fc.InputError, match=r"metric 'wrong' failed on scores of shape \(96, 3\)"):
        fc.Federation(task, clients, cohort=4).run(1, evaluate_on=TASKS["classes"][1]())


@pytest.mark.parametrize(
    ("loss", "labels", "why"),
    [
        (F.cross_entropy, torch.rand(N), r"cross_entropy does not take scores of shape \(2, 3\) and labels of shape"),
        (lambda scores, labels: scores, torch.zeros(N).long(), r"must return the mean .*; got the shape \(2, 3\)"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss: Any, labels: Tensor, why: str) -> None:
    clients = fc.data.from_parts((features(), labels), torch.arange(N).split(24))
    with pytest.raises(fc.InputError, match=why):
        fc.Federation(fc.Task(mlp(3), loss), clients, cohort=4)


def test_a_model_without_scores_is_refused() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> str:
            return str(self.layer(x).shape)

    clients = fc.data.from_parts(TASKS["classes"][1](), torch.arange(N).split(24))
    with pytest.raises(fc.InputError, match="the model returns a value of type str; return the scores as a tensor"):
        fc.Federation(fc.Task(Words()), clients, cohort=4)
