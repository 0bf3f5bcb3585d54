"""A killed run resumes bit-identically; the same seed gives the same history, wherever it runs."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedcover as fc
from fedcover.federation.run_folder import newest_checkpoint
from tests.conftest import small_data, small_net
from tests.laws.strategies import same

Cli = Callable[..., tuple[int, str, str]]

SETTINGS = [
    "--set", "data.name=digits", "--set", "data.clients=20", "--set", "policy.name=PT",
    "--set", "budgets.code=1111223344",
    "--set", "local.epochs=500", "--set", "rounds=4", "--quiet", "--no-report",
]  # fmt: skip


def final_theta(folder: Path) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(folder)
    assert newest is not None
    return {name: tensor for name, tensor in load_file(newest).items() if name != "history"}


def test_kill_9_in_mid_round_then_resume_gives_the_same_bits(tmp_path: Path, cli: Cli) -> None:
    """The process that is killed is another one than the one that resumes."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli("run", *SETTINGS, "--out", str(whole))[0] == 0

    command = [sys.executable, "-m", "fedcover", "run", *SETTINGS, "--out", str(killed)]
    process = subprocess.Popen(command, cwd=tmp_path, env=dict(os.environ))
    history = killed / "history.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and (not history.exists() or history.read_text().count("\n") < 2):
        time.sleep(0.005)
    time.sleep(0.1)  # round 3 has begun: a round takes several times as long
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 2 <= history.read_text().count("\n") < 4
    assert not (killed / "summary.json").exists()

    code, _, err = cli("run", "--resume", "--out", str(killed), "--quiet")
    assert code == 0, err
    assert fc.History.load(killed / "history.jsonl") == fc.History.load(whole / "history.jsonl")
    assert len(fc.History.load(killed / "history.jsonl")) == 4
    assert same(final_theta(killed), final_theta(whole))
    assert any(name.startswith("policy/") for name in final_theta(killed))  # with PT's frozen ranks


@pytest.mark.parametrize("policy", ["WP", "PT"])
@pytest.mark.parametrize("stop", [1, 4])
def test_resume_after_any_round(
    small_federation: Callable[..., fc.Federation], tmp_path: Path, stop: int, policy: str
) -> None:
    class Stop(Exception):
        pass

    def stop_there(record: fc.RoundRecord) -> None:
        if record.round == stop:
            raise Stop

    make = {"WP": fc.weight_pruning, "PT": fc.pretrained_mask}[policy]
    test = small_federation().clients.examples
    settings = {"evaluate_on": test, "evaluate_every": 2, "checkpoint_every": 3}
    whole = small_federation(policy=make()).run(6, out=tmp_path / "whole", **settings)
    with pytest.raises(Stop):
        small_federation(policy=make()).run(6, out=tmp_path / "cut", on_round=stop_there, **settings)
    resumed = small_federation(policy=make()).run(6, out=tmp_path / "cut", resume=True, **settings)
    assert resumed == whole == fc.History.load(tmp_path / "cut" / "history.jsonl")
    assert same(final_theta(tmp_path / "whole"), final_theta(tmp_path / "cut"))


def damage(file: Path, rng: random.Random) -> str:
    """Damage a file in one of several ways, and return which."""
    raw = bytearray(file.read_bytes())
    kind = rng.choice(["cut", "flipped", "emptied", "zeros", "noise"])
    if kind == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif kind == "flipped":
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":  # as a file system may leave it after a power cut
        start = rng.randrange(len(raw) - 1)
        raw[start:] = bytes(len(raw) - start)
    else:
        raw = bytearray(rng.randbytes(len(raw)) if kind == "noise" else b"")
    file.write_bytes(raw)
    return kind


@pytest.mark.parametrize("seed", range(12))
def test_resume_with_a_damaged_newest_checkpoint_gives_the_same_bits(
    small_federation: Callable[..., fc.Federation], tmp_path: Path, seed: int
) -> None:
    """Stopped and damaged at random, as often as it takes; also with a line that is cut in the history."""

    class Stop(Exception):
        pass

    rng = random.Random(seed)
    test, every = small_federation().clients.examples, rng.choice([1, 2])

    def run(out: str, on_round: Callable[[fc.RoundRecord], None], resume: bool = False) -> fc.History:
        callbacks = [fc.CSVLog(), fc.KeepBest(), fc.EarlyStopping(patience=100)]
        playing = small_federation(policy=fc.pretrained_mask(), aggregator=fc.FedAdam(fc.mean(), lr=0.01))
        return playing.run(
            8, evaluate_on=test, out=tmp_path / out, resume=resume, on_round=on_round, callbacks=callbacks,
            checkpoint_every=every,
        )  # fmt: skip

    whole = run("whole", lambda record: None)
    cut, stops = tmp_path / "cut", sorted(rng.sample(range(2 * every, 8), 2))
    for stop in stops:

        def stop_there(record: fc.RoundRecord, stop: int = stop) -> None:
            if record.round == stop:
                raise Stop

        warned = [] if stop == stops[0] else [fc.CheckpointWarning]
        with pytest.raises(Stop), catch(warned):
            run("cut", stop_there, resume=stop != stops[0])
        newest = newest_checkpoint(cut)
        assert newest is not None
        damage(newest, rng)
        with open(cut / "history.jsonl", "ab") as file:
            file.write(rng.choice([b'{"round": 9, "coh', b"\xff\xfe\n", b""]))
    with catch([fc.CheckpointWarning]):
        assert run("cut", lambda record: None, resume=True) == whole == fc.History.load(cut / "history.jsonl")
    assert same(final_theta(tmp_path / "whole"), final_theta(cut))
    assert same(load_file(cut / "best.safetensors"), load_file(tmp_path / "whole" / "best.safetensors"))
    assert [row.split(",")[0] for row in (cut / "metrics.csv").read_text().split()] == ["round", *map(str, range(1, 9))]
    assert len((cut / "recoveries.jsonl").read_text().splitlines()) == 2


@contextmanager
def catch(expected: list[type[Warning]]) -> Iterator[None]:
    """Check that exactly these warnings are issued, of those about checkpoints."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        yield
    assert [one.category for one in issued if one.category is fc.CheckpointWarning] == expected


def test_a_checkpoint_of_another_run_or_round_is_not_used(
    small_federation: Callable[..., fc.Federation], tmp_path: Path
) -> None:
    whole = small_federation().run(4, out=tmp_path / "whole")
    small_federation().run(2, out=tmp_path / "run")
    small_federation(seed=9).run(3, out=tmp_path / "other")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "round-000003.safetensors").write_bytes(
        (tmp_path / "other" / "checkpoints" / "round-000003.safetensors").read_bytes()
    )
    (folder / "round-000004.safetensors").write_bytes((folder / "round-000002.safetensors").read_bytes())
    with pytest.warns(fc.CheckpointWarning) as issued:
        assert small_federation().run(4, out=tmp_path / "run", resume=True) == whole
    texts = [str(one.message) for one in issued]
    assert "because it is a checkpoint of round 2" in texts[0]
    assert "because it belongs to another run" in texts[1]
    assert len(list(folder.glob("*.corrupt"))) == 2
    before = sorted(folder.iterdir())
    with pytest.raises(fc.InputError, match="seed"):  # all checkpoints are of another run: the settings are wrong
        small_federation(seed=9).run(4, out=tmp_path / "run", resume=True)
    assert sorted(folder.iterdir()) == before


def test_a_finished_run_can_be_resumed_for_more_rounds(
    small_federation: Callable[..., fc.Federation], tmp_path: Path
) -> None:
    test = small_federation().clients.examples
    for schedule in ({"evaluate_every": 2}, {"evaluate_every": 3, "local_every": 2}):
        out = tmp_path / f"run{schedule['evaluate_every']}"
        shorter = small_federation().run(3, evaluate_on=test, out=out, **schedule)
        assert shorter.last.local_accuracy is not None  # the last round is always evaluated
        longer = small_federation().run(5, evaluate_on=test, out=out, resume=True, **schedule)
        assert longer == small_federation().run(5, evaluate_on=test, **schedule)


def test_threads_do_not_change_a_bit(small_federation: Callable[..., fc.Federation]) -> None:
    test = small_federation().clients.examples
    before = torch.get_num_threads()
    histories = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            histories.append(small_federation(policy=fc.neuron_pruning()).run(2, evaluate_on=test))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert histories[0] == histories[1]


@pytest.mark.parametrize("change", ["partition", "inputs", "loss", "test", "model"])
def test_a_resume_with_other_data_loss_or_model_is_refused(tmp_path: Path, change: str) -> None:
    def federation(changed: str = "") -> fc.Federation:
        data = small_data()
        if changed == "inputs":
            data.inputs.mul_(2)
        loss = torch.nn.functional.multi_margin_loss if changed == "loss" else torch.nn.functional.cross_entropy
        clients = fc.data.iid(data, clients=8, seed=2 if changed == "partition" else 1)
        return fc.Federation(fc.Task(small_net(5 if changed == "model" else 0), loss), clients, cohort=4)

    federation().run(1, out=tmp_path / "run", evaluate_on=small_data(30))
    test = small_data(31 if change == "test" else 30)
    reason = "the loss was" if change == "loss" else "the data or the initial model differ"
    with pytest.raises(fc.InputError, match=reason):
        federation(change).run(2, out=tmp_path / "run", resume=True, evaluate_on=test)
    assert len(federation().run(2, out=tmp_path / "run", resume=True, evaluate_on=small_data(30))) == 2


def test_a_policy_that_is_a_class_resumes(small_federation: Callable[..., fc.Federation], tmp_path: Path) -> None:
    class Mine(fc.Policy):
        def plan(self, theta, cohort, this_round, state):  # type: ignore[no-untyped-def]
            return [fc.ClientPlan(client) for client in cohort], {"seen": torch.tensor(this_round.index)}

    small_federation(policy=Mine(), budgets=fc.by_slot("1111")).run(1, out=tmp_path / "run")
    assert (
        len(small_federation(policy=Mine(), budgets=fc.by_slot("1111")).run(3, out=tmp_path / "run", resume=True)) == 3
    )


def test_the_trained_model_can_be_loaded(small_federation: Callable[..., fc.Federation], tmp_path: Path) -> None:
    history = small_federation().run(2, out=tmp_path / "run")
    model = fc.load_model(tmp_path / "run", small_net(9))
    assert history.theta is not None
    assert same({name: tensor.detach() for name, tensor in model.named_parameters()}, history.theta)
    with pytest.raises(fc.InputError, match="another model than Linear"):
        fc.load_model(tmp_path / "run", torch.nn.Linear(2, 2))
    with pytest.raises(fc.InputError, match="checkpoint"):
        fc.load_model(tmp_path, small_net())


def test_same_seed_same_history_whatever_ran_before(small_federation: Callable[..., fc.Federation]) -> None:
    test = small_federation().clients.examples
    first = small_federation().run(3, evaluate_on=test)
    small_federation(seed=9, policy=fc.pretrained_mask()).run(2)
    torch.rand(1000)  # other code may draw from the global generator
    assert small_federation().run(3, evaluate_on=test) == first
    assert small_federation(seed=9).run(3, evaluate_on=test) != first


def test_one_federation_can_run_twice(small_federation: Callable[..., fc.Federation]) -> None:
    federation = small_federation(policy=fc.pretrained_mask())
    assert federation.run(4) == federation.run(4)


def test_same_seed_same_history_in_two_processes(
    tmp_path: Path, fedcover_cli: Callable[..., subprocess.CompletedProcess[str]], cli: Cli
) -> None:
    """In this process and in one whose hashes of strings differ."""
    short = [*SETTINGS, "--set", "rounds=2", "--set", "local.epochs=1"]
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = fedcover_cli("run", *short, "--out", str(tmp_path / "a"), env={"PYTHONHASHSEED": hash_seed})
    assert done.returncode == 0, done.stderr
    code, _, err = cli("run", *short, "--out", str(tmp_path / "b"))
    assert code == 0, err
    assert fc.History.load(tmp_path / "a/history.jsonl") == fc.History.load(tmp_path / "b/history.jsonl")
    assert same(final_theta(tmp_path / "a"), final_theta(tmp_path / "b"))


@pytest.mark.parametrize("left", [[], ["method.json"], ["method.json", ".config.toml.7.part"], [".method.json.7.part"]])
def test_a_run_killed_while_its_folder_was_made_starts_in_it(
    small_federation: Callable[..., fc.Federation], tmp_path: Path, left: list[str]
) -> None:
    whole = small_federation().run(1, out=tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    for name in left:
        (tmp_path / "killed" / name).write_text((tmp_path / "whole" / "method.json").read_text())
    assert small_federation().run(1, out=tmp_path / "killed", resume=True) == whole
    assert not list((tmp_path / "killed").glob(".*.part"))
