"""Policies that train beyond plain masked SGD: in every engine, in lockstep, and after a stop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcover as fc
from fedcover.engines.processes.pool import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized.engine import Vectorized
from fedcover.federation.evaluate import evaluate
from fedcover.params import Mask, Params
from fedcover.policies.base import shown_in
from fedcover.seeding import ambient
from tests.conftest import small_data
from tests.contracts.federations import DEVICES, NETWORKS, TOLERANCE, federation, furthest, images, serial
from tests.laws.strategies import same

State = dict[str, Tensor]


class Mixed(fc.Policy):
    """Pruning by magnitude with gains by keep, thresholds and reports, whose state is the sum of the reports."""

    def __init__(self, report: bool = True) -> None:
        self._report = report

    def bind(self, network: fc.ModelStructure) -> "Mixed":
        self._inner = fc.weight_pruning().bind(network)
        return self

    def plan(
        self, theta: Params, cohort: Sequence[fc.Client], this_round: fc.Round, state: State
    ) -> tuple[list[fc.ClientPlan], State]:
        plans, _ = self._inner.plan(theta, cohort, this_round, {})
        return [replace(plan, options=self._options(plan.client, list(theta))) for plan in plans], state

    def _options(self, client: fc.Client, names: list[str]) -> fc.TrainingOptions:
        return fc.TrainingOptions(
            gains=dict.fromkeys(names[:2], 1 / client.budget.keep),
            thresholds={names[0]: 0.1 + client.slot / 10} if client.slot % 2 else {},
            report=self._report,
        )

    def observe(self, theta: Params, feedback: fc.RoundFeedback, this_round: fc.Round, state: State) -> State:
        if not self._report:
            assert feedback.report is None
            return state
        assert feedback.report is not None
        return {name: squares + state.get(name, 0.0) for name, squares in feedback.report.items()}


POLICIES: dict[str, Callable[[], fc.Policy]] = {
    "FIARSE": fc.fiarse,
    "FjORD": lambda: fc.fjord((0.3, 0.6)),
    "FjORD, distilled": lambda: fc.fjord((0.3, 0.6), distil=0.4),
    "FedDST": lambda: fc.feddst(every=2, until=20),
    "PruneFL": lambda: fc.prunefl(every=2),
    "mixed": Mixed,
}
ONE_BY_ONE = ("FjORD, distilled",)
"""Those whose clients cannot be trained as one batch."""


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "FIARSE"])  # test_processes_bits.py has it
def test_processes_equal_serial_bit_for_bit(name: str, shrink: bool, processes: dict[bool, Processes]) -> None:
    test = small_data(40, seed=9)
    expected = federation(serial(shrink), POLICIES[name](), shared=True).run(4, evaluate_on=test)
    actual = federation(processes[shrink], POLICIES[name](), shared=True).run(4, evaluate_on=test)
    assert actual == expected
    assert actual.theta is not None
    assert expected.theta is not None
    assert same(actual.theta, expected.theta)


@pytest.mark.parametrize("name", POLICIES)
def test_options_agree_traced_shrunk_and_by_autograd(name: str) -> None:
    expected = images(serial(), "mlp", POLICIES[name](), shared=True).run(3)
    for engine in (Serial(traced=False), serial(shrink=True)):
        assert furthest(expected, images(engine, "mlp", POLICIES[name](), shared=True).run(3)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ONE_BY_ONE])
def test_vectorized_agrees_with_serial(name: str, network: str, device: str) -> None:
    engines = serial(), Vectorized(device)
    one_by_one, batch = (images(engine, network, POLICIES[name](), shared=True) for engine in engines)
    states = [one_by_one.start(), batch.start()]
    for _ in range(2):
        (states[0], a), (states[1], b) = one_by_one.play_round(states[0]), batch.play_round(states[1])
        assert (a.cohort, a.gamma_min, a.kept, a.bytes_up) == (b.cohort, b.gamma_min, b.kept, b.bytes_up)
        for key, tensor in states[0].theta.items():
            assert float((tensor - states[1].theta[key].cpu()).abs().max()) < TOLERANCE
        for key, tensor in states[0].policy.items():
            torch.testing.assert_close(states[1].policy[key].cpu(), tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("default")  # of the compiler
@pytest.mark.parametrize("name", ["mixed", "FjORD"])
def test_compiled_steps_follow_options(name: str, compiled_steps: list[Any]) -> None:
    expected = images(serial(), "mlp", POLICIES[name](), shared=True).run(1)
    assert furthest(expected, images(Vectorized("cpu", compile=True), "mlp", POLICIES[name]()).run(1)) < TOLERANCE
    assert compiled_steps


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_vectorized_refuses_distillation(name: str) -> None:
    playing = images(Vectorized("cpu"), "mlp", POLICIES[name]())
    with pytest.raises(fc.InputError, match="use engine=processes"):
        playing.run(1)
    with pytest.raises(fc.InputError, match=r"engine=vectorized cannot distil .*use engine=processes"):
        playing.play_round(playing.play_round(playing.start())[0])


@pytest.mark.parametrize("engine", [Serial, lambda: Processes(2, shrink=False), lambda: Vectorized("cpu")])
def test_federations_in_lockstep_agree_with_separate_runs(engine: Callable[[], fc.Engine]) -> None:
    """With those of the serial engine, with which other engines agree run by run."""
    names = [name for name in POLICIES if name not in ONE_BY_ONE or engine is Serial]
    separate = [images(serial(), "mlp", POLICIES[name](), shared=True).run(2) for name in names]
    together = fc.run_many(
        [images(Serial(shrink=False), "mlp", POLICIES[name]()) for name in names], 2, engine=engine()
    )
    close = TOLERANCE if isinstance(engine(), Vectorized) else 0.0
    assert all(furthest(a, b) <= close for a, b in zip(separate, together, strict=True))


@pytest.mark.parametrize("stop", [2])
@pytest.mark.parametrize("name", POLICIES)
def test_a_stopped_run_resumes_to_the_same_bits(
    name: str, stop: int, tmp_path: Path, processes: dict[bool, Processes]
) -> None:
    class Stop(Exception):
        pass

    def stop_there(record: fc.RoundRecord) -> None:
        if record.round == stop:
            raise Stop

    def play(engine: fc.Engine, folder: str, **options: Any) -> fc.History:
        playing = federation(engine, POLICIES[name](), shared=True)
        return playing.run(5, evaluate_on=test, out=tmp_path / folder, **options)

    test = small_data(40, seed=9)
    whole = play(serial(), "whole")
    with pytest.raises(Stop):
        play(serial(), "cut", on_round=stop_there)
    again = play(processes[False], "cut", resume=True)
    assert again == whole
    assert again.theta is not None
    assert whole.theta is not None
    assert same(again.theta, whole.theta)


def test_the_first_round_of_prunefl_has_one_client() -> None:
    playing = federation(Serial(shrink=False), fc.prunefl(every=2))
    state, first = playing.play_round(playing.start())
    _, second = playing.play_round(state)
    assert (len(first.cohort), len(second.cohort)) == (1, 6)
    assert first.kept == [1.0]
    assert max(second.kept) < 1


def test_entries_that_prunefl_prunes_keep_their_values_until_they_return() -> None:
    playing = federation(Serial(shrink=False), fc.prunefl(every=2))
    state = playing.start()
    returned = 0
    for index in range(6):
        before, mask = state.theta, shown_in(state.policy)
        state, _ = playing.play_round(state)
        for name, kept in mask.items() if index > 1 else ():
            assert torch.equal(state.theta[name][~kept], before[name][~kept])
            returned += int((shown_in(state.policy)[name] & ~kept).sum())
    assert returned > 0


def test_a_policy_with_one_mask_is_evaluated_under_it() -> None:
    test = small_data(60, seed=9)
    playing = federation(Serial(shrink=False), fc.feddst(every=2))
    state, record = playing.play_round(playing.start(), test)
    mask = shown_in(state.policy)
    pruned = evaluate(
        playing.task.model, playing.task.loss, {n: t * mask.get(n, 1) for n, t in state.theta.items()}, test
    )
    whole = evaluate(playing.task.model, playing.task.loss, state.theta, test)
    assert record.loss == pytest.approx(pruned.loss)
    assert record.loss != pytest.approx(whole.loss)


def test_a_policy_with_one_mask_is_loaded_under_it(tmp_path: Path) -> None:
    playing = federation(Serial(shrink=False), fc.prunefl())
    history = playing.run(2, out=tmp_path / "run")
    model = fc.load_model(tmp_path / "run", playing.task.model)
    assert history.theta is not None
    assert same(history.theta, {name: tensor.detach() for name, tensor in model.named_parameters()})
    assert any(bool((tensor == 0).any()) for tensor in history.theta.values())


def test_reports_and_new_masks_count_as_traffic() -> None:
    playing = federation(Serial(shrink=False), fc.feddst(every=2))
    state, plain = playing.play_round(playing.start())
    _, moved = playing.play_round(state)
    assert moved.bytes_up - plain.bytes_up == plain.bytes_down - plain.bytes_up
    plain, reporting = (federation(Serial(shrink=False), Mixed(report)).run(1).last for report in (False, True))
    size = sum(tensor.numel() for tensor in playing.theta0.values())
    assert reporting.bytes_up - plain.bytes_up == 6 * 4 * size


def test_weights_by_labels_use_the_masks_of_the_updates() -> None:
    clients = federation(Serial(shrink=False)).clients
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    budgets = fc.by_slot([0.5, 0.5, 0.5])
    playing = fc.Federation(fc.Task(net), clients, fc.feddst(every=1), budgets, cohort=3, aggregator=fc.mean("labels"))
    state, record = playing.play_round(playing.start())
    (kept,) = shown_in(state.policy).values()
    assert int(kept.sum()) == 24
    assert record.gamma_min == 0
    assert bool(torch.isfinite(state.theta["0.weight"]).all())


def test_certificates_report_that_training_is_not_plain() -> None:
    playing = federation(Serial(shrink=False), fc.fiarse())
    playing.aggregator, playing.certify = fc.mean(), True
    certificate = playing.run(1).last.certificate
    assert certificate is not None
    assert certificate["holds"] is None
    assert "changes local training" in certificate["sentence"]


def test_distillation_replaces_the_labels() -> None:
    """With nearly all of the weight on distillation, the teacher is the model itself, and theta changes less."""
    playing = images(Serial(shrink=False), "residual", fc.fjord((0.5,), distil=0.999999))
    plain = images(Serial(shrink=False), "residual", fc.fjord((0.5,)))
    changes = [furthest(federation.run(1), untrained(federation)) for federation in (playing, plain)]
    assert changes[0] < changes[1]


def untrained(playing: fc.Federation) -> fc.History:
    history = fc.History()
    history.theta = playing.theta0
    return history


def test_options_refuse_values_out_of_range() -> None:
    whole: Mask = {}
    for settings, message in (
        ({"gains": {"w": 0.0}}, "the gain of 'w' must be"),
        ({"thresholds": {"w": -1.0}}, "the threshold of 'w' must be"),
        ({"distil": 0.5}, "distil needs widths"),
        ({"widths": (whole,), "regrow": fc.Regrow(0.1)}, "widths and regrow"),
        ({"widths": (whole,) * 256}, "at most 255"),
    ):
        with pytest.raises(fc.InputError, match=message):
            fc.TrainingOptions(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "engine", [lambda: Serial(shrink=False), lambda: Serial(shrink=True), lambda: Vectorized("cpu")]
)
def test_gains_apply_to_frozen_layers_and_do_not_change_them(
    engine: Callable[[], fc.Engine],
) -> None:
    """The Scaler also multiplies frozen layers; their weights come back bit-identical."""

    def play(engine: fc.Engine) -> fc.History:
        rng = torch.Generator().manual_seed(0)
        with ambient(1, "frozen"):
            net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        for tensor in net[2].parameters():
            tensor.requires_grad_(False)
        x = torch.randn(32, 5, generator=rng)
        clients = fc.data.from_parts((x, x[:, :3].argmax(1)), torch.arange(32).split(8))
        local = fc.LocalSGD(2, 4, 0.1, 0.5)
        federation = fc.Federation(
            fc.Task(net),
            clients,
            fc.heterofl(label_aware=False),
            fc.by_slot("1,0.7,0.3"),
            local,
            cohort=3,
            engine=engine,
        )
        history = federation.run(3)
        assert history.theta is not None
        assert torch.equal(history.theta["2.weight"], net[2].weight)
        return history

    assert furthest(play(engine()), play(Serial(shrink=False))) < TOLERANCE
