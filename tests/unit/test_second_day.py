"""Who takes part, and what was done: drains, hosts, ok-to-stop and the history, on hosts that are only pretended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake, OthersAtWork
from fleet.hosts import drain_records, drains, history
from fleet.hosts.cluster import Cluster
from fleet.hosts.run import Evaluation, Run
from fleet.hosts.ssh import Answer
from fleet.places import ROLES
from fleet.planning.cost import Cost, cost_of
from fleet.site.topology import Task
from fleet.status import status_text
from fleet.verbs.drain import drain, undrain
from fleet.verbs.history import compare_training, describe, last_switch, show_history
from fleet.verbs.hosts import show_hosts
from fleet.verbs.ok_to_stop import ok_to_stop
from fleet.verbs.rollback import rollback
from fleet.verbs.start import StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.stop import stop_cluster
from tests.unit import fake_hosts
from trainer.cluster.members import draining

TASKS = [
    Task("chief", 0, "head", "192.0.2.10", 2222, server=False),
    Task("ps", 0, "ps-a", "192.0.2.20", 2300, server=True),
    Task("ps", 1, "ps-b", "192.0.2.21", 2300, server=True),
    Task("worker", 0, "w-a", "192.0.2.30", 2400, server=True),
    Task("worker", 1, "w-b", "192.0.2.31", 2400, server=True),
    Task("evaluator", 0, "head", "192.0.2.10", None, server=False),
]
FACTS = "load=0.5\nprocessors=4\nmemory_total=8388608\nmemory_available={}\ndisk_free=1048576\nup=100.5"
APPEND = (ROLES / "release/files/append_history.sh").read_text(encoding="utf-8")


@dataclass
class Hosts(fake_hosts.FakeHosts):
    """Hosts with the files of a drain, and a coordinator that heeds them."""

    lines: list[str] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)
    leavers: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    """Workers whose data wait for them."""
    heeds: bool = True
    available: int = 4194304  # KiB
    full: bool = False

    def _answer(self, host: str, script: str) -> Answer:
        if "HISTORY=" in script:
            return self._append(host, script)
        if "history.jsonl" in script:
            return Answer("\n".join(self.lines))
        if "@units" in script:
            return self._look(host, script)
        if "systemctl start --no-block" in script:
            self.leaving -= {task.name for task in self._named(script)}
            return super()._answer(host, script)
        if any(f"cd {place}" in script for place in (drain_records.LEAVERS, drain_records.LEAVING)):
            self._announce(script)
        elif "rm -f" in script and drain_records.MARK in script:
            self.marks.pop(host, None)
            self.done.append(f"unmark {host}")
        elif drain_records.MARK in script:
            self.marks[host] = re.findall(r"\{.*?\}", script)[0]
            self.done.append(f"mark {host}")
        elif found := re.search(r"/drains/([\w-]+)\.json", script):
            if "rm -f" in script:
                self.recorded.pop(found[1], None)
            else:
                self.recorded[found[1]] = re.findall(r"\{.*?\}", script)[0]
        else:
            return super()._answer(host, script)
        return Answer()

    def _announce(self, script: str) -> None:
        for place, names in ((drain_records.LEAVERS, self.leavers), (drain_records.LEAVING, self.leaving)):
            if found := re.search(rf"cd {place} && touch ([\w -]+?) &&", script):
                names |= set(found[1].split())
            elif found := re.search(rf"cd {place} \S+ then rm -f ([\w -]*);", script):
                names -= set(found[1].split())

    def _append(self, host: str, script: str) -> Answer:
        """Append a line to the history; what the script does besides is done too."""
        if not self.full:
            (line,) = [word for word in shlex.split(script) if word.startswith("LINE=")]
            self.lines.append(json.dumps({"time": self.now, **json.loads(line.removeprefix("LINE="))}))
        why = "No space left on device" if self.full else ""
        rest = script.replace("HISTORY=", "").replace("history.jsonl", "")
        if "@units" in rest:
            return Answer(f"@first\n{why}\n@first-code\n{int(self.full)}\n{self._answer(host, rest).stdout}")
        if "mv /opt/trainer/before" in rest:
            self._answer(host, rest)
            return Answer("undone" if self.full else "")
        return Answer("", why, int(self.full))

    def _systemctl(self, script: str, task: Task) -> None:
        if task.host not in self.marks or "systemctl start" not in script:
            super()._systemctl(script, task)

    def _look(self, host: str, script: str) -> Answer:
        if self.run_status and self.heeds:
            gone = {task.name for task in self.inventory.tasks if task.server and not self.units[task.name].up}
            gone |= {name for name in self.leavers if name.startswith("ps")}
            self.run_status = {**self.run_status, "without": dict.fromkeys(sorted(gone), "away")}
        parts = [super()._answer(host, script).stdout]
        parts += ["@drain", self.marks.get(host, "")]
        if host == "head":
            parts += ["@drains", *self.recorded.values()]
        if "@facts" in script:
            parts += ["@facts", FACTS.format(self.available)]
        return Answer("\n".join(parts))


@pytest.fixture
def hosts() -> Hosts:
    return make_hosts()


def make_hosts() -> Hosts:
    """Hosts on which a run trains at step 20, saved at 15."""
    inventory = fake_hosts.make_inventory(TASKS)
    run = {**inventory.variables["head"]["trainer_run"], "strategy": "parameter_server"}
    variables = {host: {**values, "trainer_run": run} for host, values in inventory.variables.items()}
    jobs = ("chief", "ps", "worker", "evaluator")
    groups = {job: [task.host for task in TASKS if task.job == job] for job in jobs}
    found = Hosts(replace(inventory, variables=variables, groups=groups), run_status=fake_hosts.status("training", 20))
    found.checkpoints = Answer(json.dumps([{"step": 15, "created": 990.0, "size": 2**20, "kept": []}]))
    found.set_all(file_state="enabled", **fake_hosts.UP)
    return found


def cluster(hosts: Hosts) -> Cluster:
    return Cluster(hosts.inventory, hosts)


def up(hosts: Hosts) -> set[str]:
    return {name for name, unit in hosts.units.items() if unit.up}


ALL = {task.name for task in TASKS}


def test_a_drained_worker_stays_down_until_it_is_undrained(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    assert up(hosts) == ALL - {"worker-1"}
    assert json.loads(hosts.marks["w-b"])["reason"] == "a new disk"
    assert hosts.recorded.keys() == {"w-b"}
    assert hosts.leavers == {"worker-1"}
    cluster(hosts).start(TASKS)  # as a start by hand, or at a boot
    assert up(hosts) == ALL - {"worker-1"}
    undrain(cluster(hosts), console, "w-b")
    assert up(hosts) == ALL
    assert (hosts.marks, hosts.recorded, hosts.leavers) == ({}, {}, set())
    assert "w-b is back with worker-1" in fake_hosts.printed(console)


def test_a_status_says_of_a_drained_host_s_task_that_it_is_drained(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b")
    hosts.set("ps-1", active="inactive", sub="dead")  # as that of a lost process, which nobody took out
    run = cluster(hosts).observe().run
    assert run is not None
    assert "\n  without ps-1 (away), worker-1 (drained)" in status_text.render_run(run)


def test_a_drain_typed_twice_changes_nothing(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    done, lines = list(hosts.done), list(hosts.lines)
    drain(cluster(hosts), console, "w-b")
    assert (hosts.done, hosts.lines) == (done, lines)
    assert "a new disk. Bring it back: fab undrain w-b" in fake_hosts.printed(console)


def test_a_ps_is_stopped_once_the_coordinator_has_let_it_go(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "ps-b")
    assert hosts.done == ["mark ps-b", "stop ps-1"]
    hosts.done.clear()
    hosts.heeds = False
    hosts.run_status = fake_hosts.status("training", 25)
    undrain(cluster(hosts), console, "ps-b")
    assert hosts.done == ["unmark ps-b", "start ps-1"]


def test_a_ps_that_the_coordinator_keeps_stays_and_no_worker_of_its_host_is_named(
    hosts: Hosts, console: Console
) -> None:
    tasks = [replace(task, host="ps-b") if task.name == "worker-1" else task for task in TASKS]
    hosts.inventory, hosts.heeds = replace(hosts.inventory, tasks=tasks), False
    with pytest.raises(ClusterTrouble, match="ps-b stays: the coordinator did not let go of ps-1"):
        drain(cluster(hosts), console, "ps-b")
    assert up(hosts) == ALL
    assert (hosts.marks, hosts.recorded, hosts.leavers) == ({}, {}, set())


@pytest.mark.parametrize("verb", [drain, undrain])
def test_a_host_is_neither_drained_nor_brought_back_beside_another_act(
    hosts: Hosts, console: Console, verb: Callable[..., Any]
) -> None:
    if verb is undrain:
        drain(cluster(hosts), console, "w-b")
    before = (dict(hosts.marks), up(hosts), list(hosts.lines))
    hosts.held = Answer("taken by a run of site.yml of ann@laptop since 10:41:07 UTC")
    with pytest.raises(
        OthersAtWork, match=r"taken by a run of site\.yml of ann@laptop since 10:41:07 UTC\. Begin when"
    ):
        verb(cluster(hosts), console, "w-b")
    assert (hosts.marks, up(hosts), hosts.lines) == before
    verb(cluster(hosts), console, "w-b", plan_only=True)
    assert "this cluster is taken by a run of site.yml of ann@laptop" in fake_hosts.printed(console)


def test_a_drain_within_another_verb_is_under_its_lock(hosts: Hosts, console: Console) -> None:
    each = cluster(hosts)
    each.acquire_start_lock("update-hosts")
    drain(each, console, "w-b")
    undrain(each, console, "w-b")
    assert hosts.holds == ["held"]


def test_a_drain_that_was_broken_off_goes_on(hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "stop", fake_hosts.raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            drain(cluster(hosts), console, "w-b", "a new disk")
    assert up(hosts) == ALL
    console.json_out = io.StringIO()
    show_hosts(cluster(hosts), console)
    states = {row["host"]: row["state"] for row in json.loads(console.json_out.getvalue())["hosts"]}
    assert states["w-b"] == "draining"
    drain(cluster(hosts), console, "w-b")
    assert up(hosts) == ALL - {"worker-1"}
    assert json.loads(hosts.marks["w-b"])["reason"] == "a new disk"
    assert [json.loads(line)["outcome"] for line in hosts.lines] == ["begun", "left", "begun", "done"]


@pytest.mark.parametrize(
    ("host", "before", "message"),
    [
        ("head", [], "head has the coordinator, and the training stands still without it: `fab stop-cluster` saves"),
        ("w-b", ["worker-0"], "0 of 2 worker tasks would be left, and the training needs 1: bring another host back"),
        ("ps-b", ["ps-0"], "0 of 2 ps tasks would be left"),
        ("nowhere", [], "has no host 'nowhere'. It has: head, ps-a"),
        ("w-bb", [], "has no host 'w-bb'. Did you mean w-b? It has: head, ps-a"),
        ("ps-0", [], "ps-0 is a task, on ps-a. Did you mean ps-a? It has"),
        ("w-a,w-b", [], "w-a,w-b names 2 hosts; expected one, and then the next: w-a"),
    ],
)
def test_what_the_training_needs_is_not_drained(
    hosts: Hosts, console: Console, host: str, before: list[str], message: str
) -> None:
    for name in before:
        hosts.set(name, active="inactive", sub="dead")
    running = up(hosts)
    with pytest.raises(OperatorMistake, match=re.escape(message)):
        drain(cluster(hosts), console, host)
    assert (up(hosts), hosts.marks, hosts.lines) == (running, {}, [])


def test_a_ps_whose_part_finds_no_room_is_not_drained(hosts: Hosts, console: Console) -> None:
    hosts.available = 1000  # KiB, of a model of 1 MiB
    with pytest.raises(OperatorMistake, match=r"ps-a will hold 0\.00 GiB of the model, and has 0\.00 GiB left"):
        drain(cluster(hosts), console, "ps-b")


def test_a_plan_says_how_long_the_training_paused_lately(hosts: Hosts, console: Console) -> None:
    paused = [{"time": 1.0, "event": "training", "seconds": seconds} for seconds in (7.6, 4.4)]
    for events, pause in (([], "some seconds"), (paused, "some 8 s, as lately")):
        hosts.run_status = {**(hosts.run_status or {}), "events": events}
        drain(cluster(hosts), console, "ps-b", plan_only=True)
        assert f"pause   {pause}: the model is laid out again" in fake_hosts.printed(console)
    assert "stops   ps-1" in fake_hosts.printed(console)
    assert "from a checkpoint that is saved first" in fake_hosts.printed(console)


NO_PAUSE = "none: the others train on"
FORMED_AGAIN = "some seconds: the data are divided again, from a checkpoint that is saved first"


@pytest.mark.parametrize(
    ("settings", "devices", "pause"),
    [
        ({}, "0", NO_PAUSE),
        ({"input_position": "exact"}, None, FORMED_AGAIN),
        ({"input_position": "exact", "elastic": False}, None, NO_PAUSE),
        ({"input_position": "exact", "input_sharding": "dynamic"}, None, NO_PAUSE),
        ({}, "0,1", FORMED_AGAIN),
        ({"elastic": False}, "0,1", NO_PAUSE),
        ({"input_sharding": "dynamic"}, "0,1", NO_PAUSE),
        ({"input": "service"}, "0,1", NO_PAUSE),
    ],
)
def test_a_plan_says_what_it_costs_that_others_read_for_a_drained_worker(
    hosts: Hosts, settings: dict[str, Any], devices: str | None, pause: str
) -> None:
    for values in hosts.inventory.variables.values():
        values["trainer_run"] = {**values["trainer_run"], **settings}
    tasks = [replace(task, devices=devices) if task.job == "worker" else task for task in hosts.inventory.tasks]
    made = cost_of(replace(hosts.inventory, tasks=tasks), cluster(hosts).observe(with_facts=True), ["w-b"], [])
    assert made.pause == pause


def outcomes(console: Console) -> list[str]:
    """The outcomes that `--json` has printed."""
    assert isinstance(console.json_out, io.StringIO)
    return re.findall(r'"outcome": "([^"]+)"', console.json_out.getvalue())


def nexts(console: Console) -> list[str]:
    """The commands that `--json` has named."""
    assert isinstance(console.json_out, io.StringIO)
    return re.findall(r'"next": "([^"]+)"', console.json_out.getvalue())


def test_a_plan_says_what_the_verb_would_say(hosts: Hosts, console: Console) -> None:
    console.json_out = io.StringIO()
    undrain(cluster(hosts), console, "w-b", plan_only=True)
    drain(cluster(hosts), console, "w-b")
    drain(cluster(hosts), console, "w-b", plan_only=True)
    undrain(cluster(hosts), console, "w-b", plan_only=True)
    assert outcomes(console) == ["nothing to do", "done", "nothing to do", "planned"]
    assert nexts(console) == ["fab hosts", "fab undrain w-b", "fab undrain w-b", "fab undrain w-b"]
    drain(cluster(hosts), console, "ps-b", plan_only=True)
    with pytest.raises(OperatorMistake):
        drain(cluster(hosts), console, "head", plan_only=True)
    assert nexts(console)[4:] == ["fab drain ps-b", "fab hosts"]
    hosts.unreachable["ps-b"] = "no route"
    with pytest.raises(HostsUnreachable, match="Drain it when it is back, or take it out: fab remove-host ps-b"):
        drain(cluster(hosts), console, "ps-b", plan_only=True)


def test_without_the_coordinators_host_a_host_stays_drained(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b")
    hosts.unreachable["head"] = "no route"
    with pytest.raises(HostsUnreachable, match=r"head is unreachable: no route\n.*fab undrain w-b when it is back"):
        undrain(cluster(hosts), console, "w-b")
    assert "w-b" in hosts.marks


def test_a_task_that_fails_after_an_undrain_is_no_success(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b")
    hosts.tick = lambda _: hosts.set("worker-1", active="failed", sub="failed", result="exit-code", exit_status=78)
    with pytest.raises(ClusterTrouble, match=r"not all of it runs\nworker-1 on w-b: exited with code 78"):
        undrain(cluster(hosts), console, "w-b")
    assert json.loads(hosts.lines[-1])["outcome"] == "failed"


def test_a_host_that_missed_a_release_stays_out(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(cluster(hosts), console, "w-b")
    look = hosts._look
    monkeypatch.setattr(
        hosts,
        "_look",
        lambda host, script: replace(
            answer := look(host, script), stdout=answer.stdout.replace("abc123", "old" if host == "w-b" else "abc123")
        ),
    )
    with pytest.raises(OperatorMistake, match="w-b has release old, and the cluster runs abc123: `ansible-playbook"):
        undrain(cluster(hosts), console, "w-b")
    assert "w-b" in hosts.marks


def test_a_host_that_missed_other_settings_stays_out(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their order is no difference."""
    drain(cluster(hosts), console, "w-b")
    settings = {"head": '{"run": "a", "steps": 20}', "w-b": '{"run": "a", "steps": 10}'}
    others = hosts._answer

    def answer(host: str, script: str) -> Answer:
        return Answer(settings[host]) if script == "cat /etc/trainer/run.json" else others(host, script)

    monkeypatch.setattr(hosts, "_answer", answer)
    with pytest.raises(OperatorMistake, match="w-b has other run settings than head: it was off when they changed"):
        undrain(cluster(hosts), console, "w-b")
    assert "w-b" in hosts.marks
    settings["w-b"] = '{"steps": 20, "run": "a"}'
    undrain(cluster(hosts), console, "w-b")
    assert up(hosts) == ALL


def test_a_start_leaves_a_drained_host_out_and_says_so(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    hosts.set_all(active="inactive", sub="dead")
    hosts.run_status, hosts.heeds, hosts.leavers = fake_hosts.status("new", None), False, set()
    hosts.tick = fake_hosts.train()
    start_cluster(cluster(hosts), console, StartRequest(detach=True))
    assert "without worker-1 on w-b: drained since" in fake_hosts.printed(console)
    assert "a new disk (fab undrain w-b)" in fake_hosts.printed(console)
    assert "started chief-0, ps-0, ps-1, worker-0, evaluator-0" in fake_hosts.printed(console)
    assert "worker-1" not in up(hosts)
    assert hosts.leavers == {"worker-1"}


def test_status_takes_a_drained_host_that_is_off_for_no_trouble(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    show_status(cluster(hosts), console)
    hosts.unreachable["w-b"] = "no route"
    show_status(cluster(hosts), console)
    assert len(re.findall(r"worker-1 +w-b +drained .*a new disk", fake_hosts.printed(console))) == 2
    hosts.recorded.clear()
    with pytest.raises(HostsUnreachable):
        show_status(cluster(hosts), console)


def test_a_stop_takes_a_drained_host_that_is_off_for_no_trouble(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b")
    hosts.unreachable["w-b"] = "no route"
    stop_cluster(cluster(hosts), console)
    assert up(hosts) == set()
    assert json.loads(hosts.lines[-1])["outcome"] == "done"


def test_hosts_are_shown_with_state_and_reason(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    hosts.set("ps-1", active="failed")
    hosts.unreachable["w-a"] = "no route"
    console.json_out = io.StringIO()
    with pytest.raises(HostsUnreachable, match="w-a is unreachable"):
        show_hosts(cluster(hosts), console)
    rows = {row["host"]: row for row in json.loads(console.json_out.getvalue())["hosts"]}
    states = {host: (row["state"], row["why"]) for host, row in rows.items()}
    assert states["head"] == ("ready", None)
    assert states["w-b"] == ("drained", "a new disk")
    assert states["w-a"] == ("down", "no route")
    assert states["ps-b"][0] == "away"
    assert (rows["head"]["memory_available"], rows["head"]["load"]) == (2**32, 0.5)
    assert rows["w-a"]["load"] is None


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("ps-b", "5 steps: the newest checkpoint has step 15, saved 10 s ago. Nothing is lost after: fab drain ps-b"),
        ("head", "head has the coordinator"),
        ("w-b,ps-b", "Nothing is lost after: fab drain w-b, then fab drain ps-b"),
        ("w-a,w-b", "0 of 2 worker tasks would be left"),
    ],
)
def test_hosts_that_must_not_go_now(hosts: Hosts, console: Console, host: str, message: str) -> None:
    with pytest.raises(ClusterTrouble, match=message):
        ok_to_stop(cluster(hosts), console, host.split(","))


def test_a_pause_that_costs_no_step_is_named(hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = Cost(["ps-b"], ["ps-1"], "35 s", 0, "0 steps")
    monkeypatch.setattr("fleet.verbs.ok_to_stop.observe_with_cost", lambda *_, **__: (None, cost))
    with pytest.raises(ClusterTrouble, match="not now: a pause of 35 s"):
        ok_to_stop(cluster(hosts), console, ["ps-b"])


def test_a_host_that_serves_the_shared_path_must_not_go_while_a_task_runs(hosts: Hosts, console: Console) -> None:
    hosts.inventory = replace(hosts.inventory, groups={**hosts.inventory.groups, "nfs_server": ["w-b"]})
    with pytest.raises(ClusterTrouble, match="not now: w-b serves the shared path"):
        ok_to_stop(cluster(hosts), console, ["w-b"])
    hosts.set_all(active="inactive", sub="dead")
    ok_to_stop(cluster(hosts), console, ["w-b"])


def test_while_the_cluster_starts_its_members_must_not_go(hosts: Hosts, console: Console) -> None:
    for state in ("new", "stopped"):  # what the process before has said
        hosts.run_status = fake_hosts.status(state, None)
        for host in ("ps-b", "w-a"):
            with pytest.raises(ClusterTrouble, match="not now: a pause of some seconds more until the first step"):
                ok_to_stop(cluster(hosts), console, [host])
    hosts.set("chief-0", active="inactive", sub="dead")
    ok_to_stop(cluster(hosts), console, ["ps-b"])
    assert "pause   none: nothing of it trains" in fake_hosts.printed(console)


def test_where_nothing_runs_all_may_go_and_no_reason_is_named_why_not(hosts: Hosts, console: Console) -> None:
    hosts.set_all(active="inactive", sub="dead", file_state="disabled")
    hosts.run_status = fake_hosts.status("stopped", 20)
    answers = io.StringIO()
    for given in (replace(console, json_out=answers), console):
        ok_to_stop(cluster(hosts), given, ["w-a", "w-b"])
    record = json.loads(answers.getvalue())
    assert (record["ok"], record["cost"]["refusals"]) == (True, [])
    said = fake_hosts.printed(console)
    assert "refused" not in said
    assert "yes: w-a, w-b may be taken away now; no training can be started until they are back" in said


def test_a_plan_that_is_refused_names_no_command_that_would_be_too(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-a")
    with pytest.raises(OperatorMistake, match="w-b stays: 0 of 2 worker tasks would be left"):
        drain(cluster(hosts), console, "w-b", plan_only=True)
    assert fake_hosts.printed(console).splitlines()[-1] == "nothing was done"


def test_hosts_that_may_go_now(hosts: Hosts, console: Console) -> None:
    ok_to_stop(cluster(hosts), console, ["w-a"])
    drain(cluster(hosts), console, "ps-b")
    ok_to_stop(cluster(hosts), console, ["ps-b"])
    assert "yes: ps-b may be taken away now" in fake_hosts.printed(console)
    with pytest.raises(ClusterTrouble, match="0 of 2 ps tasks would be left"):
        ok_to_stop(cluster(hosts), console, ["ps-a"])
    assert "away    ps-1: drained" in fake_hosts.printed(console)


def test_starts_and_stops_leave_lines(hosts: Hosts, console: Console) -> None:
    stop_cluster(cluster(hosts), console, "a new switch")
    hosts.run_status, hosts.heeds = fake_hosts.status("new", None), False
    hosts.tick = fake_hosts.train()
    start_cluster(cluster(hosts), console, StartRequest("digits-2", detach=True, reason="it is there"))
    console.json_out = io.StringIO()
    show_history(cluster(hosts), console)
    acts = json.loads(console.json_out.getvalue())["history"]
    assert [(act["verb"], act["outcome"]) for act in acts] == [("stop-cluster", "done"), ("start-cluster", "done")]
    assert [act["reason"] for act in acts] == ["a new switch", "it is there"]
    assert (acts[1]["run"], acts[1]["release"], acts[1]["before"]) == ("digits-2", "abc123", "abc123")
    assert all(act["who"] and act["from"] and act["inventory"] for act in acts)


def test_a_start_that_fails_leaves_its_reason(hosts: Hosts, console: Console) -> None:
    console.ship = fake_hosts.shipping(fake_hosts.raises(ClusterTrouble("the switch failed")))
    with pytest.raises(ClusterTrouble):
        start_cluster(cluster(hosts), console, StartRequest())
    assert [json.loads(line)["outcome"] for line in hosts.lines] == ["begun", "failed"]
    assert json.loads(hosts.lines[-1])["message"] == "the switch failed"


def test_a_history_that_can_t_be_written_holds_up_nothing(hosts: Hosts, console: Console) -> None:
    hosts.full = True
    stop_cluster(cluster(hosts), console)
    assert up(hosts) == set()
    assert "this is not in the cluster's history" in fake_hosts.printed(console)


def test_a_start_goes_on_without_a_history(hosts: Hosts, console: Console) -> None:
    hosts.full = True
    hosts.tick = fake_hosts.train()
    start_cluster(cluster(hosts), console, StartRequest("digits-2", detach=True))
    said = fake_hosts.printed(console)
    assert said.count("this is not in the cluster's history") == 2
    assert "run digits trains" in said


@pytest.mark.parametrize("full", ["head", "w-b"])
def test_a_start_that_no_host_can_keep_anything_for_is_a_failed_act(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Nothing was switched. Without that line the one of its beginning would look like a start that goes on."""
    answer = hosts._answer

    def reply(host: str, script: str) -> Answer:
        if host == full and "mv /opt/trainer/before" in script:
            return Answer("", "tar: no space left on device", 1)
        return answer(host, script)

    monkeypatch.setattr(hosts, "_answer", reply)
    with pytest.raises(ClusterTrouble, match="no space left on device"):
        start_cluster(cluster(hosts), console, StartRequest("digits-2", detach=True))
    (act,) = history.merge(hosts.lines)[0]
    assert (act["verb"], act["outcome"], act["run"]) == ("start-cluster", "failed", "digits-2")
    assert "no space left on device" in act["message"]
    assert "nothing was stopped, switched or selected" in fake_hosts.printed(console)
    assert hosts.done == []


def test_a_user_without_a_name_has_a_number(hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    drain(cluster(hosts), console, "w-b")
    assert json.loads(hosts.lines[-1])["who"] == str(os.getuid())


def test_the_history_is_chosen_from(hosts: Hosts, console: Console) -> None:
    drain(cluster(hosts), console, "w-b", "a new disk")
    undrain(cluster(hosts), console, "w-b")
    hosts.lines.append('{"time": 1')
    show_history(cluster(hosts), console, verb="drain", host="w-b")
    shown = fake_hosts.printed(console)
    assert "a new disk" in shown.partition("WHEN")[2]
    assert "WHAT\n" in shown  # a long one widens no column
    assert "undrain" not in shown.partition("WHEN")[2]
    assert "1 lines of it can't be read" in shown


def test_the_history_shows_the_numbers_until_then() -> None:
    run = Run("digits", step=20, loss=0.25, evaluation=Evaluation(15, {"loss": "NaN"}), ledger={"goodput": 0.954})
    assert describe({"release": "new", "training": run.numbers}) == (
        "release new, training step 20, loss 0.25, goodput 0.954, val_loss nan"
    )
    assert describe({"training": {"step": "none", "loss": [1]}, "run": "digits"}) == "training , run digits"
    assert describe({"hosts": ["head"], "since": 1795974579.6404395}) == "hosts head"


def test_the_history_says_which_run_settings_an_act_has_changed(hosts: Hosts, console: Console) -> None:
    failed = json.dumps({"time": 1.0, "id": "f", "verb": "start-cluster", "outcome": "failed", "release": "bad"})
    hosts.lines = [shipped("a", NOW), failed, shipped("b", NOW), shipped("c", {"steps": 30, "seed": 1})]
    show_history(cluster(hosts), console)
    first, _, same, other = fake_hosts.printed(console).splitlines()[1:5]
    assert [line.rpartition("release ")[2].strip() for line in (first, same, other)] == [
        "a", "b", "c; setting save: 5 -> null, setting seed: null -> 1"
    ]  # fmt: skip


def test_an_act_without_an_end_is_shown_as_begun() -> None:
    begun = json.dumps({"time": 1.0, "id": "a", "verb": "drain", "outcome": "begun"})
    ended = json.dumps({"time": 3.5, "id": "a", "verb": "drain", "outcome": "done"})
    assert history.merge([begun])[0][0]["outcome"] == "begun"
    ((act,), damaged) = history.merge([begun, ended, "", "{"])
    assert (act["outcome"], act["time"], act["seconds"], damaged) == ("done", 1.0, 2.5, 1)


def append(path: Path, number: int) -> subprocess.Popen[bytes]:
    line = json.dumps({"id": str(number), "reason": 'it\'s "x" ' * 50})
    return subprocess.Popen(["sh", "-c", APPEND], env={"HISTORY": str(path), "LINE": line, "PATH": "/usr/bin:/bin"})


def test_lines_without_a_time_are_counted_as_damaged(hosts: Hosts, console: Console) -> None:
    wrong = ["{", "[1]", "7", '{"time": null}', '{"time": 1e300}', '{"time": NaN}', '{"time": -1e20, "id": "a"}']
    hosts.lines = [*wrong, '{"time": "12", "verb": "drain"}']
    show_history(cluster(hosts), console, since="1970-01-01")
    assert "drain" in fake_hosts.printed(console)
    assert f"{len(wrong)} lines of it can't be read" in fake_hosts.printed(console)


def test_numbers_that_json_lacks_are_texts_in_an_answer(hosts: Hosts, console: Console) -> None:
    hosts.lines = ['{"time": 12, "verb": "drain", "settings": {"seed": Infinity}}']
    console.json_out = io.StringIO()
    show_history(cluster(hosts), console)
    assert '"seed": "Infinity"' in console.json_out.getvalue()


def test_of_a_long_history_the_last_lines_are_read_and_an_act_keeps_its_id(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(history, "MAX_LINES", 3)
    monkeypatch.setattr(type(hosts.inventory), "shared_dir", str(tmp_path))
    drops = 'root() { while [ "$1" != -- ]; do shift; done; shift; "$@"; }'

    def run(scripts: Mapping[str, str], *_: Any) -> dict[str, Answer]:
        done = {host: subprocess.run(["sh", "-c", f"{drops}\n{script}"], capture_output=True, text=True, check=False)
                for host, script in scripts.items()}  # fmt: skip
        return {host: Answer(each.stdout, each.stderr, each.returncode) for host, each in done.items()}

    monkeypatch.setattr(hosts, "run", run)
    assert history.read(cluster(hosts)) == ([], 0)
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'{{"time": {number}, "verb": "site.yml"}}\n' for number in range(5)))
    acts, _ = history.read(cluster(hosts))
    assert [act["time"] for act in acts] == [2, 3, 4]
    with path.open("a") as file:
        file.write('{"time": 5, "verb": "drain"}\n')
    assert [act["id"] for act in history.read(cluster(hosts))[0]][:2] == [act["id"] for act in acts][1:]


def test_lines_that_are_appended_at_once_stay_whole(tmp_path: Path) -> None:
    """Takes half a second."""
    path = tmp_path / "history.jsonl"
    path.write_text('{"time": 1, "id": "half')  # as a power cut leaves it
    writers = [append(path, number) for number in range(20)]
    assert [writer.wait() for writer in writers] == [0] * 20
    acts, damaged = history.merge(path.read_text().splitlines())
    assert (sorted(int(act["id"]) for act in acts), damaged) == (list(range(20)), 1)


def shipped(
    release: str,
    settings: dict[str, Any] | None,
    verb: str = "start-cluster",
    outcome: str = "done",
    members: Mapping[str, list[str]] | None = None,
) -> str:
    name = f"{release}{settings}{members}"
    line: dict[str, Any] = {"time": 1.0, "id": name, "verb": verb, "outcome": outcome, "release": release}
    if members is not None:
        line["members"] = members
    return json.dumps(line if settings is None else {**line, "settings": settings})


NOW, OLD = {"steps": 30, "save": 5}, {"steps": 30, "save": 9}
KEPT = {"head": "abc123 old1 old2", "others": "abc123 old1 old2"}


@pytest.fixture
def back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return keep_releases(hosts, monkeypatch)


def keep_releases(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Have hosts keep three releases, and do what fleet/hosts/agent.py is asked."""
    answer = hosts._answer

    def reply(host: str, script: str) -> Answer:
        if "/opt/trainer/releases/*/env" in script:
            kept = KEPT.get(host, KEPT["others"]).replace(" ", "\n")
            return Answer(f"{kept}\n@settings\n{json.dumps(NOW)}" if host == "head" else kept)
        return answer(host, script)

    def act(self: Cluster, asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        found = {}
        for host, each in asked.items():
            (switch, *more, stale) = each["steps"]
            hosts.release = switch["arguments"]["id"]
            hosts.done += [f"{host} has {hosts.release}", *(f"{host} gets {json.loads(step['text'])}" for step in more)]
            names = [task.name for task in hosts.inventory.tasks_on(host)]
            assert stale["module"] == "stale_tasks"
            found[host] = {"steps": {"switch": {}, "stale": {"tasks": dict.fromkeys(names, "x"), "warm": names}}}
        return found

    monkeypatch.setattr(hosts, "_answer", reply)
    monkeypatch.setattr(Cluster, "act", act)
    hosts.tick = lambda _: hosts.run_status.update(step=hosts.run_status["step"] + 1)  # type: ignore[union-attr]
    return hosts


def test_a_rollback_brings_back_release_and_settings(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", OLD), shipped("abc123", NOW), shipped("bad", NOW, outcome="failed")]
    rollback(cluster(back), console, reason="worse")
    assert "head has old1" in back.done
    assert f"w-b gets {dict(sorted(OLD.items()))}" in back.done
    assert {f"park {name}" for name in ALL} | {f"go on {name}" for name in ALL} <= set(back.done)
    assert back.done.index("tell old1") < back.done.index("park chief-0") < back.done.index("park ps-0")
    assert "setting  save: 5 -> 9" in fake_hosts.printed(console)
    line = json.loads(back.lines[-1])
    assert (line["verb"], line["outcome"], line["reason"]) == ("rollback", "done", "worse")
    assert line["training"] == {"step": 21}  # what it told before
    assert (line["release"], line["before"]) == ("old1", "abc123")


@pytest.mark.parametrize(
    ("to", "lines", "message"),
    [
        (None, [], "the history has nothing before the present release and settings: name a release"),
        (None, [shipped("abc123", NOW)], "the history has nothing before"),
        (
            "new",
            [],
            "--to 'new' names no release that the history or the hosts know; the hosts have abc123, old1, old2",
        ),
        ("old", [], "--to 'old' names old1, old2: give more of it"),
        ("gone", [shipped("gone", OLD)], "head, ps-a, ps-b, w-a, w-b has release gone no more"),
    ],
)
def test_a_rollback_to_what_is_not_there_changes_nothing(
    back: Hosts, console: Console, to: str | None, lines: list[str], message: str
) -> None:
    back.lines = list(lines)
    with pytest.raises(OperatorMistake, match=re.escape(message)):
        rollback(cluster(back), console, to)
    assert (back.done, back.lines) == ([], lines)


def test_a_rollback_that_fails_is_put_back(back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    back.lines = [shipped("old1", OLD)]
    monkeypatch.setattr(Cluster, "act", fake_hosts.raises(ClusterTrouble("a file of it was changed")))
    with pytest.raises(ClusterTrouble, match="a file of it was changed"):
        rollback(cluster(back), console)
    assert "put back" in back.done
    assert up(back) == ALL
    assert json.loads(back.lines[-1])["outcome"] == "failed"


def test_the_first_step_that_is_seen_after_a_rollback_is_its_end(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", OLD)]
    looks: list[set[str]] = []
    tick = back.tick

    def count(hosts: fake_hosts.FakeHosts) -> None:
        looks.append(set(hosts.done))
        tick(hosts)

    back.tick = count
    rollback(cluster(back), console)
    # What the last coordinator has said, and a step.
    assert len([done for done in looks if "go on chief-0" in done]) == 2


@pytest.mark.parametrize("held", [Answer("sudo: a password is required"), Answer(unreachable="no answer")])
def test_a_change_that_keeps_no_other_away_says_so(hosts: Hosts, console: Console, held: Answer) -> None:
    hosts.held = held
    drain(cluster(hosts), console, "w-b")
    why = held.unreachable or held.stdout
    said = f"others are not kept away from this cluster, since head can't be asked: {why}\n"
    assert said in fake_hosts.printed(console)
    assert set(hosts.recorded) == {"w-b"}


def stop_meanwhile(hosts: Hosts) -> None:
    """Stop the cluster, as another operator does."""
    hosts.stopped = "a stop-cluster of bob@desk at 10:41:07 UTC"
    hosts.set_all(active="inactive", sub="dead", file_state="disabled")


def test_a_rollback_starts_nothing_of_a_cluster_that_is_stopped_meanwhile(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = Cluster.act

    def stopped(*arguments: Any) -> dict[str, Any]:
        stop_meanwhile(back)
        return act(*arguments)

    back.lines = [shipped("old1", OLD)]
    monkeypatch.setattr(Cluster, "act", stopped)
    with pytest.raises(ClusterTrouble, match="a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile"):
        rollback(cluster(back), console)
    assert (up(back), back.release) == (set(), "abc123")
    assert not any(unit.enabled for unit in back.units.values())


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_rollback_typed_twice_does_not_go_forward_again(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, broken_off: bool
) -> None:
    back.lines = [shipped("old2", NOW), shipped("old1", NOW), shipped("abc123", NOW)]
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        if broken_off:
            patch.setattr("fleet.verbs.rollback._wait_for_a_step", fake_hosts.raises(KeyboardInterrupt))
        rollback(cluster(back), console)
    assert back.release == "old1"
    assert json.loads(back.lines[-1])["outcome"] == ("left" if broken_off else "done")
    back.done.clear()
    rollback(cluster(back), console)
    assert (back.release, back.done) == ("old1", [])
    assert "to go elsewhere, fab rollback --to RELEASE" in fake_hosts.printed(console)
    rollback(cluster(back), console, "abc")
    assert back.release == "abc123"


def test_a_rollback_lost_in_its_switch_goes_on_and_leaves_a_drained_host_alone(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """The control machine is lost."""

    back.lines = [shipped("old1", NOW), shipped("abc123", NOW)]
    drain(cluster(back), console, "w-b")
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "start", fake_hosts.raises(Killed))
        patch.setattr("fleet.verbs.rollback._restore", lambda *_: None)
        with pytest.raises(Killed):
            rollback(cluster(back), console)
    back.lines.pop()  # how it ended
    back.set("ps-0", active="inactive", sub="dead")
    console.json_out = io.StringIO()
    rollback(cluster(back), console)
    names = ["chief-0", "ps-0", "ps-1", "worker-0", "evaluator-0"]
    assert json.loads(console.json_out.getvalue())["restarts"] == names
    assert up(back) == set(names)


FEWER = {"head": ["chief-0", "evaluator-0"], "ps-a": ["ps-0"], "ps-b": ["ps-1"], "w-a": ["worker-0"]}


def test_a_start_and_a_rollback_note_the_members(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", OLD)]
    rollback(cluster(back), console)
    assert json.loads(back.lines[-1])["members"] == {**FEWER, "w-b": ["worker-1"]}
    assert "members" not in json.loads(back.lines[1])  # once is enough
    assert describe(json.loads(back.lines[-1])) == describe({**json.loads(back.lines[-1]), "members": None})


def test_a_rollback_drains_the_hosts_that_came_since(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", NOW, members=FEWER), shipped("abc123", NOW)]
    rollback(cluster(back), console, plan_only=True)
    assert "drain    w-b: worker-1 came since. Have it back: fab undrain w-b" in fake_hosts.printed(console)
    assert back.done == []
    rollback(cluster(back), console, reason="worse")
    assert back.done.index("go on ps-1") < back.done.index("mark w-b")
    assert (json.loads(back.recorded["w-b"])["verb"], json.loads(back.recorded["w-b"])["reason"]) == (
        "rollback",
        "worse",
    )
    assert back.release == "old1"
    assert up(back) == ALL - {"worker-1"}
    back.done.clear()
    rollback(cluster(back), console)  # typed twice
    assert back.done == []
    undrain(cluster(back), console, "w-b")
    assert up(back) == ALL
    rollback(cluster(back), console)
    assert up(back) == ALL  # who has it back keeps it


def test_a_rollback_that_trains_no_step_says_what_drains_the_hosts_that_came_since(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    back.lines = [shipped("old1", NOW, members=FEWER), shipped("abc123", NOW)]
    with monkeypatch.context() as patch:
        patch.setattr("fleet.verbs.rollback.wait", lambda *_, **__: False)
        with pytest.raises(ClusterTrouble, match=r"Not drained yet: w-b, new since\. When it trains: fab rollback"):
            rollback(cluster(back), console)
    assert (back.release, up(back)) == ("old1", ALL)
    rollback(cluster(back), console)
    assert (back.release, up(back)) == ("old1", ALL - {"worker-1"})


def test_a_new_host_without_the_older_release_holds_up_no_rollback(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joined with the release that is left, and has no other."""
    monkeypatch.setitem(KEPT, "w-b", "abc123")
    back.lines = [shipped("old1", NOW, members=FEWER), shipped("abc123", NOW)]
    rollback(cluster(back), console)
    assert [deed for deed in back.done if "old1" in deed and "w-b" in deed] == []
    assert "go on worker-1" not in back.done
    assert up(back) == ALL - {"worker-1"}
    assert "release old1 is on 4 hosts" in fake_hosts.printed(console)
    back.done.clear()
    rollback(cluster(back), console)  # typed twice
    assert back.done == []


def test_new_hosts_without_the_older_release_leave_before_the_older_coordinator_starts(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ps or worker of the release that is left may be why no step comes."""
    for host in ("ps-b", "w-b"):
        monkeypatch.setitem(KEPT, host, "abc123")
    then = {host: names for host, names in FEWER.items() if host != "ps-b"}
    back.lines = [shipped("old1", NOW, members=then), shipped("abc123", NOW)]
    with monkeypatch.context() as patch:
        patch.setattr("fleet.verbs.rollback.wait", lambda *_, **__: False)
        with pytest.raises(ClusterTrouble, match="Not drained yet: ps-b, w-b, new since"):
            rollback(cluster(back), console)
    assert (back.release, up(back), back.marks) == ("old1", ALL - {"ps-1", "worker-1"}, {})
    # The coordinator saves while they serve it still.
    assert back.done.index("park chief-0") < back.done.index("stop ps-1") < back.done.index("go on chief-0")
    assert back.leavers == {"ps-1", "worker-1"}
    rollback(cluster(back), console)
    assert (set(back.marks), up(back)) == ({"ps-b", "w-b"}, ALL - {"ps-1", "worker-1"})


def test_a_rollback_that_fails_has_new_hosts_without_the_older_release_train_again(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(_: Cluster, tasks: list[Task]) -> None:
        started.append([task.name for task in tasks])
        if len(started) == 1:
            raise ClusterTrouble("no space")

    monkeypatch.setitem(KEPT, "w-b", "abc123")
    back.lines = [shipped("old1", NOW, members=FEWER), shipped("abc123", NOW)]
    monkeypatch.setattr(Cluster, "start", start)
    with pytest.raises(ClusterTrouble, match="no space"):
        rollback(cluster(back), console)
    assert started == [["chief-0", "ps-0", "ps-1", "worker-0", "evaluator-0"], ["worker-1"]]
    assert back.leavers == set()


def test_a_rollback_that_fails_starts_no_new_host_of_a_cluster_that_is_stopped_meanwhile(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Cluster.stop

    def stopped(self: Cluster, tasks: Sequence[Task]) -> None:
        stop(self, tasks)
        stop_meanwhile(back)

    monkeypatch.setitem(KEPT, "w-b", "abc123")
    back.lines = [shipped("old1", NOW, members=FEWER), shipped("abc123", NOW)]
    monkeypatch.setattr(Cluster, "stop", stopped)
    with pytest.raises(ClusterTrouble, match="a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile"):
        rollback(cluster(back), console)
    assert up(back) == set()


def test_an_undrain_starts_nothing_of_a_cluster_that_is_stopped_meanwhile(
    hosts: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(cluster(hosts), console, "w-b")
    announce = drains.announce_return

    def stopped(*arguments: Any) -> None:
        announce(*arguments)
        stop_meanwhile(hosts)

    monkeypatch.setattr(drains, "announce_return", stopped)
    with pytest.raises(ClusterTrouble, match="a stop-cluster of bob@desk at 10:41:07 UTC came meanwhile"):
        undrain(cluster(hosts), console, "w-b")
    assert up(hosts) == set()
    undrain(cluster(hosts), console, "w-b")
    assert (up(hosts), hosts.recorded) == (set(), {})


def test_new_hosts_alone_are_the_work_of_a_rollback_to_the_present_release(back: Hosts, console: Console) -> None:
    console.json_out = io.StringIO()
    back.lines = [shipped("old1", NOW), shipped("abc123", NOW, members=FEWER)]
    rollback(cluster(back), console, "abc")
    answer = json.loads(console.json_out.getvalue())
    assert (answer["drains"], answer["restarts"], answer["stays"], answer["gone"]) == (["w-b"], [], [], [])
    assert up(back) == ALL - {"worker-1"}
    assert back.done == ["mark w-b", "stop worker-1"]
    assert json.loads(back.lines[-1])["verb"] == "rollback"
    lines = fake_hosts.printed(console).splitlines()
    assert lines[:3] == [
        "rollback",
        "  restart  nothing",
        "  drain    w-b: worker-1 came since. Have it back: fab undrain w-b",
    ]
    assert lines[-1] == "release and settings are as they were. Look: fab hosts"
    back.done.clear()
    for to in ("abc", None):
        rollback(cluster(back), console, to)
    assert back.done == []


def test_a_rollback_of_settings_names_the_release_that_stays(back: Hosts, console: Console) -> None:
    back.lines = [shipped("abc123", OLD)]
    rollback(cluster(back), console)
    assert fake_hosts.printed(console).startswith(
        "rollback\n  release  abc123\n  setting  save: 5 -> 9\n  restart  chief-0"
    )


def test_new_hosts_make_no_earlier_state_the_target(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", NOW), shipped("abc123", NOW, members=FEWER)]
    rollback(cluster(back), console)
    assert (back.release, up(back), back.marks) == ("old1", ALL, {})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({key: FEWER[key] for key in ("head", "ps-a", "ps-b")}, "stays    w-b: 0 of 2 worker tasks would be left"),
        ({**FEWER, "w-b": ["worker-1"], "w-c": ["worker-2"]}, "gone     worker-2 on w-c: to have it again, add it to"),
        ({**FEWER, "head": ["chief-0"], "w-b": ["worker-1"]}, "stays    evaluator-0: head has tasks of then too"),
        ({**FEWER, "w-old": ["worker-1"]}, "release  abc123 -> old1"),  # a replaced host keeps its task
    ],
)
def test_members_that_cant_be_brought_back_hold_up_no_rollback(
    back: Hosts, console: Console, members: dict[str, list[str]], says: str
) -> None:
    back.lines = [shipped("old1", OLD, members=members)]
    rollback(cluster(back), console)
    assert says in fake_hosts.printed(console)
    new = set() if "w-a" in members else {"w-a"}
    assert (back.release, set(back.marks), up(back)) == ("old1", new, ALL - {"worker-0"} if new else ALL)


def test_a_new_ps_that_the_coordinator_keeps_holds_up_no_rollback(back: Hosts, console: Console) -> None:
    back.lines = [shipped("old1", NOW, members={key: FEWER[key] for key in ("head", "ps-a", "w-a")})]
    back.heeds = False
    rollback(cluster(back), console)
    printed = fake_hosts.printed(console)
    assert "  stays    ps-b: the coordinator did not let go of ps-1 in 900 s. " in printed
    assert "When that is fixed: fab drain ps-b\n" in printed
    assert (back.release, set(back.marks), up(back)) == ("old1", {"w-b"}, ALL - {"worker-1"})
    assert json.loads(back.lines[-1])["outcome"] == "done"
    back.done.clear()
    rollback(cluster(back), console)
    assert back.done == []


@pytest.mark.parametrize(("to", "release"), [(None, "old1"), ("abc", "abc123")])
def test_a_rollback_left_in_its_drains_goes_on_with_them(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch, to: str | None, release: str
) -> None:
    then = {host: names for host, names in FEWER.items() if host != "ps-b"}
    back.lines = [shipped(name, NOW, members=then) for name in ("old2", "old1", "abc123")]
    with monkeypatch.context() as patch:
        patch.setattr("fleet.verbs.drain._wait_until_let_go", fake_hosts.raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rollback(cluster(back), console, to)
    assert (back.release, set(back.recorded), back.marks) == (release, {"ps-b"}, {})
    rollback(cluster(back), console)
    assert "rollback to the target of the last one. To go elsewhere, fab rollback --to" in fake_hosts.printed(console)
    assert (back.release, set(back.marks)) == (release, {"ps-b", "w-b"})
    assert up(back) == ALL - {"ps-1", "worker-1"}


@pytest.mark.parametrize("release", ["abc123", "old1"])
def test_a_rollback_whose_end_is_missing_goes_no_further_back(back: Hosts, console: Console, release: str) -> None:
    back.lines = [shipped(name, NOW) for name in ("old2", "old1", "abc123")]
    act = {"verb": "rollback", "id": "lost", "time": 2.0, "outcome": "begun", "release": "old1"}
    back.lines.append(json.dumps({**act, "target": json.loads(back.lines[1])["id"]}))
    back.lines.append(shipped("new", NOW, outcome="failed"))
    back.release = release
    rollback(cluster(back), console)
    assert back.release == "old1"


def test_a_rollback_lost_in_its_switch_goes_on_to_what_site_yml_brought(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any) -> None:
        back.release = "old1"
        raise KeyboardInterrupt

    act = json.loads(shipped("old1", OLD, "site.yml"))
    del act["id"]  # as Ansible's lines
    update = {"time": 1.5, "verb": "site.yml", "outcome": "done", "changed": ["units"]}
    back.lines = [json.dumps(act), shipped("abc123", NOW), json.dumps(update)]
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "act", lose)
        patch.setattr("fleet.verbs.rollback._restore", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            rollback(cluster(back), console)
    back.done.clear()
    rollback(cluster(back), console)
    assert back.release == "old1"
    assert f"w-b gets {dict(sorted(OLD.items()))}" in back.done


@pytest.mark.parametrize("members", [None, [], "x", {"w-a": "worker-0"}])
def test_members_that_nobody_noted_change_nothing(back: Hosts, console: Console, members: Any) -> None:
    back.lines = [shipped("old1", OLD, members=members)]
    rollback(cluster(back), console)
    assert (back.release, up(back), back.marks) == ("old1", ALL, {})


@pytest.mark.parametrize(("host", "command"), [("w-b", "remove-host w-b"), ("head", "replace-host head NEW")])
def test_a_rollback_names_what_to_do_with_a_dead_host(back: Hosts, console: Console, host: str, command: str) -> None:
    back.unreachable[host] = "no route"
    with pytest.raises(HostsUnreachable, match=f"or take them out: fab {command}"):
        rollback(cluster(back), console)


def test_a_rollback_that_loses_a_host_starts_the_others_again(
    back: Hosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any) -> None:
        back.unreachable["w-b"] = "the connection was lost"
        raise HostsUnreachable(back.unreachable)

    back.lines = [shipped("old1", OLD)]
    monkeypatch.setattr(Cluster, "act", lose)
    with pytest.raises(HostsUnreachable):
        rollback(cluster(back), console)
    assert up(back) >= ALL - {"worker-1"}
    assert {"tell abc123", "start chief-0"} <= set(back.done)
    assert "when that is fixed: fab rollback --to abc123" in fake_hosts.printed(console)


def test_a_release_without_settings_keeps_the_present_ones(back: Hosts, console: Console) -> None:
    rollback(cluster(back), console, "old2", plan_only=True)
    assert back.done == []
    assert "settings stay" in fake_hosts.printed(console)
    rollback(cluster(back), console, "old2")
    assert [line for line in back.done if "gets" in line] == []


def test_unit_and_coordinator_look_where_a_drain_is_marked() -> None:
    unit = (ROLES / "trainer/templates/trainer@.service.j2").read_text(encoding="utf-8")
    assert f"\nConditionPathExists=!{drain_records.MARK}\n" in unit
    assert str(draining.DRAINED) == drain_records.LEAVERS
    assert str(draining.LEAVING) == drain_records.LEAVING


@pytest.mark.parametrize("place", [drain_records.MARK, drain_records.LEAVERS])
def test_marks_of_a_drain_lie_where_no_boot_empties_and_are_on_disk_at_once(
    hosts: Hosts, tmp_path: Path, place: str
) -> None:
    assert not place.startswith(("/run/", "/tmp/", "/var/run/", "/dev/"))
    scripts: list[str] = []
    made = cluster(hosts)
    made.hosts = SimpleNamespace(run=lambda given: scripts.extend(given.values()) or {h: Answer() for h in given})  # type: ignore[assignment]
    drains.mark(made, "w-b", {"host": "w-b"})
    drains.announce_drain(made, [TASKS[4]])
    [script] = [
        each for each in scripts if place in each and (place == drain_records.MARK or drain_records.MARK not in each)
    ]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/root").write_text('#!/bin/sh\nexec "$@"\n', encoding="utf-8")
    (tmp_path / "bin/sync").write_text(f'#!/bin/sh\necho "$(realpath "$1")" $(ls {tmp_path}/opt) >>{tmp_path}/synced\n')
    for each in (tmp_path / "bin").iterdir():
        each.chmod(0o755)
    (tmp_path / "opt").mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script.replace("/opt/trainer", f"{tmp_path}/opt")], env=environment, check=True)
    *_, last = (tmp_path / "synced").read_text(encoding="utf-8").splitlines()
    what = {drain_records.MARK: f"{tmp_path}/opt drain.json", drain_records.LEAVERS: f"{tmp_path}/opt/drains drains"}
    assert last == what[place]


@pytest.mark.parametrize("rebooted", [["w-b"], ["head"], ["ps-a", "ps-b"], ["head", "ps-a", "ps-b", "w-a", "w-b"]])
def test_a_drain_survives_reboots(hosts: Hosts, console: Console, rebooted: list[str]) -> None:
    """Each host's units start at a boot as they were; status and hosts say before and after it who is drained."""
    drain(cluster(hosts), console, "w-b", "a new disk")
    gone = [task for task in TASKS if task.host in rebooted]

    def looks() -> None:
        console.json_out = io.StringIO()
        show_hosts(cluster(hosts), console)
        [row] = [row for row in json.loads(console.json_out.getvalue())["hosts"] if row["host"] == "w-b"]
        assert (row["state"], row["why"]) == ("drained", "a new disk")
        console.json_out = None
        with contextlib.suppress(ClusterTrouble):  # it says what does not run
            show_status(cluster(hosts), console)
        assert re.search(r"worker-1 .*drained.*a new disk", fake_hosts.printed(console).rpartition("TASK ")[2])

    for task in gone:
        hosts.set(task.name, active="inactive", sub="dead")
    if "head" not in rebooted:
        hosts.unreachable = {host: "it boots" for host in rebooted if host == "w-b"}
    looks()
    hosts.unreachable = {}
    cluster(hosts).start(gone)
    looks()
    assert up(hosts) == ALL - {"worker-1"}
    assert hosts.leavers == {"worker-1"}
    undrain(cluster(hosts), console, "w-b")
    assert up(hosts) == ALL


@pytest.mark.parametrize("restart", [False, True])
def test_the_history_compares_a_training_before_and_since_a_switch(
    restart: bool, hosts: Hosts, console: Console
) -> None:
    def trains(step: int, updated: float, run: str = "digits", **ledger: float) -> dict[str, Any]:
        return fake_hosts.status(
            "training", step, updated, run=run, loss=50 / step, steps_per_second=25.0, ledger=ledger
        )

    def tick(pretence: fake_hosts.FakeHosts) -> None:
        pretence.run_status = trains(
            100 + int(pretence.now - began), pretence.now, productive=90, elapsed=100, goodput=0.9
        )

    began, hosts.tick = hosts.now, tick
    tick(hosts)
    request = StartRequest(detach=True, restart=restart)
    start_cluster(cluster(hosts), console, request)
    hosts.tick = lambda _: None
    hosts.run_status = trains(200, hosts.now, productive=120, elapsed=150, goodput=0.8)
    show_history(cluster(hosts), console)
    title, before, now = fake_hosts.printed(console).splitlines()[-3:]
    assert title.startswith(f"run digits, before {request.verb} of ")
    assert before == "  before  step 100, loss 0.5, steps_per_second 25, goodput 0.9"
    assert now == "  now     step 200, loss 0.25, steps_per_second 25, goodput 0.6"
    hosts.run_status = trains(200, hosts.now, "another", productive=120, elapsed=150, goodput=0.8)
    console.json_out = io.StringIO()
    show_history(cluster(hosts), console)
    assert json.loads(console.json_out.getvalue())["compared"] is None


def test_a_start_of_another_run_notes_whose_numbers_it_has(hosts: Hosts, console: Console) -> None:
    hosts.run_status = fake_hosts.status("training", 20, hosts.now, run="digits", loss=0.5)
    with contextlib.suppress(ClusterTrouble):  # no step of the new run is pretended
        start_cluster(cluster(hosts), console, StartRequest("other", detach=True, timeout=1))
    act = json.loads(hosts.lines[0])
    assert (act["run"], act["trained"], act["training"]["loss"]) == ("other", "digits", 0.5)


def test_only_the_run_that_trained_before_a_switch_is_compared() -> None:
    """A start may choose another run, and in a queue it chooses none."""
    numbers = {"step": 100, "loss": 0.5}
    shared = {"verb": "start-cluster", "time": 1.0, "release": "abc", "training": numbers, "accounted": {}}
    present = Run("digits", state="training", step=200, loss=0.25)
    for act, is_compared in (
        ({**shared, "run": "digits", "trained": "digits"}, True),
        ({**shared, "trained": "digits"}, True),
        ({**shared, "run": "digits", "trained": "other"}, False),
        ({**shared, "run": "digits"}, True),  # as an earlier version has written it
        ({**shared, "run": "other"}, False),
    ):
        found = compare_training(act, present)
        assert bool(found) is is_compared, act
        assert found is None or (found["run"], found["before"], found["now"]["step"]) == ("digits", numbers, 200)


def test_a_run_that_was_brought_back_since_a_switch_has_no_goodput_below_zero() -> None:
    act = {"verb": "start-cluster", "time": 1.0, "run": "digits", "training": {"goodput": 0.9}}
    act["accounted"] = {"elapsed": 5000.0, "productive": 4500.0}
    present = Run(
        "digits", state="training", step=200, ledger={"elapsed": 5100.0, "productive": 4400.0, "goodput": 0.86}
    )
    assert "goodput" not in (compare_training(act, present) or {})["now"]


@pytest.mark.parametrize("verb", ["start-cluster", "restart-cluster", "sweep", "rollback"])
def test_the_last_switch_is_the_last_act_that_began_the_tasks_again(verb: str) -> None:
    older, last = ({"verb": each, "outcome": "done", "training": {"loss": 1.0}} for each in ("start-cluster", verb))
    assert last_switch([older, last, {**last, "outcome": "failed"}, {**last, "verb": "canary"}]) is last
