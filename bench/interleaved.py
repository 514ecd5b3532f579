"""Clusters that stay beside each other and work in short turns, each while the others are stopped.

This machine's speed changes by a third within seconds. So sides that are measured one after the other can't be told
apart, unless their turns are shorter than that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.commands import run_command
from bench.process_memory import read_memory
from bench.tasks import PLAIN_SERVER, TRAINER, LocalCluster, TaskProcess, processor_seconds
from bench.throughput import Bench, Observed
from bench.timeline import TimedStep, spans, speed

NO_SAVES = {"checkpoint_seconds": 86_400}  # the guide's side saves nothing
ALONE = {"export": False, "evaluation": "none", **NO_SAVES}  # a side that does nothing but train
StartOn = Callable[[LocalCluster], tuple[TaskProcess, Observed]]
Start = tuple[contextlib.AbstractContextManager[LocalCluster], StartOn]


class Side:
    """A cluster with its coordinator, and what it did while it was not stopped."""

    def __init__(self, cluster: LocalCluster, coordinator: TaskProcess, observed: Observed) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._observed = observed
        self._turns: list[tuple[float, float]] = []  # when each began and ended (of time.time)
        self._before: dict[str, float] = {}
        self._bytes_before: int | None = None
        self._since = 0.0

    def warm_up(self, seconds: float, traffic: bool = False) -> None:
        """Wait until it has trained for so long. With `traffic` what the ps send is counted from then on."""
        self._coordinator.until(lambda: spans(self._observed(), seconds), "it had trained for a while")
        self._signal(signal.SIGSTOP)
        self._since, self._before = time.time(), self._processor_seconds()
        if traffic:
            self._bytes_before = self._bytes()

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
        points = [TimedStep(self._worked(one.time), one.step) for one in self._observed() if one.time > self._since]
        found = speed(points, 0.0)
        if found is None:
            raise SystemExit("bench: fewer than two points were reached in all turns: give more turns, or longer ones")
        return found

    def step_milliseconds(self) -> dict[str, float]:
        """Return the processor time for a step, of all tasks of a job together."""
        spent = {job: seconds - self._before[job] for job, seconds in self._processor_seconds().items()}
        steps = self._steps()
        return {job: 1000 * seconds / steps for job, seconds in spent.items()}

    def step_kilobytes(self) -> str:
        """Show what the ps sent and got for a step; "-" where that was not counted, or connections have ended since."""
        if self._bytes_before is None or (found := self._bytes() - self._bytes_before) < 0:
            return "-"
        return f"{found / 1000 / self._steps():,.0f}"

    def _bytes(self) -> int:
        return bytes_of(self._cluster.spec("ps")["ps"])

    def resident(self, job: str) -> float:
        """Return the memory of all tasks of a job together (MiB)."""
        tasks = [task for task in self._cluster.tasks if task.name.rpartition("-")[0] == job]
        return sum(read_memory(*task.pids).rss for task in tasks)

    def _steps(self) -> float:
        return self.speed() * sum(end - began for began, end in self._turns)

    def milliseconds(self) -> str:
        """Show the processor time for a step, and each job's part of it."""
        jobs = self.step_milliseconds()
        parts = ", ".join(f"{job} {spent:.3g}" for job, spent in sorted(jobs.items()))
        return f"{sum(jobs.values()):.4g} ({parts})"

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


def bytes_of(addresses: Sequence[str]) -> int:
    """Return what servers at these addresses have sent and got, by the connections that they have (`ss`)."""
    if not addresses:
        return 0
    ports = " or ".join(f"sport = :{address.rpartition(':')[2]}" for address in addresses)
    return sent_and_got(run_command(["ss", "--tcp", "--info", "--numeric", "--no-header", f"( {ports} )"]))


def sent_and_got(output: str) -> int:
    """Return the bytes of all connections together, of which `ss --info` says this."""
    return sum(map(int, re.findall(r"\bbytes_(?:sent|received):(\d+)", output)))


@contextlib.contextmanager
def in_turns(
    starts: Iterable[Start], warm_up: float, turns: int, seconds: float, *, traffic: bool = False
) -> Iterator[list[Side]]:
    """Give the sides once each has worked so many turns; they run until it is left. `traffic` is as for `warm_up`."""
    with contextlib.ExitStack() as stack:
        sides = []
        for serving, start in starts:
            cluster = stack.enter_context(serving)
            sides.append(Side(cluster, *start(cluster)))
            sides[-1].warm_up(warm_up, traffic)
        for turn in range(turns):
            for side in sides if turn % 2 else sides[::-1]:
                side.work(seconds)
        yield sides


def psfleet_on(bench: Bench, program: str, **settings: Any) -> StartOn:
    """Return what starts psfleet's coordinator on a cluster, with the custom loop."""
    return lambda cluster: bench.start_psfleet(cluster, program, "custom_loop", **settings)


def against_guide(
    bench: Bench,
    program: str,
    epoch_steps: int,
    turns: int,
    seconds: float,
    *settings: Mapping[str, Any],
    workers: int = 2,
    floor: bool = False,
    traffic: bool = False,
) -> contextlib.AbstractContextManager[list[Side]]:
    """Give the guide's side, and one of psfleet's with each of these settings: so many workers and two ps each.

    The guide's is on servers of the guide. With `floor` one process that trains alone comes last. `traffic` is as for
    `Side.warm_up`.
    """
    guide = partial(bench.start_plain, program=program, api="custom_loop", epoch_steps=epoch_steps)
    sides: list[tuple[tuple[str, str], StartOn]] = [(PLAIN_SERVER, guide)]
    sides += [(TRAINER, psfleet_on(bench, program, **each, **NO_SAVES)) for each in settings or ({},)]
    starts = [(bench.cluster(workers, servers=2).serving(command=command), start) for command, start in sides]
    if floor:
        alone = psfleet_on(bench, program, strategy="one_device", **NO_SAVES)
        starts.append((bench.cluster(workers=0, servers=0).serving(), alone))
    return in_turns(starts, bench.effort.warm_up, turns, seconds, traffic=traffic)


def speeds(sides: list[Side]) -> list[str]:
    """Return the cells of two sides' speeds, and of their ratio."""
    before, after = (side.speed() for side in sides)
    return [f"{before:.4g}", f"{after:.4g}", f"{after / before:.2f}"]


def times(*sides: str) -> list[str]:
    """Return the heads of the columns that `Side.milliseconds` fills."""
    return [f"{side}, ms of processor time a step" for side in sides]


def add_turns(parser: argparse.ArgumentParser, turns: int) -> None:
    parser.add_argument("--turns", type=int, default=turns, help=f"of each side (default: {turns})")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes (default: 3)")
