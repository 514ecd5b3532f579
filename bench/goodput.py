"""Goodput under faults: psfleet against TensorFlow's parameter-server guide written plainly.

Each side trains the same program (by default steps that wait 50 ms) on two workers and two ps, saves every 200 steps,
and what ends is started again a second later. The same faults befall each: a worker is killed every 30 s, a ps every
90 s, a worker is stopped (SIGSTOP) for 60 s and another time cut off the network for 60 s.

Everything is seen from outside, for all sides alike: the steps that begin, which the program's dataset writes down, and
the checkpoints that are complete. Goodput is the steps that the last checkpoint has more than the first, times the
seconds that a step takes before the faults begin, divided by the time. Steps lost were begun and are in no checkpoint.
A pause is the longest time without any step that began between a fault and the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.faults import GoodputOutcome, PlannedFault, Steps, schedule, value_at
from bench.kept_cluster import NAMES, KeptCluster
from bench.networks import Networks, missing
from bench.options import add_names, parser_of, scratch_directory
from bench.recommender import settings_of_tables
from bench.tables import print_row
from bench.tasks import PLAIN_SERVER, TRAINER, write_settings
from bench.timeline import TimedStep, read_point
from trainer.run.directory import RunDirectory

PROGRAM = "bench.programs:Counted"
PROGRAMS = {"waiting": PROGRAM, "recommender": "bench.programs:WideAndDeepCounted"}
SAVE_STEPS = 200  # 5 s of undisturbed training of steps that wait
QUIET_SECONDS = 20.0
POLL_SECONDS = 0.1
START_SECONDS = 300.0
SIDES = {
    "psfleet-loop": "psfleet, custom loop",
    "guide-loop": "guide, CheckpointManager",
    "psfleet-fit": "psfleet, `fit`",
    "guide-fit": "guide, BackupAndRestore",
}
KINDS = ("worker kill", "ps kill", "freeze", "partition")


class MeasuredTraining:
    """One side's cluster, and what can be seen of it."""

    def __init__(
        self,
        side: str,
        program: str,
        directory: Path,
        networks: Networks | None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are run settings of psfleet's sides."""
        who, api = side.split("-")
        directory.mkdir()
        self.directory = directory
        self.steps = Steps(directory / "steps")
        self.steps.directory.mkdir()
        self.saves: list[TimedStep] = []
        environment = {"BENCH_STEPS": str(self.steps.directory)}
        if who == "psfleet":
            self._run: RunDirectory | None = RunDirectory(directory, "goodput")
            api = api if api == "fit" else "custom_loop"
            own = {"api": api, "steps": 10**9, "evaluation": "none", **(settings or {})}
            saves = {"checkpoint_steps": SAVE_STEPS, "checkpoint_seconds": 0}
            environment["TRAINER_SETTINGS"] = write_settings(directory, "goodput", program, **own, **saves)
            commands: dict[str, tuple[str, ...]] = dict.fromkeys(("chief", "worker", "ps"), TRAINER)
            if networks:
                networks.set("ipv4/tcp_retries2", "6")  # as Ansible sets it on hosts
        else:
            self._run = None
            chief: tuple[str, ...] = ("-m", f"bench.plain_{api}", program, str(SAVE_STEPS), str(directory / "saved"))
            commands = {"chief": chief, "worker": PLAIN_SERVER, "ps": PLAIN_SERVER}
        self.cluster = KeptCluster(directory, commands, networks, **environment)

    def poll(self) -> None:
        """Keep the tasks alive and write down where the training is."""
        time.sleep(POLL_SECONDS)
        self.cluster.keep()
        self.steps.poll(time.time())
        if self._run is not None:
            newest = self._run.catalogue.newest()
            if newest and (not self.saves or newest != self.saves[-1].step):
                self.saves.append(TimedStep(time.time(), newest))
        else:
            lines = self.cluster.tasks["chief-0"].output().splitlines()
            self.saves = [point for line in lines if (point := read_point(line))]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_SECONDS
        while not holds():
            self.poll()
            if time.monotonic() > end:
                chief = self.cluster.tasks["chief-0"].output()
                sys.exit(f"bench/goodput: not within {START_SECONDS:.0f} s: {what}\n{chief[-4000:]}")


def measure(
    side: str, program: str, seconds: float, directory: Path, networks: Networks | None, settings: Mapping[str, Any]
) -> GoodputOutcome:
    """Train one side under the faults of so many seconds; `settings` are run settings of psfleet's."""
    training = MeasuredTraining(side, program, directory, networks, settings)
    with training.cluster.running():
        training.until(lambda: len(training.saves) >= 2, "two checkpoints")
        quiet = min(QUIET_SECONDS, seconds / 3)
        begin = time.time() + quiet
        training.until(lambda: time.time() >= begin, "the quiet time")
        begun = value_at(training.steps.points, begin) - value_at(training.steps.points, begin - quiet)
        show(side, f"{begun / quiet:.1f} steps/s undisturbed")
        faults = schedule(seconds, networks is not None)
        befall(training, faults, begin, begin + seconds, side)
        return GoodputOutcome(begin, begin + seconds, quiet / begun, training.steps.points, training.saves, faults)


def befall(training: MeasuredTraining, faults: list[PlannedFault], begin: float, end: float, side: str) -> None:
    """Let the faults befall the training, each at its time, and watch it to the end."""
    cluster, due = training.cluster, list(faults)
    reverts: list[tuple[float, Callable[[], None]]] = []
    with contextlib.ExitStack() as stack:
        while time.time() < end:
            training.poll()
            while due and time.time() >= begin + due[0].at:
                fault = due.pop(0)
                show(side, f"{fault.at:.0f} s: {fault.kind} of {fault.task}")
                if fault.seconds:
                    revert = cluster.freeze(fault.task) if fault.kind == "freeze" else cluster.cut(fault.task)
                    reverts.append((begin + fault.at + fault.seconds, revert))
                else:
                    cluster.kill(fault.task)
            while reverts and time.time() >= reverts[0][0]:
                reverts.pop(0)[1]()
        for _, revert in reverts:
            stack.callback(revert)


def show(side: str, what: str) -> None:
    print(f"{side}: {what}", file=sys.stderr, flush=True)


def rows(outcomes: dict[str, GoodputOutcome]) -> list[list[str]]:
    """Return the table's rows below its head, one for each thing that is measured."""
    every = list(outcomes.values())
    table = [
        ["goodput", *(f"{outcome.goodput:.3f}" for outcome in every)],
        ["steps in checkpoints", *(str(outcome.trained) for outcome in every)],
        ["steps lost", *(f"{max(0.0, outcome.lost):.0f}" for outcome in every)],
        ["undisturbed, steps/s", *(f"{1 / outcome.reference:.1f}" for outcome in every)],
    ]
    for kind in KINDS:
        found = [outcome.pauses(kind) for outcome in every]
        if any(found):
            table.append([f"pause after a {kind}, s ({len(found[0])})", *map(listed, found)])
    return table


def listed(seconds: list[float]) -> str:
    """Return the median, and the longest where there are several."""
    if not seconds:
        return "-"
    longest = f" (longest {max(seconds):.1f})" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.1f}{longest}"


def main(arguments: list[str]) -> None:
    parser = parser_of("goodput", __doc__)
    add_names(parser, "side", SIDES, default="all, in this order")
    parser.add_argument("--program", choices=PROGRAMS, default="waiting", help="what is trained (default: waiting)")
    parser.add_argument("--dynamic", action="store_true", help="psfleet's recommender has dynamic tables")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, for each side (default: 10)")
    parser.add_argument("--keep", type=Path, help="leave the processes' logs, and what was seen, in this directory")
    options = parser.parse_args(arguments)
    if options.dynamic and options.program != "recommender":
        parser.error("--dynamic is for --program recommender, which has tables")
    settings = settings_of_tables()["dynamic"] if options.dynamic else {}
    sides = [side for side in SIDES if not options.side or side in options.side]
    why = missing()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(options.keep))
        outcomes = {}
        for side in sides:
            networks = None
            if not why:
                networks = Networks(NAMES)
            try:
                program = PROGRAMS[options.program]
                outcomes[side] = measure(side, program, 60 * options.minutes, directory / side, networks, settings)
            finally:
                if networks:
                    networks.end()
            if options.keep:
                (directory / f"{side}.json").write_text(json.dumps(dataclasses.asdict(outcomes[side])))
    print(f"\nTwo workers, two ps, {options.minutes:g} minutes of faults for each side\n")
    print_row("", *(SIDES[side] for side in sides), head=True)
    for row in rows(outcomes):
        print_row(*row)
    if why:
        print(f"\nNo partition, and no networks of their own: {why}.")


if __name__ == "__main__":
    main(sys.argv[1:])
