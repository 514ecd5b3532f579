"""The faults that TensorFlow tests its coordinator for (fault_tolerance_test_base.py in its wheel), from outside.

One training, whose processes are killed again and again; each test takes it as it is, kills, and waits until it trains
again. The last ones let it end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import counts
from processes import MINUTE, Runs, is_alive, kill, until

from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
STEPS = 4_000
CALL = 10
EPOCH = 300
BATCH = 4  # of the program
TASKS = ("chief-0", "worker-0", "worker-1", "ps-0", "ps-1")
OPTIONS = (
    f"--steps-per-execution {CALL} --epoch-steps {EPOCH} --evaluation inline --checkpoint-seconds 1 --log-seconds 0.5"
    " --checkpoints-kept 100 --export false"
).split()
SLOW = 0.1  # a step, s: the training lasts longer than any test
DATASET = 1.5  # the making of a dataset, s
RECOVERED = 1.5 * MINUTE


class Training:
    """A training on two workers and two ps, whose pace the tests set."""

    def __init__(
        self,
        runs: Runs,
        pace: Path,
        *more: str,
        program: str = "paced:Paced",
        run: str = "faults",
        steps: int = STEPS,
    ) -> None:
        self.run = run
        self.steps = steps
        self.killed = 0  # workers, with a call of theirs
        self._runs = runs
        self._pace = pace
        self.pace(SLOW)
        self.pace(DATASET, "dataset-0", "dataset-1")
        self.process = runs.local(program, self.run, steps, *OPTIONS, *more, PACE=str(pace))

    def pace(self, seconds: float, *whom: str) -> None:
        for name in whom or ("worker-0", "worker-1", "evaluation"):
            part = self._pace / f"{name}.part"
            part.write_text(str(int(seconds * 1e6)))
            part.rename(self._pace / name)

    def awaits(self, moment: str) -> None:
        """Wait until a dataset is being made (`making-0`), a step (`step-0`) or an evaluation begins (`evaluating`)."""
        (self._pace / moment).unlink(missing_ok=True)
        self.until((self._pace / moment).exists, moment)

    def idle(self, worker: str) -> bool:
        """Return whether a worker has begun no step for a second."""
        return time.time() - (self._pace / worker.replace("worker", "step")).stat().st_mtime > 1

    def until(self, holds: Any, what: str, deadline: float = RECOVERED) -> Any:
        return until(lambda: holds() or self._ended(), what, deadline, lambda: self.process.output[-6000:])

    def _ended(self) -> None:
        code = self.process.code
        assert code is None, f"the training ended with {code}:\n{self.process.output[-6000:]}"

    def pids(self) -> dict[str, int]:
        """Return each task's newest process."""
        started = {task: self.process.pids(task) for task in TASKS}
        return {task: pids[-1] for task, pids in started.items() if pids}

    def kill(self, *tasks: str) -> dict[str, int]:
        """Kill the tasks' processes at once, after waiting until all have one; returns those that it had."""
        self.until(lambda: all(map(is_alive, self.pids().values())), "a living process of every task")
        before = self.pids()
        for task in tasks:
            kill(before[task])
            self.killed += task.startswith("worker")
        return before

    def serves_again(self, task: str, before: dict[str, int]) -> None:
        """Wait until the task's next process serves."""
        self.starts_again(task, before)
        again = rf"^{task} *\| started, pid {self.pids()[task]}$[\s\S]*^{task} *\| .* serves at"
        self.until(lambda: re.search(again, self.process.output, re.MULTILINE), f"{task} serves again")

    def starts_again(self, task: str, before: dict[str, int]) -> None:
        self.until(lambda: self.pids()[task] != before[task], f"another process of {task}")

    def ends(self) -> None:
        """Let it train as fast as it can, to its end."""
        self.pace(0)
        assert self.process.wait(4 * MINUTE) == 0, self.process.output[-6000:]

    @property
    def step(self) -> int:
        status = read_record(self._runs.directory(self.run) / "status.json")
        return (status or {}).get("step") or 0

    def trains_on(self, steps: int = 2 * CALL) -> None:
        """Wait until it has trained more than it had when this was called."""
        step = self.step
        self.until(lambda: self.step >= step + steps, f"step {step + steps}")

    @property
    def newest(self) -> int:
        """The newest checkpoint that the training has said to be saved."""
        return max((int(step) for step in re.findall(r"saved \S+/ckpt-(\d+)", self.process.output)), default=0)

    def resumed(self) -> list[int]:
        """Return the steps at which it went on, oldest first."""
        return [int(step) for step in re.findall(rf"going on at step (\d+) of {self.steps}", self.process.output)]


@pytest.fixture(scope="module")
def training(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    training = Training(runs, tmp_path_factory.mktemp("pace"))
    yield training
    training.process.end()


def restarted(training: Training, before: dict[str, int]) -> set[str]:
    """Return the tasks whose process is another one than before."""
    return {task for task, pid in training.pids().items() if pid != before[task]}


def test_worker_that_dies_while_its_dataset_is_made(training: Training) -> None:
    training.awaits("making-0")
    before = training.kill("worker-0")
    training.serves_again("worker-0", before)
    training.pace(0, "dataset-0", "dataset-1")
    training.until(lambda: training.step, "the first steps")
    assert restarted(training, before) == {"worker-0"}


def test_worker_that_dies_between_calls(training: Training) -> None:
    training.pace(0.03, "worker-0", "worker-1")
    training.pace(2, "evaluation")
    training.awaits("evaluating")
    before = training.kill("worker-0")
    training.pace(SLOW)
    training.trains_on()
    training.serves_again("worker-0", before)
    training.trains_on()
    assert restarted(training, before) == {"worker-0"}


def test_all_workers_gone_for_a_while(training: Training) -> None:
    training.trains_on()
    before = training.kill("worker-0", "worker-1")
    for worker in ("worker-0", "worker-1"):
        training.starts_again(worker, before)
    again = training.kill("worker-0", "worker-1")  # before they serve: they are gone for longer
    gone = training.step
    for worker in ("worker-0", "worker-1"):
        training.serves_again(worker, again)
    training.until(lambda: training.step > gone, "steps")
    assert restarted(training, before) == {"worker-0", "worker-1"}


def test_worker_that_dies_before_its_results_are_fetched(training: Training) -> None:
    # Then worker 1 has done all that is left of the epoch while worker 0 does one step.
    training.pace(0, "worker-0", "worker-1")
    training.trains_on(50 * CALL)
    training.pace(4, "worker-0")
    training.until(lambda: training.idle("worker-0") and training.idle("worker-1"), "an idle worker")
    before = training.kill("worker-1")
    training.pace(SLOW)
    training.trains_on()
    training.serves_again("worker-1", before)
    training.awaits("step-1")
    assert restarted(training, before) == {"worker-1"}


def test_numbers_are_read_from_the_ps_while_a_worker_comes_back(training: Training) -> None:
    training.pace(0.02, "worker-0", "worker-1")  # the step is read each 0.2 s
    training.trains_on()
    before = training.kill("worker-0")
    training.serves_again("worker-0", before)
    training.trains_on()
    training.pace(SLOW)
    assert restarted(training, before) == {"worker-0"}


def test_ps_that_dies_while_a_worker_comes_back(training: Training) -> None:
    training.trains_on()

    def fault(*tasks: str) -> dict[str, int]:
        before = training.kill("worker-0")
        training.starts_again("worker-0", before)
        kill(before["ps-0"])
        return before

    goes_back(training, fault, "ps-0", "worker-0")


def goes_back(training: Training, fault: Callable[..., dict[str, int]], *tasks: str) -> dict[str, int]:
    """Cause the fault and assert that the training goes on at a checkpoint; returns the processes before.

    A coordinator that can't fix it in its process ends; no other member restarts.
    """
    newest, resumed = training.newest, len(training.resumed())
    assert newest
    before = fault(*tasks)
    for task in tasks:
        training.serves_again(task, before)
    training.until(lambda: len(training.resumed()) > resumed, "the restore")
    training.trains_on()
    assert min(training.resumed()[resumed:]) >= newest
    allowed = {*tasks, "chief-0"} if "chief-0" in restarted(training, before) else set(tasks)
    assert set(tasks) <= restarted(training, before) <= allowed
    return before


def test_ends_with_every_step_done_at_least_once(training: Training, runs: Runs) -> None:
    training.ends()
    status = runs.status(training.run)
    assert status["state"] == "finished"
    assert status["step"] >= STEPS
    # A call that died with its worker counts nothing, but its steps may have been done: they are done again.
    done = counts(runs, training.run).sum() / BATCH
    assert status["step"] <= done <= status["step"] + training.killed * CALL


def test_steps_never_go_back_beyond_the_newest_checkpoint(training: Training) -> None:
    training.ends()
    pattern = rf"saved \S+/ckpt-(?P<saved>\d+)|going on at step (?P<resumed>\d+)|\d step (?P<trained>\d+) of {STEPS},"
    reached = saved = 0
    for match in re.finditer(pattern, training.process.output):
        step = int(match[match.lastgroup])
        if match.lastgroup == "saved":
            saved = max(saved, step)
        else:
            assert step >= (saved if match.lastgroup == "resumed" else reached), match[0]
            reached = step
    assert reached >= STEPS
