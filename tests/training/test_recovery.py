"""Members that die, freeze and come back: what restarts, what does not, and where the training goes on."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from processes import DIGITS, MINUTE, Process, Runs, kill, until

from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
STEPS = 3000
ENDLESS = 1_000_000
# A step takes 10 ms, and a checkpoint is due every second or so.
OPTIONS = (
    "--steps-per-execution", "20", "--checkpoint-steps", "200", "--checkpoints-kept", "30", "--log-seconds", "0.5",
    "--export", "false",
)  # fmt: skip


def start(runs: Runs, run: str, *more: str, steps: int = STEPS) -> Process:
    """Start a run and return it when it has a checkpoint."""
    process = runs.local("ids:Ids", run, steps, *OPTIONS, *more, "--no-evaluator")
    process.search(r"saved \S+/ckpt-\d+ in")
    return process


def stop(process: Process) -> None:
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output


def events(runs: Runs, run: str, name: str = "") -> list[dict[str, Any]]:
    path = runs.directory(run) / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if name in ("", event["event"])]


def starts(process: Process) -> dict[str, int]:
    """Return how often each task was started."""
    return {task: len(process.pids(task)) for task in ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1")}


def test_only_what_a_lost_ps_had_goes_back_where_that_is_asked_for(runs: Runs) -> None:
    run, dies, name, other = "lost-ps-0", "ps-0", "right", "left"
    saves = ("--checkpoint-seconds", "0", "--checkpoint-steps", "600", "--steps-per-execution", "10")
    options = (*saves, "--log-seconds", "0.2", "--ps-recovery", "lost", "--no-evaluator", "--export", "false")
    process = runs.local("both:Both", run, ENDLESS, *options)
    process.search(r"saved \S+/ckpt-\d+ in")
    saved = runs.checkpoints(run)[-1]
    until(lambda: step_of(runs, run) > saved + 200, "steps after the save", say=lambda: process.output)
    kill(process.pids(dies)[0])
    process.search(r"only what lost ps had is of the checkpoint")
    (attached,) = until(lambda: events(runs, run, "attached"), "the event", say=lambda: process.output)
    step, old = map(int, re.fullmatch(rf"step (\d+); {dies} of step (\d+)", attached["message"]).groups())
    assert old == saved
    process.search(r"only what lost ps had[\s\S]* steps/s")
    stop(process)
    end = runs.checkpoints(run)[-1]
    reader = tf.train.load_checkpoint(str(runs.directory(run) / f"checkpoints/ckpt-{end}"))
    (kept,), (back,) = ([reader.get_tensor(key) for key in keys_of(reader, each)] for each in (other, name))
    # Calls of two workers that were in flight at the save or at the death.
    in_flight = 2 * 2 * 10
    assert step > saved + 200 - in_flight
    assert abs(kept - end) <= in_flight, (kept, back, step, old, end)
    assert abs(back - (old + end - step)) <= in_flight, (kept, back, step, old, end)


def test_where_all_ps_are_lost_all_goes_back(runs: Runs) -> None:
    options = ("--ps", "1", "--ps-recovery", "lost", "--checkpoint-seconds", "1", "--no-evaluator", "--export", "false")
    process = runs.local("both:Both", "lost-all", ENDLESS, *options)
    process.search(r"saved \S+/ckpt-\d+ in")
    kill(process.pids("ps-0")[0])
    process.search(r"forming the cluster again[\s\S]*going on at step [\s\S]*saved \S+/ckpt-\d+ in")
    assert [event["event"] for event in events(runs, "lost-all") if event["event"] in ("attached", "failed")] == []
    stop(process)


@pytest.mark.matrix
def test_a_model_whose_ps_are_lost_one_by_one_learns_as_well(runs: Runs, digits: Process) -> None:
    """`digits` is the same training without a fault."""
    run = "lost-digits"
    settings = ["--set", "learning_rate=0.002", "--set", "dropout=0.4", "--seed", "1"]
    options = [*settings, "--checkpoint-seconds", "2", "--log-seconds", "0.2", "--ps-recovery", "lost"]
    process = runs.local(DIGITS, run, 6000, *options)
    for dies, step in (("ps-1", 1500), ("ps-0", 3500)):
        until(lambda step=step: step_of(runs, run) > step, f"step {step}", say=lambda: process.output)
        kill(process.pids(dies)[-1])
        process.search(rf"only what lost ps had[\s\S]*{'only what lost ps had' if dies == 'ps-0' else ''}")
    assert process.wait(4 * MINUTE) == 0, process.output
    assert len(events(runs, run, "attached")) == 2
    accuracy = [
        read_record(runs.directory(each) / "evaluation.json")["metrics"]["accuracy"] for each in (run, "digits")
    ]
    assert accuracy[0] > accuracy[1] - 0.03, accuracy


def step_of(runs: Runs, run: str) -> int:
    path = runs.directory(run) / "status.json"
    return (json.loads(path.read_text())["step"] or 0) if path.exists() else 0


def keys_of(reader: Any, name: str) -> list[str]:
    return [key for key in reader.get_variable_to_shape_map() if f"/{name}/" in key]


def test_a_stop_does_not_wait_for_workers_that_are_gone(runs: Runs) -> None:
    process = start(runs, "stop-without-workers", steps=ENDLESS)
    frozen = [process.pids(f"worker-{index}")[0] for index in range(2)]
    for pid in frozen:
        kill(pid, signal.SIGSTOP)
    time.sleep(1)  # by then calls that they do not end are in flight
    try:
        process.send(signal.SIGTERM)
        process.search("no worker is present to end the calls in flight: saving without it", MINUTE / 2)
        assert process.wait() == 143, process.output
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGCONT)
    assert runs.status("stop-without-workers")["state"] == "stopped"


def test_a_phase_that_hangs_ends_in_a_clear_error(runs: Runs) -> None:
    options = ["--compiling-timeout-seconds", "1", "--max-restarts-without-step", "1", "--no-evaluator"]
    process = runs.local("stuck:Stuck", "stuck", 100, *options)
    assert process.wait() == 78, process.output
    assert re.search(r"compiling has lasted \d+ s without an end, and compiling_timeout_seconds is 1", process.output)
    assert len(process.pids("chief-0")) == 3
    status = runs.status("stuck")
    assert status["state"] == "failed"
    assert "max_restarts_without_step is 1" in status["message"]


def test_a_part_that_ends_once_is_a_fault_s_and_twice_is_empty(runs: Runs, tmp_path: Path) -> None:
    """A fault that breaks off a call can't be had at will: the program does what it leaves behind."""
    ending = tmp_path / "ending"
    options = [*OPTIONS, "--no-evaluator"]
    process = runs.local("ending:Ending", "ending", ENDLESS, *options, ENDING=str(ending))
    process.search(r"saved \S+/ckpt-\d+ in")
    ending.touch()
    process.search("forming the cluster again in this process: a worker's data ended in the middle of a call")
    ending.unlink()
    process.search(r"going on at step")
    step = runs.checkpoints("ending")[-1]
    until(lambda: runs.checkpoints("ending")[-1] > step, "a newer checkpoint", say=lambda: process.output)
    assert starts(process) == dict.fromkeys(starts(process), 1)
    ending.touch()
    assert process.wait() == 78, process.output
    assert len(process.pids("chief-0")) == 1
    assert "a worker's part of the training data is empty: 2 workers share it" in runs.status("ending")["message"]
