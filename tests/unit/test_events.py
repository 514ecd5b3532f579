"""The event log: one object a line, whatever happened to the file before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.telemetry.events import EventLog, describe_event, read_events


def test_event_is_a_line_with_what_is_known(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events.jsonl")
    log.write("ps-lost", task="ps-1", host="h", message="it's gone")
    log.write("recovered", seconds=2.34567, steps_lost=0)
    lines = [json.loads(line) for line in (tmp_path / "new" / "events.jsonl").read_text().splitlines()]
    assert [{key: line[key] for key in line if key != "time"} for line in lines] == [
        {"event": "ps-lost", "task": "ps-1", "host": "h", "message": "it's gone"},
        {"event": "recovered", "seconds": 2.346, "steps_lost": 0},
    ]
    assert lines[0]["time"] <= lines[1]["time"]


def test_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("started")
    with path.open("a") as file:
        file.write('{"time": 1, "event": "form')
    log.write("formed")
    log.write("training")
    assert [event["event"] for event in read_events(path)] == ["started", "formed", "training"]
    assert len(path.read_text().splitlines()) == 4


def test_last_events_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for number in range(2000):
        log.write("ps-lost", message=f"step {number}, {'x' * 100}")
        log.write("checkpoint-saved")
    assert path.stat().st_size > 200_000
    assert [event["message"][:9] for event in read_events(path, 2)] == ["step 1998", "step 1999"]


def test_nothing_to_read_is_no_event(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == []
    (tmp_path / "events.jsonl").write_bytes(b"[1]\n\xff\xfe\n{}\n7\n")
    assert read_events(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize("odd", ['"time": "x"', '"time": 1e300', '"time": 1, "seconds": "x"', '"time": NaN'])
def test_an_event_that_can_not_be_said_is_none(tmp_path: Path, odd: str) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"event": "odd", {odd}}}\n{{"event": "started", "time": 1}}\n')
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["started"]


def test_an_event_of_several_lines_is_told_in_one() -> None:
    line = describe_event({"time": 1, "event": "failed", "message": "ValueError: x\n  in net.py, line 3"})
    assert line.endswith("  failed  ValueError: x   in net.py, line 3")


def test_event_that_cannot_be_written_is_told_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    EventLog(tmp_path / "file" / "events.jsonl").write("started")
    assert "cannot write" in caplog.text
    assert '"started"' in caplog.text


def test_event_is_told_in_one_line() -> None:
    event = {"time": 0, "event": "recovered", "task": "ps-1", "host": "h", "seconds": 2.346, "steps_lost": 12}
    assert describe_event(event).endswith("recovered  ps-1 on h  2.346 s  12 steps lost")
    assert describe_event({"event": "waiting", "host": "h", "message": "no disk"}).endswith("waiting  h  no disk")
