"""What a run's page tells, from the run's records: pure functions, and `read_story`, which reads the files.

A record that is damaged or missing costs what it would have told, and the page says so.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import names_in, read_record
from trainer.telemetry.goodput import FORMER, KINDS
from trainer.telemetry.history import number_of, read_lines

MOST_POINTS = 100_000  # numbers of all curves of a page
MOST_MARKS = 2000
MOST_SPANS = 4000
MOST_SAVES = 2000
BUCKETS = 240  # of the time, each with the seconds of each kind
SPEED = "steps per second"
EXAMPLES = "examples per second"
# What befell a run, how it is said, and whether it is a fault or its end.
FAULTS = {
    "member-lost": "worker lost",
    "ps-lost": "parameter server lost",
    "member-silent": "member silent",
    "member-given-up": "member given up",
    "member-half-connected": "member half connected",
    "member-other-release": "member on another release",
    "lease-taken": "coordinator replaced",
    "phase-overdue": "phase took too long",
    "save-failed": "checkpoint not saved",
    "checkpoint-set-aside": "damaged checkpoint set aside",
    "recovering": "cluster formed anew",
    "failed": "run failed",
}
RECOVERIES = {
    "member-back": "member back",
    "attached": "went on with the variables on the servers",
    "restored": "went back to a checkpoint",
    "training": "trains again",
}
OTHERS = {"member-left": "member left in order", "stopped": "stopped on request", "finished": "finished"}
ENDS_A_FAULT = ("training", "member-back")
FOLLOWS = ("recovering", "lease-taken")  # from the loss of a member; of themselves they are faults
FOLLOWS_SECONDS = 60.0
MEMBER_FAULTS = (
    "member-lost",
    "ps-lost",
    "member-silent",
    "member-given-up",
    "member-half-connected",
    "member-other-release",
)


@dataclasses.dataclass
class Records:
    """What was found in a run's directory."""

    run: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    status: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
    attempts: dict[str, Any] = dataclasses.field(default_factory=dict)
    export: dict[str, Any] = dataclasses.field(default_factory=dict)
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of the newest checkpoint."""
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tasks: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    damage: list[str] = dataclasses.field(default_factory=list)
    """What can't be read, or is not there though it should be."""


def read_story(directory: RunDirectory) -> dict[str, Any]:
    """Return what a run's page tells."""
    return tell(read_records(directory))


def read_records(directory: RunDirectory) -> Records:
    """Read a run's records; of what can't be read it is noted why."""
    records = Records(directory.run)

    def guarded(read: Callable[[], Any], none: Any) -> Any:
        try:
            return read() or none
        except (OSError, ValueError, TypeError) as error:
            text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            records.damage.append(text)
            return none

    records.settings = guarded(lambda: read_record(directory.settings), {})
    records.status = guarded(lambda: read_record(directory.status), {})
    records.state = guarded(lambda: read_record(directory.state), {})
    records.evaluation = guarded(lambda: read_record(directory.evaluation), {})
    records.attempts = guarded(lambda: read_record(directory.attempts), {})
    records.export = guarded(lambda: read_record(directory.export_record), {})
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
    if not records.status:
        records.damage.append("status.json is missing: how far the run is, and its result, are not known")
    if not records.history and records.status.get("step"):
        records.damage.append(
            "history.jsonl is missing: the curves and lanes are not known. Runs of earlier versions have none"
        )
    return records


def read_all_lines(path: Path) -> list[dict[str, Any]]:
    return list(read_lines(path))


def timed(lines: Iterable[dict[str, Any]], key: str = "t") -> list[dict[str, Any]]:
    """Return the lines that have a time, in its order; it is `t` in each."""
    found = []
    for line in lines:
        at = number_of(line.get(key))
        if at is not None and math.isfinite(at) and at > 0:
            found.append({**line, "t": at})
    return sorted(found, key=lambda line: line["t"])


def tell(records: Records, most_points: int = MOST_POINTS) -> dict[str, Any]:
    """Return what the page tells of a run, as JSON has it."""
    status = records.status
    # A page is sent to others, whom it must not tell the address of a webhook.
    known = mapping(records.settings.get("settings"))
    settings = {name: value for name, value in known.items() if not name.startswith("notify_")}
    rows = [line for line in records.history if number_of(line.get("step")) is not None]
    ledger = read_ledger(status.get("ledger"))
    series = tell_series(records, rows, most_points)
    evaluations = tell_evaluations(records)
    began, until = span_of(records)
    at_step = steps_by_time(rows)
    story = {
        "run": records.run,
        "program": text(status.get("program") or records.settings.get("program")),
        "parameters": mapping(records.settings.get("program_args") or status.get("program_args")),
        "settings": settings,
        "begun_from": text(records.settings.get("from")),
        "psfleet": text(records.manifest.get("psfleet")),
        "tensorflow": text(records.manifest.get("tensorflow")),
        "state": text(status.get("state")) or str(RunState.UNKNOWN),
        "phase": text(status.get("phase")),
        "message": text(status.get("message")),
        "step": whole(status.get("step")),
        "steps": whole(status.get("steps")),
        "speed": number_of(status.get("steps_per_second")),
        "eta": number_of(status.get("eta_seconds")),
        "updated": number_of(status.get("updated")),
        "checkpoint": text(status.get("checkpoint")),
        "exported": text(status.get("export")),
        "stale": {
            str(task): [number_of(mapping(each).get("staleness")), whole(mapping(each).get("staleness_max"))]
            for task, each in mapping(status.get("workers")).items()
        },
        "without": {str(task): text(state) for task, state in mapping(status.get("without")).items()},
        "ways": {
            str(task): {str(other): text(how) for other, how in mapping(row).items()}
            for task, row in mapping(status.get("ways")).items()
        },
        "result": tell_result(records),
        "began": began,
        "until": until,
        "goodput": number_of(mapping(status.get("ledger")).get("goodput")),
        "elapsed": number_of(mapping(status.get("ledger")).get("elapsed")),
        "ledger": ledger,
        "series": series,
        "evaluations": evaluations,
        "marks": tell_marks(records.events, at_step),
        "time": tell_time(records.history, ledger, began, until),
        "lanes": tell_lanes(records, until),
        "gave": tell_gave(records.history),
        "saves": tell_saves(records.events),
        "placed": tell_placed(records.history),
        "tasks": tell_tasks(records.tasks),
        "damage": records.damage,
    }
    story["advice"] = advise(story, records)
    return story


def mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def text(value: Any) -> str:
    return "" if value is None else str(value)


def whole(value: Any) -> int | None:
    number = number_of(value)
    return int(number) if number is not None and math.isfinite(number) else None


def finite(value: Any) -> float | None:
    """Return a number that a curve can show, in the digits that it shows; None where it is none."""
    number = number_of(value)
    return float(f"{number:.5g}") if number is not None and math.isfinite(number) else None


def read_ledger(record: Any) -> dict[str, float]:
    """Return the seconds of each kind that there are."""
    found = {}
    for kind in KINDS:
        seconds = number_of(mapping(record).get(kind, mapping(record).get(FORMER.get(kind, ""))))
        if seconds is not None and math.isfinite(seconds) and seconds > 0:
            found[kind] = seconds
    return found


def span_of(records: Records) -> tuple[float | None, float | None]:
    """Return when the run began, and until when anything is known of it."""
    times = [line["t"] for lines in (records.events, records.history, records.evaluations) for line in lines[:1]]
    created = number_of(records.settings.get("created"))
    times += [created] if created else []
    ends = [line["t"] for lines in (records.events, records.history, records.evaluations) for line in lines[-1:]]
    updated = number_of(records.status.get("updated"))
    ends += [updated] if updated else []
    return (min(times) if times else None), (max(ends) if ends else None)


def tell_result(records: Records) -> dict[str, Any]:
    """Return the last numbers: of the training, and of the evaluation with its step."""
    status = records.status
    training = {"loss": status.get("loss"), **mapping(status.get("metrics"))}
    evaluation = mapping(records.evaluation.get("metrics"))
    return {
        "training": {name: said(value) for name, value in training.items() if said(value) is not None},
        "evaluation": {name: said(value) for name, value in evaluation.items() if said(value) is not None},
        "evaluated": whole(records.evaluation.get("step")),
        "trouble": text(records.evaluation.get("trouble") or records.evaluation.get("failed")),
    }


def said(value: Any) -> float | str | None:
    """Return a number as JSON has it: NaN and infinite ones are texts."""
    number = number_of(value)
    if number is None:
        return None
    return finite(number) if math.isfinite(number) else "NaN" if math.isnan(number) else str(number)


def tell_series(records: Records, rows: Sequence[Mapping[str, Any]], most_points: int) -> dict[str, Any]:
    """Return the training's curves: times and steps, and for each name its values."""
    names = sorted(
        {str(name) for row in rows for name in mapping(row.get("values"))}, key=lambda name: (name != "loss", name)
    )
    batch = next((size for line in reversed(records.history) if (size := number_of(line.get("batch")))), None)
    kept = thin_rows(rows, max(100, most_points // (len(names) + 2)))  # and the two speeds
    values = {name: [finite(mapping(row.get("values")).get(name)) for row in kept] for name in names}
    if kept:
        values[SPEED] = [finite(row.get("speed")) for row in kept]
    if kept and batch:
        values[EXAMPLES] = [None if speed is None else finite(speed * batch) for speed in values[SPEED]]
    unsound = sum(
        1
        for row in rows
        if any(
            (one := number_of(value)) is not None and not math.isfinite(one)
            for value in mapping(row.get("values")).values()
        )
    )
    return {
        "t": [round(row["t"], 1) for row in kept],
        "step": [int(row["step"]) for row in kept],
        "values": values,
        "rows": len(rows),
        "unsound": unsound,
    }


def thin_rows(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return so many rows at most: of each stretch the ones with the lowest and the highest loss, and the last one."""
    if len(rows) <= most:
        return list(rows)
    stretches = max(1, most // 2)
    kept: list[Mapping[str, Any]] = []
    for number in range(stretches):
        stretch = rows[number * len(rows) // stretches : (number + 1) * len(rows) // stretches]
        ordered = sorted(
            range(len(stretch)), key=lambda place: finite(mapping(stretch[place].get("values")).get("loss")) or 0.0
        )
        kept += [stretch[place] for place in sorted({ordered[0], ordered[-1]})]
    kept[-1] = rows[-1]
    return kept


def tell_evaluations(records: Records) -> dict[str, Any]:
    """Return the evaluation's curves; of a run that has no list of them the last one alone."""
    rows: list[Mapping[str, Any]] = [row for row in records.evaluations if whole(row.get("step")) is not None]
    if not rows and records.evaluation.get("metrics"):
        at = number_of(records.evaluation.get("updated"))
        rows = (
            [{"t": at, "step": records.evaluation.get("step"), "values": records.evaluation["metrics"]}] if at else []
        )
    rows = list(thin_rows(rows, 5000))
    names = sorted(
        {str(name) for row in rows for name in mapping(row.get("values"))}, key=lambda name: (name != "loss", name)
    )
    return {
        "t": [round(row["t"], 1) for row in rows],
        "step": [whole(row["step"]) for row in rows],
        "values": {name: [finite(mapping(row.get("values")).get(name)) for row in rows] for name in names},
    }


def steps_by_time(rows: Sequence[Mapping[str, Any]]) -> Callable[[float], int | None]:
    """Return what says at which step the training stood at a time."""
    times = [row["t"] for row in rows]

    def at(time: float) -> int | None:
        place = bisect_right(times, time) - 1
        return int(rows[place]["step"]) if place >= 0 else 0 if rows else None

    return at


def tell_marks(events: Sequence[Mapping[str, Any]], at_step: Callable[[float], int | None]) -> list[dict[str, Any]]:
    """Return the faults and recoveries: what, where, when, at which step, how long it took, how many steps it cost.

    A fault lasts until the training goes on, or its member is back; the steps that a restore loses are its cost.
    """
    marks: list[dict[str, Any]] = []
    open_faults: list[dict[str, Any]] = []
    trained = False
    for event in events:
        name = str(event.get("event"))
        kind = "fault" if name in FAULTS else "recovery" if name in RECOVERIES else "other" if name in OTHERS else ""
        if not kind or (name in RECOVERIES and not trained and not open_faults and name != "training"):
            continue
        if name == "training" and not trained:
            trained = True
            if not open_faults:
                continue
        if name in FOLLOWS and any(follows(event, fault) for fault in open_faults):
            kind = "recovery"
        mark = {
            "t": round(event["t"], 1),
            "step": step_in(text(event.get("message")))
            if name in ("restored", "attached", "training")
            else at_step(event["t"]),
            "kind": kind,
            "event": name,
            "what": {**FAULTS, **RECOVERIES, **OTHERS}[name],
            "task": text(event.get("task")),
            "host": text(event.get("host")),
            "seconds": finite(event.get("seconds")),
            "lost": whole(event.get("steps_lost")) or 0,
            "message": text(event.get("message"))[:500],
        }
        if mark["step"] is None:
            mark["step"] = at_step(event["t"])
        marks.append(mark)
        if name in MEMBER_FAULTS:
            # Who was lost may be known only when the cluster is being formed anew, which then is no fault of its own.
            for fault in [one for one in open_faults if one["event"] == "recovering"]:
                fault["kind"], mark["lost"] = "recovery", mark["lost"] + fault["lost"]
                fault["lost"] = 0
                open_faults.remove(fault)
        if kind == "fault":
            open_faults.append(mark)
        elif mark["lost"] and open_faults:
            open_faults[0]["lost"] += mark["lost"]
        if name in ENDS_A_FAULT:
            for fault in [one for one in open_faults if name == "training" or one["task"] == mark["task"]]:
                fault["seconds"] = round(event["t"] - fault["t"], 1)
                # A worker that is lost is no end of the training, which goes on without it.
                if name == "training" and fault["event"] in ("member-lost", "save-failed"):
                    fault["seconds"] = None
                    continue
                open_faults.remove(fault)
    return marks[-MOST_MARKS:]


def follows(event: Mapping[str, Any], fault: Mapping[str, Any]) -> bool:
    """Whether an event is what a lost member led to: a coordinator that can't let go of a frozen ps begins anew."""
    if fault["event"] not in MEMBER_FAULTS or event["t"] - fault["t"] > FOLLOWS_SECONDS:
        return False
    is_frozen_server = fault["event"] == "member-silent" and str(fault["task"]).startswith("ps-")
    return event["event"] == "recovering" or is_frozen_server


def step_in(message: str) -> int | None:
    found = re.search(r"\bstep (\d{1,15})\b", message)
    return int(found[1]) if found else None


def tell_time(
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


def tell_lanes(records: Records, until: float | None) -> list[dict[str, Any]]:
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
    # Of the members nothing is known while no coordinator asks them.
    for task, spans in lanes.items():
        if task != "chief-0" and alive:
            lanes[task] = [part for span in spans for part in within(span, alive)]
    budget = max(20, MOST_SPANS // max(1, len(lanes)))
    return [
        {
            "task": task,
            "spans": [[round(a, 1), round(b, 1), state] for a, b, state in spans[-budget:]],
            "all": len(spans),
        }
        for task, spans in sorted(lanes.items(), key=lambda lane: order_of(lane[0]))
    ]


def within(span: Sequence[Any], alive: Sequence[tuple[float, float]]) -> list[list[Any]]:
    return [[max(span[0], a), min(span[1], b), span[2]] for a, b in alive if min(span[1], b) > max(span[0], a)]


def coordinator_spans(records: Records, until: float) -> list[list[Any]]:
    """Return when a coordinator ran, and when none did: away between two of them, unless it had stopped in order."""
    words = sorted(line["t"] for line in [*records.history, *records.events])
    spans: list[list[Any]] = []
    ended = False
    for event in records.events:
        if event.get("event") == "started":
            if spans:
                last = max((at for at in words if spans[-1][0] <= at < event["t"]), default=spans[-1][0])
                spans[-1][1] = last
                spans.append([last, event["t"], "stopped" if ended else "away"])
            spans.append([event["t"], until, "running"])
            ended = False
        elif event.get("event") in ("stopped", "finished", "failed") and spans:
            spans[-1][1] = event["t"]
            ended = True
    if spans and not ended and not records.status.get("updated"):
        spans[-1][1] = until
    return spans


def order_of(task: str) -> tuple[int, int, str]:
    job, _, number = task.rpartition("-")
    jobs = ("chief", "ps", "worker", "evaluator", "dispatcher", "data")
    return (jobs.index(job) if job in jobs else len(jobs), int(number) if number.isdecimal() else 0, task)


def tell_gave(history: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many steps each worker gave."""
    gave: dict[str, int] = {}
    for line in history:
        for task, steps in mapping(line.get("gave")).items():
            gave[str(task)] = gave.get(str(task), 0) + (whole(steps) or 0)
    return dict(sorted(gave.items(), key=lambda each: order_of(each[0])))


def tell_saves(events: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return each checkpoint that was saved: when, its step, seconds, bytes."""
    saved = [event for event in events if event.get("event") == "checkpoint-saved"]
    return [
        [
            round(event["t"], 1),
            step_in(text(event.get("message"))),
            finite(event.get("seconds")),
            whole(event.get("size")),
        ]
        for event in saved[-MOST_SAVES:]
    ]


def tell_placed(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what lies on each ps, as it was last told."""
    placed: dict[str, Any] = next((mapping(line["placed"]) for line in reversed(history) if "placed" in line), {})
    found = {}
    for task, held in placed.items():
        held = mapping(held)
        largest = [each for each in held.get("largest") or [] if isinstance(each, list) and len(each) == 3]
        found[str(task)] = {
            "bytes": whole(held.get("bytes")) or 0,
            "variables": whole(held.get("variables")) or 0,
            "largest": [[text(name), text(shape), whole(size) or 0] for name, shape, size in largest],
        }
    return found


def tell_tasks(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the memory and processor of each task over time."""
    most = max(20, 20_000 // max(1, len(tasks)))
    told = {}
    for task, lines in sorted(tasks.items(), key=lambda each: order_of(each[0])):
        every = math.ceil(len(lines) / most) if lines else 1
        kept = [*lines[:-1:every], lines[-1]] if lines else []
        told[task] = {
            "t": [round(line["t"], 1) for line in kept],
            "memory": [whole(line.get("memory")) for line in kept],
            "processor": [finite(line.get("processor")) for line in kept],
            "cores": whole(lines[-1].get("cores")) if lines else None,
        }
        if any("gpu" in line for line in kept):
            told[task] |= {
                "gpu": [finite(line.get("gpu")) for line in kept],
                "gpu_memory": [whole(line.get("gpu_memory")) for line in kept],
            }
    return told


def advise(story: Mapping[str, Any], records: Records) -> list[str]:
    """Say in words what to do next, most urgent first; nothing where all is well."""
    run, state, found = story["run"], story["state"], []
    message = story["message"].strip().rstrip(".")
    why = f": {message}" if message else ""
    if state == RunState.FAILED:
        found.append(
            f"The run failed{why}. It is not tried again by itself. Mend this, then `fab start-cluster --run {run}` "
            "goes on from the newest checkpoint; `fab logs --task chief-0 --lines 100` has the traceback."
        )
    elif state == RunState.WAITING:
        found.append(f"The run waits{why}. `fab status` says which task is in trouble, `fab logs --task TASK` why.")
    elif state == RunState.STOPPED:
        found.append(
            f"The run was stopped on request. `fab start-cluster --run {run}` goes on at step {story['step']}."
        )
    elif state == RunState.UNKNOWN:
        found.append("How the run is can't be read from its records. `fab status` asks the tasks themselves.")
    if story["without"]:
        told = ", ".join(f"{task} ({how})" for task, how in sorted(story["without"].items()))
        if state not in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED):
            found.append(f"It trains without {told}. `fab logs --task {min(story['without'])}` says why it is away.")
    if story["result"]["trouble"]:
        found.append(f"The evaluation says: {story['result']['trouble']}.")
    if story["series"]["unsound"]:
        found.append(
            f"{story['series']['unsound']} of the training's numbers were NaN or infinite. Lower the learning rate, "
            "clip the gradients, or go back with `--from RUN@STEP` to a checkpoint before that: `fab checkpoints`."
        )
    found += overfitted(story["evaluations"])
    failed = [mark for mark in story["marks"] if mark["event"] == "save-failed"]
    if failed and not any(save[0] > failed[-1]["t"] for save in story["saves"]):
        found.append(
            f"The last checkpoint could not be saved: {failed[-1]['message']}. Look after the shared path's room."
        )
    gave = story["gave"]
    if len(gave) > 1 and (usual := statistics.median(gave.values())):
        slow = [task for task, steps in gave.items() if steps < usual / 2]
        if slow:
            found.append(
                f"{', '.join(slow[:5])} gave less than half of the median worker's steps: away for long, or a slower "
                "machine. The lanes show which."
            )
    goodput, elapsed = story["goodput"], story["elapsed"] or 0.0
    if goodput is not None and goodput < 0.8 and elapsed > 600 and story["ledger"]:
        kind = max(
            (kind for kind in story["ledger"] if kind != "productive"), key=story["ledger"].__getitem__, default=""
        )
        if kind:
            found.append(
                f"Only {100 * goodput:.0f} % of the time was productive; most of the rest was {kind} "
                f"({100 * story['ledger'][kind] / elapsed:.0f} %). {MENDS[kind]}"
            )
    placed = {task: held["bytes"] for task, held in story["placed"].items()}
    if (
        len(placed) > 1
        and max(placed.values()) > 2 * sum(placed.values()) / len(placed)
        and max(placed.values()) >= 2**20
    ):
        found.append(
            f"{max(placed, key=placed.__getitem__)} holds more than twice the mean of the variables. "
            "The `partitioner` settings split large ones (docs/large-tables.md)."
        )
    return found


def overfitted(evaluations: Mapping[str, Any]) -> list[str]:
    """Say that the evaluation has become worse again."""
    losses = [
        (loss, step)
        for loss, step in zip(evaluations["values"].get("loss", []), evaluations["step"], strict=False)
        if loss is not None
    ]
    if len(losses) < 4:
        return []
    (least, step), (last, _) = min(losses), losses[-1]
    if not 0 < 1.1 * least < last or losses.index((least, step)) > 0.7 * len(losses):
        return []
    return [
        f"The evaluation's loss was lowest at step {step:,} and is {100 * (last / least - 1):.0f} % higher now: the "
        "model overfits. `checkpoints_kept_best` keeps the best checkpoint; `fab checkpoints` "
        "lists them."
    ]


MENDS = {
    "recomputed": "Save more often: `checkpoint_seconds` or `checkpoint_steps`.",
    "down": "The marks below say what broke.",
    "waiting": "Members were missing: the lanes say which.",
    "checkpointing": "Save less often, or to faster storage.",
    "compiling": "Each start traces the model anew: look for restarts among the marks.",
    "evaluating": "Evaluate beside the training (`evaluation: sidecar`), or less often.",
}
