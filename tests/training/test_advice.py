"""What `fab advise` says of trainings whose bottleneck is known, on real processes: a slow worker, input or ps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from processes import Process, Runs, until

from fleet.advice import Finding, Host, Look, advise
from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
OPTIONS = ["--steps-per-execution", "1", "--no-evaluator", "--log-seconds", "0.5"]
SECONDS = 15.0
SLOW = 0.2


def look(runs: Runs, run: str, process: Process, tasks: tuple[str, ...]) -> Look:
    """Look at local processes as `fab advise` looks at hosts, each on a host of its own."""
    record = read_record(runs.directory(run) / "status.json") or {}
    used = {task: spent(process.pids(task)[-1]) for task in tasks}
    hosts = {task: Host(os.cpu_count() or 1, seconds, 0.0, 0.0, 0.0) for task, seconds in used.items()}
    steps = {task: int(each["steps"]) for task, each in record["workers"].items()}
    return Look(record["updated"], steps, used, hosts, {task: task for task in tasks})


def spent(pid: int) -> float:
    """Return a process's seconds on a processor, and those for which other work kept it from one."""
    threads = [path.read_text(encoding="ascii").split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return sum(int(ran) + int(waited) for ran, waited, _ in threads) / 1e9 + sum(
        spent(int(child)) for child in children
    )


def measure(runs: Runs, run: str, process: Process, tasks: tuple[str, ...], most: int) -> list[Finding]:
    """Let both workers train, look twice, and return what is advised."""
    status = runs.directory(run) / "status.json"

    def both_train() -> bool:
        workers = (read_record(status) or {}).get("workers", {})
        return len(workers) == 2 and all(each["steps"] >= most for each in workers.values())

    until(both_train, "steps of both workers", say=lambda: process.output[-6000:])
    first = look(runs, run, process, tasks)
    time.sleep(SECONDS)
    found = advise(first, look(runs, run, process, tasks))
    assert found
    return found


@pytest.mark.parametrize(
    ("slow", "part", "names"),
    [(("worker-1",), "worker", ["worker-1"]), (("worker-0", "worker-1"), "input", [])],
)
def test_a_slow_worker_or_input_is_named(
    runs: Runs, tmp_path: Path, slow: tuple[str, ...], part: str, names: list[str]
) -> None:
    for name in ("worker-0", "worker-1", "evaluation", "dataset-0", "dataset-1"):
        (tmp_path / name).write_text(str(int(SLOW * 1e6)) if name in slow else "0")
    process = runs.local("paced:Paced", f"advice-{part}", 10_000_000, *OPTIONS, PACE=str(tmp_path))
    found = measure(runs, f"advice-{part}", process, ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1"), 6)
    assert (found[0].part, found[0].names) == (part, names), found


def test_a_ps_that_can_not_keep_up_is_named(runs: Runs) -> None:
    process = runs.local("heavy:Heavy", "advice-ps", 10_000_000, *OPTIONS, "--ps", "1")
    found = measure(runs, "advice-ps", process, ("chief-0", "ps-0", "worker-0", "worker-1"), 2)
    assert (found[0].part, found[0].names) == ("ps", ["ps-0"]), found
