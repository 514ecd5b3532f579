"""`fab sweep` on pretended hosts."""

from __future__ import annotations

import json
import re

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.sweep import show_sweep
from tests.unit.fake_hosts import SWEEP, UP, FakeHosts, follow, printed, status, swept


def test_sweep_is_selected_and_followed_past_a_failed_point_to_its_table(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = follow(
        swept("new", "new"),
        swept("training", "new"),
        swept("finished", "training", present="s-2"),
        swept("finished", "failed", over=True, present=None),
        swept("finished", "failed", over=True, evaluated=True, present=None),
    )
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert json.loads(hosts.selection) == {"sweep": {**SWEEP["sweep"], "attempt": 1, "settings": {"program_args": {}}}}
    output = printed(console)
    assert "  select  sweep s of 2 points\n" in output
    assert re.search(r"s-1: finished\n(.*\n)*s-2: failed\n(.*\n)*sweep s: over, 1 failed\nPARAMETERS", output)
    assert "put back" not in output
    assert output.endswith("s-2 failed: why\n")


def test_a_sweep_beside_a_training_restarts_who_saves_and_who_evaluates(hosts: FakeHosts, console: Console) -> None:
    """The servers serve its first point as they are."""
    hosts.set_all(file_state="enabled", **UP)
    hosts.run_status = status("training", 20)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP, detach=True))
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "select", "start chief-0", "start evaluator-0"]


def test_sweep_whose_coordinator_is_down_before_its_end_is_trouble(hosts: FakeHosts, console: Console) -> None:
    def stop(hosts: FakeHosts) -> None:
        hosts.set("chief-0", active="inactive", sub="dead")

    hosts.tick = follow(swept("new", "new"), swept("training", "new"), then=stop)
    with pytest.raises(ClusterTrouble, match=r"chief-0 on head.* is down, and sweep s is not over"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert json.loads(hosts.selection)["sweep"]["attempt"] == 1


def test_sweep_whose_evaluator_is_late_ends_with_saying_so(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = follow(swept("new", "new"), swept("finished", "finished", over=True, present=None))
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert "\nNot every point is evaluated yet; the evaluator goes on. Look: fab sweep --status\n" in printed(console)


def test_sweep_whose_coordinator_is_slow_to_start_is_followed(hosts: FakeHosts, console: Console) -> None:
    looks = [0]

    def tick(hosts: FakeHosts) -> None:
        if "start chief-0" in hosts.done and not looks[0]:
            hosts.set("chief-0", active="inactive", sub="dead")
            hosts.sweep, looks[0] = swept("new", "new"), 1
        elif looks[0]:
            hosts.set("chief-0", active="active", sub="running")
            hosts.sweep = swept("finished", "finished", over=True, evaluated=True, present=None)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert "sweep s: over\n" in printed(console)


@pytest.mark.parametrize("seconds", [60, 600])
def test_chief_that_is_away_for_a_while_does_not_end_the_looking_on(
    hosts: FakeHosts, console: Console, seconds: float
) -> None:
    over = swept("finished", "finished", over=True, evaluated=True, present=None)
    next_answer = follow(swept("new", "new"), swept("training", "new"), over)

    def tick(hosts: FakeHosts) -> None:
        away = "start chief-0" in hosts.done and 1005 < hosts.now < 1005 + seconds
        hosts.unreachable = {"head": "no answer"} if away else {}
        if not away:
            next_answer(hosts)

    hosts.tick = tick
    watch = lambda: start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))  # noqa: E731
    if seconds == 60:
        watch()
        assert "sweep s: over\n" in printed(console)
    else:
        with pytest.raises(HostsUnreachable, match="the sweep may go on unseen: fab sweep --status"):
            watch()


def test_sweep_that_is_finished_is_shown_and_one_with_a_failure_is_tried_again(
    hosts: FakeHosts, console: Console
) -> None:
    hosts.selection = json.dumps({"sweep": {**SWEEP["sweep"], "attempt": 1}})
    hosts.sweep = swept("finished", "finished", over=True, evaluated=True, present=None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert hosts.done == []
    assert re.search(r"sweep s: over\n(.*\n)*For more, add points to the end of its file", printed(console))
    hosts.sweep = swept("finished", "failed", over=True, evaluated=True, present=None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == []
    assert printed(console).endswith("Try what failed again: fab sweep FILE\n")
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP, detach=True))
    assert json.loads(hosts.selection)["sweep"]["attempt"] == 2
    assert "start chief-0" in hosts.done


def test_status_of_a_sweep_is_a_table_or_json(hosts: FakeHosts, console: Console) -> None:
    cluster = Cluster(hosts.inventory, hosts)
    with pytest.raises(OperatorMistake, match="there is no sweep yet: fab sweep FILE"):
        show_sweep(cluster, console)
    hosts.sweep = swept("finished", "training", present="s-2")
    show_sweep(cluster, console)
    assert printed(console).startswith("sweep s: 1 of 2 points have ended\nPARAMETERS")
    console.json_out = console.out
    show_sweep(cluster, console)
    assert json.loads(printed(console)[printed(console).index("{") :])["sweep"] == hosts.sweep


def test_status_says_of_which_sweep_the_run_is_a_point(hosts: FakeHosts, console: Console) -> None:
    show_status(Cluster(hosts.inventory, hosts), console)
    assert "sweep" not in printed(console)
    hosts.selection = json.dumps({"sweep": {**SWEEP["sweep"], "attempt": 1}})
    show_status(Cluster(hosts.inventory, hosts), console)
    assert "a point of sweep s, which has 2: fab sweep --status\n" in printed(console)
