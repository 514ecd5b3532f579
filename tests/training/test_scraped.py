"""A real training tells Prometheus each metric of the table, and what happened to it."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest
from processes import DIGITS, MINUTE, Process, Runs, until
from prometheus_client.parser import text_string_to_metric_families

from bench.networks import free_ports
from trainer.telemetry.metrics import METRICS

TASKS = ("chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0")  # in the order of their ports


def metrics(port: int) -> dict[tuple[str, ...], float]:
    """Return a task's samples by name and labels besides the run; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answered:
            text = answered.read().decode()
    except OSError:
        return {}
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def scraped(runs: Runs) -> Iterator[tuple[Process, int]]:
    port = free_ports(len(TASKS), 20000)
    more = ["--workers", "2", "--ps", "1", "--evaluator", "--checkpoint-seconds", "2", "--log-seconds", "1"]
    process = runs.local(DIGITS, "scraped", 1_000_000, *more, "--metrics-port", str(port))
    until(lambda: ("psfleet_checkpoint_step",) in metrics(port), "a checkpoint", 4 * MINUTE, lambda: process.output)
    until(lambda: ("psfleet_training_metric", "loss") in metrics(port), "a loss", say=lambda: process.output)
    until(lambda: metrics(port + 4).get(("psfleet_evaluation_step",)), "an evaluation", say=lambda: process.output)
    yield process, port
    process.end()


def test_each_metric_of_the_table_is_told(scraped: tuple[Process, int]) -> None:
    names = {name for number in range(len(TASKS)) for name, *_ in metrics(scraped[1] + number)}
    names = {name for name in METRICS if names & {name, f"{name}_count"}}
    # The time of a restore is known once there was one; GPUs, dynamic tables and files to give out where there are any.
    others = ("psfleet_task_gpu_", "psfleet_table_", "psfleet_input_")
    rare = {name for name in METRICS if name.startswith(others)}
    assert set(METRICS) - names <= {"psfleet_restore_seconds", *rare}


def test_each_task_tells_of_its_process_and_its_release(scraped: tuple[Process, int]) -> None:
    for number, task in enumerate(TASKS):
        found = metrics(scraped[1] + number)
        assert found["process_resident_memory_bytes",] > 2**20, task
        assert found["psfleet_task_restarts_total",] == 0, task
        assert any(name == "psfleet_build_info" for name, *_ in found), task


def test_steps_are_counted_where_they_are_trained(scraped: tuple[Process, int]) -> None:
    found = metrics(scraped[1])
    steps = found["psfleet_steps_total",]
    assert steps > 0
    assert found["psfleet_step_seconds_count",] == steps
    assert found["psfleet_examples_total",] == steps * 32
    by_worker = {key[1:]: value for key, value in found.items() if key[0] == "psfleet_worker_steps_total"}
    assert set(by_worker) == {("worker-0",), ("worker-1",)}
    assert sum(by_worker.values()) == steps


def test_a_worker_that_is_killed_is_seen(scraped: tuple[Process, int]) -> None:
    process, port = scraped
    pid = process.search(r"^worker-0 +\| started, pid (\d+)$")[1]
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: metrics(port + 2).get(("psfleet_task_restarts_total",)) == 1, "the next process tells of the first")
    until(lambda: metrics(port).get(("psfleet_faults_total", "member-lost")), "the fault is counted")
    back = ("psfleet_member_state", "worker-0", "training")
    until(lambda: metrics(port).get(back) == 1, "worker-0 trains again", say=lambda: process.output)
