"""Workers that go, for a while or for good: they are not waited for, and they are taken in when they are back."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from processes import MINUTE, Process, Runs, until

from trainer.cluster.spec import free_addresses
from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(400)
ENDLESS = 10_000_000
SETTINGS = {
    "program": "many:Many",
    "steps": ENDLESS,
    "steps_per_execution": 10,
    "evaluation": "none",
    "export": False,
    "log_seconds": 0.2,
    "checkpoint_seconds": 1000.0,
    "heartbeat_timeout_seconds": 5.0,
    "worker_wait_seconds": 1000.0,
}


class Members:
    """A cluster of processes that only the test starts again."""

    def __init__(self, runs: Runs, run: str, workers: int = 2, ps: int = 1, **settings: Any) -> None:
        self._runs, self._run = runs, run
        addresses = free_addresses(1 + workers + ps)
        self._jobs = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
        self._settings = runs.shared / f"{run}.json"
        self._settings.write_text(json.dumps({**SETTINGS, "run": run, "shared_dir": str(runs.shared), **settings}))
        self.processes: dict[str, Process] = {}
        for task in [f"{job}-{i}" for job in ("ps", "worker", "chief") for i in range(len(self._jobs[job]))]:
            self.start(task)

    def start(self, task: str) -> None:
        job, _, index = task.rpartition("-")
        config = json.dumps({"cluster": self._jobs, "task": {"type": job, "index": int(index)}})
        self.processes[task] = self._runs.task(TF_CONFIG=config, TRAINER_SETTINGS=str(self._settings))

    def kill(self, task: str) -> None:
        self.processes[task].end()

    def send(self, task: str, number: int) -> None:
        self.processes[task].send(number)

    def restarted(self, task: str) -> bool:
        """Start a task again if it has ended as it was asked to; returns whether it has."""
        if self.processes[task].code != 75:
            return False
        self.start(task)
        return True

    @property
    def chief(self) -> Process:
        return self.processes["chief-0"]

    @property
    def step(self) -> int:
        return self._status.get("step") or 0

    @property
    def state(self) -> str:
        return str(self._status.get("state"))

    @property
    def message(self) -> str:
        return str(self._status.get("message"))

    @property
    def _status(self) -> dict[str, Any]:
        return read_record(self._runs.directory(self._run) / "status.json") or {}

    def begins(self) -> None:
        self.chief.search(r"step \d+ of")

    def trains_on(self, deadline: float = MINUTE) -> None:
        """Wait until it has trained more than it had when this was called."""
        step = self.step
        until(lambda: self.step > step + 20, f"a step after {step}", deadline, lambda: self.chief.output[-6000:])

    def longest_pause(self, seconds: float) -> float:
        """Return the longest time between two reports of new steps, while so many seconds pass."""
        end, last, at, longest = time.monotonic() + seconds, self.step, time.monotonic(), 0.0
        while (now := time.monotonic()) < end:
            if self.step > last:
                last, at = self.step, now
            longest = max(longest, now - at)
            time.sleep(0.05)
        return longest


@pytest.fixture
def cluster(runs: Runs, request: pytest.FixtureRequest) -> Iterator[Members]:
    members = Members(runs, request.node.name.replace("_", "-").partition("[")[0][:60], **getattr(request, "param", {}))
    yield members
    for process in members.processes.values():
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGCONT)
        process.end()


def test_nobody_waits_for_a_worker_that_is_gone_for_good(cluster: Members) -> None:
    cluster.begins()
    cluster.kill("worker-1")
    cluster.trains_on()
    cluster.kill("worker-0")
    cluster.start("worker-0")
    cluster.processes["worker-0"].search("worker-0 serves at")
    cluster.trains_on()
    # A late member is taken in too.
    cluster.start("worker-1")
    cluster.chief.search(r"TensorFlow has taken in worker-1")
    cluster.trains_on()
    assert cluster.chief.code is None


# `worker-frozen` of the dozen of the drills has one freeze, and test_membership.py the others' coming and going.
@pytest.mark.matrix
@pytest.mark.parametrize("cluster", [{"workers": 3}], indirect=True)
def test_a_silent_worker_is_left_out_and_taken_in_again_by_the_same_coordinator(cluster: Members) -> None:
    cluster.begins()
    cluster.send("worker-1", signal.SIGSTOP)
    cluster.chief.search(r"worker-1 \S+ has not answered for \d+ s: cut off")
    cluster.trains_on()
    # Another one comes and goes meanwhile.
    cluster.kill("worker-2")
    cluster.trains_on()
    cluster.start("worker-2")
    cluster.chief.search(r"TensorFlow has taken in worker-2")
    cluster.trains_on()
    cluster.send("worker-1", signal.SIGCONT)
    until(lambda: cluster.restarted("worker-1"), "a new process", say=lambda: cluster.chief.output[-6000:])
    cluster.chief.search(r"TensorFlow has taken in worker-1")
    cluster.trains_on()
    assert cluster.chief.code is None


def test_a_worker_that_freezes_while_no_other_is_there_is_waited_for(cluster: Members) -> None:
    cluster.begins()
    cluster.kill("worker-1")
    cluster.trains_on()
    frozen = cluster.processes["worker-0"]
    frozen.send(signal.SIGSTOP)
    until(lambda: "no worker answers" in cluster.message, "waiting", say=lambda: cluster.chief.output[-6000:])
    cluster.start("worker-1")
    cluster.chief.search(r"TensorFlow has taken in worker-1")
    cluster.trains_on()
    assert cluster.chief.code is None


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.matrix), "frozen"])
def test_a_ps_that_is_replaced_while_a_worker_is_away_costs_no_waiting_for_it(cluster: Members, how: str) -> None:
    cluster.begins()
    if how == "killed":
        cluster.kill("worker-1")
    else:
        cluster.send("worker-1", signal.SIGSTOP)
        cluster.chief.search(r"worker-1 \S+ has not answered for \d+ s: cut off")
    cluster.trains_on()
    cluster.kill("ps-0")
    cluster.start("ps-0")
    cluster.chief.search("forming the cluster again in this process")
    cluster.chief.search(r"going on without worker-1 \(127")
    until(lambda: cluster.state == "training", "training", say=lambda: cluster.chief.output[-6000:])
    cluster.trains_on()
    assert cluster.chief.code is None


STUCK = {"program": "many:Stuck", "workers": 1, "steps": 1, "steps_per_execution": 1}


@pytest.mark.parametrize("cluster", [STUCK], indirect=True)
def test_a_call_that_kills_worker_after_worker_ends_the_run(cluster: Members) -> None:
    """This run has but one call: whichever process is killed was running it."""
    until(lambda: cluster.state == "training", "training", say=lambda: cluster.chief.output[-6000:])
    taken_in = "TensorFlow has taken in worker-0"
    for _ in range(8):  # one that was killed before it had the call does not count
        time.sleep(1)
        before = cluster.chief.output.count(taken_in)
        cluster.kill("worker-0")
        cluster.start("worker-0")
        until(
            lambda before=before: cluster.chief.code is not None or cluster.chief.output.count(taken_in) > before,
            "a worker, or the end",
            say=lambda: cluster.chief.output[-6000:],
        )
        if cluster.chief.code is not None:
            break
    assert cluster.chief.wait() == 78, cluster.chief.output
    killed = "the same call of 1 steps, after step 0, ended the processes of worker-0, worker-0, worker-0"
    assert killed in cluster.message
