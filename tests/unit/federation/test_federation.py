"""The walk of a round."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import small_data, small_net

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.serial import Serial
from fedcover.federation.evaluate import evaluate
from fedcover.federation.evaluator import Evaluator, LocalTest
from fedcover.federation.planned_round import PlannedRound, RoundHook
from fedcover.params import params_of, prune
from fedcover.training.client import Job

Make = Callable[..., fc.Federation]


def test_a_round_is_algorithm_1(small_federation: Make) -> None:
    """Against Algorithm 1 written out by hand, client by client and region by region."""
    federation = small_federation(policy=fc.weight_pruning(), budgets=fc.by_slot("1247"))
    state = federation.start()
    after, record = federation.play_round(state)
    cohort = [
        fc.Client(id, slot, budget, federation.clients.size(id))
        for slot, (id, budget) in enumerate(zip(record.cohort, fc.parse_code("1247"), strict=True))
    ]
    plans, _ = federation.policy.plan(state.theta, cohort, fc.Round(1, 3), {})
    jobs = [
        Job(federation.task, federation.clients, plan.client, state.theta, plan.mask, federation.local, fc.Round(1, 3))
        for plan in plans
    ]
    updates = list(Serial(shrink=False).train(jobs))
    for name, old in state.theta.items():
        kept = torch.stack([plan.mask.get(name, torch.ones_like(old, dtype=torch.bool)) for plan in plans])
        values = torch.stack([u.theta[name] for u in updates])
        mean = (values * kept).sum(0) / kept.sum(0)
        assert torch.allclose(after.theta[name], torch.where(kept.any(0), mean, old), atol=1e-6)
    assert record.gamma_min == 2  # S2 is with 1, 4 and 7; S3 with 1, 2 and 4; S4 with 1 and 2
    assert record.round == after.round == 1


def test_records_add_up(small_federation: Make) -> None:
    federation = small_federation(budgets=fc.by_slot("1247"))
    record = federation.run(1, evaluate_on=small_data(60, seed=5)).last
    parameters = sum(t.numel() for t in federation.task.model.parameters())
    assert record.bytes_full == 4 * 2 * 4 * parameters
    assert record.bytes_up == round(sum(record.kept) * parameters) * 4 < record.bytes_down < record.bytes_full / 2
    assert record.pruning_noise == pytest.approx(sum(record.pruning_noises) / 4)
    assert record.pruning_noise_max == max(record.pruning_noises)
    assert record.pruning_noises[0] == 0.0
    assert set(record.coverage) == {name for name, _ in federation.task.model.named_parameters()}
    assert min(layer.least for layer in record.coverage.values()) == record.gamma_min
    assert set(record.seconds) == {"plan", "train", "aggregate", "evaluate"}
    assert record.local_accuracy is not None  # the last round looks at it


@pytest.mark.parametrize(
    ("local", "first", "later"),
    [
        (fc.LocalSGD(1, 8, 0.1), 2, 2),
        (fc.LocalSGD(1, 8, 0.1, control_variates=True), 2, 3),
        (fc.LocalSGD(1, 8, 0.1, keep_moments=True), 3, 4),
        (fc.LocalAdam(1, 8, keep_moments=True), 5, 8),
    ],
)
def test_full_models_are_compared_with_their_moments_and_control_variates(
    small_federation: Make, local: fc.Recipe, first: int, later: int
) -> None:
    """So many numbers are sent for each entry, both ways, by full models and by others."""
    pruned, whole = (
        small_federation(local=local, cohort=8, budgets=fc.by_slot(code)).run(2) for code in ("11112247", "11111111")
    )
    parameters = sum(t.numel() for t in small_net().parameters())
    for records in (pruned, whole):
        assert records.column("bytes_full") == [8 * 4 * numbers * parameters for numbers in (first, later)]
    assert [r.bytes_down + r.bytes_up for r in whole] == whole.column("bytes_full")
    for record in pruned:
        assert record.bytes_down + record.bytes_up < record.bytes_full


def test_an_uncovered_part_is_reported_and_untouched(small_federation: Make) -> None:
    federation = small_federation(policy=fc.fixed_subnetwork(), budgets=fc.by_slot("4x0.5"))
    state = federation.start()
    after, record = federation.play_round(state)
    assert record.gamma_min == 0
    assert record.uncovered > 0.3
    for name in ("0.weight", "0.bias"):
        assert torch.equal(after.theta[name][4:], state.theta[name][4:])
        assert not torch.equal(after.theta[name][:4], state.theta[name][:4])


def test_a_client_that_diverges_is_left_out_and_the_round_goes_on(small_federation: Make) -> None:
    federation = small_federation()
    parts = [federation.clients.indices(i) for i in range(8)]
    data = small_data()
    data.inputs[parts[federation.play_round(federation.start())[1].cohort[1]]] = float("inf")
    broken = fc.Federation(
        fc.Task(small_net()), fc.data.from_parts(data, parts), fc.weight_pruning(), fc.by_slot("1247"),
        fc.LocalSGD(epochs=2, batch_size=8, lr=0.1), cohort=4, seed=3,
    )  # fmt: skip
    after, record = broken.play_round(broken.start())
    assert record.rejected == [{"client": record.cohort[1], "reason": "its trained values are not all finite"}]
    assert all(bool(torch.isfinite(t).all()) for t in after.theta.values())
    assert record.gamma_min == 1  # S4 is left with client 1 alone


class BadMoments(RoundHook):
    """A hook that makes a moment of each first update infinite."""

    def updates(self, planned: PlannedRound, updates: Iterable[ClientUpdate]) -> Iterable[ClientUpdate]:
        first, *others = updates
        assert first.moments is not None
        moments = {m: {n: t + float("inf") for n, t in named.items()} for m, named in first.moments.items()}
        return [replace(first, moments=moments), *others]


def test_moments_that_are_not_finite_are_the_reason_for_a_rejection(small_federation: Make) -> None:
    federation = small_federation(local=fc.LocalAdam(1, 8, keep_moments=True), hook=BadMoments())
    _, record = federation.play_round(federation.start())
    assert record.rejected == [{"client": record.cohort[0], "reason": "its moments are not all finite"}]


def test_a_client_that_fails_is_named(small_federation: Make) -> None:
    def fails(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels) > 2:
            raise RuntimeError("out of paper")
        return scores.mean()

    federation = fc.Federation(fc.Task(small_net(), fails), small_federation().clients, cohort=2)
    first = federation.run
    with pytest.raises(fc.ClientError, match=r"client \d failed in round 1 while training: out of paper"):
        first(1)


def test_weighting_by_examples(small_federation: Make) -> None:
    clients = fc.data.from_parts(small_data(), [torch.arange(100), torch.arange(100, 120)])
    federation = fc.Federation(fc.Task(small_net()), clients, cohort=2, aggregator=fc.mean("examples"))
    theta = federation.play_round(federation.start())[0].theta
    alone = []
    for id in (0, 1):
        client, first = fc.Client(id, 0, fc.Budget()), federation.start().theta
        job = Job(federation.task, clients, client, first, {}, federation.local, fc.Round(1, 0))
        alone += [update.theta for update in Serial(shrink=False).train([job])]
    for name, value in theta.items():
        assert torch.allclose(value, (100 * alone[0][name] + 20 * alone[1][name]) / 120, atol=1e-6)


def test_parameters_that_are_frozen_stay(small_federation: Make) -> None:
    net = small_net()
    net[0].weight.requires_grad_(False)
    clients, budgets = small_federation().clients, fc.by_slot("1447")
    federation = fc.Federation(fc.Task(net), clients, fc.weight_pruning(), budgets, cohort=4)
    after, record = federation.play_round(federation.start())
    assert torch.allclose(after.theta["0.weight"], federation.start().theta["0.weight"])
    assert not torch.equal(after.theta["3.weight"], federation.start().theta["3.weight"])
    assert not record.rejected


def test_a_gradient_that_is_infinite_where_it_is_pruned_does_no_harm(small_federation: Make) -> None:
    class Roots(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(small_net()[0].weight.detach().clone())
            self.out = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.out(x @ (self.w.sign() * self.w.abs().sqrt()).t())
            return scores

    @fc.policy
    def checkers(theta, client, this_round):  # type: ignore[no-untyped-def]
        return {"w": torch.arange(48).reshape(8, 6) % 2 == 0}

    with pytest.warns(UserWarning, match="multiply-adds of w cannot be counted"):
        federation = fc.Federation(fc.Task(Roots()), small_federation().clients, checkers, cohort=4)
    after, record = federation.play_round(federation.start())
    assert not record.rejected
    assert torch.equal(after.theta["w"].flatten()[1::2], federation.start().theta["w"].flatten()[1::2])


def test_token_models_and_double_precision() -> None:
    tokens = torch.randint(0, 5, (60, 4), generator=torch.Generator().manual_seed(0))
    net = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    clients = fc.data.iid((tokens, tokens[:, 0] % 2), 5)
    assert fc.Federation(fc.Task(net), clients, fc.weight_pruning(), fc.by_slot("3x1"), cohort=3).run(1).last.macs == 24
    x = torch.randn(60, 4, dtype=torch.float64)
    double = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()
    clients = fc.data.iid((x, (x[:, 0] > 0).long()), 5)
    history = fc.Federation(fc.Task(double), clients, fc.neuron_pruning(), fc.by_slot("3x1"), cohort=3).run(1)
    assert history.theta is not None
    assert history.theta["0.weight"].dtype == torch.float64


def test_test_sets_that_lack_a_class(small_federation: Make) -> None:
    data = small_data()
    for missing in (0, 2):
        test = data.subset(torch.nonzero(data.labels != missing).flatten())
        last = small_federation().run(1, evaluate_on=(test.inputs, test.labels)).last
        assert last.local_accuracy is not None
        assert 0 <= last.local_accuracy <= 1


def test_nobody_can_spoil_the_full_mask() -> None:
    (plan,), _ = fc.full().plan({}, [fc.Client(0, 0, fc.Budget())], fc.Round(1, 0), {})
    with pytest.raises(TypeError):
        plan.mask["w"] = torch.zeros(1)  # type: ignore[index]


def test_local_accuracy_is_accuracy_on_data_of_the_clients_own_mix() -> None:
    """Re-weighting by class against really drawing such a test set."""
    net, test = small_net(), small_data(300, seed=7)
    theta = params_of(net)
    mask = {"0.weight": torch.rand(theta["0.weight"].shape, generator=torch.Generator().manual_seed(0)) < 0.7}
    mixes = [torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.0, 0.25, 0.75]).double()]
    by_hand = 0.0
    for model, mix, size in zip((theta, prune(theta, mask)), mixes, (30, 10), strict=True):
        right = 0.0
        for label, share in enumerate(mix.tolist()):
            if share:
                of_label = test.subset(torch.nonzero(test.labels == label).flatten())
                right += share * evaluate(net, torch.nn.functional.cross_entropy, model, of_label).accuracy
        by_hand += size / 40 * right
    evaluator = Evaluator(fc.Task(net), fc.trace(net, test.inputs), test.inputs)
    clients = [LocalTest({}, mixes[0], 30), LocalTest(mask, mixes[1], 10)]
    _, accuracy = evaluator.evaluate(theta, test, clients=clients)
    assert accuracy == pytest.approx(by_hand)


def test_when_it_looks(small_federation: Make) -> None:
    history = small_federation().run(5, evaluate_on=small_data(), evaluate_every=2, local_every=4)
    assert [record.accuracy is not None for record in history] == [False, True, False, True, True]
    assert [record.local_accuracy is not None for record in history] == [False, False, False, True, True]


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"rounds": 1.5}, {"evaluate_every": 0}, {"checkpoint_every": 0}])
def test_bad_schedules(small_federation: Make, bad: dict[str, object]) -> None:
    with pytest.raises(fc.InputError, match=f"{next(iter(bad))} must be a whole number"):
        small_federation().run(**{"rounds": 1, **bad})  # type: ignore[arg-type]


def test_bad_federations(small_federation: Make) -> None:
    with pytest.raises(fc.InputError, match="weighting must be one of uniform, examples, labels; got 'size'"):
        fc.mean("size")
    linear = fc.Task(torch.nn.Linear(6, 3))
    with pytest.raises(fc.InputError, match="finds nothing to prune"):
        fc.Federation(linear, small_federation().clients, fc.weight_pruning(), fc.by_slot("4x0.5"), cohort=4)
    with pytest.raises(fc.InputError, match="resume needs out"):
        small_federation().run(1, resume=True)


def test_a_run_folder_tells_the_whole_story(small_federation: Make, tmp_path: Path) -> None:
    small_federation().run(2, evaluate_on=small_data(), out=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "versions.json", "history.jsonl", "summary.json", "checkpoints"} <= names
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    assert (tmp_path / "run" / "history.jsonl").read_text().count("\n") == 2


def test_theta0_is_the_models_own(small_federation: Make) -> None:
    federation = small_federation()
    before = params_of(federation.task.model)
    federation.run(1)
    assert all(torch.equal(before[k], v) for k, v in params_of(federation.task.model).items())
    assert all(torch.equal(before[k], v) for k, v in federation.start().theta.items())


def test_what_is_left_of_the_labels_bias_is_in_the_record(small_federation: Make) -> None:
    examples = small_data()
    clients = fc.data.shards(examples, clients=8, shards_each=1, seed=0)
    run = fc.Federation(
        fc.Task(small_net()), clients, fc.weight_pruning(), fc.by_slot("1247"), cohort=4, aggregator=fc.mean("labels")
    )
    bias = run.run(1).last.label_bias
    assert bias is not None
    assert 0 <= bias["after"] < bias["before"] <= 1
    assert bias["after"] <= bias["worst"] <= 1
    assert 0 < bias["worst_share"] <= 1
    assert small_federation().run(1).last.label_bias is None
