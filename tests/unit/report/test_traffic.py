"""Bytes on the wire by client, and the clients that were left out."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedcover.federation.history import RoundRecord
from fedcover.report import client_rows, left_out_rows, load_run
from fedcover.report.table import round_rows

MakeRun = Callable[..., Path]
Cli = Callable[..., tuple[int, str, str]]

WIRE = {"down": [400_000, 0], "up": [390_000, 0], "full": 1_000_000, "attempts": 1}


def rounds_on_devices(record: Callable[..., RoundRecord]) -> list[RoundRecord]:
    """Two rounds of clients 7 and 30, one of which was offline in the first."""
    offline = [{"client": 30, "reason": "it was not online"}]
    first, second = (replace(record(n, keep=(0.4, 1.0)), cohort=[7, 30], wire=WIRE) for n in (1, 2))
    whole = {**WIRE, "down": [400_000, 1_001_000], "up": [390_000, 1_000_500]}
    return [replace(first, rejected=offline), replace(second, wire=whole)]


def test_bytes_on_the_wire_stand_beside_the_full_models(
    save: Callable[..., Path], record: Callable[..., RoundRecord]
) -> None:
    run = load_run(save("devices", rounds_on_devices(record)))
    small, large = client_rows(run)
    assert small == {
        "client": "7", "rounds": "2", "left out": "0", "MB down": "0.80", "full down": "2.00",
        "MB up": "0.78", "full up": "2.00", "share": "39.5 %",
    }  # fmt: skip
    assert (large["client"], large["left out"], large["share"]) == ("30", "1", "100.1 %")  # of what went, both ways
    first, second = round_rows(run)
    assert (first["wire MB"], first["full models' MB"]) == ("0.79", "2.00")
    assert (second["wire MB"], second["full models' MB"]) == ("2.79", "4.00")
    assert left_out_rows(run) == [{"round": "1", "client": "30", "reason": "it was not online"}]
    local = load_run(save("local", [record(1)]))
    assert client_rows(local) == left_out_rows(local) == []
    assert "wire MB" not in round_rows(local)[0]


def test_page_and_console_show_traffic_and_the_clients_left_out(
    save: Callable[..., Path], record: Callable[..., RoundRecord], make_run: MakeRun, cli: Cli
) -> None:
    folder = save("devices", rounds_on_devices(record))
    code, out, err = cli("report", str(folder))
    assert code == 0, err
    assert "bytes on the wire" in out
    assert re.search(r"7 +2 +0 +0.80 +2.00 +0.78 +2.00 +39.5 %", out), out
    assert re.search(r"1 +30 +it was not online", out), out
    page = (folder / "report.html").read_text()
    assert "<h3>Bytes on the wire, beside those of full models</h3>" in page
    assert '<td class="words">it was not online</td>' in page
    local = make_run("local", 1)
    code, out, _ = cli("report", str(local))
    assert code == 0
    assert "wire" not in out
    assert "<h2>Clients</h2>" not in (local / "report.html").read_text()
