"""How fast the training goes, and by whose steps, since the numbers were shown; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """The training since the numbers were shown: how long it took, its steps per second, the steps of each task."""

    seconds: float
    speed: float
    given: dict[str, int]


class ProgressMeter:
    """Measures the training between two moments at which its numbers are shown."""

    def __init__(self, interval: float, tasks: Iterable[str]) -> None:
        """Take after how many seconds numbers are due, and the tasks that train."""
        self._interval = interval
        self._began = 0.0
        self._step = 0
        self._given = dict.fromkeys(tasks, 0)

    def begin(self, step: int, now: float) -> None:
        """Measure from this step and moment on; the steps that tasks gave before are shown."""
        self._step, self._began = step, now
        self._given = dict.fromkeys(self._given, 0)

    def join(self, task: str) -> None:
        """One more task trains."""
        self._given[task] = 0

    def add_steps(self, task: str, steps: int) -> None:
        """Count the steps of a call that this task ran."""
        self._given[task] += steps

    def leave_out(self, seconds: float) -> None:
        """Leave a time out in which nothing could be trained."""
        self._began += seconds

    def is_due(self, now: float) -> bool:
        """Return whether it is time to show numbers."""
        return now - self._began >= self._interval

    def stretch(self, step: int, now: float) -> Stretch | None:
        """Return the training up to this step; nothing where no step has ended since the numbers were shown."""
        if step <= self._step:
            return None
        seconds = now - self._began
        return Stretch(seconds, (step - self._step) / max(seconds, 1e-9), self._given)
