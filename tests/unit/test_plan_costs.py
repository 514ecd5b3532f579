"""What `--plan` says that a verb costs the training that goes on, in text and with `--json`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts import history
from fleet.planning.cost import NOT_KNOWN, NOTHING_TRAINS, RESTART
from fleet.rollout.release import CHANGES, ShipmentResult
from fleet.verbs.drain import drain
from fleet.verbs.queue import QueueRequest, queue_add, queue_move, queue_remove
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.stop import stop_cluster
from tests.unit import fake_hosts
from tests.unit import test_queue_verbs as queues
from tests.unit import test_remove_host as removals
from tests.unit import test_second_day as day
from tests.unit.test_json_output import answer_of

SAVED = "no step: it saves before it stops"


@pytest.fixture
def hosts() -> day.Hosts:
    """Hosts on which a run trains at step 20, saved at 15."""
    return day.make_hosts()


@pytest.fixture
def console(hosts: day.Hosts) -> Console:
    return fake_hosts.console_of(hosts, "abc123", json_out=io.StringIO())


def with_release(hosts: day.Hosts, monkeypatch: pytest.MonkeyPatch, behind: str) -> None:
    """Have one host be on an older release."""
    look = hosts._observe

    def observe(host: str, directories: bool, settings: bool) -> str:
        return look(host, directories, settings).replace("abc123", "older" if host == behind else "abc123")

    monkeypatch.setattr(hosts, "_observe", observe)


def start(hosts: day.Hosts, console: Console, **asked: Any) -> dict[str, Any]:
    start_cluster(day.cluster(hosts), console, StartRequest(plan_only=True, **asked))
    found: dict[str, Any] = answer_of(console)["cost"]
    return found


def test_a_start_that_changes_nothing_costs_nothing(hosts: day.Hosts, console: Console) -> None:
    cost = start(hosts, console)
    assert (cost["stops"], cost["pause"], cost["steps_lost"]) == ([], "none: what trains goes on", 0)
    assert "  pause   none: what trains goes on\n  lost    no step\nnothing was done" in fake_hosts.printed(console)


def test_another_release_costs_a_restart_of_tensorflow(hosts: day.Hosts, console: Console) -> None:
    console.build = lambda _: "newer"
    cost = start(hosts, console)
    assert cost["stops"] == [task.name for task in hosts.inventory.tasks]
    assert (cost["pause"][:27], cost["lost"]) == ("until TensorFlow is up agai", SAVED)


def test_other_settings_cost_the_restart_of_those_that_read_them(hosts: day.Hosts, console: Console) -> None:
    console.ship = lambda *_: ShipmentResult({}, {CHANGES[-1]: [*hosts.inventory.hosts]})
    cost = start(hosts, console)
    assert (cost["stops"], cost["lost"]) == (["chief-0", "evaluator-0"], SAVED)


def test_what_ansible_changes_besides_is_not_left_out(hosts: day.Hosts, console: Console) -> None:
    console.ship = lambda *_: ShipmentResult({}, {"Install the unit": ["w-a"]})
    assert start(hosts, console)["pause"].endswith("; a task restarts too where its other files change")


def test_a_ps_that_restarts_alone_costs_the_steps_since_the_checkpoint(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_release(hosts, monkeypatch, "ps-b")
    cost = start(hosts, console)
    assert (cost["stops"], cost["steps_lost"]) == (["ps-1"], 5)
    assert "  lost    5 steps: the newest checkpoint has step 15, saved" in fake_hosts.printed(console)


def test_a_worker_that_restarts_alone_costs_nothing(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_release(hosts, monkeypatch, "w-b")
    cost = start(hosts, console)
    assert (cost["stops"], cost["pause"], cost["steps_lost"]) == (["worker-1"], "none: what trains goes on", 0)


def test_a_ps_that_joins_costs_a_pause_at_the_next_save(hosts: day.Hosts, console: Console) -> None:
    hosts.set("ps-1", active="inactive", sub="dead")
    cost = start(hosts, console)
    assert (cost["stops"], cost["pause"], cost["steps_lost"]) == ([], "some seconds, at the next save", 0)


def test_another_run_ends_the_one_that_trains(hosts: day.Hosts, console: Console) -> None:
    cost = start(hosts, console, run_name="digits-2")
    assert cost["stops"] == ["chief-0", "evaluator-0"]
    assert (cost["pause"], cost["lost"]) == ("run digits ends; to go on with it: fab start-cluster --run digits", SAVED)


def test_a_restart_costs_all_tasks_and_no_step(hosts: day.Hosts, console: Console) -> None:
    cost = start(hosts, console, restart=True)
    assert cost["stops"] == [task.name for task in hosts.inventory.tasks]
    assert (cost["steps_lost"], cost["lost"]) == (0, SAVED)


def test_where_nothing_trains_a_plan_names_no_pause(hosts: day.Hosts, console: Console) -> None:
    hosts.run_status = fake_hosts.status("stopped", 20)
    hosts.set_all(active="inactive", sub="dead")
    cost = start(hosts, console)
    assert (cost["stops"], cost["pause"], cost["lost"]) == ([], "none: nothing of it trains", "no step")
    assert "  pause  " not in fake_hosts.printed(console)


def test_a_stop_costs_the_training_until_the_next_start(hosts: day.Hosts, console: Console) -> None:
    stop_cluster(day.cluster(hosts), console, plan_only=True)
    found = answer_of(console)
    assert (found["cost"]["stops"], found["cost"]["pause"]) == (found["planned"], "until the next fab start-cluster")
    assert f"  lost    {SAVED}\nnothing was done. Do it: fab stop-cluster" in fake_hosts.printed(console)


def test_a_stop_that_stops_no_training_costs_nothing(hosts: day.Hosts, console: Console) -> None:
    hosts.run_status = fake_hosts.status("finished", 30)
    for name in ("chief-0", "evaluator-0"):
        hosts.set(name, active="inactive", sub="dead")
    stop_cluster(day.cluster(hosts), console, plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["stops"], cost["pause"]) == (
        ["ps-0", "ps-1", "worker-0", "worker-1"],
        "none: nothing of it trains",
    )


def test_without_the_coordinators_host_nobody_knows_what_a_stop_costs(hosts: day.Hosts, console: Console) -> None:
    hosts.unreachable["head"] = "no route"
    with pytest.raises(HostsUnreachable):
        stop_cluster(day.cluster(hosts), console, plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["pause"], cost["steps_lost"]) == ("not known", None)


@pytest.mark.parametrize(
    ("name", "others", "pause", "lost"),
    [
        ("next", ["next"], "none: what trains goes on", "no step"),
        ("digits", ["next"], "next follows", "no step: digits is saved first, and goes on where it is added again"),
        ("digits", [], "nothing is left to train: the tasks end", "no step: digits is saved first"),
    ],
)
def test_what_is_taken_out_of_the_queue_costs_only_what_trains(
    console: Console, tmp_path: Path, name: str, others: list[str], pause: str, lost: str
) -> None:
    hosts = queues.make_hosts(tmp_path)
    queue_add(queues.cluster(hosts), console, QueueRequest("next"))
    if not others:
        queue_remove(queues.cluster(hosts), console, "next")
    console.json_out = io.StringIO()
    queue_remove(queues.cluster(hosts), console, name, stop=True, plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["pause"], cost["steps_lost"], cost["lost"][: len(lost)]) == (pause, 0, lost)
    assert f"  pause   {pause}\n  lost    {lost}" in fake_hosts.printed(console)


@pytest.mark.parametrize(("trains", "pause"), [(True, "none: what trains goes on"), (False, NOTHING_TRAINS[0])])
def test_what_is_added_to_the_queue_or_moved_costs_nothing(
    console: Console, tmp_path: Path, trains: bool, pause: str
) -> None:
    hosts = queues.make_hosts(tmp_path)
    queue_add(queues.cluster(hosts), console, QueueRequest("next"))
    if not trains:
        queues.idle(hosts)
    plans = [
        lambda: queue_add(queues.cluster(hosts), console, QueueRequest("last"), plan_only=True),
        lambda: queue_move(queues.cluster(hosts), console, "next", "first", plan_only=True),
    ]
    for plan in plans if trains else plans[:1]:
        console.out, console.json_out = io.StringIO(), io.StringIO()
        plan()
        cost = answer_of(console)["cost"]
        assert (cost["stops"], cost["pause"], cost["steps_lost"]) == ([], pause, 0)
        assert f"\n  pause   {pause}\n  lost    no step\nnothing was done" in fake_hosts.printed(console)


def test_a_rollback_costs_a_restart_and_then_the_drains(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    day.keep_releases(hosts, monkeypatch)
    then = {host: names for host, names in history.members_of(hosts.inventory).items() if host != "ps-b"}
    hosts.lines = [day.shipped("old1", day.NOW, members=then), day.shipped("abc123", day.NOW)]
    rollback(day.cluster(hosts), console, plan_only=True)
    found = answer_of(console)
    assert (found["outcome"], found["release"], found["before"]) == ("planned", "old1", "abc123")
    cost = found["cost"]
    assert (cost["hosts"], cost["stops"]) == (
        [*hosts.inventory.hosts],
        [task.name for task in hosts.inventory.tasks],
    )
    assert (cost["steps_lost"], cost["lost"]) == (0, SAVED)
    assert cost["pause"].startswith("until TensorFlow is up again")
    assert cost["pause"].endswith(
        "; then some seconds: the model is laid out again from a checkpoint that is saved first"
    )
    assert [line[:27] for line in cost["room"]] == ["ps-a will hold 0.00 GiB of "]
    assert f"  lost     {SAVED}\n  room     ps-a will hold 0.00 GiB" in fake_hosts.printed(console)


def test_a_rollback_says_in_both_ways_that_its_loss_is_not_known(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    day.keep_releases(hosts, monkeypatch)
    then = {host: names for host, names in history.members_of(hosts.inventory).items() if host != "ps-b"}
    hosts.lines = [day.shipped("old1", day.NOW, members=then), day.shipped("abc123", day.NOW)]
    hosts.run_status, hosts.tick = None, lambda _: None
    rollback(day.cluster(hosts), console, plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["steps_lost"], cost["lost"]) == (None, NOT_KNOWN[2])


def test_a_rollback_that_drains_alone_costs_the_drains(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    day.keep_releases(hosts, monkeypatch)
    then = {host: names for host, names in history.members_of(hosts.inventory).items() if host != "w-b"}
    hosts.lines = [day.shipped("abc123", day.NOW, members=then)]
    rollback(day.cluster(hosts), console, "abc123", plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["stops"], cost["pause"]) == (["worker-1"], "none: the others train on")


def test_a_rollback_where_nothing_trains_costs_nothing(
    hosts: day.Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    day.keep_releases(hosts, monkeypatch)
    hosts.set_all(active="inactive", sub="dead")
    hosts.lines = [day.shipped("old1", day.OLD), day.shipped("abc123", day.NOW)]
    rollback(day.cluster(hosts), console, plan_only=True)
    cost = answer_of(console)["cost"]
    assert (cost["stops"], cost["pause"], cost["steps_lost"]) == ([], "none: nothing of it trains", 0)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("act", [remove_host, partial(replace_host, new="w-x", address="192.0.2.99")])
def test_a_host_that_goes_for_good_costs_a_restart_at_the_next_site_yml(
    console: Console, tmp_path: Path, act: Callable[..., None], trains: bool
) -> None:
    hosts = removals.hosts_of(removals.make_site(tmp_path / "mine"))
    drain(day.cluster(hosts), console, "w-a")
    for name in () if trains else hosts.units:
        hosts.set(name, active="inactive", sub="dead")
    console.json_out = io.StringIO()
    act(day.cluster(hosts), console, "w-a", plan_only=True)
    cost = answer_of(console)["cost"]
    assert cost["stops"] == (["chief-0", "ps-0", "ps-1", "worker-1", "worker-2"] if trains else [])
    pause, lost = (f"at site.yml, {RESTART}", SAVED) if trains else ("none: nothing of it trains", "no step")
    assert (cost["pause"], cost["lost"], cost["steps_lost"]) == (pause, lost, 0)
    assert f"  pause   {pause}\n  lost    {lost}\nnothing was done. Do it: fab re" in fake_hosts.printed(console)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_plan_to_replace_the_coordinators_host_says_the_same_of_its_steps_as_of_its_cost(
    console: Console, tmp_path: Path, is_dead: bool
) -> None:
    hosts = removals.hosts_of(removals.make_site(tmp_path / "mine"))
    if is_dead:
        hosts.unreachable["head"] = "no route"
    with contextlib.nullcontext() if is_dead else pytest.raises(OperatorMistake, match="the coordinator runs there"):
        replace_host(day.cluster(hosts), console, "head", "head-2", "192.0.2.99", plan_only=True)
    cost = answer_of(console)["cost"]
    lost = "the steps since the newest checkpoint: no coordinator can save" if is_dead else SAVED
    assert (cost["lost"], cost["steps_lost"]) == (lost, None if is_dead else 0)
