"""A machine goes for good, or another takes its place: the inventory's lines, and what is refused."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from fleet import verbs
from fleet.cluster import Cluster
from fleet.errors import OperatorMistake
from fleet.site.inventory import load_inventory
from fleet.ssh import Answer
from fleet.verbs.drain import drain
from fleet.verbs.remove_host import remove_host, replace_host
from tests.unit import test_fleet_verbs as fleet
from tests.unit.test_second_day import Hosts

HOSTS = """---
# Ours.
chief:
  hosts:
    head: {ansible_host: 192.0.2.10}
ps:
  hosts:
    ps-a:
      ansible_host: 192.0.2.20
    # The one with the large disk.
    ps-b:
      ansible_host: 192.0.2.21
worker:
  hosts:
    w-a:
      ansible_host: 192.0.2.30
    w-b:
      ansible_host: 192.0.2.31

    # Bought last.
    w-c: {ansible_host: 192.0.2.32}
near:
  hosts:
    w-a:
    w-b:
"""
VARIABLES = """---
cluster_shared_dir: /srv/trainer
cluster_uid: 6006
trainer_run: {program: 'trainer.examples.digits:Digits', run: digits, steps: 30}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine/group_vars").mkdir(parents=True)
    (tmp_path / "mine/hosts.yml").write_text(HOSTS)
    (tmp_path / "mine/group_vars/all.yml").write_text(VARIABLES)
    return tmp_path / "mine"


@pytest.fixture
def hosts(place: Path) -> Hosts:
    found = Hosts(load_inventory(str(place)), run_status=fleet.status("training", 20))
    for name in found.units:
        found.set(name, file_state="enabled", **fleet.UP)
    return found


@pytest.fixture
def desk(hosts: Hosts) -> verbs.Desk:
    clock = fleet.Clock(hosts=hosts)
    return verbs.Desk(io.StringIO(), clock, clock.sleep)


def cluster(hosts: Hosts) -> Cluster:
    return Cluster(hosts.inventory, hosts)


def tasks(place: Path) -> dict[str, tuple[str, str]]:
    return {task.name: (task.host, task.address) for task in load_inventory(str(place)).tasks}


def test_a_host_that_leaves_the_middle_moves_no_number(place: Path, hosts: Hosts, desk: verbs.Desk) -> None:
    before = tasks(place)
    drain(cluster(hosts), desk, "w-a", "sold")
    remove_host(cluster(hosts), desk, "w-a", "sold")
    assert tasks(place) == {name: each for name, each in before.items() if each[0] != "w-a"}
    text = (place / "hosts.yml").read_text()
    assert "w-a" not in text
    assert "# Bought last.\n    w-c: {worker_index: 2, ansible_host: 192.0.2.32}" in text
    assert "    w-b:\n      worker_index: 1\n      ansible_host: 192.0.2.31\n" in text
    (backup,) = place.parent.glob("mine.hosts.yml.before-*")
    assert backup.read_text() == HOSTS
    assert hosts.recorded == {}
    assert hosts.leavers == set()
    inventory = load_inventory(str(place))
    remove_host(Cluster(inventory, hosts), desk, "w-a")  # typed twice
    assert "has no host w-a with a task: it is removed already" in fleet.printed(desk)


def test_the_last_of_a_group_leaves_the_others_as_they_are(place: Path, hosts: Hosts, desk: verbs.Desk) -> None:
    drain(cluster(hosts), desk, "ps-b")
    remove_host(cluster(hosts), desk, "ps-b")
    text = HOSTS.replace("    ps-b:\n      ansible_host: 192.0.2.21\n", "")
    assert (place / "hosts.yml").read_text() == text


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("w-a", "worker-0 on w-a runs: fab drain w-a first"),
        ("head", "head has the coordinator, and the training stands still without it"),
    ],
)
def test_a_host_that_takes_part_is_not_removed(
    place: Path, hosts: Hosts, desk: verbs.Desk, host: str, message: str
) -> None:
    with pytest.raises(OperatorMistake, match=message):
        remove_host(cluster(hosts), desk, host)
    assert (place / "hosts.yml").read_text() == HOSTS
    assert hosts.lines == []


def test_a_dead_host_is_removed(place: Path, hosts: Hosts, desk: verbs.Desk) -> None:
    hosts.unreachable["w-c"] = "no route"
    remove_host(cluster(hosts), desk, "w-c")
    assert "w-c does not answer, and was not cleaned" in fleet.printed(desk)
    assert "worker-2" not in tasks(place)


def test_a_plan_changes_nothing(place: Path, hosts: Hosts, desk: verbs.Desk) -> None:
    remove_host(cluster(hosts), desk, "w-a", plan_only=True)
    replace_host(cluster(hosts), desk, "w-a", "w-x", "192.0.2.99", plan_only=True)
    assert (place / "hosts.yml").read_text() == HOSTS
    assert "refused worker-0 on w-a runs: fab drain w-a first" in fleet.printed(desk)


def test_a_new_host_takes_the_place_and_the_number(
    place: Path, hosts: Hosts, desk: verbs.Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {}
    monkeypatch.setattr(Cluster, "_write_shared", lambda self, name, record: written.update({name: record}))
    before = tasks(place)
    drain(cluster(hosts), desk, "w-a")
    replace_host(cluster(hosts), desk, "w-a", "w-x", "192.0.2.99")
    assert tasks(place) == {**before, "worker-0": ("w-x", "192.0.2.99")}
    assert (place / "hosts.yml").read_text() == HOSTS.replace("w-a", "w-x").replace("192.0.2.30", "192.0.2.99")
    assert written == {"replaced.json": {"worker-0": ["192.0.2.30:2400"]}}  # the old one's tasks stay out
    with pytest.raises(OperatorMistake, match="has a host 'w-b' already"):
        replace_host(Cluster(load_inventory(str(place)), hosts), desk, "w-x", "w-b")


def test_with_encryption_the_address_that_counts_is_the_tunnels(
    place: Path, hosts: Hosts, desk: verbs.Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "group_vars/all.yml").write_text(f"{VARIABLES}cluster_encryption: true\n")
    hosts.inventory, written = load_inventory(str(place)), {}
    monkeypatch.setattr(Cluster, "_write_shared", lambda self, name, record: written.update(record))
    drain(cluster(hosts), desk, "w-a")
    before = tasks(place)["worker-0"][1]
    replace_host(cluster(hosts), desk, "w-a", "w-x", "192.0.2.99")
    assert (place / "hosts.yml").read_text() == HOSTS.replace("w-a", "w-x").replace("192.0.2.30", "192.0.2.99")
    assert written == {"worker-0": [f"[{before}]:2400"]}


def test_machines_that_were_replaced_before_stay_out_where_only_the_trainer_may_look(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, written = {"ps-0": ["192.0.2.20:2300"]}, {}

    def read(self: Cluster, script: str, trouble: str) -> Answer:
        root = f"root() {{ echo {shlex.quote(json.dumps(known))}; }}; "
        done = subprocess.run(["sh", "-c", root + script], capture_output=True, text=True, check=True)
        return Answer(done.stdout)

    monkeypatch.setattr(Cluster, "on_shared", read)
    monkeypatch.setattr(Cluster, "_write_shared", lambda self, name, record: written.update(record))
    cluster(hosts).replace_tasks({"worker-0": ("192.0.2.30:2400", "192.0.2.99:2400")})
    assert written == {**known, "worker-0": ["192.0.2.30:2400"]}


def test_what_can_t_be_changed_by_lines_is_printed(place: Path, hosts: Hosts, desk: verbs.Desk) -> None:
    text = HOSTS.replace("    w-a:\n    w-b:\n", "    {w-a: , w-b: }\n").replace("  hosts:\n    {w-a", "  hosts: {w-a")
    (place / "hosts.yml").write_text(text)
    drain(cluster(hosts), desk, "w-a")
    remove_host(cluster(hosts), desk, "w-a")
    assert (place / "hosts.yml").read_text() == text
    assert "by hand (line 23 has several hosts in braces):\n  remove the host w-a" in fleet.printed(desk)
    assert "give w-b worker_index: 1" in fleet.printed(desk)
    assert list(place.parent.glob("*before*")) == []


def test_a_host_that_is_replaced_by_hand_stays_out_too(
    place: Path, hosts: Hosts, desk: verbs.Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "more.ini").write_text("[others]\n")
    written = {}
    monkeypatch.setattr(Cluster, "_write_shared", lambda self, name, record: written.update({name: record}))
    drain(cluster(hosts), desk, "w-a")
    replace_host(cluster(hosts), desk, "w-a", "w-x", "192.0.2.99")
    assert "more.ini is no YAML file):\n  write w-x instead of w-a" in fleet.printed(desk)
    assert written == {"replaced.json": {"worker-0": ["192.0.2.30:2400"]}}
