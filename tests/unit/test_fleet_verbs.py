"""The verbs from question to exit code, on hosts that are only pretended."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jinja2
import pytest
import yaml

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.run import PATH_SECONDS, Run
from fleet.hosts.ssh import Answer
from fleet.hosts.units import Unit
from fleet.places import KIT
from fleet.planning.decision import choose, pick_restarts
from fleet.rollout.release import (
    STAGE,
    SWITCH,
    Display,
    Recap,
    Shipment,
    ShipmentResult,
    build_release,
    check_deeply,
    parse_recap,
    ship,
)
from fleet.site.filters import FILTERS
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.schema.control_files import LOCKS, lock_of
from fleet.site.topology import Task
from fleet.verbs.export import export_run
from fleet.verbs.logs import show_logs
from fleet.verbs.runs import show_checkpoints, show_runs
from fleet.verbs.start import LEFT, StartRequest, start_cluster
from fleet.verbs.status import show_status
from fleet.verbs.stop import stop_cluster
from fleet.verbs.sweep import show_sweep
from fleet.verbs.tensorboard import open_tensorboard

TASKS = [
    Task("chief", 0, "head", "192.0.2.10", 2222, server=False),
    Task("ps", 0, "store", "192.0.2.20", 2300, server=True),
    Task("worker", 0, "store", "192.0.2.20", 2400, server=True),
    Task("worker", 1, "far", "192.0.2.30", 2400, server=True),
    Task("evaluator", 0, "head", "192.0.2.10", None, server=False),
]
# The same hosts under multi_worker_mirrored: no parameter servers, and workers that train.
IN_STEP = [replace(task, server=False) for task in TASKS if task.job != "ps"]
UP = {"active": "active", "sub": "running"}
# Why a start of these hosts is Ansible's: the inventory that they pretend to be of says nothing else of them.
UNKNOWN = "what it should hold can't be worked out here: 'cluster_uid' is undefined"


@dataclass
class FakeHosts:
    """Hosts that keep units in a dict and understand the verbs' scripts; `tick` is called at each observation."""

    inventory: Inventory
    units: dict[str, Unit] = field(default_factory=dict)
    run_status: dict[str, Any] | None = None
    selection: str = ""
    release: str | None = "abc123"
    environments: bool = True
    unreachable: dict[str, str] = field(default_factory=dict)
    now: float = 1000.0
    tick: Callable[[FakeHosts], None] = lambda _: None
    done: list[str] = field(default_factory=list)
    runs: str = "[]"
    checkpoints: Answer = field(default_factory=lambda: Answer("[]"))
    begun: Answer = field(default_factory=lambda: Answer('{"begun": true, "made": true}'))
    sweep: dict[str, Any] | None = None
    exported: Answer = field(default_factory=Answer)
    report: Answer = field(default_factory=Answer)
    settings: str = "5e77 -"
    running: dict[str, str] = field(default_factory=dict)  # by task name: the directory that its process runs in
    asked: list[list[str]] = field(default_factory=list)
    listens: bool = True
    remembered: FakeHosts | None = None
    held: Answer = field(default_factory=lambda: Answer("held"))
    holds: list[str] = field(default_factory=list)
    cooled: list[str] = field(default_factory=list)  # tasks that were asked to end if they never went on
    digested: int = 0  # how often a host was asked for the digest of its configuration

    def __post_init__(self) -> None:
        for task in self.inventory.tasks:
            self.units.setdefault(task.name, Unit(task.unit))

    def set(self, name: str, **values: Any) -> None:
        self.units[name] = replace(self.units[name], **values)

    def run(
        self, scripts: Mapping[str, str], timeout: float = 30, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        if any("@units" in script for script in scripts.values()):
            self.asked.append(list(scripts))
            self.tick(self)
        return {
            host: Answer(unreachable=self.unreachable[host]) if host in self.unreachable else self._answer(host, script)
            for host, script in scripts.items()
        }

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        answers = self.run(scripts)
        for host, answer in answers.items():
            for text in answer.stdout.splitlines():
                line(host, text)
        return answers

    def hold(self, host: str, script: str) -> Answer:
        assert (host, "flock" in script) == ("head", True)
        self.holds.append("held")
        return self.held

    def is_holding(self) -> bool:
        return self.holds[-1:] == ["held"]

    def let_go(self) -> None:
        self.holds.append("let go")

    def close(self) -> None:
        pass

    def _answer(self, host: str, script: str) -> Answer:
        if "@units" in script:
            self.digested += "@settings" in script
            first = script.partition("@now")[0]
            if "stopped=" in first:  # and then disabled
                stopped, _, disabled = first.partition("stopped=")
                for text in (stopped, f"systemctl disable {disabled}"):
                    for task in self._named(text):
                        self._systemctl(text, task)
            elif "@first" in first:
                for text in re.split(r" && (?=root|printf)", first):
                    self._write(text)
            return Answer(self._observe(host, "@directories" in script, "@settings" in script))
        if "/opt/trainer/before" in script:
            return self._before(host, script)
        if "HISTORY=" in script:
            return Answer()
        if "flock --shared" in script:
            return Answer(self.held.stdout.removeprefix("taken by ") if self.held.stdout != "held" else "")
        if "-m trainer export" in script:
            self.done.append(script.rpartition(" -m ")[2])
            return self.exported
        if "-m trainer report" in script:
            return self.report
        if "-m trainer checkpoints" in script:
            return self.checkpoints
        if found := re.search("-m trainer begin .*(--run.*)", script):
            self.done.append(f"begin {found[1]}")
            return self.begun
        if found := re.search("rm -rf (/srv/trainer/runs/.*)", script):
            self.done.append(f"remove {found[1]}")
        elif self._write(script):
            pass
        elif "systemctl" in script:
            for task in self._named(script):
                self._systemctl(script, task)
        elif "journalctl" in script:
            return Answer("\n".join(self._journal(task) for task in self._named(script)))
        elif "-m trainer runs" in script:
            return Answer(self.runs)
        elif "-m trainer sweep" in script:
            return Answer(json.dumps(self.sweep)) if self.sweep else Answer("", "error: there is no sweep in x", 78)
        return Answer()

    def _write(self, script: str) -> bool:
        """Take in what is written to the shared path; returns whether anything is."""
        if "release.json" in script:
            self.done.append("tell " + re.findall(r'"release": "(\w+)"', script)[0])
        elif "rm -f /srv/trainer/selection.json" in script:
            self.selection = ""
            self.done.append("select nothing")
        elif "selection.json" in script:
            self.selection = re.findall(r"'(\{.*\})' \|", script)[0]
            self.done.append("select")
        else:
            return False
        return True

    def _before(self, host: str, script: str) -> Answer:
        """What the hosts keep and put back is one state here, which the first of them asked brings."""
        if host != next(name for name in self.inventory.hosts if name not in self.unreachable):
            return Answer()
        if "mv /opt" in script:
            self.remembered = replace(self, units=dict(self.units), done=[])
        elif self.remembered and "tar -xf" in script:
            self.done.append("put back")
            self.release, self.settings = self.remembered.release, self.remembered.settings
            for name, unit in self.remembered.units.items():
                self.set(name, active="inactive", sub="dead", file_state=unit.file_state)
        elif self.remembered:
            for name, unit in self.remembered.units.items():
                if unit.up:
                    self.done.append(f"start {name}")
                    self.set(name, **UP)
        return Answer()

    def _named(self, script: str) -> list[Task]:
        names = dict.fromkeys(re.findall(r"trainer@([a-z]+-\d+)\.service", script))
        return [self.inventory.task(name) for name in names]

    def _systemctl(self, script: str, task: Task) -> None:
        unit = self.units[task.name]
        if "cold=" in script and "kill" not in script:
            self.cooled.append(task.name)
        elif "systemctl start" in script:
            if unit.parked and "kill -USR1" in script:
                self.done.append(f"go on {task.name}")
                self.set(task.name, status_text="")
            elif not unit.up:
                self.done.append(f"start {task.name}")
                self.set(task.name, restarts=0, result="success", **UP)
            self.set(task.name, file_state="enabled")
        elif "kill -HUP" in script:
            self.done.append(f"park {task.name}")
            self.set(task.name, status_text="parked: waits")
        elif "systemctl stop" in script:
            self.done.append(f"stop {task.name}")
            self.set(task.name, active="inactive", sub="dead")
        elif "systemctl disable" in script:
            self.set(task.name, file_state="disabled")

    def _journal(self, task: Task) -> str:
        return json.dumps({"__REALTIME_TIMESTAMP": "1", "_SYSTEMD_UNIT": task.unit, "MESSAGE": f"{task.name} says"})

    def _observe(self, host: str, directories: bool, settings: bool) -> str:
        tasks = self.inventory.tasks_on(host)
        lines = ["@now", str(self.now), "@release"]
        lines += [f"/opt/trainer/releases/{self.release}"] if self.release else []
        lines += ["@environments", *(f"{task.name}.env" for task in tasks if self.environments)]
        lines += ["@settings", self.settings] if settings else []
        lines += ["@ports"]
        lines += [
            f"LISTEN 0 128 *:{task.port} *:*"
            for task in tasks
            if self.listens and self.units[task.name].active == "active"
        ]
        lines += ["@units"]
        for task in tasks:
            unit = self.units[task.name]
            lines += [
                f"Id={task.unit}",
                f"LoadState={unit.load}",
                f"ActiveState={unit.active}",
                f"SubState={unit.sub}",
                f"UnitFileState={unit.file_state}",
                f"Result={unit.result}",
                f"ExecMainStatus={unit.exit_status}",
                f"NRestarts={unit.restarts}",
                f"MainPID={unit.pid}",
                f"StatusText={unit.status_text}",
                f"StateChangeTimestamp={_timestamp(unit.since)}",
                "",
            ]
        if directories:
            lines += [
                "@directories",
                *(f"{self.units[task.name].pid} {self.running.get(task.name, '')}" for task in tasks),
            ]
        if host == self.inventory.chief.host:
            lines += ["@selection", self.selection, "@run", json.dumps(self.run_status) if self.run_status else ""]
        return "\n".join(lines)


def _timestamp(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


@dataclass
class Clock:
    now: float = 0.0
    hosts: FakeHosts | None = None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.hosts:
            self.hosts.now += seconds


def make_inventory(tasks: Sequence[Task] = TASKS, steps: int = 30, run: str = "digits") -> Inventory:
    strategy = "parameter_server" if tasks is TASKS else "multi_worker_mirrored"
    shared = {"cluster_shared_dir": "/srv/trainer", "trainer_run": {"run": run, "steps": steps, "strategy": strategy}}
    variables = {task.host: {"ansible_host": task.address, **shared} for task in tasks}
    hosts = {task.host: Host(task.host, task.address) for task in tasks}
    groups = {job: [task.host for task in TASKS if task.job == job] for job in ("chief", "ps", "worker", "evaluator")}
    return Inventory("inventory/pretended", groups, hosts, tasks, variables, "http://192.0.2.10:6006")


@pytest.fixture
def hosts() -> FakeHosts:
    return FakeHosts(make_inventory(), run_status=status("new", None))


@pytest.fixture
def console(hosts: FakeHosts) -> Console:
    clock = Clock(hosts=hosts)
    return Console(io.StringIO(), clock, clock.sleep, nothing, lambda *_: None, lambda _: hosts.release or "")


def nothing(_shipment: Shipment, _display: Display) -> ShipmentResult:
    """Ship what changes nothing."""
    return ShipmentResult({}, {})


def shipping(act: Callable[[], Mapping[str, Recap] | None]) -> Callable[[Shipment, Display], ShipmentResult]:
    """Make a shipment whose switch does something, and whose stage does nothing."""

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        return ShipmentResult((act() or {}) if shipment.playbooks == SWITCH else {}, {})

    return ship


def printed(console: Console) -> str:
    assert isinstance(console.out, io.StringIO)
    return console.out.getvalue()


def status(state: str, step: int | None, updated: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "run": "digits",
        "run_dir": "/srv/trainer/runs/digits",
        "program": "p:P",
        "state": state,
        "step": step,
        "steps": 30,
        "updated": updated,
        **more,
    }


def train(per_second: float = 5) -> Callable[[FakeHosts], None]:
    """A training that begins when the chief runs, and ends at step 30 with the chief and its evaluator down."""

    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].active != "active":
            return
        begun.setdefault("at", hosts.now)
        step = min(30, int((hosts.now - begun["at"]) * per_second))
        if step < 30:
            hosts.run_status = status("training", step, hosts.now)
            return
        evaluation = {"step": 30, "metrics": {"accuracy": 0.97}}
        export = "/srv/trainer/runs/digits/export"
        hosts.run_status = status("finished", 30, hosts.now, evaluation=evaluation, export=export)
        for task in hosts.inventory.tasks:
            if not task.server:
                hosts.set(task.name, active="inactive", sub="dead")

    begun: dict[str, float] = {}
    return tick


def test_how_far_a_start_is_stands_apart_from_what_came_of_it(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    console.progress_out = io.StringIO()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    shown = console.progress_out.getvalue()
    assert re.search(r"step \d+/30", shown)
    assert not re.search(r"step \d+/30", printed(console))
    assert "run digits finished" in printed(console)
    assert "finished" not in shown.replace("finished, waiting", "")


def test_start_cluster_trains_to_the_end_and_sums_up(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0", "worker-1")]
    assert all(unit.enabled for unit in hosts.units.values())
    text = printed(console)
    assert "release abc123: unchanged" in text
    assert "run digits finished" in text
    assert "accuracy 0.97 (step 30)" in text
    assert "head:/srv/trainer/runs/digits/checkpoints" in text
    assert "head:/srv/trainer/runs/digits/export" in text
    assert "http://192.0.2.10:6006" in text
    assert "fab logs --task chief-0" in text


def test_start_cluster_detached_leaves_after_the_first_step(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.units["chief-0"].active == "active"
    assert "run digits trains: step" in printed(console)


@pytest.mark.parametrize(("at", "seen"), [(1000.0, True), (999.0, False)])
def test_the_first_step_is_what_the_coordinator_tells_of_it(
    hosts: FakeHosts, console: Console, at: float, seen: bool
) -> None:
    """The number of the step, which status.json has each log_seconds only, is not waited for."""

    def tick(hosts: FakeHosts) -> None:
        hosts.run_status = status("training", 1, hosts.now, events=[{"event": "training", "time": at}])

    hosts.tick = tick
    with contextlib.nullcontext() if seen else pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, timeout=20))
    assert (hosts.now - 1000 < 20) == seen


def test_state_of_an_earlier_coordinator_is_no_first_step(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("training", 12, updated=990.0, steps_per_second=5.0)
    with pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(timeout=20))


def test_start_cluster_leaves_running_tasks_alone(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.done == []


def record(shipped: list[tuple[str, list[str]]], hosts: FakeHosts) -> Callable[[Shipment, Display], ShipmentResult]:
    """Note at each shipment what was done before it."""

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append((shipment.playbooks[-1], list(hosts.done)))
        return ShipmentResult({}, {})

    return ship


def test_new_run_restarts_coordinator_and_evaluator(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, **UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.selection = '{"run": "digits", "program": "p:P"}'
    shipped: list[tuple[str, list[str]]] = []
    console.ship = record(shipped, hosts)

    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    train_new = train()
    given = {"rate": 0.01, "layers": [64, "a b"]}
    start_cluster(
        Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits-2", detach=True, program_args=given)
    )
    stops = ["stop chief-0", "stop evaluator-0"]
    assert shipped == [("release.yml", []), ("training.yml", stops)]
    assert hosts.done == [*stops, "select", "start chief-0", "start evaluator-0"]
    assert json.loads(hosts.selection) == {"run": "digits-2", "program_args": given}
    assert '  select  run digits-2, with rate=0.01, layers=[64, "a b"]\n' in printed(console)


def test_new_run_begins_from_a_checkpoint_with_the_program_of_the_other(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30), {**status("stopped", 20), "run": "other", "program": "o:O"}])
    train_new = train()
    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    start_cluster(
        Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="other@20", detach=True)
    )
    assert hosts.done[:2] == ["begin --run new --from other@20 --program o:O", "select"]
    assert json.loads(hosts.selection) == {"run": "new", "program": "o:O"}


def test_new_run_begins_from_a_checkpoint_with_the_parameters_of_the_other(hosts: FakeHosts, console: Console) -> None:
    other = {**status("stopped", 20), "run": "other", "program": "o:O", "program_args": {"rate": 0.1, "name": "a b"}}
    hosts.runs = json.dumps([other])
    train_new = train()
    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    given = {"rate": 0.2}
    cluster = Cluster(hosts.inventory, hosts)
    start_cluster(cluster, console, StartRequest(run_name="new", source="other@20", detach=True, program_args=given))
    sets = "--set rate=0.2 --set 'name=\"a b\"'"
    assert hosts.done[:2] == [f"begin --run new --from other@20 --program o:O {sets}", "select"]
    assert json.loads(hosts.selection)["program_args"] == {"rate": 0.2, "name": "a b"}


def test_a_run_that_is_not_there_is_refused_before_anything_is_done(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    with pytest.raises(OperatorMistake, match="there is no run other; the runs are digits"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="other@20"))
    assert hosts.done == []


def test_a_checkpoint_that_is_not_there_puts_back_what_was(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    hosts.begun = Answer("", "error: --from digits@7: run digits has no checkpoint of step 7; it has 30", code=78)
    with pytest.raises(OperatorMistake, match="has no checkpoint of step 7; it has 30"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@7"))
    assert hosts.selection == ""
    assert "put back" in printed(console)


@pytest.mark.parametrize(
    ("answer", "removed"),
    [
        ({"begun": True, "made": True}, ["remove /srv/trainer/runs/new"]),
        ({"begun": False, "made": False}, []),  # by an earlier start, which may have trained it
        ({"begun": True, "made": False}, []),  # in a directory that has other files
    ],
)
def test_a_run_that_began_and_was_not_started_leaves_its_name_free(
    hosts: FakeHosts, console: Console, answer: dict[str, bool], removed: list[str]
) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    hosts.begun = Answer(json.dumps(answer))
    hosts.environments = False
    with pytest.raises(OperatorMistake, match="isn't set up for"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@30"))
    assert [each for each in hosts.done if each.startswith("remove")] == removed
    assert "put back: run digits" in printed(console)


def test_a_run_that_may_be_selected_still_is_not_removed(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ClusterTrouble("/srv/trainer/selection.json can't be written")

    hosts.runs = json.dumps([status("finished", 30)])
    monkeypatch.setattr(Cluster, "select", fail)
    monkeypatch.setattr("fleet.verbs.start.select_and_observe", fail)
    with pytest.raises(ClusterTrouble, match="can't be written"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@30"))
    assert [each for each in hosts.done if each.startswith("remove")] == []
    assert "run new is kept, since it may be selected still" in printed(console)


def test_a_run_that_began_is_kept_from_the_start_of_its_tasks_on(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    hosts.runs = json.dumps([status("finished", 30)])
    monkeypatch.setattr(Cluster, "start", leave)
    with pytest.raises(KeyboardInterrupt):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="new", source="digits@30"))
    assert "put back" in hosts.done
    assert not [each for each in hosts.done if each.startswith("remove")]


def test_new_run_of_the_inventory_stops_the_old_one_once_it_is_proven(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, **UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.inventory = make_inventory(run="digits-2")
    shipped: list[tuple[str, list[str]]] = []
    console.ship = record(shipped, hosts)
    hosts.tick = lambda hosts: train_new(hosts) if len(shipped) > 1 else None
    train_new = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert shipped == [("release.yml", []), ("training.yml", ["stop chief-0", "stop evaluator-0"])]


def test_run_that_was_selected_counts_more_than_the_inventorys(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.selection = '{"run": "digits"}'
    hosts.inventory = make_inventory(run="digits-2")
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert hosts.done == []


def test_finished_run_is_not_started_again(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == []
    assert "start a new one with: fab start-cluster --run NAME" in printed(console)


def test_a_finished_run_that_began_elsewhere_is_not_called_begun_from_there(hosts: FakeHosts, console: Console) -> None:
    finished = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.runs = json.dumps([{**finished, "run": "other"}, {**finished, "begun_from": "other@10"}])
    hosts.run_status = {**finished, "begun_from": "other@10"}
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits", source="other@10"))
    assert "It was finished before" in printed(console)
    with pytest.raises(OperatorMistake, match=r"run digits exists already and did not begin from other@20"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits", source="other@20"))


def test_finished_run_is_started_when_the_inventory_wants_more_steps(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 20, evaluation={"step": 20, "metrics": {}})
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "start chief-0" in hosts.done
    assert "trained      30 steps" in printed(console)


def test_finished_run_without_its_last_evaluation_is_started(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30, evaluation={"step": 20, "metrics": {}})
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "start evaluator-0" in hosts.done
    assert "run digits finished" in printed(console)


def test_trainer_that_leaves_out_the_inventorys_further_steps_is_trouble(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(steps=40)
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.tick = lambda hosts: hosts.set("chief-0", active="inactive", sub="dead")
    with pytest.raises(ClusterTrouble, match="finds run digits finished at step 30, but the inventory wants 40 steps"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" not in printed(console)


def test_trainer_that_finds_a_run_finished_ends_the_watching(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30, evaluation={"step": 20, "metrics": {}})

    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].up:
            hosts.set("chief-0", active="inactive", sub="dead")
            hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_start_cluster_names_the_task_that_failed_with_its_journal(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        if hosts.units["worker-1"].active == "active":
            hosts.set("worker-1", active="failed", sub="failed", result="exit-code", exit_status=78)

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="worker-1 on far: exited with code 78") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 1
    assert caught.value.troubles[0].journal == ["worker-1 says"]
    assert "| worker-1 says" in str(caught.value)


def test_start_cluster_tells_what_the_failed_run_says(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].active == "active":
            hosts.run_status = status("failed", None, hosts.now, message="no module named digitz")

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="chief-0 on head: no module named digitz"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_start_cluster_shows_the_journals_of_the_tasks_that_a_failed_run_names(
    hosts: FakeHosts, console: Console
) -> None:
    killed = "the same call of 4 steps, after step 12, ended the processes of worker-1, worker-10"

    def tick(hosts: FakeHosts) -> None:
        if hosts.units["chief-0"].active == "active":
            hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
            hosts.run_status = status("failed", 12, hosts.now, message=killed)

    hosts.tick = tick
    with pytest.raises(ClusterTrouble) as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    chief, worker = caught.value.troubles
    assert chief.what.endswith(killed)
    assert (worker.task, worker.what, worker.journal) == ("worker-1", "is named by the failed run", ["worker-1 says"])


def test_task_that_keeps_restarting_before_the_first_step_is_trouble(hosts: FakeHosts, console: Console) -> None:
    def tick(hosts: FakeHosts) -> None:
        unit = hosts.units["ps-0"]
        if unit.up:
            restarts = unit.restarts + 1
            hosts.set(
                "ps-0", active="activating", sub="auto-restart", restarts=restarts, result="exit-code", exit_status=75
            )

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match=r"ps-0 on store: was restarted \d+ times.*exited with code 75"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_restarts_between_steps_are_recovery(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.units["worker-1"].up:
            hosts.set("worker-1", restarts=hosts.units["worker-1"].restarts + 1)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.units["worker-1"].restarts > 3


def test_restarts_of_a_coordinator_between_steps_are_recovery(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.5)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.units["chief-0"].up:
            hosts.set("chief-0", restarts=int(hosts.now) // 2)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_all_hosts_are_asked_seldom_once_a_step_is_trained(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if len(hosts.asked[-1]) > 1:
            console.sleep(2)  # so long does it take to ask them all

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    step = next(number for number, asked in enumerate(hosts.asked) if asked == ["head"])
    later = [len(asked) for asked in hosts.asked[step + 20 :]]
    assert later.count(3) == pytest.approx(300 / 42, abs=2)
    assert set(later) == {1, 3}


def test_start_cluster_ends_when_another_operator_stops_the_chief(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if (hosts.run_status or {}).get("step") == 15:
            hosts.set("chief-0", active="inactive", sub="dead")

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="chief-0 on head was stopped at step 15"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_missing_evaluation_of_the_last_step_is_trouble_after_the_summary(hosts: FakeHosts, console: Console) -> None:
    steps = train()

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.run_status and hosts.run_status["state"] == "finished":
            hosts.run_status = {**hosts.run_status, "evaluation": None}

    hosts.tick = tick
    with pytest.raises(ClusterTrouble, match="the last step isn't evaluated"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_start_cluster_touches_nothing_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    hosts.unreachable = {"far": "no answer from 192.0.2.30:22 in 10 s"}
    with pytest.raises(HostsUnreachable, match="far is unreachable") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 4
    assert hosts.done == []
    assert "inactive (dead)" in printed(console)


@pytest.mark.parametrize("how", ["flag", "minimum", "answer"])
def test_a_cluster_starts_without_a_host_that_is_away(hosts: FakeHosts, console: Console, how: str) -> None:
    hosts.unreachable = {"far": "no answer"}
    hosts.tick = train()
    asked: list[str] = []
    console.ask = lambda question: bool(asked.append(question)) or how == "answer"
    if how == "minimum":
        for variables in hosts.inventory.variables.values():
            variables["cluster_minimum"] = {"worker": 0.5}  # type: ignore[index]
    shipped: list[Sequence[str]] = []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append(shipment.without)
        return ShipmentResult({}, {})

    console.ship = ship
    cluster = Cluster(hosts.inventory, hosts)
    start_cluster(cluster, console, StartRequest(detach=True, allow_missing=how == "flag"))
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0")]
    assert shipped == [["far"], ["far"]]
    assert "  without worker-1 on far: no answer\n" in printed(console)
    questions = ["far can't be reached. Start without worker-1? [y/N] "]
    assert asked == (questions if how == "answer" else [])


@pytest.mark.parametrize("dies_in", ["release.yml", "training.yml"])
def test_a_host_that_dies_while_it_is_shipped_to_costs_itself(hosts: FakeHosts, console: Console, dies_in: str) -> None:
    hosts.tick = train()
    shipped: list[tuple[str, Sequence[str]]] = []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append((shipment.playbooks[-1], shipment.without))
        if shipment.playbooks[-1] == dies_in and not shipment.without:
            hosts.unreachable = {"far": "no answer"}
            raise HostsUnreachable({"far": "Ansible could not reach it"}, "its output")
        return ShipmentResult({}, {})

    console.ship = ship
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, allow_missing=True))
    assert hosts.done == [f"start {name}" for name in ("chief-0", "evaluator-0", "ps-0", "worker-0")]
    assert (dies_in, ["far"]) in shipped
    assert "going on without far\n" in printed(console)


@pytest.mark.parametrize("given", [None, {"worker": "all"}])
def test_a_cluster_does_not_start_below_its_minimum(
    hosts: FakeHosts, console: Console, given: dict[str, Any] | None
) -> None:
    hosts.unreachable = {"far" if given else "store": "no answer"}
    for variables in hosts.inventory.variables.values():
        variables["cluster_minimum"] = given  # type: ignore[index]
    console.ask = lambda _: pytest.fail("asked for what can't be")
    with pytest.raises(HostsUnreachable, match="can be started, and at least"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(allow_missing=True))
    assert hosts.done == []


def test_a_host_that_answers_slowly_is_left_alone_for_as_long(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=0.1)
    asked: list[tuple[float, float]] = []

    def tick(hosts: FakeHosts) -> None:
        began = hosts.now
        console.sleep(7.0)
        asked.append((began, hosts.now))
        steps(hosts)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(asked)]
    assert all(gap == 0 or gap >= 7 for gap in gaps)  # a look may ask more than once
    assert sum(gap >= 7 for gap in gaps) > 10


def test_chief_that_falls_silent_ends_the_watching(hosts: FakeHosts, console: Console) -> None:
    steps = train(per_second=1)

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if (hosts.run_status or {}).get("step") == 10:
            hosts.unreachable = {"head": "the connection was lost"}

    hosts.tick = tick
    with pytest.raises(HostsUnreachable, match="head is unreachable"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_start_cluster_asks_for_site_yml_when_nothing_is_installed(hosts: FakeHosts, console: Console) -> None:
    hosts.release = None
    with pytest.raises(OperatorMistake, match=r"Run `ansible-playbook site\.yml` first") as caught:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert caught.value.code == 2


def test_task_that_has_no_environment_after_shipping_is_not_started(hosts: FakeHosts, console: Console) -> None:
    hosts.environments = False
    with pytest.raises(OperatorMistake, match="head isn't set up for chief-0"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == ["put back", "tell abc123"]


def test_task_of_a_new_strategy_gets_its_environment_by_shipping(hosts: FakeHosts, console: Console) -> None:
    hosts.environments = False
    hosts.tick = train()

    def ship() -> None:
        hosts.environments, hosts.settings = True, "6a88 -"

    console.ship = shipping(ship)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_start_cluster_asks_for_site_yml_when_a_host_has_no_unit(hosts: FakeHosts, console: Console) -> None:
    hosts.set("worker-1", load="not-found")
    with pytest.raises(OperatorMistake, match=r"far isn't set up: there is no trainer@\.service"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())


def test_start_cluster_says_which_groups_stand_idle(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert "group ps (store) is unused: the strategy multi_worker_mirrored has no ps\n" in printed(console)


def test_settings_are_digested_around_the_shipping_alone(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.digested == 2 * len(hosts.inventory.hosts)


def test_start_cluster_says_how_many_hosts_got_new_code(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = train()

    def ship() -> dict[str, Recap]:
        hosts.release = "def456"
        return {"localhost": Recap(1, 0, 0), "head": Recap(2, 0, 0)}

    console.ship = shipping(ship)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert "release def456: shipped to 3 of 3 hosts (code)\n" in printed(console)


@pytest.mark.parametrize(
    ("release", "settings", "shipped"),
    [
        ("abc123", "6a88 -", "shipped to 3 of 3 hosts (settings)"),
        ("def456", "6a88 -", "shipped to 3 of 3 hosts (code and settings)"),
        ("abc123", "5e77 -", "shipped to 1 of 3 hosts"),
    ],
)
def test_start_cluster_says_what_was_shipped(
    hosts: FakeHosts, console: Console, release: str, settings: str, shipped: str
) -> None:
    hosts.tick = train()

    def ship() -> dict[str, Recap]:
        hosts.release, hosts.settings = release, settings
        return {"head": Recap(2, 0, 0)}

    console.ship = shipping(ship)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True))
    assert f"release {release}: {shipped}\n" in printed(console)


def test_restart_cluster_stops_everything_but_keeps_it_enabled(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(detach=True, restart=True))
    assert hosts.done[:5] == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0", "stop worker-1"]
    assert len(hosts.done) == 10
    assert all(unit.enabled for unit in hosts.units.values())


def test_stop_cluster_stops_the_coordinator_first_and_is_idempotent(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.run_status = status("stopped", 17)
    cluster = Cluster(hosts.inventory, hosts)
    stop_cluster(cluster, console)
    stop_cluster(cluster, console)
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0", "stop worker-1"]
    assert not any(unit.enabled for unit in hosts.units.values())
    assert "run digits: stopped, step 17/30" in printed(console)


def test_a_task_that_cannot_be_stopped_is_named_and_the_others_stop(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in hosts.units:
        hosts.set(name, **UP)
    run = hosts.run

    def fail(scripts: Mapping[str, str], *more: Any) -> dict[str, Answer]:
        output = "@first\nFailed to stop trainer@ps-0.service: Access denied\n\n@first-code\n1\n"
        bad = {host for host, script in scripts.items() if host == "store" and "@first" in script}
        return {
            host: replace(answer, stdout=output + answer.stdout) if host in bad else answer
            for host, answer in run(scripts, *more).items()
        }

    monkeypatch.setattr(hosts, "run", fail)
    with pytest.raises(ClusterTrouble, match="store: systemctl failed: Failed to stop"):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert "stop worker-1" in hosts.done


def test_a_stop_takes_few_scripts_a_host(hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look; the coordinator; then all others, with what is seen afterwards. The history gets two lines."""
    for name in hosts.units:
        hosts.set(name, **UP)
    hosts.run_status = status("stopped", 17)
    asked: list[str] = []
    run = hosts.run
    monkeypatch.setattr(hosts, "run", lambda scripts, *more: (asked.extend(scripts), run(scripts, *more))[1])
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert (asked.count("far"), asked.count("head")) == (2, 5)


def test_members_that_train_in_step_are_told_to_stop_at_once(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    for task in IN_STEP:
        hosts.set(task.name, file_state="enabled", **UP)
    hosts.run_status = status("stopped", 17)
    stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert "stopping chief-0, worker-0, worker-1 (a checkpoint is saved first)\nstopping evaluator-0\n" in printed(
        console
    )
    assert sorted(hosts.done) == ["stop chief-0", "stop evaluator-0", "stop worker-0", "stop worker-1"]
    assert hosts.done[-1] == "stop evaluator-0"


def test_stop_cluster_stops_the_others_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, **UP)
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable):
        stop_cluster(Cluster(hosts.inventory, hosts), console)
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "stop ps-0", "stop worker-0"]


def test_status_of_a_running_cluster_is_fine(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.run_status = status("training", 12, 999.0, steps_per_second=5.0)
    show_status(Cluster(hosts.inventory, hosts), console)
    text = printed(console)
    assert "release abc123 on 3 hosts" in text
    assert "run digits: training, step 12/30  5 steps/s" in text


@pytest.mark.parametrize("state", ["new", "stopped"])
def test_status_of_a_stopped_cluster_is_fine(hosts: FakeHosts, console: Console, state: str) -> None:
    hosts.run_status = status(state, None)
    show_status(Cluster(hosts.inventory, hosts), console)


def test_status_of_a_finished_run_is_fine_with_its_coordinator_down(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled")
    hosts.run_status = status("finished", 30)
    show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"chief-0 +head +finished", printed(console))


def test_status_of_workers_that_ended_with_their_run_is_finished(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    for task in IN_STEP:
        hosts.set(task.name, file_state="enabled")
    hosts.run_status = status("finished", 30)
    show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"worker-1 +far +finished", printed(console))


def test_status_of_servers_that_ended_with_their_run_is_finished(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled")
    hosts.run_status = status("finished", 30)
    show_status(Cluster(hosts.inventory, hosts), console)
    for name, host in (("ps-0", "store"), ("worker-0", "store"), ("worker-1", "far")):
        assert re.search(rf"{name} +{host} +finished", printed(console))


def test_status_of_a_server_that_ended_before_its_run_is_trouble(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.set("ps-0", active="inactive", sub="dead")
    hosts.run_status = status("waiting", 12)
    with pytest.raises(ClusterTrouble, match="ps-0 on store"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_servers_of_a_finished_run_are_started_for_the_next_one(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled")
    hosts.run_status = status("finished", 30, evaluation={"step": 30, "metrics": {}})
    hosts.selection = '{"run": "digits"}'
    hosts.tick = lambda hosts: train_new(hosts) if "select" in hosts.done else None
    train_new = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run_name="digits-2", detach=True))
    tasks = ("chief-0", "evaluator-0", "ps-0", "worker-0", "worker-1")
    assert hosts.done == ["select", *(f"start {name}" for name in tasks)]


def test_servers_that_end_with_the_run_are_no_trouble_to_who_watches(hosts: FakeHosts, console: Console) -> None:
    steps = train()

    def tick(hosts: FakeHosts) -> None:
        steps(hosts)
        if hosts.run_status and hosts.run_status["state"] == "finished":
            for name in hosts.units:
                hosts.set(name, active="inactive", sub="dead")

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert "run digits finished" in printed(console)


def test_status_tells_the_users_error_with_its_line(hosts: FakeHosts, console: Console) -> None:
    hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
    hosts.run_status = status("failed", 12, message="/srv/program/mine.py:12: ValueError: no such column")
    with pytest.raises(ClusterTrouble, match="chief-0 on head"):
        show_status(Cluster(hosts.inventory, hosts), console)
    message = "run digits: failed, step 12/30\n  /srv/program/mine.py:12: ValueError: no such column\n"
    assert message in printed(console)


def test_status_tells_where_the_time_went_and_what_happened_last(hosts: FakeHosts, console: Console) -> None:
    ledger = {"productive": 90.0, "down": 10.0, "elapsed": 100.0, "goodput": 0.9}
    events = [{"time": 0, "event": "ps-lost", "task": "ps-0", "host": "store"}, {"time": 3, "event": "recovered"}]
    hosts.run_status = status("stopped", 12, ledger=ledger, events=events)
    show_status(Cluster(hosts.inventory, hosts), console)
    lines = printed(console).splitlines()
    at = lines.index("goodput 90.0 % of 100.0 s: productive 90.0 s, down 10.0 s")
    assert lines[at + 1] == "last events"
    assert lines[at + 2].endswith("ps-lost  ps-0 on store")
    assert lines[at + 3].endswith("recovered")
    hosts.run_status = status("new", None)
    show_status(Cluster(hosts.inventory, hosts), console)
    assert printed(console).splitlines()[-1] == "run digits: new"


def test_status_of_a_worker_that_failed_in_a_finished_run_is_trouble(hosts: FakeHosts, console: Console) -> None:
    hosts.inventory = make_inventory(IN_STEP)
    for task in IN_STEP:
        hosts.set(task.name, file_state="enabled")
    hosts.set("worker-1", active="failed", sub="failed", result="exit-code", exit_status=78)
    hosts.run_status = status("finished", 30)
    with pytest.raises(ClusterTrouble, match="worker-1 on far"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_status_names_the_server_that_has_no_port_and_no_member_that_trains(hosts: FakeHosts, console: Console) -> None:
    hosts.listens = False
    hosts.run_status = status("waiting", None)
    for tasks, message in ((TASKS, "ps-0 on store, worker-0 on store, worker-1 on far"), (IN_STEP, None)):
        hosts.inventory = make_inventory(tasks)
        for task in tasks:
            hosts.set(task.name, file_state="enabled", since=hosts.now - 60, **UP)
        cluster = Cluster(hosts.inventory, hosts)
        if message:
            with pytest.raises(ClusterTrouble, match=message):
                show_status(cluster, console)
        else:
            show_status(cluster, console)


def test_status_names_the_task_that_should_run(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.set("worker-0", active="inactive", sub="dead")
    hosts.run_status = status("training", 12)
    with pytest.raises(ClusterTrouble, match=r"worker-0 on store \(look: fab logs --task worker-0\)"):
        show_status(Cluster(hosts.inventory, hosts), console)


def test_status_names_the_release_of_a_process_that_is_not_current(hosts: FakeHosts, console: Console) -> None:
    for number, name in enumerate(hosts.units):
        hosts.set(name, file_state="enabled", pid=100 + number, **UP)
    hosts.running = {
        "chief-0": "/opt/trainer/releases/abc123",
        "ps-0": "/opt/trainer/releases/0ld (deleted)",
        "worker-0": "/",
    }
    hosts.run_status = status("training", 12)
    show_status(Cluster(hosts.inventory, hosts), console)
    noted = [line for line in printed(console).splitlines() if "runs release" in line]
    assert len(noted) == 1
    assert re.match(r"ps-0 .* runs release 0ld, current is abc123$", noted[0])


def test_status_shows_a_failed_task_with_systemds_words(hosts: FakeHosts, console: Console) -> None:
    hosts.set("ps-0", active="failed", sub="failed", result="exit-code", exit_status=78)
    with pytest.raises(ClusterTrouble, match="ps-0 on store"):
        show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"ps-0 +store +failed \(exit-code 78\)", printed(console))


def test_status_shows_the_others_when_a_host_is_unreachable(hosts: FakeHosts, console: Console) -> None:
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable):
        show_status(Cluster(hosts.inventory, hosts), console)
    assert re.search(r"worker-1 +far +unreachable", printed(console))
    assert re.search(r"ps-0 +store +inactive", printed(console))


def test_status_as_json_has_every_task_and_the_run(hosts: FakeHosts, console: Console) -> None:
    hosts.run_status = status("finished", 30)
    console.json_out = console.out
    show_status(Cluster(hosts.inventory, hosts), console)
    shown = json.loads(printed(console))
    assert [row["task"] for row in shown["tasks"]] == [task.name for task in TASKS]
    assert shown["run"]["state"] == "finished"


def test_logs_of_all_tasks_name_the_task_of_each_line(hosts: FakeHosts, console: Console) -> None:
    show_logs(Cluster(hosts.inventory, hosts), console, None, 5, follow=False)
    assert re.search(r"^ps-0        \| ([\d-]+ )?\d\d:\d\d:\d\d ps-0 says$", printed(console), re.MULTILINE)
    assert len(printed(console).splitlines()) == len(TASKS)


def test_logs_that_nobody_reads_any_more_are_followed_no_longer(hosts: FakeHosts) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        with pytest.raises(KeyboardInterrupt):
            show_logs(Cluster(hosts.inventory, hosts), Console(stream), "worker-1", 5, follow=True)


@pytest.mark.parametrize("follow", [False, True])
def test_logs_of_one_task_are_its_lines(hosts: FakeHosts, console: Console, follow: bool) -> None:
    show_logs(Cluster(hosts.inventory, hosts), console, "worker-1", 5, follow)
    assert re.fullmatch(r"([\d-]+ )?\d\d:\d\d:\d\d worker-1 says\n", printed(console))


@contextmanager
def led(hosts: FakeHosts, seconds: int, *asked: Any) -> Iterator[Callable[[], bool]]:
    """A tunnel that lasts for so many looks."""
    hosts.done.append(f"tunnel {asked}")
    looks = iter([True] * seconds)
    yield lambda: next(looks, False)


def test_tensorboard_is_led_to_through_the_chiefs_host(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "tunnel", partial(led, hosts, 3), raising=False)
    with pytest.raises(HostsUnreachable, match="the connection was lost"):
        open_tensorboard(Cluster(board_at(hosts, "http://fd00::7:6006"), hosts), console, 7000)
    assert printed(console) == "TensorBoard is at http://localhost:7000 until Ctrl-C\n"
    assert hosts.done == [f"tunnel {(hosts.inventory.chief.host, 7000, 'fd00::7', 6006)}"]


def test_no_tensorboard_is_the_operators_mistake(hosts: FakeHosts, console: Console) -> None:
    with pytest.raises(OperatorMistake, match="group tensorboard is empty"):
        open_tensorboard(Cluster(board_at(hosts, None), hosts), console, 6006)


def board_at(hosts: FakeHosts, url: str | None) -> Inventory:
    return replace(hosts.inventory, tensorboard_url=url)


def test_runs_are_listed(hosts: FakeHosts, console: Console) -> None:
    hosts.runs = json.dumps([status("finished", 30)])
    show_runs(Cluster(hosts.inventory, hosts), console)
    assert "digits" in printed(console)


def test_checkpoints_are_listed(hosts: FakeHosts, console: Console) -> None:
    cluster = Cluster(hosts.inventory, hosts)
    show_checkpoints(cluster, console)
    assert printed(console) == "no checkpoint yet\n"
    saved = {"step": 20, "created": 1.0, "size": 2**20, "loss": 0.5, "evaluation": {"accuracy": 0.75}, "kept": ["best"]}
    hosts.checkpoints = Answer(json.dumps([saved, {**saved, "loss": None, "evaluation": None}]))
    show_checkpoints(cluster, console, "digits")
    assert re.search(r"20 .* 1\.0 +0\.5 +accuracy 0\.75 +best", printed(console))


def test_checkpoints_of_a_run_that_is_not_there_are_the_operators_mistake(hosts: FakeHosts, console: Console) -> None:
    hosts.checkpoints = Answer("", "error: there is no run x", code=78)
    with pytest.raises(OperatorMistake, match=r"^there is no run x$"):
        show_checkpoints(Cluster(hosts.inventory, hosts), console, "x")


def test_a_run_is_exported_on_the_chiefs_host(hosts: FakeHosts, console: Console) -> None:
    hosts.exported = Answer(json.dumps({"run": "old", "step": 30, "export": "/srv/trainer/runs/old/export"}))
    export_run(Cluster(hosts.inventory, hosts), console, "old")
    assert printed(console) == "exported step 30 of old to head:/srv/trainer/runs/old/export\n"
    assert hosts.done == ["trainer export --json --settings /etc/trainer/run.json --run old"]


def test_why_a_run_is_not_exported_is_said(hosts: FakeHosts, console: Console) -> None:
    hosts.exported = Answer("", "error: run old is training", code=78)
    with pytest.raises(OperatorMistake, match=r"^run old is training$"):
        export_run(Cluster(hosts.inventory, hosts), console, "old")
    with pytest.raises(OperatorMistake, match="--run"):
        export_run(Cluster(hosts.inventory, hosts), console, "a b")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", ".hidden", "a" * 150])
def test_name_that_can_be_no_directory_is_refused(name: str) -> None:
    with pytest.raises(OperatorMistake, match="--run"):
        choose(name, None, {}, None)


@pytest.mark.parametrize("program", ["digits", "digits.py", "a b:C", "a:B:C", ":C"])
def test_program_that_names_no_object_is_refused(program: str) -> None:
    with pytest.raises(OperatorMistake, match="--program"):
        choose(None, program, {}, None)


def test_program_inside_a_class_is_taken() -> None:
    assert choose(None, "m:Outer.Inner", {}, None).selection == {"program": "m:Outer.Inner"}


def test_choice_of_a_run_drops_the_program_that_was_chosen_for_another() -> None:
    choice = choose("b", None, {"run": "a", "program": "p:P"}, Run("a", program="p:P"))
    assert (choice.selection, choice.write, choice.new) == ({"run": "b"}, True, True)


def test_choice_of_a_program_keeps_the_run() -> None:
    present = Run("a", program="p:P")
    choice = choose(None, "q:Q", {"run": "a"}, present)
    assert (choice.selection, choice.write, choice.new) == ({"run": "a", "program": "q:Q"}, True, True)


def test_parameters_go_to_the_run_that_is_named_and_add_up_where_none_is() -> None:
    present = Run("a", program="p:P", program_args={"rate": 0.1, "units": 8})
    before = {"run": "a", "program_args": {"rate": 0.1}}
    choice = choose("b", None, before, present, program_args={"units": 9})
    assert (choice.selection, choice.new) == ({"run": "b", "program_args": {"units": 9}}, True)
    choice = choose("b", None, before, present)
    assert choice.selection == {"run": "b"}
    choice = choose(None, None, before, present, program_args={"units": 8})
    assert choice.selection == {"run": "a", "program_args": {"rate": 0.1, "units": 8}}
    assert not choice.new
    # Which the proof refuses: it must come to that, also where the run is finished.
    assert choose(None, None, before, present, program_args={"units": 9}).new


def test_choice_of_what_runs_already_is_no_new_run() -> None:
    choice = choose("a", None, {}, Run("a", program="p:P"))
    assert (choice.selection, choice.write, choice.new) == ({"run": "a"}, True, False)
    choice = choose(None, None, {"run": "a"}, Run("a"))
    assert (choice.write, choice.new) == (False, False)


@pytest.mark.parametrize(
    ("up", "new", "stopped"),
    [
        ([], False, []),
        ([], True, []),
        (["chief-0", "ps-0", "worker-0", "evaluator-0"], False, []),
        (["chief-0", "ps-0", "worker-0", "evaluator-0"], True, ["chief-0", "evaluator-0"]),
        (["ps-0", "worker-0", "evaluator-0"], False, []),
    ],
)
def test_servers_serve_one_coordinator_after_the_other(up: list[str], new: bool, stopped: list[str]) -> None:
    inventory = make_inventory()
    units = {task.name: Unit(task.unit, **(UP if task.name in up else {})) for task in TASKS}
    assert [task.name for task in pick_restarts(inventory, units, new)] == stopped


@pytest.mark.parametrize(
    ("up", "new", "stopped"),
    [
        (["chief-0", "worker-0", "worker-1"], True, ["chief-0", "worker-0", "worker-1"]),
        (["worker-0", "worker-1", "evaluator-0"], True, ["worker-0", "worker-1", "evaluator-0"]),
        (["worker-0", "worker-1"], False, []),
    ],
)
def test_members_that_train_in_step_read_one_run_only(up: list[str], new: bool, stopped: list[str]) -> None:
    inventory = make_inventory(IN_STEP)
    units = {task.name: Unit(task.unit, **(UP if task.name in up else {})) for task in IN_STEP}
    assert [task.name for task in pick_restarts(inventory, units, new)] == stopped


def run_up(hosts: FakeHosts) -> None:
    """Have a run trained, selected by the operator."""
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.selection = '{"run": "digits", "program": "p:P"}'


@pytest.mark.parametrize(
    "error", [OperatorMistake("no such program"), ClusterTrouble("no wheels"), KeyboardInterrupt()]
)
def test_what_fails_before_the_switch_changes_nothing(hosts: FakeHosts, console: Console, error: BaseException) -> None:
    run_up(hosts)
    before = (dict(hosts.units), hosts.selection, hosts.release)
    shipped: list[str] = []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append(shipment.playbooks[-1])
        assert shipment.selection == {"run": "digits-2", "program": "p:Misspelt"}
        raise error

    console.ship = ship
    with pytest.raises(type(error)):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Misspelt", restart=True))
    assert (dict(hosts.units), hosts.selection, hosts.release) == before
    assert (hosts.done, shipped) == ([], ["release.yml"])
    assert "nothing was stopped, switched or selected: what ran goes on\n" in printed(console)


def test_two_starts_are_not_made_at_once(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    hosts.held = Answer("taken by a start of ann@laptop since 10:41:07 UTC")
    with pytest.raises(OperatorMistake, match="this cluster is taken by a start of ann@laptop since 10"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert (hosts.done, hosts.asked) == ([], [])
    console.ship = shipping(lambda: None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", plan_only=True))
    assert hosts.holds == ["held"]  # a plan harms nobody
    assert "this cluster is taken by a start of ann@laptop since 10:41:07 UTC. Until that is over" in printed(console)
    hosts.held = Answer("held")
    calm = Console(io.StringIO(), console.clock, console.sleep, console.ship, console.check_program, console.build)
    start_cluster(Cluster(hosts.inventory, hosts), calm, StartRequest("digits-2", plan_only=True))
    assert "this cluster is taken" not in printed(calm)


def test_a_start_that_keeps_no_other_away_any_more_stops_before_the_switch(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    units, selection, shipped = dict(hosts.units), hosts.selection, []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append(shipment.playbooks[-1])
        hosts.holds.append("lost")
        return ShipmentResult({}, {})

    console.ship = ship
    with pytest.raises(ClusterTrouble, match="the connection to head that kept other starts away is lost"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", restart=True))
    assert (hosts.done, dict(hosts.units), hosts.selection, shipped) == ([], units, selection, ["release.yml"])
    assert hosts.remembered is None  # another start may have noted there what it is to put back
    assert "nothing was stopped, switched or selected: what ran goes on\n" in printed(console)


def test_a_script_that_writes_and_then_looks_has_time_for_a_path_that_hangs_twice(
    hosts: FakeHosts, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the host would count as lost, and nobody would learn that the path hangs."""
    given, run = [], hosts.run

    def patient(scripts: Mapping[str, str], timeout: float = 30, data: Any = None) -> dict[str, Answer]:
        given.extend(timeout for script in scripts.values() if "@first" in script)
        return run(scripts, timeout, data)

    monkeypatch.setattr(hosts, "run", patient)
    hosts.tick = train()
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", detach=True))
    assert len(given) >= 2  # what is chosen, and the end of the line in the history; between them waits for news
    assert min(given) > 2 * PATH_SECONDS


def test_who_only_looks_on_keeps_no_other_start_away(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    seen: list[str] = []

    def tick(hosts: FakeHosts) -> None:
        hosts.run_status = status("training", len(hosts.asked), 999.0 + hosts.now)
        seen[:] = hosts.holds
        if len(hosts.asked) > 12:
            raise KeyboardInterrupt

    hosts.tick = tick
    with pytest.raises(KeyboardInterrupt, match="what was started goes on"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert seen == ["held", "let go"]


@pytest.mark.parametrize(("started", "message"), [(False, ""), (True, LEFT)])
def test_who_leaves_is_told_what_goes_on(hosts: FakeHosts, console: Console, started: bool, message: str) -> None:
    def leave(_: object) -> None:
        raise KeyboardInterrupt

    if started:
        console.sleep = leave
    else:
        console.ship = shipping(lambda: leave(None))
    with pytest.raises(KeyboardInterrupt) as left:
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert str(left.value) == message


@pytest.fixture
def heeds_ctrl_c() -> Iterator[object]:
    """Ctrl-C as Python has it: in the background it is not heeded."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_does_not_break_off_what_is_put_back(hosts: FakeHosts, console: Console, heeds_ctrl_c: object) -> None:
    run_up(hosts)
    hosts.tick = lambda _: signal.raise_signal(signal.SIGINT) if "stop" in str(hosts.done) else None
    console.ship = shipping(lambda: (_ for _ in ()).throw(ClusterTrouble("no room on ps-0")))
    with pytest.raises((ClusterTrouble, KeyboardInterrupt)):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Wrong"))
    assert "put back: run digits, release abc123" in printed(console)
    assert signal.getsignal(signal.SIGINT) is heeds_ctrl_c


@pytest.mark.parametrize(("step", "run", "untried"), [(12, None, False), (0, None, True), (12, "digits-2", True)])
def test_the_model_is_built_where_no_run_has_trained_with_the_choice(
    hosts: FakeHosts, console: Console, step: int, run: str | None, untried: bool
) -> None:
    run_up(hosts)
    hosts.run_status = status("training", step, 999.0)
    shipped: list[bool] = []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append(shipment.untried)
        raise ClusterTrouble("enough is known")

    console.ship = ship
    with pytest.raises(ClusterTrouble, match="enough is known"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(run))
    assert shipped == [untried]


@pytest.mark.parametrize("when", ["switch", "interrupt", "first step"])
def test_what_fails_after_the_switch_is_put_back(hosts: FakeHosts, console: Console, when: str) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"

    def switch() -> None:
        hosts.release, hosts.settings = "def456", "6a88 -"
        if when == "switch":
            raise ClusterTrouble("no room on ps-0")
        if when == "interrupt":
            raise KeyboardInterrupt

    def tick(hosts: FakeHosts) -> None:
        if "select" in hosts.done and "put back" not in hosts.done and hosts.units["chief-0"].up:
            hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)

    hosts.tick = tick
    console.ship = shipping(switch)
    with pytest.raises(KeyboardInterrupt if when == "interrupt" else ClusterTrouble):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", "p:Wrong"))
    assert (hosts.release, hosts.settings) == ("abc123", "5e77 -")
    assert json.loads(hosts.selection) == {"run": "digits", "program": "p:P"}
    assert all(unit.up for unit in hosts.units.values())
    after = hosts.done[hosts.done.index("put back") :]
    assert after[:3] == ["put back", "select", "tell abc123"]
    assert "put back: run digits, release abc123; started again: chief-0, ps-0" in printed(console)


def test_where_the_chiefs_host_dies_in_the_switch_the_others_are_put_back(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"

    def switch() -> None:
        hosts.release, hosts.selection = "def456", '{"run": "digits-2", "program": "p:P"}'
        hosts.unreachable = {"head": "no answer from 192.0.2.10:22 in 10 s"}
        raise HostsUnreachable(hosts.unreachable)

    console.ship = shipping(switch)
    with pytest.raises(HostsUnreachable, match="chief"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    after = hosts.done[hosts.done.index("put back") :]
    assert after[:3] == ["put back", "select", "tell abc123"]
    assert json.loads(hosts.selection) == {"run": "digits", "program": "p:P"}
    output = printed(console)
    assert "not everything was put back" in output
    assert "head may have the new release, settings and units. When it is back, run `fab start-cluster` again" in output
    assert "from the checkout of release abc123, to have what was there before" in output


def test_a_first_run_that_fails_leaves_the_cluster_as_it_was(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = lambda hosts: (
        hosts.set("chief-0", active="failed", sub="failed", result="exit-code", exit_status=78)
        if hosts.units["chief-0"].up
        else None
    )
    with pytest.raises(ClusterTrouble, match="chief-0 on head: exited with code 78"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2"))
    assert hosts.selection == ""
    assert not any(unit.up or unit.enabled for unit in hosts.units.values())
    assert "nothing ran, and nothing was started" in printed(console)


def test_a_run_that_is_slow_to_begin_is_not_put_back(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    with pytest.raises(ClusterTrouble, match="no step was trained in 20 s"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", timeout=20))
    assert "put back" not in hosts.done
    assert json.loads(hosts.selection) == {"run": "digits-2"}


def test_a_plan_is_shown_and_nothing_is_done(hosts: FakeHosts, console: Console) -> None:
    run_up(hosts)
    console.build = lambda _: "def456"
    shipped: list[Shipment] = []

    def ship(shipment: Shipment, _display: Display) -> ShipmentResult:
        shipped.append(shipment)
        return ShipmentResult({}, {"Write the run settings": ["head", "far"]})

    console.ship = ship
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest("digits-2", plan_only=True))
    assert hosts.done == []
    (shipment,) = shipped
    assert shipment.check
    assert shipment.arguments[-1] == "--check"
    assert printed(console).splitlines() == [
        "plan",
        "  ship    release def456 to head, store, far",
        *(f"  way     by Ansible: {host}: {UNKNOWN}" for host in ("head", "store", "far")),
        "  select  run digits-2",
        "  stop    chief-0, evaluator-0",
        "  restart ps-0, worker-0, worker-1 (on the new release)",
        "  start   chief-0, evaluator-0",
        "  change  Write the run settings: head, far",
        "  pause   run digits ends; to go on with it: fab start-cluster --run digits",
        "  lost    no step: it saves before it stops",
        "nothing was done, and nothing is proven yet: that needs the release on the hosts",
    ]


def ansible(
    output: str, code: int = 0, commands: list[list[str]] | None = None
) -> Callable[..., subprocess.Popen[str]]:
    """Make what prints and ends as ansible-playbook would."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        if commands is not None:
            commands.append(command)
        program = f"import sys; print({output!r}); sys.exit({code})"
        return subprocess.Popen([sys.executable, "-c", program], **options)

    return popen


@dataclass
class Shown:
    """A display that remembers."""

    shown: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def show(self, text: str) -> None:
        self.shown.append(text)

    def keep(self, text: str) -> None:
        self.kept.append(text)


OUTPUT = """
TASK [release : Unpack the code] ***********************************************
ok: [head]
changed: [store]
TASK [release : Say what is not proven] ****************************************
ok: [head] => {
    "msg": "host 'head': not proven: build_model"
}
TASK [release : Refuse a program, a run or settings that are wrong] ************
fatal: [head]: FAILED! => {"msg": "no such program"}

PLAY RECAP *****
head  : ok=5    changed=0    unreachable=0    failed=1
store : ok=5    changed=2    unreachable=0    failed=0
"""


def test_a_shipment_is_one_call_that_names_release_and_choice() -> None:
    commands: list[list[str]] = []
    shown = Shown()
    shipment = Shipment(make_inventory(), STAGE, "abc123", {"run": "a"}, without=["far"])
    done = ship(shipment, shown, ansible(OUTPUT, commands=commands))
    assert done.recaps == {"head": Recap(0, 0, 1), "store": Recap(2, 0, 0)}
    assert done.changes == {"Unpack the code": ["store"]}
    (command,) = commands
    assert [word.rpartition("/")[2] for word in command[1:3]] == ["preflight.yml", "release.yml"]
    assert command[3:5] == ["--inventory", "inventory/pretended"]
    assert json.loads(command[6]) == {
        "fab_shipment": {"release": "abc123", "selection": {"run": "a"}, "untried": False}
    }
    assert command[7:] == ["--limit", "all:!far"]
    assert "shipping: Unpack the code" in shown.shown
    refusal = "Refuse a program, a run or settings that are wrong"
    unproven = "host 'head': not proven: build_model"
    assert shown.kept == ["store: Unpack the code", unproven, f"head: {refusal}: failed"]


@pytest.mark.parametrize(
    ("output", "code", "kind"),
    [
        (OUTPUT.replace("Refuse a program, a run or settings that are wrong", "Prove"), 2, ClusterTrouble),
        ("head : ok=0    changed=0    unreachable=1    failed=0", 4, HostsUnreachable),
        ("nothing at all", 1, OperatorMistake),
    ],
)
def test_a_failed_shipment_says_whose_fault_it_is(output: str, code: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"ended with code {code}"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), ansible(output, code))


DEEP_OUTPUT = """
TASK [release : Refuse what is not as it was installed] ************************
ok: [head]
fatal: [store]: FAILED! => {"changed": false, "msg": "release abc123: it holds x.py\\nsix.py is missing"}
{unreachable}
PLAY RECAP *****
head  : ok=4    changed=0    unreachable=0    failed=0
store : ok=3    changed=0    unreachable=0    failed=1
far : ok=0    changed=0    unreachable={gone}    failed=0
"""
GONE = 'fatal: [far]: UNREACHABLE! => {"msg": "no way"}'


def deep_output(gone: bool = False) -> str:
    return DEEP_OUTPUT.replace("{unreachable}", GONE if gone else "").replace("{gone}", str(int(gone)))


def test_a_deep_look_says_by_host_what_is_wrong() -> None:
    commands: list[list[str]] = []
    found = check_deeply(make_inventory(), ["near"], Shown(), ansible(deep_output(), 2, commands))
    assert found == {"store": "release abc123: it holds x.py\nsix.py is missing"}
    (command,) = commands
    assert command[1].endswith("ansible/deep_check.yml")
    assert command[2:] == ["--inventory", "inventory/pretended", "--limit", "all:!near"]


def test_a_deep_look_that_a_host_missed_is_no_all_clear() -> None:
    with pytest.raises(HostsUnreachable, match=r"far is unreachable(.|\n)*store: release abc123: it holds x\.py"):
        check_deeply(make_inventory(), [], Shown(), ansible(deep_output(gone=True), 4))
    with pytest.raises(ClusterTrouble, match="nothing was compared: ansible-playbook ended with code 1"):
        check_deeply(make_inventory(), [], Shown(), ansible("no play", 1))


def test_a_deep_status_says_what_is_wrong_and_on_how_many_hosts_nothing_is(hosts: FakeHosts, console: Console) -> None:
    for name in hosts.units:
        hosts.set(name, **UP)
    hosts.unreachable = {}
    asked: list[list[str]] = []
    found: dict[str, str] = {}
    console.verify_hosts = lambda inventory, without, display: asked.append(list(without)) or found  # type: ignore[func-returns-value]
    cluster = Cluster(hosts.inventory, hosts)
    show_status(cluster, console)
    assert asked == []
    show_status(cluster, console, deep=True)
    assert asked == [[]]
    assert "code and environment on 3 hosts are as they were installed" in printed(console)
    found["store"] = "six.py is missing\nx.py is in no wheel's record"
    with pytest.raises(ClusterTrouble, match=r"^store: six\.py is missing\nstore: x\.py is in no wheel's record$"):
        show_status(cluster, console, deep=True)
    hosts.unreachable = {"far": "no answer"}
    with pytest.raises(HostsUnreachable, match=r"store: six\.py is missing"):
        show_status(cluster, console, deep=True)
    assert asked[-1] == ["far"]


def test_a_key_that_may_not_sign_is_the_operators_mistake() -> None:
    refused = OUTPUT.replace(
        "Refuse a program, a run or settings that are wrong", "Sign the release on the control machine"
    )
    with pytest.raises(OperatorMistake, match=r"^no such program$"):
        ship(
            Shipment(make_inventory(), STAGE, "abc123", {}),
            Shown(),
            ansible(refused.replace("fatal: [head]", "fatal: [head -> localhost]"), 2),
        )


def test_what_is_shipped_is_read_whatever_the_operator_has_ansible_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real ansible-playbook, in an environment that many have for their own playbooks."""
    monkeypatch.setenv("ANSIBLE_STDOUT_CALLBACK", "minimal")
    monkeypatch.setenv("ANSIBLE_CALLBACK_RESULT_FORMAT", "yaml")
    monkeypatch.setenv("ANSIBLE_FORCE_COLOR", "1")
    monkeypatch.setenv("ANSIBLE_VERBOSITY", "2")
    monkeypatch.setenv("LC_ALL", "C")
    task = {"name": "Refuse a program, a run or settings that are wrong", "ansible.builtin.fail": {"msg": "no such"}}
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": [task]}]

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen([command[0], "/dev/stdin"], **options | {"stdin": subprocess.PIPE})
        assert process.stdin is not None
        process.stdin.write(json.dumps(play))
        process.stdin.close()
        return process

    with pytest.raises(OperatorMistake, match=r"^no such$"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), popen)


def test_what_the_proof_refuses_is_said_alone() -> None:
    with pytest.raises(OperatorMistake) as caught:
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), ansible(OUTPUT, 2))
    assert str(caught.value) == "no such program"


def test_a_shipment_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.rollout.release.SILENT_SECONDS", 0.2)
    monkeypatch.setattr("fleet.rollout.release.LOOK_SECONDS", 0.05)
    processes: list[subprocess.Popen[str]] = []

    def popen(_command: list[str], **options: Any) -> subprocess.Popen[str]:
        program = "import time; print('TASK [release : Fetch the wheels once] ***', flush=True); time.sleep(600)"
        processes.append(subprocess.Popen([sys.executable, "-c", program], **options))
        return processes[0]

    with pytest.raises(ClusterTrouble, match=r"nothing was heard .* task 'Fetch the wheels once'|'Ansible starts'"):
        ship(Shipment(make_inventory(), STAGE, "abc123", {}), Shown(), popen)
    assert processes[0].poll() is not None


def test_a_second_ctrl_c_leaves_no_ansible_behind(heeds_ctrl_c: object) -> None:
    class Slow(subprocess.Popen[str]):
        def wait(self, timeout: float | None = None) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().wait(timeout)

    program = "import time; print('TASK [trainer : Write the run settings] ***', flush=True); time.sleep(600)"
    processes: list[subprocess.Popen[str]] = []

    def popen(_command: list[str], **options: Any) -> subprocess.Popen[str]:
        processes.append(Slow([sys.executable, "-c", program], **options))
        return processes[0]

    display = Shown()
    display.show = lambda _: signal.raise_signal(signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ship(Shipment(make_inventory(), SWITCH, "abc123", {}), display, popen)
    assert processes[0].returncode is not None
    assert signal.getsignal(signal.SIGINT) is heeds_ctrl_c


def test_the_planned_release_is_the_roles() -> None:
    """The locks that a release is planned with are those of the role's defaults."""
    defaults = yaml.safe_load((KIT / "roles/release/defaults/main.yml").read_text())
    environment = jinja2.Environment()
    environment.filters |= FILTERS
    for lock in ("locks/cpu", "locks/mine"):
        rendered = environment.from_string(defaults["release_lock_gpu"]).render(release_lock=lock)
        assert rendered == lock_of({"release_lock": lock}, "release_lock_gpu")
    assert [lock_of({}, name) for name in LOCKS] == [defaults["release_lock"], "locks/cuda"]


def test_a_program_that_cannot_be_shipped_is_the_operators_mistake() -> None:
    inventory = make_inventory()
    inventory.variables["head"]["release_program"] = "no/such/place"  # type: ignore[index]
    with pytest.raises(OperatorMistake, match="release_program"):
        build_release(inventory)
    inventory.variables["head"]["release_program"] = "tests/infra/programs"  # type: ignore[index]
    assert re.fullmatch("[0-9a-f]{12}", build_release(inventory))


def test_recap_is_read_from_ansibles_output() -> None:
    output = (
        "ok: [head]\n\nPLAY RECAP *****\n"
        "head                       : ok=5    changed=2    unreachable=0    failed=0    skipped=0    rescued=0\n"
        "worker-1                   : ok=0    changed=0    unreachable=1    failed=0    skipped=0    rescued=0\n"
    )
    assert parse_recap(output) == {"head": Recap(2, 0, 0), "worker-1": Recap(0, 1, 0)}


SWEEP = {"sweep": {"name": "s", "points": [{"rate": 0.1}, {"rate": -1}]}}


def swept(*states: str, over: bool = False, evaluated: bool = False, present: str | None = "s-1") -> dict[str, Any]:
    """What the trainer says of the sweep."""
    point = {"message": "why", "step": 5, "steps": 30, "evaluation": {}, "evaluated_step": None, "goodput": None}
    points = [
        {"run": f"s-{number}", "program_args": given, "state": state, **point}
        for number, (given, state) in enumerate(zip([{"rate": 0.1}, {"rate": -1}], states, strict=True), start=1)
    ]
    sweep = {"name": "s", "attempt": 1, "size": len(points), "points": points}
    return sweep | {"over": over, "evaluated": evaluated, "present": present}


def follow(*records: dict[str, Any], then: Callable[[FakeHosts], None] = lambda _: None) -> Callable[[FakeHosts], None]:
    """Have the sweep say one thing after the other, once it is started."""
    left = list(records)

    def tick(hosts: FakeHosts) -> None:
        if "start chief-0" in hosts.done:
            hosts.sweep = left.pop(0) if left else hosts.sweep
            if not left:
                then(hosts)

    return tick


def test_sweep_is_selected_and_followed_past_a_failed_point_to_its_table(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = follow(
        swept("new", "new"),
        swept("training", "new"),
        swept("finished", "training", present="s-2"),
        swept("finished", "failed", over=True, present=None),
        swept("finished", "failed", over=True, evaluated=True, present=None),
    )
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert json.loads(hosts.selection) == {"sweep": {**SWEEP["sweep"], "attempt": 1, "settings": {"program_args": {}}}}
    output = printed(console)
    assert "  select  sweep s of 2 points\n" in output
    assert re.search(r"s-1: finished\n(.*\n)*s-2: failed\n(.*\n)*sweep s: over, 1 failed\nPARAMETERS", output)
    assert "put back" not in output
    assert output.endswith("s-2 failed: why\n")


def test_a_sweep_beside_a_training_restarts_who_saves_and_who_evaluates(hosts: FakeHosts, console: Console) -> None:
    """The servers serve its first point as they are."""
    for name in hosts.units:
        hosts.set(name, file_state="enabled", **UP)
    hosts.run_status = status("training", 20)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP, detach=True))
    assert hosts.done == ["stop chief-0", "stop evaluator-0", "select", "start chief-0", "start evaluator-0"]


def test_sweep_whose_coordinator_is_down_before_its_end_is_trouble(hosts: FakeHosts, console: Console) -> None:
    def stop(hosts: FakeHosts) -> None:
        hosts.set("chief-0", active="inactive", sub="dead")

    hosts.tick = follow(swept("new", "new"), swept("training", "new"), then=stop)
    with pytest.raises(ClusterTrouble, match=r"chief-0 on head.* is down, and sweep s is not over"):
        start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert json.loads(hosts.selection)["sweep"]["attempt"] == 1


def test_sweep_whose_evaluator_is_late_ends_with_saying_so(hosts: FakeHosts, console: Console) -> None:
    hosts.tick = follow(swept("new", "new"), swept("finished", "finished", over=True, present=None))
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert "\nNot every point is evaluated yet; the evaluator goes on. Look: fab sweep --status\n" in printed(console)


def test_sweep_whose_coordinator_is_slow_to_start_is_followed(hosts: FakeHosts, console: Console) -> None:
    looks = [0]

    def tick(hosts: FakeHosts) -> None:
        if "start chief-0" in hosts.done and not looks[0]:
            hosts.set("chief-0", active="inactive", sub="dead")
            hosts.sweep, looks[0] = swept("new", "new"), 1
        elif looks[0]:
            hosts.set("chief-0", active="active", sub="running")
            hosts.sweep = swept("finished", "finished", over=True, evaluated=True, present=None)

    hosts.tick = tick
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert "sweep s: over\n" in printed(console)


@pytest.mark.parametrize("seconds", [60, 600])
def test_chief_that_is_away_for_a_while_does_not_end_the_looking_on(
    hosts: FakeHosts, console: Console, seconds: float
) -> None:
    over = swept("finished", "finished", over=True, evaluated=True, present=None)
    next_answer = follow(swept("new", "new"), swept("training", "new"), over)

    def tick(hosts: FakeHosts) -> None:
        away = "start chief-0" in hosts.done and 1005 < hosts.now < 1005 + seconds
        hosts.unreachable = {"head": "no answer"} if away else {}
        if not away:
            next_answer(hosts)

    hosts.tick = tick
    watch = lambda: start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))  # noqa: E731
    if seconds == 60:
        watch()
        assert "sweep s: over\n" in printed(console)
    else:
        with pytest.raises(HostsUnreachable, match="the sweep may go on unseen: fab sweep --status"):
            watch()


def test_sweep_that_is_finished_is_shown_and_one_with_a_failure_is_tried_again(
    hosts: FakeHosts, console: Console
) -> None:
    hosts.selection = json.dumps({"sweep": {**SWEEP["sweep"], "attempt": 1}})
    hosts.sweep = swept("finished", "finished", over=True, evaluated=True, present=None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP))
    assert hosts.done == []
    assert re.search(r"sweep s: over\n(.*\n)*For more, add points to the end of its file", printed(console))
    hosts.sweep = swept("finished", "failed", over=True, evaluated=True, present=None)
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest())
    assert hosts.done == []
    assert printed(console).endswith("Try what failed again: fab sweep FILE\n")
    start_cluster(Cluster(hosts.inventory, hosts), console, StartRequest(sweep=SWEEP, detach=True))
    assert json.loads(hosts.selection)["sweep"]["attempt"] == 2
    assert "start chief-0" in hosts.done


def test_status_of_a_sweep_is_a_table_or_json(hosts: FakeHosts, console: Console) -> None:
    cluster = Cluster(hosts.inventory, hosts)
    with pytest.raises(OperatorMistake, match="there is no sweep yet: fab sweep FILE"):
        show_sweep(cluster, console)
    hosts.sweep = swept("finished", "training", present="s-2")
    show_sweep(cluster, console)
    assert printed(console).startswith("sweep s: 1 of 2 points have ended\nPARAMETERS")
    console.json_out = console.out
    show_sweep(cluster, console)
    assert json.loads(printed(console)[printed(console).index("{") :])["sweep"] == hosts.sweep


def test_status_says_of_which_sweep_the_run_is_a_point(hosts: FakeHosts, console: Console) -> None:
    show_status(Cluster(hosts.inventory, hosts), console)
    assert "sweep" not in printed(console)
    hosts.selection = json.dumps({"sweep": {**SWEEP["sweep"], "attempt": 1}})
    show_status(Cluster(hosts.inventory, hosts), console)
    assert "a point of sweep s, which has 2: fab sweep --status\n" in printed(console)
