"""A sweep: points that the cluster trains one after the other, each as a run of its own.

The points stand in the selection (selection.py), what became of them in <shared>/sweeps/<name>.json. The
coordinator writes that at each point's end, and every task reads there which point is the present one.
The queue (queue.py) is a sweep whose points several people add.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.formats import RUN_NAME
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record, readable, write_record

# The ends after which nothing was left to evaluate, and so nothing ever will be: their records need no other look.
SETTLED: set[tuple[Path, str, Any]] = set()
PRUNED = "pruned"
"""A search has stopped a point early: that is an end, as a finish is."""


@dataclass(frozen=True)
class Point:
    """A run of a sweep or of the queue."""

    run: str
    program_args: Mapping[str, Any]
    program: str | None = None
    """None for the one that the run remembers, or else that of the settings."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Run settings that it is trained with, whatever the inventory has by then."""

    @property
    def selection(self) -> dict[str, Any]:
        """What is selected with it, as if it were chosen by itself."""
        program = {} if self.program is None else {"program": self.program}
        return {"run": self.run, **program, "program_args": self.program_args}


@dataclass(frozen=True)
class Sweep:
    """The points in their order, and how often they have been asked for: a new attempt tries again what failed."""

    name: str
    points: Sequence[Point]
    attempt: int
    shared_dir: Path

    @classmethod
    def from_selection(cls, selection: Mapping[str, Any], shared_dir: str | Path) -> Sweep:
        """Return the sweep of a selection that has one; raises ConfigError."""
        record = selection["sweep"]
        try:
            found = cls(str(record["name"]), list_points(selection), int(record["attempt"]), Path(shared_dir))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"sweep: expected a name, an attempt and a list of points, not {record!r}") from error
        if not found.points or not all(RUN_NAME.fullmatch(point.run) for point in found.points):
            raise ConfigError(f"sweep: {found.name!r} has no points, or can't name their runs")
        return found

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"sweep {self.name}"

    @property
    def record(self) -> Path:
        return self.shared_dir / "sweeps" / f"{self.name}.json"

    @property
    def size(self) -> int:
        """How many points it has, with those that are still to be chosen."""
        return len(self.points)

    @property
    def last(self) -> Point:
        """The point that stays selected while there is none to train."""
        return self.points[-1]

    def ends(self) -> dict[str, dict[str, Any]]:
        """Return by run what became of the points that have ended; a failure of an earlier attempt is none.

        Raises ConfigError where the record is damaged.
        """
        return {run: end for run, end in self._read().get("ends", {}).items() if self._counts(run, end)}

    def present(self) -> Point | None:
        """Return the point to train now, or None when all have ended."""
        ends = self.ends()
        return next((point for point in self.points if point.run not in ends), None)

    def is_over(self) -> bool:
        """Whether nothing is left to train, nor to be chosen."""
        return self.present() is None

    def choose(self) -> Point | None:
        """Choose another point once all have ended: a search does. Only the coordinator may."""
        return None

    def check_settings(self, config: Config) -> None:
        """Raise ConfigError where this environment or these settings can't train it."""

    def awaits(self, run: str) -> bool:
        """Whether the point's end is written only once its last checkpoint is evaluated, which it is not yet."""
        return False

    def unevaluated(self) -> Point | None:
        """Return the first point of which something may be left to evaluate, or None when the sweep is over."""
        return self._first_unevaluated(self.points, self.ends())

    def _first_unevaluated(self, points: Sequence[Point], ends: Mapping[str, Mapping[str, Any]]) -> Point | None:
        for point in points:
            end = ends.get(point.run)
            if end is None:
                return point
            key = (self.record, point.run, end.get("time"))
            if key not in SETTLED:
                if self.owes(point):
                    return point
                SETTLED.add(key)
        return None

    def to_prove(self) -> Sequence[Point]:
        """Return the points that a release is proven with."""
        return self.points

    def begin(self, run: str) -> None:
        """Write down that a point is trained now; a sweep's order does not change."""

    def why_to_end(self, run: str) -> str | None:
        """Say why a point must end before its last step; None where it goes on."""
        return None

    def end_point(self, run: str, state: RunState, message: str = "") -> None:
        """Write down what became of a point: only its coordinator may, or a member that failed."""
        end = {"state": state, "message": message, "attempt": self.attempt, "time": time.time()}
        self._write({**self._read().get("ends", {}), run: end}, self.points)

    def _write(self, ends: Mapping[str, Any], points: Sequence[Point]) -> None:
        """Replace the record in one step."""
        written = [{"run": point.run, "program_args": dict(point.program_args)} for point in points]
        about = {"name": self.name, "attempt": self.attempt, **self._more()}
        write_record(self.record, {**about, "points": written, "ends": dict(ends)})

    def _more(self) -> dict[str, Any]:
        """Return what the record has besides."""
        return {}

    def _read(self) -> dict[str, Any]:
        try:
            return read_record(self.record) or {}
        except ValueError as error:
            raise ConfigError(f"{error}; remove the file: the runs that are finished are found again") from error

    def _counts(self, run: str, end: Mapping[str, Any]) -> bool:
        return end.get("state") in (RunState.FINISHED, PRUNED) or int(end.get("attempt", 0)) >= self.attempt

    def owes(self, point: Point) -> bool:
        """Whether the newest checkpoint of a point is still to be evaluated."""
        directory = RunDirectory(self.shared_dir, point.run)
        newest = directory.catalogue.newest()
        return newest is not None and readable(directory.evaluation).get("step", -1) < newest


def list_points(selection: Mapping[str, Any]) -> list[Point]:
    """Return the points of a sweep's selection; raises KeyError and TypeError where it is none."""
    record, common = selection["sweep"], selection.get("program_args", {})
    program, settings = selection.get("program"), record.get("settings", {})
    numbered = enumerate(record["points"], start=1)
    return [Point(f"{record['name']}-{number}", {**common, **given}, program, settings) for number, given in numbered]
