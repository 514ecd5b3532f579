"""`fab start-cluster` and `restart-cluster` from question to exit, on pretended hosts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.output.tables import ProgressLine
from fleet.rollout.release import Recap, Shipment, ShipmentResult
from fleet.verbs.start import StartRequest, start_cluster
from tests.unit.fake_hosts import (
    IN_STEP,
    UP,
    FakeHosts,
    make_inventory,
    printed,
    raises,
    run_up,
    shipping,
    status,
    train,
)

# Why a start of these hosts is Ansible's: the inventory that they pretend to be of says nothing else of them.
UNKNOWN = "what it should hold can't be worked out here: 'cluster_uid' is undefined"


def record(
    shipped: list[tuple[str, list[str]]], hosts: FakeHosts
) -> Callable[[Shipment, ProgressLine], ShipmentResult]:
    """Note at each shipment what was done before it."""

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append((shipment.playbooks[-1], list(hosts.done)))
        return ShipmentResult({}, {})

    return ship


def test_how_far_a_start_is_stands_apart_from_what_came_of_it(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    console.progress_out = io.StringIO()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    shown = console.progress_out.getvalue()
    assert re.search(r"step \d+/30", shown)
    assert not re.search(r"step \d+/30", printed(console))
    assert "run digits finished" in printed(console)
    assert "finished" not in shown.replace("finished, waiting", "")


def test_start_cluster_trains_to_the_end_and_sums_up(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0", "worker-1")]
    assert all(unit.enabled for unit in hosts.units.values())
    text = printed(console)
    assert "release abc123: unchanged" in text
    assert "run digits finished" in text
    assert "accuracy 0.97 (step 30)" in text
    assert "head:/srv/trainer/runs/digits/checkpoints" in text
    assert "head:/srv/trainer/runs/digits/export" in text
    assert "http://192.0.2.10:6006" in text
    assert "fab logs --task chief-0" in text


def test_start_cluster_detached_leaves_after_the_first_step(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.units["chief-0"].active == "active"
    assert "run digits trains: step" in printed(console)


def test_start_cluster_leaves_running_tasks_alone(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.done == []


def test_new_run_restarts_coordinator_and_evaluator(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(**UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.selection = '{"run": "digits", "program": "p:P"}'
    shipped: list[tuple[str, list[str]]] = []
    console.ship = record(shipped, hosts)

    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    train_new = train()
    given = {"rate": 0.01, "layers": [64, "a b"]}
    start_cluster(
        Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits-2", detach=True, program_args=given)
    )
    stops = ["stop chief-0", "stop evaluator-0"]
    assert shipped == [("release.yml", []), ("training.yml", stops)]
    assert hosts.done == [*stops, "select", "start chief-0", "start evaluator-0"]
    assert json.loads(hosts.selection) == {"run": "digits-2", "program_args": given}
    assert '  select  run digits-2, with rate=0.01, layers=[64, "a b"]\n' in printed(console)


@pytest.mark.parametrize(
    ("others", "given", "sets", "selected"),
    [
        ({}, {}, "", {}),
        (
            {"program_args": {"rate": 0.1, "name": "a b"}},
            {"rate": 0.2},
            " --set rate=0.2 --set 'name=\"a b\"'",
            {"program_args": {"rate": 0.2, "name": "a b"}},
        ),
    ],
)
def test_new_run_begins_from_a_checkpoint_with_program_and_parameters_of_the_other(
    hosts: FakeHosts,
    console: Console,
    others: dict[str, Any],
    given: dict[str, Any],
    sets: str,
    selected: dict[str, Any],
) -> None:
    hosts.runs = json.dumps(
        [status("finished", 30), {**status("stopped", 20), "run": "other", "program": "o:O", **others}]
    )
    train_new = train()
    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    request = StartRequest(run_name="new", source="other@20", detach=True, program_args=given)
    start_cluster(Cluster(hosts.inventory, hosts), console, request)
    assert hosts.done[:2] == [f"begin --run new --from other@20 --program o:O{sets}", "select"]
    assert json.loads(hosts.selection) == {"run": "new", "program": "o:O", **selected}


def test_a_run_that_is_not_there_is_refused_before_anything_is_done(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    with pytest.raises(OperatorMistake, match="there is no run other; the runs are digits"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="other@20"))
    assert hosts.done == []


def test_a_checkpoint_of_the_last_step_or_later_begins_no_run(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    with pytest.raises(OperatorMistake, match=r"^--from digits@30: run new would begin at step 30, and steps is 30"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@30"))
    assert hosts.done == []


def test_a_checkpoint_that_is_not_there_puts_back_what_was(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    hosts.begun = Answer("", "error: --from digits@7: run digits has no checkpoint of step 7; it has 30", code=78)
    with pytest.raises(OperatorMistake, match="has no checkpoint of step 7; it has 30"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@7"))
    assert hosts.selection == ""
    assert "put back" in printed(console)


@pytest.mark.parametrize(
    ("answer", "removed"),
    [
        ({"begun": True, "made": True}, ["remove /srv/trainer/runs/new"]),
        ({"begun": False, "made": False}, []),  # by an earlier start, which may have trained it
        ({"begun": True, "made": False}, []),  # in a directory that has other files
    ],
)
def test_a_run_that_began_and_was_not_started_leaves_its_name_free(
    hosts: FakeHosts, console: Console, answer: dict[str, bool], removed: list[str]
) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    hosts.begun = Answer(json.dumps(answer))
    hosts.environments = False
    with pytest.raises(OperatorMistake, match="isn't set up for"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@20"))
    assert [each for each in hosts.done if each.startswith("remove")] == removed
    assert "put back: run digits" in printed(console)


def test_a_run_that_may_be_selected_still_is_not_removed(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = raises(ClusterTrouble("/srv/trainer/selection.json can't be written"))
    hosts.runs = json.dumps([status("finished", 30)])
    monkeypatch.setattr(Cluster, "select", fail)
    monkeypatch.setattr("fleet.verbs.start.select_and_observe", fail)
    with pytest.raises(ClusterTrouble, match="can't be written"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@20"))
    assert [each for each in hosts.done if each.startswith("remove")] == []
    assert "run new is kept, since it may be selected still" in printed(console)


def test_a_run_that_began_is_kept_from_the_start_of_its_tasks_on(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    monkeypatch.setattr(Cluster, "start", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@20"))
    assert "put back" in hosts.done
    assert not [each for each in hosts.done if each.startswith("remove")]


def test_new_run_of_the_inventory_stops_the_old_one_once_it_is_proven(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(**UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.inventory = make_inventory(run="digits-2")
    shipped: list[tuple[str, list[str]]] = []
    console.ship = record(shipped, hosts)
    hosts.tick = lambda hosts: train_new(hosts) if len(shipped) > 1 else None
    train_new = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert shipped == [("release.yml", []), ("training.yml", ["stop chief-0", "stop evaluator-0"])]


def test_run_that_was_selected_counts_more_than_the_inventorys(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.selection = '{"run": "digits"}'
    hosts.inventory = make_inventory(run="digits-2")
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.done == []


def test_finished_run_is_not_started_again(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == []
    assert "start a new one with: fab start-cluster --run NAME" in printed(console)


def test_a_finished_run_that_began_elsewhere_is_not_called_begun_from_there(hosts: FakeHosts, console: Console) -> None:
    finished = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.runs = json.dumps([{**finished, "run": "other"}, {**finished, "begun_from": "other@10"}])
    hosts.run_status = {**finished, "begun_from": "other@10"}
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits", source="other@10"))
    assert "It was finished before" in printed(console)
    with pytest.raises(OperatorMistake, match=r"run digits exists already and did not begin from other@20"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits", source="other@20"))


@pytest.mark.parametrize("step", [20, 30])
def test_finished_run_that_lacks_steps_or_its_last_evaluation_is_started(
    hosts: FakeHosts, console: Console, step: int
) -> None:
    hosts.run_status = status("finished", step, evaluation={"step": 20, "metrics": {}})
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert {"start chief-0", "start evaluator-0"} <= set(hosts.done)
    assert "run digits finished" in printed(console)
    assert "trained      30 steps" in printed(console)


def test_trainer_that_leaves_out_the_inventorys_further_steps_is_trouble(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(steps=40)
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.tick = lambda hosts: hosts.set("chief-0", active="inactive", sub="dead")
    with pytest.raises(ClusterTrouble, match="finds run digits finished at step 30, but the inventory wants 40 steps"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" not in printed(console)


def test_start_cluster_touches_nothing_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    hosts.unreachable = {"far": "no answer from 192.0.2.30:22 in 10 s"}
    with pytest.raises(HostsUnreachable, match="far is unreachable") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 4
    assert hosts.done == []
    assert "inactive (dead)" in printed(console)


@pytest.mark.parametrize("how", ["flag", "minimum", "answer"])
def test_a_cluster_starts_without_a_host_that_is_away(hosts: FakeHosts, console: Console, how: str) -> None:
    hosts.unreachable = {"far": "no answer"}
    hosts.tick = train()
    asked: list[str] = []
    console.ask = lambda question: bool(asked.append(question)) or how == "answer"
    if how == "minimum":
        for variables in hosts.inventory.variables.values():
            variables["cluster_minimum"] = {"worker": 0.5}  # type: ignore[index]
    shipped: list[Sequence[str]] = []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append(shipment.without)
        return ShipmentResult({}, {})

    console.ship = ship
    cluster = Cluster(hosts.inventory, hosts)
    start_cluster(cluster, console, StartRequest(detach=True, allow_missing=how == "flag"))
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0")]
    assert shipped == [["far"], ["far"]]
    assert "  without worker-1 on far: no answer\n" in printed(console)
    questions = ["far can't be reached. Start without worker-1? [y/N] "]
    assert asked == (questions if how == "answer" else [])


@pytest.mark.parametrize("dies_in", ["release.yml", "training.yml"])
def test_a_host_that_dies_while_it_is_shipped_to_costs_itself(hosts: FakeHosts, console: Console, dies_in: str) -> None:
    hosts.tick = train()
    shipped: list[tuple[str, Sequence[str]]] = []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append((shipment.playbooks[-1], shipment.without))
        if shipment.playbooks[-1] == dies_in and not shipment.without:
            hosts.unreachable = {"far": "no answer"}
            raise HostsUnreachable({"far": "Ansible could not reach it"}, "its output")
        return ShipmentResult({}, {})

    console.ship = ship
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, allow_missing=True))
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0")]
    assert (dies_in, ["far"]) in shipped
    assert "going on without far\n" in printed(console)


@pytest.mark.parametrize("given", [None, {"worker": "all"}])
def test_a_cluster_does_not_start_below_its_minimum(
    hosts: FakeHosts, console: Console, given: dict[str, Any] | None
) -> None:
    hosts.unreachable = {"far" if given else "store": "no answer"}
    for variables in hosts.inventory.variables.values():
        variables["cluster_minimum"] = given  # type: ignore[index]
    console.ask = lambda _: pytest.fail("asked for what can't be")
    with pytest.raises(HostsUnreachable, match="can be started, and at least"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(allow_missing=True))
    assert hosts.done == []


def test_start_cluster_asks_for_site_yml_when_nothing_is_installed(hosts: FakeHosts, console: Console) -> None:
    hosts.release = None
    with pytest.raises(OperatorMistake, match=r"Run `ansible-playbook site\.yml` first") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 2


def test_task_that_has_no_environment_after_shipping_is_not_started(hosts: FakeHosts, console: Console) -> None:
    hosts.environments = False
    with pytest.raises(OperatorMistake, match="head isn't set up for chief-0"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == ["put back", "tell abc123"]


def test_task_of_a_new_strategy_gets_its_environment_by_shipping(hosts: FakeHosts, console: Console) -> None:
    hosts.environments = False
    hosts.tick = train()

    def ship() -> None:
        hosts.environments, hosts.settings = True, "6a88 -"

    console.ship = shipping(ship)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_start_cluster_asks_for_site_yml_when_a_host_has_no_unit(hosts: FakeHosts, console: Console) -> None:
    hosts.set("worker-1", load="not-found")
    with pytest.raises(OperatorMistake, match=r"far isn't set up: there is no trainer@\.service"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_start_cluster_says_which_groups_stand_idle(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert "group ps (store) is unused: the strategy multi_worker_mirrored has no ps\n" in printed(console)


def test_settings_are_digested_around_the_shipping_alone(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.digested == 2 * len(hosts.inventory.hosts)


@pytest.mark.parametrize(
    ("release", "settings", "shipped"),
    [
        ("abc123", "6a88 -", "shipped to 3 of 3 hosts (settings)"),
        ("def456", "5e77 -", "shipped to 3 of 3 hosts (code)"),
        ("def456", "6a88 -", "shipped to 3 of 3 hosts (code and settings)"),
        ("abc123", "5e77 -", "shipped to 1 of 3 hosts"),
    ],
)
def test_start_cluster_says_what_was_shipped(
    hosts: FakeHosts, console: Console, release: str, settings: str, shipped: str
) -> None:
    hosts.tick = train()

    def ship() -> dict[str, Recap]:
        hosts.release, hosts.settings = release, settings
        return {"localhost": Recap(1, 0, 0), "head": Recap(2, 0, 0)}

    console.ship = shipping(ship)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert f"release {release}: {shipped}\n" in printed(console)


def test_restart_cluster_stops_everything_but_keeps_it_enabled(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled", **UP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, restart=True))
    assert hosts.done[:5] == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0", "stop worker-1"]
    assert len(hosts.done) == 10
    assert all(unit.enabled for unit in hosts.units.values())


def test_servers_of_a_finished_run_are_started_for_the_next_one(hosts: FakeHosts, console: Console) -> None:
    hosts.set_all(file_state="enabled")
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.selection = '{"run": "digits"}'
    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    train_new = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits-2", detach=True))
    tasks = ("chief-0", "evaluator-0", "ps-0", "worker-0", "worker-1")
    assert hosts.done == ["select", *(f"start {name}" for name in tasks)]


def test_a_plan_is_shown_and_nothing_is_done(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"
    shipped: list[Shipment] = []

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
        shipped.append(shipment)
        return ShipmentResult({}, {"Write the run settings": ["head", "far"]})

    console.ship = ship
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", plan_only=True))
    assert hosts.done == []
    (shipment,) = shipped
    assert shipment.check
    assert shipment.arguments[-1] == "--check"
    assert printed(console).splitlines() == [
        "plan",
        "  ship    release def456 to head, store, far",
        *(f"  way     by Ansible: {host}: {UNKNOWN}" for host in ("head", "store", "far")),
        "  select  run digits-2",
        "  stop    chief-0, evaluator-0",
        "  restart ps-0, worker-0, worker-1 (on the new release)",
        "  start   chief-0, evaluator-0",
        "  change  Write the run settings: head, far",
        "  pause   run digits ends; to go on with it: fab start-cluster --run digits",
        "  lost    no step: it saves before it stops",
        "nothing was done, and nothing is proven yet: that needs the release on the hosts",
    ]
