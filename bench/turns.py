"""Clusters that stay beside each other and work in short turns, each while the others are stopped.

This machine's speed changes by a third within seconds. So sides that are measured one after the other can't be told
apart, unless their turns are shorter than that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict

from bench.points import Point, spans, speed
from bench.tasks import LocalCluster, Task, processor_seconds
from bench.throughput import Observed


class Side:
    """A cluster with its coordinator, and what it did while it was not stopped."""

    def __init__(self, cluster: LocalCluster, coordinator: Task, observed: Observed) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._observed = observed
        self._turns: list[tuple[float, float]] = []  # when each began and ended (of time.time)
        self._before: dict[str, float] = {}
        self._since = 0.0

    def warm_up(self, seconds: float) -> None:
        """Wait until it has trained for so long."""
        self._coordinator.until(lambda: spans(self._observed(), seconds), "it had trained for a while")
        self._signal(signal.SIGSTOP)
        self._since, self._before = time.time(), self._processor_seconds()

    def work(self, seconds: float) -> None:
        """Work for so long."""
        began = time.time()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self._signal(signal.SIGSTOP)
        self._turns.append((began, time.time()))
        self._observed()  # it may know nothing but the last point

    def speed(self) -> float:
        """Return the steps per second in all turns, from the first point in them to the last."""
        points = [Point(self._worked(one.time), one.step) for one in self._observed() if one.time > self._since]
        found = speed(points, 0.0)
        if found is None:
            raise SystemExit("bench: fewer than two points were reached in all turns: give more turns, or longer ones")
        return found

    def step_milliseconds(self) -> dict[str, float]:
        """Return the processor time for a step, of all tasks of a job together."""
        spent = {job: seconds - self._before[job] for job, seconds in self._processor_seconds().items()}
        steps = self.speed() * sum(end - began for began, end in self._turns)
        return {job: 1000 * seconds / steps for job, seconds in spent.items()}

    def _worked(self, at: float) -> float:
        """Return how long it had worked then."""
        return sum(min(at, end) - began for began, end in self._turns if began < at)

    def _processor_seconds(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for task in self._cluster.tasks:
            seconds[task.name.rpartition("-")[0]] += sum(map(processor_seconds, task.pids))
        return seconds

    def _signal(self, number: signal.Signals) -> None:
        for task in self._cluster.tasks:
            for pid in task.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
