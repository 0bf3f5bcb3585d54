"""``fedcover watch`` with real processes: a run in progress, in a real browser and from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedcover.federation.history import History
from fedcover.report.live_page import LivePage
from tests.endtoend.browser import NARROW, WIDE, Browser
from tests.unit.report.conftest import make_record, write_run
from tests.unit.report.test_methods import write_sweep

Cli = Callable[..., tuple[int, str, str]]
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
RUN = ["--set", "data.name=digits", "--set", "data.clients=20", "--set", "local.epochs=1", "--set", "rounds=2000"]
PATIENCE = 60.0
PAUSE = """
import time
import fedcover as fc

class Pause(fc.Callback):
    def on_round(self, view):
        time.sleep(0.1)
"""
"""A callback with which a run leaves the processor to the test for most of the time."""


@contextmanager
def watching(folder: Path, *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start the command; yield the address of its page, and the process."""
    command = [sys.executable, "-m", "fedcover", "watch", str(folder), *options]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as it:
        try:
            assert it.stdout
            line = it.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert match, line
            yield match[0], it
        finally:
            it.kill()


@contextmanager
def running(folder: Path, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a run or a sweep that takes longer than the test."""
    (pause := folder.with_name("pause.py")).write_text(PAUSE)
    settings = [*RUN, "--set", "budgets.code=1111223344", "--set", f"callbacks.pause.name={pause}:Pause", "--quiet"]
    settings += ["--out", str(folder)]
    with subprocess.Popen([sys.executable, "-m", "fedcover", *command, *settings]) as run:
        try:
            yield run
        finally:
            run.kill()


def get(url: str) -> Any:
    with open_url(url, timeout=30) as answer:
        return json.load(answer)


def status_of(request: urllib.request.Request) -> int:
    try:
        with open_url(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def eventually(check: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if result := check():
            return result
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {PATIENCE:.0f} s")


def round_shown(browser: Browser) -> int:
    text = str(browser.script("return document.querySelector('#live')?.textContent || ''"))
    match = re.search(r"Round ([\d,]+) of 2000", text)
    return int(match[1].replace(",", "")) if match else 0


def rows_shown(browser: Browser) -> int:
    return int(browser.script("return document.querySelector('[aria-label^=\"Rounds of\"] tbody')?.rows.length || 0"))


def check_progress(browser: Browser, url: str, run: "subprocess.Popen[bytes]", width: int) -> None:
    """Open the page of a run in progress on a screen of a width, and check that it follows the run."""
    browser.resize(width, 844, phone=width == NARROW)
    browser.visit(url)
    first = eventually(lambda: rows_shown(browser), "the first round on the page")
    browser.script("window.stays = true; document.querySelector('details').open = true; scrollTo(0, 300)")
    browser.script("document.querySelector('[aria-label^=\"Rounds of\"] th .sort').click()")
    browser.script("document.querySelector('[aria-label^=\"Rounds of\"] th .sort').click()")
    eventually(lambda: rows_shown(browser) > first, "a second drawing")
    before = round_shown(browser)
    eventually(lambda: round_shown(browser) > before, "progress")
    assert run.poll() is None
    panel = browser.script("return document.querySelector('#live').textContent")
    assert re.search(r"Running\. Round \d+ of 2000, time left .+, last round .+ ago, no updates rejected", panel)
    state = browser.script("""
        const numbers = [...document.querySelectorAll("[aria-label^='Rounds of'] tbody th")];
        const values = numbers.map((cell) => Number(cell.textContent));
        return [window.stays, document.querySelector("details").open, scrollY, values[0] > values.at(-1)];
    """)
    assert state == [True, True, 300, True]  # no reload; unfolded, scrolled and sorted as before
    assert browser.script("return document.querySelectorAll('figure > svg').length") >= 5


def test_the_page_follows_a_run_in_progress(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = "return document.querySelector('#live').textContent"
    browser.log()
    with watching(folder) as (url, _):
        browser.visit(url)
        assert "no recorded round yet" in browser.script(text)
        with running(folder, "run", "--no-report") as run:
            eventually(lambda: rows_shown(browser), "the first round on a page that was open before")
            for width in (NARROW, WIDE):
                check_progress(browser, url, run, width)
    eventually(lambda: "has ended" in browser.script(text), "the end")
    assert [entry for entry in browser.log() if "ERR_CONNECTION_REFUSED" not in entry["message"]] == []


def test_the_page_follows_a_sweep_in_progress(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    browser.resize(WIDE, 844)
    panel = "return document.querySelector('#live').textContent"

    def rounds() -> int:
        match = re.search(r"Rounds ([\d,]+) of 8000, 0 of 4 runs finished, time left", str(browser.script(panel)))
        return int(match[1].replace(",", "")) if match else 0

    with watching(folder) as (url, _):
        browser.visit(url)
        with running(folder, "sweep", "--set", "policy.name=WP,FS", "--set", "seed=0,1") as sweep:
            first = eventually(rounds, "the first rounds")
            eventually(lambda: rounds() > first, "progress")
            legend = "return [...document.querySelectorAll('.legend.shared li')].map((item) => item.textContent)"
            eventually(lambda: browser.script(legend) == ["WP", "FS"], "curves of both methods")
            assert sweep.poll() is None


def test_hidden_runs_of_a_sweep_stay_hidden_through_an_update(browser: Browser, tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", ("full", "WP"), started=4)
    browser.resize(WIDE, 844)
    with watching(folder) as (url, _):
        browser.visit(url)
        assert "Rounds 12 of 18, 4 of 6 runs finished" in browser.script("return document.body.textContent")
        browser.script("document.querySelector('.legend.shared li:nth-child(2) button').click()")
        records = [make_record(n, seed=100) for n in (1, 2, 3)]
        write_run(folder / "policy=WP,seed=1", records, seed=1, policy={"name": "WP"})
        status = "return document.querySelector('#live').textContent"
        eventually(lambda: "Rounds 15 of 18, 5 of 6 runs" in browser.script(status), "the fifth run")
        eventually(lambda: "All 5 runs" in browser.script("return document.body.textContent"), "the drawing")
        shown = (
            "return [...document.querySelectorAll('[data-series=WP]')].map((part) => getComputedStyle(part).display)"
        )
        assert set(browser.script(shown)) == {"none"}
        assert (
            browser.script("return document.querySelector('.legend.shared [aria-pressed=false]').textContent") == "WP"
        )


def test_only_this_machine_is_answered_and_nothing_is_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [make_record(1)], finished=False, rounds=9)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with watching(folder) as (url, process):
        port = int(url.split(":")[2].strip("/"))
        for host, code in (("evil.example", 403), (f"evil.example:{port}", 403), (f"localhost:{port}", 200)):
            assert status_of(urllib.request.Request(url, headers={"Host": host})) == code
        assert status_of(urllib.request.Request(f"{url}../../etc/passwd")) == 404
        assert status_of(urllib.request.Request(url, data=b"x")) == 501
        listening = subprocess.run(["cat", f"/proc/{process.pid}/net/tcp"], capture_output=True, text=True, check=False)
        if listening.returncode == 0:  # Linux: the address in hexadecimal digits, and state 0A for listening
            ours = [line.split() for line in listening.stdout.splitlines() if f":{port:04X} 00000000:0000 0A" in line]
            assert [words[1] for words in ours] == [f"0100007F:{port:04X}"]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_ends_with_one_line(tmp_path: Path) -> None:
    with watching(tmp_path / "none") as (url, process):
        assert get(f"{url}status")["done"] is False
        process.send_signal(signal.SIGINT)
        assert process.stdout
        rest = process.stdout.read().splitlines()
        assert process.wait(30) == 0
    assert rest == [f"{tmp_path / 'none'} does not exist yet; the page waits for it", "watching ended"]


def test_a_port_in_use_and_a_file_are_refused(tmp_path: Path, cli: Cli) -> None:
    with watching(tmp_path) as (url, _):
        port = url.split(":")[2].strip("/")
        code, _, err = cli("watch", str(tmp_path), "--port", port)
        assert code == 2
        assert f"port {port} cannot be used" in err
    (tmp_path / "file").write_text("")
    code, _, err = cli("watch", str(tmp_path / "file"))
    assert (code, "is a file" in err) == (2, True)


def test_a_deployment_shows_its_rejected_clients(tmp_path: Path) -> None:
    record = make_record(1, keep=(0.5, 1.0))
    rejected = [{"client": 30, "reason": "it was not <online>"}]
    wire = {"down": [400_000, 0], "up": [390_000, 0], "full": 1_000_000, "attempts": 1}
    record = type(record)(**{**vars(record), "cohort": [7, 30], "rejected": rejected, "wire": wire})
    live = LivePage(write_run(tmp_path / "run", [record], finished=False, rounds=5))
    panel = live.status()["panel"]
    assert "Round 1 of 5" in panel
    assert "1 updates rejected (last: round 1: client 30, it was not &lt;online&gt;)" in panel
    assert "Bytes on the wire" in live.main()[1]


def test_a_half_written_record_is_left_for_the_next_look(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [make_record(1)], finished=False, rounds=5)
    live = LivePage(folder)
    assert "Round 1 of 5" in live.status()["panel"]
    line = History([make_record(2)]).to_lines()
    with open(folder / "history.jsonl", "a") as file:
        file.write(line[:100])
        file.flush()
        assert "Round 1 of 5" in live.status()["panel"]
        file.write(line[100:])
    assert "Round 2 of 5" in live.status()["panel"]


def test_a_folder_that_is_damaged_is_reported_and_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [make_record(1)], finished=False, rounds=5)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text("rounds = ")
    live = LivePage(folder)
    assert "config.toml cannot be read" in live.status()["panel"]
    (folder / "config.toml").write_text(config)
    assert "Round 1 of 5" in live.status()["panel"]
