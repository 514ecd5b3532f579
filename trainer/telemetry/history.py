"""What a run's page is drawn from: history.jsonl, written by the coordinator alone, one JSON object a line.

    {"t", "step", "speed", "values", "ledger"}  whenever the numbers are shown
    {"t", "ledger"}                             whenever a phase begins, at most once a second
    {"t", "gave": {task: steps}}                what each worker gave since the last such line
    {"t", "members": {task: state}}             the members whose state has changed
    {"t", "placed": {task: {...}}}              what lies on each ps
    {"t", "batch"}                              the examples of a step, where that is known

A line's time is in seconds since 1970. The file is thinned out when it has grown too large: of what is old less is
kept, and of two losses in turn the higher and the lower, so that a peak stays one. Ledgers and steps add up as before.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from trainer.run.records import in_words, to_json, write_text
from trainer.telemetry.events import append, at_once
from trainer.telemetry.goodput import KINDS

log = logging.getLogger(__name__)
MAX_BYTES = 6 * 2**20
MAX_CHANGES = 4000  # of members' states and of placements, the last ones
LEDGER_SECONDS = 1.0
WORKER_STEPS_SECONDS = 30.0
Placed = tuple[int, Mapping[str, Any]]  # a line, and its place in the file


class History:
    """Appends to a run's history; `post` says on which thread. Its methods may be called from any thread."""

    def __init__(self, path: Path, post: Callable[[Callable[[], None]], object] = at_once) -> None:
        self._path = path
        self._post = post
        self._lock = threading.Lock()
        self._states: dict[str, str] = {}
        self._worker_steps: dict[str, int] = {}
        self._worker_steps_at = time.monotonic()
        self._ledger_at = 0.0

    def numbers(self, step: int, speed: float, values: Mapping[str, float], ledger: Mapping[str, Any] | None) -> None:
        """Write the numbers as they are shown: the step, the speed, and the loss and metrics since the last time."""
        self._write(
            step=step,
            speed=short(speed),
            values={name: short(one) for name, one in values.items()},
            **ledger_fields(ledger),
        )
        if time.monotonic() - self._worker_steps_at >= WORKER_STEPS_SECONDS:
            self.write_worker_steps()

    def ledger(self, ledger: Mapping[str, Any], *, at_once: bool = False) -> None:
        """Write where the time has gone by now; not each time where phases are short."""
        now = time.monotonic()
        if at_once or now - self._ledger_at >= LEDGER_SECONDS:
            self._ledger_at = now
            self._write(**ledger_fields(ledger))

    def add_steps(self, task: str, steps: int) -> None:
        """A worker's call of so many steps has ended."""
        with self._lock:
            self._worker_steps[task] = self._worker_steps.get(task, 0) + steps

    def write_worker_steps(self) -> None:
        with self._lock:
            given, self._worker_steps, self._worker_steps_at = self._worker_steps, {}, time.monotonic()
        if given:
            self._write(gave=given)

    def members(self, states: Mapping[str, str]) -> None:
        """Write which members' states have changed since the last time."""
        if changed := {task: state for task, state in states.items() if self._states.get(task) != state}:
            self._states |= changed
            self._write(members=changed)

    def placed(self, held: Mapping[str, Any]) -> None:
        """Write what each ps holds."""
        self._write(placed=held)

    def batch(self, examples: int) -> None:
        """Write how many examples a step takes."""
        self._write(batch=examples)

    def _write(self, **record: Any) -> None:
        line = json.dumps(in_words({"t": round(time.time(), 1), **record}), separators=(",", ":"))
        self._post(partial(self._append, line))

    def _append(self, line: str) -> None:
        append(self._path, line)
        thin_file(self._path, MAX_BYTES)


def ledger_fields(ledger: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a ledger as a line has it: the kinds that there are."""
    found = {kind: round(float(seconds), 1) for kind in KINDS if (seconds := (ledger or {}).get(kind))}
    return {"ledger": found} if found else {}


def short(number: float) -> float:
    """Return a number in as many digits as a curve shows."""
    return float(f"{number:.5g}")


def thin_file(path: Path, most: int) -> None:
    """Thin a file of lines out when it is larger than that; what can't be done is left."""
    try:
        if path.stat().st_size <= most:
            return
        lines = list(read_lines(path))
        before, kept = len(lines), thin(lines)
        write_text(path, "".join(to_json(line) + "\n" for line in kept))
        log.info("thinned out %s: %d lines of %d are kept", path.name, len(kept), before)
    except OSError as error:
        log.warning("cannot thin out %s: %s", path, error.strerror)


def thin(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep about every second line; of the steps that workers gave the sums, of old changes what they came to."""
    kinds: dict[str, list[Placed]] = {"numbers": [], "gave": [], "changes": [], "others": []}
    for place, line in enumerate(lines):
        kind = "numbers" if "step" in line else "gave" if "gave" in line else "others"
        kinds["changes" if line.keys() & {"members", "placed", "batch"} else kind].append((place, line))
    older, kept = kinds["changes"][:-MAX_CHANGES], kinds["changes"][-MAX_CHANGES:]
    if older:
        states = {task: state for _, line in older for task, state in (line.get("members") or {}).items()}
        last = {key: value for _, line in older for key, value in line.items()}
        kept.insert(0, (older[-1][0], {**last, "members": states}))
    for kind in ("numbers", "others"):
        kept += thin_pairs(kinds[kind])
    for one, other in pairs(kinds["gave"]):
        place, last = other or one
        parts = [each[1]["gave"] for each in (one, other) if each]
        both = {task: sum(part.get(task, 0) for part in parts) for part in parts for task in part}
        kept.append((place, {"t": last["t"], "gave": both}))
    return [line for _, line in sorted(kept, key=lambda each: each[0])]


def thin_pairs(lines: list[Placed]) -> Iterable[Placed]:
    """Yield one of each two lines; both where they last for longer than usual, so that no old time is lost."""
    starts = [number_of(line.get("t")) or 0.0 for _, line in [*lines[::2], *lines[-1:]]]
    lasts = [after - before for before, after in pairwise(starts)]
    usual = max(0.0, statistics.median_low(lasts)) if lasts else 0.0
    for number, ((one, other), seconds) in enumerate(zip(pairs(lines), lasts, strict=True)):
        if other is None or seconds > 1.5 * usual:
            yield from filter(None, (one, other))
        else:
            yield one if prefer(one[1], other[1], highest=number % 2 == 0) else other


def pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Return the items two by two; the last one alone has None beside it."""
    return zip_longest(items[::2], items[1::2])


def prefer(one: Mapping[str, Any], other: Mapping[str, Any], *, highest: bool) -> bool:
    """Return whether the first of two lines tells more: a loss that is no number, else the highest or lowest one."""
    first, second = (number_of((line.get("values") or {}).get("loss")) for line in (one, other))
    if first is None or second is None:
        return second is None
    if not (math.isfinite(first) and math.isfinite(second)):
        return not math.isfinite(first)
    return first >= second if highest else first < second


def number_of(value: Any) -> float | None:
    """Return a record's number, which may be a text there; None of what is none."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield what each line says; of a line that is damaged nothing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except FileNotFoundError:
        return
