"""`input: service`: a data service reads for those that train, and who is given what, with faults and without."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from typing import Any

import numpy as np
import pytest
from counting import counts
from processes import Process, Runs, run_check, until

pytestmark = pytest.mark.timeout(600)
EXAMPLES = 320
PASS = 80  # steps: 320 examples in batches of 4
SERVICE = (
    *("--input", "service", "--data", "2", "--steps-per-execution", "10", "--log-seconds", "0.5"),
    *("--no-evaluator", "--export", "false"),
)


def start(runs: Runs, run: str, passes: int, sharding: str, *more: str) -> Process:
    return runs.local("served:Served", run, passes * PASS, *SERVICE, "--input-sharding", sharding, *more)


def kill(process: Process, task: str) -> None:
    """Kill a task's process, and wait until there is another."""
    before = process.pids(task)
    os.kill(before[-1], signal.SIGKILL)
    until(lambda: len(process.pids(task)) > len(before), f"another {task}", say=lambda: process.output)


def kill_in_mid_run(process: Process) -> None:
    process.search(r"^chief-0 .* step \d+ of")
    kill(process, "worker-1")
    kill(process, "data-0")
    kill(process, "dispatcher-0")
    process.search(r"^dispatcher-0 .* serves at(.|\n)*^dispatcher-0 .* serves at")


def undisturbed(process: Process) -> bool:
    """Return whether those that train have gone on in the generation that they began with."""
    others = all(len(process.pids(task)) == 1 for task in ("chief-0", "worker-0", "ps-0", "ps-1"))
    return others and process.output.count("variables: ") == 1


def test_dynamic_gives_each_example_once_a_pass(runs: Runs) -> None:
    process = start(runs, "dynamic", 1, "dynamic")
    assert process.wait() == 0, process.output
    seen = counts(runs, "dynamic")[0]
    assert seen.sum() == EXAMPLES
    # What was read and not yet given at the last step is missing, and what the next pass has of it is there.
    assert np.mean(seen == 1) > 0.8, seen
    assert seen.max() <= 2, seen
    journal = runs.shared / "data-service" / "journal"
    assert len(list((journal / "datasets").iterdir())) == 2  # what is read, and its first element


def test_dynamic_repeats_nothing_when_the_data_service_and_a_worker_die(runs: Runs) -> None:
    process = start(runs, "dynamic-faults", 10, "dynamic")
    kill_in_mid_run(process)
    assert process.wait() == 0, process.output
    assert undisturbed(process), process.output
    seen = counts(runs, "dynamic-faults")[0]
    # The killed data worker's files are lost for that pass, and what it and the killed worker had ahead.
    assert seen.max() <= 11, seen
    assert seen.min() >= 7, seen


@pytest.mark.matrix
def test_off_has_each_data_worker_read_everything_and_begin_again_after_a_fault(runs: Runs) -> None:
    process = start(runs, "off", 10, "off")
    kill_in_mid_run(process)
    assert process.wait() == 0, process.output
    assert undisturbed(process), process.output
    seen = counts(runs, "off")[0]
    assert seen.min() >= 8, seen
    # The head is read once more by the data worker that came back.
    assert np.median(seen[:10]) > np.median(seen[-10:]), seen


@pytest.mark.matrix
def test_a_lost_journal_costs_a_generation(runs: Runs) -> None:
    process = start(runs, "lost", 10, "dynamic")
    process.search(r"^chief-0 .* step \d+ of")
    shutil.rmtree(runs.shared / "data-service" / "journal")
    kill(process, "dispatcher-0")
    assert process.wait() == 0, process.output
    assert process.output.count("restarting: the dispatcher has begun another journal") == 2
    assert len(process.pids("worker-0")) == len(process.pids("ps-0")) == 1
    seen = counts(runs, "lost")[0]
    assert 7 <= seen.min() <= seen.max() <= 13, seen


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("--strategy", "one_device"), id="one_device"),
        pytest.param(("--in-process",), id="in_process", marks=pytest.mark.matrix),
    ],
)
def test_one_process_is_served_too(runs: Runs, how: tuple[str, ...]) -> None:
    run = how[-1].strip("-").replace("-", "_")
    process = runs.local("served:Served", run, PASS, *SERVICE, "--input-sharding", "dynamic", *how)
    assert process.wait() == 0, process.output
    seen = counts(runs, run)[0]
    assert np.mean(seen == 1) > 0.8, seen


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("one_device", marks=pytest.mark.matrix)])
def test_python_does_not_travel(runs: Runs, strategy: str) -> None:
    more = ("--input-sharding", "off", "--strategy", strategy)
    process = runs.local("served:Python", f"python-{strategy}", PASS, *SERVICE, *more)
    assert process.wait() == 78, process.output
    assert "Python.train_dataset has Python in its pipeline" in process.output


@pytest.fixture(scope="module")
def found() -> Any:
    return run_check("service_check.py", deadline=500)


STRATEGIES = pytest.mark.parametrize("strategy", ["parameter_server", "one_device"])


@STRATEGIES
def test_a_seed_gives_the_same_order_to_the_same_run_and_another_when_it_goes_on(found: Any, strategy: str) -> None:
    first, second = found[strategy]["seeded"]
    assert first == second
    for read in (first, found[strategy]["unseeded"]):
        before, after = read[:16], read[16:]
        assert before != after
        assert sorted(itertools.chain(*before)) == sorted(itertools.chain(*after)) == list(range(64))


def test_a_seed_has_all_data_workers_read_in_one_order(found: Any) -> None:
    batches = {seed: {tuple(batch) for batch in found["two"][seed]} for seed in ("0", "None")}
    assert len(batches["None"]) == 32
    assert len(batches["0"]) < 32


def test_a_training_in_one_process_begins_one_reading_at_each_start(found: Any) -> None:
    assert found["readings"] == 2


@STRATEGIES
def test_data_without_any_example_end_a_dynamic_run(found: Any, strategy: str) -> None:
    ends = found[strategy]["ends"]
    assert "training data is empty" in ends["Counted"]
    assert "training data is empty" in ends["Filtered"]
    assert ends["Some"] == "trained 2"
