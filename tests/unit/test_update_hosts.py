"""`fab update-hosts` on hosts that are only pretended: who is updated, in which order, and what stops it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.command_line.hosts import names_follow
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.ssh import Answer
from fleet.verbs.drain import drain
from fleet.verbs.stop import stop_cluster
from fleet.verbs.update_hosts import UpdateRequest, update_hosts
from tests.unit import fake_hosts
from tests.unit import test_second_day as day
from tests.unit.test_second_day import ALL, cluster, up

SLOW = 7.0  # seconds from the order to reboot until the host is new
INST = "Inst {} [1.0-1] (1.0-2 Debian-Security:12/stable-security [amd64])"


@dataclass
class Hosts(day.Hosts):
    """Hosts with packages of Debian, that reboot."""

    updates: dict[str, list[str]] = field(default_factory=dict)
    reboots: dict[str, str] = field(default_factory=dict)
    """What asks for a reboot once the updates are in."""
    boots: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    apt_is_broken: bool = False
    ahead: dict[str, float] = field(default_factory=dict)
    """By how many seconds their clocks are."""
    dies: set[str] = field(default_factory=set)
    """These don't come back from a reboot."""
    work: list[str] = field(default_factory=list)
    """What was done, and which tasks ran then."""

    def _answer(self, host: str, script: str) -> Answer:
        if "--unit=psfleet-update" in script:
            self.work.append(f"update {host} of {','.join(sorted(ALL - up(self)))}")
            if host in self.broken:
                return Answer("", self.broken[host], 1)
            self.updates[host] = []
        elif "systemctl reboot" in script:
            self.work.append(f"reboot {host} of {','.join(sorted(ALL - up(self)))}")
            self.boots[host], self.reboots[host] = self.now + SLOW, ""
            if host in self.dies:
                self.unreachable[host] = "no route"
        elif "/proc/1/stat" in script:
            booted = self.boots.get(host, 0.0) if self.boots.get(host, 0.0) <= self.now else 0.0  # it goes down yet
            lines = [f"boot=x:{booted}", f"began={booted + self.ahead.get(host, 0.0):.0f}"]
            if booted and self.work and self.work[-1].startswith(f"reboot {host}") and "back" not in self.work[-1]:
                self.work[-1] += ", and back"
            if "--simulate" in script:
                if self.apt_is_broken:
                    return Answer("", "E: dpkg was interrupted", 100)
                lines += [INST.format(name) for name in self.updates.get(host, ())]
                if (why := self.reboots.get(host)) and not self.updates.get(host):
                    lines.append(f"reboot={why}")
            return Answer("\n".join(lines))
        elif "@units" in script:
            there = f"@now\n{self.now + self.ahead.get(host, 0.0)}\n"
            return Answer(super()._answer(host, script).stdout.replace(f"@now\n{self.now}\n", there))
        else:
            return super()._answer(host, script)
        return Answer()


@pytest.fixture
def hosts() -> Hosts:
    return make_hosts()


def make_hosts() -> Hosts:
    """The hosts of test_second_day.py, up to date."""
    made = day.make_hosts()
    return Hosts(**{each.name: getattr(made, each.name) for each in fields(made) if each.init})


@pytest.fixture
def console(hosts: Hosts) -> Console:
    return fake_hosts.console_of(hosts, json_out=io.StringIO())


def answer(console: Console) -> dict[str, Any]:
    assert isinstance(console.json_out, io.StringIO)
    return json.loads(console.json_out.getvalue())  # type: ignore[no-any-return]


def test_hosts_are_updated_one_after_the_other_and_only_where_there_is_something(
    hosts: Hosts, console: Console
) -> None:
    hosts.updates = {"ps-a": ["openssl", "libssl3"], "w-b": ["openssl"]}
    hosts.reboots = {"ps-a": "a new kernel"}
    update_hosts(cluster(hosts), console, UpdateRequest(reason="monthly"))
    assert hosts.work == ["update ps-a of ps-0", "reboot ps-a of ps-0, and back", "update w-b of worker-1"]
    assert (up(hosts), hosts.marks, hosts.recorded, hosts.leavers) == (ALL, {}, {}, set())
    assert answer(console)["outcome"] == "done"
    assert [(row["host"], row["outcome"], row["rebooted"]) for row in answer(console)["hosts"]] == [
        ("ps-a", "updated", True),
        ("w-b", "updated", False),
    ]
    assert answer(console)["hosts"][1]["updates"] == ["openssl 1.0-1 -> 1.0-2"]
    acts = [(json.loads(line)["verb"], json.loads(line)["outcome"]) for line in hosts.lines]
    assert (acts[0], acts[-1]) == (("update-hosts", "begun"), ("update-hosts", "done"))
    assert {json.loads(line)["reason"] for line in hosts.lines} == {"monthly"}


def test_a_workers_data_wait_while_its_host_is_updated_and_are_read_by_others_where_it_stays_away(
    hosts: Hosts, console: Console
) -> None:
    hosts.updates, hosts.reboots, hosts.dies = {"w-a": ["openssl"], "w-b": ["openssl"]}, {"w-b": "a kernel"}, {"w-b"}
    leave, named = console.sleep, list[tuple[set[str], set[str]]]()

    def sleep(seconds: float) -> None:
        named.append((set(hosts.leaving), set(hosts.leavers)))
        leave(seconds)

    with pytest.raises(HostsUnreachable, match="w-b is unreachable"):
        update_hosts(cluster(hosts), replace(console, sleep=sleep), UpdateRequest(timeout=60))
    assert hosts.work[0] == "update w-a of worker-0"
    assert ({"worker-1"}, set()) in named
    assert all(not leavers for _, leavers in named)
    assert (hosts.leaving, hosts.leavers) == ({"worker-1"}, {"worker-1"})
    hosts.unreachable.clear()
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest())
    assert (hosts.leaving, hosts.leavers, up(hosts)) == (set(), set(), ALL)


@pytest.mark.parametrize("verb", ["update-hosts", "drain"])
def test_a_workers_data_are_handed_over_where_an_update_was_broken_off_and_its_host_stays_away(
    hosts: Hosts, console: Console, verb: str
) -> None:
    hosts.updates, hosts.reboots, hosts.dies = {"w-b": ["openssl"]}, {"w-b": "a kernel"}, {"w-b"}
    leave = console.sleep

    def sleep(seconds: float) -> None:
        if len(hosts.work) == 2:
            raise KeyboardInterrupt
        leave(seconds)

    with pytest.raises(KeyboardInterrupt):
        update_hosts(cluster(hosts), replace(console, sleep=sleep), UpdateRequest())
    assert (hosts.leaving, hosts.leavers) == ({"worker-1"}, set())
    quiet = replace(console, json_out=None)
    with pytest.raises(HostsUnreachable, match="An earlier update has drained it"):
        update_hosts(cluster(hosts), quiet, UpdateRequest(plan_only=True))
    drain(cluster(hosts), quiet, "w-b", plan_only=True)
    assert hosts.leavers == set()
    if verb == "drain":
        drain(cluster(hosts), quiet, "w-b")
    else:
        with pytest.raises(HostsUnreachable, match="An earlier update has drained it"):
            update_hosts(cluster(hosts), quiet, UpdateRequest())
    assert hosts.leavers == {"worker-1"}


def test_an_update_of_a_workers_host_forms_no_cluster_again(hosts: Hosts, console: Console) -> None:
    settings = {**hosts.inventory.run_settings, "input_position": "exact"}
    variables = {host: {**each, "trainer_run": settings} for host, each in hosts.inventory.variables.items()}
    hosts.inventory, hosts.updates = replace(hosts.inventory, variables=variables), {"w-a": ["openssl"]}
    drain(cluster(hosts), replace(console, json_out=None), "w-a", plan_only=True)
    assert "the data are divided again" in fake_hosts.printed(console)
    update_hosts(cluster(hosts), console, UpdateRequest(plan_only=True))
    assert answer(console)["hosts"][0]["cost"]["pause"] == "none: the others train on"


def test_where_all_are_up_to_date_nothing_is_done(hosts: Hosts, console: Console) -> None:
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert (answer(console)["outcome"], hosts.work, hosts.done, hosts.lines) == ("nothing to do", [], [], [])


@pytest.fixture
def heeding(hosts: Hosts) -> Hosts:
    """Hosts whose coordinator says that it has stopped, and trains a while after its next start."""
    begun: list[float] = []

    def tick(pretended: fake_hosts.FakeHosts) -> None:
        leads = pretended.units["chief-0"].up
        begun[:] = [] if not leads else begun or [pretended.now]
        state = "training" if leads and pretended.now > begun[0] + 4 else "stopped"
        pretended.run_status = {**pretended.run_status, "state": state} if pretended.run_status else None

    hosts.now += 10
    begun.append(0.0)
    hosts.tick = tick
    return hosts


def test_the_coordinators_host_is_updated_last_while_the_others_wait_for_it(heeding: Hosts, console: Console) -> None:
    hosts = heeding
    hosts.updates, hosts.reboots = {"head": ["openssl"], "w-a": ["openssl"]}, {"head": "a new kernel"}
    update_hosts(cluster(hosts), console, UpdateRequest(reason="monthly"))
    both = "chief-0,evaluator-0"
    assert hosts.work == ["update w-a of worker-0", f"update head of {both}", f"reboot head of {both}, and back"]
    ended = [each for each in hosts.done if each.split()[1] in ("head", "chief-0", "evaluator-0")]
    assert ended == [
        "mark head",
        "stop chief-0",
        "stop evaluator-0",
        "unmark head",
        "start chief-0",
        "start evaluator-0",
    ]
    assert hosts.holds == ["held", "let go", "held"]  # the reboot has ended the first
    assert (up(hosts), hosts.marks, hosts.recorded, hosts.leavers) == (ALL, {}, {}, set())
    assert hosts.run_status is not None
    assert hosts.run_status["state"] == "training"
    assert answer(console)["outcome"] == "done"
    assert [(row["host"], row["rebooted"]) for row in answer(console)["hosts"]] == [("w-a", False), ("head", True)]


def test_an_update_of_the_coordinators_host_goes_on_where_it_was_left(heeding: Hosts, console: Console) -> None:
    hosts = heeding
    hosts.updates, hosts.reboots, hosts.dies = {"head": ["openssl"]}, {"head": "a new kernel"}, {"head"}
    with pytest.raises(HostsUnreachable, match=r"head is unreachable: no route\n.*When it is back: fab update-hosts"):
        update_hosts(cluster(hosts), console, UpdateRequest(timeout=60))
    hosts.unreachable.clear()
    hosts.updates["w-b"] = ["openssl"]
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work[2:] == ["update w-b of worker-1"]  # the coordinator trains before the next one's turn
    assert (up(hosts), hosts.marks, hosts.recorded) == (ALL, {}, {})


def test_the_coordinator_trains_on_where_its_hosts_update_fails(heeding: Hosts, console: Console) -> None:
    hosts = heeding
    hosts.updates, hosts.broken = {"head": ["openssl"]}, {"head": "E: Sub-process dpkg failed"}
    with pytest.raises(ClusterTrouble, match=r"head: E: Sub-process dpkg failed\. Fix it there, then fab update-hosts"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert (up(hosts), hosts.marks, hosts.recorded) == (ALL, {}, {})


def test_tasks_stay_down_where_another_has_taken_the_lock_while_the_coordinators_host_booted(
    heeding: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, hold = heeding, heeding.hold
    hosts.updates, hosts.reboots = {"head": ["openssl"]}, {"head": "a new kernel"}

    def taken(host: str, script: str) -> Answer:
        return Answer("taken by ann fab start-cluster") if hosts.boots else hold(host, script)

    monkeypatch.setattr(hosts, "hold", taken)
    with pytest.raises(OperatorMistake, match="fab start-cluster"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert [each for each in hosts.done if each.startswith("start")] == []
    assert hosts.marks.keys() == {"head"}


def test_a_plan_of_the_coordinators_host_says_that_all_wait(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"head": ["openssl"]}
    update_hosts(cluster(hosts), console, UpdateRequest(plan_only=True))
    [row] = answer(console)["hosts"]
    assert (row["outcome"], row["cost"]["stops"], row["cost"]["refusals"]) == (
        "planned",
        ["chief-0", "evaluator-0"],
        [],
    )
    assert (row["cost"]["pause"], row["cost"]["steps_lost"]) == ("until the coordinator is back", 0)


def test_the_coordinators_host_is_left_in_step_and_updated_once_it_is_stopped(hosts: Hosts, console: Console) -> None:
    settings = {**hosts.inventory.run_settings, "strategy": "multi_worker_mirrored"}
    variables = {host: {**each, "trainer_run": settings} for host, each in hosts.inventory.variables.items()}
    hosts.inventory, hosts.updates = replace(hosts.inventory, variables=variables), {"head": ["openssl"]}
    stop = "head was left: it has the coordinator, and its members train in step\nThe run is saved and goes on: "
    with pytest.raises(ClusterTrouble, match=re.escape(f"{stop}fab stop-cluster, fab update-hosts head, then fab sta")):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert (hosts.work, answer(console)["outcome"]) == ([], "incomplete")
    stop_cluster(cluster(hosts), replace(console, json_out=None))
    update_hosts(cluster(hosts), replace(console, json_out=None), UpdateRequest(["head"]))
    assert hosts.work[0].startswith("update head of chief-0")
    assert hosts.marks == {}


def test_too_few_members_are_never_left(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"ps-a": ["openssl"], "w-a": ["openssl"]}
    drain(cluster(hosts), replace(console, json_out=None), "ps-b")
    with pytest.raises(ClusterTrouble, match="ps-a was left: 0 of 2 ps tasks would be left"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update w-a of ps-1,worker-0"]


def test_a_host_that_an_operator_has_drained_is_updated_and_stays_drained(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"w-b": ["openssl"]}
    drain(cluster(hosts), replace(console, json_out=None), "w-b", "a new disk")
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update w-b of worker-1"]
    assert json.loads(hosts.marks["w-b"])["reason"] == "a new disk"


def test_a_host_that_does_not_come_back_stays_drained_and_ends_it(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.dies = {"ps-b": ["openssl"], "w-a": ["openssl"]}, {"ps-b"}
    hosts.reboots = {"ps-b": "a new kernel"}
    with pytest.raises(HostsUnreachable, match=r"ps-b is unreachable: no route\n.*When it is back: fab update-hosts"):
        update_hosts(cluster(hosts), console, UpdateRequest(timeout=60))
    assert hosts.work[-1].startswith("reboot ps-b")
    assert hosts.marks.keys() == {"ps-b"}
    # Typed again too early, and then in time: it is up to date, comes back, and the next one's turn is there.
    with pytest.raises(HostsUnreachable, match="An earlier update has drained it"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    hosts.unreachable.clear()
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work[2:] == ["update w-a of worker-0"]
    assert (up(hosts), hosts.marks, hosts.recorded) == (ALL, {}, {})


def test_the_command_that_goes_on_has_what_was_asked_for(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.broken = {"w-a": ["openssl"]}, {"w-a": "E: Sub-process dpkg failed"}
    asked = UpdateRequest(["w-a"], reboot="always", timeout=1800, reason="it's patch day")
    again = "fab update-hosts w-a --reboot always --timeout 1800 --reason 'it'\"'\"'s patch day'"
    with pytest.raises(ClusterTrouble, match=re.escape(f"then {again}") + "$"):
        update_hosts(cluster(hosts), console, asked)


def test_updates_that_fail_leave_the_host_out(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.broken = {"w-a": ["openssl"], "w-b": ["openssl"]}, {"w-a": "E: Sub-process dpkg failed"}
    with pytest.raises(ClusterTrouble, match=r"w-a: E: Sub-process dpkg failed\. Fix it there, then fab update-hosts"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert (hosts.marks.keys(), hosts.work) == ({"w-a"}, ["update w-a of worker-0"])
    hosts.broken.clear()
    update_hosts(cluster(hosts), console, UpdateRequest())
    assert (up(hosts), hosts.marks) == (ALL, {})


def test_reboots_of_all_go_on_behind_those_that_are_done(hosts: Hosts, console: Console) -> None:
    asked = UpdateRequest(["ps-a", "ps-b", "w-a"], reboot="always")
    leave, begun = console.sleep, list[str]()

    def sleep(seconds: float) -> None:
        if len(hosts.work) == 2 and not begun:
            begun.append("left")
            raise KeyboardInterrupt
        leave(seconds)

    with pytest.raises(KeyboardInterrupt):
        update_hosts(cluster(hosts), replace(console, sleep=sleep), asked)
    assert hosts.work == ["reboot ps-a of ps-0, and back", "reboot ps-b of ps-1"]
    hosts.now += SLOW
    update_hosts(
        cluster(hosts), replace(console, json_out=None), UpdateRequest(["w-b"], reboot="always")
    )  # another round
    update_hosts(cluster(hosts), console, asked)
    assert hosts.work[2:] == ["reboot w-b of ps-1,worker-1, and back", "reboot w-a of worker-0, and back"]
    assert (up(hosts), hosts.marks) == (ALL, {})
    update_hosts(cluster(hosts), replace(console, json_out=None), asked)
    assert len(hosts.work) == 7


def test_a_reboot_may_be_forbidden(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.reboots = {"w-a": ["linux-image-amd64"]}, {"w-a": "a new kernel", "w-b": "a new kernel"}
    update_hosts(cluster(hosts), console, UpdateRequest(reboot="never"))
    assert hosts.work == ["update w-a of worker-0"]
    with pytest.raises(OperatorMistake, match="--reboot is 'often': expected when-needed, always, never or only"):
        update_hosts(cluster(hosts), console, UpdateRequest(reboot="often"))


def test_a_rolling_reboot_installs_nothing_and_is_once_around(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"w-a": ["openssl"]}
    asked = UpdateRequest(["w-a", "ps-b"], reboot="only")
    update_hosts(cluster(hosts), console, asked)
    assert hosts.work == ["reboot w-a of worker-0, and back", "reboot ps-b of ps-1, and back"]
    assert [(row["rebooted"], row["updates"]) for row in answer(console)["hosts"]] == [(True, [])] * 2
    assert "2 of 2 hosts have booted since" in fake_hosts.printed(console)
    assert (hosts.updates, up(hosts)) == ({"w-a": ["openssl"]}, ALL)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_rolling_reboot_is_once_around_where_a_clock_is_wrong(hosts: Hosts, console: Console, seconds: float) -> None:
    hosts.ahead = {"w-a": seconds}
    hosts.boots, hosts.now = {"w-a": hosts.now}, hosts.now + 60
    asked = UpdateRequest(["w-a", "ps-b"], reboot="only")
    hosts.dies = {"ps-b"}
    with pytest.raises(HostsUnreachable, match="ps-b is unreachable"):
        update_hosts(cluster(hosts), console, asked)
    assert [each.split()[1] for each in hosts.work] == ["w-a", "ps-b"]
    hosts.unreachable.clear()
    update_hosts(cluster(hosts), replace(console, json_out=None), asked)
    assert len(hosts.work) == 2


def test_a_rolling_reboot_asks_nothing_of_apt(hosts: Hosts, console: Console) -> None:
    hosts.apt_is_broken = True
    update_hosts(cluster(hosts), console, UpdateRequest(["w-a"], reboot="only"))
    assert hosts.work == ["reboot w-a of worker-0, and back"]


def test_a_plan_says_what_each_host_costs_and_touches_none(hosts: Hosts, console: Console) -> None:
    hosts.updates, hosts.reboots = {"ps-a": ["openssl", "libssl3"]}, {"w-b": "a new kernel"}
    update_hosts(cluster(hosts), console, UpdateRequest(plan_only=True))
    assert (hosts.work, hosts.done, hosts.lines) == ([], [], [])
    printed = fake_hosts.printed(console)
    assert "ps-a: 2 updates (openssl, libssl3), then a reboot where they ask for one\n  stops   ps-0" in printed
    assert "w-b: a reboot\n  stops   worker-1\n  pause   none" in printed
    assert "3 of 5 hosts are up to date. Nothing was done. Do it: fab update-hosts" in printed
    assert [row["rebooted"] for row in answer(console)["hosts"]] == [False, True]


def test_a_host_that_is_away_is_named_at_the_end(hosts: Hosts, console: Console) -> None:
    hosts.updates = {"w-a": ["openssl"]}
    hosts.unreachable["ps-b"] = "no route"
    with pytest.raises(HostsUnreachable, match="ps-b is unreachable: no route\nWhen they are back: fab update-hosts"):
        update_hosts(cluster(hosts), console, UpdateRequest())
    assert hosts.work == ["update w-a of worker-0"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("update-hosts", False),
        ("update-hosts ps-a,w-a", True),
        ("update-hosts --reboot always", False),
        ("update-hosts --plan --reboot=always ps-a", True),
        ("update-hosts --reason monthly --json --hosts ps-a", False),
        ("drain ps-a", False),
    ],
)
def test_hosts_may_be_left_out(monkeypatch: pytest.MonkeyPatch, words: str, named: bool) -> None:
    """Fabric would take a word for a verb, or ask for one that is missing."""
    monkeypatch.setattr("sys.argv", ["fab", *words.split()])
    assert names_follow("update-hosts") is named
