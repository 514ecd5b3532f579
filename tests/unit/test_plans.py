"""A verb with --plan that would be refused is refused with it too: the same message, the same exit code."""

from __future__ import annotations

import io
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invoke import Task

from fleet.cluster import Cluster
from fleet.errors import FleetError, HostsUnreachable
from fleet.places import KIT
from fleet.site.inventory import load_inventory
from fleet.verbs import Desk
from fleet.verbs.backup import back_up
from fleet.verbs.canary import Ask, canary
from fleet.verbs.clone_run import clone_run
from fleet.verbs.delete_run import delete_run
from fleet.verbs.drain import drain, undrain
from fleet.verbs.prune import prune
from fleet.verbs.queue import Asked, queue_add, queue_move, queue_remove
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.restore_run import restore_run
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import Request, update_hosts
from tests.unit import test_canary as canaries
from tests.unit import test_fleet_verbs as fleet
from tests.unit import test_queue_verbs as queues
from tests.unit import test_remove_host as removals
from tests.unit import test_runs_verbs as runs
from tests.unit import test_second_day as day
from tests.unit import test_update_hosts as updates
from tests.unit.test_upkeep import make, train
from trainer.core.config import Config
from trainer.run import copies
from trainer.run.records import write_record

Act = Callable[[bool], None]


class Scene:
    """Where a case has its hosts; each call of a verb finds them as they were at first."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch
        self.answers = io.StringIO()

    def desk(self, hosts: Any, release: str = "abc123") -> Desk:
        clock = fleet.Clock(hosts=hosts)
        find, build = (lambda *_: None), (lambda _: release)
        return Desk(io.StringIO(), clock, clock.sleep, fleet.nothing, find, build, answers=self.answers)

    def config(self) -> Config:
        for name in ("backups", "shared"):
            (self.path / name).mkdir()
        config = Config(program="p:P", run="digits", shared_dir=str(self.path / "shared"), lease_seconds=10.0)
        write_record(self.path / "shared/selection.json", {"run": "chosen"})
        write_record(self.path / "run.json", {"program": "p:P", "run": "digits", "shared_dir": config.shared_dir})
        return config

    def keeper(self) -> Cluster:
        hosts = runs.Hosts(
            fleet.make_inventory(), run_status=fleet.status("new", None), settings_file=str(self.path / "run.json")
        )
        return Cluster(hosts.inventory, hosts)

    def site(self) -> Path:
        place = self.path / "mine"
        (place / "group_vars").mkdir(parents=True)
        (place / "hosts.yml").write_text(removals.HOSTS)
        (place / "group_vars/all.yml").write_text(removals.VARIABLES)
        return place


def start(scene: Scene) -> Act:
    hosts = day.make_hosts()
    hosts.runs = json.dumps([{**fleet.status("stopped", 20), "run": name} for name in ("old", "new")])
    request = {"run_name": "new", "source": "old@20"}
    return lambda plan: start_cluster(
        day.cluster(hosts), scene.desk(hosts), StartRequest(**request, plan_only=plan)  # type: ignore[arg-type]
    )  # fmt: skip


def restart(scene: Scene) -> Act:
    hosts = day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: start_cluster(
        day.cluster(hosts), scene.desk(hosts), StartRequest(restart=True, plan_only=plan)
    )  # fmt: skip


def stop(scene: Scene) -> Act:
    hosts = day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: stop_cluster(day.cluster(hosts), scene.desk(hosts), plan_only=plan)


def sweep(scene: Scene) -> Act:
    hosts = day.make_hosts()
    asked = {"sweep": {"name": "rates", "points": [{"rate": "{{ x }}"}]}}
    return lambda plan: start_cluster(day.cluster(hosts), scene.desk(hosts), StartRequest(sweep=asked, plan_only=plan))


def add(scene: Scene) -> Act:
    hosts = queues.make_hosts(scene.path)
    return lambda plan: queue_add(queues.cluster(hosts), scene.desk(hosts, "other"), Asked("next"), plan_only=plan)


def move(scene: Scene) -> Act:
    hosts = queues.make_hosts(scene.path)
    return lambda plan: queue_move(queues.cluster(hosts), scene.desk(hosts), "nobody", "first", plan_only=plan)


def take_out(scene: Scene) -> Act:
    hosts = queues.make_hosts(scene.path)
    queue_add(queues.cluster(hosts), queues_desk(hosts), Asked("next"))
    return lambda plan: queue_remove(queues.cluster(hosts), scene.desk(hosts), "digits", plan_only=plan)


def queues_desk(hosts: queues.Hosts) -> Desk:
    clock = fleet.Clock(hosts=hosts)
    desk = Desk(io.StringIO(), clock, clock.sleep, fleet.nothing, lambda *_: None, lambda _: "abc123")
    desk.prove = lambda *_: None
    return desk


def leave(scene: Scene) -> Act:
    hosts = day.make_hosts()
    return lambda plan: drain(day.cluster(hosts), scene.desk(hosts), "head", plan_only=plan)


def come_back(scene: Scene) -> Act:
    hosts = day.make_hosts()
    drain(day.cluster(hosts), scene.desk(hosts), "w-b")
    hosts.unreachable["w-b"] = "no route"

    def act(plan: bool) -> None:
        undrain(day.cluster(hosts), scene.desk(hosts), "w-b", plan_only=plan)

    return act


def update(scene: Scene) -> Act:
    hosts = updates.make_hosts()
    hosts.updates = {"head": ["openssl"]}
    return lambda plan: update_hosts(day.cluster(hosts), scene.desk(hosts), Request(plan_only=plan))


def update_too_few(scene: Scene) -> Act:
    hosts = updates.make_hosts()
    drain(day.cluster(hosts), scene.desk(hosts), "ps-b")
    hosts.updates = {"ps-a": ["openssl"]}
    return lambda plan: update_hosts(day.cluster(hosts), scene.desk(hosts), Request(plan_only=plan))


def update_away(scene: Scene) -> Act:
    hosts = updates.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: update_hosts(day.cluster(hosts), scene.desk(hosts), Request(plan_only=plan))


def try_out(scene: Scene) -> Act:
    hosts = canaries.make_hosts(scene.monkeypatch)
    hosts.available = 2**20
    return lambda plan: canary(day.cluster(hosts), scene.desk(hosts, "new"), Ask("w-b", 20, plan_only=plan))


def go_back(scene: Scene) -> Act:
    hosts = day.keep_releases(day.make_hosts(), scene.monkeypatch)
    return lambda plan: rollback(day.cluster(hosts), scene.desk(hosts), "gone", plan_only=plan)


def take_away(scene: Scene) -> Act:
    hosts = day.Hosts(load_inventory(str(scene.site())), run_status=fleet.status("training", 20))
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **fleet.UP)
    return lambda plan: remove_host(day.cluster(hosts), scene.desk(hosts), "w-a", plan_only=plan)


def replace(scene: Scene) -> Act:
    hosts = day.Hosts(load_inventory(str(scene.site())), run_status=fleet.status("training", 20))
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **fleet.UP)
    return lambda plan: replace_host(day.cluster(hosts), scene.desk(hosts), "w-a", "w-x", "192.0.2.99", plan_only=plan)


def delete(scene: Scene) -> Act:
    train(make(scene.config(), "digits"))
    cluster = scene.keeper()
    return lambda plan: delete_run(cluster, scene.desk(cluster.hosts), "digits", yes=True, plan=plan)


def remove_old(scene: Scene) -> Act:
    cluster = scene.keeper()
    return lambda plan: prune(cluster, scene.desk(cluster.hosts), 1, ["logs"], yes=True, plan=plan)


def fill(scene: Scene) -> None:
    class Full:
        f_bavail, f_frsize = 0, 4096

    scene.monkeypatch.setattr(copies.os, "statvfs", lambda _: Full)


def copy(scene: Scene) -> Act:
    make(scene.config(), "digits")
    fill(scene)
    cluster = scene.keeper()
    return lambda plan: back_up(cluster, scene.desk(cluster.hosts), "digits", str(scene.path / "backups"), plan)


def copy_where_nobody_may_write(scene: Scene) -> Act:
    make(scene.config(), "digits")
    scene.monkeypatch.setattr("trainer.run.upkeep.os.access", lambda *_: False)
    cluster = scene.keeper()
    return lambda plan: back_up(cluster, scene.desk(cluster.hosts), "digits", str(scene.path / "backups"), plan)


def take_back(scene: Scene) -> Act:
    make(scene.config(), "digits")
    cluster = scene.keeper()
    back_up(cluster, scene.desk(cluster.hosts), "digits", str(scene.path / "backups"))
    fill(scene)
    where = str(scene.path / "backups/digits@20")
    return lambda plan: restore_run(cluster, scene.desk(cluster.hosts), where, "again", plan)


def clone(scene: Scene) -> Act:
    make(scene.config(), "digits")
    fill(scene)
    cluster = scene.keeper()
    return lambda plan: clone_run(cluster, scene.desk(cluster.hosts), "digits", "twin", plan)


CASES = {
    "start-cluster": [start],
    "restart-cluster": [restart],
    "stop-cluster": [stop],
    "sweep": [sweep],
    "queue-add": [add],
    "queue-move": [move],
    "queue-remove": [take_out],
    "drain": [leave],
    "undrain": [come_back],
    "update-hosts": [update, update_too_few, update_away],
    "canary": [try_out],
    "rollback": [go_back],
    "remove-host": [take_away],
    "replace-host": [replace],
    "delete-run": [delete],
    "prune": [remove_old],
    "backup": [copy, copy_where_nobody_may_write],
    "restore-run": [take_back],
    "clone-run": [clone],
}


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_a_plan_ends_as_the_verb_would(
    case: Callable[[Scene], Act], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, ends = case(Scene(tmp_path, monkeypatch)), []
    for plan in (True, False):
        with pytest.raises(FleetError) as error:
            act(plan)
        ends.append((type(error.value), error.value.code, str(error.value)))
    assert ends[0] == ends[1]
    assert ends[0][2]


def test_every_verb_with_a_plan_has_a_case() -> None:
    verbs = [each for each in runpy.run_path(str(KIT / "fabfile.py")).values() if isinstance(each, Task)]
    takes = [each for each in verbs if any("plan" in flag.names for flag in each.get_arguments())]
    assert {str(each.name).replace("_", "-") for each in takes} == CASES.keys()


def test_a_plan_of_hosts_of_which_some_can_be_updated_is_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb updates them, and says at its end what it has left."""
    scene, hosts = Scene(tmp_path, monkeypatch), updates.make_hosts()
    hosts.updates = {"head": ["openssl"], "w-a": ["openssl"]}
    update_hosts(day.cluster(hosts), scene.desk(hosts), Request(plan_only=True))
    rows = json.loads(scene.answers.getvalue())["hosts"]
    assert [(row["host"], row["outcome"]) for row in rows] == [("w-a", "planned"), ("head", "left")]
    assert hosts.work == []


def test_a_plan_of_a_stop_names_the_tasks_and_stops_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, hosts = Scene(tmp_path, monkeypatch), day.make_hosts()
    hosts.set("worker-1", active="inactive", sub="dead")
    desk = scene.desk(hosts)
    stop_cluster(day.cluster(hosts), desk, plan_only=True)
    assert hosts.done == []
    assert json.loads(scene.answers.getvalue())["planned"] == ["chief-0", "ps-0", "ps-1", "worker-0", "evaluator-0"]
    first, *then, last = fleet.printed(desk).splitlines()
    assert (first, last) == ("stop-cluster", "nothing was done. Do it: fab stop-cluster")
    assert then == [
        "  stops after a checkpoint  chief-0",
        "  then stops                ps-0, ps-1, worker-0, evaluator-0",
    ]


@pytest.mark.parametrize("plan", [True, False])
def test_of_a_host_that_is_away_a_stop_says_what_is_true_of_a_plan_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bool
) -> None:
    scene, hosts = Scene(tmp_path, monkeypatch), day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    with pytest.raises(HostsUnreachable, match="What runs there goes on until `fab stop-cluster` reaches it"):
        stop_cluster(day.cluster(hosts), scene.desk(hosts), plan_only=plan)
    assert (hosts.done == []) is plan


@pytest.mark.parametrize("plan", [True, False])
def test_a_host_that_is_gone_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bool) -> None:
    scene = Scene(tmp_path, monkeypatch)
    hosts = day.Hosts(load_inventory(str(scene.site())), run_status=fleet.status("training", 20))
    remove_host(day.cluster(hosts), scene.desk(hosts), "w-gone", plan_only=plan)
    assert json.loads(scene.answers.getvalue())["outcome"] == "nothing to do"
