"""Certificates of runs: in every record, the same after a resume, and a warning as soon as coverage fails."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.cli.console import BatchProgress
from fedcover.federation.advice import remedy
from fedcover.policies.optimal import Optimal
from fedcover.report import write_report
from tests.conftest import small_data, small_net

Make = Callable[..., fc.Federation]
Cli = Callable[..., tuple[int, str, str]]


def test_every_round_and_the_run_have_a_certificate(tmp_path: Path) -> None:
    # All clients in every round and many examples each, so that curvature shows above noise.
    federation = fc.Federation(
        fc.Task(small_net()), fc.data.iid(small_data(1600), 8, 1), fc.weight_pruning(), fc.by_slot("11111247"),
        fc.LocalSGD(epochs=3, batch_size=20, lr=0.1), 8, 3, certify=True,
    )  # fmt: skip
    with pytest.warns(fc.StepSizeWarning) as caught:
        history = federation.run(4, out=tmp_path / "run")
    (warning,) = caught  # once, where the run was called
    assert warning.filename == __file__
    assert str(warning.message).startswith("after round 2 the step size 0.1 is by estimate at least 2.8 times what")
    for record in history:
        certificate = record.certificate
        assert certificate is not None
        assert (certificate["steps"], certificate["window"], certificate["longest_window"]) == (30, 1, 1)
        assert (certificate["gamma_min"], certificate["first_round"], certificate["last_round"]) == (
            record.gamma_min,
            1,
            record.round,
        )
        json.dumps(certificate)
    last = history.last.certificate
    assert last is not None
    assert last["constants"]["gradient"] > 0
    assert last["constants"]["variance"] > 0
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())["certificate"]
    assert (whole["first_round"], whole["last_round"], whole["gamma_min"]) == (1, 4, history.gamma_min)
    assert whole == last
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            federation.task.model.eval()(small_data(1600).inputs), small_data(1600).labels
        )
    assert whole["constants"]["gap"] == pytest.approx(float(loss), rel=1e-4)  # F(theta_1), before any training
    # The pruning term is exact but for L: (3 L^2 / Gamma) x the mean over rounds of the sum of errors.
    error = sum(record.norm2 * sum(record.pruning_noises) for record in history) / 4
    expected = 3 * whole["constants"]["smoothness"] ** 2 / history.gamma_min * error
    assert whole["terms"]["pruning"] == pytest.approx(expected)


def test_a_run_without_certificates_is_the_same_but_for_them(small_federation: Make) -> None:
    plain, certified = small_federation().run(3), small_federation(certify=True).run(3)
    assert plain.theta is not None
    assert certified.theta is not None
    assert all(torch.equal(plain.theta[name], certified.theta[name]) for name in plain.theta)
    assert plain.last.certificate is None


@pytest.mark.parametrize("engine", [fc.Serial, lambda: fc.Processes(2, shrink=False)])
def test_a_resumed_run_gives_the_same_certificates(
    small_federation: Make, tmp_path: Path, engine: Callable[..., fc.Engine]
) -> None:
    whole = small_federation(certify=True).run(5)
    small_federation(certify=True, engine=engine()).run(2, out=tmp_path / "run")
    parts = small_federation(certify=True, engine=engine()).run(5, out=tmp_path / "run", resume=True)
    assert whole == parts  # records, certificates among them


def test_certificates_carry_little_from_round_to_round(small_federation: Make) -> None:
    """For each parameter three numbers in single precision, its holders and an age; for a run less than 1 kB."""
    federation = small_federation(certify=True)
    state = federation.start()
    for _ in range(3):
        state, _ = federation.play_round(state)
    by_entry = [t for name, t in state.theory.items() if name.partition("/")[2] in state.theta and t.numel() > 2]
    assert sum(t.numel() * t.element_size() for t in by_entry) == 22 * sum(t.numel() for t in state.theta.values())
    assert sum(t.numel() for t in state.theory.values()) - sum(t.numel() for t in by_entry) < 1000
    old = {name: tensor for name, tensor in state.theory.items() if name != "scalars"}
    with pytest.raises(fc.InputError, match="older version"):
        federation.play_round(replace(state, theory=old))


def test_non_iid_federations_get_the_second_theorem(small_federation: Make) -> None:
    inputs = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, inputs[:, :3].argmax(1), classes=3)
    federation = small_federation(certify=True)
    skewed = fc.Federation(
        federation.task, fc.data.shards(examples, 8, 1, seed=0), fc.weight_pruning(), fc.by_slot("1247"),
        federation.local, 4, 3, certify=True,
    )  # fmt: skip
    certificate = skewed.run(3).last.certificate
    assert certificate is not None
    assert certificate["theorem"] == 2
    assert certificate["regions"] >= 2
    first = federation.run(1).last.certificate
    assert first is not None
    assert first["theorem"] == 1


def test_a_window_of_rounds_may_cover_what_single_rounds_do_not(small_federation: Make) -> None:
    @fc.policy
    def halves(theta, client, this_round):  # type: ignore[no-untyped-def]
        """Even entries in even rounds, odd ones in odd rounds."""
        return {
            k: (torch.arange(t.numel()).reshape(t.shape) + this_round.index) % 2 == 0
            for k, t in theta.items()
            if t.ndim > 1
        }

    with pytest.warns(fc.CoverageWarning, match="is in nobody's mask in round 1"):
        history = small_federation(policy=halves, certify=True).run(3)
    first, last = history[0].certificate, history.last.certificate
    assert first["gamma_min"] == last["gamma_min"] == 0
    assert (first["window"], last["window"]) == (None, 2)
    assert (first["longest_window"], last["longest_window"]) == (None, 2)
    assert "every entry was held in the last 2 rounds together" in last["sentence"]


def test_a_hole_in_one_round_stays_in_the_certificates_of_later_ones(small_federation: Make) -> None:
    @fc.policy
    def once(theta, client, this_round):  # type: ignore[no-untyped-def]
        """Nobody holds the second half of the first tensor in round 2."""
        return {"0.weight": torch.arange(48).view(8, 6) < (24 if this_round.index == 2 else 48)}

    with pytest.warns(fc.CoverageWarning, match="in round 2"):
        history = small_federation(policy=once, budgets=fc.by_slot("1111"), certify=True).run(4)
    certificates = [record.certificate or {} for record in history]
    assert [certificate["covered"] for certificate in certificates] == [True, False, False, False]
    assert "50 % of 0.weight is in nobody's mask in round 2" in certificates[3]["sentence"]


def test_rejected_clients_are_not_counted(small_federation: Make) -> None:
    federation = small_federation(budgets=fc.by_slot("1114"), certify=True)
    begun = federation.begin_round(federation.start())
    updates = list(federation.engine.train(begun.jobs))
    updates[3] = replace(updates[3], finite=False)  # the only pruned client
    _, record = federation.end_round(begun, updates)
    assert record.certificate is not None
    assert record.certificate["clients"] == 3
    assert record.certificate["gamma_min"] == 3


def test_runs_that_the_theorem_does_not_cover_are_not_certified(small_federation: Make) -> None:
    weighted = small_federation(certify=True, aggregator=fc.mean("labels")).run(2).last.certificate
    assert weighted is not None
    assert weighted["holds"] is None
    assert "uniform averages" in weighted["sentence"]
    alike = small_federation(certify=True, aggregator=fc.mean("examples")).run(2).last.certificate
    assert alike is not None
    assert "uniform averages" not in alike["sentence"]  # all clients have 15 examples
    unlike = fc.data.from_parts(small_data(), [range(14), range(14, 30), range(30, 45), range(45, 60)])
    local = fc.LocalSGD(epochs=2, batch_size=20, lr=0.1)
    for weighting, so in (("examples", True), ("uniform", False)):
        federation = fc.Federation(
            fc.Task(small_net()), unlike, local=local, cohort=4, aggregator=fc.mean(weighting), certify=True
        )
        certificate = federation.run(1).last.certificate
        assert certificate is not None
        assert ("uniform averages" in certificate["sentence"]) == so

    def lowered(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores, labels) - 5

    task = fc.Task(small_net(), lowered)
    clients = fc.data.iid(small_data(1600), 8, 1)
    local = fc.LocalSGD(epochs=3, batch_size=20, lr=0.1)
    negative = fc.Federation(task, clients, local=local, cohort=8, certify=True).run(3).last.certificate
    assert negative is not None
    assert set(negative["constants"]) == {"smoothness", "variance", "gradient", "estimated"}
    assert "F(theta_1) - F_inf is not known yet" in negative["sentence"]  # a negative loss does not bound the gap
    assert negative["total"] is None


def scheduled(schedule: Callable[[int], float] | None, rounds: int) -> list[dict[str, Any]]:
    """Return the certificates of a run with a schedule; clients have the same examples, so that there is no noise."""
    net = small_net()
    net[2].p = 0.0
    data = small_data(100)
    clients = fc.data.from_parts(
        fc.Examples(data.inputs.repeat(4, 1), data.labels.repeat(4), classes=3), list(torch.arange(400).split(100))
    )
    local = fc.LocalSGD(2, 100, 0.05, schedule=schedule)
    federation = fc.Federation(fc.Task(net), clients, local=local, cohort=4, certify=True)
    return [record.certificate or {} for record in federation.run(rounds)]


def test_the_theorem_covers_one_step_size_and_the_largest_is_judged() -> None:
    with pytest.warns(fc.StepSizeWarning, match="after round 4 the step size 5 is") as caught:
        raised = scheduled(lambda index: 1.0 if index <= 3 else 100.0, 5)
    assert len(caught) == 1
    assert [found["step_size"] for found in raised] == [0.05, 0.05, 0.05, 5.0, 5.0]
    assert [found["step_holds"] for found in raised] == [None, True, True, False, False]
    assert [found["holds"] for found in raised] == [None, True, True, None, None]
    assert raised[-1]["total"] is None
    assert "the theorem covers one step size in all rounds" in raised[-1]["sentence"]


@pytest.mark.parametrize("schedule", [fc.schedules.WarmUp(99), fc.schedules.Milestones((1,), 0.5)], ids=repr)
def test_a_schedule_is_seen_as_soon_as_the_step_size_differs(schedule: Callable[[int], float]) -> None:
    first, second, _ = scheduled(schedule, 3)
    assert "one step size" not in first["sentence"]
    assert "use schedule.name=constant without a warm-up" in second["sentence"]
    assert second["holds"] is None


def test_a_schedule_that_changes_nothing_is_covered() -> None:
    assert scheduled(fc.schedules.StepDecay(every=9), 3) == scheduled(None, 3)


def test_a_weighting_does_not_hide_a_hole(small_federation: Make) -> None:
    federation = small_federation(budgets=fc.by_slot("4777"), aggregator=fc.mean("labels"), certify=True)
    with pytest.warns(fc.CoverageWarning):
        certificate = federation.run(3).last.certificate
    assert certificate is not None
    assert (certificate["covered"], certificate["holds"], certificate["step_holds"], certificate["terms"]) == (
        False,
        False,
        None,
        None,
    )
    assert (
        "is in nobody's mask in round 1 and stays as it is: give one client the whole model" in certificate["sentence"]
    )
    assert certificate["sentence"].endswith("use aggregation.weighting=uniform")


@pytest.mark.parametrize(("clients", "seed"), [(8, 1), (40, 2), (60, 3)])
def test_small_clients_with_iid_data_get_the_first_theorem(clients: int, seed: int) -> None:
    """Down to two examples each: labels differ only by chance."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (120,), generator=rng)
    examples = fc.Examples(torch.randn(120, 6, generator=rng), labels, classes=3)
    population = fc.data.iid(examples, clients, seed)
    federation = fc.Federation(fc.Task(small_net()), population, cohort=4, certify=True)
    certificate = federation.run(1).last.certificate
    assert certificate is not None
    assert certificate["theorem"] == 1


WHOLE, HALF, FIFTH = fc.Budget(), fc.Budget(0.5), fc.Budget(0.2)


@pytest.mark.parametrize(
    ("policy", "cohort", "budgets", "by", "words"),
    [
        (fc.weight_pruning(), [HALF] * 2, [HALF] * 2, "slot", "give one client the whole model, or design masks of"),
        (fc.optimal_masks(), [FIFTH] * 3, [FIFTH] * 3, "slot", "add up to 0.6 models: raise them (budgets.code)"),
        (fc.optimal_masks(units=True), [HALF] * 3, [HALF] * 3, "slot", "with the policy 'optimal'"),
        (fc.optimal_masks(noise=0.1), [HALF] * 3, [HALF] * 3, "slot", "gamma=1, without noise"),
        (fc.weight_pruning(), [HALF] * 3, [WHOLE, HALF], "client", "no client with the whole model was drawn: make"),
        (fc.weight_pruning(), [HALF] * 3, [HALF], "client", "so many clients that every cohort has"),
        (fc.feddst(), [WHOLE, HALF], [WHOLE, HALF], "slot", "leaves it out for all budgets: design masks"),
    ],
)  # fmt: skip
def test_remedies_can_work(
    policy: fc.Policy, cohort: list[fc.Budget], budgets: list[fc.Budget], by: str, words: str
) -> None:
    advice = remedy(policy, cohort, budgets, by)
    assert words in advice
    assert ("policy 'optimal'" in advice) == (getattr(policy, "units", True) or not isinstance(policy, Optimal))
    if sum(budget.keep for budget in cohort) < 1 or by == "client" or WHOLE in cohort:
        assert "give one client" not in advice


def test_a_run_names_the_remedy_of_the_round_with_the_hole(small_federation: Make) -> None:
    with pytest.warns(fc.CoverageWarning, match="no client with the whole model was drawn: make the cohort larger"):
        last = small_federation(budgets=fc.by_client("1.0,7x0.5"), seed=1, certify=True).run(6).last.certificate
    assert last is not None
    assert "no client with the whole model was drawn: make the cohort larger (cohort)" in last["sentence"]


def test_uncovered_masks_are_refused_before_training_if_asked(small_federation: Make) -> None:
    federation = small_federation(budgets=fc.by_slot("4777"), require_coverage=True)
    with pytest.raises(
        fc.InputError, match=r"% of \d.weight is in nobody's mask in round 1 .* give one client the whole"
    ):
        federation.begin_round(federation.start())
    small_federation(budgets=fc.by_slot("1777"), require_coverage=True).run(1)


def test_with_budgets_by_client_a_run_ends_before_the_first_cohort_that_cannot_cover(
    small_federation: Make, tmp_path: Path
) -> None:
    fleet = fc.by_client("1.0,7x0.5")  # whoever keeps the largest half needs client 0 beside it

    def make(**changes: object) -> fc.Federation:
        return small_federation(budgets=fleet, seed=1, **changes)

    with pytest.warns(fc.CoverageWarning):
        free = make().run(6)
    covered = [0 in record.cohort for record in free]
    assert [record.gamma_min > 0 for record in free] == covered
    first = covered.index(False)
    assert first > 0  # a covered round comes first, so that coverage fails during the run
    with pytest.raises(fc.InputError, match=f"is in nobody's mask in round {first + 1} "):
        make(require_coverage=True).run(6, out=tmp_path / "run")
    kept = fc.History.load(tmp_path / "run" / "history.jsonl")
    assert list(kept) == list(free[:first])
    with pytest.warns(fc.CoverageWarning):  # nothing is lost: the run continues
        assert make().run(6, out=tmp_path / "run", resume=True) == free


def test_a_run_warns_once_where_it_was_called(small_federation: Make, tmp_path: Path) -> None:
    with pytest.warns(fc.CoverageWarning) as caught:
        small_federation(budgets=fc.by_slot("4777")).run(3)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith("25 % of 0.weight is in nobody's mask in round 1 and stays as it is: give")
    makes = [small_federation(budgets=fc.by_slot(code)) for code in ("4777", "1247", "7777")]
    with pytest.warns(fc.CoverageWarning) as caught:
        fc.run_many(makes, 2)
    assert [str(warning.message)[:4] for warning in caught] == ["25 %", "50 %"]
    assert {warning.filename for warning in caught} == {__file__}


def test_a_warning_that_is_an_error_loses_no_round(small_federation: Make, tmp_path: Path) -> None:
    """As with `python -W error`: the round is in the folder, and the run continues from it."""
    federation = small_federation(budgets=fc.by_slot("4777"))
    with pytest.raises(fc.CoverageWarning):
        federation.run(2, out=tmp_path / "run")
    with pytest.warns(fc.CoverageWarning, match="in round 2"):
        assert len(federation.run(2, out=tmp_path / "run", resume=True)) == 2


def test_batches_of_runs_are_compared_without_warnings(
    small_federation: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    with BatchProgress("runs", 2, quiet=True):
        small_federation(budgets=fc.by_slot("4777")).run(2)
    assert capsys.readouterr() == ("", "")
    with pytest.warns(fc.CoverageWarning):
        small_federation(budgets=fc.by_slot("4777")).run(1)


def test_the_command_warns_while_it_runs(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--set", "data.name=digits", "--set", "data.clients=10", "--set", "cohort=3", "--set", "rounds=2"]
    arguments += ["--set", "budgets.code=444", "--set", "local.epochs=1", "--set", "engine=serial"]
    code, shown, err = cli("run", *arguments, "--certify", "--out", str(tmp_path / "run"))
    assert code == 0
    assert (
        err.count("warning: 25 % of fc1.weight is in nobody's mask in round 1 and stays as it is: give one client") == 1
    )
    assert err.count("nobody's mask") == 1
    assert err.index("round 1/2") < err.index("warning") < err.index("round 2/2")
    assert "certificate: 25 % of fc1.weight is in nobody's mask" in shown
    assert cli("run", *arguments, "--quiet", "--out", str(tmp_path / "quiet")) == (0, "", "")
    code, _, err = cli("run", *arguments, "--require-coverage", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "error: 25 % of fc1.weight is in nobody's mask in round 1" in err


def test_the_command_warns_once_if_steps_are_too_large(cli: Cli, tmp_path: Path) -> None:
    arguments = ["--set", "data.name=digits", "--set", "data.clients=4", "--set", "cohort=4", "--set", "rounds=3"]
    arguments += ["--set", "budgets.code=1111", "--set", "policy.name=full", "--set", "local.epochs=1"]
    arguments += ["--set", "local.lr=0.05", "--set", "engine=serial"]
    code, shown, err = cli("run", *arguments, "--certify", "--out", str(tmp_path / "run"))
    assert code == 0
    assert err.count("warning: after round 2 the step size 0.05 is by estimate at least") == 1
    assert err.count("the step size") == 1
    assert err.index("round 2/3") < err.index("warning") < err.index("round 3/3")
    assert "or more, but the step size 0.05 is by estimate" in shown
    assert cli("run", *arguments, "--certify", "--quiet", "--out", str(tmp_path / "quiet")) == (0, "", "")
    assert "the step size" not in cli("run", *arguments, "--out", str(tmp_path / "plain"))[2]


def test_the_report_shows_the_certificate(small_federation: Make, tmp_path: Path) -> None:
    with pytest.warns(fc.CoverageWarning):
        small_federation(certify=True, budgets=fc.by_slot("4777")).run(2, out=tmp_path / "bare")
    small_federation().run(1, out=tmp_path / "plain")
    page = write_report([tmp_path / "bare", tmp_path / "plain"], out=tmp_path / "both.html").read_text()
    assert ">Certificate<" in page
    assert "is in nobody&#x27;s mask in round 1" in page
    assert ">Certificate<" not in write_report([tmp_path / "plain"]).read_text()
    for odd in ('"a word"', "{}", '{"sentence": "x", "terms": 3}'):  # a damaged summary must not fail
        summary = tmp_path / "plain" / "summary.json"
        content = {**json.loads(summary.read_text()), "certificate": json.loads(odd)}
        summary.write_text(json.dumps(content))
        write_report([tmp_path / "plain"])
