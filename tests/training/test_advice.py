"""What `fab advise` says of trainings whose bottleneck is known, on real processes: a slow worker, a slow input."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from processes import Process, Runs, until

from fleet.advice import Host, Look, advise
from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
TASKS = ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1")
OPTIONS = ["--steps-per-execution", "1", "--no-evaluator", "--log-seconds", "0.5"]
SECONDS = 15.0
SLOW = 0.2


def look(runs: Runs, run: str, process: Process) -> Look:
    """Look at local processes as `fab advise` looks at hosts; what else this machine does is left out."""
    record = read_record(runs.directory(run) / "status.json") or {}
    used = {task: spent(process.pids(task)[-1]) for task in TASKS}
    host = Host(os.cpu_count() or 1, sum(used.values()), 0.0, 0.0, 0.0)
    steps = {task: int(each["steps"]) for task, each in record["workers"].items()}
    return Look(record["updated"], steps, used, {"here": host}, dict.fromkeys(TASKS, "here"))


def spent(pid: int) -> float:
    """Return the processor time of a process, and of those that it has forked."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(spent(int(child)) for child in children)


@pytest.mark.parametrize(
    ("slow", "part", "names"),
    [(("worker-1",), "worker", ["worker-1"]), (("worker-0", "worker-1"), "input", [])],
)
def test_a_known_bottleneck_is_named(
    runs: Runs, tmp_path: Path, slow: tuple[str, ...], part: str, names: list[str]
) -> None:
    run = f"advice-{part}"
    for name in ("worker-0", "worker-1", "evaluation", "dataset-0", "dataset-1"):
        (tmp_path / name).write_text(str(int(SLOW * 1e6)) if name in slow else "0")
    process = runs.local("paced:Paced", run, 10_000_000, *OPTIONS, PACE=str(tmp_path))
    status = runs.directory(run) / "status.json"

    def both_train() -> bool:
        workers = (read_record(status) or {}).get("workers", {})
        return len(workers) == 2 and all(each["steps"] > 5 for each in workers.values())

    until(both_train, "steps of both workers", say=lambda: process.output[-6000:])
    first = look(runs, run, process)
    time.sleep(SECONDS)
    found = advise(first, look(runs, run, process))
    assert (found[0].part, found[0].names) == (part, names), found
