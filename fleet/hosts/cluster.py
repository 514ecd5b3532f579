"""The cluster as it is: ask every host at once what its tasks do, and tell it what they are to do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake, Trouble
from fleet.hosts import facts, host_scripts, journal
from fleet.hosts.agent_request import RECEIVE, feed
from fleet.hosts.journal import EVERY_LINE, JournalEntry, JournalQuery, reject_bad_journals
from fleet.hosts.lock import take_lock
from fleet.hosts.observation import (
    Observation,
    describe_failure,
    last_line,
    load_json,
    question,
    read_answer,
    read_status,
    reject_bad_answers,
)
from fleet.hosts.run import on_path
from fleet.hosts.ssh import ANSWER_SECONDS, Answer, Hosts
from fleet.hosts.units import Health
from fleet.site.inventory import Inventory
from fleet.site.topology import Task
from trainer.run.replaced import REPLACED

# The coordinator saves a checkpoint before it ends; its unit's TimeoutStopSec bounds that, not this.
STOP_SECONDS = 900
REPORT_SECONDS = 60.0
EXPORT_SECONDS = 1800
JOURNAL_LINES = 15
# The 16,000 files of an environment are compared, on a slow disk maybe.
LOOK_SECONDS = 300
# On the shared path: which release the hosts were switched to, and what the operator chose.
RELEASE, SELECTION = "release.json", "selection.json"


class Cluster:
    """An inventory's tasks on its hosts."""

    def __init__(self, inventory: Inventory, hosts: Hosts) -> None:
        self.inventory = inventory
        self.hosts = hosts
        self._work: str | None = None  # what the lock was taken for

    def observe(
        self,
        only: Iterable[str] | None = None,
        running: bool = False,
        settings: bool = False,
        looks: Mapping[str, Mapping[str, Any]] | None = None,
        by_trainer: bool = False,
        new_is_enough: bool = False,
        first: Mapping[str, str] | None = None,
        with_facts: bool = False,
        first_seconds: float = STOP_SECONDS,
    ) -> Observation:
        """Ask the hosts (all of them, or those named) for units, ports and release, the chief's host for the run.

        `running` asks for the release of each task's process too, which only root may see; `settings` for the digest
        of what the tasks are configured with; `looks` for what fleet/hosts/agent.py is to look at on a host.
        The run is read from its files where they say all of it. `by_trainer` asks the trainer in any case, which
        refuses wrong settings. With `new_is_enough` it is not asked what a run without a status will train.
        `first` are scripts that hosts run before they look, with `first_seconds` for both; `failed` has why one did
        not do it.
        `with_facts` asks each host for its load, memory, disks and GPUs too.
        """
        asked = list(self.inventory.hosts if only is None else only)
        agents = {host: self._agent(host) for host in looks or {}}
        scripts = {
            host: question(self.inventory, host, running, settings, by_trainer, agents.get(host)) for host in asked
        }
        if with_facts:
            look = facts.script(self.inventory.shared_dir)
            scripts = {host: f"{script}\n{look}" for host, script in scripts.items()}
        answers = self._run(scripts, looks or {}, first or {}, first_seconds)
        observation = Observation()
        for host, answer in answers.items():
            if answer.unreachable:
                observation.unreachable[host] = answer.unreachable
            else:
                read_answer(self.inventory, host, answer, observation, new_is_enough)
        self._observe_run(observation)
        observation.name_drained(self.inventory)
        return observation

    def _run(
        self,
        scripts: dict[str, str],
        looks: Mapping[str, Mapping[str, Any]],
        first: Mapping[str, str],
        first_seconds: float,
    ) -> dict[str, Answer]:
        """Run a script on each host; with what fleet/hosts/agent.py is to look at, or what hosts run before."""
        if looks:
            return self.hosts.run(scripts, LOOK_SECONDS, {host: feed(asked) for host, asked in looks.items()})
        if first:
            ending = "2>&1; code=$?; echo; echo '@first-code'; echo $code"
            scripts |= {host: f"echo '@first'; {{ {each}; }} {ending}\n{scripts[host]}" for host, each in first.items()}
            return self.hosts.run(scripts, first_seconds)
        return self.hosts.run(scripts)

    def _observe_run(self, observation: Observation) -> None:
        """Ask the trainer of the run, where its files don't say all of it."""
        chief = self.inventory.chief.host
        if observation.releases.get(chief) and observation.run is None and observation.run_error is None:
            answer = self.hosts.run({chief: host_scripts.STATUS})[chief]
            if answer.unreachable:
                observation.unreachable[chief] = answer.unreachable
            else:
                read_status(self.inventory, chief, answer, observation)

    def act(self, asked: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        """Have fleet/hosts/agent.py do something on hosts, all at once; returns what it says of each.

        Raises HostsUnreachable, and ClusterTrouble where it can't be run.
        """
        scripts = {host: self._agent(host) for host in asked}
        answers = self.hosts.run(scripts, seconds, {host: feed(each) for host, each in asked.items()})
        reject_bad_answers(answers, "it can't be asked")
        return {host: json.loads(answer.stdout) for host, answer in answers.items()}

    def _agent(self, host: str) -> str:
        python = self.inventory.variables[host].get("ansible_python_interpreter") or "/usr/bin/python3"
        return f"root {shlex.quote(str(python))} -c {shlex.quote(RECEIVE)}"

    def acquire_start_lock(self, what: str, again: bool = False) -> str | None:
        """Have no other change begin until `release_start_lock`, or until this process or its connection ends.

        `again` is for what had it before. Raises OthersAtWork where another is at work. Returns why none is kept away,
        where the host can't do it.
        """
        why = take_lock(self.hosts, self.inventory.chief.host, what, again)
        self._work = self._work if why else what
        return why

    def keep_start_lock(self) -> bool:
        """Keep others away still, or again where the connection was lost; returns whether they are.

        Raises OthersAtWork where another has begun meanwhile.
        """
        if self._work and not self.hosts.is_holding():
            self.hosts.let_go()
            self.acquire_start_lock(self._work, again=True)
        return self.hosts.is_holding()

    def reject_when_others_may_start(self) -> None:
        """Raise ClusterTrouble where `acquire_start_lock` keeps no start away any more."""
        if not self.hosts.is_holding():
            raise ClusterTrouble(
                f"the connection to {self.inventory.chief.host} that kept other starts away is lost, and one may have "
                "begun meanwhile. Look: fab status. Then start again"
            )

    def release_start_lock(self) -> None:
        """Let others start, which `acquire_start_lock` kept from it."""
        self._work = None
        self.hosts.let_go()

    def start(self, tasks: Sequence[Task]) -> None:
        """Enable and start units on all hosts at once, without waiting for them; one that runs is left alone.

        One that is parked goes on.
        """
        names = " ".join(task.name for task in tasks)
        self._systemctl(
            tasks,
            f"root sh -c {_quoted(host_scripts.FORGET_STARTED)} sh {names}; "
            "root systemctl reset-failed {units} 2>/dev/null; "
            "root systemctl enable --quiet {units} && root systemctl start --no-block {units} && "
            f"root sh -c {_quoted(host_scripts.GO_ON)} sh {{units}}",
        )

    def cool(self, tasks: Sequence[Task], start: str) -> None:
        """Stop what a start has had import TensorFlow and wait, and has not had go on, nor lets begin any more."""
        self._systemctl(tasks, f"root sh -c {_quoted(host_scripts.COOL)} sh {start} {{units}}")

    def park(self, tasks: Sequence[Task]) -> None:
        """Stop units on all hosts at once and wait until they are down; supervisors that can stay up, with no child.

        A supervisor goes on with `start`, in the release that is current then. By itself it does so after 15 minutes.
        """
        self._systemctl(tasks, f"root sh -c {_quoted(host_scripts.PARK)} sh {{units}}", STOP_SECONDS)

    def stop(self, tasks: Sequence[Task]) -> None:
        """Stop units on all hosts at once and wait until they are down."""
        self._systemctl(tasks, "root systemctl stop {units}", STOP_SECONDS)

    def disable(self, tasks: Sequence[Task]) -> None:
        """Keep units down at the host's next boot, and forget why they failed."""
        self._systemctl(tasks, f"root sh -c {_quoted(host_scripts.DISABLE)} sh {{units}}")

    def take_down(self, tasks: Sequence[Task], all_of_them: Sequence[Task]) -> Observation:
        """Stop units and keep `all_of_them` down at the next boot, on all hosts at once; returns what is seen then."""
        stopping, disabling = _by_host(tasks), _by_host(all_of_them)
        first = {}
        for host in self.inventory.hosts:
            stop, off = (" ".join(task.unit for task in some.get(host, ())) for some in (stopping, disabling))
            script = f"systemctl stop {stop}; stopped=$?; " if stop else "stopped=0; "
            script += f"{host_scripts.DISABLE} && exit $stopped" if off else "exit $stopped"
            first[host] = f"root sh -c {shlex.quote(script)} sh {off}"
        return self.observe(first=first)

    def save_state(self, hosts: Iterable[str], beside: str) -> bool:
        """Have hosts keep what a start changes: the current release, the tasks' files and units, and which run.

        Then the chief's host runs a script `beside`; returns whether that was done.
        """
        scripts = dict.fromkeys(hosts, f"root sh -c {shlex.quote(host_scripts.SAVE_STATE)}")
        chief = self.inventory.chief.host
        if chief in scripts:
            scripts[chief] += f" && {{ {{ {beside}; }} >/dev/null 2>&1 || echo undone; }}"
        answers = self.hosts.run(scripts)
        reject_bad_answers(answers, f"{host_scripts.BEFORE} can't be written")
        return chief in answers and answers[chief].stdout.split()[-1:] != ["undone"]

    def restore_state(self, hosts: Iterable[str]) -> None:
        """End what runs on hosts, and bring back the release, files and units that they remember."""
        answers = self.hosts.run(
            dict.fromkeys(hosts, f"root sh -c {shlex.quote(host_scripts.RESTORE_STATE)}"), STOP_SECONDS
        )
        reject_bad_answers(answers, f"what {host_scripts.BEFORE} holds can't be put back")

    def restart_previous(self, hosts: Iterable[str]) -> None:
        """Start what hosts remember as running, whether the inventory knows it still or not."""
        script = f"root systemctl start --no-block $(cat {host_scripts.BEFORE}/running) 2>&1"
        answers = self.hosts.run(dict.fromkeys(hosts, f"if [ -s {host_scripts.BEFORE}/running ]; then {script}; fi"))
        reject_bad_answers(answers, "what ran before can't be started")

    def publish_release(self, release: str) -> None:
        """Have every task know which release the cluster runs; a host that has another one doesn't join."""
        if self.inventory.is_shared:
            self._write_shared(RELEASE, {"release": release})

    def replace_tasks(self, moved: Mapping[str, tuple[set[str], set[str]]]) -> None:
        """Have tasks not join on an old machine; `moved` has by task the names and addresses of the old and the new."""
        if not (self.inventory.is_shared and moved):
            return
        path = f"{self.inventory.shared_dir}/{REPLACED}"
        look = shlex.quote(f"[ ! -e {shlex.quote(path)} ] || cat {shlex.quote(path)}")  # it may be shut to others
        record = load_json(self.on_shared(f"{on_path('sh')} -c {look}", f"{path} can't be read").stdout) or {}
        for name, (old, new) in moved.items():
            record[name] = sorted({*record.get(name, []), *old} - new)
        self._write_shared(REPLACED, record)

    def select(self, selection: Mapping[str, Any]) -> None:
        """Write what the operator chose, which every task lays over run.json; nothing removes the file."""
        self._write_shared(SELECTION, selection)

    def _write_shared(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a record to the shared path."""
        self.on_shared(self.script_of(name, record), f"{self.inventory.shared_dir}/{name} can't be written")

    def script_of(self, name: str, record: Mapping[str, Any]) -> str:
        """Return a script that writes a record to the shared path; it removes one that is empty."""
        path = f"{self.inventory.shared_dir}/{name}"
        if not record:
            return on_path(f"rm -f {shlex.quote(path)}")
        place, file = shlex.quote(path.rpartition("/")[0]), shlex.quote(path)
        made = f"mkdir -p {place} && " if "/" in name else ""
        # Flushed before it takes the old one's place: a power cut leaves the one or the other, never half a file.
        write = f"{made}cat > {file}.new && sync {file}.new && mv {file}.new {file}"
        return (
            f"printf '%s\\n' {shlex.quote(json.dumps(dict(record)))} | "
            f"{on_path('sh')} -c {shlex.quote('umask 022; ' + write)}"
        )

    def on_shared(self, script: str, trouble: str) -> Answer:
        """Run a script of `on_path` on one host that has the shared path: the chief's, else another that answers."""
        away: dict[str, str] = {}
        for host in self._hosts_of_path():  # any host that answers can write where they share the path
            answer = self.hosts.run({host: f"{host_scripts.REMOUNT}; {script}"})[host]
            if answer.unreachable:
                away[host] = answer.unreachable
            elif answer.code:
                why = describe_failure(answer, self.inventory.shared_dir, host)
                raise ClusterTrouble(f"{trouble} on {host}: {why}")
            else:
                return answer
        raise HostsUnreachable(away)

    def _hosts_of_path(self) -> list[str]:
        """Return the hosts that have the runs, the chief's first."""
        chief = self.inventory.chief.host
        return list(dict.fromkeys([chief, *self.inventory.hosts])) if self.inventory.is_shared else [chief]

    def list_runs(self) -> list[dict[str, Any]]:
        """Ask the trainer for the runs below the shared path."""
        return cast(list[dict[str, Any]], self._read("runs", list, "list the runs"))

    def list_checkpoints(self, run: str | None = None) -> list[dict[str, Any]]:
        """Ask the trainer for a run's checkpoints, by default the chosen run's."""
        return cast(list[dict[str, Any]], self._ask_trainer("checkpoints", ["--run", run] if run else [], list))

    def make_report(self, runs: Sequence[str]) -> dict[str, Any]:
        """Have the trainer draw the page of the chosen run, or of these side by side; returns names and HTML."""
        words = [word for run in runs for word in ("--run", run)]
        return cast(dict[str, Any], self._ask_trainer("report", words, dict, seconds=REPORT_SECONDS))

    def begin(self, run: str, source: str, program: str | None, program_args: Mapping[str, Any]) -> bool:
        """Have the trainer make a new run of a checkpoint, RUN@STEP; whether its directory was made for it."""
        words = ["--run", run, "--from", source, *(["--program", program] if program else [])]
        words += [word for name, value in program_args.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        return bool(self._ask_trainer("begin", words, dict, f"{host_scripts.REMOUNT}; ").get("made"))

    def forget(self, run: str) -> None:
        """Remove a run that `begin` has made and no task has seen."""
        path = f"{self.inventory.shared_dir}/runs/{run}"
        self.on_shared(on_path(f"rm -rf {shlex.quote(path)}"), f"{path} can't be removed")

    def export_run(self, run: str | None, changes: bool) -> dict[str, Any]:
        """Have the trainer export a run's newest checkpoint, or what has changed in it; returns step and place."""
        words = [*(["--run", run] if run else []), *(["--changes"] if changes else [])]
        return cast(
            dict[str, Any], self._ask_trainer("export", words, dict, f"{host_scripts.REMOUNT}; ", EXPORT_SECONDS)
        )

    def upkeep(self, verb: str, words: Sequence[str], hear: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Have a host that shares the runs' path work on whole runs; returns the answer of `python -m trainer VERB`.

        `hear` is given each answer in between, such as {"done": bytes}. The work ends with this connection.

        Raises OperatorMistake for what the trainer calls an error, ClusterTrouble and HostsUnreachable.
        """
        away: dict[str, str] = {}
        for host in self._hosts_of_path():
            records: list[dict[str, Any]] = []
            other: list[str] = []

            def read(_: str, line: str, records: list[dict[str, Any]] = records, other: list[str] = other) -> None:
                record = load_json(line)
                if not isinstance(record, dict):
                    other.append(line)
                elif record.keys() == {"done"}:
                    hear(record)
                else:
                    records.append(record)

            script = f"{host_scripts.REMOUNT}; {host_scripts.TRAINER.format(verb=verb)} {shlex.join(words)}"
            answer = self.hosts.follow({host: script}, read)[host]
            if answer.unreachable:
                away[host] = answer.unreachable
                continue
            if answer.code == 0 and records:
                return {**records[-1], "host": host}
            last = next((line.strip() for line in reversed(other) if line.strip()), f"exit code {answer.code}")
            raise self._refusal(host, verb, last)
        raise HostsUnreachable(away)

    def _ask_trainer(
        self, verb: str, words: Sequence[str], kind: type, first: str = "", seconds: float = ANSWER_SECONDS
    ) -> Any:
        """Run one of the trainer's commands on the chief's host; what it calls an error is the operator's."""
        host = self.inventory.chief.host
        answer = self._ask(host, f"{first}{host_scripts.TRAINER.format(verb=verb)} {shlex.join(words)}", seconds)
        parsed = load_json(answer.stdout)
        if answer.code == 0 and isinstance(parsed, kind):
            return parsed
        raise self._refusal(host, verb, last_line(answer))

    def _refusal(self, host: str, verb: str, last: str) -> FleetError:
        """Return what the trainer's last line says: what it calls an error is the operator's."""
        if last.startswith("error: "):
            return OperatorMistake(last.removeprefix("error: "))
        self.reject_when_not_installed(self.observe([host]))
        return ClusterTrouble(f"the trainer on {host} can't do `{verb}`: {last}")

    def read_sweep(self, name: str | None = None) -> dict[str, Any] | None:
        """Ask the trainer for a sweep: the one of this name, the selected or the last one; None where there is none."""
        verb = f"sweep --name {shlex.quote(name)}" if name else "sweep"
        return cast(dict[str, Any] | None, self._read(verb, dict, "tell the sweep", "there is no sweep"))

    def _read(self, verb: str, kind: type, deed: str, none: str | None = None) -> Any:
        """Run one of the trainer's commands that only reads; None where it says `none`."""
        host = self.inventory.chief.host
        answer = self._ask(host, host_scripts.TRAINER.format(verb=verb))
        if none is not None and none in answer.stderr:
            return None
        parsed = load_json(answer.stdout)
        if answer.code or not isinstance(parsed, kind):
            self.reject_when_not_installed(self.observe([host]))
            raise ClusterTrouble(f"the trainer on {host} can't {deed}: {last_line(answer)}")
        return parsed

    def ask_queue(self, action: str, words: Sequence[str]) -> dict[str, Any]:
        """Have the trainer list or change the queue: `list`, `add`, `move` or `remove`; returns what it says."""
        return cast(dict[str, Any], self._ask_trainer(f"queue {action}", words, dict, f"{host_scripts.REMOUNT}; "))

    def read_journal(
        self, tasks: Sequence[Task], lines: int, show: Callable[[JournalEntry], None], chosen: JournalQuery = EVERY_LINE
    ) -> None:
        """Hand over the last entries of each task's journal, in the order of time."""
        scripts = {
            host: "\n".join(journal.script([task], lines, chosen) for task in mine)
            for host, mine in _by_host(tasks).items()
        }
        answers = self.hosts.run(scripts)
        texts = [text for answer in answers.values() for text in answer.stdout.split("\n")]
        entries = [
            entry for text in texts if (entry := journal.parse(text)) and entry.run in (None, chosen.run or entry.run)
        ]
        for entry in sorted(entries, key=lambda entry: entry.time):
            show(entry)
        reject_bad_journals(answers)

    def follow_journal(
        self, tasks: Sequence[Task], lines: int, show: Callable[[JournalEntry], None], chosen: JournalQuery = EVERY_LINE
    ) -> None:
        """Hand over entries as the journals grow, until the operator leaves or the hosts are gone."""

        def read(host: str, text: str) -> None:
            entry = journal.parse(text)
            if entry is None and text:
                entry = JournalEntry(0.0, host, text)  # journalctl's own words
            if entry and entry.run in (None, chosen.run or entry.run):
                show(entry)

        scripts = {host: journal.script(mine, lines, chosen, follow=True) for host, mine in _by_host(tasks).items()}
        reject_bad_journals(self.hosts.follow(scripts, read))

    def trouble(self, found: Mapping[Task, str]) -> list[Trouble]:
        """Add to what is wrong with each task the last lines of its journal."""
        lines: dict[str, list[str]] = {task.name: [] for task in found}
        scripts = {
            host: "\n".join(journal.script([task], JOURNAL_LINES) for task in mine)
            for host, mine in _by_host(list(found)).items()
        }
        for answer in self.hosts.run(scripts).values():
            for text in answer.stdout.split("\n"):
                entry = journal.parse(text)
                if entry and entry.task in lines:
                    lines[entry.task] += entry.message.splitlines()
        return [Trouble(task.name, task.host, what, lines[task.name][-JOURNAL_LINES:]) for task, what in found.items()]

    def reject_when_not_installed(self, observation: Observation) -> None:
        """Raise OperatorMistake when a host that answered lacks the release or the unit."""
        if without := observation.bare(self.inventory):
            raise OperatorMistake(
                f"nothing is installed on {', '.join(without)}: there is no {host_scripts.CURRENT}. "
                "Run `ansible-playbook site.yml` first"
            )
        for task in self.inventory.tasks:
            unit = observation.units.get(task.name)
            if unit and unit.health is Health.ABSENT:
                raise OperatorMistake(
                    f"{task.host} isn't set up: there is no trainer@.service. Run `ansible-playbook site.yml` first"
                )

    def reject_when_not_configured(self, observation: Observation) -> None:
        """Raise OperatorMistake when a host that answered lacks a task's environment; shipping writes it."""
        for name, configured in observation.configured.items():
            if not configured:
                raise OperatorMistake(
                    f"{self.inventory.task(name).host} isn't set up for {name}: there is no /etc/trainer/{name}.env. "
                    "`fab start-cluster` writes it, and `ansible-playbook site.yml`"
                )

    def _systemctl(self, tasks: Sequence[Task], script: str, timeout: float = ANSWER_SECONDS) -> None:
        scripts = {
            host: script.format(units=" ".join(task.unit for task in mine)) for host, mine in _by_host(tasks).items()
        }
        reject_bad_answers(self.hosts.run(scripts, timeout), "systemctl failed")

    def _ask(self, host: str, script: str, seconds: float = ANSWER_SECONDS) -> Answer:
        answer = self.hosts.run({host: script}, seconds)[host]
        if answer.unreachable:
            raise HostsUnreachable({host: answer.unreachable})
        return answer


def _quoted(script: str) -> str:
    """Return a script as one word of a text that is formatted."""
    return shlex.quote(script).replace("{", "{{").replace("}", "}}")


def _by_host(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    hosts: dict[str, list[Task]] = {}
    for task in tasks:
        hosts.setdefault(task.host, []).append(task)
    return hosts
