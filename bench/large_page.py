"""A run's records as a long night leaves them: 100,000 points of curves, 1,000 events, 40 members."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from trainer.run.directory import RunDirectory
from trainer.telemetry.history import short

BEGAN = 1_700_000_000.0
ROWS = 20_000  # of loss, two metrics, steps and examples per second each
EVERY = 5.0
EVENTS = 1000
WORKERS, SERVERS = 30, 10


def records() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the history and the events of a run, with a fault for each two events."""
    draw = random.Random(16)
    seconds = ROWS * EVERY
    members = [f"worker-{n}" for n in range(WORKERS)] + [f"ps-{n}" for n in range(SERVERS)]
    history: list[dict[str, Any]] = [
        {"t": BEGAN, "members": dict.fromkeys(members, "training")},
        {"t": BEGAN, "batch": 64},
    ]
    events_made: list[dict[str, Any]] = [
        {"time": BEGAN, "event": "started"},
        {"time": BEGAN + 1, "event": "training", "seconds": 1},
    ]
    for number in range(1, ROWS + 1):
        at, productive = BEGAN + number * EVERY, 0.9 * number * EVERY
        loss = 0.05 + 2 * math.exp(-number / 4000) + 0.02 * draw.random()
        values = {"loss": short(loss), "accuracy": short(1 - loss / 2.2), "top_5": short(1 - loss / 5)}
        ledger = {"productive": round(productive, 1), "down": round(0.1 * number * EVERY, 1)}
        history.append(
            {
                "t": at,
                "step": number * 600,
                "speed": short(110 + 20 * draw.random()),
                "values": values,
                "ledger": ledger,
            }
        )
    faults = (EVENTS - 2) // 2
    for number in range(faults):
        at, task = BEGAN + (number + 1) * seconds / (faults + 1), draw.choice(members)
        event = "ps-lost" if task.startswith("ps") else "member-lost"
        events_made.append(
            {"time": at, "event": event, "task": task, "host": "10.0.3.11:2222", "message": "its process has ended"}
        )
        events_made.append({"time": at + 9, "event": "member-back", "task": task, "host": "10.0.3.11:2222"})
        history.append({"t": at, "members": {task: "closed"}})
        history.append({"t": at + 9, "members": {task: "training"}})
    history.append({"t": BEGAN + seconds, "gave": {f"worker-{n}": ROWS * 600 // WORKERS for n in range(WORKERS)}})
    return history, events_made


def write_large_run(shared_dir: Path) -> RunDirectory:
    """Write the records of a run that trained for 28 hours, with a fault every four minutes."""
    directory = RunDirectory(shared_dir, "long-night")
    directory.path.mkdir(parents=True)
    seconds = ROWS * EVERY
    history, events_made = records()
    lines(directory.history, sorted(history, key=lambda line: line["t"]))
    lines(directory.event_log, sorted(events_made, key=lambda line: line["time"]))
    end = {"productive": 0.9 * seconds, "down": 0.1 * seconds, "goodput": 0.9, "elapsed": seconds}
    status = {
        "run": directory.run,
        "state": "finished",
        "step": ROWS * 600,
        "steps": ROWS * 600,
        "ledger": end,
        "updated": BEGAN + seconds,
    }
    directory.status.write_text(json.dumps(status | {"program": "net:Net", "loss": 0.05}), encoding="utf-8")
    directory.settings.write_text(
        json.dumps({"created": BEGAN, "program": "net:Net", "settings": {}}), encoding="utf-8"
    )
    return directory


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
