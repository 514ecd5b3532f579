"""What a stranger sees of the members, what they see of one another, and what a leaver loses."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time

import firewall_table
import pytest

from tests.rendered_firewall import FACTS, SSH, UID, table
from tests.security.hosts import FAMILIES, GROUPS, MEMBERS, NOBODY, PORTS, UNASKED, Hosts

# With parameter servers: who opens what, by the hosts' jobs. SSH, which is everybody's, is left out.
PERMITTED = {
    ("alpha", "beta"): {2300, 2400},
    ("alpha", "gamma"): {2400},
    ("alpha", "store"): {2049},
    ("beta", "alpha"): {2222, 2300, 6006},
    ("beta", "gamma"): {2400},
    ("beta", "store"): {2049},
    ("gamma", "alpha"): {2222, 2300, 6006},
    ("gamma", "beta"): {2300},
    ("gamma", "store"): {2049},
    ("store", "alpha"): {6006},
    ("store", "beta"): set(),
    ("store", "gamma"): set(),
}


@pytest.mark.quick
def test_without_the_table_a_stranger_sees_every_port(opened: Hosts) -> None:
    for family in FAMILIES:
        for host in MEMBERS:
            assert opened.seen("stranger", host, family) == {SSH, UNASKED, *PORTS[host].values()}


@pytest.mark.quick
def test_a_stranger_sees_ssh_alone_in_both_families(opened: Hosts) -> None:
    opened.close()
    for family in FAMILIES:
        for host in MEMBERS:
            assert opened.seen("stranger", host, family) == {SSH}


@pytest.mark.skipif(shutil.which("nmap") is None, reason="no nmap: python3 -m lab packages --security")
def test_nmap_finds_ssh_alone(opened: Hosts) -> None:
    def scan(host: str) -> str:
        version = ["-6"] if opened.family == 6 else []
        # -n: no names. Each port is tried once more; what is silent is dropped here, and not lost.
        command = ["nmap", *version, "-n", "-Pn", "-p1-10000,45555", "--min-rate=4000", "--max-retries=1", "--open"]
        under = opened.networks.under("stranger")
        return subprocess.run(
            [*under, *command, opened.address(host)], capture_output=True, text=True, check=True
        ).stdout

    assert "2300/tcp" in scan("alpha")
    opened.close()
    found = [line.split()[0] for line in scan("alpha").splitlines() if "/tcp" in line]
    assert found == [f"{SSH}/tcp"]


def test_members_reach_what_the_table_permits_and_nothing_else(opened: Hosts) -> None:
    opened.close()
    found = {pair: opened.seen(*pair) - {SSH} for pair in PERMITTED}
    assert found == PERMITTED


def test_a_member_is_a_stranger_by_its_other_address(opened: Hosts) -> None:
    opened.close()
    other = 10 - opened.family
    assert opened.seen("gamma", "beta", other) == {SSH}


@pytest.mark.quick
def test_a_leavers_open_connection_is_cut_with_its_next_packet(opened: Hosts) -> None:
    opened.close()
    with opened.talk("gamma", "beta", 2300) as leaver, opened.talk("alpha", "beta", 2300) as member:
        assert float(leaver.say()) < 1
        opened.close("beta", groups=GROUPS | {"worker": ["beta"]})
        assert leaver.say() == "silent"
        assert float(member.say()) < 1
    assert opened.seen("gamma", "beta") == {SSH}


@pytest.mark.quick
def test_other_users_of_the_host_are_strangers(opened: Hosts) -> None:
    opened.close()
    own = opened.address("alpha")
    for address in (own, "127.0.0.1" if opened.family == 4 else "::1"):
        tasks = [(address, 2222), (address, 2300)]
        board = (address, 6006)
        assert set(opened.knock("alpha", tasks, uid=NOBODY).values()) == {"refused"}
        assert set(opened.knock("alpha", [*tasks, board], uid=UID).values()) == {"open"}
        assert set(opened.knock("alpha", [*tasks, board]).values()) == {"open"}
        # The login looks at TensorBoard through a tunnel; into a task it does not come.
        assert opened.knock("alpha", [*tasks, board], uid=FACTS["login_uid"]) == {
            tasks[0]: "refused",
            tasks[1]: "refused",
            board: "open",
        }
        assert opened.knock("alpha", [board], uid=NOBODY) == {board: "refused"}


def test_a_user_of_another_member_comes_in_as_that_member(opened: Hosts) -> None:
    """The address is what the table knows: docs/security.md says so."""
    opened.close()
    endpoint = (opened.address("beta"), 2300)
    assert opened.knock("gamma", [endpoint], uid=NOBODY) == {endpoint: "open"}


def test_what_the_user_opened_is_open(opened: Hosts) -> None:
    stranger = f"{opened.address('stranger')}/{32 if opened.family == 4 else 128}"
    opened.close("alpha", opened=[{"port": 6006, "from": [stranger]}, {"port": f"{UNASKED - 5}-{UNASKED + 5}"}])
    assert opened.seen("stranger", "alpha") == {SSH, 6006, UNASKED}
    assert opened.seen("store", "alpha") == {SSH, 6006, UNASKED}
    opened.close("alpha", opened=[{"port": 6006, "from": ["203.0.113.0/24"]}])
    assert opened.seen("stranger", "alpha") == {SSH}


def test_the_modes_differ_in_what_is_not_ours(opened: Hosts) -> None:
    opened.close(closes="ports")
    for host in MEMBERS:
        assert opened.seen("stranger", host) == {SSH, UNASKED}
    assert {pair: opened.seen(*pair) - {SSH, UNASKED} for pair in PERMITTED} == PERMITTED


def test_ssh_is_open_where_it_runs(opened: Hosts) -> None:
    opened.close("gamma", facts=FACTS | {"ssh_ports": [UNASKED]})
    assert opened.seen("stranger", "gamma") == {UNASKED}


def test_members_in_step_call_one_another(opened: Hosts) -> None:
    groups = {"chief": ["alpha"], "worker": ["beta", "gamma"], "tensorboard": ["alpha"]}
    run = {"program": "trainer.examples.digits:Digits", "strategy": "multi_worker_mirrored"}
    hostvars = {host: values | {"trainer_run": run} for host, values in opened.hostvars().items()}
    for host in ("alpha", "beta", "gamma"):
        opened.load(host, table(groups, hostvars, host))
    assert opened.seen("gamma", "alpha") == {SSH, 2222, 6006}
    assert opened.seen("gamma", "beta") == {SSH, 2400}
    assert opened.seen("alpha", "beta") == {SSH, 2400}
    assert opened.seen("stranger", "alpha") == {SSH}


def counting(hosts: Hosts) -> str:
    """A table of others', which counts packets to a ps before ours and after it: a member's, and a stranger's."""
    family = "ip" if hosts.family == 4 else "ip6"
    rules = "".join(f"{family} saddr {hosts.address(host)} tcp dport 2300 counter; " for host in ("gamma", "stranger"))
    hooks = (("before", -20), ("after", 10))
    chains = (f"chain {name} {{ type filter hook input priority {at}; {rules}}}" for name, at in hooks)
    return "table inet counting {\n" + "\n".join(chains) + "\n}"


def test_a_hundred_reloads_under_traffic_leave_no_gap(opened: Hosts) -> None:
    assert opened.program("beta", "try", opened.wanted("beta", opened.table("beta")), "60").returncode == 0
    assert opened.program("beta", "confirm").returncode == 0
    ended = threading.Event()

    def attack() -> None:
        while not ended.is_set():
            opened.knock("stranger", [(opened.address("beta"), 2300)] * 64, seconds=0.2)

    with opened.talk("gamma", "beta", 2300, seconds=5) as member:
        opened.load("beta", counting(opened))
        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            for _ in range(100):
                assert opened.program("beta", "load").returncode == 0
                assert member.say() != "silent"
        finally:
            ended.set()
            attacker.join()
        under = opened.networks.under("beta")
        listing = subprocess.run([*under, "nft", "list", "table", "inet", "counting"], capture_output=True, text=True)
    members, strangers, members_after, strangers_after = map(int, re.findall(r"counter packets (\d+)", listing.stdout))
    assert members == members_after >= 100
    assert strangers >= 100
    assert strangers_after == 0


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "not watched"])
def test_an_answer_that_comes_after_the_first_table_needs_a_watch_before(opened: Hosts, watched: bool) -> None:
    """The kernel takes the first packet that it sees of a connection for its beginning."""
    with opened.talk("gamma", "stranger", SSH, seconds=4) as talk:
        if watched:
            opened.load("gamma", firewall_table.WATCHING)
        assert float(talk.say()) < 1
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(talk.say("late")))
        asking.start()
        time.sleep(0.5)  # the question has arrived, and nothing is sent until the answer
        opened.close("gamma")
        asking.join()
    if watched:
        assert 1 < float(answers[0]) < 3
    else:
        assert answers == ["silent"]
