"""`fab stop-cluster` on pretended hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.verbs.stop import stop_cluster
from tests.unit.fake_hosts import IN_STEP, UP, FakeHosts, make_inventory, printed, status


def test_stop_cluster_stops_the_coordinator_first_and_is_idempotent(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.run_status = status("stopped", 17)
    cluster = Cluster(hosts.inventory, hosts)
    stop_cluster(cluster, console)
    stop_cluster(cluster, console)
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0", "stop worker-1"]
    assert not any(unit.enabled for unit in hosts.units.values())
    assert "run digits: stopped, step 17/30" in printed(console)


def test_a_stop_waits_for_nobody_and_says_who_is_at_work(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.run_status = status("stopped", 17)
    hosts.held = Answer("taken by a start of ann@laptop since 10:41:07 UTC")
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert not any(unit.up for unit in hosts.units.values())
    said = "a start of ann@laptop since 10:41:07 UTC is at work on this cluster; it starts no task any more"
    assert said in printed(console)


def test_a_stop_stops_what_another_has_started_until_it_knew_of_the_stop(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.run_status = status("stopped", 17)

    def note(*_: object) -> str:
        hosts.set_all(file_state="enabled", **UP)
        return "a start of ann@laptop"

    monkeypatch.setattr("fleet.actions.exclusive.note_stop", note)
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert not any(unit.up or unit.enabled for unit in hosts.units.values())


def test_a_task_that_cannot_be_stopped_is_named_and_the_others_stop(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.set_all(**UP)
    run = hosts.run

    def fail(scripts: Mapping[str, str], *more: Any) -> dict[str, Answer]:
        output = "@first\nFailed to stop trainer@ps-0.service: Access denied\n\n@first-code\n1\n"
        bad = {host for host, script in scripts.items() if host == "store" and "@first" in script}
        return {
            host: replace(answer, stdout=output + answer.stdout) if host in bad else answer
            for host, answer in run(scripts, *more).items()
        }

    monkeypatch.setattr(hosts, "run", fail)
    with pytest.raises(ClusterTrouble, match="store: systemctl failed: Failed to stop"):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert "stop worker-1" in hosts.done


def test_a_stop_takes_few_scripts_a_host(hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the stop; look; the coordinator; then all others, and what is seen. The history gets two lines."""
    hosts.set_all(**UP)
    hosts.run_status = status("stopped", 17)
    asked: list[str] = []
    run = hosts.run
    monkeypatch.setattr(hosts, "run", lambda scripts, *more: (asked.extend(scripts), run(scripts, *more))[1])
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert (asked.count("far"), asked.count("head")) == (2, 6)


def test_members_that_train_in_step_are_told_to_stop_at_once(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    for task in IN_STEP:
        hosts.set(task.name, file_state="enabled", **UP)
    hosts.run_status = status("stopped", 17)
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert "stopping chief-0, worker-0, worker-1 (a checkpoint is saved first)\nstopping evaluator-0\n" in printed(
        console
    )
    assert sorted(hosts.done) == ["stop chief-0", "stop evaluator-0", "stop worker-0", "stop worker-1"]
    assert hosts.done[-1] == "stop evaluator-0"


def test_stop_cluster_stops_the_others_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(**UP)
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0"]
