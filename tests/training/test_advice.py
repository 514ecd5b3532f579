"""What `fab advise` says of trainings whose bottleneck is known, on real processes: a slow worker, input, messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import Runs, until

from bench.ahead import DelayedCluster
from bench.tasks import write_settings
from fleet.advice import Host, Look, advise
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
TASKS = ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1")
OPTIONS = ["--steps-per-execution", "1", "--no-evaluator", "--log-seconds", "0.5"]
SECONDS = 8.0
SLOW = 0.2


def look(status: Path, pids: Mapping[str, int]) -> Look:
    """Look at local processes as `fab advise` looks at hosts; what else this machine does is left out."""
    record = read_record(status) or {}
    used = {task: spent(pid) for task, pid in pids.items()}
    host = Host(os.cpu_count() or 1, sum(used.values()), 0.0, 0.0, 0.0)
    steps = {task: int(each["steps"]) for task, each in record["workers"].items()}
    waits = {task: each["input_wait_seconds"] for task, each in record["workers"].items()}
    return Look(record["updated"], steps, used, {"here": host}, dict.fromkeys(TASKS, "here"), waits)


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

    found = advice(status, lambda: {task: process.pids(task)[-1] for task in TASKS}, lambda: process.output[-6000:])
    assert (found[0].part, found[0].names) == (part, names), found


def test_slow_messages_are_told_from_a_slow_input(tmp_path: Path) -> None:
    """What the tasks send each other comes 20 ms later, in user space."""
    settings = {"steps": 10_000_000, "steps_per_execution": 1, "evaluation": "none", "log_seconds": 0.5}
    write_settings(tmp_path, "advice-late", "bench.programs:Tiny", **settings)
    status = RunDirectory(tmp_path, "advice-late").path / "status.json"
    with DelayedCluster(tmp_path, 20.0).delayed() as cluster:
        chief = cluster.start("chief", 0, settings=str(tmp_path / "advice-late.json"))
        found = advice(status, lambda: {task.name: task.pids[0] for task in cluster.tasks}, chief.output)
    assert found[0].part == "network", found
    assert "waits for its batch for 0% of the time" in found[0].text


def advice(status: Path, pids: Callable[[], Mapping[str, int]], say: Callable[[], str]) -> Any:
    """Return what is advised once both workers have trained for a while."""

    def both_train() -> bool:
        workers = (read_record(status) or {}).get("workers", {})
        return len(workers) == 2 and all(each["steps"] > 5 for each in workers.values())

    until(both_train, "steps of both workers", say=say)
    first = look(status, pids())
    time.sleep(SECONDS)
    return advise(first, look(status, pids()))
