"""The departures of the authors' script: each has its effect, and without them it is Algorithm 1."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcover as fc
from fedcover.budgets import QUARTERS
from fedcover.clients import Client
from fedcover.data import Split
from fedcover.params import Params, prune
from fedcover.policies.ranked import Weights
from fedcover.policies.weight_pruning import weight_pruning
from fedcover.seeding import Round
from fedcover_experiments.paper import authors_script
from fedcover_experiments.paper.authors_script import SWITCHES, VARIANTS, Misranked, ScriptHook
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import load
from tests.conftest import small_data, small_net

SOURCE = Path(fc.__file__).parents[1]


def settings(code: str = "1257", seed: int = 3) -> dict[str, Any]:
    return {
        "task": fc.Task(small_net()),
        "clients": fc.data.iid(small_data(), clients=8, seed=1),
        "budgets": fc.by_slot(code),
        "local": fc.LocalSGD(epochs=2, batch_size=8, lr=0.1),
        "cohort": len(code),
        "seed": seed,
    }


def script(*switches: str, leaked: Params | None = None, code: str = "1257") -> fc.Federation:
    hook = ScriptHook(frozenset(switches), leaked)
    return fc.Federation(policy=hook.policy, hook=hook, **settings(code))


def test_only_the_commands_import_the_departures() -> None:
    importers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import) and "authors_script" in ast.unparse(node)
    }
    assert importers == {"fedcover_experiments/cli.py", "fedcover_experiments/__main__.py"}  # the commands


def test_without_switches_it_is_algorithm_1() -> None:
    ours, theirs = fc.Federation(policy=weight_pruning(), **settings()).run(3), script().run(3)
    assert all(torch.equal(ours.theta[name], theirs.theta[name]) for name in ours.theta)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("none", "leak")])
def test_a_switch_changes_the_result(variant: str) -> None:
    assert not torch.equal(script().run(2).theta["0.weight"], script(*VARIANTS[variant]).run(2).theta["0.weight"])


def test_rank_ignores_magnitude() -> None:
    """With true ranks pattern 4 removes the smallest quarter, 1/64 of a uniform norm; with the script's, a quarter."""
    theta = {"w": torch.rand(200, 784, generator=torch.Generator().manual_seed(0)) * 2 - 1}
    client = Client(0, 0, QUARTERS["4"])
    shares = []
    for policy in (weight_pruning(), Misranked("WP", weight_pruning().find)):
        bound = type(policy)(policy.name, policy.find, blocks=(Weights("w"),))
        mask = bound.plan(theta, [client], Round(1, 0), {})[0][0].mask
        assert float(mask["w"].float().mean()) == 0.75
        shares.append(float((theta["w"][~mask["w"]] ** 2).sum() / (theta["w"] ** 2).sum()))
    assert shares == pytest.approx([1 / 64, 1 / 4], abs=0.005)


def test_start_gives_6_and_7_the_model_of_5() -> None:
    federation = script("start", code="1567")
    begun = federation.begin_round(federation.start())
    full, _, sixth, seventh = begun.jobs
    assert full.theta is begun.state.theta
    assert sixth.theta is seventh.theta  # one start, and each trains under its own mask
    expected = prune(begun.state.theta, begun.masks[1])
    assert all(torch.equal(seventh.theta[name], expected[name]) for name in expected)
    assert [job.mask for job in begun.jobs] == begun.masks


def test_gradient_trains_everything_and_zeroes_it_afterwards() -> None:
    federation = script("gradient")
    begun = federation.begin_round(federation.start())
    assert not any(job.mask for job in begun.jobs)
    updates = list(federation.engine.train(begun.jobs))
    outside = ~begun.masks[3]["0.weight"]
    assert updates[3].theta["0.weight"][outside].abs().max() > 0  # it trained
    state, record = federation.end_round(begun, updates)
    kept = [update.theta["0.weight"] * (begun.masks[i].get("0.weight", 1.0)) for i, update in enumerate(updates)]
    holders = torch.stack([begun.masks[i].get("0.weight", torch.ones_like(outside)).float() for i in range(4)]).sum(0)
    torch.testing.assert_close(state.theta["0.weight"], torch.stack(list(map(torch.as_tensor, kept))).sum(0) / holders)
    assert record.gamma_min == 2


def test_leak_starts_pruned_models_from_the_previous_code() -> None:
    leaked = {name: torch.full_like(tensor, 0.25) for name, tensor in script().theta0.items()}
    federation = script("leak", leaked=leaked)
    begun = federation.begin_round(federation.start())
    assert all(torch.equal(begun.jobs[0].theta[name], federation.theta0[name]) for name in leaked)
    assert all(torch.equal(begun.jobs[1].theta[name], leaked[name]) for name in leaked)
    later = federation.begin_round(federation.play_round(federation.start())[0])
    assert all(job.theta is later.state.theta for job in later.jobs)  # only in the first round


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study of three codes on random images."""
    inputs = torch.randn(500, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    examples = fc.Examples(inputs, inputs.flatten(1)[:, :10].argmax(1), classes=10)
    monkeypatch.setattr(authors_script, "load", lambda name, folder: Split(examples, examples))
    monkeypatch.setattr(authors_script, "CHAIN", ("1111111111", "1111114444"))
    monkeypatch.setattr(authors_script, "SEPARATE", ("1444777777",))


def test_the_study_has_every_row_with_every_switch() -> None:
    codes = {row.code for row in tables()["mnist-wp"].rows}
    assert set(authors_script.CHAIN) | set(authors_script.SEPARATE) == codes
    assert len(authors_script.departure_runs(3)) == len(VARIANTS) * len(codes) * 2 * 3


@pytest.mark.usefixtures("shorter")
def test_each_code_of_the_chain_leaks_to_the_next(cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, shown, err = cli("paper", "departures", "--seeds", "1", "--rounds", "2", "--out", str(tmp_path))
    assert code == 0, err
    assert "36 runs in" in shown
    assert re.search(r"1444777777 +95.10( +\d\d\.\d\d){6}", shown)
    assert re.search(r"mean distance +–( +\d\d?\.\d\d){6}", shown)
    outcomes = {run.name: outcome for run, outcome in load(tmp_path / "2-rounds" / "departures.json").outcomes.items()}
    assert len(outcomes) == len(VARIANTS) * 3 * 2
    plain, leaky = outcomes["mnist/iid/WP+none-1111114444/seed-0"], outcomes["mnist/iid/WP+leak-1111114444/seed-0"]
    assert (leaky.loss[0] or 9) < (plain.loss[0] or 0)  # models that start from a trained one are ahead after a round
    assert outcomes["mnist/iid/WP+leak-1444777777/seed-0"].loss == outcomes["mnist/iid/WP+none-1444777777/seed-0"].loss


def test_all_four_at_once() -> None:
    """In the first round a client of pattern 6 starts from the leak, under pattern 5's misranked mask, unmasked."""
    leaked = {
        name: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in script().theta0.items()
    }
    federation = script(*SWITCHES, leaked=leaked, code="1567")
    begun = federation.begin_round(federation.start())
    expected = prune(leaked, begun.masks[1])
    assert all(torch.equal(begun.jobs[2].theta[name], expected[name]) for name in expected)
    assert not begun.jobs[2].mask
    state, _ = federation.end_round(begun, federation.engine.train(begun.jobs))
    later = federation.begin_round(state)
    assert federation.hook.round_theta is state.theta  # what leaks to the next code
    assert later.state.theta is not federation.theta0
