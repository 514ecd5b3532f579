"""One program under every strategy: in step over several processes, or in one."""

from __future__ import annotations

import re
import signal

import pytest
from processes import DIGITS, Process, Runs, kill, run_check, until

pytestmark = pytest.mark.timeout(400)
IN_STEP = ("--strategy", "multi_worker_mirrored", "--checkpoint-seconds", "0", "--no-evaluator", "--log-seconds", "1")
STEPS = 600


@pytest.fixture(scope="module")
def in_step(runs: Runs) -> Process:
    """Three processes in step; one of them is asked to stop, later another is killed; they end by themselves."""
    options = [*IN_STEP, "--api", "fit", "--epoch-steps", "300", "--evaluation", "exact", "--checkpoint-steps", "50"]
    process = runs.local(DIGITS, "members", STEPS, *options, "--steps-per-execution", "5", "--checkpoints-kept", "99")
    until(lambda: 100 in runs.checkpoints("members"), "step 100", say=lambda: process.output)
    kill(process.pids("worker-0")[0], signal.SIGTERM)
    process.search("chief-0 +. ended with 143; starting it again")
    stopped_at = runs.checkpoints("members")[-1]
    until(lambda: runs.checkpoints("members")[-1] > stopped_at, "a newer checkpoint", say=lambda: process.output)
    kill(process.pids("worker-1")[-1])
    assert process.wait() == 0, process.output
    return process


def test_members_in_step_train_to_the_last_step(runs: Runs, in_step: Process) -> None:
    status = runs.status("members")
    assert (status["state"], status["step"]) == ("finished", STEPS)
    assert status["evaluation"]["step"] == STEPS
    assert status["evaluation"]["metrics"]["accuracy"] > 0.95


def test_all_members_stop_when_one_is_asked_to(in_step: Process) -> None:
    steps = re.findall(r"\| \S+ stopped at step (\d+) on request", in_step.output)
    assert len(steps) == 3
    assert len(set(steps)) == 1
    assert all(f"{task:<11} | ended with 143" in in_step.output for task in ("worker-0", "worker-1", "chief-0"))


def test_members_go_on_together_where_they_were(in_step: Process) -> None:
    stopped = int(re.findall(r"stopped at step (\d+) on request", in_step.output)[0])
    steps = [int(step) for step in re.findall(rf"going on at step (\d+) of {STEPS}", in_step.output)]
    assert steps[:3] == [stopped] * 3
    # After the death of one.
    assert len(steps) == 6
    assert len(set(steps[3:])) == 1
    assert steps[3] > stopped


def test_only_the_chief_writes(runs: Runs, in_step: Process) -> None:
    directory = runs.directory("members")
    stopped = int(re.findall(r"stopped at step (\d+) on request", in_step.output)[0])
    assert set(runs.checkpoints("members")) == {*range(50, STEPS + 1, 50), stopped}
    assert len(list((directory / "checkpoints").glob("*.data-*"))) == len(runs.checkpoints("members"))
    records = ("run", "state", "status", "evaluation", "attempts", "export", "lease-3")  # the chief's third process
    assert {path.name for path in directory.iterdir()} == {
        *(f"{name}.json" for name in records),
        *("events.jsonl", "history.jsonl", "evaluations.jsonl", "report.html"),
        *("checkpoints", "events", "export", "tasks"),
    }
    assert {path.name for path in (directory / "tasks").iterdir()} == {"chief-0.jsonl"}


@pytest.mark.parametrize(
    ("strategy", "api"),
    [
        ("one_device", "custom_loop"),
        ("mirrored", "fit"),
        pytest.param("central_storage", "custom_loop", marks=pytest.mark.matrix),
    ],
)
def test_a_strategy_of_one_process_trains(runs: Runs, strategy: str, api: str) -> None:
    more = ("--api", api, "--evaluation", "inline", "--no-evaluator", "--export", "false")
    process = runs.local("table:Table", f"table-{strategy}", 60, "--strategy", strategy, *more)
    assert process.wait() == 0, process.output
    status = runs.status(f"table-{strategy}")
    assert (status["state"], status["step"], status["evaluation"]["step"]) == ("finished", 60, 60)
    assert status["metrics"] == {"own_number": 7.0}


def test_a_run_goes_on_under_another_strategy(runs: Runs) -> None:
    own = ("--no-evaluator", "--export", "false")
    first = runs.local("table:Table", "moves", 40, *own, "--partitioner-min-bytes", "1024")
    assert first.wait() == 0, first.output
    assert len(list(runs.directory("moves").glob("checkpoints/ckpt-40.data-*"))) > 1
    second = runs.local("table:Table", "moves", 60, "--strategy", "mirrored", *own)
    assert second.wait() == 0, second.output
    assert "going on at step 40 of 60" in second.output
    assert "trained to step 60; 20 steps in" in second.output


def test_a_machine_with_several_devices_gives_each_its_batch() -> None:
    # Six numbers, one a replica and two a step: all seen; the last step's were 4 and 5.
    assert run_check("step_runner_check.py") == {"step": 3, "seen": 15.0, "mean": 4.5}
