"""What `fab render slurm` prints, run by Slurm: to the end, and over a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.render import RenderedCluster, slurm

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
TASKS = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}


def submit(cluster, steps: int, *options: str) -> str:  # type: ignore[no-untyped-def]
    settings = {
        "program": "trainer.examples.digits:Digits",
        "run": "batch",
        "steps": steps,
        "checkpoint_steps": 100,
        "shared_dir": str(cluster.directory / "shared"),
    }
    (cluster.directory / "shared").mkdir()
    script = cluster.directory / "batch.sh"
    script.write_text(slurm.render(RenderedCluster("psfleet", TASKS, {}, settings), sys.executable))
    output = cluster.call("sbatch", "--parsable", f"--export=ALL,PYTHONPATH={ROOT}", *options, str(script))
    return str(output).strip()


def status(cluster) -> dict[str, object]:  # type: ignore[no-untyped-def]
    found: dict[str, object] = json.loads((cluster.directory / "shared/runs/batch/status.json").read_text())
    return found


def test_a_run_is_trained_to_its_end(slurm) -> None:  # type: ignore[no-untyped-def]
    job = submit(slurm, 300)
    assert slurm.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}, 400) == "COMPLETED", slurm.output()
    found = status(slurm)
    assert (found["state"], found["step"]) == ("finished", 300)
    workers = found["workers"]
    assert isinstance(workers, dict)
    assert set(workers) == {"worker-0", "worker-1"}
    assert not subprocess.run(["pgrep", "-f", f"{slurm.directory}/shared/slurm-"], capture_output=True).stdout


def test_a_job_at_its_time_limit_saves_and_is_queued_again(slurm) -> None:  # type: ignore[no-untyped-def]
    """Slurm counts in minutes, and waits two more before it runs a job again."""
    job = submit(slurm, 1_000_000, "--time=4")
    slurm.wait(job, {"RUNNING"}, 60)
    until_step(slurm, 100)
    slurm.wait(job, {"PENDING"}, 300)
    saved = status(slurm)
    assert saved["state"] == "stopped"
    step = saved["step"]
    assert isinstance(step, int)
    slurm.wait(job, {"RUNNING"}, 300)
    until_step(slurm, step + 1)
    slurm.call("scancel", job)


def until_step(cluster, step: int) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + 400
    while True:
        try:
            if (found := status(cluster)).get("state") == "training" and int(str(found.get("step") or 0)) >= step:
                return
        except (OSError, ValueError):
            pass
        assert time.monotonic() < until, cluster.output()[-4000:]
        time.sleep(1)
