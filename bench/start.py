"""How soon a task serves after a SIGKILL, and `python -m trainer local` trains after the command was typed.

a server       from the SIGKILL of a ps until its successor answers GetStatus: forked by its supervisor, and as a
               process with an import of its own, started at once
local          from the command to the first trained step (the event `training`): 2 workers, 2 ps, a tiny model
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import ROOT, TaskProcess, clean_environment
from trainer.cluster.probe import incarnation
from trainer.cluster.spec import ClusterConfig
from trainer.tasks.local import local_cluster
from trainer.telemetry.events import parse

PROGRAM = "bench.programs:Tiny"
DEADLINE = 300.0
SETTLED_SECONDS = 1.0


def until_another(address: str, seen: set[str]) -> None:
    """Wait until a process answers that did not answer before."""
    end = time.monotonic() + DEADLINE
    while (who := incarnation(address, 0.5)) is None or who in seen:
        if time.monotonic() > end:
            sys.exit(f"bench/start: no new process answers at {address} within {DEADLINE:.0f} s")
        time.sleep(0.002)
    seen.add(who)


def server_seconds(directory: Path, supervised: bool, rounds: int) -> list[float]:
    """Kill a ps as often as asked; returns the seconds (one a kill) until the next answers."""
    jobs = local_cluster(1, 1)
    [address] = jobs["ps"]
    more = () if supervised else ("--parent", str(os.getpid()))
    environment = {"TF_CONFIG": ClusterConfig(jobs, "ps", 0).as_tf_config()}

    def start() -> TaskProcess:
        return TaskProcess("ps-0", ["-m", "trainer", *more], directory / "ps.log", environment)

    task, seen, found = start(), set[str](), []
    until_another(address, seen)
    for _ in range(rounds):
        time.sleep(SETTLED_SECONDS)
        killed = time.monotonic()
        os.kill(task.pid, signal.SIGKILL)
        if not supervised:
            task.process.wait()
            task = start()
        until_another(address, seen)
        found.append(time.monotonic() - killed)
    task.end()
    return found


def local_seconds(directory: Path, number: int) -> float:
    """Train ten steps with `local`; returns the seconds from the command to the first one."""
    run, began = f"run-{number}", time.time()
    command = [sys.executable, "-m", "trainer", "local", "--program", PROGRAM, "--run", run, "--steps", "10"]
    command += ["--ps", "2", "--evaluation", "none", "--shared-dir", str(directory)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, timeout=DEADLINE)
    lines = (directory / "runs" / run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return next(event["time"] for line in lines if (event := parse(line)) and event["event"] == "training") - began


def row(name: str, found: list[float]) -> None:
    print_row(name, f"{statistics.median(found):.2f}", f"{min(found):.2f}", f"{max(found):.2f}")


def main(arguments: list[str]) -> None:
    parser = parser_of("start", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each; kills four times as often (default: 5)")
    options = parser.parse_args(arguments)
    with scratch_directory() as directory:
        print_row("s", "median", "least", "most", head=True)
        measures: dict[str, Callable[[], list[float]]] = {
            "killed server, forked": lambda: server_seconds(directory, True, 4 * options.rounds),
            "killed server, own import": lambda: server_seconds(directory, False, options.rounds),
            "local, to the first step": lambda: [local_seconds(directory, number) for number in range(options.rounds)],
        }
        for measure, seconds in measures.items():
            row(measure, seconds())


if __name__ == "__main__":
    main(sys.argv[1:])
