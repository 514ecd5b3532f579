"""What operators do to the queue: add, move, remove. Each is one change of <shared>/queue.json, under its lock.

Needs no TensorFlow. The file is the operators' alone, so that a coordinator at work is never waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.core.failures import UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.selections.queue import OF_A_SWEEP, Queue, QueueEntry, queue_file
from trainer.run.selections.selection import of_the_run, read_selection, selection_path
from trainer.run.selections.sweep import Sweep

DONE, PLANNED, THERE, GONE = "done", "planned", "there already", "not there"
# Entries that have ended are shown, so many of the last.
MAX_ENDED = 50
# What says who asked for an entry and how long it may take, and not what is trained.
ABOUT = ("owner", "from", "reason", "added", "attempt", "adopted", "removed", "priority", "seconds")
# Run settings that an entry may have of its own: those that the coordinator and the evaluator alone read.
SETTINGS = (
    "api", "checkpoint_seconds", "checkpoint_steps", "checkpoints_best_metric", "checkpoints_best_mode",
    "checkpoints_kept", "checkpoints_kept_best", "checkpoints_kept_hours", "dynamic_tables", "epoch_steps", "export",
    "incremental_saves", "initial_weights", "lazy_optimizers", "log_seconds", "partitioner", "partitioner_max_bytes",
    "partitioner_min_bytes", "partitioner_shards", "ps_recovery", "seed", "steps", "steps_per_execution",
    "weights_ahead",
)  # fmt: skip


def read_or_none(shared_dir: str | Path) -> Queue | None:
    """Return the queue, None where nothing was added yet; raises ConfigError."""
    return Queue.read(shared_dir) if queue_file(shared_dir).exists() else None


@contextlib.contextmanager
def changing(shared_dir: str | Path, plan: bool) -> Iterator[list[dict[str, Any]]]:
    """Give the entries to change. But for a `plan` they are written at the end, and others wait meanwhile."""
    path = queue_file(shared_dir)
    with contextlib.nullcontext() if plan else path.with_name(".queue.lock").open("a", encoding="utf-8") as lock:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        queue = read_or_none(shared_dir)
        entries = [dict(entry.record) for entry in queue.entries] if queue else []
        yield entries
        if entries and not plan:
            write_record(path, {"entries": forget_old(entries, shared_dir)})


def forget_old(entries: list[dict[str, Any]], shared_dir: str | Path) -> list[dict[str, Any]]:
    """Leave out all entries that have ended but the last."""
    ended = [each["name"] for each in entries if has_ended(entries, each["name"], shared_dir)]
    old = ended[:-MAX_ENDED]
    return [each for each in entries if each["name"] not in old]


def has_ended(entries: list[dict[str, Any]], name: str, shared_dir: str | Path) -> bool:
    """Whether nothing of an entry is left to train; one that is missing has nothing."""
    found = [QueueEntry.from_record(each, shared_dir) for each in entries if each["name"] == name]
    return not Queue.from_entries(found[:1], shared_dir).left()


def add(config: Config, asked: Mapping[str, Any], plan: bool) -> dict[str, Any]:
    """Add an entry at the end of those of its priority, and have the tasks follow the queue.

    What is selected otherwise, and is not ended, becomes its first entry. One that exists already stays. Raises
    UserError where another one of that name waits, ConfigError for settings that can't be.
    """
    new = prepare(config, asked)
    with changing(config.shared_dir, plan) as entries:
        outcome = PLANNED if plan else DONE
        if not has_ended(entries, new["name"], config.shared_dir):
            if _what(_named(entries, new["name"])) != _what(new):
                raise UserError(
                    f"{new['name']} waits in the queue with other settings: take it out first (fab queue-remove "
                    f"{new['name']}), or choose another name"
                )
            outcome = THERE
        else:
            before = [each["attempt"] for each in entries if each["name"] == new["name"]]
            known = max(before, default=_attempt(config, new["name"]))
            new["attempt"] = max(known, _attempt_of_search(config, new)) + 1
            reject_shared_runs(entries, new, config)
            forget_runs(entries, new, config)
            for present in adopt(config, entries):
                if present["name"] == new["name"]:
                    new["adopted"] = True
                else:
                    entries.append(present)
            entries.append(new)
    if outcome == DONE:
        follow_queue(config)
    return {"outcome": outcome, **describe_place(config, entries, new["name"])}


def prepare(config: Config, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry that is asked for, whole; raises ConfigError."""
    given = asked.get("settings", {})
    if other := [name for name in given if name not in SETTINGS]:
        known = ", ".join(SETTINGS)
        raise ConfigError(f"{other[0]} is no setting that a run in the queue can have of its own: those are {known}")
    own = {"program": config.program, "program_args": dict(config.program_args)}
    new = {**asked, "settings": {**own, **given}, "attempt": 1, "added": time.time()}
    entry = QueueEntry.from_record(new, config.shared_dir)
    if entry.unreadable:
        raise ConfigError(entry.unreadable)
    for point in entry.points:
        chosen = config.replace(**of_the_run(point.settings))
        chosen.replace(**point.selection)
    return new


def reject_shared_runs(entries: list[dict[str, Any]], new: Mapping[str, Any], config: Config) -> None:
    """Raise UserError where another entry that waits has a run of the same name."""
    runs = QueueEntry.from_record(new, config.shared_dir).runs
    for each in entries:
        other = QueueEntry.from_record(each, config.shared_dir)
        shared = runs & other.runs
        if other.name != new["name"] and shared and not has_ended(entries, other.name, config.shared_dir):
            raise UserError(f"run {min(shared)} is part of {other.name}, which waits in the queue: choose another name")


def forget_runs(entries: list[dict[str, Any]], new: Mapping[str, Any], config: Config) -> None:
    """Leave out what has ended and has the name or a run of a new entry: its ends would be taken for the new one's."""
    runs = QueueEntry.from_record(new, config.shared_dir).runs
    others = [each for each in entries if each["name"] != new["name"]]
    entries[:] = [each for each in others if not runs & QueueEntry.from_record(each, config.shared_dir).runs]


def adopt(config: Config, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is selected outside the queue, and has begun and not ended, as an entry that goes first."""
    selection = read_selection(config)
    if "queue" in selection:
        return []
    entry: dict[str, Any] = {key: selection[key] for key in OF_A_SWEEP if key in selection}
    entry["settings"] = {"program": config.program, "program_args": dict(config.program_args)}
    if "sweep" in selection:
        chosen = selection["sweep"]
        entry |= {key: chosen[key] for key in ("name", "points", "search") if key in chosen}
        entry["settings"] = chosen.get("settings", entry["settings"])
    else:
        entry["name"] = selection.get("run", config.run)
    # A search goes on with what it has: asked for once more, it would try again what failed.
    attempt = max(_attempt(config, entry["name"]) + 1, _attempt_of_search(config, entry))
    new: dict[str, Any] = {**entry, "attempt": attempt, "added": time.time(), "adopted": True}
    found = QueueEntry.from_record(new, config.shared_dir)
    runs = [RunDirectory(config.shared_dir, point.run) for point in found.points]
    states = [RunState.read(run.read_state()["state"]) for run in runs]
    if found.search is not None:
        is_left = not found.search.is_over()
    else:
        is_left = any(state not in (RunState.FINISHED, RunState.FAILED) for state in states)
    if not is_left or not any(run.state.exists() for run in runs):
        return []
    left = _queue(config, entries).left() if entries else []
    if any(found.runs & each.runs for each in left):
        return []
    forget_runs(entries, new, config)
    return [new]


def follow_queue(config: Config) -> None:
    """Select the queue, unless it is selected."""
    if "queue" not in read_selection(config):
        write_record(selection_path(config), {"queue": {}})


def move(config: Config, name: str, to: str, plan: bool) -> dict[str, Any]:
    """Move an entry that waits: `first`, `last`, `before:NAME` or `priority:N`; raises UserError."""
    with changing(config.shared_dir, plan) as entries:
        entry = _waiting(config, entries, name)
        waiting = [each for each in entries if each is not entry and _waits(config, each)]
        kind, _, other = to.partition(":")
        if other == name:
            raise UserError(f"--before {name}: expected another run that waits")
        priorities = [each.get("priority", 0) for each in waiting] or [entry.get("priority", 0)]
        if kind == "priority":
            entry["priority"] = int(other)
        else:
            beside = _waiting(config, entries, other) if kind == "before" else None
            entry["priority"] = (
                beside.get("priority", 0) if beside else max(priorities) if kind == "first" else min(priorities)
            )
            entries.remove(entry)
            place = entries.index(beside) if beside else 0 if kind == "first" else len(entries)
            entries.insert(place, entry)
        order = [each.name for each in _queue(config, entries).entries]
    return {"outcome": PLANNED if plan else DONE, **describe_place(config, entries, name), "order": order}


def remove(config: Config, name: str, who: str, stop: bool, plan: bool) -> dict[str, Any]:
    """Take an entry out; one that is trained now only with `stop`: it is saved, and the next begins."""
    with changing(config.shared_dir, plan) as entries:
        if has_ended(entries, name, config.shared_dir):
            return {"outcome": GONE, **describe_place(config, entries, name)}
        if not stop and not _waits(config, _named(entries, name)):
            raise UserError(f"{name} has begun: with --stop it is saved and ended, and the queue goes on with the next")
        _named(entries, name)["removed"] = {"who": who, "time": time.time(), "message": f"taken out by {who}"}
    return {"outcome": PLANNED if plan else DONE, **describe_place(config, entries, name)}


def describe_place(config: Config, entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Say how the queue stands for an entry; `busy` is a run that has begun and not ended."""
    queue = _queue(config, entries)
    begun, ends = [entry for entry in queue.entries if queue.has_begun(entry)], queue.ends()
    waiting = [entry.name for entry in queue.left(ends)]
    return {
        "name": name,
        "ahead": waiting[: waiting.index(name)] if name in waiting else [],
        "busy": next((point.run for entry in begun for point in entry.points if point.run not in ends), None),
        "followed": "queue" in read_selection(config),
    }


def _queue(config: Config, entries: Iterable[Mapping[str, Any]]) -> Queue:
    found = [QueueEntry.from_record(each, config.shared_dir) for each in entries]
    return Queue.from_entries(found, config.shared_dir)


def _attempt(config: Config, name: str) -> int:
    """Return the last attempt that was written down of a name, 0 for none."""
    record = read_record(Queue("queue", (), 0, Path(config.shared_dir)).record) or {}
    known = [
        int(each.get("attempt", 0))
        for kind in ("ends", "begun")
        for run, each in record.get(kind, {}).items()
        if run == name or run.rpartition("-")[0] == name
    ]
    return max(known, default=0)


def _attempt_of_search(config: Config, record: Mapping[str, Any]) -> int:
    """Return the attempt that a search has written of itself, 0 for what is none."""
    written = Sweep(record["name"], (), 0, Path(config.shared_dir)).record
    return int((read_record(written) or {}).get("attempt", 0)) if "search" in record else 0


def _waits(config: Config, record: Mapping[str, Any]) -> bool:
    """Whether nothing of an entry has begun or ended; a search may have points of an earlier time."""
    queue = _queue(config, [record])
    [entry] = queue.entries
    ends = queue.ends()
    has_ended = entry.has_ended(ends) if entry.search else any(point.run in ends for point in entry.points)
    return not (has_ended or queue.has_begun(entry))


def _waiting(config: Config, entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((each for each in entries if each["name"] == name and _waits(config, each)), None)
    if found is None:
        names = ", ".join(each["name"] for each in entries if _waits(config, each)) or "none"
        raise UserError(f"{name} does not wait in the queue; those that wait: {names}")
    return found


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(each for each in entries if each["name"] == name)


def _what(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ABOUT}
