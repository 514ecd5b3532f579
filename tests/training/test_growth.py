"""Members that are added to the cluster while it trains: nothing that runs restarts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting import counts
from kept_tasks import KeptTasks
from processes import MINUTE, Runs, until

from fleet.site.escaping import environment_value
from tests.pauses import longest_pause
from trainer.cluster.spec import free_addresses
from trainer.core.settings.config import Config
from trainer.telemetry.events import read_events

pytestmark = pytest.mark.timeout(400)
BATCH, EXAMPLES = 4, 312  # of the program `three`
THREE = {"program": "three:Three", "steps": 3000}


class Growing(KeptTasks):
    """A cluster of processes whose environment files name more members later, as site.yml writes them."""

    def _file(self, task: str) -> Path:
        return self._runs.shared / f"{self.run}-{task}.env"

    def write(self, task: str) -> None:
        new = self._file(task).with_suffix(".new")
        new.write_text(f"# Ansible managed\nTF_CONFIG={environment_value(self.config(task))}\nOTHER=1\n")
        new.replace(self._file(task))

    def start(self, task: str, **more: str) -> None:
        self.write(task)
        super().start(task, TRAINER_MEMBERS=str(self._file(task)), **more)

    def add(self, job: str) -> str:
        """Add a member to the cluster, and tell those that run; returns its name. It does not run yet."""
        task = f"{job}-{len(self._jobs[job])}"
        self._jobs[job] = [*self._jobs[job], *free_addresses(1)]
        for other in self.processes:
            self.write(other)
        return task

    def gives(self, task: str) -> bool:
        return self.given().get(task, 0) > 0

    def all_give(self, seconds: float) -> None:
        """Wait until each worker has given more steps than when this was called."""
        before = self.given()
        until(
            lambda: all(steps > before.get(task, 0) for task, steps in self.given().items()),
            f"steps of each, beyond {before}",
            seconds,
            lambda: self.chief.output[-6000:] + str(self.given()),
        )


@pytest.fixture
def cluster(runs: Runs, request: pytest.FixtureRequest) -> Iterator[Growing]:
    run = re.sub("[^a-z0-9]+", "-", request.node.name).strip("-")[:60]
    members = Growing(runs, run, **getattr(request, "param", {}))
    yield members
    members.end()


def watch(cluster: Growing, task: str) -> float:
    """Wait until a member has given steps; returns the longest time between two reports of new steps meanwhile."""
    began = time.time()
    until(lambda: cluster.gives(task), f"steps of {task}", 2 * MINUTE, lambda: cluster.chief.output[-6000:])
    return longest_pause((cluster.directory / "history.jsonl").read_text().splitlines(), began, time.time())


def events(cluster: Growing) -> list[dict[str, Any]]:
    return read_events(cluster.directory / "events.jsonl", 1000)


def test_a_worker_joins_those_that_train(cluster: Growing, runs: Runs) -> None:
    """Each part is read by one of three from then on; a worker that comes back reads the new part, too."""
    cluster.chief.search(r"step \d+ of")
    cluster.trains_on()
    task = cluster.add("worker")
    cluster.chief.search(r"the cluster has got worker-2")
    began = time.monotonic()
    cluster.start(task)
    longest = watch(cluster, task)
    print(f"joined {time.monotonic() - began:.1f} s after its start; the longest time without a step: {longest:.2f} s")
    cluster.all_give(15.0)
    assert [event["event"] for event in events(cluster) if event.get("task") == task] == ["member-joined"]
    cluster.processes.pop("worker-0").end()
    cluster.chief.search("TensorFlow has let go of worker-0")
    cluster.trains_on()
    cluster.start("worker-0")
    cluster.chief.search("TensorFlow has taken in worker-0")
    cluster.trains_on()
    assert "forming the cluster again" not in cluster.chief.output
    # A coordinator that begins now knows all three.
    cluster.processes.pop("chief-0").end()
    cluster.start("chief-0")
    cluster.chief.search("all 4 other members are present")
    cluster.trains_on()
    assert sum(event.get("steps_lost", 0) for event in events(cluster)) == 0


@pytest.mark.parametrize("cluster", [THREE], indirect=True)
def test_the_data_are_divided_again(cluster: Growing, runs: Runs) -> None:
    """No step is lost, and from then on each example is one worker's of three: also of those that were two before."""
    cluster.chief.search(r"step \d+ of")
    task = cluster.add("worker")
    cluster.start(task)
    watch(cluster, task)
    assert cluster.chief.wait() == 0, cluster.chief.output
    seen = counts(runs, cluster.run)
    assert seen.sum() == 3000 * BATCH
    numbers, seen = np.arange(EXAMPLES), seen[:, :EXAMPLES]
    for worker in range(2):
        before, after = numbers % 2 == worker, numbers % 3 == worker
        assert not seen[worker, ~before & ~after].any()
        assert seen[worker, before & ~after].all()
        assert seen[worker, after & ~before].all()
    assert not seen[2, numbers % 3 != 2].any()
    assert seen[2, numbers % 3 == 2].all()


@pytest.mark.parametrize("cluster", [{"checkpoint_seconds": 1.0}], indirect=True)
def test_a_ps_joins_at_the_next_save(cluster: Growing, runs: Runs) -> None:
    """Also after a worker has joined: the same process goes on."""
    cluster.chief.search(r"step \d+ of")
    worker = cluster.add("worker")
    cluster.start(worker)
    watch(cluster, worker)
    task = cluster.add("ps")
    cluster.start(task)
    cluster.chief.search("forming the cluster again in this process: ps-1 answers again")
    cluster.chief.search(r"going on at step \d+[\s\S]*step \d+ of")
    cluster.trains_on()
    logged = events(cluster)
    [at] = [number for number, event in enumerate(logged) if event["event"] == "recovering"]
    print(f"the pause: {next(event for event in logged[at:] if event['event'] == 'training')}")
    assert sum(event.get("steps_lost", 0) for event in logged) == 0
    assert all(process.code is None for process in cluster.processes.values())


@pytest.mark.parametrize(("position", "expected"), [("beginning", True), ("exact", False)])
def test_a_worker_joins_at_once_unless_places_are_counted(position: str, expected: bool) -> None:
    from trainer.training.steps.remote import takes_in

    config, strategy = Config(program="a:B", input_position=position), SimpleNamespace(num_replicas_in_sync=1)
    assert takes_in(config, strategy, SimpleNamespace()) == expected  # type: ignore[arg-type]
