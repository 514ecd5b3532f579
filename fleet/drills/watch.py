"""What is measured from a fault on: who noticed and when, the longest time without a step, steps lost, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

from fleet.drills.testbed import Process, RunSample, Testbed
from fleet.errors import ClusterTrouble, HostsUnreachable

SAMPLE_SECONDS = 0.3
UNITS_SECONDS = 2.0
# Events that say that something is wrong, or that what was wrong is being fixed.
NOTICES = frozenset({
    "member-lost", "member-silent", "member-given-up", "member-half-connected", "ps-lost", "recovering", "recovered",
    "attached", "restored", "lease-taken", "lease-lost", "phase-overdue", "save-failed", "checkpoint-set-aside",
    "not-finite", "waiting", "started", "failed", "stopped",
})  # fmt: skip


class FaultWatch:
    """Samples from just before the fault on."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self.before = testbed.processes(testbed.inventory.hosts)
        self.first = testbed.sample()
        self.begun = testbed.console.clock()
        self.samples: list[RunSample] = [self.first]
        self.processes = dict(self.before)
        self.away: Sequence[str] = ()  # hosts that can't be asked
        hosts = list(testbed.inventory.hosts)
        self._pool = ThreadPoolExecutor(len(hosts), thread_name_prefix="units")
        self._asked: dict[str, Future[dict[str, Process]]] = {}
        self._units_at = dict.fromkeys(hosts, self.begun)

    @property
    def newest_checkpoint(self) -> int:
        """The newest one before the fault."""
        return max(self.first.checkpoints, default=0)

    @property
    def last(self) -> RunSample:
        return self.samples[-1]

    def begin(self) -> None:
        """The fault comes now."""
        self.first = self._testbed.sample()
        self.samples = [self.first]
        self.begun = self._testbed.console.clock()

    def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Go on looking until something is so; return whether it came true in time."""
        console = self._testbed.console
        end = console.clock() + seconds
        while True:
            self._poll()
            if true():
                return True
            if console.clock() >= end:
                return False
            console.sleep(SAMPLE_SECONDS)

    def _poll(self) -> None:
        try:
            self.samples.append(self._testbed.sample())
        except (HostsUnreachable, ClusterTrouble):
            return  # the coordinator's own host may be the one that is gone
        self._ask_units()
        self.processes[self._testbed.chief.name] = self.last.coordinator

    def _ask_units(self) -> None:
        """Ask each host beside the steps: one that boots takes seconds to answer."""
        console, hosts = self._testbed.console, self._units_at
        due = [
            host
            for host, at in hosts.items()
            if host not in self._asked and host not in self.away and console.clock() - at >= UNITS_SECONDS
        ]
        for host in due:
            others = [other for other in hosts if other != host]
            self._asked[host] = self._pool.submit(self._testbed.processes, away=others)
        wait([self._asked[host] for host in due], SAMPLE_SECONDS)
        for host, asked in list(self._asked.items()):
            if asked.done():
                del self._asked[host]
                hosts[host] = console.clock()
                if host not in self.away:
                    self.processes |= asked.result()

    def restarted(self) -> list[str]:
        """The tasks that were restarted since before the fault."""
        return [name for name in self.before if self.processes[name].succeeds(self.before[name])]

    def run_again(self, names: Iterable[str]) -> bool:
        """Whether these tasks were restarted and are up, and all the others are up too."""
        restarted = self.restarted()
        return all(name in restarted for name in names) and all(process.runs for process in self.processes.values())

    def has_trained_since(self, at: float) -> bool:
        return any(new > at for new in new_steps(self.samples))

    def events(self) -> list[Mapping[str, Any]]:
        """What the run's event log says of the time since the fault."""
        seen = self.last
        return [event for event in seen.events if seen.happened_at(event) >= self.begun - 0.5]

    def detected_after(self) -> float | None:
        """Seconds from the fault to the first sign that the fault was noticed."""
        at = [self.last.happened_at(event) for event in self.events() if event["event"] in NOTICES]
        at += [sample.at for sample in self.samples if sample.coordinator.start != self.first.coordinator.start][:1]
        return max(0.0, min(at) - self.begun) if at else None


def new_steps(samples: Sequence[RunSample]) -> list[float]:
    """When a step was seen that the sample before it did not have; a step that went back is none."""
    steps = [(sample.at, sample.step) for sample in samples if sample.state == "training" and sample.step is not None]
    return [at for (_, before), (at, step) in pairwise(steps) if step > before]


def longest_pause(begun: float, samples: Sequence[RunSample]) -> float:
    """The longest time without a new step, from the fault to the last new step that was seen."""
    times = [begun, *(at for at in new_steps(samples) if at > begun)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def steps_lost(samples: Sequence[RunSample]) -> int:
    """How far the step went back at most."""
    highest = lost = 0
    for sample in samples:
        if sample.step is not None:
            highest = max(highest, sample.step)
            lost = max(lost, highest - sample.step)
    return lost


def lowest_step(samples: Sequence[RunSample]) -> int | None:
    """The lowest step at which it trained."""
    return min(
        (sample.step for sample in samples if sample.state == "training" and sample.step is not None), default=None
    )


def describe_process(process: Process) -> str:
    return f"{process.active} ({process.sub}), {process.result}, exit status {process.exit_status}"
