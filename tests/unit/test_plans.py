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

from fleet.actions.console import Console
from fleet.errors import FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.places import KIT
from fleet.verbs.backup import back_up
from fleet.verbs.canary import CanaryRequest, canary
from fleet.verbs.clone_run import clone_run
from fleet.verbs.delete_run import delete_run
from fleet.verbs.drain import drain, undrain
from fleet.verbs.prune import prune
from fleet.verbs.queue import QueueRequest, queue_add, queue_move, queue_remove
from fleet.verbs.remove_host import remove_host, replace_host
from fleet.verbs.restore_run import restore_run
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from tests.unit import fake_hosts
from tests.unit import test_canary as canaries
from tests.unit import test_queue_verbs as queues
from tests.unit import test_remove_host as removals
from tests.unit import test_runs_verbs as runs
from tests.unit import test_second_day as day
from tests.unit import test_update_hosts as updates
from tests.unit.test_upkeep import make, train
from trainer.core.settings.config import Config
from trainer.run import copies
from trainer.run.records import write_record

Act = Callable[[bool], None]


class Case:
    """Where a case has its hosts; each call of a verb finds them as they were at first."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch
        self.answers = io.StringIO()

    def console(self, hosts: Any, release: str = "abc123") -> Console:
        return fake_hosts.console_of(hosts, release, json_out=self.answers)

    def config(self) -> Config:
        for name in ("backups", "shared"):
            (self.path / name).mkdir()
        config = Config(program="p:P", run="digits", shared_dir=str(self.path / "shared"), lease_seconds=10.0)
        write_record(self.path / "shared/selection.json", {"run": "chosen"})
        write_record(self.path / "run.json", {"program": "p:P", "run": "digits", "shared_dir": config.shared_dir})
        return config

    def keeper(self) -> Cluster:
        hosts = runs.Hosts(
            fake_hosts.make_inventory(),
            run_status=fake_hosts.status("new", None),
            settings_file=str(self.path / "run.json"),
        )
        return Cluster(hosts.inventory, hosts)

    def hosts_of_a_site(self) -> day.Hosts:
        return removals.hosts_of(removals.make_site(self.path / "mine"))


def start(case: Case) -> Act:
    hosts = day.make_hosts()
    hosts.runs = json.dumps([{**fake_hosts.status("stopped", 20), "run": name} for name in ("old", "new")])
    request = {"run_name": "new", "source": "old@20"}
    return lambda plan: start_cluster(
        day.cluster(hosts), case.console(hosts), StartRequest(**request, plan_only=plan)  # type: ignore[arg-type]
    )  # fmt: skip


def restart(case: Case) -> Act:
    hosts = day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: start_cluster(
        day.cluster(hosts), case.console(hosts), StartRequest(restart=True, plan_only=plan)
    )  # fmt: skip


def stop(case: Case) -> Act:
    hosts = day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: stop_cluster(day.cluster(hosts), case.console(hosts), plan_only=plan)


def sweep(case: Case) -> Act:
    hosts = day.make_hosts()
    asked = {"sweep": {"name": "rates", "points": [{"rate": "{{ x }}"}]}}
    return lambda plan: start_cluster(
        day.cluster(hosts), case.console(hosts), StartRequest(sweep=asked, plan_only=plan)
    )


def add(case: Case) -> Act:
    hosts = queues.make_hosts(case.path)
    return lambda plan: queue_add(
        queues.cluster(hosts), case.console(hosts, "other"), QueueRequest("next"), plan_only=plan
    )


def move(case: Case) -> Act:
    hosts = queues.make_hosts(case.path)
    return lambda plan: queue_move(queues.cluster(hosts), case.console(hosts), "nobody", "first", plan_only=plan)


def take_out(case: Case) -> Act:
    hosts = queues.make_hosts(case.path)
    queue_add(queues.cluster(hosts), case.console(hosts), QueueRequest("next"))
    return lambda plan: queue_remove(queues.cluster(hosts), case.console(hosts), "digits", plan_only=plan)


def leave(case: Case) -> Act:
    hosts = day.make_hosts()
    return lambda plan: drain(day.cluster(hosts), case.console(hosts), "head", plan_only=plan)


def come_back(case: Case) -> Act:
    hosts = day.make_hosts()
    drain(day.cluster(hosts), case.console(hosts), "w-b")
    hosts.unreachable["w-b"] = "no route"

    def act(plan: bool) -> None:
        undrain(day.cluster(hosts), case.console(hosts), "w-b", plan_only=plan)

    return act


def update_too_few(case: Case) -> Act:
    hosts = updates.make_hosts()
    drain(day.cluster(hosts), case.console(hosts), "ps-b")
    hosts.updates = {"ps-a": ["openssl"]}
    return lambda plan: update_hosts(day.cluster(hosts), case.console(hosts), UpdateRequest(plan_only=plan))


def update_away(case: Case) -> Act:
    hosts = updates.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    return lambda plan: update_hosts(day.cluster(hosts), case.console(hosts), UpdateRequest(plan_only=plan))


def try_out(case: Case) -> Act:
    hosts = canaries.make_hosts(case.monkeypatch)
    hosts.available = 2**20
    return lambda plan: canary(day.cluster(hosts), case.console(hosts, "new"), CanaryRequest("w-b", 20, plan_only=plan))


def go_back(case: Case) -> Act:
    hosts = day.keep_releases(day.make_hosts(), case.monkeypatch)
    return lambda plan: rollback(day.cluster(hosts), case.console(hosts), "gone", plan_only=plan)


def take_away(case: Case) -> Act:
    hosts = case.hosts_of_a_site()
    return lambda plan: remove_host(day.cluster(hosts), case.console(hosts), "w-a", plan_only=plan)


def replace(case: Case) -> Act:
    hosts = case.hosts_of_a_site()
    return lambda plan: replace_host(
        day.cluster(hosts), case.console(hosts), "w-a", "w-x", "192.0.2.99", plan_only=plan
    )


def delete(case: Case) -> Act:
    train(make(case.config(), "digits"))
    cluster = case.keeper()
    return lambda plan: delete_run(cluster, case.console(cluster.hosts), "digits", yes=True, plan=plan)


def remove_old(case: Case) -> Act:
    cluster = case.keeper()
    return lambda plan: prune(cluster, case.console(cluster.hosts), 1, ["logs"], yes=True, plan=plan)


def fill(case: Case) -> None:
    class Full:
        f_bavail, f_frsize = 0, 4096

    case.monkeypatch.setattr(copies.os, "statvfs", lambda _: Full)


def copy(case: Case) -> Act:
    make(case.config(), "digits")
    fill(case)
    cluster = case.keeper()
    return lambda plan: back_up(cluster, case.console(cluster.hosts), "digits", str(case.path / "backups"), plan)


def copy_where_nobody_may_write(case: Case) -> Act:
    make(case.config(), "digits")
    case.monkeypatch.setattr("trainer.run.upkeep.os.access", lambda *_: False)
    cluster = case.keeper()
    return lambda plan: back_up(cluster, case.console(cluster.hosts), "digits", str(case.path / "backups"), plan)


def take_back(case: Case) -> Act:
    make(case.config(), "digits")
    cluster = case.keeper()
    back_up(cluster, case.console(cluster.hosts), "digits", str(case.path / "backups"))
    fill(case)
    where = str(case.path / "backups/digits@20")
    return lambda plan: restore_run(cluster, case.console(cluster.hosts), where, "again", plan)


def clone(case: Case) -> Act:
    make(case.config(), "digits")
    fill(case)
    cluster = case.keeper()
    return lambda plan: clone_run(cluster, case.console(cluster.hosts), "digits", "twin", plan)


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
    "update-hosts": [update_too_few, update_away],
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
    case: Callable[[Case], Act], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, ends = case(Case(tmp_path, monkeypatch)), []
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


def test_a_plan_of_hosts_that_can_be_updated_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb updates them, the coordinator's host last."""
    case, hosts = Case(tmp_path, monkeypatch), updates.make_hosts()
    hosts.updates = {"head": ["openssl"], "w-a": ["openssl"]}
    update_hosts(day.cluster(hosts), case.console(hosts), UpdateRequest(plan_only=True))
    rows = json.loads(case.answers.getvalue())["hosts"]
    assert [(row["host"], row["outcome"]) for row in rows] == [("w-a", "planned"), ("head", "planned")]
    assert hosts.work == []


def test_a_plan_of_a_stop_names_the_tasks_and_stops_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, hosts = Case(tmp_path, monkeypatch), day.make_hosts()
    hosts.set("worker-1", active="inactive", sub="dead")
    console = case.console(hosts)
    stop_cluster(day.cluster(hosts), console, plan_only=True)
    assert hosts.done == []
    assert json.loads(case.answers.getvalue())["planned"] == ["chief-0", "ps-0", "ps-1", "worker-0", "evaluator-0"]
    first, *then, last = fake_hosts.printed(console).splitlines()
    assert (first, last) == ("stop-cluster", "nothing was done. Do it: fab stop-cluster")
    assert then == [
        "  stops after a checkpoint  chief-0",
        "  then stops                ps-0, ps-1, worker-0, evaluator-0",
        "  pause   until the next fab start-cluster",
        "  lost    no step: it saves before it stops",
    ]


@pytest.mark.parametrize("plan", [True, False])
def test_of_a_host_that_is_away_a_stop_says_what_is_true_of_a_plan_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bool
) -> None:
    case, hosts = Case(tmp_path, monkeypatch), day.make_hosts()
    hosts.unreachable["w-b"] = "no route"
    with pytest.raises(HostsUnreachable, match="What runs there goes on until `fab stop-cluster` reaches it"):
        stop_cluster(day.cluster(hosts), case.console(hosts), plan_only=plan)
    assert (hosts.done == []) is plan


@pytest.mark.parametrize("plan", [True, False])
def test_a_host_that_is_gone_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bool) -> None:
    case = Case(tmp_path, monkeypatch)
    hosts = case.hosts_of_a_site()
    remove_host(day.cluster(hosts), case.console(hosts), "w-gone", plan_only=plan)
    assert json.loads(case.answers.getvalue())["outcome"] == "nothing to do"
