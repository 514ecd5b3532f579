"""A search: a sweep whose points are chosen one by one, by what became of those before.

The chosen points and their outcomes stand in <shared>/sweeps/<name>.json, which the coordinator alone writes. A point
is written there before it is begun. What chooses the next one (study.py) knows those records alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.search_space import SearchSpace
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import readable
from trainer.run.selections.study import Trial, choose, is_behind, optuna
from trainer.run.selections.sweep import PRUNED, Point, Sweep, list_points

# What was decided of a run at an evaluation: it is looked at each second, and evaluated now and then.
DECIDED: dict[tuple[Path, str, int], str | None] = {}


@dataclass(frozen=True)
class RecordedSearch(Sweep):
    """A search as its record has it: the points chosen so far, in their order."""

    trials: int = field(kw_only=True)
    """How many there are to be."""

    @property
    def size(self) -> int:
        return self.trials

    def is_over(self) -> bool:
        return self.present() is None and not self._is_left()

    def _is_left(self) -> bool:
        """Whether another point may be chosen once all have ended."""
        ends = [end for end in self.ends().values() if int(end["attempt"]) >= self.attempt]
        return len(self.points) < self.trials and not any(end.get("is_last") for end in ends)

    def owes(self, point: Point) -> bool:
        """What is stopped early was judged by its evaluations so far, and needs no other."""
        return self.ends().get(point.run, {}).get("state") != PRUNED and super().owes(point)

    def _more(self) -> dict[str, Any]:
        return {"trials": self.trials}


@dataclass(frozen=True)
class Search(RecordedSearch):
    """It chooses the next point; the first one is known without any result."""

    space: SearchSpace = field(kw_only=True)

    @classmethod
    def from_selection(cls, selection: Mapping[str, Any], shared_dir: str | Path) -> Search:
        """Return the search of a selection that has one; raises ConfigError, also for a record of other points."""
        return cls.without_record(selection, shared_dir).with_record()

    @classmethod
    def without_record(cls, selection: Mapping[str, Any], shared_dir: str | Path) -> Search:
        """Return it as if no point were chosen yet; raises ConfigError."""
        record = selection["sweep"]
        try:
            space = SearchSpace.from_record(record["search"])
            [first] = list_points({**selection, "sweep": {**record, "points": [space.first()]}})
            name, attempt = str(record["name"]), int(record["attempt"])
            return cls(name, [first], attempt, Path(shared_dir), trials=space.trials, space=space)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"sweep: expected a name, an attempt and a search, not {record!r} ({error})") from error

    def with_record(self) -> Search:
        """Return it with the points that are written down, which were chosen before; raises ConfigError."""
        written = self._read().get("points", [])
        for point in written:
            if not self.space.holds(point["program_args"]):
                raise ConfigError(
                    f"sweep: {point['run']} of {self.record} has other parameters than this search chooses from: give "
                    "the sweep another name, or remove that file and its runs"
                )
        first = self.points[0]
        points = [
            replace(first, run=point["run"], program_args={**first.program_args, **self._chosen(point)})
            for point in written
        ]
        return replace(self, points=points) if points else self

    def _chosen(self, point: Mapping[str, Any]) -> dict[str, Any]:
        return {name: point["program_args"][name] for name in self.space.parameters}

    def unevaluated(self) -> Point | None:
        point = super().unevaluated()
        return self.points[-1] if point is None and self._is_left() else point

    def to_prove(self) -> Sequence[Point]:
        return [self.present() or self.points[-1]]

    def check_settings(self, config: Config) -> None:
        if config.evaluation == "none":
            raise ConfigError(
                f"sweep: the search goes by {self.space.metric}, and evaluation is none: set it to sidecar, inline or "
                "distributed"
            )
        optuna()

    def begin(self, run: str) -> None:
        """Write the first point down; each other one was when it was chosen."""
        if not self._read().get("points"):
            self._write({}, self.points)

    def awaits(self, run: str) -> bool:
        return any(point.run == run and self.owes(point) for point in self.points)

    def why_to_end(self, run: str) -> str | None:
        """Say why a point is stopped at its newest evaluation: by the median, or since the metric is missing there."""
        record = self._evaluation(run)
        if not record.get("metrics"):
            return None
        key = (self.record, run, int(record["step"]))
        if key not in DECIDED:
            own = self._evaluations(run)
            why = self._lack(record) or self._why_behind(run, own)
            if not why and max(own, default=-1) < record["step"]:  # its line is written after the record
                return None
            DECIDED[key] = why
        return DECIDED[key]

    def end_point(self, run: str, state: RunState, message: str = "") -> None:
        """Write down what became of a point, with the metric of its newest evaluation.

        Where there is no such metric no other point is chosen, since all would train for nothing.
        """
        record = self._evaluation(run)
        end: dict[str, Any] = {"state": PRUNED if state is RunState.STOPPED else state, "message": message}
        end |= {"attempt": self.attempt, "time": time.time()}
        if state is not RunState.FAILED:
            if record.get("failed"):
                end |= {"state": RunState.FAILED, "message": f"its evaluation failed: {record['failed']}"}
            elif why := self._lack(record):
                end |= {"state": RunState.FAILED, "message": why, "is_last": True}
            else:
                end |= {"step": record["step"], "value": float(record["metrics"][self.space.metric])}
        # A member that failed may know fewer points than the coordinator has chosen meanwhile.
        self._write({**self._read().get("ends", {}), run: end}, self.with_record().points)

    def choose(self) -> Point | None:
        """Choose the next point once all have ended, and write it down; None where there is none to choose."""
        if self.present() is not None or not self._is_left():
            return None
        ends = self._read().get("ends", {})
        try:
            chosen = choose(self.space, self._trials(self.ends()))
        except ConfigError as error:
            last = self.points[-1].run
            self._write(
                {**ends, last: {**ends[last], "message": str(error), "is_last": True, "attempt": self.attempt}},
                self.points,
            )
            return None
        first = self.points[0]
        run = f"{self.name}-{len(self.points) + 1}"
        point = replace(first, run=run, program_args={**first.program_args, **chosen})
        self._write(ends, [*self.points, point])
        return point

    def _trials(self, ends: Mapping[str, Mapping[str, Any]], *, with_evaluations: bool = False) -> list[Trial]:
        """Return the points that have ended."""
        found = []
        for point in self.points:
            if (end := ends.get(point.run)) is None:
                continue
            value = float(end["value"]) if "value" in end else None
            evaluations = self._evaluations(point.run) if with_evaluations else {}
            step = int(end.get("step", 0))
            found.append(Trial(point.program_args, value, step, end["state"] == PRUNED, evaluations))
        return found

    def _why_behind(self, run: str, own: Mapping[int, float]) -> str | None:
        point = next(point for point in self.points if point.run == run)
        if self.space.pruner == "none" or not own:
            return None
        trials = self._trials(self.ends(), with_evaluations=True)
        if not is_behind(self.space, trials, Trial(point.program_args, evaluations=own)):
            return None
        step = max(own)
        return f"stopped early: {self.space.metric} {own[step]:.4g} at step {step} is behind the median of the others"

    def _lack(self, record: Mapping[str, Any]) -> str | None:
        """Say that an evaluation lacks the metric; None where it has it."""
        metrics = record.get("metrics", {})
        if self.space.metric in metrics:
            return None
        if not record:
            return "it was not evaluated in time, and a search goes by its evaluation: is there an evaluator?"
        there = ", ".join(sorted(metrics))
        return f"metric is {self.space.metric!r}, which the evaluation does not have: name one of its metrics, {there}"

    def _evaluation(self, run: str) -> dict[str, Any]:
        """Return the record of a run's newest evaluation, empty where there is none."""
        return readable(RunDirectory(self.shared_dir, run).evaluation)

    def _evaluations(self, run: str) -> dict[int, float]:
        """Return the metric of a run's evaluations by their step; what can't be read is left out."""
        found: dict[int, float] = {}
        try:
            lines = RunDirectory(self.shared_dir, run).evaluations.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, ValueError):
            return found
        for line in lines:
            try:
                record = json.loads(line)
                found[int(record["step"])] = float(record["values"][self.space.metric])
            except (KeyError, TypeError, ValueError):
                continue  # one is being written
        return found
