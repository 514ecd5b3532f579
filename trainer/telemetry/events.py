"""What befell a run: events.jsonl in its directory, one JSON object a line.

started, waiting, formed, attached, restored, training, member-lost, member-left, member-silent, member-back,
member-joined, member-given-up, member-half-connected, member-other-release, ps-lost, recovering, lease-taken,
phase-overdue, checkpoint-saved, save-failed, checkpoint-set-aside, not-finite, evaluated, stopped, failed, finished,
out-of-memory
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
TAIL_BYTES = 64 * 1024
SHOWN = 5
# These are so many that nothing else would be shown.
ROUTINE = ("checkpoint-saved", "evaluated")
# What should not happen to a run, in words: it is counted, and shown beside the curves.
MEMBER_FAULTS = {
    "member-lost": "worker lost",
    "member-silent": "member silent",
    "member-given-up": "member given up",
    "member-half-connected": "member half connected",
    "member-other-release": "member on another release",
    "ps-lost": "parameter server lost",
}
FAULTS = MEMBER_FAULTS | {
    "recovering": "cluster formed again",
    "phase-overdue": "phase took too long",
    "lease-taken": "coordinator replaced",
    "save-failed": "checkpoint not saved",
    "checkpoint-set-aside": "damaged checkpoint set aside",
    "not-finite": "numbers not finite",
    "failed": "run failed",
}


def at_once(write: Callable[[], None]) -> None:
    write()


class EventLog:
    """Appends events, and counts them by kind; `post` says on which thread, and `heard` hears of each."""

    def __init__(
        self,
        path: Path,
        post: Callable[[Callable[[], None]], object] = at_once,
        heard: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._path = path
        self._post = post
        self._heard = heard
        self.counts: Counter[str] | None = None
        """How many there are of each kind, once `count` has looked."""

    def count(self) -> None:
        """Have those counted that exist already, before what is written next."""

        def count() -> None:
            self.counts = count_events(self._path)

        self._post(count)

    def write(
        self,
        event: str,
        task: str | None = None,
        host: str | None = None,
        seconds: float | None = None,
        steps_lost: int | None = None,
        message: str = "",
        size: int | None = None,
    ) -> None:
        """Write down what happened, to which member on which host, how long it took and what it cost; `size` in bytes.

        What can't be written is lost, with a warning: no training ends for it.
        """
        rounded = None if seconds is None else round(seconds, 3)
        known = {"task": task, "host": host, "seconds": rounded, "steps_lost": steps_lost, "size": size}
        known["message"] = message or None
        record = {"time": round(time.time(), 3), "event": event}
        record |= {key: value for key, value in known.items() if value is not None}
        self._post(partial(self._append, event, json.dumps(record)))
        if self._heard is not None:
            self._heard(record)

    def _append(self, event: str, line: str) -> None:
        append(self._path, line)
        if self.counts is not None:
            self.counts[event] += 1


def append(path: Path, line: str) -> None:
    """Add a line, on a line of its own even after one that was cut off (a full disk, a power cut)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            cut_off = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write(b"\n" * cut_off + line.encode() + b"\n")
    except OSError as error:
        log.warning("cannot write %s: %s: %s", path, error.strerror, line)


def read_events(path: Path, last: int = SHOWN) -> list[dict[str, Any]]:
    """Return the last events that are no routine, oldest first; an empty list where nothing can be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    events = [event for line in lines if (event := parse(line)) is not None and event["event"] not in ROUTINE]
    return events[-last:]


def count_events(path: Path) -> Counter[str]:
    """Return how many events of each kind there are; none where nothing can be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return Counter(str(event["event"]) for line in file if (event := parse(line)) is not None)
    except OSError:
        return Counter()


def parse(line: str) -> dict[str, Any] | None:
    """Return what a line says; None where it is no event, or one of values that can't be said."""
    try:
        event: dict[str, Any] = json.loads(line)
        describe_event(event)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
    return event


def describe_event(event: Mapping[str, Any]) -> str:
    """Lay an event out in one line, in the reader's local time."""
    parts = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0))), str(event["event"])]
    if who := event.get("task") or event.get("host"):
        parts.append(f"{who} on {event['host']}" if event.get("task") and event.get("host") else str(who))
    if event.get("seconds") is not None:
        parts.append(f"{event['seconds']:.4g} s")
    if event.get("steps_lost"):
        parts.append(f"{event['steps_lost']} steps lost")
    if event.get("message"):
        parts.append(str(event["message"]).replace("\n", " "))
    return "  ".join(parts)
