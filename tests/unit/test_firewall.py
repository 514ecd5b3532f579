"""Who may come in to each host: rendered from the cluster spec, and read by nft itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import firewall_facts
import firewall_table
import pytest
from cluster_spec import MEMBER, cluster_spec
from firewall import firewall_doors, firewall_notes, firewall_sources, names_among, of_family, opened_by, reached

from tests.rendered_firewall import FACTS, table

GROUPS = {
    "chief": ["alpha"],
    "ps": ["alpha", "beta"],
    "worker": ["beta", "gamma"],
    "tensorboard": ["alpha"],
    "nfs_server": ["store"],
}
RUN = {"program": "trainer.examples.digits:Digits"}
HOSTS: dict[str, dict[str, Any]] = {
    "alpha": {"ansible_host": "192.0.2.11", "trainer_run": RUN},
    "beta": {"ansible_host": "198.51.100.12", "cluster_address": "2001:db8::12", "trainer_run": RUN},
    "gamma": {"ansible_host": "192.0.2.13", "worker_tasks": 2, "trainer_run": RUN},
    "store": {"ansible_host": "192.0.2.14", "trainer_run": RUN},
}


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def sets_of(text: str) -> dict[str, str]:
    """The elements of each set of a table."""
    found = re.findall(r"set (\w+) \{\n\s+type \w+\n(?:\s+elements = \{ (\S+) \}\n)?\s+\}", text)
    return dict(found)


def doors_of(host: str, groups: dict[str, list[str]] = GROUPS, **run: object) -> dict[str, dict[str, Any]]:
    hostvars = {name: values | {"trainer_run": RUN | run} for name, values in HOSTS.items()}
    doors = firewall_doors(cluster_spec(groups, hostvars), host, groups, hostvars[host])
    return {door["name"]: door for door in doors}


def test_each_jobs_members_are_a_set_of_both_families() -> None:
    sets = sets_of(table(GROUPS, HOSTS, "gamma"))
    assert sets["chief4"] == "192.0.2.11"
    assert sets["chief6"] == ""
    assert sets["ps4"] == "192.0.2.11"
    assert sets["ps6"] == "2001:db8::12"
    assert sets["member4"] == "192.0.2.11,192.0.2.13,192.0.2.14"


def test_ports_are_those_of_tf_config() -> None:
    spec = cluster_spec(GROUPS, HOSTS)
    for host in ("alpha", "beta", "gamma"):
        told = {task["port"] for task in spec["tasks"] if task["host"] == host}
        found = {port for door in doors_of(host).values() for port in door["ports"]} - {6006}
        assert found == told
    assert doors_of("gamma")["worker"]["ports"] == [2400, 2401]


def test_a_door_is_open_to_the_jobs_that_call_it() -> None:
    assert doors_of("beta")["ps"]["sources"] == ["chief", "ps", "worker"]
    assert doors_of("beta")["worker"]["sources"] == ["chief", "ps"]
    assert doors_of("alpha")["chief"]["sources"] == ["ps", "worker"]
    assert doors_of("alpha")["tensorboard"]["sources"] == [MEMBER]
    assert doors_of("store")["nfs"] == {
        "name": "nfs", "protocol": "tcp", "ports": [2049], "sources": [MEMBER], "networks": [], "guarded": True,
    }  # fmt: skip


def test_members_in_step_call_the_chief_and_one_another() -> None:
    assert opened_by(["chief", "worker"]) == {"chief": ("worker",), "worker": ("chief", "worker")}
    assert opened_by(["chief", "evaluator", MEMBER]) == {"chief": ()}


def test_who_reads_through_the_data_service_calls_it() -> None:
    groups = GROUPS | {"data": ["gamma"]}
    assert doors_of("alpha", groups, input="service")["dispatcher"]["sources"] == ["chief", "worker", "data"]
    assert doors_of("gamma", groups, input="service")["data"]["sources"] == ["chief", "worker", "dispatcher"]


def test_gpus_of_members_in_step_speak_through_ports_that_nobody_names() -> None:
    groups = GROUPS | {"gpu": ["beta", "gamma"]}
    gpus = {"gpu_count": 2}
    hostvars = {name: values | gpus for name, values in HOSTS.items()}
    in_step = {
        name: values | {"trainer_run": RUN | {"strategy": "multi_worker_mirrored"}} for name, values in hostvars.items()
    }
    doors = firewall_doors(cluster_spec(groups, in_step), "gamma", groups, in_step["gamma"])
    assert [(door["name"], door["guarded"]) for door in doors] == [("worker", True), ("nccl", False)]
    assert "nccl" not in {
        d["name"] for d in firewall_doors(cluster_spec(groups, hostvars), "gamma", groups, hostvars["gamma"])
    }


def test_hosts_without_a_task_are_members_still() -> None:
    groups = GROUPS | {"worker": ["beta", "gamma", "idle"]}
    hostvars = HOSTS | {"idle": {"ansible_host": "192.0.2.15", "worker_tasks": 0}}
    sources = firewall_sources(cluster_spec(groups, hostvars))
    assert "192.0.2.15" in sources[MEMBER]
    assert "192.0.2.15" not in sources["worker"]


def test_who_asks_for_the_time_may() -> None:
    hostvars = HOSTS | {"alpha": HOSTS["alpha"] | {"common_time_clients": ["192.0.2.0/24"]}}
    said = lines(table(GROUPS, hostvars, "alpha"))
    assert "udp dport { 123 } ip saddr { 192.0.2.0/24 } accept" in said


def test_a_name_stands_for_what_the_host_resolves_it_to() -> None:
    hostvars = HOSTS | {"gamma": {"ansible_host": "gamma.example.org"}}
    sources = firewall_sources(cluster_spec(GROUPS, hostvars))
    assert names_among(sources) == ["gamma.example.org"]
    resolved = {"gamma.example.org": ["2001:db8::13", "192.0.2.13"]}
    sets = sets_of(table(GROUPS, hostvars, "alpha", facts=FACTS | {"resolved": resolved}))
    assert sets["worker6"] == "2001:db8::12,2001:db8::13"
    assert sets["worker4"] == "192.0.2.13"


def test_an_unknown_name_leaves_the_others_in() -> None:
    assert of_family(["192.0.2.1", "gone.example.org"], 4, {"gone.example.org": []}) == ["192.0.2.1"]
    notes = firewall_notes(FACTS | {"resolved": {"gone.example.org": []}}, [], [], True)
    assert notes == [
        "gone.example.org is unknown to this host's resolver: that member can't come in until site.yml finds its name"
    ]


def test_members_come_before_established() -> None:
    said = lines(table(GROUPS, HOSTS, "beta"))
    assert said.index("tcp dport @guarded goto guard") < said.index("ct state established,related accept")


def test_what_else_listens_is_named_when_it_is_closed() -> None:
    facts = FACTS | {
        "listening": ["22/tcp sshd", "2400/tcp python", "5432/tcp postgres", "68/udp dhclient", "9100/tcp"]
    }
    doors = list(doors_of("gamma").values())
    [note] = firewall_notes(facts, doors, [{"port": "9000-9200"}], True)
    assert note.startswith("closed to others, and listening: 5432/tcp postgres.")
    assert firewall_notes(facts, doors, [], False) == []


def test_other_filters_are_told_of() -> None:
    assert [note.split()[0] for note in firewall_notes(FACTS | {"others": ["ufw", "docker"]}, [], [], True)] == [
        "ufw",
        "docker",
    ]


def test_a_unit_speaks_with_the_members_and_with_what_the_user_named() -> None:
    doors = list(doors_of("alpha").values())
    tasks, board = ["chief", "ps", "worker"], ["tensorboard"]
    assert reached(doors, tasks, [], [], ["192.0.2.11"]) == ["localhost", "192.0.2.11"]
    assert reached(doors, tasks, [], ["198.51.100.0/24"], []) == ["localhost", "198.51.100.0/24"]
    assert reached(doors, tasks, [], ["any"], ["192.0.2.11"]) == ["any"]
    opened = [{"port": 6006, "from": ["203.0.113.7"]}, {"port": 6006, "protocol": "udp"}]
    assert reached(doors, board, opened, [], []) == ["localhost", "203.0.113.7/32"]
    assert reached(doors, tasks, opened, [], []) == ["localhost"]
    assert reached(doors, board, [{"port": "6000-6010"}], [], []) == ["any"]


def nft(text: str) -> subprocess.CompletedProcess[str]:
    """Have nft read a table in a network namespace of its own."""
    command = ["unshare", "--user", "--map-root-user", "--net", "nft", "--check", "--file", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


needs_nft = pytest.mark.skipif(
    shutil.which("nft") is None or nft("table inet x { }").returncode != 0,
    reason="no nft, or no namespace to run it in",
)


@needs_nft
@pytest.mark.parametrize("closes", ["all", "ports"])
@pytest.mark.parametrize("host", ["alpha", "beta", "gamma", "store"])
def test_nft_takes_each_hosts_table(host: str, closes: str) -> None:
    opened = [
        {"port": 9100, "from": ["192.0.2.0/24", "2001:db8::/32"]},
        {"port": "8000-8010"},
        {"port": 53, "protocol": "udp"},
        {"port": 6006, "from": ["203.0.113.7/32"]},
    ]
    hostvars = HOSTS | {"alpha": HOSTS["alpha"] | {"common_time_clients": ["192.0.2.0/24"]}}
    said = nft(table(GROUPS, hostvars, host, closes, opened))
    assert said.returncode == 0, said.stderr


@needs_nft
def test_nft_refuses_what_is_no_table() -> None:
    assert nft(table(GROUPS, HOSTS, "beta").replace("policy drop", "policy dorp")).returncode != 0


@needs_nft
def test_nft_takes_300_members() -> None:
    names = [f"node-{number}" for number in range(300)]
    groups = {"chief": names[:1], "ps": names[:60], "worker": names[60:]}
    hostvars = {
        name: {"ansible_host": f"10.7.{n // 250}.{n % 250 + 1}", "trainer_run": RUN} for n, name in enumerate(names)
    }
    said = nft(table(groups, hostvars, names[7]))
    assert said.returncode == 0, said.stderr


def test_every_ssh_port_is_found() -> None:
    found = firewall_facts.listeners(
        'tcp LISTEN 0 128 0.0.0.0:2022 0.0.0.0:* users:(("sshd",pid=1,fd=3))\n'
        'tcp LISTEN 0 128 [::]:2400 [::]:* users:(("python",pid=2,fd=3))\n'
        'udp UNCONN 0 0 127.0.0.1:323 0.0.0.0:* users:(("chronyd",pid=3,fd=3))\n'
    )
    sockets = "Listen=[::]:2122 (Stream)\nActiveState=active\n\nListen=[::]:22 (Stream)\nActiveState=inactive\n"
    assert firewall_facts.ssh_ports(found, sockets, "") == [2022, 2122]
    assert firewall_facts.ssh_ports(found, "", "192.0.2.1 50000 192.0.2.2 2222") == [2022, 2222]
    assert [firewall_facts.is_local(at) for _, at, _, _ in found] == [False, False, True]


def test_the_login_is_found_above_sudo(tmp_path: Any) -> None:
    for pid, parent, environment in (
        (30, 20, b"HOME=/root\0"),
        (20, 10, b"A=b\0SSH_CONNECTION=1 2 3 22\0"),
        (10, 1, b""),
    ):
        process = tmp_path / str(pid)
        process.mkdir()
        (process / "environ").write_bytes(environment)
        (process / "stat").write_text(f"{pid} (a) b) S {parent} 0")
    assert firewall_facts.session(30, tmp_path) == ("1 2 3 22", tmp_path.stat().st_uid)
    assert firewall_facts.session(10, tmp_path) == ("", 0)


def test_name_servers_are_read_without_zones() -> None:
    assert firewall_facts.name_servers(
        "search x\nnameserver 192.0.2.53\n nameserver fe80::1%eth0\n#nameserver 1.1.1.1\n"
    ) == [
        "192.0.2.53",
        "fe80::1",
    ]


def test_a_sets_elements_are_read() -> None:
    listing = {"nftables": [{"metainfo": {}}, {"set": {"name": "member4", "elem": ["192.0.2.1", "192.0.2.2"]}}]}
    assert firewall_table.elements(json.dumps(listing)) == {"192.0.2.1", "192.0.2.2"}
    assert firewall_table.elements(json.dumps({"nftables": [{"set": {"name": "member6"}}]})) == set()
