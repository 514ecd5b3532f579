"""What a start says while it follows a training, on pretended hosts."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.verbs.start import StartRequest, start_cluster
from tests.unit.fake_hosts import FakeHosts, printed, status, train


@pytest.mark.parametrize(("at", "seen"), [(1000.0, True), (999.0, False)])
def test_the_first_step_is_what_the_coordinator_tells_of_it(
    hosts: FakeHosts, console: Console, at: float, seen: bool
) -> None:
    """The number of the step, which status.json has each log_seconds only, is not waited for."""

    def tick(hosts: FakeHosts) -> None:
        hosts.run_status = status("training", 1, hosts.now, events=[{"event": "training", "time": at}])

    hosts.tick = tick
    with contextlib.nullcontext() if seen else pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, timeout=20))
    assert (hosts.now - 1000 < 20) == seen


def test_state_of_an_earlier_coordinator_is_no_first_step(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("training", 12, updated=990.0, steps_per_second=5.0)
    with pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(timeout=20))


def test_trainer_that_finds_a_run_finished_ends_the_watching(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30, evaluation={"step": 20, "metrics": {}})

    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].up:
            hosts.set("chief-0", active="inactive", sub="dead")
            hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_start_cluster_names_the_task_that_failed_with_its_journal(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        if hosts.units["worker-1"].active == "active":
            hosts.set("worker-1", active="failed", sub="failed", result="exit-code", exit_status=78)

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="worker-1 on far: exited with code 78") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 1
    assert caught.value.troubles[0].journal == ["worker-1 says"]
    assert "| worker-1 says" in str(caught.value)


def test_start_cluster_tells_what_the_failed_run_says(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].active == "active":
            hosts.run_status = status("failed", None, hosts.now, message="no module named digitz")

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="chief-0 on head: no module named digitz"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_start_cluster_shows_the_journals_of_the_tasks_that_a_failed_run_names(
    hosts: FakeHosts, console: Console
) -> None:
    killed = "the same call of 4 steps, after step 12, ended the processes of worker-1, worker-10"

    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].active == "active":
            hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
            hosts.run_status = status("failed", 12, hosts.now, message=killed)

    hosts.tick = tick
    with pytest.raises(ClusterTrouble) as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    chief, worker = caught.value.troubles
    assert chief.what.endswith(killed)
    assert (worker.task, worker.what, worker.journal) == ("worker-1", "is named by the failed run", ["worker-1 says"])


def test_task_that_keeps_restarting_before_the_first_step_is_trouble(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        unit = hosts.units["ps-0"]
        if unit.up:
            restarts = unit.restarts + 1
            hosts.set(
                "ps-0", active="activating", sub="auto-restart", restarts=restarts, result="exit-code", exit_status=75
            )

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match=r"ps-0 on store: was restarted \d+ times.*exited with code 75"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_restarts_between_steps_are_recovery(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.units["worker-1"].up:
            hosts.set("worker-1", restarts=hosts.units["worker-1"].restarts + 1)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.units["worker-1"].restarts > 3


def test_restarts_of_a_coordinator_between_steps_are_recovery(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.5)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.units["chief-0"].up:
            hosts.set("chief-0", restarts=int(hosts.now) // 2)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_all_hosts_are_asked_seldom_once_a_step_is_trained(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if len(hosts.asked[-1]) > 1:
            console.sleep(2)  # so long does it take to ask them all

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    step = next(number for number, asked in enumerate(hosts.asked) if asked == ["head"])
    later = [len(asked) for asked in hosts.asked[step + 20 :]]
    assert later.count(3) == pytest.approx(300 / 42, abs=2)
    assert set(later) == {1, 3}


def test_start_cluster_ends_when_another_operator_stops_the_chief(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if (hosts.run_status or {}).get("step") == 15:
            hosts.set("chief-0", active="inactive", sub="dead")

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="chief-0 on head was stopped at step 15"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_missing_evaluation_of_the_last_step_is_trouble_after_the_summary(hosts: FakeHosts, console: Console) -> None:
    steps = train()

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.run_status and hosts.run_status["state"] == "finished":
            hosts.run_status = {**hosts.run_status, "evaluation": None}

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="the last step isn't evaluated"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_a_host_that_answers_slowly_is_left_alone_for_as_long(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.1)
    asked: list[tuple[float, float]] = []

    def tick(hosts: FakeHosts) -> None:
        began = hosts.now
        console.sleep(7.0)
        asked.append((began, hosts.now))
        steps(hosts)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(asked)]
    assert all(gap == 0 or gap >= 7 for gap in gaps)  # a look may ask more than once
    assert sum(gap >= 7 for gap in gaps) > 10


def test_chief_that_falls_silent_ends_the_watching(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if (hosts.run_status or {}).get("step") == 10:
            hosts.unreachable = {"head": "the connection was lost"}

    hosts.tick = tick
    with pytest.raises(HostsUnreachable, match="head is unreachable"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_servers_that_end_with_the_run_are_no_trouble_to_who_watches(hosts: FakeHosts, console: Console) -> None:
    steps = train()

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.run_status and hosts.run_status["state"] == "finished":
            hosts.set_all(active="inactive", sub="dead")

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)
