"""The log of events: lines of JSON in files that are rotated, and that only their owner can read."""

import datetime
import json
from contextlib import closing
from pathlib import Path

import pytest

from fedcover.deploy import event_log
from fedcover.deploy.event_log import EventLog
from fedcover.errors import InputError


def test_every_line_is_an_object_with_time_and_event(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl")) as log:
        log.write("refused", peer="10.0.0.7", reason="two\nlines, \x1b[31m and 100 %s", path=Path("x"))
        log.write("started")
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    moment = datetime.datetime.fromisoformat(first.pop("time"))
    assert abs(moment - datetime.datetime.now(datetime.UTC)) < datetime.timedelta(minutes=1)
    assert first == {
        "event": "refused", "peer": "10.0.0.7", "reason": "two\nlines, \x1b[31m and 100 %s", "path": "x",
    }  # fmt: skip
    assert second["event"] == "started"


def test_files_are_rotated_and_five_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_BYTES", 1000)
    with closing(EventLog(tmp_path / "events.jsonl")) as log:
        for number in range(200):
            log.write("reply", number=number)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["events.jsonl", *(f"events.jsonl.{number}" for number in range(1, 6))]
    assert all(path.stat().st_size <= 1000 for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    numbers = [json.loads(line)["number"] for path in reversed(files[1:]) for line in path.read_text().splitlines()]
    numbers += [json.loads(line)["number"] for line in files[0].read_text().splitlines()]
    assert numbers == list(range(numbers[0], 200))  # the newest, without a gap


def test_a_full_disk_ends_no_service(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with closing(EventLog(tmp_path / "events.jsonl")) as log:
        log.write("started")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(InputError):
        EventLog(tmp_path / "events.jsonl")
