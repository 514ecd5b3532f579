"""Who may come in to each host: rendered from the cluster spec, and read by nft itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import firewall_facts
import firewall_table
import pytest

from fleet.site.firewall import (
    firewall_notes,
    firewall_refusals,
    firewall_rules,
    firewall_sources,
    names_among,
    of_family,
    opened_by,
    reached,
)
from fleet.site.topology import MEMBER, cluster_spec
from tests.rendered_firewall import FACTS, table
from tests.security.hosts import GROUPS

RUN = {"program": "trainer.examples.digits:Digits"}
HOSTS: dict[str, dict[str, Any]] = {
    "alpha": {"ansible_host": "192.0.2.11", "trainer_run": RUN},
    "beta": {"ansible_host": "198.51.100.12", "cluster_address": "2001:db8::12", "trainer_run": RUN},
    "gamma": {"ansible_host": "192.0.2.13", "worker_tasks": 2, "trainer_run": RUN},
    "store": {"ansible_host": "192.0.2.14", "trainer_run": RUN},
}


SOURCES = firewall_sources(cluster_spec(GROUPS, HOSTS))


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def sets_of(text: str) -> dict[str, str]:
    """The elements of each set of a table."""
    found = re.findall(r"set (\w+) \{\n\s+type \w+\n(?:\s+elements = \{ (\S+) \}\n)?\s+\}", text)
    return dict(found)


def rules_of(host: str, groups: dict[str, list[str]] = GROUPS, **run: object) -> dict[str, dict[str, Any]]:
    hostvars = {name: values | {"trainer_run": RUN | run} for name, values in HOSTS.items()}
    rules = firewall_rules(cluster_spec(groups, hostvars), host, groups, hostvars[host])
    return {rule["name"]: rule for rule in rules}


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
        expected = {task["port"] for task in spec["tasks"] if task["host"] == host}
        found = {port for rule in rules_of(host).values() for port in rule["ports"]} - {6006}
        assert found == expected
    assert rules_of("gamma")["worker"]["ports"] == [2400, 2401]


def test_a_door_is_open_to_the_jobs_that_call_it() -> None:
    assert rules_of("beta")["ps"]["sources"] == ["chief", "ps", "worker"]
    assert rules_of("beta")["worker"]["sources"] == ["chief", "ps"]
    assert rules_of("alpha")["chief"]["sources"] == ["ps", "worker"]
    assert rules_of("alpha")["tensorboard"]["sources"] == [MEMBER]
    assert rules_of("store")["nfs"] == {
        "name": "nfs", "protocol": "tcp", "ports": [2049], "sources": [MEMBER], "networks": [], "guarded": True,
        "users": [],
    }  # fmt: skip


def test_only_prometheus_comes_in_to_what_is_scraped() -> None:
    groups = GROUPS | {"prometheus": ["watch"], "alertmanager": ["gamma"]}
    hosts = HOSTS | {"watch": {"ansible_host": "192.0.2.15", "trainer_run": RUN}}
    spec = cluster_spec(groups, hosts)
    rules = {host: {rule["name"]: rule for rule in firewall_rules(spec, host, groups, hosts[host])} for host in hosts}
    assert firewall_sources(spec)["prometheus"] == ["192.0.2.15"]
    assert "192.0.2.15" not in firewall_sources(spec)[MEMBER]
    assert rules["gamma"]["metrics"]["ports"] == [2700, 2701]
    assert rules["gamma"]["alertmanager"]["ports"] == [9093]
    assert set(rules["watch"]) == {"node_exporter", "prometheus"}
    assert set(rules["store"]) == {"node_exporter", "nfs"}
    for host in hosts:
        for name in set(rules[host]) & {"metrics", "node_exporter", "prometheus", "alertmanager"}:
            more = ["chief"] if name == "metrics" and "worker" in rules[host] else []  # for the run's page
            assert (rules[host][name]["sources"], rules[host][name]["guarded"]) == (["prometheus", *more], True)
    assert {host for host in hosts if "chief" in rules[host].get("metrics", {"sources": []})["sources"]} != set()
    text = table(groups, hosts, "gamma", facts=FACTS | {"scraper_uid": 120})
    assert "tcp dport { 2700,2701 } ip saddr @prometheus4 accept" in lines(text)
    assert "oif lo tcp dport { 2700,2701 } meta skuid { 120 } accept" in lines(text)
    assert "oif lo tcp dport { 9093 } meta skuid { 1000,120 } accept" in lines(text)
    assert "oif lo tcp dport { 2700" not in table(groups, hosts, "gamma")  # there is no such user on this host


def test_a_port_that_is_scraped_from_elsewhere_is_closed_until_it_is_opened() -> None:
    hosts = HOSTS | {"gamma": HOSTS["gamma"] | {"metrics_port": 2900}}
    rules = {
        rule["name"]: rule for rule in firewall_rules(cluster_spec(GROUPS, hosts), "gamma", GROUPS, hosts["gamma"])
    }
    assert (rules["metrics"]["ports"], rules["metrics"]["sources"]) == ([2900, 2901], ["chief"])
    assert "2900,2901" in sets_of_guarded(table(GROUPS, hosts, "gamma"))


def sets_of_guarded(text: str) -> str:
    return re.findall(r"set guarded \{\n\s+type inet_service\n\s+elements = \{ (\S+) \}", text)[0]


def test_members_in_step_call_the_chief_and_one_another() -> None:
    assert opened_by(["chief", "worker"]) == {"chief": ("worker",), "worker": ("chief", "worker")}
    assert opened_by(["chief", "evaluator", MEMBER]) == {"chief": ()}


def test_who_reads_through_the_data_service_calls_it() -> None:
    groups = GROUPS | {"data": ["gamma"]}
    assert rules_of("alpha", groups, input="service")["dispatcher"]["sources"] == ["chief", "worker", "data"]
    assert rules_of("gamma", groups, input="service")["data"]["sources"] == ["chief", "worker", "dispatcher"]


def test_gpus_of_members_in_step_speak_through_ports_that_nobody_names() -> None:
    groups = GROUPS | {"gpu": ["beta", "gamma"]}
    gpus = {"gpu_count": 2}
    hostvars = {name: values | gpus for name, values in HOSTS.items()}
    in_step = {
        name: values | {"trainer_run": RUN | {"strategy": "multi_worker_mirrored"}} for name, values in hostvars.items()
    }
    rules = firewall_rules(cluster_spec(groups, in_step), "gamma", groups, in_step["gamma"])
    assert [(rule["name"], rule["guarded"]) for rule in rules] == [("worker", True), ("nccl", False)]
    assert "nccl" not in {
        d["name"] for d in firewall_rules(cluster_spec(groups, hostvars), "gamma", groups, hostvars["gamma"])
    }


def test_hosts_without_a_task_are_members_still() -> None:
    groups = GROUPS | {"worker": ["beta", "gamma", "idle"]}
    hostvars = HOSTS | {"idle": {"ansible_host": "192.0.2.15", "worker_tasks": 0}}
    sources = firewall_sources(cluster_spec(groups, hostvars))
    assert "192.0.2.15" in sources[MEMBER]
    assert "192.0.2.15" not in sources["worker"]


def test_who_asks_for_the_time_may() -> None:
    hostvars = HOSTS | {"alpha": HOSTS["alpha"] | {"common_time_clients": ["192.0.2.0/24"]}}
    rules = lines(table(GROUPS, hostvars, "alpha"))
    assert "udp dport { 123 } ip saddr { 192.0.2.0/24 } accept" in rules


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
    notes = firewall_notes(FACTS | {"resolved": {"gone.example.org": []}}, [], [], True, {})
    assert notes == [
        "gone.example.org is unknown to this host's resolver: that member can't come in until site.yml finds its name"
    ]


def test_members_come_before_established() -> None:
    rules = lines(table(GROUPS, HOSTS, "beta"))
    assert rules.index("tcp dport @guarded goto guard") < rules.index("ct state established,related accept")


def test_what_else_listens_is_named_when_it_is_closed() -> None:
    facts = FACTS | {
        "listening": ["22/tcp sshd", "2400/tcp python", "5432/tcp postgres", "68/udp dhclient", "9100/tcp"]
    }
    rules = list(rules_of("gamma").values())
    [note] = firewall_notes(facts, rules, [{"port": "9000-9200"}], True, SOURCES)
    assert note.startswith("closed to others, and listening: 5432/tcp postgres.")
    assert firewall_notes(facts, rules, [], False, SOURCES) == []


def test_other_filters_are_named() -> None:
    notes = firewall_notes(FACTS | {"others": ["ufw", "docker"]}, [], [], True, {})
    assert [note.split()[0] for note in notes] == ["ufw", "docker"]


def test_ufw_filters_only_where_it_is_on() -> None:
    on = "# comment\nENABLED=yes\nLOGLEVEL=low\n"
    assert firewall_facts.others("active\ninactive\n", on) == ["firewalld", "ufw"]
    assert firewall_facts.others("active\nactive\n", "ENABLED=no\n") == ["firewalld", "docker"]
    assert firewall_facts.others("inactive\ninactive\n", "") == []


def refused(host: str, closed: bool = True, opened: Any = (), lists: Any = (), **facts: Any) -> list[str]:
    rules = list(rules_of(host).values())
    return firewall_refusals(FACTS | facts, rules, opened, closed, SOURCES, lists)


def test_another_client_of_the_nfs_server_holds_up_the_first_table() -> None:
    peers = [{"port": 2049, "address": each} for each in ("192.0.2.13", "203.0.113.9")]
    [problem] = refused("store", peers=peers)
    assert "203.0.113.9 is no member" in problem
    assert "firewall_open: [{port: 2049, from: [203.0.113.9]}]" in problem
    assert refused("store", peers=peers, opened=[{"port": 2049, "from": ["203.0.113.0/24"]}]) == []
    assert refused("store", peers=peers, opened=[{"port": 2049, "from": ["198.51.100.0/24"]}]) == [problem]
    assert refused("store", peers=peers, first=False) == []


def test_a_stranger_at_a_task_is_named_and_holds_up_nothing() -> None:
    peers = [{"port": 2300, "address": each} for each in ("192.0.2.13", "203.0.113.9")]
    assert refused("beta", peers=peers) == []
    [note] = firewall_notes(FACTS | {"peers": peers}, list(rules_of("beta").values()), [], False, SOURCES)
    assert note.startswith("no members, and cut off: 203.0.113.9 (port 2300).")


def test_a_vpn_that_ends_on_the_host_holds_up_the_first_table_until_its_port_is_open() -> None:
    vpn = {"device": "wg0", "kind": "wireguard", "ports": ["51820/udp"]}
    [problem] = refused("beta", vpn=vpn)
    assert "the VPN wg0 (wireguard)" in problem
    assert "firewall_open: [{port: 51820, protocol: udp}]" in problem
    assert refused("beta", vpn=vpn, opened=[{"port": 51820}]) == [problem]
    assert refused("beta", vpn=vpn, opened=[{"port": "51800-51900", "protocol": "udp"}]) == []
    assert refused("beta", vpn=vpn, closed=False) == []
    assert refused("beta", vpn=vpn, first=False) == []


def test_a_list_that_systemd_would_not_read_is_refused() -> None:
    long = [f"2001:db8:{number:x}::/48" for number in range(40_000)]
    [problem] = refused("beta", lists=[["any"], long], first=False)
    assert "has 40000 entries and" in problem
    assert "firewall_egress: [any]" in problem
    assert refused("beta", lists=[long[:20_000]]) == []


def test_a_unit_speaks_with_the_members_and_with_what_the_user_named() -> None:
    rules = list(rules_of("alpha").values())
    tasks, board = ["chief", "ps", "worker"], ["tensorboard"]
    assert reached(rules, tasks, [], [], ["192.0.2.11"]) == ["localhost", "192.0.2.11"]
    assert reached(rules, tasks, [], ["198.51.100.0/24"], []) == ["localhost", "198.51.100.0/24"]
    assert reached(rules, tasks, [], ["any"], ["192.0.2.11"]) == ["any"]
    opened = [{"port": 6006, "from": ["203.0.113.7"]}, {"port": 6006, "protocol": "udp"}]
    assert reached(rules, board, opened, [], []) == ["localhost", "203.0.113.7/32"]
    assert reached(rules, tasks, opened, [], []) == ["localhost"]
    assert reached(rules, board, [{"port": "6000-6010"}], [], []) == ["any"]


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
    done = nft(table(GROUPS, hostvars, host, closes, opened))
    assert done.returncode == 0, done.stderr


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
    done = nft(table(groups, hostvars, names[7]))
    assert done.returncode == 0, done.stderr


def test_what_users_have_sshd_listen_on_is_no_port_of_ssh() -> None:
    found = firewall_facts.listeners(
        'tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=1,fd=3)) ino:1 sk:1 <->\n'
        'tcp LISTEN 0 128 0.0.0.0:8080 0.0.0.0:* users:(("sshd",pid=2,fd=3)) uid:1000 ino:2 sk:2 <->\n'
        'tcp LISTEN 0 128 127.0.0.1:6010 0.0.0.0:* users:(("sshd",pid=3,fd=3)) ino:3 sk:3 <->\n'
        'tcp LISTEN 0 128 [::1]:6011 [::]:* users:(("sshd",pid=3,fd=3)) ino:4 sk:4 <->\n'
    )
    assert firewall_facts.ssh_ports(found, "", "") == [22]


def test_peers_of_guarded_ports_are_read() -> None:
    output = (
        "0 0 192.0.2.14:2049 192.0.2.13:801\n"
        "0 0 [::ffff:192.0.2.14]:2049 [::ffff:203.0.113.9]:802\n"
        "0 0 [fe80::1%eth0]:2049 [fe80::2%eth0]:803\n"
        "0 0 192.0.2.14:22 203.0.113.9:50000\n"
        "0 0 127.0.0.1:2049 127.0.0.1:804\n"
        "0 0 192.0.2.14:2049 192.0.2.14:805\n"
    )
    assert [(each["port"], each["address"]) for each in firewall_facts.peers(output, [2049])] == [
        (2049, "192.0.2.13"),
        (2049, "203.0.113.9"),
        (2049, "fe80::2"),
    ]


class Ended(Exception):
    """What Ansible's module does where it fails."""


def module(answers: dict[str, str], lacks: tuple[str, ...] = ()) -> Any:
    """A module whose commands say what a test has for the name and the words after it."""

    def run_command(command: list[str], **_: object) -> tuple[int, str, str]:
        line = " ".join([Path(command[0]).name, *command[1:]])
        return next(((0, text, "") for words, text in answers.items() if line.startswith(words)), (1, "", "no"))

    def fail_json(msg: str) -> None:
        raise Ended(msg)

    def get_bin_path(name: str, required: bool = False) -> str | None:
        return None if name in lacks else f"/found/{name}"

    return SimpleNamespace(run_command=run_command, fail_json=fail_json, get_bin_path=get_bin_path, check_mode=False)


ROUTE = {"ip -json route get 10.8.0.2": '[{"dst":"10.8.0.2","dev":"wg0"}]'}
UDP = firewall_facts.listeners(
    "udp UNCONN 0 0 0.0.0.0:51820 0.0.0.0:* ino:0\n"
    "udp UNCONN 0 0 [::]:51820 [::]:* ino:0\n"
    'udp UNCONN 0 0 0.0.0.0:1194 0.0.0.0:* users:(("openvpn",pid=77,fd=3)) ino:1\n'
    'tcp LISTEN 0 0 127.0.0.1:7505 0.0.0.0:* users:(("openvpn",pid=77,fd=4)) ino:1\n'
)


def test_a_vpn_that_the_login_came_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_kind(kind: str) -> dict[str, str]:
        return ROUTE | {"ip -json -details link show dev wg0": f'[{{"linkinfo":{{"info_kind":"{kind}"}}}}]'}

    wireguard = {"device": "wg0", "kind": "wireguard"}
    assert firewall_facts.vpn(module(of_kind("wireguard"), ("wg",)), "10.8.0.2", UDP) == {
        **wireguard,
        "ports": ["51820/udp"],
    }
    asked = of_kind("wireguard") | {"wg show wg0 listen-port": "41000\n"}
    assert firewall_facts.vpn(module(asked), "10.8.0.2", UDP) == {**wireguard, "ports": ["41000/udp"]}
    monkeypatch.setattr(firewall_facts, "holders", {"wg0": {77}}.get)
    assert firewall_facts.vpn(module(of_kind("tun")), "10.8.0.2", UDP)["ports"] == ["1194/udp"]
    assert firewall_facts.vpn(module(of_kind("veth")), "10.8.0.2", UDP) == {}
    assert firewall_facts.vpn(module({}), "10.8.0.2", UDP) == {}
    assert firewall_facts.vpn(module({}), "", UDP) == {}


def test_who_holds_a_tun_device_is_found(tmp_path: Path) -> None:
    for pid, text in (("77", "pos:\t0\niff:\ttun1\n"), ("78", "iff:\ttun11\n"), ("79", "pos:\t0\n")):
        (tmp_path / pid / "fdinfo").mkdir(parents=True)
        (tmp_path / pid / "fdinfo" / "5").write_text(text)
    assert firewall_facts.holders("tun1", tmp_path) == {77}


LISTENER = 'tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=1,fd=3))\n'
ANSWERS = {"nft list tables": "", "ss -Hlntupe": LISTENER, "ss -Hnt state": ""}


@pytest.mark.parametrize(("shown", "unread"), [("no\n\nno\n", False), ("no\n\nyes\n", True), ("", False)])
def test_a_unit_whose_files_systemd_has_not_read_is_seen(shown: str, unread: bool) -> None:
    host = module({**ANSWERS, "systemctl show --value --property=NeedDaemonReload trainer@*": shown})
    assert firewall_facts.facts(host, {"names": [], "guarded": [], "kept": "/nowhere"})["unread"] is unread


@pytest.mark.parametrize("error", [socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_NONAME])
def test_names_that_nobody_answers_for_are_not_left_out(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(error, "for a moment")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    host = module(ANSWERS)
    asked = {"names": ["node-1.example.org"], "guarded": [2222], "kept": "/nowhere"}
    if error == socket.EAI_NONAME:
        assert firewall_facts.facts(host, asked)["resolved"] == {"node-1.example.org": []}
        return
    with pytest.raises(Ended, match=r"does not answer for node-1\.example\.org: for a moment.*name servers"):
        firewall_facts.facts(host, asked)


def test_every_ssh_port_is_found() -> None:
    found = firewall_facts.listeners(
        'tcp LISTEN 0 128 0.0.0.0:2022 0.0.0.0:* users:(("sshd",pid=1,fd=3))\n'
        'tcp LISTEN 0 128 [::]:2400 [::]:* users:(("python",pid=2,fd=3))\n'
        'udp UNCONN 0 0 127.0.0.1:323 0.0.0.0:* users:(("chronyd",pid=3,fd=3))\n'
    )
    sockets = "Listen=[::]:2122 (Stream)\nActiveState=active\n\nListen=[::]:22 (Stream)\nActiveState=inactive\n"
    assert firewall_facts.ssh_ports(found, sockets, "") == [2022, 2122]
    assert firewall_facts.ssh_ports(found, "", "192.0.2.1 50000 192.0.2.2 2222") == [2022, 2222]
    assert [firewall_facts.is_local(each.address) for each in found] == [False, False, True]
    assert firewall_facts.is_local("::ffff:127.0.0.1")


@pytest.mark.skipif(os.geteuid() != 0, reason="processes of several users need root")
def test_the_login_is_found_above_sudo(tmp_path: Path) -> None:
    login, connection = 1000, b"A=b\0SSH_CONNECTION=1 2 3 22\0"
    for pid, parent, name, user, environment in (
        (50, 40, "python3", 0, b"HOME=/root\0"),
        (40, 30, "sudo", 0, connection),
        (30, 20, "a) b", login, connection),
        (20, 10, "sshd-session", login, b""),
        (10, 5, "sshd", 0, b"SSH_CONNECTION=7 8 9 2022\0"),  # another login started it
        (5, 1, "bash", 0, b"SSH_CONNECTION=7 8 9 2022\0"),
    ):
        process = tmp_path / str(pid)
        process.mkdir()
        (process / "environ").write_bytes(environment)
        (process / "stat").write_text(f"{pid} ({name}) S {parent} 0")
        os.chown(process, user, user)
    assert firewall_facts.session(50, tmp_path) == ("1 2 3 22", login)
    assert firewall_facts.session(20, tmp_path) == ("", 0)


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


@pytest.mark.parametrize("lacks", [("ss",), ()])
def test_a_host_whose_connections_cannot_be_listed_keeps_no_table(lacks: tuple[str, ...]) -> None:
    """The next run would take it for a host with a table, and the first one would cut open connections."""
    loaded = []

    def run_command(command: list[str], check_rc: bool = False, **_: object) -> tuple[int, str, str]:
        if "/found/nft" in command:
            loaded[:] = ["table"] if "-f" in command else []
            return 0, "", ""
        if check_rc:
            raise Ended("ss is broken")
        return 1, "", "ss is broken"

    def get_bin_path(name: str, required: bool = False) -> str:
        if name in lacks:
            raise Ended(f"no {name}")
        return f"/found/{name}"

    def fail_json(msg: str) -> None:
        raise Ended(msg)

    fake = SimpleNamespace(run_command=run_command, get_bin_path=get_bin_path, fail_json=fail_json, params={})
    with pytest.raises(Ended, match="no ss" if lacks else "ss is broken"):
        firewall_table.watch(fake, "/found/nft")
    assert loaded == []
