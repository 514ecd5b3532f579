"""Workers at different paces: a slow one holds up no other, and the steps are met exactly all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from counting import counts
from processes import Process, Runs, until

from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
STEPS = 700
BATCH = 4  # of the program
OPTIONS = ["--steps-per-execution", "1", "--no-evaluator", "--checkpoint-seconds", "1", "--log-seconds", "0.5"]


def status(runs: Runs, run: str) -> dict[str, Any]:
    return read_record(runs.directory(run) / "status.json") or {}


def until_step(runs: Runs, run: str, step: int, process: Process) -> None:
    until(lambda: (status(runs, run).get("step") or 0) >= step, f"step {step}", say=lambda: process.output[-6000:])


def test_a_worker_in_one_long_step_holds_up_nobody_and_the_steps_are_met_exactly(runs: Runs, tmp_path: Path) -> None:
    run = "uneven"
    for name in ("worker-0", "worker-1", "evaluation", "dataset-0", "dataset-1"):
        (tmp_path / name).write_text("2000" if name == "worker-1" else "0")
    process = runs.local("paced:Paced", run, STEPS, *OPTIONS, PACE=str(tmp_path))
    until_step(runs, run, 20, process)
    hold, begun = tmp_path / "hold-0", tmp_path / "step-0"
    hold.touch()
    until_step(runs, run, status(runs, run)["step"] + 50, process)  # a step that found no hold has ended
    since = begun.stat().st_mtime_ns
    # More than the calls that are queued for it; logged and saved meanwhile.
    held_at = status(runs, run)["step"]
    until_step(runs, run, held_at + 150, process)
    until(lambda: runs.checkpoints(run)[-1:] > [held_at + 150], "a checkpoint", say=lambda: process.output[-6000:])
    assert begun.stat().st_mtime_ns == since
    hold.unlink()
    assert process.wait() == 0, process.output[-6000:]
    seen = counts(runs, run)
    assert seen.sum() == STEPS * BATCH
    assert seen[1].sum() > seen[0].sum() > 0
    assert runs.status(run)["step"] == STEPS
    assert runs.checkpoints(run)[-1] == STEPS
