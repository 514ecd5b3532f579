"""What the hosts said when they were asked: the script that asks, and what is read of its answer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.hosts import drain_records, facts
from fleet.hosts.host_scripts import CURRENT, DIGEST, DIRECTORIES, STATUS
from fleet.hosts.lock import STOPPED_SCRIPT
from fleet.hosts.run import HANGS, Run, describe_hang, on_path, parse_run, read_files, script_of_files
from fleet.hosts.ssh import Answer
from fleet.hosts.units import PROPERTIES, Unit, parse_units
from fleet.site.cluster_note import NOTE
from fleet.site.inventory import Inventory
from trainer.core.failures import USER_ERROR

# A process keeps the directory that `current` led to when it began; the kernel marks one that is gone "(deleted)".
_RELEASE = re.compile(r"/releases/([^/ ]+)")
NO_SYSTEMD = "systemd says nothing"  # so begins why a host that SSH reaches can't be asked for its tasks


@dataclass
class Observation:
    """What the hosts said. A task on a host that said nothing has no unit here."""

    units: dict[str, Unit] = field(default_factory=dict)  # by task name
    services: dict[str, list[Unit]] = field(default_factory=dict)  # by host: those beside the tasks
    listening: dict[str, bool] = field(default_factory=dict)  # by task name, of the tasks that have a port
    configured: dict[str, bool] = field(default_factory=dict)  # by task name: has it an environment file?
    releases: dict[str, str | None] = field(default_factory=dict)  # by host
    running: dict[str, str] = field(default_factory=dict)  # by task name: its process's release, where it was asked for
    settings: dict[str, str] = field(default_factory=dict)  # by host, where asked for: a digest of the configuration
    looks: dict[str, Any] = field(default_factory=dict)  # by host: what fleet/hosts/agent.py says, where it was asked
    blind: dict[str, str] = field(default_factory=dict)  # by host: why it says nothing there
    failed: dict[str, str] = field(default_factory=dict)  # by host: why what it was to do first was not done
    clocks: dict[str, float] = field(default_factory=dict)  # by host: seconds since 1970
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by host, where asked for (fleet/hosts/facts.py)
    clusters: dict[str, Any] = field(default_factory=dict)  # by host that has one: its note of which it belongs to
    drains: dict[str, dict[str, Any]] = field(default_factory=dict)  # by host that an operator has taken out
    marked: set[str] = field(default_factory=set)  # hosts that know of their drain themselves
    unreachable: dict[str, str] = field(default_factory=dict)  # by host: why
    stopped: str | None = None  # which stop-cluster came since the lock was taken
    run: Run | None = None
    run_error: FleetError | None = None  # why there is no run
    selection: dict[str, Any] = field(default_factory=dict)

    def merge(self, other: Observation) -> None:
        """Take what another look has said; what it doesn't speak of stays."""
        for each in fields(self):
            known, new = getattr(self, each.name), getattr(other, each.name)
            if isinstance(known, (dict, set)):
                known |= new
            elif new is not None:
                setattr(self, each.name, new)

    def name_drained(self, inventory: Inventory) -> None:
        """Call a member `drained` in `run.without` where its host is, whatever the coordinator makes of its silence."""
        if self.run is not None:
            drained = {task.name for host in self.drains for task in inventory.tasks_on(host)}
            without = {task: "drained" if task in drained else state for task, state in self.run.without.items()}
            self.run = replace(self.run, without=without)

    def bare(self, inventory: Inventory) -> list[str]:
        """Return the hosts that answer and have no release, as before the first site.yml."""
        return [host for host, has in self.releases.items() if has is None and host in inventory.hosts]

    @property
    def release(self) -> str | None:
        """The release that every host has, or None when they differ or have none."""
        found = set(self.releases.values())
        return found.pop() if len(found) == 1 else None


def question(
    inventory: Inventory, host: str, running: bool, settings: bool, by_trainer: bool, agent: str | None = None
) -> str:
    """Return the script with which a host says what `read_answer` reads.

    An `agent` reads all of standard input. It comes behind the units' states, some of which it may change, and before
    the trainer's answer, which takes a second.
    """
    tasks = inventory.tasks_on(host)
    names = " ".join([*(task.unit for task in tasks), *inventory.services_on(host).values()])
    script = [
        *(["exec 3<&0 </dev/null"] if agent else []),
        "echo '@now'; date +%s.%N",
        f"echo '@release'; readlink {CURRENT}",
        "echo '@environments'; (cd /etc/trainer 2>/dev/null && echo *)",
        "echo '@ports'; ss -Hltn",
        drain_records.SCRIPT,
        f"echo '@cluster'; cat {NOTE} 2>/dev/null; echo",
        f"echo '@units'; units=$(systemctl show --property={','.join(PROPERTIES)} {names} 2>&1)",
        "printf '%s\\n' \"$units\"",
    ]
    if settings:
        script.append(f"echo '@settings'; root sh -c {shlex.quote(DIGEST)}")
    if running:
        script.append(
            f"echo '@directories'; root sh -c {shlex.quote(DIRECTORIES)} sh "
            "$(printf '%s\\n' \"$units\" | sed -n 's/^MainPID=//p')"
        )
    if agent:
        script.append(f"echo '@look'; {agent} <&3; echo")
    if host == inventory.chief.host:
        script.append(STOPPED_SCRIPT)
        selection = shlex.quote(f"{inventory.shared_dir}/selection.json")
        look = drain_records.script_of_shared(inventory.shared_dir)
        look += f"; echo @selection; cat {selection} 2>/dev/null"
        by_files = script_of_files(inventory.shared_dir)
        chosen = f"{on_path('sh')} -c {shlex.quote(look)}; if [ $? = {HANGS} ]; then echo; echo @hangs; else echo"
        script += [chosen, STATUS, "fi"] if by_trainer else [by_files]
    return "\n".join(script)


def read_answer(inventory: Inventory, host: str, answer: Answer, observation: Observation, new_is_enough: bool) -> None:
    """Take into the observation what a host said."""
    parts = split_sections(answer.stdout)
    _read_host(inventory, host, parts, answer, observation)
    if _read_tasks(inventory, host, parts, answer, observation) and host == inventory.chief.host:
        _read_run(inventory, host, parts, answer, observation)
        if "run" not in parts and (run := read_files(parts, inventory.shared_dir)):
            observation.run = run if run.state != "new" or new_is_enough else None


def _read_host(
    inventory: Inventory, host: str, parts: Mapping[str, str], answer: Answer, observation: Observation
) -> None:
    observation.clocks[host] = float(parts.get("now") or 0)
    observation.releases[host] = parts.get("release", "").rpartition("/")[2] or None
    if parts.get("first-code", "0") != "0":
        first = Answer(parts.get("first", ""), code=int(parts["first-code"]))
        observation.failed[host] = describe_failure(first, inventory.shared_dir, host)
    if isinstance(look := load_json(parts.get("look", "")), dict):
        observation.looks[host] = look
    elif "look" in parts:
        observation.blind[host] = last_line(Answer(stderr=answer.stderr or "it ended without an answer"))
    if "settings" in parts:
        observation.settings[host] = parts["settings"]
    if "facts" in parts:
        observation.facts[host] = facts.parse(parts["facts"])
    observation.stopped = parts.get("stopped") or observation.stopped
    if note := load_json(parts.get("cluster", "")):
        observation.clusters[host] = note
    if parts.get("drain"):
        observation.drains[host] = drain_records.parse(parts["drain"]).get(host, {"host": host})
        observation.marked.add(host)
    for name, drain in drain_records.parse(parts.get("drains", "")).items():
        if name in inventory.everyone:
            observation.drains.setdefault(name, drain)


def _read_tasks(
    inventory: Inventory, host: str, parts: Mapping[str, str], answer: Answer, observation: Observation
) -> bool:
    """Take in what the host says of its tasks; returns whether systemd knows all of them, else it can't be asked."""
    units = parse_units(parts.get("units", ""))
    ports = {line.split()[3].rpartition(":")[2] for line in parts.get("ports", "").splitlines() if line.strip()}
    environments = parts.get("environments", "").split()
    observation.services[host] = [units[name] for name in inventory.services_on(host).values() if name in units]
    directories = dict(line.split(" ", 1) for line in parts.get("directories", "").splitlines() if " " in line)
    for task in inventory.tasks_on(host):
        if task.unit not in units:
            said = Answer(shown) if (shown := parts.get("units", "")) else answer
            observation.unreachable[host] = f"{NO_SYSTEMD} about {task.unit}: {last_line(said)}"
            return False
        observation.units[task.name] = units[task.unit]
        observation.configured[task.name] = f"{task.name}.env" in environments
        if task.port is not None:
            observation.listening[task.name] = str(task.port) in ports
        release = _RELEASE.search(directories.get(str(units[task.unit].pid), ""))
        if release:
            observation.running[task.name] = release[1]
    return True


def read_status(inventory: Inventory, host: str, answer: Answer, observation: Observation) -> None:
    """Take into the observation what the trainer said of the run."""
    _read_run(inventory, host, {"run": "", **split_sections(answer.stdout)}, answer, observation)


def _read_run(
    inventory: Inventory, host: str, parts: Mapping[str, str], answer: Answer, observation: Observation
) -> None:
    selection = load_json(parts.get("selection", ""))
    if isinstance(selection, dict):
        observation.selection = selection
    run = load_json(parts.get("run", ""))
    if "hangs" in parts:
        observation.run_error = ClusterTrouble(describe_hang(inventory.shared_dir, host))
    elif isinstance(run, dict):
        observation.run = parse_run(run)
    elif observation.releases[host] and "run" in parts:
        mistake = parts.get("run-code") == str(USER_ERROR)
        kind = OperatorMistake if mistake else ClusterTrouble
        observation.run_error = kind(f"the trainer on {host} can't tell its run: {last_line(answer)}")


def split_sections(text: str) -> dict[str, str]:
    """Cut a script's output at its lines `@name`."""
    parts: dict[str, list[str]] = {}
    for line in text.split("\n"):  # a status may hold what splitlines() takes for the end of a line
        if line.startswith("@"):
            parts[line[1:]] = current = []
        elif parts:
            current.append(line)
    return {name: "\n".join(lines).strip() for name, lines in parts.items()}


def load_json(text: str) -> Any:
    """Parse JSON; None for what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def describe_failure(answer: Answer, shared_dir: str, host: str) -> str:
    """Say why a script that may use the shared path has failed."""
    return describe_hang(shared_dir, host) if answer.code == HANGS else last_line(answer)


def last_line(answer: Answer) -> str:
    lines = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"exit code {answer.code}"
    if last.startswith("sudo:"):
        last += ". Give ansible_user sudo without a password"
    return last


def reject_bad_answers(answers: Mapping[str, Answer], what: str) -> None:
    """Raise HostsUnreachable where hosts did not answer, and ClusterTrouble where scripts failed."""
    failed = [f"{host}: {what}: {last_line(answer)}" for host, answer in answers.items() if answer.code]
    unreachable = {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}
    if unreachable:
        raise HostsUnreachable(unreachable, "\n".join(failed))
    if failed:
        raise ClusterTrouble("\n".join(failed))
