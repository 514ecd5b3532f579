"""Pretended hosts for the tests of the verbs, with a clock and a console."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.actions.console import Console
from fleet.hosts.ssh import Answer
from fleet.hosts.units import Unit
from fleet.output.tables import ProgressLine
from fleet.rollout.release import SWITCH, Recap, Shipment, ShipmentResult
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.topology import Task

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
    stopped: str = ""  # which stop-cluster has come since the lock was taken
    digested: int = 0  # how often a host was asked for the digest of its configuration

    def __post_init__(self) -> None:
        for task in self.inventory.tasks:
            self.units.setdefault(task.name, Unit(task.unit))

    def set(self, name: str, **values: Any) -> None:
        self.units[name] = replace(self.units[name], **values)

    def set_all(self, **values: Any) -> None:
        for name in self.units:
            self.set(name, **values)

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
        return self.holds[-1:] == ["held"] and self.held.stdout == "held"

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
            lines += ["@stopped", self.stopped]
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


def console_of(hosts: FakeHosts, release: str = "", **more: Any) -> Console:
    """The console of who operates these hosts: what it ships changes nothing, and whatever it proves is right."""
    clock = Clock(hosts=hosts)
    made = Console(io.StringIO(), clock, clock.sleep, nothing, lambda *_: None, prove=lambda *_: None, **more)
    made.build = lambda _: release or hosts.release or ""
    return made


def raises(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A stand-in for what fails so, or is left."""

    def fail(*_: Any, **_more: Any) -> Any:
        raise error

    return fail


def make_inventory(tasks: Sequence[Task] = TASKS, steps: int = 30, run: str = "digits") -> Inventory:
    strategy = "parameter_server" if tasks is TASKS else "multi_worker_mirrored"
    shared = {"cluster_shared_dir": "/srv/trainer", "trainer_run": {"run": run, "steps": steps, "strategy": strategy}}
    variables = {task.host: {"ansible_host": task.address, **shared} for task in tasks}
    hosts = {task.host: Host(task.host, task.address) for task in tasks}
    groups = {job: [task.host for task in TASKS if task.job == job] for job in ("chief", "ps", "worker", "evaluator")}
    return Inventory("inventory/pretended", groups, hosts, tasks, variables, "http://192.0.2.10:6006")


def nothing(_shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
    """Ship what changes nothing."""
    return ShipmentResult({}, {})


def shipping(act: Callable[[], Mapping[str, Recap] | None]) -> Callable[[Shipment, ProgressLine], ShipmentResult]:
    """Make a shipment whose switch does something, and whose stage does nothing."""

    def ship(shipment: Shipment, _display: ProgressLine) -> ShipmentResult:
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


@contextmanager
def led(hosts: FakeHosts, seconds: int, *asked: Any) -> Iterator[Callable[[], bool]]:
    """A tunnel that lasts for so many looks."""
    hosts.done.append(f"tunnel {asked}")
    looks = iter([True] * seconds)
    yield lambda: next(looks, False)


def board_at(hosts: FakeHosts, url: str | None) -> Inventory:
    return replace(hosts.inventory, tensorboard_url=url)


def run_up(hosts: FakeHosts) -> None:
    """Have a run trained, selected by the operator."""
    hosts.set_all(file_state="enabled", **UP)
    hosts.run_status = status("training", 12, 999.0)
    hosts.selection = '{"run": "digits", "program": "p:P"}'


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


class AnsweringHosts:
    """Hosts that answer what a test says, each its own; `asked` is what they were asked last."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = answers
        self.asked: dict[str, str] = {}

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        self.asked = dict(scripts)
        return {host: self.answers.get(host, Answer("")) for host in scripts}


class ScriptedHosts:
    """Hosts that answer a script by the first pattern that it contains."""

    def __init__(self, answers: Mapping[str, str | Answer] | None = None) -> None:
        self.answers = dict(answers or {})
        self.scripts: list[tuple[str, str]] = []

    def run(self, scripts: Mapping[str, str], timeout: float = 30) -> dict[str, Answer]:
        self.scripts += scripts.items()
        return {host: self._answer(script) for host, script in scripts.items()}

    def _answer(self, script: str) -> Answer:
        found = next((answer for pattern, answer in self.answers.items() if pattern in script), "")
        return found if isinstance(found, Answer) else Answer(found)

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        raise NotImplementedError

    def hold(self, host: str, script: str) -> Answer:
        self.scripts.append((host, script))
        return self._answer(script)

    def is_holding(self) -> bool:
        return False

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        pass
