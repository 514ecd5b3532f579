"""Members die and freeze in the middle of updates: no half of one is left, and no mutex is kept by the dead."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from processes import MINUTE, Process, Runs, is_alive, kill, until

from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(900)
CALL = 5
OPTIONS = (
    f"--steps-per-execution {CALL} --checkpoint-seconds 2 --checkpoints-kept 1000 --log-seconds 0.2 --evaluation none"
    " --export false --heartbeat-timeout-seconds 3"
).split()
ENDLESS = 1_000_000
GOES_ON = 1.5 * MINUTE  # detection, a worker's import of TensorFlow, and a busy machine


class Training:
    """A training of `whole:Updates` that faults fall upon."""

    def __init__(self, runs: Runs, run: str, *more: str, program: str = "whole:Updates") -> None:
        self._directory = runs.directory(run)
        self.process: Process = runs.local(program, run, ENDLESS, *OPTIONS, *more)
        self.trains_on(3 * MINUTE)

    @property
    def step(self) -> int:
        return (read_record(self._directory / "status.json") or {}).get("step") or 0

    def trains_on(self, deadline: float = GOES_ON, steps: int = 4 * CALL) -> float:
        """Wait until it has trained more than it had when this was called; returns for how long, s."""
        began, step = time.monotonic(), self.step
        until(lambda: self.step >= step + steps, f"step {step + steps}", deadline, lambda: self.process.output[-6000:])
        return time.monotonic() - began

    def pid(self, task: str) -> int:
        return until(lambda: [one for one in self.process.pids(task)[-1:] if is_alive(one)], f"a living {task}")[0]

    def kill(self, task: str, number: int = signal.SIGKILL) -> None:
        """Send a signal at some moment: as updates take most of the time, it falls into some."""
        time.sleep(random.uniform(0, 0.5))
        kill(self.pid(task), number)

    def cut_off(self, worker: str) -> int:
        """Return how often it was cut off."""
        return len(re.findall(rf"{worker} \S+ has not answered for \d+ s: cut off", self.process.output))

    def is_back(self, worker: str, pid: int) -> None:
        """Wait until the worker that followed this process is taken in again."""
        until(lambda: self.process.pids(worker)[-1] != pid, f"another process of {worker}", GOES_ON)
        again = rf"^{worker} *\| started, pid {self.pid(worker)}$[\s\S]*TensorFlow has taken in [^\n]*{worker}"
        self.process.search(again, GOES_ON)

    def ends(self) -> None:
        """Stop it, which saves what it has when all calls have ended."""
        self.process.send(signal.SIGTERM)
        assert self.process.wait() == 143, self.process.output[-6000:]

    @property
    def checkpoints(self) -> list[Path]:
        found = [path.with_suffix("") for path in (self._directory / "checkpoints").glob("ckpt-*.index")]
        return sorted(found, key=lambda path: int(path.name.removeprefix("ckpt-")))


def updates_in(checkpoint: Path) -> dict[str, list[float]]:
    """Return the numbers that stand in each shard of a table with its slots: after whole updates that is one.

    The table is one tensor in a checkpoint. The optimizer's dict of slots has an entry for each shard.
    """
    reader = tf.train.load_checkpoint(str(checkpoint))
    found: dict[str, set[float]] = {}
    for name in reader.get_variable_to_shape_map():
        if table := re.search("first|second", name):
            part, tensor = re.search(r"part_(\d)", name), reader.get_tensor(name)
            for shard, rows in [(int(part[1]), tensor)] if part else enumerate(np.split(tensor, 2)):
                found.setdefault(f"{table[0]}/{shard}", set()).update(map(float, np.unique(rows)))
    return {name: sorted(numbers) for name, numbers in found.items()}


def check(training: Training, faults: int) -> None:
    """Assert that checkpoints have whole updates alone, and that no more are done twice than the dead had begun."""
    torn = {}
    for checkpoint in training.checkpoints:
        found = updates_in(checkpoint)
        assert len(found) == 4
        torn |= {f"{checkpoint.name} {name}": numbers for name, numbers in found.items() if len(numbers) > 1}
    assert torn == {}
    step = int(training.checkpoints[-1].name.removeprefix("ckpt-"))
    for [number] in found.values():
        assert step <= number <= step + 2 * CALL * faults


def kill_worker(training: Training) -> None:
    pid = training.pid("worker-1")
    training.kill("worker-1")
    training.trains_on()
    training.is_back("worker-1", pid)


def freeze_shortly(training: Training) -> None:
    """Freeze a worker for less than the detection takes: its calls go on."""
    training.kill("worker-0", signal.SIGSTOP)
    time.sleep(1)
    training.kill("worker-0", signal.SIGCONT)
    training.trains_on()


def freeze_until_cut_off(training: Training) -> None:
    pid, times = training.pid("worker-0"), training.cut_off("worker-0")
    training.kill("worker-0", signal.SIGSTOP)
    until(lambda: training.cut_off("worker-0") > times, "worker-0 is cut off", GOES_ON)
    training.trains_on()
    kill(pid, signal.SIGCONT)
    training.is_back("worker-0", pid)


def kill_coordinator(training: Training) -> None:
    pid = training.pid("chief-0")
    training.kill("chief-0")
    until(lambda: training.process.pids("chief-0")[-1] != pid, "another coordinator", GOES_ON)
    training.trains_on()


@pytest.mark.parametrize("fault", [kill_worker, pytest.param(kill_coordinator, marks=pytest.mark.matrix)])
def test_no_half_of_an_update_is_left_by_one_that_dies(runs: Runs, fault: Callable[[Training], None]) -> None:
    training = Training(runs, f"whole-{fault.__name__}")
    fault(training)
    training.ends()
    check(training, 1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "more",
    [(), ("--api", "fit"), ("--partitioner", "none"), ("--workers", "4")],
    ids=["custom", "fit", "whole", "four_workers"],
)
def test_no_half_of_an_update_is_left_by_many_faults(runs: Runs, more: tuple[str, ...]) -> None:
    training = Training(runs, f"whole-{'-'.join(more)}", *more)
    faults = 3 * [kill_worker, freeze_shortly, freeze_until_cut_off, kill_coordinator]
    for fault in faults:
        fault(training)
    training.ends()
    check(training, len(faults))


@pytest.mark.matrix
def test_an_optimizer_whose_slots_fit_on_all_ps_alone_waits_for_a_ps_that_is_away(runs: Runs) -> None:
    training = Training(runs, "whole-every-ps", "--ps-grace-seconds", "3")
    training.process.search(r"saved \S+/ckpt-\d+ in")
    pid = training.pid("ps-1")
    training.kill("ps-1", signal.SIGSTOP)
    training.process.search("it may fit on all ps, and ps-1 is left out", GOES_ON)
    kill(pid, signal.SIGCONT)
    training.trains_on()
    training.ends()
    check(training, 1)
