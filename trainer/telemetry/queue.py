"""How far the queue is: its table, from the records of the queue and of its runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.selections.queue import REMOVED, Queue, QueueEntry
from trainer.run.selections.queue_changes import read_or_none
from trainer.run.selections.selection import read_selection
from trainer.run.selections.sweep import PRUNED
from trainer.telemetry.status import lay_out, render_metrics
from trainer.telemetry.sweep import read_point

QUEUED = "queued"
HEADER = ("NAME", "OWNER", "PRIORITY", "STATE", "STEPS", "EVALUATION", "MINUTES", "ADDED", "REASON")
ENDS = (RunState.FINISHED, RunState.FAILED, RunState.STOPPED, REMOVED, PRUNED)


def read_queue(config: Config) -> dict[str, Any]:
    """Return the queue and its entries, in the order of training, for `python -m trainer queue list`."""
    queue = read_or_none(config.shared_dir)
    selection = read_selection(config)
    present = queue.present() if queue else None
    entries = [read_entry(queue, entry) for entry in queue.entries] if queue else []
    return {
        "entries": entries,
        "present": present.run if present else None,
        "over": queue is None or queue.is_over(),
        "evaluated": queue is None or queue.unevaluated() is None,
        "followed": "queue" in selection,
    }


def read_entry(queue: Queue, entry: QueueEntry) -> dict[str, Any]:
    """Return one entry; of a sweep the state is that of its present run, or of the last that ended."""
    ends = queue.ends()
    points = [read_point(queue, point, ends.get(point.run)) for point in entry.points]
    over = [point for point in points if point["run"] in ends]
    now = next((point for point in points if point["run"] not in ends), points[-1])
    is_over = entry.has_ended(ends)
    state = now["state"] if is_over or queue.has_begun(entry) or (over and not entry.search) else QUEUED
    failed = [point["run"] for point in points if point["run"] in ends and point["state"] == RunState.FAILED]
    if is_over and failed:
        state = str(RunState.FAILED)
    keys = ("priority", "owner", "from", "reason", "added", "program")
    return {
        "name": entry.name,
        "kind": "sweep" if entry.is_sweep else "run",
        **{key: entry.record.get(key) for key in keys},
        "priority": entry.priority,
        "settings": {key: value for key, value in entry.record["settings"].items() if not key.startswith("program")},
        "seconds": entry.seconds,
        "used": round(queue.used(entry), 1),
        "state": state,
        "over": is_over,
        "size": entry.size,
        "failed": failed,
        "message": next((point["message"] for point in reversed(over) if point["message"]), ""),
        "points": points,
    }


def describe_queue(summary: Mapping[str, Any]) -> str:
    """Lay the queue out as a table; below it why a run failed or was stopped."""
    entries = summary["entries"]
    if not entries:
        return "the queue is empty: nothing was added yet"
    rows: list[tuple[str, ...]] = [HEADER]
    rows += [row_of(entry) for entry in entries]
    over = [entry for entry in entries if entry["over"]]
    failed = [entry for entry in over if entry["state"] == RunState.FAILED]
    head = f"queue: {len(over)} of {len(entries)} have ended" + (f", {len(failed)} failed" if failed else "")
    if summary["over"]:
        head = f"queue: over{f', {len(failed)} failed' if failed else ''}; nothing is left to train"
    elif not summary["followed"]:
        head += "; another run is selected, and the queue waits"
    lines = [head, lay_out(rows)]
    for entry in over:
        if entry["message"]:
            message = entry["message"].replace("\n", "\n  ")
            lines.append(f"{entry['name']} {entry['state']}: {message}")
    return "\n".join(lines)


def row_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    points = entry["points"]
    ended = [point for point in points if point["state"] in ENDS]
    steps = "-" if points[0]["step"] is None else f"{points[0]['step']}/{points[0]['steps']}"
    if entry["kind"] == "sweep":
        size = entry.get("size", len(points))  # hosts with an earlier release don't say it
        steps = f"{len(ended) if entry['state'] != QUEUED else 0} of {size} points"
    elif entry["state"] == QUEUED and points[0]["step"] is None:
        steps = f"0/{entry['settings'].get('steps', '?')}"
    used = f"{entry['used'] / 60:.1f}" if entry["used"] else "-"
    limit = f"{used} of {entry['seconds'] / 60:.4g}" if entry["seconds"] else used
    added = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["added"])) if entry["added"] else "-"
    evaluation = render_metrics(points[0]["evaluation"]) if entry["kind"] == "run" else ""
    return (
        entry["name"],
        entry["owner"] or "-",
        str(entry["priority"]),
        entry["state"],
        steps,
        evaluation or "-",
        limit,
        added,
        entry["reason"] or "-",
    )
