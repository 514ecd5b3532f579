"""A drill's own run on the operator's cluster: take the cluster, train, look, and give it back as it was."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.actions.console import Console
from fleet.actions.exclusive import reject_stopped, start_again
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.drain_records import describe
from fleet.hosts.foreign_hosts import reject_foreign
from fleet.hosts.observation import Observation, last_line, load_json, split_sections
from fleet.hosts.run import AS_TRAINER, SETTINGS
from fleet.hosts.ssh import ANSWER_SECONDS
from fleet.hosts.units import properties_of
from fleet.site.inventory import Inventory
from fleet.site.topology import Task
from trainer.cluster.spec import SERVICE_JOBS

PROGRAM = "/opt/trainer/current/trainer/drill.py"
PACE = ".psfleet-drill"  # trainer/drill.py reads it on the shared path
SHORT_STEP = 0.05
LONG_STEP = 60.0
START_SECONDS = 240.0
STILL_SECONDS = 60.0
LAST_EVENTS = 500

_STEP = re.compile(r"\bstep (\d+) of \d+")
_UNIT = ("Id", "InvocationID", "ActiveState", "SubState", "Result", "ExecMainStatus", "MainPID", "StatusText")

# Short steps, reported one by one, a checkpoint every few seconds: what a drill needs to see what happens.
RUN_SETTINGS: Mapping[str, Any] = {
    "steps": 1_000_000,
    "steps_per_execution": 1,
    "checkpoint_seconds": 5.0,
    "log_seconds": 0.5,
}


class DrillFailed(Exception):
    """The drill can't be done or judged: its run didn't train, or its fault didn't happen."""


class NotHere(DrillFailed):
    """The hosts lack what the drill's fault needs: of all drills, and of faults by chance, it is passed over."""


@dataclass(frozen=True)
class Process:
    """A task as systemd sees it. `invocation` changes when, and only when, systemd starts the unit again."""

    invocation: str
    active: str
    sub: str
    result: str
    exit_status: int
    main: int  # 0: no process
    child: int = 0  # of a unit's main process that supervises: the task itself

    @property
    def pid(self) -> int:
        """The process that is the task."""
        return self.child or self.main

    @property
    def pids(self) -> list[int]:
        return [pid for pid in (self.main, self.child) if pid]

    @property
    def start(self) -> tuple[str, int]:
        """What is another when, and only when, the task was restarted: by systemd or by its supervisor."""
        return self.invocation, self.pid

    def succeeds(self, before: Process) -> bool:
        """Whether the task was restarted; the first child of a supervisor is no second start."""
        return self.start != before.start if before.child else self.invocation != before.invocation

    @property
    def runs(self) -> bool:
        return (self.active, self.sub) == ("active", "running")


@dataclass(frozen=True)
class RunSample:
    """What the coordinator's host said at one moment."""

    at: float  # by the control machine's clock, as all times of a drill
    clock: float  # by the host's, which stamps the events
    coordinator: Process
    state: str
    step: int | None
    status_text: str  # as systemd has it
    status: Mapping[str, Any]
    checkpoints: Sequence[int]
    events: Sequence[Mapping[str, Any]] = field(default_factory=tuple)  # the run's last ones, oldest first

    def happened_at(self, event: Mapping[str, Any]) -> float:
        """When an event happened, by the control machine's clock."""
        return float(event["time"]) - self.clock + self.at


def victim(inventory: Inventory, job: str) -> Task:
    """The last task of a job; when there is one, one whose host isn't the coordinator's."""
    tasks = [task for task in inventory.tasks if task.job == job]
    return next((task for task in reversed(tasks) if task.host != inventory.chief.host), tasks[-1])


class Testbed:
    """The cluster while drills have it."""

    __test__ = False  # pytest takes a class of this name for tests

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self.cluster = cluster
        self.inventory = cluster.inventory
        self.console = console
        self.run = ""
        self._running: tuple[str, Mapping[str, Any]] | None = None
        self._number = 0
        self._used: set[str] = set()  # runs whose directories are taken away at the end
        self._before: Observation | None = None
        self._settings: dict[str, str] = {}
        self._written: dict[str, str] = {}  # by host: the settings as drills wrote them last

    @property
    def chief(self) -> Task:
        return self.inventory.chief

    @property
    def shared_dir(self) -> str:
        return self.inventory.shared_dir

    @property
    def run_dir(self) -> str:
        return f"{self.shared_dir}/runs/{self.run}"

    @property
    def checkpoint_dir(self) -> str:
        return f"{self.run_dir}/checkpoints"

    def tasks(self, *jobs: str) -> list[Task]:
        return [task for task in self.inventory.tasks if task.job in jobs]

    def victim(self, job: str) -> Task:
        return victim(self.inventory, job)

    # The operator's cluster

    def take_over(self) -> None:
        """Remember what the operator had; raises what stands in the way, before anything is changed."""
        before = self.cluster.observe()
        if before.unreachable:
            raise HostsUnreachable(before.unreachable, "No drill was begun")
        reject_foreign(self.cluster.inventory, before, self.cluster.inventory.hosts)
        if before.drains:
            host = next(iter(before.drains))
            raise OperatorMistake(f"{host} is {describe(before.drains[host])}, and drills need all: fab undrain {host}")
        self.cluster.reject_when_not_installed(before)
        self.cluster.reject_when_not_configured(before)
        answers = self.everywhere(f"cat {SETTINGS}; test -e {PROGRAM} || echo '@missing'")
        lacking = [host for host, text in answers.items() if "@missing" in text]
        if lacking:
            raise OperatorMistake(
                f"the release on {', '.join(lacking)} has no drills: there is no {PROGRAM}. Run "
                "`ansible-playbook site.yml` first"
            )
        self._before, self._settings = before, answers

    def keep(self) -> None:
        """Keep starts away still, or again: a drill may cut off the host that does it.

        Raises ClusterTrouble where someone came in between. What they changed is not given back then.
        """
        if self._before is None or self.cluster.hosts.is_holding():
            return
        self.cluster.release_start_lock()
        before = self._before
        try:
            self.cluster.acquire_start_lock("drill", again=True)
            why = self._changed_by_others(before.selection)
        except OperatorMistake as mistake:
            why = str(mistake)
        if why:
            self._before = None
            run = before.selection.get("run", "YOURS")
            raise ClusterTrouble(
                f"the connection to {self.chief.host} that kept other starts away was lost, and meanwhile {why}. The "
                "drills end here, and nothing is given back. Look: fab status. Where a drill's run is still selected: "
                f"fab start-cluster --run {run}"
            )

    def go_on(self) -> None:
        """Before each drill: keep starts away, and raise ClusterTrouble where the cluster was stopped meanwhile."""
        self.keep()
        reject_stopped(self.cluster)

    def _changed_by_others(self, selection: Mapping[str, Any]) -> str | None:
        """Say what differs from how the drills have left selection and settings, on the hosts that answer."""
        seen = self.cluster.observe([self.chief.host])
        selected, expected = seen.selection.get("run"), self.run or selection.get("run")
        if not seen.unreachable and selected != expected:
            return f"the run {selected!r} was selected in the place of {expected!r}"
        for host, answer in self.cluster.hosts.run(dict.fromkeys(self.inventory.hosts, f"cat {SETTINGS}")).items():
            ours = self._written.get(host, self._settings[host])
            if not answer.unreachable and answer.stdout.strip() != ours.strip():
                return f"{SETTINGS} of {host} was changed"
        return None

    def give_back(self) -> None:
        """Leave the cluster as the operator had it: the selected run, the settings, and what ran."""
        if self._before is None:
            return
        before, self._before = self._before, None
        self.stop_all()
        for host, settings in self._settings.items():
            self._write_settings({host: settings})
        clean = f"{AS_TRAINER} rm -rf {shlex.quote(f'{self.shared_dir}/{PACE}')}"
        if before.selection:
            self.cluster.select(before.selection)
        else:
            clean += f" {shlex.quote(f'{self.shared_dir}/selection.json')}"
        for run in self._used:
            clean += f" {shlex.quote(f'{self.shared_dir}/runs/{run}')}"
        self.on(self.chief.host, clean)
        up = [task for task in self.inventory.tasks if before.units[task.name].up]
        disabled = [task for task in self.inventory.tasks if not before.units[task.name].enabled]
        if disabled:
            self.cluster.disable(disabled)
        if up:
            start_again(self.cluster, self.inventory.tasks, partial(self.cluster.start, up))

    def stop_all(self) -> None:
        """Stop every task, the coordinator first, which saves."""
        for tasks in (
            self.tasks("chief"),
            self.tasks("evaluator"),
            self.tasks("ps", "worker"),
            self.tasks(*SERVICE_JOBS),
        ):
            if tasks:
                self.cluster.stop(tasks)

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        for host, text in settings.items():
            # Beside it and moved: a task that starts meanwhile reads the one or the other.
            write = f"cat > {SETTINGS}.new && chmod 0644 {SETTINGS}.new && mv {SETTINGS}.new {SETTINGS}"
            self.on(host, f"printf '%s\\n' {shlex.quote(text.rstrip())} | root sh -c {shlex.quote(write)}")
            self._written[host] = text

    # The drill's run

    def train(self, program: str, settings: Mapping[str, Any], wait: bool = True) -> None:
        """Have the drill's run train beyond a checkpoint; one that does already, with the same settings, goes on."""
        wanted = (program, dict(settings))
        if self._running == wanted and wait and self._trains_well():
            return
        self._running = None
        self._number += 1
        self.run = f"drill-{time.strftime('%m%d-%H%M%S')}-{self._number}"
        self._used.add(self.run)
        self.cluster.stop(self.tasks("chief"))
        self.cluster.stop(self.tasks("evaluator", "ps"))
        self.configure(program, settings)
        self.cluster.select({"run": self.run, "program": program})
        self.pace(SHORT_STEP)
        if wait:
            self.cluster.start(self.inventory.tasks)
            self.wait(self.trains_beyond_a_checkpoint, START_SECONDS, "the drill's run trains beyond a checkpoint")
            self._running = wanted

    @property
    def is_served(self) -> bool:
        """Whether the data service reads for the drill's run."""
        return self._running is not None and self._running[1].get("input") == "service"

    def configure(self, program: str, settings: Mapping[str, Any]) -> None:
        """Write the settings of the drill's run, for the tasks that start from now on."""
        config = {**RUN_SETTINGS, **settings, "program": program, "run": self.run, "shared_dir": self.shared_dir}
        self._write_settings(dict.fromkeys(self.inventory.hosts, json.dumps(config, indent=1)))

    def forget_run(self, keep: bool = False) -> None:
        """Have the next drill begin a run of its own: this one is not as it was. `keep` leaves its directory there."""
        self._running = None
        if keep:
            self._used.discard(self.run)

    def pace(self, seconds: float) -> None:
        """Say how long the steps last that begin from now on."""
        path = shlex.quote(f"{self.shared_dir}/{PACE}")
        write = shlex.quote(f"umask 022; echo {seconds:g} > {path}.new && mv {path}.new {path}")
        self.on(self.chief.host, f"{AS_TRAINER} sh -c {write}")

    def begin_long_step(self) -> None:
        """Have a long step in flight on every worker; raises DrillFailed when short ones go on."""
        self.pace(LONG_STEP)
        last, since = self.sample().step, self.console.clock()
        end = since + STILL_SECONDS
        while self.console.clock() - since < 4.0:
            if self.console.clock() > end:
                raise DrillFailed(f"short steps go on {STILL_SECONDS:.0f} s after {PACE} was to make them long")
            step = self.sample().step
            if step != last:
                last, since = step, self.console.clock()
            self.console.sleep(0.5)

    def trains_beyond_a_checkpoint(self) -> bool:
        """Beyond its second one, so that one may be lost. Raises DrillFailed when the run has failed."""
        sample = self.sample()
        if sample.coordinator.active == "failed" or sample.state == "failed":
            raise DrillFailed(
                f"the drill's run failed at its start: {sample.status.get('message') or sample.status_text}"
            )
        saved = sample.checkpoints
        return sample.state == "training" and len(saved) > 1 and sample.step is not None and sample.step > saved[-1]

    def _trains_well(self) -> bool:
        try:
            if not all(process.runs for process in self.processes().values()):
                return False
            self.wait(self.trains_beyond_a_checkpoint, 30.0, "the run goes on")
        except DrillFailed:
            return False
        return True

    # Looking

    def sample(self) -> RunSample:
        """Ask the coordinator's host; raises FleetError when it doesn't answer, or says half of it."""
        directory = shlex.quote(self.run_dir)
        script = (
            f"echo @clock; date +%s.%N; echo '@unit'; {show_units([self.chief])}; "
            f"echo '@status'; {AS_TRAINER} cat {directory}/status.json 2>/dev/null; echo; echo '@files'; "
            f"{AS_TRAINER} ls {directory}/checkpoints 2>/dev/null; echo '@events'; "
            f"{AS_TRAINER} tail -n {LAST_EVENTS} {directory}/events.jsonl 2>/dev/null; true"
        )
        text = self.on(self.chief.host, script, timeout=10.0)
        try:
            return read_sample(text, self.console.clock())
        except (LookupError, ValueError) as error:
            raise ClusterTrouble(f"{self.chief.host}: systemd does not say how {self.chief.name} is") from error

    def processes(self, hosts: Collection[str] | None = None, away: Collection[str] = ()) -> dict[str, Process]:
        """Each task's process, of all hosts that answer, but those that are `away`.

        Raises HostsUnreachable when `hosts` are named, and one of them doesn't answer.
        """
        asked = [host for host in self.inventory.hosts if (hosts is None or host in hosts) and host not in away]
        scripts = {host: show_units(self.inventory.tasks_on(host)) for host in asked}
        found: dict[str, Process] = {}
        answers = self.cluster.hosts.run(scripts, 10.0)
        silent = {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}
        if silent and hosts is not None:
            raise HostsUnreachable(silent)
        for answer in answers.values():
            if not answer.unreachable:
                found |= read_processes(answer.stdout)
        return found

    def wait(self, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """Poll until `true()` is and return its value; raise DrillFailed with what was waited for."""
        end = self.console.clock() + seconds
        why = ""
        while True:
            try:
                value = true()
                if value:
                    return value
            except HostsUnreachable as error:
                why = f" ({error})"
            if self.console.clock() > end:
                raise DrillFailed(f"not within {seconds:.0f} s: {what}{why}")
            self.console.sleep(0.3)

    def on(self, host: str, script: str, timeout: float = ANSWER_SECONDS) -> str:
        """Run a script on a host and return what it prints; raises when it fails."""
        return self.everywhere(script, [host], timeout)[host]

    def everywhere(self, script: str, hosts: Sequence[str] | None = None, timeout: float = 30.0) -> dict[str, str]:
        asked = list(self.inventory.hosts if hosts is None else hosts)
        answers = self.cluster.hosts.run(dict.fromkeys(asked, script), timeout)
        silent = {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}
        if silent:
            raise HostsUnreachable(silent)
        for host, answer in answers.items():
            if answer.code:
                raise ClusterTrouble(f"{host}: {last_line(answer)}")
        return {host: answer.stdout for host, answer in answers.items()}


def show_units(tasks: Sequence[Task]) -> str:
    """The command that says how units are, for `read_processes`."""
    units = " ".join(task.unit for task in tasks)
    return (
        f'for unit in {units}; do shown=$(systemctl show --property={",".join(_UNIT)} $unit); echo "$shown"; '
        "main=${shown##*MainPID=}; main=${main%%[!0-9]*}; "
        "read -r child others 2>/dev/null </proc/$main/task/$main/children; echo Child=$child; child=; echo; done"
    )


def read_sample(text: str, at: float) -> RunSample:
    """Read what `Testbed.sample` asks for."""
    parts = split_sections(text)
    (unit,) = properties_of(parts["unit"]).values()
    (process,) = read_processes(parts["unit"]).values()
    text = unit.get("StatusText", "")
    step = _STEP.search(text)
    events = [event for line in parts["events"].split("\n") if (event := _load(line))]
    status = _load(parts["status"]) or {}
    return RunSample(
        at=at,
        clock=float(parts["clock"]),
        coordinator=process,
        state=text.partition(" ")[0] if process.main else str(status.get("state", "")),
        step=int(step[1]) if step else None,
        status_text=text,
        status=status,
        checkpoints=read_checkpoints(parts["files"].split()),
        events=[event for event in events if "event" in event and "time" in event],
    )


def read_checkpoints(names: Sequence[str]) -> list[int]:
    """The steps of the checkpoints that are whole: with a manifest."""
    found = [re.fullmatch(r"ckpt-(\d+)\.manifest\.json", name) for name in names]
    return sorted(int(match[1]) for match in found if match)


def read_processes(text: str) -> dict[str, Process]:
    """Read `systemctl show` of several units; keys are task names."""
    return {
        name.removeprefix("trainer@").removesuffix(".service"): Process(
            values.get("InvocationID", ""),
            values.get("ActiveState", ""),
            values.get("SubState", ""),
            values.get("Result", ""),
            int(values.get("ExecMainStatus") or 0),
            int(values.get("MainPID") or 0),
            int(values.get("Child") or 0),
        )
        for name, values in properties_of(text).items()
    }


def _load(text: str) -> dict[str, Any] | None:
    value = load_json(text)
    return value if isinstance(value, dict) else None
