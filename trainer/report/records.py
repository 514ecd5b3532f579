"""The records that a run's page is made from, as they are found in its directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.report.values import time_of
from trainer.run.directory import RunDirectory
from trainer.run.records import names_in, read_record
from trainer.telemetry.history import read_lines


@dataclasses.dataclass
class RunRecords:
    """What was found in a run's directory."""

    run: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    status: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
    attempts: dict[str, Any] = dataclasses.field(default_factory=dict)
    export_record: dict[str, Any] = dataclasses.field(default_factory=dict)
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the newest checkpoint."""
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tasks: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    damage: list[str] = dataclasses.field(default_factory=list)
    """What can't be read, or is missing though it should be."""


def read_records(directory: RunDirectory) -> RunRecords:
    """Read a run's records; of what can't be read it is noted why."""
    records = RunRecords(directory.run)

    def guarded(read: Callable[[], Any], none: Any) -> Any:
        try:
            return read() or none
        except (OSError, ValueError, TypeError) as error:
            text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            records.damage.append(text)
            return none

    for name in ("settings", "status", "state", "evaluation", "attempts", "export_record"):
        setattr(records, name, guarded(partial(read_record, getattr(directory, name)), {}))
    newest = guarded(directory.catalogue.newest, None)
    if newest is not None:
        records.manifest = guarded(lambda: read_record(directory.catalogue.manifest(newest)), {})
    records.events = timed(guarded(partial(read_all_lines, directory.event_log), []), "time")
    records.history = timed(guarded(partial(read_all_lines, directory.history), []))
    records.evaluations = timed(guarded(partial(read_all_lines, directory.evaluations), []))
    for name in sorted(guarded(lambda: names_in(directory.tasks), [])):
        if name.endswith(".jsonl"):
            lines = guarded(partial(read_all_lines, directory.tasks / name), [])
            records.tasks[name.removesuffix(".jsonl")] = timed(lines)
    if not records.status and not any(str(directory.status) in text for text in records.damage):
        records.damage.append("status.json is missing: how far the run is, and its result, are not known")
    is_reported = any(str(directory.history) in text for text in records.damage)
    if not records.history and records.status.get("step") and not is_reported:
        records.damage.append("history.jsonl is missing: the curves and lanes are not known")
    return records


def read_all_lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


def timed(lines: Iterable[dict[str, Any]], key: str = "t") -> list[dict[str, Any]]:
    """Return the lines that have a time, in its order; it is `t` in each."""
    found = []
    for line in lines:
        at = time_of(line.get(key))
        if at is not None:
            found.append({**line, "t": at})
    return sorted(found, key=lambda line: line["t"])
