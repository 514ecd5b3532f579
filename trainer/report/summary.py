"""What a run's page tells, from the run's records: `read_summary` reads the files, the rest are pure functions.

A record that is damaged or missing costs what it would have shown, and the page says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from trainer.core.states import RunState
from trainer.report.advice import advise
from trainer.report.curves import MAX_POINTS, steps_by_time, summarize_evaluations, summarize_series
from trainer.report.lanes import order_of, summarize_lanes, summarize_time
from trainer.report.marks import step_in, summarize_marks
from trainer.report.records import RunRecords, read_records
from trainer.report.values import finite_or_none, int_or_none, json_number, mapping, read_ledger, text, time_of
from trainer.run.directory import RunDirectory
from trainer.telemetry.history import number_of
from trainer.telemetry.lookups import describe_asked

MAX_SAVES = MAX_MARKS = 2000
TABLE_NUMBERS = ("rows", "new_per_minute", "evicted_per_minute", "refused", "bytes")


def read_summary(directory: RunDirectory) -> dict[str, Any]:
    """Return what a run's page tells."""
    return summarize(read_records(directory))


def summarize_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page tells of a run's status."""
    return {
        "state": text(status.get("state")) or str(RunState.UNKNOWN),
        "message": text(status.get("message")),
        "step": int_or_none(status.get("step")),
        "steps": int_or_none(status.get("steps")),
        "speed": finite_or_none(status.get("steps_per_second")),
        "eta": finite_or_none(status.get("eta_seconds")),
        "stale": {
            str(task): [number_of(mapping(each).get("staleness")), int_or_none(mapping(each).get("staleness_max"))]
            for task, each in mapping(status.get("workers")).items()
        },
        "without": {str(task): text(state) for task, state in mapping(status.get("without")).items()},
        "ways": {
            str(task): {str(other): text(how) for other, how in mapping(row).items()}
            for task, row in mapping(status.get("ways")).items()
        },
        "tables": {
            str(name): {key: number_of(table.get(key)) for key in TABLE_NUMBERS}
            for name, table in mapping(status.get("tables")).items()
            if isinstance(table, dict)
        },
        "lookups": dict(asked_of(mapping(status.get("lookups")))),
    }


def asked_of(lookups: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield of each table how many rows a step asks for, and what steps ask of it in words."""
    for name, asked in lookups.items():
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # it is damaged
            yield str(name), [float(asked["rows_per_step"]), describe_asked(asked)]


def summarize(records: RunRecords, most_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return what the page tells of a run, as JSON has it."""
    status = records.status
    # A page is sent to others, whom it must not tell the address of a webhook.
    known = mapping(records.settings.get("settings"))
    settings = {name: value for name, value in known.items() if not name.startswith("notify_")}
    rows = [line for line in records.history if int_or_none(line.get("step")) is not None]
    ledger = read_ledger(status.get("ledger"))
    began, until = span_of(records)
    first = int_or_none(text(records.settings.get("from")).rpartition("@")[2]) or 0
    marks, saves = summarize_marks(records.events, steps_by_time(rows, first)), summarize_saves(records.events)
    summary = {
        "run": records.run,
        "program": text(status.get("program") or records.settings.get("program")),
        "parameters": mapping(records.settings.get("program_args") or status.get("program_args")),
        "settings": settings,
        "begun_from": text(records.settings.get("from")),
        "psfleet": text(records.manifest.get("psfleet")),
        "tensorflow": text(records.manifest.get("tensorflow")),
        **summarize_status(status),
        "result": summarize_result(records),
        "began": began,
        "until": until,
        "goodput": finite_or_none(mapping(status.get("ledger")).get("goodput")),
        "elapsed": finite_or_none(mapping(status.get("ledger")).get("elapsed")),
        "ledger": ledger,
        "series": summarize_series(records, rows, most_points),
        "evaluations": summarize_evaluations(records),
        "marks": marks[-MAX_MARKS:],
        "time": summarize_time(records.history, ledger, began, until),
        "lanes": summarize_lanes(records, until),
        "gave": summarize_worker_steps(records.history, mapping(status.get("workers"))),
        "saves": saves[-MAX_SAVES:],
        "totals": count_marks(marks) | {"saves": len(saves)},
        "placed": summarize_placed(records.history),
        "tasks": summarize_tasks(records.tasks),
        "damage": records.damage,
    }
    summary["advice"] = advise(summary)
    return summary


def count_marks(marks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {
        "marks": len(marks),
        "faults": sum(mark["kind"] == "fault" for mark in marks),
        "lost": sum(mark["lost"] for mark in marks if mark["kind"] == "recovery"),
    }


def span_of(records: RunRecords) -> tuple[float | None, float | None]:
    """Return when the run began, and until when anything is known of it."""
    times = [line["t"] for lines in (records.events, records.history, records.evaluations) for line in lines[:1]]
    created = time_of(records.settings.get("created"))
    times += [created] if created else []
    ends = [line["t"] for lines in (records.events, records.history, records.evaluations) for line in lines[-1:]]
    updated = time_of(records.status.get("updated"))
    ends += [updated] if updated else []
    return (min(times) if times else None), (max(ends) if ends else None)


def summarize_result(records: RunRecords) -> dict[str, Any]:
    """Return the last numbers: of the training, and of the evaluation with its step."""
    status = records.status
    training = {"loss": status.get("loss"), **mapping(status.get("metrics"))}
    evaluation = mapping(records.evaluation.get("metrics"))
    return {
        "training": {name: json_number(value) for name, value in training.items() if json_number(value) is not None},
        "evaluation": {
            name: json_number(value) for name, value in evaluation.items() if json_number(value) is not None
        },
        "evaluated": int_or_none(records.evaluation.get("step")),
        "trouble": text(records.evaluation.get("trouble") or records.evaluation.get("failed")),
    }


def summarize_worker_steps(history: Sequence[Mapping[str, Any]], present: Collection[str]) -> dict[str, int]:
    """Return how many steps each worker gave; of those that are `present` alone, where that is known."""
    steps_by_worker: dict[str, int] = {}
    for line in history:
        for task, steps in mapping(line.get("gave")).items():
            steps_by_worker[str(task)] = steps_by_worker.get(str(task), 0) + (int_or_none(steps) or 0)
    kept = ((task, steps) for task, steps in steps_by_worker.items() if not present or task in present)
    return dict(sorted(kept, key=lambda each: order_of(each[0])))


def summarize_saves(events: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return each checkpoint that was saved: when, its step, seconds, bytes."""
    saved = [event for event in events if event.get("event") == "checkpoint-saved"]
    return [
        [
            round(event["t"], 1),
            step_in(text(event.get("message"))),
            finite_or_none(event.get("seconds")),
            int_or_none(event.get("size")),
        ]
        for event in saved
    ]


def summarize_placed(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what lies on each ps, as it was last reported."""
    placed: dict[str, Any] = next((mapping(line["placed"]) for line in reversed(history) if "placed" in line), {})
    found = {}
    for task, held in placed.items():
        held = mapping(held)
        largest = [each for each in held.get("largest") or [] if isinstance(each, list) and len(each) == 3]
        found[str(task)] = {
            "bytes": int_or_none(held.get("bytes")) or 0,
            "variables": int_or_none(held.get("variables")) or 0,
            "largest": [[text(name), text(shape), int_or_none(size) or 0] for name, shape, size in largest],
        }
    return found


def summarize_tasks(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the memory and processor of each task over time."""
    most = max(20, 20_000 // max(1, len(tasks)))
    summary = {}
    for task, lines in sorted(tasks.items(), key=lambda each: order_of(each[0])):
        every = math.ceil(len(lines) / most) if lines else 1
        kept = [*lines[:-1:every], lines[-1]] if lines else []
        summary[task] = {
            "t": [round(line["t"], 1) for line in kept],
            "memory": [int_or_none(line.get("memory")) for line in kept],
            "processor": [finite_or_none(line.get("processor")) for line in kept],
            "cores": int_or_none(lines[-1].get("cores")) if lines else None,
        }
        if any("gpu" in line for line in kept):
            summary[task] |= {
                "gpu": [finite_or_none(line.get("gpu")) for line in kept],
                "gpu_memory": [int_or_none(line.get("gpu_memory")) for line in kept],
            }
    return summary
