"""The marks of a run's page: faults, their ends, and what else befell it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.report.values import finite_or_none, int_or_none, text
from trainer.telemetry.events import FAULTS, MEMBER_FAULTS

# Beside faults, what befell a run, and how it is said.
RECOVERIES = {
    "member-back": "member back",
    "attached": "went on with the variables on the servers",
    "restored": "went back to a checkpoint",
    "training": "trains again",
}
OTHERS = {
    "member-left": "member left in order",
    "member-joined": "worker joined",
    "out-of-memory": "out of memory",
    "stopped": "stopped on request",
    "finished": "finished",
}
ENDS_A_FAULT = ("training", "member-back")
FOLLOWS = ("recovering", "lease-taken")  # from the loss of a member; of themselves they are faults
FOLLOWS_SECONDS = 60.0


def summarize_marks(
    events: Sequence[Mapping[str, Any]], at_step: Callable[[float], int | None]
) -> list[dict[str, Any]]:
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
        mark = mark_of(event, kind, at_step)
        marks.append(mark)
        if name in MEMBER_FAULTS:
            take_over_recovering(mark, open_faults)
        if kind == "fault":
            open_faults.append(mark)
        elif mark["lost"] and open_faults:
            min(open_faults, key=stops_nothing)["lost"] += mark["lost"]
        if name in ENDS_A_FAULT:
            end_faults(event, mark, open_faults)
    return marks


def stops_nothing(fault: Mapping[str, Any]) -> int:
    """Return how unlikely it is that the training had to be restored for a fault."""
    ends_it = fault["task"].startswith("ps-") or fault["event"] in (*FOLLOWS, "phase-overdue", "failed")
    return 0 if ends_it else 1 if fault["event"] in MEMBER_FAULTS else 2


def mark_of(event: Mapping[str, Any], kind: str, at_step: Callable[[float], int | None]) -> dict[str, Any]:
    """Return the mark of an event."""
    name = str(event.get("event"))
    step = step_in(text(event.get("message"))) if name in ("restored", "attached", "training") else None
    return {
        "t": round(event["t"], 1),
        "step": at_step(event["t"]) if step is None else step,
        "kind": kind,
        "event": name,
        "what": {**FAULTS, **RECOVERIES, **OTHERS}[name],
        "task": text(event.get("task")),
        "host": text(event.get("host")),
        "seconds": finite_or_none(event.get("seconds")),
        "lost": int_or_none(event.get("steps_lost")) or 0,
        "message": text(event.get("message"))[:500],
    }


def take_over_recovering(mark: dict[str, Any], open_faults: list[dict[str, Any]]) -> None:
    """Make the forming of the cluster the recovery from a member's fault, which may be known only meanwhile."""
    for fault in [one for one in open_faults if one["event"] == "recovering"]:
        fault["kind"], mark["lost"] = "recovery", mark["lost"] + fault["lost"]
        fault["lost"] = 0
        open_faults.remove(fault)


def end_faults(event: Mapping[str, Any], mark: Mapping[str, Any], open_faults: list[dict[str, Any]]) -> None:
    """End the open faults that an event ends, with how long they lasted."""
    is_training = mark["event"] == "training"
    for fault in [one for one in open_faults if is_training or one["task"] == mark["task"]]:
        fault["seconds"] = round(event["t"] - fault["t"], 1)
        # A worker that is lost is no end of the training, which goes on without it.
        if is_training and fault["event"] in ("member-lost", "save-failed"):
            fault["seconds"] = None
            continue
        open_faults.remove(fault)


def follows(event: Mapping[str, Any], fault: Mapping[str, Any]) -> bool:
    """Whether an event is what a lost member led to: a coordinator that can't let go of a frozen ps begins again."""
    if fault["event"] not in MEMBER_FAULTS or event["t"] - fault["t"] > FOLLOWS_SECONDS:
        return False
    is_frozen_server = fault["event"] == "member-silent" and str(fault["task"]).startswith("ps-")
    return event["event"] == "recovering" or is_frozen_server


def step_in(message: str) -> int | None:
    found = re.search(r"\bstep (\d{1,15})\b", message)
    return int(found[1]) if found else None
