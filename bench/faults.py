"""What befalls a training, and what it makes of it, from outside: by the steps that begin and those that are saved."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

from bench.timeline import TimedStep

WORKERS = ("worker-0", "worker-1")
SERVERS = ("ps-0", "ps-1")
KILL_WORKER_SECONDS = 30
KILL_PS_SECONDS = 90
LONGEST = 60.0  # a freeze, a partition
LATE = 0.5  # seconds


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """What befalls a task at a time (seconds since the training is measured), for how long if it ends by itself."""

    at: float
    kind: str
    task: str
    seconds: float = 0.0


def schedule(seconds: float, partition: bool) -> list[PlannedFault]:
    """Return the faults of so many seconds, in order: none so late that there is no time left to get over it."""
    lasting = min(LONGEST, seconds / 6)
    # Between two kills, so that it is known whose the pause is.
    held = [PlannedFault(seconds * 25 / 60, "freeze", "worker-1", lasting)]
    if partition:
        held.append(PlannedFault(seconds * 43 / 60, "partition", "worker-1", lasting))
    faults = list(held)
    for number, at in enumerate(range(KILL_WORKER_SECONDS, int(seconds), KILL_WORKER_SECONDS)):
        # A worker that is frozen or cut off stays so: the other one is killed.
        is_held = any(fault.at - 1 <= at <= fault.at + fault.seconds for fault in held)
        faults.append(PlannedFault(at, "worker kill", WORKERS[0] if is_held else WORKERS[number % 2]))
    for number, at in enumerate(range(KILL_PS_SECONDS // 2, int(seconds), KILL_PS_SECONDS)):
        faults.append(PlannedFault(at, "ps kill", SERVERS[number % 2]))
    return sorted((fault for fault in faults if fault.at <= seconds - lasting / 4), key=lambda fault: fault.at)


class Steps:
    """How many steps have begun, by the files that bench.programs:Counted writes, over time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.points: list[TimedStep] = []
        self._numbers: dict[str, int] = {}
        self._grown: dict[str, float] = {}

    def poll(self, now: float) -> None:
        for path in self.directory.iterdir():
            # A number that is being written is read as nothing.
            with contextlib.suppress(ValueError):
                number = int(path.read_text(encoding="ascii"))
                if number != self._numbers.get(path.name):
                    self._numbers[path.name], self._grown[path.name] = number, now
        self.points.append(TimedStep(now, sum(self._numbers.values())))

    @property
    def datasets(self) -> int:
        """How many workers' datasets have given a step."""
        return len(self._numbers)

    @property
    def trained(self) -> int:
        """How many workers' datasets have given a second step, and so have ended the first."""
        return sum(number > 1 for number in self._numbers.values())

    @property
    def newest(self) -> float:
        """When a step was last seen to have begun."""
        return max(self._grown.values(), default=0.0)

    def active(self, since: float) -> int:
        """How many workers' datasets have given a step since then."""
        return sum(grown >= since for grown in self._grown.values())


def value_at(points: list[TimedStep], time: float) -> float:
    """Return the step at a time, which grows evenly between two points."""
    place = bisect.bisect_right(points, time, key=lambda point: point.time)
    if place == 0:
        return float(points[0].step)
    before = points[place - 1]
    if place == len(points):
        return float(before.step)
    after = points[place]
    return before.step + (after.step - before.step) * (time - before.time) / (after.time - before.time)


def last_before(points: Iterable[TimedStep], time: float) -> TimedStep:
    """Return the last point up to a time; there must be one."""
    return max((point for point in points if point.time <= time), key=lambda point: point.time)


def pauses(points: list[TimedStep]) -> list[tuple[float, float]]:
    """Return (begin, seconds) of each time without a step, between points at which the step has grown."""
    grown = [now for before, now in itertools.pairwise(points) if now.step > before.step]
    return [(first.time, second.time - first.time) for first, second in itertools.pairwise(grown)]


def pause_after(points: list[TimedStep], at: float, until: float) -> float:
    """Return the longest time without a step that began in [at - LATE, until).

    A fault takes effect at once or some time later, and the last step before it began a little earlier. What began
    before an earlier fault's is that one's.
    """
    grown = pauses(points)
    last = points[-1].time
    if grown:
        begun = grown[-1][0] + grown[-1][1]
        grown.append((begun, last - begun))  # one that has not ended
    return max((seconds for begin, seconds in grown if at - LATE <= begin < until - LATE), default=0.0)


@dataclasses.dataclass(frozen=True)
class GoodputOutcome:
    """What was seen of a training between two times (seconds since 1970)."""

    begin: float
    end: float
    reference: float  # seconds a step takes when nothing befalls it
    steps: list[TimedStep]  # begun
    saves: list[TimedStep]
    faults: list[PlannedFault]

    @property
    def trained(self) -> int:
        """Steps that the last checkpoint has more than the last one before the begin."""
        return last_before(self.saves, self.end).step - last_before(self.saves, self.begin).step

    @property
    def goodput(self) -> float:
        """Useful step time / elapsed."""
        return self.trained * self.reference / (self.end - self.begin)

    @property
    def lost(self) -> float:
        """Steps that were begun between these two checkpoints and are not in the last one."""
        first, last = last_before(self.saves, self.begin), last_before(self.saves, self.end)
        return value_at(self.steps, last.time) - value_at(self.steps, first.time) - self.trained

    def pauses(self, kind: str) -> list[float]:
        """Return for each fault of a kind the longest time without a step that it caused."""
        found = []
        for number, fault in enumerate(self.faults):
            later = self.faults[number + 1 :]
            until = self.begin + later[0].at if later else self.end
            if fault.kind == kind:
                found.append(pause_after(self.steps, self.begin + fault.at, until))
        return found
