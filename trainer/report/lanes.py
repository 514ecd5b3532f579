"""Where the time went, and the lanes of the members."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.report.records import RunRecords
from trainer.report.values import mapping, read_ledger
from trainer.telemetry.goodput import KINDS

MAX_SPANS = 4000
ROUNDED = 0.1  # as the history's times are
BUCKETS = 240  # of the time, each with the seconds of each kind


def summarize_time(
    history: Sequence[Mapping[str, Any]], ledger: Mapping[str, float], began: float | None, until: float | None
) -> dict[str, Any]:
    """Return where the time went over time: the edges of stretches, and in each the seconds of each kind.

    Between two lines the seconds are spread evenly; where the run was stopped a stretch has less than it lasts.
    """
    lines = [(line["t"], read_ledger(line["ledger"])) for line in history if isinstance(line.get("ledger"), Mapping)]
    if began is None or until is None or until <= began or not lines:
        return {"edges": [], "kinds": {}}
    if ledger and until > lines[-1][0]:
        lines.append((until, dict(ledger)))
    stretches = min(BUCKETS, max(1, len(lines) // 3))
    width = (until - began) / stretches
    kinds = {kind: [0.0] * stretches for kind in KINDS}
    before: tuple[float, dict[str, float]] = (began, {})
    for at, seconds in lines:
        start, length = before[0], max(at - before[0], 1e-9)
        for kind in KINDS:
            gained = max(0.0, seconds.get(kind, 0.0) - before[1].get(kind, 0.0))
            if not gained:
                continue
            # No stretch holds more than it lasts; what a line tells late happened before it.
            first, last = (max(0, min(stretches - 1, int((edge - began) / width))) for edge in (start, at))
            for place in range(first, last + 1):
                left, right = max(start, began + place * width), min(at, began + (place + 1) * width)
                part = 1.0 if first == last else max(0.0, right - left) / length
                kinds[kind][place] += gained * part
        before = (at, seconds)
    edges = [round(began + place * width, 1) for place in range(stretches + 1)]
    return {
        "edges": edges,
        "kinds": {kind: [round(one, 2) for one in parts] for kind, parts in kinds.items() if any(parts)},
    }


def summarize_lanes(records: RunRecords, until: float | None) -> list[dict[str, Any]]:
    """Return for each task the spans of its states: [from, to, state], in seconds since 1970."""
    if until is None:
        return []
    lanes: dict[str, list[list[Any]]] = {}
    chief = coordinator_spans(records, until)
    if chief:
        lanes["chief-0"] = chief
    alive = [(span[0], span[1]) for span in chief if span[2] == "running"]
    for line in records.history:
        for task, state in mapping(line.get("members")).items():
            spans = lanes.setdefault(str(task), [])
            if spans:
                spans[-1][1] = line["t"]
            spans.append([line["t"], until, str(state)])
    # Nothing is known of the members while no coordinator asks them.
    for task, spans in lanes.items():
        if task != "chief-0" and alive:
            lanes[task] = [part for span in spans for part in within(span, alive)]
    budget = max(20, MAX_SPANS // max(1, len(lanes)))
    drawn = {task: sorted(sorted(spans, key=lambda span: span[0] - span[1])[:budget]) for task, spans in lanes.items()}
    return [
        {
            "task": task,
            "spans": [[round(a, 1), round(b, 1), state] for a, b, state in drawn[task]],
            "missed": missed_in(spans),
        }
        for task, spans in sorted(lanes.items(), key=lambda lane: order_of(lane[0]))
    ]


def missed_in(spans: Iterable[Sequence[Any]]) -> dict[str, float]:
    """Return for how long a task was not present, by its state."""
    missed: dict[str, float] = {}
    for start, end, state in spans:
        if state not in ("training", "serving", "starting", "running", "stopped"):
            missed[state] = missed.get(state, 0.0) + end - start
    return missed


def within(span: Sequence[Any], alive: Sequence[tuple[float, ...]]) -> list[list[Any]]:
    """Return what is left of a span while its reporting coordinator ran: the next one may not have the member."""
    start, end = alive[max(0, bisect_left(alive, (span[0] + ROUNDED,)) - 1)]
    return [[max(span[0], start), min(span[1], end), span[2]]] if min(span[1], end) > max(span[0], start) else []


def coordinator_spans(records: RunRecords, until: float) -> list[list[Any]]:
    """Return when a coordinator ran, and when none did: away between two of them, unless it had stopped in order."""
    words = sorted(line["t"] for line in [*records.history, *records.events])
    spans: list[list[Any]] = []
    ended = False
    for event in records.events:
        if event.get("event") == "started":
            if spans:
                heard = bisect_left(words, event["t"] - ROUNDED)
                last = max([spans[-1][0], *words[max(0, heard - 1) : heard]])
                spans[-1][1] = last
                spans.append([last, event["t"], "stopped" if ended else "away"])
            spans.append([event["t"], until, "running"])
            ended = False
        elif event.get("event") in ("stopped", "finished", "failed") and spans:
            spans[-1][1] = event["t"]
            ended = True
    return spans


def order_of(task: str) -> tuple[int, int, str]:
    job, _, number = task.rpartition("-")
    jobs = ("chief", "ps", "worker", "evaluator", "dispatcher", "data")
    return (jobs.index(job) if job in jobs else len(jobs), int(number) if number.isdecimal() else 0, task)
