"""The curves of a run's page, thinned out, and the steps by their time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.report.records import RunRecords
from trainer.report.values import finite_or_none, int_or_none, mapping, time_of
from trainer.telemetry.history import number_of

MAX_POINTS = 100_000  # numbers of all curves of a page
SPEED = "steps per second"
EXAMPLES = "examples per second"


def summarize_series(records: RunRecords, rows: Sequence[Mapping[str, Any]], most_points: int) -> dict[str, Any]:
    """Return the training's curves: times and steps, and for each name its values."""
    names = names_in(rows)
    batch = next((size for line in reversed(records.history) if (size := number_of(line.get("batch")))), None)
    kept = thin_rows(rows, max(100, most_points // (len(names) + 2)))  # and the two speeds
    values = values_in(kept, names)
    if kept:
        values[SPEED] = [finite_or_none(row.get("speed")) for row in kept]
    if kept and batch:
        values[EXAMPLES] = [None if speed is None else finite_or_none(speed * batch) for speed in values[SPEED]]
    numbers = ([number_of(value) for value in mapping(row.get("values")).values()] for row in rows)
    unsound = sum(any(one is not None and not math.isfinite(one) for one in row) for row in numbers)
    return {
        "t": [round(row["t"], 1) for row in kept],
        "step": [int(row["step"]) for row in kept],
        "values": values,
        "rows": len(rows),
        "unsound": unsound,
    }


def names_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the numbers, the loss first."""
    names = {str(name) for row in rows for name in mapping(row.get("values"))}
    return sorted(names, key=lambda name: (name != "loss", name))


def values_in(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the numbers of each name, row by row."""
    return {name: [finite_or_none(mapping(row.get("values")).get(name)) for row in rows] for name in names}


def thin_rows(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return so many rows at most: of each stretch the ones with the lowest and the highest loss, and the last one."""
    if len(rows) <= most:
        return list(rows)
    stretches = max(1, most // 2)
    kept: list[Mapping[str, Any]] = []
    for number in range(stretches):
        stretch = rows[number * len(rows) // stretches : (number + 1) * len(rows) // stretches]
        ordered = sorted(
            range(len(stretch)),
            key=lambda place: finite_or_none(mapping(stretch[place].get("values")).get("loss")) or 0.0,
        )
        kept += [stretch[place] for place in sorted({ordered[0], ordered[-1]})]
    kept[-1] = rows[-1]
    return kept


def summarize_evaluations(records: RunRecords) -> dict[str, Any]:
    """Return the evaluation's curves; of a run that has no list of them the last one alone."""
    rows: list[Mapping[str, Any]] = [row for row in records.evaluations if int_or_none(row.get("step")) is not None]
    if not rows and records.evaluation.get("metrics"):
        at = time_of(records.evaluation.get("updated"))
        rows = (
            [{"t": at, "step": records.evaluation.get("step"), "values": records.evaluation["metrics"]}] if at else []
        )
    rows = list(thin_rows(rows, 5000))
    return {
        "t": [round(row["t"], 1) for row in rows],
        "step": [int_or_none(row["step"]) for row in rows],
        "values": values_in(rows, names_in(rows)),
    }


def steps_by_time(rows: Sequence[Mapping[str, Any]], first: int) -> Callable[[float], int | None]:
    """Return what says at which step the training stood at a time; it began at the `first`."""
    times = [row["t"] for row in rows]

    def at(time: float) -> int | None:
        place = bisect_right(times, time) - 1
        return int(rows[place]["step"]) if place >= 0 else first if rows else None

    return at
