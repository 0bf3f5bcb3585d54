"""Screening and required robustness: what one client may do to a round, in every engine, and what the record says."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.aggregation.screening import Screening, change_sizes, clipped
from fedcover.config.schema import check_config
from fedcover.engines.processes import Processes
from fedcover.engines.serial import Serial
from fedcover.engines.vectorized import Vectorized
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.planned_round import PlannedRound, RoundHook
from tests.conftest import small_data, small_net
from tests.laws.strategies import same

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Liar(RoundHook):
    """Replace what some clients send, as a function of the old and the trained values."""

    lie: Change
    clients: tuple[int, ...] = (0,)
    examples: int | None = None

    def updates(self, planned: PlannedRound, updates: Iterable[fc.ClientUpdate]) -> Iterator[fc.ClientUpdate]:
        theta = planned.state.theta
        for update in updates:
            if update.client in self.clients:
                lies = {name: self.lie(theta[name], new) for name, new in update.theta.items()}
                update = replace(update, theta=lies, examples=self.examples or update.examples)
            yield update


def far(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the negative of a change, a thousand times."""
    return old - 1000 * (new - old)


def federation(budgets: Sequence[float] = (1.0,) * 5, **options: Any) -> fc.Federation:
    """Return a federation of five clients that all take part."""
    clients = fc.data.iid(small_data(100), clients=5, seed=0)
    local = fc.LocalSGD(epochs=2, batch_size=8, lr=0.1)
    spec = fc.by_client([fc.Budget(keep) for keep in budgets])
    return fc.Federation(fc.Task(small_net()), clients, fc.weight_pruning(), spec, local, cohort=5, seed=1, **options)


def test_sizes_do_not_depend_on_how_much_a_client_holds() -> None:
    theta = {"w": torch.zeros(100), "b": torch.zeros(3)}
    values = {"w": torch.full((100,), 0.5), "b": torch.ones(3)}
    half = torch.arange(100) < 50
    some = fc.ClientUpdate(0, {**values, "w": torch.where(half, 0.5, math.nan)}, {"w": half})
    assert change_sizes(some, theta) == change_sizes(fc.ClientUpdate(1, values, {}), theta) == {"w": 0.5, "b": 1.0}
    assert "w" not in change_sizes(fc.ClientUpdate(0, values, {"w": torch.zeros(100, dtype=torch.bool)}), theta)


def test_bounds_are_multiples_of_medians_that_one_client_does_not_decide() -> None:
    rule, theta = Screening(change=2.0), {name: torch.zeros(16) for name in "abc"}
    sizes = {0: {"a": 1.0, "b": 4.0}, 1: {"a": 2.0, "b": 0.0}, 2: {"a": 3.0, "b": 0.0}, 3: {"a": 1e30, "c": 5.0}}
    # The layers b and c have no median to trust: twice the median of the largest sizes 4, 2, 3 and 1e30.
    # A layer of 16 entries may scatter twice as much.
    assert rule.bounds(sizes, theta) == {"a": 10.0, "b": 14.0, "c": 14.0}
    assert rule.bounds({0: {"a": 1.0}, 1: {"a": 100.0}}, theta) == {}
    assert rule.bounds({client: {"a": 0.0} for client in range(5)}, theta) == {}
    assert Screening(change=math.inf).bounds(sizes, theta) == {}


def test_a_clipped_change_has_the_size_of_its_bound_and_others_stay_as_they_are() -> None:
    theta = {"w": torch.randn(20), "v": torch.randn(4)}
    update = fc.ClientUpdate(0, {"w": theta["w"] + 7.0, "v": theta["v"] + 0.1}, {})
    size = change_sizes(update, theta)
    after = clipped(update, theta, size, {"w": 2.0, "v": 2.0})
    assert change_sizes(after, theta)["w"] == pytest.approx(2.0, rel=1e-5)
    assert after.theta["v"] is update.theta["v"]


@pytest.mark.parametrize("options", [{"change": 0.5}, {"examples": 0.0}, {"change": math.nan}, {"action": "ignore"}])
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(fc.InputError, match=next(iter(options))):
        Screening(**options)
    with pytest.raises(fc.InputError, match="screening must be"):
        federation(screening="clip")


def test_a_far_update_is_clipped_or_rejected_and_the_record_names_its_client() -> None:
    test = small_data(60, seed=9)
    honest, harmed = (federation(hook=hook).run(2, evaluate_on=test) for hook in (RoundHook(), Liar(far)))
    clip = federation(hook=Liar(far), screening=Screening()).run(2, evaluate_on=test)
    reject = federation(hook=Liar(far), screening=Screening(action="reject")).run(2, evaluate_on=test)
    assert harmed.last.loss > 2 * honest.last.loss
    assert clip.last.loss < 1.5 * honest.last.loss
    assert reject.last.loss < 1.5 * honest.last.loss
    for record in clip:
        (entry,) = record.limited
        assert entry["client"] == 0
        assert 0 < entry["factor"] < 0.02
        assert entry["reason"].endswith("times the limit by the median of its cohort; it is cut to that")
        assert not record.rejected
    for record in reject:
        (entry,) = record.rejected
        assert entry["client"] == 0
        assert entry["reason"].endswith("times the limit by the median of its cohort")
        assert not record.limited
        assert record.gamma_min == 4


def test_honest_clients_are_left_alone_bit_for_bit() -> None:
    plain, screened = (federation(screening=rule).run(3) for rule in (None, Screening(change=50.0)))
    assert plain.theta is not None
    assert screened.theta is not None
    assert same(plain.theta, screened.theta)
    assert plain == screened


@pytest.mark.parametrize("engine", [Processes(workers=2), Vectorized()])
def test_every_engine_screens(engine: fc.Engine) -> None:
    serial = federation((1.0, 1.0, 1.0, 0.5, 0.5), hook=Liar(far), screening=Screening(), engine=Serial()).run(2)
    other = federation((1.0, 1.0, 1.0, 0.5, 0.5), hook=Liar(far), screening=Screening(), engine=engine).run(2)
    for ours, theirs in zip(serial, other, strict=True):
        assert [entry["client"] for entry in theirs.limited] == [entry["client"] for entry in ours.limited] == [0]
        assert theirs.limited[0]["factor"] == pytest.approx(ours.limited[0]["factor"], rel=1e-3)


def test_a_claim_of_examples_is_capped_and_recorded() -> None:
    def negative(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return 2 * old - new

    liar, test = Liar(negative, examples=2**53 - 1), small_data(60, seed=9)
    believed, capped, honest = (
        federation(hook=hook, screening=rule, aggregator=fc.mean("examples")).run(4, evaluate_on=test)
        for hook, rule in ((liar, None), (liar, Screening(examples=1.0)), (RoundHook(), None))
    )
    assert believed.last.loss > capped.last.loss > honest.last.loss
    assert not believed.last.limited
    (entry,) = capped.last.limited
    assert entry["client"] == 0
    assert entry["reason"] == "its 9007199254740991 examples count as 20, 1 times the median of the cohort"
    # A rule that does not weight by examples has nothing to cap.
    assert not federation(hook=liar, screening=Screening(examples=1.0)).run(1).last.limited


class Stored(Sequence[fc.ClientUpdate]):
    """Updates that are read from somewhere else, one at a time."""

    def __init__(self, updates: list[fc.ClientUpdate]) -> None:
        self._updates, self.reads = updates, 0

    def __len__(self) -> int:
        return len(self._updates)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self._updates[index]


def test_a_sequence_of_updates_is_read_twice_and_never_copied() -> None:
    playing = federation(screening=Screening())
    planned = playing.begin_round(playing.start())
    stored = Stored(list(Serial().train(planned.jobs)))
    state, record = playing.end_round(planned, Arrivals(stored))
    assert stored.reads == 2 * (5 + 1)  # the read behind the end ends the iteration
    again = playing.begin_round(playing.start())
    other, _ = playing.end_round(again, Arrivals(iter(stored._updates)))
    assert same(state.theta, other.theta)
    assert record.round == 1


class Uneven(RoundHook):
    """Let every client change another layer more than the others do."""

    def updates(self, planned: PlannedRound, updates: Iterable[fc.ClientUpdate]) -> Iterator[fc.ClientUpdate]:
        for update in updates:
            name = list(update.theta)[update.client % len(update.theta)]
            far = planned.state.theta[name] + 100.0 + update.client
            yield replace(update, theta={**update.theta, name: far})


def test_a_round_that_rejects_every_client_is_an_error_with_the_true_reason() -> None:
    strict = Screening(change=1.0, action="reject")
    with pytest.raises(fc.ClientError, match=r"no client of round 1 is accepted: its change of .*; raise screening"):
        federation(hook=Uneven(), screening=strict).run(1)


def test_a_certificate_says_that_an_average_was_cut() -> None:
    plain, cut = (
        federation(certify=True, screening=Screening(), hook=hook).run(1).last.certificate
        for hook in (RoundHook(), Liar(far))
    )
    assert "screening" not in str(plain)
    assert "screening cut a client's change" in str(cut)


def test_settings() -> None:
    assert check_config({}).screening.build(deployed=False) is None
    assert check_config({}).screening.build(deployed=True) == Screening()
    always = check_config({"screening": {"when": "always", "change": 7.0, "action": "reject"}})
    assert always.screening.build(deployed=False) == Screening(7.0, "reject")
    assert check_config({"screening": {"when": "never"}}).screening.build(deployed=True) is None
    assert "screening" not in check_config({}).complete()  # run folders of earlier versions have none
    assert check_config({"engine": "flower"}).complete()["screening"]["change"] == Screening.change
    for settings in ({"change": 0.5}, {"action": "drop"}, {"when": "sometimes"}):
        with pytest.raises(fc.InputError, match=next(iter(settings))):
            check_config({"screening": settings})
