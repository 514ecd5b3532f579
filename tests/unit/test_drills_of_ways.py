"""Drills of one way: which packets they drop, between whom, what proves it, and that all is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.drills.catalogue import BY_CHANCE, CATALOGUE
from fleet.drills.faults import SELF_REVERT_SECONDS, TABLE, one
from fleet.drills.soak import Injection, go_together, proof_of, victims
from fleet.drills.testbed import DrillFailed, NotHere, Process, Testbed
from fleet.drills.ways import LATE, LOST, Delay, Doubled, Lossy, NoConnection, NoWayIn, WayFault
from fleet.site.topology import Task
from tests.unit.fake_hosts import ScriptedHosts
from tests.unit.test_drills import TASKS, make_testbed, named

COUNTED = {"nft list": "counter packets 0 bytes 0 drop\ncounter packets 7 bytes 420 drop"}


def scripts(fault: WayFault, answers: dict[str, str]) -> tuple[str, list[tuple[str, str]]]:
    hosts = ScriptedHosts(answers)
    proof = fault.inject(make_testbed(hosts))
    return proof, hosts.scripts


def made(fault: WayFault, answers: dict[str, str]) -> str:
    return scripts(fault, answers)[1][0][1]


@pytest.mark.parametrize("what", LOST)
def test_packets_are_dropped_on_the_workers_host_and_only_those_of_one_ps(what: str) -> None:
    proof, asked = scripts(Lossy(one("worker"), what=what), COUNTED)
    host, script = asked[0]
    assert host == "far"
    rules = [line for line in script.splitlines() if "counter drop" in line]
    assert rules
    assert all("192.0.2.20" in line for line in rules)
    assert "dport 22" not in script.replace("2300", "")
    assert "7 of" in proof
    assert "ps-1" in proof


def test_each_kind_drops_what_its_name_says() -> None:
    def rules(what: str) -> str:
        return made(Lossy(one("worker"), what=what), COUNTED)

    assert "tcp dport 2300 counter drop" in rules("port")
    assert "tcp flags & (syn | ack) == syn counter drop" in rules("syn")
    assert "meta length > 1000 counter drop" in rules("large")
    assert "numgen random mod 3 == 0 counter drop" in rules("loss")
    assert rules("large").count("counter drop") == rules("loss").count("counter drop") == 2
    assert rules("direction").count("counter drop") == rules("port").count("counter drop") == 1


def test_an_address_of_ipv6_has_rules_of_its_family() -> None:
    six = [Task(t.job, t.index, t.host, f"2001:db8::{t.index}{len(t.host)}", t.port, server=t.server) for t in TASKS]
    hosts = ScriptedHosts(COUNTED)
    Lossy(one("worker")).inject(with_tasks(make_testbed(hosts), six))
    assert "ip6 daddr 2001:db8::" in hosts.scripts[0][1]


def test_nothing_dropped_is_no_fault() -> None:
    with pytest.raises(DrillFailed, match="not within"):
        Lossy(one("worker")).inject(make_testbed(ScriptedHosts({"nft list": "counter packets 0 bytes 0 drop"})))


@pytest.mark.parametrize("name", [each.name for each in CATALOGUE if isinstance(each.fault, WayFault)])
def test_a_host_heals_itself_and_is_healed(name: str) -> None:
    fault = named(name).fault
    assert isinstance(fault, WayFault)
    hardware = "02:00:00:00:00:01"
    answers = {
        **COUNTED,
        "<>/dev/net/tun": "there",
        "create_connection": "201",
        "cat /sys": hardware,
        "neigh": f"lladdr {hardware}",
    }
    hosts = ScriptedHosts(answers)
    on = make_testbed(hosts)
    on.processes = lambda *_, **__: {"worker-1": Process("a", "active", "running", "success", 0, 7)}  # type: ignore[method-assign]
    unit, stop = (LATE, LATE) if isinstance(fault, Delay) else (TABLE, f"{TABLE}.timer")
    fault.inject(on)
    assert any(f"--unit={unit} " in script and str(SELF_REVERT_SECONDS) in script for _, script in hosts.scripts)
    hosts.scripts.clear()
    fault.revert(on)
    fault.revert(on)
    assert all(f"systemctl stop {stop} " in script for _, script in hosts.scripts)


def with_tasks(on: Testbed, tasks: list[Task]) -> Testbed:
    on.inventory = replace(on.inventory, tasks=tasks)
    return on


def test_the_coordinators_host_stands_for_another_where_it_has_neither_end() -> None:
    on = with_tasks(make_testbed(ScriptedHosts()), [task for task in TASKS if task.name != "ps-1"])
    with pytest.raises(DrillFailed, match="head has worker-1 or ps-0"):
        Doubled(one("worker")).inject(on)


def test_a_way_that_takes_no_connection_is_left_to_the_next_process() -> None:
    hosts = ScriptedHosts(COUNTED)
    on = make_testbed(hosts)
    on.processes = lambda *_, **__: {"worker-1": Process("a", "active", "running", "success", 0, 7)}  # type: ignore[method-assign]
    proof = NoConnection(one("worker")).inject(on)
    assert "packets that open a connection" in proof
    assert proof.endswith("worker-1's process 7 gone")


def test_a_delay_that_is_none_is_no_fault() -> None:
    with pytest.raises(DrillFailed, match="in 1 ms: nothing came late"):
        Delay(one("worker")).inject(make_testbed(ScriptedHosts({"<>/dev/net/tun": "there", "create_connection": "1"})))
    with pytest.raises(NotHere, match="far can't open /dev/net/tun"):
        Delay(one("worker")).inject(make_testbed(ScriptedHosts({"create_connection": "201"})))


def test_every_worker_is_kept_from_a_ps_that_nobody_reaches() -> None:
    proof, asked = scripts(NoWayIn(one("ps")), {})
    assert asked[0][0] == "store"
    assert "ip saddr { 192.0.2.30 } tcp dport 2300 counter drop" in asked[0][1]
    assert proof == "store drops what 1 hosts send to ps-1"


def test_by_chance_no_way_of_a_ps_s_own_host_is_broken() -> None:
    for name in (each for each in BY_CHANCE if each.startswith(("way-", "address-"))):
        assert [task.name for task in victims(make_testbed(ScriptedHosts()), named(name))] == ["worker-1"]


def test_every_way_is_broken_by_chance() -> None:
    assert {each.name for each in CATALOGUE if isinstance(each.fault, WayFault)} <= set(BY_CHANCE)


def test_by_chance_only_a_way_is_broken_that_can_be() -> None:
    # Beside far, the only worker with a ps on a third host is the coordinator's.
    on = make_testbed(ScriptedHosts())
    at_head = Task("worker", 2, "head", "192.0.2.10", 2400, server=True)
    with_tasks(on, [*TASKS, at_head])
    assert [task.name for task in victims(on, named("address-doubled"))] == ["worker-1"]
    with_tasks(on, [task for task in TASKS if task.name != "ps-1"])
    assert victims(on, named("address-doubled")) == []
    # The one worker is on the host of ps-1.
    with_tasks(on, [*TASKS[:3], replace(TASKS[4], host=TASKS[2].host, address=TASKS[2].address)])
    assert [task.name for task in victims(on, named("ps-unreached"))] != ["ps-1"]


def test_the_hosts_at_both_ends_and_a_third_are_left_alone_meanwhile() -> None:
    on = make_testbed(ScriptedHosts())
    doubled, late = (Injection(named(name), TASKS[4], 0.0, 10.0) for name in ("address-doubled", "way-late"))
    ps_0, ps_1 = (Injection(named("ps-frozen"), task, 0.0, 10.0) for task in TASKS[1:3])
    assert not go_together(on, doubled, ps_0)
    assert not go_together(on, doubled, ps_1)
    assert go_together(on, late, ps_0)
    assert not go_together(on, ps_1, late)
    assert go_together(on, Injection(named("way-lost"), TASKS[4], 0.0, 10.0), ps_1)


def test_a_host_without_what_a_delay_needs_is_passed_over_by_chance() -> None:
    proof = proof_of(Delay(one("worker")), make_testbed(ScriptedHosts()))
    assert proof.startswith("passed over: far can't open /dev/net/tun")


def test_a_device_without_a_hardware_address_has_none_to_double() -> None:
    with pytest.raises(NotHere, match="such as a tunnel's"):
        Doubled(one("worker")).inject(make_testbed(ScriptedHosts({"cat /sys": "\n"})))


def test_a_host_looks_for_its_hardware_address_before_it_takes_another_s() -> None:
    """Without one nothing is done that must be undone."""
    hosts = ScriptedHosts({"cat /sys": "aa:bb"})
    with pytest.raises(DrillFailed, match="has another neighbour"):
        Doubled(one("worker")).inject(make_testbed(hosts))
    script = hosts.scripts[0][1]
    assert script.index('[ -n "$hardware" ] || exit 0') < script.index("systemd-run")
    assert script.index('[ -n "$hardware" ] || exit 0') < script.index("ip addr add")
