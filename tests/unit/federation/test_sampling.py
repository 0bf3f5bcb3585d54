"""Which clients take part in a round: by weights, by a trace, by a function."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
from tests.conftest import small_data

import fedcover as fc
from fedcover.clients import sample_ids
from fedcover.federation.checkpoint import State

Make = Callable[..., fc.Federation]
CLIENTS = fc.data.from_parts(small_data(), [range(0, 10), range(10, 40), range(40, 60), range(60, 120)])


def drawn(kind: fc.Sampling, size: int, rounds: int) -> list[list[int]]:
    return [kind.draw(fc.Round(index, 0), CLIENTS, size, State(index - 1, {})) for index in range(1, rounds + 1)]


def test_uniform_is_as_it_always_was(small_federation: Make) -> None:
    assert drawn(fc.uniform(), 2, 50) == [sample_ids(4, 2, fc.Round(index, 0)) for index in range(1, 51)]
    assert small_federation(sampling=fc.uniform()).run(3) == small_federation().run(3)


def test_weights_are_the_probabilities_of_a_sequential_draw() -> None:
    weights, draws = [1.0, 2.0, 3.0, 4.0], 20_000
    counts = Counter(map(tuple, drawn(fc.weighted(weights), 2, draws)))
    for first, second in permutations(range(4), 2):
        expected = weights[first] / 10 * weights[second] / (10 - weights[first])
        assert abs(counts[first, second] / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5


def test_weights_in_a_table_are_by_client() -> None:
    table = {3: 4.0, 0: 1.0, 2: 3.0, 1: 2.0}
    assert drawn(fc.weighted(table), 2, 40) == drawn(fc.weighted([1.0, 2.0, 3.0, 4.0]), 2, 40)


def test_weights_by_examples_and_of_zero() -> None:
    assert drawn(fc.weighted("examples"), 3, 40) == drawn(fc.weighted([10, 30, 20, 60]), 3, 40)
    assert {client for ids in drawn(fc.weighted([0, 1, 0, 5]), 2, 30) for client in ids} == {1, 3}


def test_a_trace_decides_who_can_be_drawn() -> None:
    trace = [[0, 1, 2], [3], [1, 2, 3]]
    ids = drawn(fc.availability(trace, repeat=True), 2, 300)
    for index, clients in enumerate(ids):
        available = trace[index % 3]
        assert set(clients) <= set(available)
        assert len(clients) == min(2, len(available))
    assert {tuple(sorted(clients)) for clients in ids[::3]} == {(0, 1), (0, 2), (1, 2)}


def test_traces_in_files_are_those_in_python(tmp_path: Path) -> None:
    table = {1: [0, 1], 2: [2, 3], 3: [0, 3]}
    (tmp_path / "t.csv").write_text("round,client\n" + "".join(f"{q},{c}\n" for q, cs in table.items() for c in cs))
    (tmp_path / "t.json").write_text(json.dumps(table))
    (tmp_path / "l.json").write_text(json.dumps(list(table.values())))
    expected = drawn(fc.availability(table), 2, 3)
    for name in ("t.csv", "t.json", "l.json"):
        assert drawn(fc.availability(str(tmp_path / name)), 2, 3) == expected


def test_too_few_available_clients_take_part_and_are_reported(small_federation: Make) -> None:
    trace = [list(range(8)), [3, 5], list(range(8))]
    with pytest.warns(fc.SamplingWarning, match="round 2 has 2 clients instead of 4") as caught:
        history = small_federation(sampling=fc.availability(trace)).run(3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [len(record.cohort) for record in history] == [4, 2, 4]
    assert set(history[1].cohort) == {3, 5}


def test_a_function_sees_the_round_and_the_state(small_federation: Make, tmp_path: Path) -> None:
    @fc.sampling
    def by_norm(this_round: fc.Round, population: fc.Population, state: State) -> list[int]:
        assert state.round == this_round.index - 1
        start = int(sum(float(tensor.square().sum()) for tensor in state.theta.values()) * 1000)
        return [(start + place) % len(population) for place in range(4)]

    whole = small_federation(sampling=by_norm).run(4)
    assert len({tuple(cohort) for cohort in whole.column("cohort")}) > 1
    small_federation(sampling=by_norm).run(2, out=tmp_path / "run")
    assert small_federation(sampling=by_norm).run(4, out=tmp_path / "run", resume=True) == whole


@pytest.mark.parametrize("ids", [[], [0, 0], [8], [-1], [0, 1, 2, 3, 4], ["a"], [1.0], [True]])
def test_wrong_ids_are_refused(small_federation: Make, ids: list[int]) -> None:
    kind = fc.sampling(lambda this_round, population, state: ids)
    with pytest.raises(fc.InputError, match="must return 1 to 4 different clients of 0 to 7 in round 1"):
        small_federation(sampling=kind).run(1)


def test_a_function_must_return_ids(small_federation: Make) -> None:
    kind = fc.sampling(lambda this_round, population, state: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(fc.InputError, match=r"must return the ids of clients, such as \[0, 3\]; got None"):
        small_federation(sampling=kind).run(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.weighted([1.0, 2.0]), "one number per client, 8; got 2"),
        (lambda: fc.weighted([1.0, 1.0, 1.0, 0, 0, 0, 0, 0]), "only 3 clients have a positive weight, but cohort is 4"),
        (lambda: fc.weighted([-1.0] * 8), "finite numbers of 0 or more"),
        (lambda: fc.weighted({0: 5.0, 2: 1.0}), "must have the clients 0 to 1 as keys; got 2"),
        (lambda: fc.weighted({"a": 1.0}), "must have the clients 0 to 0 as keys; got 'a'"),  # type: ignore[dict-item]
        (lambda: fc.weighted(3), "'examples' or one number per client"),  # type: ignore[arg-type]
        (lambda: fc.weighted(["a"] * 8), "'examples' or one number per client"),  # type: ignore[arg-type]
        (lambda: fc.weighted([None] * 8), "'examples' or one number per client"),  # type: ignore[list-item]
        (lambda: fc.availability([[0, 9]]), "names client 9, but there are 8 clients"),
        (lambda: fc.availability([]), "at least one round"),
        (lambda: fc.availability("none.csv"), "none.csv cannot be read"),
        (lambda: 0.5, "sampling must be client sampling, such as"),
    ],
)
def test_wrong_sampling_is_refused(small_federation: Make, make: Callable[[], fc.Sampling], message: str) -> None:
    with pytest.raises(fc.InputError, match=message):
        small_federation(sampling=make())


def test_the_end_of_a_trace(small_federation: Make) -> None:
    with pytest.raises(fc.InputError, match="ends with round 1, and there is no round 2; set repeat"):
        small_federation(sampling=fc.availability([list(range(8))])).run(2)
    with pytest.raises(fc.ClientError, match="no client is available in round 2"):
        small_federation(sampling=fc.availability({1: range(8), 3: range(8)})).run(3)


@pytest.mark.filterwarnings("ignore::fedcover.StepSizeWarning")
def test_certificates_say_that_unequal_sampling_is_not_covered(small_federation: Make) -> None:
    plain = small_federation(certify=True).run(2).last.certificate
    other = small_federation(certify=True, sampling=fc.weighted([1.0] * 7 + [9.0])).run(2).last.certificate
    assert "drawn uniformly" not in json.dumps(plain)
    assert "the theorem covers cohorts that are drawn uniformly at random" in other["sentence"]
    assert other["holds"] is None


def test_a_resume_with_other_sampling_is_refused(small_federation: Make, tmp_path: Path) -> None:
    weights = torch.arange(1.0, 9.0).tolist()
    small_federation().run(1, out=tmp_path / "uniform")
    with pytest.raises(fc.InputError, match="sampling"):
        small_federation(sampling=fc.weighted(weights)).run(2, out=tmp_path / "uniform", resume=True)
    small_federation(sampling=fc.weighted(weights)).run(1, out=tmp_path / "weighted")
    with pytest.raises(fc.InputError, match="sampling"):
        small_federation().run(2, out=tmp_path / "weighted", resume=True)
    with pytest.raises(fc.InputError, match="sampling"):
        small_federation(sampling=fc.weighted(weights[::-1])).run(2, out=tmp_path / "weighted", resume=True)
    resumed = small_federation(sampling=fc.weighted(weights)).run(3, out=tmp_path / "weighted", resume=True)
    assert resumed == small_federation(sampling=fc.weighted(weights)).run(3)


FILE = """
import fedcover as fc

@fc.sampling
def in_turn(this_round, population, state):
    return [(4 * this_round.index + place) % len(population) for place in range(4)]
"""


def test_sampling_is_a_setting(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    (tmp_path / "trace.csv").write_text("round,client\n" + "".join(f"{q},{c}\n" for q in (1, 2) for c in range(q, 9)))
    base = ["data.name=digits", "data.clients=12", "cohort=4", "budgets.code=1247", "rounds=2", "engine=serial"]
    choices = {
        "weighted": ["sampling.name=weighted", f"sampling.weights={[1] * 6 + [0] * 6}"],
        "trace": ["sampling.name=availability", f"sampling.trace={tmp_path / 'trace.csv'}"],
        "own": [f"sampling.name={tmp_path / 'own.py'}:in_turn"],
    }
    for name, choice in choices.items():
        sets = [part for change in (*base, *choice) for part in ("--set", change)]
        code, _, err = cli("run", *sets, "--out", str(tmp_path / name), "--no-report", "--quiet")
        assert code == 0, err
        more = ["--set", "rounds=3"] if name != "trace" else []
        code, _, err = cli("run", "--resume", "--out", str(tmp_path / name), "--no-report", "--quiet", *more)
        assert code == 0, err
    cohorts = {name: fc.History.load(tmp_path / name / "history.jsonl").column("cohort") for name in choices}
    assert all(client < 6 for cohort in cohorts["weighted"] for client in cohort)
    assert all(index < client < 9 for index, cohort in enumerate(cohorts["trace"]) for client in cohort)
    assert cohorts["own"] == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]
