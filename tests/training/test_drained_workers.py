"""Workers whose hosts are drained: the others read their parts of the data, until they are back."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from counting import counts
from kept_tasks import KeptTasks
from processes import MINUTE, Runs, until

pytestmark = pytest.mark.timeout(400)
EXAMPLES, BATCH = 312, 4  # of the program `three`


class Drains(KeptTasks):
    """A training of processes, and the directory that names those that are drained."""

    def __init__(self, runs: Runs, run: str, workers: int) -> None:
        self._drained = runs.shared / f"{run}-drained"
        self._drained.mkdir()
        super().__init__(runs, run, workers, program="drained:Three", steps_per_execution=5)
        self.chief.search(r"step \d+ of")

    def start(self, task: str, **more: str) -> None:
        super().start(task, DRAINED_TASKS=str(self._drained), **more)

    def drain(self, task: str) -> None:
        (self._drained / task).touch()
        self.processes.pop(task).end()

    def undrain(self, task: str) -> None:
        (self._drained / task).unlink()
        self.start(task)

    def reboot(self, tasks: Sequence[str]) -> None:
        """End tasks at once, and start them again, but for those that are drained: their units stay down."""
        for task in tasks:
            self.processes.pop(task).end()
        for task in tasks:
            self.start(task)

    def each_gives(self, tasks: list[str], steps: int) -> None:
        """Wait until each of these workers has given so many steps more."""
        before = self.given()
        until(
            lambda: all(self.given().get(task, 0) >= before.get(task, 0) + steps for task in tasks),
            f"{steps} steps more of each of {tasks}",
            MINUTE,
            lambda: self.chief.output[-6000:],
        )

    def count(self) -> np.ndarray:
        """Stop, and return which part gave which example how often."""
        self.chief.send(signal.SIGTERM)
        assert self.chief.wait() == 143, self.chief.output
        return counts(self._runs, self.run)[:, :EXAMPLES]


@pytest.fixture
def training(runs: Runs, request: pytest.FixtureRequest) -> Iterator[Drains]:
    drains = Drains(runs, request.node.originalname.replace("_", "-")[:60], **request.param)
    yield drains
    drains.end()


@pytest.mark.parametrize("training", [{"workers": 2}], indirect=True)
def test_the_other_worker_reads_all_once_one_of_two_is_drained(training: Drains) -> None:
    training.drain("worker-1")
    training.chief.search("the data are divided among all workers but worker-1")
    training.each_gives(["worker-0"], 2 * EXAMPLES // BATCH)
    seen = training.count()
    assert seen[0].all()
    assert not seen[1, 0::2].any()
    assert "forming the cluster again" not in training.chief.output


@pytest.mark.parametrize("training", [{"workers": 3}], indirect=True)
def test_the_first_of_three_is_drained_and_comes_back(training: Drains) -> None:
    """The others have halves meanwhile, and thirds again after that: each example is one's."""
    training.drain("worker-0")
    training.chief.search("the data are divided among all workers but worker-0")
    training.each_gives(["worker-1", "worker-2"], EXAMPLES // BATCH)
    training.undrain("worker-0")
    training.chief.search(r"the data are divided among all workers\n")
    training.chief.search("TensorFlow has taken in worker-0")
    training.each_gives(["worker-0", "worker-1", "worker-2"], EXAMPLES // BATCH)
    seen, numbers = training.count(), np.arange(EXAMPLES)
    for part in range(2):
        thirds, halves = numbers % 3 == part, numbers % 2 == part
        assert seen[part, thirds | halves].all()
        assert not seen[part, ~thirds & ~halves].any()
    assert seen[2, numbers % 3 == 2].all()
    assert not seen[2, numbers % 3 != 2].any()
    assert "forming the cluster again" not in training.chief.output


@pytest.mark.parametrize("training", [{"workers": 2}], indirect=True)
def test_a_drain_survives_restarts_of_all_that_runs(training: Drains) -> None:
    """The drained worker is not waited for, whose part the other reads each time; the last one restarts all at once."""
    training.drain("worker-1")
    training.chief.search("the data are divided among all workers but worker-1")
    for tasks in (["ps-0"], ["chief-0"], ["ps-0", "worker-0", "chief-0"]):
        before = training.chief.output.count("going on without worker-1") if "chief-0" not in tasks else 0
        training.reboot(tasks)
        until(
            lambda before=before: training.chief.output.count("going on without worker-1") > before,
            f"a generation without worker-1 after {tasks}",
            MINUTE,
            lambda: training.chief.output[-6000:],
        )
        training.each_gives(["worker-0"], EXAMPLES // BATCH)
    seen = training.count()
    assert seen[0].all()
    training.undrain("worker-1")
    training.start("chief-0")
    training.chief.search("all 3 other members are present")
