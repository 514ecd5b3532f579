"""What real ps hold after many workers' updates is what some order of whole updates gives, bit by bit."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
from processes import MINUTE, Process, Runs, is_alive, kill, until

# In a gate test_atomic_updates.py says it in one process, and test_atomic_faults.py with real ones and a fault.
pytestmark = [pytest.mark.timeout(900), pytest.mark.matrix]
STEPS = 1500
OPTIONS = f"--steps-per-execution 5 --log-seconds 0.5 --evaluation none --export false --seed {STEPS}".split()
CASES = (
    *("Adam", "Nadam", "RMSprop, centered, momentum", "SGD, momentum", "Adagrad", "Ftrl", "Adamax", "AdamW"),
    *("Adam, amsgrad", "Adam, EMA", "Adam, weight decay", "Adam, clipnorm", "legacy.Adam", "legacy.Nadam"),
)
# With `lazy_optimizers`, by which each of them changes rows alone.
LAZY = (
    *("SGD", "SGD, momentum", "Adagrad", "Adadelta", "Adam", "Adam, amsgrad", "AdamW", "Adamax", "Ftrl", "Lion"),
    *("Nadam", "RMSprop", "RMSprop, centered, momentum", "Adam, EMA", "Adam, weight decay", "Adam, clipnorm"),
)


def killed(process: Process, worker: str) -> bool:
    """Kill a worker, and wait for the next one and more steps, or for the run's end; returns whether it lived.

    A call that ends three workers, one after the other, would end the run.
    """
    pids = process.pids(worker)
    if not is_alive(pids[-1]):
        return False
    kill(pids[-1])
    until(lambda: process.code is not None or len(process.pids(worker)) > len(pids), f"another {worker}")
    lines = process.output.count("steps/s")
    until(lambda: process.code is not None or process.output.count("steps/s") > lines + 1, "more steps", 3 * MINUTE)
    return True


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_training_replayed_gives_what_the_ps_hold(runs: Runs, case: str, workers: int) -> None:
    check_replay(runs, "replayed:Replayed", case, workers)


@pytest.mark.parametrize("program", ["replayed:Replayed", "replayed3:Replayed3"])
@pytest.mark.parametrize("case", LAZY)
def test_a_training_with_lazy_optimizers_replayed_gives_what_the_ps_hold(runs: Runs, case: str, program: str) -> None:
    """On two ps, with two workers; of Keras 3 where no split table is refused with it."""
    if program.endswith("3") and case.endswith("clipnorm"):
        pytest.skip("Keras 3 would clip each part of a split table by itself")
    check_replay(runs, program, case, 2, "--lazy-optimizers", "true", "--ps", "2", "--partitioner-min-bytes", "1024")


def check_replay(runs: Runs, program: str, case: str, workers: int, *more: str) -> None:
    """Train while workers are killed, and compare what the ps hold with the same updates done one by one."""
    run = re.sub(r"\W+", "-", f"replay-{program}-{case}-{workers}-{len(more)}")
    process = runs.local(program, run, STEPS, *OPTIONS, "--workers", str(workers), "--set", f"case={case}", *more)
    deaths = 0
    process.search(r"steps/s", 3 * MINUTE)
    while process.code is None and deaths < 3:
        deaths += killed(process, f"worker-{random.randrange(workers)}")
        time.sleep(random.uniform(0.5, 1.5))
    assert process.wait(6 * MINUTE) == 0, process.output[-6000:]
    answer = json.loads(re.findall(r'\{"updates":.*\}', process.output)[-1])
    assert answer["differing"] == {}
    # A step updates the table, which may have two parts, the score's weights and its bias; Nadam a number of its own.
    acts = (4 if more else 3) + (case == "Nadam")
    assert acts * STEPS <= answer["updates"] <= acts * (STEPS + 5 * deaths)
    assert deaths
