"""Stops, crashes and returns: the coordinator goes on where it was, and a lost worker stops nothing."""

from __future__ import annotations

import json
import re
import signal

import pytest
from counting import counts, own_parts
from processes import Process, Runs, is_alive, kill, until

pytestmark = pytest.mark.timeout(300)
STEPS = 1600
CALL_STEPS, BATCH = 20, 4
# Small calls, so that there is much to interrupt; the input's sleep makes a step 10 ms.
OPTIONS = (
    "--steps-per-execution",
    str(CALL_STEPS),
    "--checkpoint-steps",
    "200",
    "--checkpoints-kept",
    "30",
    "--log-seconds",
    "0.5",
    "--input-position",
    "exact",
    "--export",
    "false",
)
CALLS_IN_FLIGHT = 2  # of each worker, at most


def trained_steps(process: Process) -> list[int]:
    return trained_steps_in(process.output)


def trained_steps_in(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"step (\d+) of \d+, \S+ steps/s", output)]


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> tuple[Process, dict]:
    """A run that was stopped by SIGTERM in the middle."""
    process = runs.local("ids:Ids", "stops", STEPS, *OPTIONS, "--no-evaluator")
    until(lambda: runs.checkpoints("stops"), "a checkpoint", say=lambda: process.output)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    return process, runs.status("stops")


@pytest.fixture(scope="module")
def resumed(runs: Runs, stopped: tuple[Process, dict]) -> tuple[Process, float, int]:
    """The same run, started again; its coordinator is killed, and later a worker; it ends by itself.

    Returns how many examples the killed worker had seen when it was back, too, and the step that the run's state named
    while it trained.
    """
    process = runs.local("ids:Ids", "stops", STEPS, *OPTIONS, "--no-evaluator")
    process.search(r"chief-0 .* saved \S+/ckpt-\d+ in")
    state = json.loads((runs.directory("stops") / "state.json").read_text())
    kill(process.pids("chief-0")[0])
    process.search("chief-0 .* ended with 137; starting it again")
    killed_at = runs.checkpoints("stops")[-1]
    until(lambda: runs.checkpoints("stops")[-1] > killed_at, "a newer checkpoint", say=lambda: process.output)
    kill(process.pids("worker-0")[0])
    process.search(r"(worker-0 +\| \S+ worker-0 serves at[\s\S]*){2}")
    seen = float(counts(runs, "stops")[0].sum())
    assert process.wait() == 0, process.output
    return process, seen, state["step"]


def test_sigterm_saves_the_step_it_stopped_at(runs: Runs, stopped: tuple[Process, dict]) -> None:
    process, status = stopped
    assert status["state"] == "stopped"
    assert 200 <= status["step"] < STEPS
    assert status["checkpoint"].endswith(f"/ckpt-{status['step']}")
    assert status["step"] in runs.checkpoints("stops")
    assert not any(is_alive(pid) for task in ("chief-0", "worker-0", "ps-0") for pid in process.pids(task))


def test_resumes_at_the_stopped_step(stopped: tuple[Process, dict], resumed: tuple[Process, float, int]) -> None:
    assert f"going on at step {stopped[1]['step']} of {STEPS}" in resumed[0].output


def test_state_names_the_step_it_resumed_at(stopped: tuple[Process, dict], resumed: tuple[Process, float, int]) -> None:
    assert resumed[2] == stopped[1]["step"]


def test_last_line_counts_what_the_last_process_trained(resumed: tuple[Process, float, int]) -> None:
    *_, begun = re.findall(rf"going on at step (\d+) of {STEPS}", resumed[0].output)
    line = re.search(r"trained to step (\d+); (\d+) steps in ([\d.]+) s \(([\d.]+) steps/s\)", resumed[0].output)
    assert line is not None
    reached, steps = int(line[1]), int(line[2])
    assert (reached, steps) == (STEPS, STEPS - int(begun))
    assert float(line[4]) == pytest.approx(steps / float(line[3]), rel=0.05)


def test_killed_coordinator_goes_on_at_the_step_that_it_reached(resumed: tuple[Process, float, int]) -> None:
    first, second = resumed[0].output.split("chief-0     | ended with 137; starting it again")
    saved = [int(step) for step in re.findall(r"saved \S+/ckpt-(\d+)", first)]
    [attached] = re.findall(r"attached to the variables on the ps, at step (\d+)", second)
    assert int(attached) >= max(saved[-1], *trained_steps_in(first))
    assert "restored" not in second
    assert f"going on at step {attached} of {STEPS}" in second
    steps = trained_steps_in(second)
    assert min(steps) > int(attached)
    assert steps == sorted(steps)


def test_nobody_is_restarted_with_the_coordinator(resumed: tuple[Process, float, int]) -> None:
    assert len(resumed[0].pids("chief-0")) == 2
    assert len(resumed[0].pids("worker-1")) == 1
    assert len(resumed[0].pids("ps-0")) == 1


def test_killed_worker_does_not_stop_the_training(runs: Runs, resumed: tuple[Process, float, int]) -> None:
    assert "worker-0    | ended with 137; starting it again" in resumed[0].output
    assert runs.status("stops")["state"] == "finished"
    assert runs.status("stops")["step"] == STEPS
    assert trained_steps(resumed[0])[-1] == STEPS


def test_worker_that_came_back_reads_its_own_part_again(runs: Runs, resumed: tuple[Process, float, int]) -> None:
    seen = counts(runs, "stops")
    assert seen[0].sum() > resumed[1]
    assert own_parts(seen)


def test_nothing_of_a_part_is_left_out_and_little_read_twice(runs: Runs, resumed: tuple[Process, float, int]) -> None:
    """After a stop, a coordinator's death and a worker's."""
    manifest = json.loads((runs.directory("stops") / "checkpoints" / f"ckpt-{STEPS}.manifest.json").read_text())
    for worker, (passes, _) in enumerate(manifest["input"]["parts"]):
        seen = counts(runs, "stops")[worker, worker::2]
        assert seen.min() >= passes > 0
        deaths = 2
        in_flight = deaths * CALLS_IN_FLIGHT * CALL_STEPS * BATCH
        # A coordinator leaves the position on the ps each second or two; a worker takes at most 100 batches a second.
        not_left = 3 * 100 * BATCH
        assert (seen - passes - 1).clip(min=0).sum() <= in_flight + not_left
