"""Memory of psfleet's tasks: each role while it waits, and all of them over 10,000 steps.

A task is its supervisor and the child that works. RSS is the sum of what is resident in memory, PSS the same with each
page that several processes share divided among them (/proc/<pid>/smaps_rollup). `alone` is what the two take on a host
of their own: the PSS of what they have changed, and the files that they map, counted once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from bench.options import parser_of, scratch_directory
from bench.process_memory import ProcessMemory, read_memory
from bench.tables import print_row
from bench.tasks import LocalCluster, TaskProcess, write_settings
from bench.timeline import TimedStep, take_point

PROGRAM = "bench.programs:Tiny"
SETTLED_SECONDS = 3.0
SAMPLE_SECONDS = 0.5
# By then the packed calls have their size, and a first checkpoint and a first event are written.
WARM = 0.3


def settle(task: TaskProcess) -> ProcessMemory:
    """Wait until the task's memory changes no more, by less than 1 %, and return it."""
    memory, since = read_memory(*task.pids), time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(SAMPLE_SECONDS)
        now = read_memory(*task.pids)
        if abs(now.alone - memory.alone) > 0.01 * memory.alone:
            memory, since = now, time.monotonic()
    return memory


def print_idle(directory: Path) -> None:
    print("\nWaiting tasks, MiB\n")
    settings = write_settings(directory, "idle", PROGRAM, steps=1000)
    for name in ("idle", "silent"):
        (directory / name).mkdir()
    silent = LocalCluster(workers=1, servers=1, directory=directory / "silent")
    try:
        chief = silent.start("chief", 0, settings=settings)
        evaluator = silent.start("evaluator", 0, settings=settings)
        with LocalCluster(workers=1, servers=1, directory=directory / "idle").serving() as cluster:
            chief.until(lambda: chief.says("no answer from"), "it waited for members")
            roles = dict(zip(("ps", "worker"), cluster.tasks, strict=True))
            roles |= {"chief, no member answers": chief, "evaluator, no checkpoint": evaluator}
            print_row("role", "RSS", "PSS", "alone", head=True)
            for role, memory in [(role, settle(task)) for role, task in roles.items()]:
                print_row(role, f"{memory.rss:.0f}", f"{memory.pss:.0f}", f"{memory.alone:.0f}")
    finally:
        for task in silent.tasks:
            task.end()


def print_training(directory: Path, steps: int, checkpoint_steps: int) -> None:
    every = f"a checkpoint every {checkpoint_steps} steps" if checkpoint_steps else "default settings"
    print(f"\nMemory alone while a tiny model is trained for {steps:,} steps, 2 workers, 1 ps, {every}, MiB\n")
    run = f"every-{checkpoint_steps}"
    (directory / run).mkdir()
    settings = write_settings(directory, run, PROGRAM, steps=steps, checkpoint_steps=checkpoint_steps)
    status = directory / "runs" / run / "status.json"
    points: list[TimedStep] = []
    times: list[float] = []
    samples: list[list[float]] = []
    with LocalCluster(workers=2, servers=1, directory=directory / run).serving() as cluster:
        chief = cluster.start("chief", 0, settings=settings)
        tasks = {"chief": chief, "ps": cluster.tasks[0], "worker": cluster.tasks[1]}

        def trained() -> bool:
            if take_point(points, status).get("state") == "training":
                times.append(time.time())
                samples.append([read_memory(*task.pids).alone for task in tasks.values()])
            return bool(points and points[-1].step >= steps)

        chief.until(trained, f"step {steps}", deadline=600)
    # The step is published now and then only: between two of these times it is taken to have grown evenly.
    reached = np.interp(times, [point.time for point in points], [point.step for point in points])
    rows = np.array(samples)
    print_row("step", *tasks, head=True)
    for wanted in np.linspace(0, steps, 6):
        nearest = int(np.abs(reached - wanted).argmin())
        print_row(f"{reached[nearest]:,.0f}", *(f"{value:.0f}" for value in rows[nearest]))
    warm = reached >= WARM * steps
    slopes = [1000 * np.polyfit(reached[warm], rows[warm, column], 1)[0] for column in range(len(tasks))]
    print_row(f"MiB per 1,000 steps, from step {WARM * steps:,.0f} on", *(f"{value:+.2f}" for value in slopes))


def main(arguments: list[str]) -> None:
    parser = parser_of("memory", __doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="how long to train (default: 10000)")
    parser.add_argument("--quick", action="store_true", help="train a fifth of the steps: about 1 minute instead of 4")
    options = parser.parse_args(arguments)
    steps = options.steps // 5 if options.quick else options.steps
    with scratch_directory() as directory:
        print_idle(directory)
        for checkpoint_steps in (0, max(1, steps // 50)):
            print_training(directory, steps, checkpoint_steps)


if __name__ == "__main__":
    main(sys.argv[1:])
