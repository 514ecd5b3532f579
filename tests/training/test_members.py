"""Workers that go, for a while or for good: they are not waited for, and they are taken in when they are back."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest
from kept_tasks import KeptTasks
from processes import Runs, until

pytestmark = pytest.mark.timeout(400)


class Members(KeptTasks):
    """Members that come and go, and what the run says of it."""

    @property
    def state(self) -> str:
        return str(self.status.get("state"))

    @property
    def message(self) -> str:
        return str(self.status.get("message"))

    def kill(self, task: str) -> None:
        self.processes[task].end()

    def begins(self) -> None:
        self.chief.search(r"step \d+ of")


@pytest.fixture
def cluster(runs: Runs, request: pytest.FixtureRequest) -> Iterator[Members]:
    members = Members(runs, request.node.name.replace("_", "-").partition("[")[0][:60], **getattr(request, "param", {}))
    yield members
    for process in members.processes.values():
        with contextlib.suppress(ProcessLookupError):
            process.send(signal.SIGCONT)
    members.end()


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


def test_a_ps_that_is_replaced_while_a_worker_is_away_costs_no_waiting_for_it(cluster: Members) -> None:
    cluster.begins()
    cluster.processes["worker-1"].send(signal.SIGSTOP)
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
