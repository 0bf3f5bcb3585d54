"""The command line, for users and for scripts."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]

QUICK = ["--set", "data.name=digits", "--set", "data.clients=20", "--set", "local.epochs=1", "--set", "rounds=2"]


def test_run_report_compare(cli: Cli, tmp_path: Path) -> None:
    folders = []
    for policy, code in (("WP", "1111223344"), ("NP", "1111444444"), ("full", "1111111111")):
        folder = tmp_path / policy
        run = [*QUICK, "--set", f"policy.name={policy}", "--set", f"budgets.code={code}", "--out", str(folder)]
        code_, out, err = cli("run", *run)
        assert code_ == 0, err
        assert f"report: {folder / 'report.html'}" in out
        assert "round 2/2" in err  # lines of progress, since this is not a terminal
        folders.append(str(folder))
    code_, out, err = cli("report", *folders, "--out", str(tmp_path / "all.html"), "--figures", str(tmp_path / "figs"))
    assert code_ == 0, err
    assert (tmp_path / "all.html").stat().st_size > 10_000
    suffixes = {path.suffix for path in (tmp_path / "figs").iterdir()}
    assert suffixes == {".svg", ".png"}
    for name in ("WP-1111223344", "NP-1111444444", "full"):
        assert name in out


def test_json_mode_prints_only_json(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", *QUICK, "--json", "--out", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary["rounds"] == 2
    assert summary["folder"] == str(tmp_path / "run")
    assert 0 <= summary["accuracy"] <= 1


def test_quiet_mode_prints_nothing(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", *QUICK, "--quiet", "--out", str(tmp_path / "run")) == (0, "", "")


def test_config_file_and_changes(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'rounds = 9\n[data]\nname = "digits"\nclients = 20\npartition = "dirichlet"\n[local]\nepochs = 1\n'
    )
    code, out, err = cli("run", str(config), "--set", "rounds=1", "--json", "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert json.loads(out)["rounds"] == 1
    assert 'partition = "dirichlet"' in (tmp_path / "run" / "config.toml").read_text()
    assert "batch_size = 10" in (tmp_path / "run" / "config.toml").read_text()  # all settings are recorded


@pytest.mark.parametrize("topic", ["policies", "models", "codes", "data", "settings"])
def test_lists(cli: Cli, topic: str) -> None:
    code, out, _ = cli("list", topic)
    assert code == 0
    assert out
    code, out, _ = cli("list", topic, "--json")
    assert code == 0
    assert json.loads(out)[topic]


def test_every_command_has_help(cli: Cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    for command in ("demo", "run", "design", "audit", "calibrate", "report", "watch", "list", "data", "deploy"):
        assert command in out
        code, text, _ = cli(command, "--help")
        assert code == 0
        assert "Usage: fedcover" in text


def test_audit_shows_coverage(cli: Cli) -> None:
    code, out, _ = cli("audit", "code", "1111444444")
    assert code == 0
    assert "Γmin 4" in out
    assert "S1 10  S2 10  S3 10  S4 4" in out
    code, out, _ = cli("audit", "code", "4444444444", "--policy", "FS")
    assert code == 0
    assert "FAILS" in out


def test_audit_over_rounds(cli: Cli) -> None:
    audit = ["audit", "rounds", "--policy", "fedrolex", "--model", "lenet", "--budgets", "10x0.25", "--rounds", "60"]
    code, out, err = cli(*audit, "--window", "20", "--json")
    assert code == 0, err
    covered = json.loads(out)
    assert covered["units_covered"] < 1
    assert 0 < covered["weights_covered"] < 1
    assert (covered["gamma_min"], covered["gamma_window"], covered["window"], covered["rounds_to_cover"]) == (
        0,
        0,
        20,
        None,
    )
    assert len(covered["gamma_rounds"]) == covered["rounds"] == 60
    code, out, _ = cli(*audit, "--times", "2")
    assert code == 0
    assert "fedrolex on lenet, 10 clients in each of 60 rounds" in out
    assert "every weight covered 2 times or more: not within 60 rounds" in out
    assert "initial theta" not in out
    code, out, _ = cli("audit", "rounds", "--budgets", "1144", "--policy", "NP", "--rounds", "3")
    assert code == 0
    assert "initial theta" in out
    code, out, _ = cli("audit", "rounds", "--budgets", "4x0.5", "--policy", "weight_complete")
    assert code == 0
    assert "every weight covered once or more: by round 1" in out


def test_audit_of_a_code_names_its_policy(cli: Cli) -> None:
    audit = json.loads(cli("audit", "code", "1144", "--policy", "fs", "--json")[1])
    assert audit["policy"] == "FS"
    assert len(audit["regions"]) == 2


def test_audit_of_a_code_shows_bands_only_where_items_are_ranked(cli: Cli) -> None:
    ranked, whole, designed = (
        json.loads(cli("audit", "code", "1444777777", "--policy", policy, "--json")[1])["coverage"]
        for policy in ("PT", "full", "optimal")
    )
    assert (ranked, whole, designed) == ([10, 10, 4, 1], [10] * 4, [])


def test_demo(fedcover_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, mnist_folder: str) -> None:
    done = fedcover_cli("demo", "--rounds", "1", "--out", "d")
    assert done.returncode == 0, done.stderr
    for name in ("FullNets", "WP-M2", "*WP-M1"):
        assert name in done.stdout
    assert (tmp_path / "d" / "comparison.html").exists()
    assert str(tmp_path / "d" / "comparison.html") in done.stdout


def test_demo_without_any_source_uses_the_digits(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder, a cache, a mirror or npm, the demo continues with real, smaller data."""
    nowhere = {
        "FEDCOVER_DATA": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path),
        "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9",
    }  # fmt: skip
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    code, _, err = cli("demo", "--rounds", "1", "--out", str(tmp_path / "d"))
    assert code == 0, err
    assert "8x8 digits" in err
    assert (tmp_path / "d" / "comparison.html").exists()
