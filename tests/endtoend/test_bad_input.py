"""Invalid input gets one sentence that names the value and the remedy, and exit code 2; no file changes."""

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedcover as fc
from fedcover.federation.stored_checkpoints import checkpoint_files

Cli = Callable[..., tuple[int, str, str]]

QUICK = [
    "--no-report",
    "--set",
    "data.name=digits",
    "--set",
    "data.clients=20",
    "--set",
    "local.epochs=1",
    "--set",
    "rounds=2",
    "--quiet",
]


def refuses(cli: Cli, arguments: list[str], *parts: str) -> None:
    """Check that the call exits with code 2 and one sentence on stderr that has all these parts."""
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    sentence = " ".join(err.split())
    assert sentence.startswith("error: ")
    assert "Traceback" not in sentence
    for part in parts:
        assert part in sentence, sentence


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def finished(cli: Cli, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    code, _, err = cli("run", *QUICK, "--out", str(folder))
    assert code == 0, err
    return folder


def test_wrong_code_digit(cli: Cli, tmp_path: Path) -> None:
    refuses(
        cli, ["audit", "code", "1111223894"], "digit 8 of code '1111223894' is '8'", "use one of 1, 2, 3, 4, 5, 6, 7"
    )
    run = ["run", *QUICK, "--set", "budgets.code=1111220000", "--out", str(tmp_path / "x")]
    refuses(cli, run, "digit 7 of code '1111220000' is '0'", "use one of")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("keep", ["0.0", "1.5", "-0.5"])
def test_keep_outside_its_range(cli: Cli, keep: str) -> None:
    refuses(cli, ["audit", "code", f"1,{keep}"], f"keep must be in (0, 1]; got {float(keep)}")


def test_cohort_larger_than_the_population(cli: Cli, tmp_path: Path) -> None:
    run = ["run", *QUICK, "--set", "cohort=30", "--set", "budgets.by=client", "--out", str(tmp_path / "x")]
    refuses(cli, run, "cohort must be from 1 to the number of clients, 20; got 30")


def test_code_and_cohort_of_different_lengths(cli: Cli, tmp_path: Path) -> None:
    run = ["run", *QUICK, "--set", "cohort=5", "--set", "budgets.code=10x1", "--out", str(tmp_path / "x")]
    refuses(cli, run, "the code has 10 slots but cohort is 5", "by_client")


def test_policy_with_a_wrong_shape(small_federation: Callable[..., fc.Federation]) -> None:
    @fc.policy
    def wrong(theta, client, this_round):  # type: ignore[no-untyped-def]
        return {"0.weight": torch.ones(3, dtype=torch.bool)}

    with pytest.raises(fc.InputError) as caught:
        small_federation(policy=wrong).run(1)
    message = str(caught.value)
    assert "policy wrong" in message
    assert "round 1" in message
    assert "'0.weight'" in message
    assert "(3,)" in message
    assert "(8, 6)" in message


def test_missing_data(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = ["run", "--data", str(tmp_path), "--out", str(tmp_path / "x")]
    refuses(cli, run, "mnist", "fedcover data get mnist", "--data")
    assert not (tmp_path / "x").exists()


@pytest.fixture
def mnist_copy(tmp_path: Path, mnist_folder: str) -> Path:
    where = fc.data.describe("mnist").where
    assert where is not None
    shutil.copytree(where, tmp_path / "data" / "mnist")
    for path in (tmp_path / "data" / "mnist").iterdir():
        path.chmod(0o644)
    return tmp_path / "data" / "mnist"


def test_missing_data_file(cli: Cli, mnist_copy: Path, tmp_path: Path) -> None:
    next(mnist_copy.glob("train-labels*")).unlink()
    refuses(cli, ["run", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "x")], "train-labels-idx1-ubyte")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_corrupt_data_file(cli: Cli, mnist_copy: Path, tmp_path: Path, damage: str) -> None:
    path = next(mnist_copy.glob("t10k-labels*"))
    raw = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        plain = bytearray(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        plain[100] ^= 1
        path.write_bytes(gzip.compress(bytes(plain)) if path.suffix == ".gz" else bytes(plain))
    before = snapshot(tmp_path / "data")
    run = ["run", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "x")]
    refuses(cli, run, "t10k-labels-idx1-ubyte", "fedcover data get")
    assert snapshot(tmp_path / "data") == before


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied"])
def test_damaged_checkpoint(cli: Cli, finished: Path, tmp_path: Path, damage: str) -> None:
    """The newest one is kept aside, and the run continues from the one before it; without any it is refused."""
    newest, older = checkpoint_files(finished)
    raw = newest.read_bytes()
    damaged = {"truncated": raw[: len(raw) // 2], "flipped": raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:], "emptied": b""}
    newest.write_bytes(damaged[damage])
    run = ["run", "--resume", "--out", str(finished), "--set", "rounds=4", "--no-report"]
    good = older.read_bytes()
    older.write_bytes(b"")
    before = snapshot(finished)
    refuses(cli, [*run, "--quiet"], "no checkpoint", newest.name, older.name, "another folder")
    assert snapshot(finished) == before
    older.write_bytes(good)
    code, _, err = cli(*run)
    assert code == 0, err
    aside = newest.with_name(newest.name + ".corrupt")
    (line,) = [line for line in err.splitlines() if line.startswith("warning: checkpoint")]
    assert f"it is kept as {aside.name}, and the run continues after round 1" in line
    assert aside.read_bytes() == damaged[damage]
    (row,) = [json.loads(line) for line in (finished / "recoveries.jsonl").read_text().splitlines()]
    assert (row["file"], row["continued_after_round"]) == (aside.name, 1)
    code, _, err = cli("run", *QUICK, "--set", "rounds=4", "--out", str(tmp_path / "whole"))
    assert code == 0, err
    assert fc.History.load(finished / "history.jsonl") == fc.History.load(tmp_path / "whole" / "history.jsonl")
    assert [file.name for file in checkpoint_files(finished)] == [
        "round-000004.safetensors",
        "round-000003.safetensors",
    ]


def test_run_folder_that_holds_a_run(cli: Cli, finished: Path) -> None:
    before = snapshot(finished)
    refuses(cli, ["run", *QUICK, "--out", str(finished)], str(finished), "a run of 2 rounds", "--resume")
    assert snapshot(finished) == before


def test_run_folder_in_use(cli: Cli, finished: Path) -> None:
    before = snapshot(finished)
    take = "from pathlib import Path\nfrom fedcover.federation.run_folder import lock_folder\n"
    take += f"lock = lock_folder(Path({str(finished)!r}))\n"
    hold = take + "print(flush=True)\ninput()"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    again = ["run", "--resume", "--out", str(finished)]
    try:
        refuses(cli, again, str(finished), f"is in use by process {holder.pid}", "another folder")
        assert snapshot(finished) == before
    finally:
        holder.kill()
        holder.communicate()
    code, _, err = cli(*again, "--quiet", "--no-report")  # the lock ends with its holder
    assert code == 0, err


def test_run_folder_that_is_something_else(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    run = ["run", *QUICK, "--out", str(tmp_path / "thesis")]
    refuses(cli, run, "it holds chapter.tex", "name a new folder")
    assert snapshot(tmp_path / "thesis") == {"chapter.tex": b"precious"}
    refuses(cli, ["run", *QUICK, "--out", str(tmp_path / "thesis" / "chapter.tex")], "is a file")


def test_resume_with_other_settings(cli: Cli, finished: Path) -> None:
    before = snapshot(finished)
    run = ["run", *QUICK, "--set", "local.lr=0.5", "--resume", "--out", str(finished)]
    config = finished / "config.toml"
    refuses(cli, ["run", str(config), *run[1:]], "local.lr was 0.01 and is 0.5", "folder")
    assert snapshot(finished) == before


def test_resume_to_fewer_rounds(cli: Cli, finished: Path) -> None:
    before = snapshot(finished)
    refuses(cli, ["run", "--resume", "--out", str(finished), "--set", "rounds=1"], "rounds must be at least 2")
    assert snapshot(finished) == before


def test_resume_without_a_run(cli: Cli, tmp_path: Path) -> None:
    refuses(cli, ["run", "--resume", "--out", str(tmp_path / "none")], "not a run folder")
    refuses(cli, ["run", "--resume"], "--resume needs --out")


def test_misspelt_config_key(cli: Cli, tmp_path: Path) -> None:
    refuses(cli, ["run", "--set", "local.lrr=1"], "optimizer SGD does not take local.lrr; did you mean 'local.lr'?")
    refuses(cli, ["run", "--set", "lr=1"], "there is no setting 'lr'; did you mean 'local.lr'?")
    config = tmp_path / "c.toml"
    config.write_text("[data]\nclient = 5\n")
    refuses(cli, ["run", str(config)], "there is no setting 'data.client'; did you mean 'data.clients'?")
    config.write_text("[locl]\nlr = 5\n")
    refuses(cli, ["run", str(config)], "there is no setting 'locl'", "did you mean 'local")


def test_bad_config_values(cli: Cli, tmp_path: Path) -> None:
    refuses(cli, ["run", "--set", "rounds=many"], "setting rounds must be a valid integer", "got 'many'")
    refuses(
        cli,
        ["run", "--set", "data.partition=idd"],
        "data.partition",
        "'iid', 'shards', 'dirichlet' or 'natural'",
        "got 'idd'",
    )
    refuses(cli, ["run", *QUICK, "--set", "local.lr=-1"], "lr must be a positive number; got -1.0")
    refuses(cli, ["run", *QUICK, "--set", "policy.name=WPP"], "there is no policy 'WPP'", "did you mean 'WP'?")
    refuses(cli, ["run", *QUICK, "--set", "data.name=mnits"], "mnits", "mnist")
    refuses(cli, ["run", "--set", "rounds"], "--set takes key=value")
    refuses(cli, ["run", str(tmp_path / "none.toml")], "there is no config file")
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3")
    refuses(cli, ["run", str(bad)], "is not readable as TOML")


def test_client_with_no_data() -> None:
    x = torch.randn(10, 4)
    with pytest.raises(fc.InputError, match="client 1 has no examples"):
        fc.data.from_parts((x, torch.zeros(10).long()), [torch.arange(10), torch.tensor([], dtype=torch.long)])


def test_client_with_no_data_from_the_command_line(cli: Cli, tmp_path: Path) -> None:
    run = ["run", *QUICK, "--set", "data.clients=5000", "--out", str(tmp_path / "x")]
    refuses(cli, run, "5000", "1437")


def test_reports_need_run_folders(cli: Cli, tmp_path: Path, finished: Path) -> None:
    refuses(cli, ["report", str(tmp_path / "none")], str(tmp_path / "none"))
    refuses(cli, ["report", str(finished), str(finished)], "needs --out FILE")


def test_lenet_on_images_too_small(cli: Cli, tmp_path: Path) -> None:
    refuses(cli, ["run", *QUICK, "--set", "model.name=lenet"], "lenet", "16 x 16")


def test_model_with_running_statistics_that_are_not_batch_norms() -> None:
    clients = fc.data.iid((torch.randn(8, 2, 3), torch.arange(8) % 2), clients=2)
    norm = torch.nn.InstanceNorm1d(2, track_running_stats=True)
    net = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(6, 2))
    with pytest.raises(fc.InputError, match=r"buffer '0.running_mean'.*batch, group or layer"):
        fc.Federation(fc.Task(net), clients, cohort=1)


class Branched(torch.nn.Module):
    """A layer, and another around which the signal can go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = (torch.nn.Linear(*sizes) for sizes in ((3, 5), (5, 5), (5, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        scores: torch.Tensor = self.last(x + self.branch(x))
        return scores


@pytest.mark.parametrize("layer", ["first", "branch"])
def test_a_mask_that_removes_a_whole_layer(layer: str) -> None:
    @fc.policy
    def without(theta: fc.params.Params, client: fc.Client, this_round: fc.Round) -> fc.params.Mask:
        return {f"{layer}.weight": torch.zeros_like(theta[f"{layer}.weight"], dtype=torch.bool)} if client.slot else {}

    clients = fc.data.iid((torch.randn(20, 3), torch.arange(20) % 2), clients=2)
    federation = fc.Federation(fc.Task(Branched()), clients, without, cohort=2)
    if layer == "branch":
        assert federation.run(1).gamma_min == 1  # there is a way around it
        return
    with pytest.raises(fc.InputError, match=r"keeps nothing of 'first.weight'.*keep at least one"):
        federation.run(1)


OWN = """
import torch
import fedcover as fc

@fc.policy
def half(theta, client, this_round):
    weight = theta["fc1.weight"]
    return {"fc1.weight": torch.arange(weight.numel()).reshape(weight.shape) % 2 == 0}

@fc.policy
def wrong(theta, client, this_round):
    return {"fc1.weight": torch.ones(3, dtype=torch.bool)}

number = 5
"""


def test_a_user_s_policy_from_the_command_line(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(OWN)
    code, _, err = cli("run", *QUICK, "--set", f"policy.name={mine}:half", "--out", str(tmp_path / "half"))
    assert code == 0, err
    wrong = ["run", *QUICK, "--set", f"policy.name={mine}:wrong", "--out", str(tmp_path / "wrong")]
    refuses(cli, wrong, "policy wrong", "(3,)", "'fc1.weight'", "(200, 64)")
    for name, why in (("number", "int"), ("none", "does not exist"), ("", "does not exist")):
        refuses(cli, ["run", *QUICK, "--set", f"policy.name={mine}:{name}"], why, "@fedcover.policy")
    refuses(cli, ["run", *QUICK, "--set", "policy.name=no.py:x"], "there is no file 'no.py'")
    mine.write_text("1/0")
    refuses(cli, ["run", *QUICK, "--set", f"policy.name={mine}:x"], "fails when it is loaded (ZeroDivisionError")


def test_odd_input(cli: Cli, tmp_path: Path, finished: Path) -> None:
    refuses(cli, ["run", *QUICK, "--set", "name=../../x"], "setting name must be at most 100 printable characters")
    refuses(cli, ["run", *QUICK, "--set", "rounds=true"], "setting rounds", "got True")
    refuses(cli, ["audit", "code", "1000000000000000x1"], "1000000000000000x1")
    refuses(
        cli,
        ["audit", "code", "11", "--policy", "fedrollex"],
        "there is no policy 'fedrollex'",
        "did you mean 'FedRolex'?",
    )
    refuses(
        cli,
        ["audit", "rounds", "--budgets", "11", "--rounds", "0"],
        "rounds must be a whole number of 1 or more; got 0",
    )
    refuses(
        cli,
        ["audit", "rounds", "--budgets", "11", "--rounds", "2", "--window", "3"],
        "window must be at most rounds, 2; got 3",
    )
    refuses(cli, ["audit", "code", "0000001", "--policy", "FS"], "digit 1 of code '0000001' is '0'")
    full = ["--set", "policy.name=full", "--set", "budgets.code=1111223344"]
    refuses(cli, ["run", *QUICK, *full], "policy full")
    many = ["--set", "budgets.by=client", "--set", "budgets.code=30x1"]
    refuses(cli, ["run", *QUICK, *many], "30 budgets", "20 clients")
    odd = tmp_path / "odd.toml"
    odd.write_text("data = 5\n")
    refuses(cli, ["run", str(odd), "--set", "data.name=digits"], "setting data")
    (finished / "checkpoints" / "round-zz.safetensors").write_text("")
    refuses(cli, ["run", *QUICK, "--out", str(finished)], "a run of 2 rounds")
    (finished / "config.toml").unlink()
    (finished / "config.toml").mkdir()
    refuses(cli, ["run", "--resume", "--out", str(finished)], "cannot be read")


def test_names_with_brackets_are_only_names(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", *QUICK[:-1], "--set", "name=[x] [bold]", "--out", str(tmp_path / "[red]"))
    assert code == 0, err
    assert "[x] [bold]: accuracy" in out
    code, out, err = cli("report", str(tmp_path / "[red]"))
    assert code == 0, err
    assert "[x] [bold]" in out


def test_a_run_that_diverges_fails_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", *QUICK, "--set", "local.lr=1e30", "--out", str(tmp_path / "run"))
    assert (code, out) == (1, "")
    assert "round 1" in err
    assert "lower lr" in err


def test_the_real_command_exits_with_2_and_no_traceback(
    fedcover_cli: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = fedcover_cli("audit", "code", "19")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: digit 2 of code '19' is '9'")


def test_a_missing_argument_is_invalid_input_too(cli: Cli) -> None:
    assert cli("audit")[0] == 2
