"""Hosts without a task, as a server of the shared path or one of Prometheus, in the verbs of the second day."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.actions.served import wait_for_save
from fleet.doctor import examination
from fleet.doctor.cluster import judge_look
from fleet.doctor.finding import ERROR
from fleet.doctor.hosts import judge_hosts
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.ssh import Answer
from fleet.hosts.units import Unit
from fleet.site.inventory import load_inventory
from fleet.site.routes import Host
from fleet.verbs.drain import drain, undrain
from fleet.verbs.hosts import show_hosts
from fleet.verbs.ok_to_stop import ok_to_stop
from fleet.verbs.remove_host import remove_host
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from tests.unit import fake_hosts
from tests.unit import test_doctor as doctors
from tests.unit import test_update_hosts as updates
from tests.unit.test_second_day import ALL, cluster, up
from tests.unit.test_verb_rules import disturb

BESIDE = {"store": ("nfs_server", "192.0.2.40"), "mon": ("prometheus", "192.0.2.50"), "reader": ("data", "192.0.2.60")}


@dataclass
class Hosts(updates.Hosts):
    """The hosts of test_update_hosts.py, and three without a task."""

    down: set[str] = field(default_factory=set)
    """Hosts whose services don't run."""
    spoilt: set[str] = field(default_factory=set)
    """Those where updates end them."""
    saves: bool = True
    hangs_until: float = 0.0
    """When the shared path answers again."""
    leaves: dict[str, float] = field(default_factory=dict)
    """How long a host gives no answer once its update is in."""
    gone_until: dict[str, float] = field(default_factory=dict)

    def _look(self, host: str, script: str) -> Answer:
        if self.run_status and self.saves and host == "head":
            self.run_status = {**self.run_status, "checkpoint": f"ckpt-{self.now:.0f}", "updated": self.now}
        printed = super()._look(host, script).stdout
        state = "failed" if host in self.down else "active"
        for unit in self.inventory.services_on(host).values():
            printed = printed.replace("@units", f"@units\nId={unit}\nLoadState=loaded\nActiveState={state}\n", 1)
        return Answer(printed)

    def _answer(self, host: str, script: str) -> Answer:
        if " ls /srv/trainer" in script:
            return Answer(code=124 if self.now < self.hangs_until else 0)
        if "--unit=psfleet-update" in script and host in self.spoilt:
            self.down.add(host)
        if "--unit=psfleet-update" in script and host in self.leaves:
            self.gone_until[host] = self.now + self.leaves[host]
        if "systemctl reboot" in script and host == "store":
            self.hangs_until = self.now + updates.SLOW + 90
        if "@units" in script and self.now < self.gone_until.get(host, 0.0):
            return Answer(unreachable="no route")
        return super()._answer(host, script)


@pytest.fixture
def hosts() -> Hosts:
    made = updates.make_hosts()
    found = Hosts(**{each.name: getattr(made, each.name) for each in fields(made) if each.init})
    known = found.inventory
    site = known.variables["head"]
    found.inventory = replace(
        known,
        groups={**known.groups, **{group: [host] for host, (group, _) in BESIDE.items()}},
        beside={host: Host(host, address) for host, (_, address) in BESIDE.items()},
        variables={**known.variables, **{host: {**site, "ansible_host": at} for host, (_, at) in BESIDE.items()}},
    )
    return found


@pytest.fixture
def console(hosts: Hosts) -> Console:
    return fake_hosts.console_of(hosts, json_out=io.StringIO())


def answer(console: Console) -> dict[str, Any]:
    return updates.answer(console)


def test_an_inventory_has_its_hosts_without_a_task_apart(tmp_path: Path) -> None:
    text = (
        "chief: {hosts: {head: {ansible_host: 192.0.2.1}}}\nnfs_server: {hosts: {store: {ansible_host: 192.0.2.2}}}\n"
    )
    local = "prometheus: {hosts: {here: {ansible_host: 192.0.2.3, ansible_connection: local}}}\n"
    other = "others: {hosts: {mail: {ansible_host: 192.0.2.4}}}\n"
    settings = "all: {vars: {cluster_shared_dir: /srv/trainer, trainer_run: {strategy: one_device}}}\n"
    (tmp_path / "hosts.yml").write_text(text + local + other + settings)
    found = load_inventory(str(tmp_path / "hosts.yml"))
    assert ([*found.hosts], [*found.beside], [*found.everyone]) == (["head"], ["store"], ["head", "store"])
    assert found.services_on("store") == {"nfs_server": "nfs-server.service"}


def test_hosts_shows_them_and_what_they_serve(hosts: Hosts, console: Console) -> None:
    hosts.down = {"mon"}
    show_hosts(cluster(hosts), console)
    rows = {row["host"]: row for row in answer(console)["hosts"]}
    found = {
        host: (rows[host]["tasks"], rows[host]["serves"], rows[host]["state"], rows[host]["why"]) for host in BESIDE
    }
    assert found == {
        "store": ([], ["nfs_server"], "ready", None),
        "mon": ([], ["prometheus"], "away", "prometheus.service has failed"),
        "reader": ([], [], "ready", None),
    }
    hosts.unreachable["mon"] = "no route"
    shown = replace(console, json_out=None)
    with pytest.raises(HostsUnreachable, match="mon is unreachable"):
        show_hosts(cluster(hosts), shown)
    assert re.search(r"^store +ready +nfs_server", fake_hosts.printed(shown), re.MULTILINE)


def test_before_the_first_site_yml_a_host_is_new_and_not_ready(hosts: Hosts, console: Console) -> None:
    hosts.release = ""
    show_hosts(cluster(hosts), console)
    found = {row["host"]: (row["state"], row["why"]) for row in answer(console)["hosts"]}
    new = ("new", "nothing is installed there yet: ansible-playbook site.yml")
    assert found["head"] == new
    assert {host for host in found if found[host] != new} == set(BESIDE)


def test_the_server_of_the_path_must_not_go_and_others_may(hosts: Hosts, console: Console) -> None:
    quiet = replace(console, json_out=None)
    with pytest.raises(ClusterTrouble, match="not now: store serves the shared path"):
        ok_to_stop(cluster(hosts), quiet, ["store"])
    printed = fake_hosts.printed(quiet)
    assert "pause   of what reads or writes the shared path, until it is back" in printed
    assert "serves  the shared path: what reads or writes there waits" in printed
    ok_to_stop(cluster(hosts), quiet, ["mon", "reader"])
    assert "serves  Prometheus: it keeps no metrics and raises no alert" in fake_hosts.printed(quiet)
    assert "yes: mon, reader may be taken away now" in fake_hosts.printed(quiet)


def test_a_drain_of_them_says_that_there_is_nothing_to_drain(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "mon")
    assert (answer(console)["outcome"], answer(console)["next"]) == ("nothing to do", "fab hosts")
    assert "mon has no task: there is nothing to drain" in fake_hosts.printed(console)
    with pytest.raises(OperatorMistake, match="store has no task to drain, and serves the shared path"):
        drain(cluster(hosts), console, "store")
    assert (hosts.marks, hosts.recorded, hosts.lines) == ({}, {}, [])
    with pytest.raises(OperatorMistake, match=r"mon has no task: `ansible-playbook reset.yml --limit mon` cleans it"):
        remove_host(cluster(hosts), console, "mon")


def test_a_host_that_was_drained_before_it_lost_its_tasks_can_be_undrained(hosts: Hosts, console: Console) -> None:
    hosts.recorded["reader"] = '{"host": "reader"}'
    hosts.marks["reader"] = '{"host": "reader"}'
    undrain(cluster(hosts), console, "reader")
    assert (hosts.marks, hosts.recorded) == ({}, {})
    assert "reader is drained no more, and has no task" in fake_hosts.printed(console)


def test_they_are_updated_without_a_drain(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"mon": ["prometheus"], "reader": ["openssl"], "w-a": ["openssl"]}
    hosts.reboots = {"mon": "a new kernel"}
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update w-a of worker-0", "update mon of ", "reboot mon of , and back", "update reader of "]
    assert (up(hosts), answer(console)["outcome"]) == (ALL, "done")


def test_a_service_that_is_not_back_ends_the_update(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.spoilt = {"mon": ["prometheus"], "reader": ["openssl"]}, {"mon"}
    with pytest.raises(ClusterTrouble, match=r"mon is updated, and prometheus\.service has failed\. Look"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update mon of "]
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest())  # what was down before may stay so
    hosts.updates["mon"] = ["openssl"]
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest(["mon"]))
    assert hosts.work[1:] == ["update reader of ", "update mon of "]


def test_a_server_that_does_not_answer_does_not_count_as_back(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.leaves = {"mon": ["prometheus"], "reader": ["openssl"]}, {"mon": 60.0}
    begun = hosts.now
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.now - begun >= 60
    hosts.updates, hosts.leaves = {"mon": ["prometheus"], "reader": ["openssl"]}, {"mon": 600.0}
    with pytest.raises(HostsUnreachable, match=r"mon is unreachable: no route\nIt is updated\. When it is back"):
        update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest())
    assert hosts.work[2:] == ["update mon of "]


def test_a_service_that_fails_keeps_no_host_out_of_the_training(hosts: Hosts, console: Console) -> None:
    hosts.inventory = replace(hosts.inventory, groups={**hosts.inventory.groups, "tensorboard": ["w-b"]})
    hosts.updates, hosts.spoilt = {"w-b": ["python3"]}, {"w-b"}
    with pytest.raises(ClusterTrouble, match=r"w-b is updated, and tensorboard\.service has failed"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert (up(hosts), hosts.marks) == (ALL, {})


@pytest.mark.parametrize("at", range(1, 43))  # the questions to the hosts
def test_an_update_of_them_goes_on_wherever_it_was_left(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    hosts.updates = {"store": ["nfs-kernel-server"], "mon": ["prometheus"]}
    hosts.reboots = {"store": "a new kernel"}
    asked, quiet = UpdateRequest(["store", "mon"]), replace(console, json_out=None)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        disturb(hosts, patch, at, "left")
        update_hosts(cluster(hosts), quiet, asked)
    hosts.now += 200
    update_hosts(cluster(hosts), quiet, asked)
    assert sorted(hosts.work) == ["reboot store of , and back", "update mon of ", "update store of "]
    assert (up(hosts), hosts.marks, hosts.recorded) == (ALL, {}, {})


def test_the_server_of_the_path_is_updated_last_where_it_is_named(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"store": ["nfs-kernel-server"], "w-b": ["openssl"]}
    hosts.reboots = {"store": "a new kernel"}
    why = "store was left: it serves the .*must be named\nThe run is saved and goes on: fab update-hosts store$"
    with pytest.raises(ClusterTrouble, match=why):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update w-b of worker-1"]
    hosts.updates["w-b"] = ["openssl"]
    begun = hosts.now
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest(["store", "w-b"]))
    assert hosts.work[1:] == ["update w-b of worker-1", "update store of ", "reboot store of , and back"]
    assert hosts.now - begun > 90
    assert (up(hosts), hosts.marks) == (ALL, {})


def test_the_server_of_the_path_waits_for_a_save(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.saves = {"store": ["nfs-kernel-server"]}, False
    with pytest.raises(ClusterTrouble, match="store was left: the coordinator does not save: fab logs --task chief-0"):
        update_hosts(cluster(hosts), console, UpdateRequest(["store"]))
    assert hosts.work == []
    stop_cluster(cluster(hosts), replace(console, json_out=None))
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest())  # now at once, and unnamed
    assert hosts.work == [f"update store of {','.join(sorted(ALL))}"]


def test_a_save_from_before_the_run_was_first_seen_is_none_to_wait_for(hosts: Hosts, console: Console) -> None:
    hosts.saves = False
    seen, run = cluster(hosts).observe(), hosts.run_status
    assert run is not None
    run["checkpoint"] = "ckpt-15"

    def tick(pretended: fake_hosts.FakeHosts) -> None:
        pretended.run_status = None if pretended.now < 1010 else run if pretended.now < 1100 else saved

    saved = {**run, "checkpoint": "ckpt-20"}
    hosts.tick = tick
    begun = hosts.now
    assert wait_for_save(cluster(hosts), console, replace(seen, run=None))
    assert hosts.now - begun >= 100


def test_a_plan_says_what_waits_for_them(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"store": ["nfs-kernel-server"], "mon": ["prometheus"]}
    update_hosts(cluster(hosts), console, UpdateRequest(["store", "mon"], plan_only=True))
    printed = re.sub("  +", " ", fake_hosts.printed(console))
    assert "mon: 1 update (prometheus), then a reboot where they ask for one\n stops nothing\n pause none" in printed
    assert "\n pause of what reads or writes the shared path, until it is back\n lost no step\n serves the" in printed
    assert [row["outcome"] for row in answer(console)["hosts"]] == ["planned", "planned"]
    assert hosts.work == []


def test_a_doctor_judges_them_by_what_they_need(hosts: Hosts) -> None:
    path = {"rc": None, "why": ""}
    facts = {host: {**doctors.FACTS, "path": path, "disk_pace": None, "memory_pace": None} for host in BESIDE}
    failed = Unit("prometheus.service", active="failed")
    seen = Observation(services={"mon": [failed]}, releases=dict.fromkeys(BESIDE, None))
    found = judge_hosts(hosts.inventory, seen, facts)
    assert [(each.level, each.where, each.what) for each in found] == [(ERROR, "mon", "prometheus.service has failed")]
    assert judge_look(hosts.inventory, examination.Examination(Observation(releases=seen.releases)), None) == []
    lost = judge_hosts(hosts.inventory, Observation(unreachable={"store": "no answer"}), {})
    assert [(each.where, each.fix) for each in lost] == [("store", "ssh -v 192.0.2.40")]
    little = {**facts["store"], "room": {"/srv/nfs": doctors.room(free=10**8)["/"]}}
    hosts.inventory.variables["store"]["cluster_nfs_dir"] = "/srv/nfs"  # type: ignore[index]
    (full,) = judge_hosts(hosts.inventory, Observation(), {"store": little})
    assert full.fix == "fab prune --keep 5 --plan"


def test_a_doctor_asks_them_for_the_room_of_what_they_serve(hosts: Hosts) -> None:
    hosts.inventory.variables["store"]["cluster_nfs_dir"] = "/srv/nfs"  # type: ignore[index]
    asked = {host: examination._with_probe(Cluster(hosts.inventory, hosts), host, {}, 0.0) for host in BESIDE}
    steps = {host: {step["name"]: step["arguments"] for step in each["steps"]} for host, each in asked.items()}
    assert steps["store"].keys() == {"doctor", "ways"}
    assert [steps[host]["doctor"]["asked"]["shared_dir"] for host in ("store", "mon")] == ["/srv/nfs", "/var"]
    assert json.dumps(steps)
