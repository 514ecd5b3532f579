"""The queue: runs and sweeps that several people have asked for, trained one after the other by priority.

The entries stand in <shared>/queue.json, which operators change (queue_changes.py), what became of their
runs in <shared>/sweeps/queue/ends.json, which the coordinator alone writes. Every task reads from the two which run is
the present one, as in a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.formats import RUN_NAME
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, write_record
from trainer.run.selections.search import Search
from trainer.run.selections.sweep import Point, Sweep, list_points

REMOVED = "removed"
OF_A_SWEEP = ("program", "program_args")


def queue_file(shared_dir: str | Path) -> Path:
    return Path(shared_dir) / "queue.json"


@dataclass(frozen=True)
class QueueEntry:
    """A run, or all points of a sweep; of a search those that are chosen."""

    record: Mapping[str, Any]
    """As it stands in the file."""
    points: Sequence[Point]
    search: Search | None = None
    unreadable: str = ""
    """Why its search can't go on, as where another sweep has written its record: it has failed, and the next begins."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], shared_dir: str | Path) -> QueueEntry:
        """Read an entry; raises ConfigError."""
        try:
            settings = {**record.get("settings", {})}
            of_sweep = {key: record[key] for key in ("name", "attempt", "points", "search") if key in record}
            selection = {key: record[key] for key in OF_A_SWEEP if key in record}
            selection["sweep"] = {**of_sweep, "settings": settings}
            search = Search.without_record(selection, shared_dir) if "search" in record else None
            if search is not None:
                points = search.points
            elif "points" in record:
                points = list_points(selection)
            else:
                points = [Point(record["name"], dict(record.get("program_args", {})), record.get("program"), settings)]
            entry = cls(record, points, search)._with_record()
            right = bool(points) and all(RUN_NAME.fullmatch(point.run) for point in points)
            if not right or entry.attempt < 1 or entry.priority != record.get("priority", 0) or entry.seconds < 0:
                raise ValueError("a name, an attempt, a priority or a limit is wrong")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the queue has an entry that is none: {record!r} ({error})") from error
        return entry

    def _with_record(self) -> QueueEntry:
        """Return it with the points that its search has chosen."""
        try:
            search = self.search.with_record() if self.search else None
        except ConfigError as error:
            return QueueEntry(self.record, self.points, unreadable=str(error))
        return QueueEntry(self.record, search.points, search) if search else self

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def is_sweep(self) -> bool:
        return "points" in self.record or self.search is not None

    @property
    def size(self) -> int:
        """How many points it has, with those that are still to be chosen."""
        return self.search.size if self.search else len(self.points)

    @property
    def runs(self) -> set[str]:
        """The names of its runs, also of those that its search has yet to choose."""
        chosen = {point.run for point in self.points}
        return chosen | {f"{self.name}-{number}" for number in range(1, self.size + 1)} if self.search else chosen

    @property
    def attempt(self) -> int:
        return int(self.record["attempt"])

    @property
    def priority(self) -> int:
        return int(self.record.get("priority", 0))

    @property
    def seconds(self) -> float:
        """How long the cluster may work on it; 0 for as long as it takes."""
        return float(self.record.get("seconds", 0))

    @property
    def is_removed(self) -> bool:
        return bool(self.record.get("removed"))

    def has_ended(self, ends: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether nothing of it is left to train, nor to be chosen."""
        own = [ends[point.run] for point in self.points if point.run in ends]
        is_whole = len(own) == len(self.points) and (len(own) == self.size or any(map(self._is_last, own)))
        return is_whole or self.is_removed

    def _is_last(self, end: Mapping[str, Any]) -> bool:
        """Whether a search chooses no other point after this end."""
        return end["state"] == RunState.STOPPED or bool(end.get("is_last") and is_of(end, self))


@dataclass(frozen=True)
class Queue(Sweep):
    """The entries' runs in the order of training: those that have ended, the present one, those that wait."""

    entries: Sequence[QueueEntry] = field(default_factory=tuple)

    @classmethod
    def read(cls, shared_dir: str | Path) -> Queue:
        """Read the queue; raises ConfigError where it is missing, empty or damaged."""
        path = queue_file(shared_dir)
        try:
            record = read_record(path)
            entries = [QueueEntry.from_record(each, shared_dir) for each in (record or {})["entries"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no queue ({error}): put a good one there, or select a run") from error
        if not entries:
            raise ConfigError(f"{path} has no entry: add one with fab queue-add, or select a run")
        return cls.from_entries(entries, shared_dir)

    @classmethod
    def from_entries(cls, entries: Sequence[QueueEntry], shared_dir: str | Path) -> Queue:
        unordered = cls("queue", (), 0, Path(shared_dir), entries)
        ordered = unordered.in_order()
        return cls("queue", [point for entry in ordered for point in entry.points], 0, Path(shared_dir), ordered)

    @property
    def title(self) -> str:
        return "the queue"

    @property
    def record(self) -> Path:
        return self.shared_dir / "sweeps" / "queue" / "ends.json"

    def in_order(self) -> list[QueueEntry]:
        """Return the entries as they are trained: what has begun goes on to its end, whatever priority others have."""
        ends, begun = self.ends(), self._read().get("begun", {})

        def place(entry: QueueEntry) -> tuple[int, float]:
            if entry.has_ended(ends):
                return 0, max(float(ends[point.run].get("time", 0)) for point in entry.points)
            if self.has_begun(entry, begun):
                return 1, 0.0
            return 2, -entry.priority

        return sorted(self.entries, key=place)

    def left(self, ends: Mapping[str, Any] | None = None) -> list[QueueEntry]:
        """Return the entries of which something is left to train, or to be chosen."""
        ends = self.ends() if ends is None else ends
        return [entry for entry in self.entries if not entry.has_ended(ends)]

    def present(self) -> Point | None:
        """Return the point to train now; None also where a search has to choose it."""
        ends = self.ends()
        points = [point for entry in self.left(ends)[:1] for point in entry.points]
        return next((point for point in points if point.run not in ends), None)

    @property
    def last(self) -> Point:
        left = self.left()
        return left[0].points[-1] if left else super().last

    def is_over(self) -> bool:
        return not self.left()

    def choose(self) -> Point | None:
        searches = [entry.search for entry in self.left()[:1]]
        return searches[0].choose() if searches and searches[0] else None

    def check_settings(self, config: Config) -> None:
        for entry in self.left():
            if entry.search:
                entry.search.check_settings(config)

    def awaits(self, run: str) -> bool:
        search = self._search_of(run)
        return search is not None and search.awaits(run)

    def unevaluated(self) -> Point | None:
        ends = self.ends()
        for entry in self.entries:
            point = self._first_unevaluated(entry.points, ends)
            if point is not None or not entry.has_ended(ends):
                return point or entry.points[-1]
        return None

    def has_begun(self, entry: QueueEntry, begun: Mapping[str, Any] | None = None) -> bool:
        """Whether a run of the entry was trained, or was at work when the queue took it in."""
        begun = self._read().get("begun", {}) if begun is None else begun
        return bool(entry.record.get("adopted")) or any(is_of(begun.get(point.run), entry) for point in entry.points)

    def entry_awaiting(self, run: str) -> QueueEntry | None:
        """Return the entry that has yet to begin a run."""
        ends, begun = self.ends(), self._read().get("begun", {})
        left = [entry for entry in self.left(ends) if run in entry.runs - ends.keys()]
        return next((entry for entry in left if not self.has_begun(entry, {run: begun.get(run)})), None)

    def entry_of(self, run: str) -> QueueEntry | None:
        """Return the newest entry that has the run."""
        return self._newest.get(run)

    @cached_property
    def _newest(self) -> dict[str, QueueEntry]:
        return {point.run: entry for entry in self.entries for point in entry.points}

    def ends(self) -> dict[str, dict[str, Any]]:
        removed = [entry for entry in self.entries if entry.is_removed]
        gone = {point.run: entry.record["removed"] for entry in removed for point in entry.points}
        found = {**{run: {"state": REMOVED, **how} for run, how in gone.items()}, **super().ends()}
        for entry in self.entries:
            found |= entry.search.ends() if entry.search else {}
            if entry.unreadable:
                found[entry.points[0].run] = {"state": RunState.FAILED, "message": entry.unreadable}
        return found

    def to_prove(self) -> Sequence[Point]:
        ends = self.ends()
        return [point for point in self.points if point.run not in ends] or self.points[-1:]

    def begin(self, run: str) -> None:
        """Write down that a run is trained now, so that no other goes before it."""
        record, entry = self._read(), self.entry_of(run)
        if search := self._search_of(run):
            search.begin(run)
        if entry is None or is_of(record.get("begun", {}).get(run), entry):
            return
        now = {"attempt": entry.attempt, "time": time.time(), "elapsed": self._elapsed(run)}
        write_record(self.record, {**record, "begun": {**record.get("begun", {}), run: now}})

    def end_point(self, run: str, state: RunState, message: str = "") -> None:
        """Write down what became of a run, also where it is a sweep's. What is stopped takes its sweep's rest along.

        A search writes its points' ends itself, but for one that it has not stopped.
        """
        entry, record = self.entry_of(run), self._read()
        if entry is None or entry.unreadable:
            return
        if entry.search and not (state is RunState.STOPPED and self._why_given_up(entry)):
            entry.search.end_point(run, state, message)
            return
        known = self.ends()
        rest = [point.run for point in entry.points if point.run not in known]
        ended = dict.fromkeys([run, *(rest if state is RunState.STOPPED else [])])
        now = {"state": state, "message": message, "attempt": entry.attempt, "time": time.time()}
        ends = {**record.get("ends", {}), **dict.fromkeys(ended, now)}
        kept = {"ends": ends, "begun": record.get("begun", {})}
        # What is no longer in the queue is forgotten: every task reads this each second.
        write_record(
            self.record,
            {kind: {run: each for run, each in of.items() if self.entry_of(run)} for kind, of in kept.items()},
        )
        if entry.is_sweep and not entry.search:
            for each in ended:
                Sweep(entry.name, entry.points, entry.attempt, self.shared_dir).end_point(each, state, message)

    def why_to_end(self, run: str) -> str | None:
        """Say why the run must end now: it was taken out, its entry's time is used up, or its search stops it."""
        entry = self.entry_of(run)
        if entry is None:
            return "taken out of the queue"
        return self._why_given_up(entry) or (entry.search.why_to_end(run) if entry.search else None)

    def _why_given_up(self, entry: QueueEntry) -> str | None:
        if entry.is_removed:
            return f"taken out of the queue by {entry.record['removed'].get('who', 'an unknown user')}"
        if entry.unreadable:
            return entry.unreadable
        if entry.seconds and self.used(entry) >= entry.seconds:
            return f"its limit of {entry.seconds / 60:.4g} min is used up"
        return None

    def _search_of(self, run: str) -> Search | None:
        entry = self.entry_of(run)
        return entry.search if entry else None

    def used(self, entry: QueueEntry) -> float:
        """Return for how many seconds the cluster has worked on an entry, without those in which it was stopped."""
        begun = self._read().get("begun", {})
        runs = [point.run for point in entry.points if is_of(begun.get(point.run), entry)]
        return sum(self._elapsed(run) - float(begun[run].get("elapsed", 0)) for run in runs)

    def _elapsed(self, run: str) -> float:
        """Return the seconds of a run's ledger, over all of its processes."""
        try:
            record = read_record(RunDirectory(self.shared_dir, run).status) or {}
            return float((record.get("ledger") or {}).get("elapsed", 0.0))
        except (AttributeError, TypeError, ValueError):
            return 0.0

    def _counts(self, run: str, end: Mapping[str, Any]) -> bool:
        return is_of(end, self.entry_of(run))

    def owes(self, point: Point) -> bool:
        entry = self.entry_of(point.run)
        if entry is None or entry.is_removed or entry.unreadable:
            return False
        return entry.search.owes(point) if entry.search else super().owes(point)


def is_of(record: Mapping[str, Any] | None, entry: QueueEntry | None) -> bool:
    """Whether what was written down of a run is of this entry, and not of an earlier one of that name."""
    return record is not None and entry is not None and int(record.get("attempt", 0)) >= entry.attempt
