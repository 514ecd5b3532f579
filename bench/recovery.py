"""The time from a fault to the next trained step, in psfleet, and where it goes.

Each fault befalls one and the same training of steps that wait 50 ms (custom loop, two workers, two ps), as often as
asked. What was stopped or cut off stays so until the training goes on, and is waited for before the next fault. All is
seen from outside: processes, what they say, the run's events, and the steps that begin.

detection         until the coordinator says it in the events; of itself: until its process has ended
process start     until the process that the recovery waits for is started, by its supervisor
TensorFlow        until that process serves or has its members (its supervisor has imported TensorFlow before)
restore           until the model is rebuilt and the checkpoint is read
first step        until the next step begins; after a worker's death: the first one of the new process

A worker that is frozen or cut off stops no other. It stays so for 10 s after it was dropped, and of it is shown:

dropped           until the coordinator says that it goes on without the worker
others' pause     the longest time without a step of the other worker, seen every 0.1 s
taken back        from its thaw, or from the end of the cut, until it has trained a step again

The floor is what no recovery with a new process can be faster than: the import of TensorFlow alone, and how long a bare
coordinator of TensorFlow's guide takes from there to its first step, on servers that wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.faults import pause_after
from bench.goodput import PROGRAM, MeasuredTraining
from bench.kept_cluster import NAMES, KeptCluster
from bench.networks import Networks, missing
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import PLAIN_SERVER
from bench.timeline import read_point
from trainer.telemetry.events import parse

PARTS = ("detection", "process start", "TensorFlow", "restore", "first step")
GOES_ON = ("attached", "restored")
NOTICED = ("member-lost", "ps-lost", "member-silent", "recovering")
SETTLED_SECONDS = 5.0
HELD_SECONDS = 10.0  # after a silent worker was dropped
SERVES = " serves at "
# The guide's coordinator, which says when Python is there and when TensorFlow is.
BARE = """
from bench.timeline import print_point
print_point(0)
import tensorflow
print_point(0)
import runpy
runpy.run_module("bench.plain_loop", run_name="__main__")
"""
FAULTS = {
    "kill worker": "worker-1",
    "kill ps": "ps-1",
    "kill coordinator": "chief-0",
    "freeze worker": "worker-1",
    "freeze ps": "ps-1",
    "cut off worker": "worker-1",
    "cut off ps": "ps-1",
}
SILENT_WORKER = ("freeze worker", "cut off worker")


@dataclasses.dataclass(frozen=True)
class Marks:
    """When what happened (seconds since 1970) after a fault; None for what did not."""

    fault: float
    noticed: float | None
    started: float | None
    imported: float | None
    restored: float | None
    stepped: float

    def parts(self) -> list[float | None]:
        """Return the seconds of each of PARTS; what was over before the part before it took none."""
        reached, found = self.fault, list[float | None]()
        for mark in (self.noticed, self.started, self.imported, self.restored, self.stepped):
            found.append(None if mark is None else max(0.0, mark - reached))
            reached = max(reached, mark or reached)
        return found


@dataclasses.dataclass(frozen=True)
class Silence:
    """What a worker's silence came to, in seconds."""

    dropped: float
    pause: float
    back: float


class Recovery:
    """A training that one fault after another befalls."""

    def __init__(self, training: MeasuredTraining) -> None:
        self._training = training
        self._cluster = training.cluster
        self._events_path = training.directory / "runs" / "goodput" / "events.jsonl"

    def settle(self) -> None:
        """Wait until both workers train, lost ones have been taken in again, and no process is new."""
        quiet_since = time.monotonic()
        starts = self._starts()

        def settled() -> bool:
            nonlocal quiet_since, starts
            trains = self._training.steps.active(time.time() - 1) >= 2 and self._has_all_members()
            if not trains or self._starts() != starts:
                quiet_since, starts = time.monotonic(), self._starts()
            return time.monotonic() - quiet_since > SETTLED_SECONDS

        self._training.until(settled, "a training on all members")

    def silence(self, kind: str) -> Silence:
        """Freeze or cut off a worker, and wait until it has been dropped and taken back."""
        task, steps = FAULTS[kind], self._training.steps
        fault = time.time()
        revert = self._inject(kind)
        self._training.until(lambda: self._event(fault, *NOTICED) is not None, f"an event after: {kind}")
        dropped = self._event(fault, *NOTICED) or 0.0
        self._training.until(lambda: time.time() > dropped + HELD_SECONDS, "the time that it stays so")
        trained = steps.trained
        revert()
        reverted = time.time()
        self._training.until(lambda: steps.trained > trained, f"a step of {task}")
        return Silence(dropped - fault, pause_after(steps.points, fault, steps.newest), steps.newest - reverted)

    def measure(self, kind: str) -> Marks:
        """Let a fault befall the training, and wait until it trains again."""
        task, chief = self._cluster.tasks[FAULTS[kind]], self._cluster.tasks["chief-0"]
        # Whom the recovery waits for: a server that died, else a coordinator, if another one is started.
        awaited = task if kind.startswith("kill") else chief
        steps = self._training.steps
        datasets, starts = steps.datasets, self._starts()
        chief_pid, served = chief.pid, awaited.output().count(SERVES)
        ended: float | None = None
        ready: float | None = None
        fault = time.time()
        revert = self._inject(kind)

        def goes_on() -> bool:
            nonlocal ended, ready
            if ended is None and chief.pid != chief_pid:
                ended = time.time()
            if ready is None and awaited is not chief and awaited.output().count(SERVES) > served:
                ready = time.time()
            if kind == "kill worker":
                return steps.datasets > datasets
            restored = self._event(fault, *GOES_ON)
            return restored is not None and steps.newest > restored

        self._training.until(goes_on, f"a step after: {kind}")
        stepped = steps.newest
        revert()
        is_new = len(awaited.starts) > starts[awaited.name]
        return Marks(
            fault=fault,
            noticed=ended if kind == "kill coordinator" else self._event(fault, *NOTICED),
            started=awaited.starts[starts[awaited.name]] if is_new else None,
            imported=self._event(fault, "formed") if is_new and awaited is chief else ready,
            restored=None if kind == "kill worker" else self._event(fault, *GOES_ON),
            stepped=stepped,
        )

    def _inject(self, kind: str) -> Callable[[], None]:
        """Let a fault befall its task; returns what ends one that lasts."""
        if kind.startswith("kill"):
            self._cluster.kill(FAULTS[kind])
            return lambda: None
        return (self._cluster.freeze if kind.startswith("freeze") else self._cluster.cut)(FAULTS[kind])

    def _starts(self) -> dict[str, int]:
        return {name: len(task.starts) for name, task in self._cluster.tasks.items()}

    def _has_all_members(self) -> bool:
        formed = [event["message"] for event in self._events() if event["event"] == "formed"]
        return formed[-1:] == ["all members"]

    def _event(self, since: float, *names: str) -> float | None:
        """Return the time of the first such event since then."""
        found = (event["time"] for event in self._events() if event["event"] in names and event["time"] >= since)
        return next(found, None)

    def _events(self) -> list[dict[str, Any]]:
        lines = self._events_path.read_text(encoding="utf-8").splitlines() if self._events_path.exists() else []
        return [event for line in lines if (event := parse(line))]


def floor(directory: Path, rounds: int) -> list[list[float]]:
    """Measure as often as asked: starting Python, importing TensorFlow, a bare coordinator's way to its first step."""
    directory.mkdir()
    steps = directory / "steps"
    steps.mkdir()
    commands = {"chief": ("-c", BARE, PROGRAM, "1"), "worker": PLAIN_SERVER, "ps": PLAIN_SERVER}
    cluster = KeptCluster(directory, commands, BENCH_STEPS=str(steps))
    chief = cluster.tasks["chief-0"]
    found = []
    with cluster.running():
        for task in list(cluster.tasks.values())[:-1]:
            task.processes[-1].until(partial(task.processes[-1].says, "serves"), "it served")
        for _ in range(rounds):
            chief.processes[-1].end()
            time.sleep(1)  # a worker ends the step that it is at
            for path in steps.iterdir():
                path.unlink()
            chief.start()
            chief.processes[-1].until(lambda: any(steps.iterdir()), "its first step")
            first = min(path.stat().st_mtime for path in steps.iterdir())
            times = [point.time for line in chief.processes[-1].output().splitlines() if (point := read_point(line))]
            python, tensorflow = times[:2]
            found.append([python - chief.starts[-1], tensorflow - python, first - tensorflow])
    return found


def medians(rows: list[list[float | None]]) -> list[float | None]:
    """Return the median of each column, of the rounds in which there was such a part."""
    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [statistics.median(column) if column else None for column in columns]


def cells(parts: list[float | None], in_all: float) -> list[str]:
    return [*("-" if part is None else f"{part:.2f}" for part in parts), f"{in_all:.2f}"]


def measured(
    recovery: Recovery, kind: str, rounds: int, measure: Callable[[str], Any], shown: Callable[[Any], object]
) -> list[Any]:
    """Return what is measured of a fault in each round; each is also shown at once."""
    found = []
    for number in range(rounds):
        recovery.settle()
        found.append(measure(kind))
        print(f"{kind}, {number + 1} of {rounds}: {shown(found[-1])}", file=sys.stderr, flush=True)
    return found


def show_recoveries(recovery: Recovery, kind: str, rounds: int) -> None:
    found = measured(recovery, kind, rounds, recovery.measure, Marks.parts)
    in_all = statistics.median(marks.stepped - marks.fault for marks in found)
    print_row(kind, *cells(medians([marks.parts() for marks in found]), in_all))


def show_silences(recovery: Recovery, kind: str, rounds: int) -> None:
    seen = measured(recovery, kind, rounds, recovery.silence, str)
    columns = zip(*map(dataclasses.astuple, seen), strict=True)
    print_row(kind, *(f"{statistics.median(column):.2f} ({max(column):.2f})" for column in columns))


def main(arguments: list[str]) -> None:
    parser = parser_of("recovery", __doc__)
    add_names(parser, "fault", FAULTS)
    parser.add_argument("--rounds", type=int, default=3, help="how often each; medians are shown (default: 3)")
    parser.add_argument("--keep", type=Path, help="leave the processes' logs in this directory")
    options = parser.parse_args(arguments)
    why = missing()
    faults = [each for each in FAULTS if each in (options.fault or FAULTS) and not (why and each.startswith("cut"))]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(options.keep))
        print(f"\nFrom the fault to the next trained step, s, medians of {options.rounds}\n")
        print_row("fault", *PARTS, "in all", head=True)
        bare = floor(directory / "floor", options.rounds)
        python, tensorflow, first = (statistics.median(column) for column in zip(*bare, strict=True))
        in_all = statistics.median(sum(row) for row in bare)
        print_row("floor: a bare coordinator", *cells([None, python, tensorflow, None, first], in_all))
        networks = None if why else Networks(NAMES)
        if networks:
            stack.callback(networks.end)
        training = MeasuredTraining("psfleet-loop", PROGRAM, directory / "training", networks)
        stack.enter_context(training.cluster.running())
        recovery = Recovery(training)
        for kind in [kind for kind in faults if kind not in SILENT_WORKER]:
            show_recoveries(recovery, kind, options.rounds)
        if silent := [kind for kind in faults if kind in SILENT_WORKER]:
            print(f"\nA silent worker, s, medians of {options.rounds}; in brackets the longest\n")
            print_row("fault", "dropped", "others' pause", "taken back", head=True)
        for kind in silent:
            show_silences(recovery, kind, options.rounds)
    if why:
        print(f"\nNo task was cut off, and none had a network of its own: {why}.")


if __name__ == "__main__":
    main(sys.argv[1:])
