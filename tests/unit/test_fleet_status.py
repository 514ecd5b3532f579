"""`fab status` on pretended hosts."""

from __future__ import annotations

import io
import json
import re

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.site.topology import Task
from fleet.status.status_view import draw, screen_of
from fleet.verbs.status import show_status
from tests.unit.fake_hosts import IN_STEP, TASKS, UP, FakeHosts, make_inventory, printed, status


def test_status_of_a_running_cluster_is_fine(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.run_status = status("training", 12, 999.0, steps_per_second=5.0)
    show_status(Cluster(hosts.inventory, hosts), console)
    text = printed(console)
    assert "release abc123 on 3 hosts" in text
    assert "run digits: training, step 12/30  5 steps/s" in text


@pytest.mark.parametrize("state", ["new", "stopped"])
def test_status_of_a_stopped_cluster_is_fine(hosts: FakeHosts, console: Console, state: str) -> None:
    hosts.run_status = status(state, None)
    show_status(Cluster(hosts.inventory, hosts), console)
    pointer = "by whom it was stopped, and why: fab history"
    assert (f"\n{pointer}\n" in printed(console)) is (state == "stopped")
    screen = io.StringIO()
    screen_of(screen).print(draw(hosts.inventory, Cluster(hosts.inventory, hosts).observe()))
    assert (pointer in screen.getvalue()) is (state == "stopped")


@pytest.mark.parametrize("tasks", [TASKS, IN_STEP])
def test_status_of_tasks_that_ended_with_their_run_is_finished(
    hosts: FakeHosts, console: Console, tasks: list[Task]
) -> None:
    hosts.inventory = make_inventory(tasks)
    hosts.set_all(file_state="enabled")
    hosts.run_status = status("finished", 30)
    show_status(Cluster(hosts.inventory, hosts), console)
    for task in tasks:
        assert re.search(rf"{task.name} +{task.host} +finished", printed(console))


def test_status_of_a_server_that_ended_before_its_run_is_trouble(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.set("ps-0", active="inactive", sub="dead")
    hosts.run_status = status("waiting", 12)
    with pytest.raises(ClusterTrouble, match="ps-0 on store"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_status_tells_how_a_task_ends_that_never_comes_up(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    again = {"active": "activating", "sub": "auto-restart", "restarts": 22, "result": "exit-code"}
    hosts.set("chief-0", **again, exit_status=1, status_text="")
    hosts.set("ps-0", **again, exit_status=0, status_text="")
    hosts.set("worker-0", **again | {"result": "success"}, exit_status=0, status_text="")  # by SIGTERM, of no stop
    hosts.run_status = status("stopped", 12)
    with pytest.raises(ClusterTrouble):
        show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"chief-0 .* 22 .* exited with code 1\n", printed(console))
    assert re.search(r"ps-0 .* 22 .* failed in a step before its start\n", printed(console))
    assert "(success)" not in printed(console)


def test_status_tells_the_users_error_with_its_line(hosts: FakeHosts, console: Console) -> None:
    hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
    hosts.run_status = status("failed", 12, message="/srv/program/mine.py:12: ValueError: no such column")
    with pytest.raises(ClusterTrouble, match="chief-0 on head"):
        show_status(Cluster(hosts.inventory, hosts), console)
    message = "run digits: failed, step 12/30\n  /srv/program/mine.py:12: ValueError: no such column\n"
    assert message in printed(console)


def test_status_tells_where_the_time_went_and_what_happened_last(hosts: FakeHosts, console: Console) -> None:
    ledger = {"productive": 90.0, "down": 10.0, "elapsed": 100.0, "goodput": 0.9}
    events = [{"time": 0, "event": "ps-lost", "task": "ps-0", "host": "store"}, {"time": 3, "event": "recovered"}]
    hosts.run_status = status("stopped", 12, ledger=ledger, events=events)
    show_status(Cluster(hosts.inventory, hosts), console)
    lines = printed(console).splitlines()
    at = lines.index("goodput 90.0 % of 100.0 s: productive 90.0 s, down 10.0 s")
    assert lines[at + 1] == "last events"
    assert lines[at + 2].endswith("ps-lost  ps-0 on store")
    assert lines[at + 3].endswith("recovered")
    hosts.run_status = status("new", None)
    show_status(Cluster(hosts.inventory, hosts), console)
    assert printed(console).splitlines()[-1] == "run digits: new"


def test_status_of_a_worker_that_failed_in_a_finished_run_is_trouble(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    for task in IN_STEP:
        hosts.set(task.name, file_state="enabled")
    hosts.set("worker-1", active="failed", sub="failed", result="exit-code", exit_status=78)
    hosts.run_status = status("finished", 30)
    with pytest.raises(ClusterTrouble, match="worker-1 on far"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_status_names_the_server_that_has_no_port_and_no_member_that_trains(hosts: FakeHosts, console: Console) -> None:
    hosts.listens = False
    hosts.run_status = status("waiting", None)
    for tasks, message in ((TASKS, "ps-0 on store, worker-0 on store, worker-1 on far"), (IN_STEP, None)):
        hosts.inventory = make_inventory(tasks)
        for task in tasks:
            hosts.set(task.name, file_state="enabled", since=hosts.now - 60, **UP)
        cluster = Cluster(hosts.inventory, hosts)
        if message:
            with pytest.raises(ClusterTrouble, match=message):
                show_status(cluster, console)
        else:
            show_status(cluster, console)


def test_status_names_the_task_that_should_run(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.set("worker-0", active="inactive", sub="dead")
    hosts.run_status = status("training", 12)
    with pytest.raises(ClusterTrouble, match=r"worker-0 on store \(look: fab logs --task worker-0\)"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_status_names_the_release_of_a_process_that_is_not_current(hosts: FakeHosts, console: Console) -> None:
    for number, name in enumerate(hosts.units):
        hosts.set(name, file_state="enabled", pid=100 + number, **UP)
    hosts.running = {
        "chief-0": "/opt/trainer/releases/abc123",
        "ps-0": "/opt/trainer/releases/0ld (deleted)",
        "worker-0": "/",
    }
    hosts.run_status = status("training", 12)
    show_status(Cluster(hosts.inventory, hosts), console)
    noted = [line for line in printed(console).splitlines() if "runs release" in line]
    assert len(noted) == 1
    assert re.match(r"ps-0 .* runs release 0ld, current is abc123$", noted[0])


def test_status_shows_a_failed_task_with_systemds_words(hosts: FakeHosts, console: Console) -> None:
    hosts.set("ps-0", active="failed", sub="failed", result="exit-code", exit_status=78)
    with pytest.raises(ClusterTrouble, match="ps-0 on store"):
        show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"ps-0 +store +failed \(exit-code 78\)", printed(console))


def test_status_shows_the_others_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable):
        show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"worker-1 +far +unreachable", printed(console))
    assert re.search(r"ps-0 +store +inactive", printed(console))


def test_status_as_json_has_every_task_and_the_run(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30)
    console.json_out = console.out
    show_status(Cluster(hosts.inventory, hosts), console)
    shown = json.loads(printed(console))
    assert [row["task"] for row in shown["tasks"]] == [task.name for task in TASKS]
    assert shown["run"]["state"] == "finished"
