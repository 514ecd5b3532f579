"""The cluster as it is: ask every host at once what its tasks do, and tell it what they shall do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from fleet import journal
from fleet.asked import RECEIVE, feed
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake, Trouble
from fleet.journal import EVERY_LINE, Chosen, Entry
from fleet.lock import take_lock
from fleet.run import AS_TRAINER, SETTINGS, Run, parse_run, read_files, script_of_files
from fleet.site.inventory import Inventory, Task
from fleet.ssh import ANSWER_SECONDS, Answer, Hosts
from fleet.units import PROPERTIES, USER_ERROR, Health, Unit, parse_units

CURRENT = "/opt/trainer/current"
# The coordinator saves a checkpoint before it ends; its unit's TimeoutStopSec bounds that, not this.
STOP_SECONDS = 900
REPORT_SECONDS = 60.0
EXPORT_SECONDS = 1800
JOURNAL_LINES = 15
# 28,000 files of an environment are compared, on a slow disk maybe.
LOOK_SECONDS = 300
# A process keeps the directory that `current` led to when it began; the kernel marks one that is gone "(deleted)".
_RELEASE = re.compile(r"/releases/([^/ ]+)")

# As each start of a task does: where none ran, nobody has seen that a handle is stale. Hosts with a mount of ours only.
_REMOUNT = "if systemctl cat psfleet-remount >/dev/null 2>&1; then root systemctl start psfleet-remount; fi"
_TRAINER = f"cd {CURRENT} && {AS_TRAINER} env/bin/python -m trainer {{verb}} --json --settings {SETTINGS}"

_STATUS = (
    f"if [ -e {CURRENT} ]; then echo '@run'; {_TRAINER.format(verb='status')}\n"
    "code=$?; echo; echo '@run-code'; echo $code; fi"
)

# What a planned reboot has stopped, and whom the coordinator lets go of (roles/trainer/tasks/leave.yml). Who starts or
# stops the tasks by hand has decided anew.
_FORGET_DRAINED = "rm -rf /opt/trainer/drained /run/psfleet-leaving"
_DISABLE = f'{_FORGET_DRAINED}; systemctl reset-failed "$@" 2>/dev/null; systemctl disable --quiet "$@"'
BEFORE = "/opt/trainer/before"
_WANTED = "etc/systemd/system/multi-user.target.wants/trainer@*.service"
# What differs from task to task, and which secrets it loads; in etc/trainer they lie themselves.
_DROP_INS = " ".join(f"etc/systemd/system/trainer@*.service.d/psfleet-{name}.conf" for name in ("task", "secrets"))
# Who may come in to the tasks, and whom they speak with: all that roles/firewall writes.
_TABLE = "var/lib/psfleet/firewall.nft"
_WALLS = (
    f"{_TABLE} etc/psfleet/firewall.nft usr/local/sbin/psfleet-firewall etc/systemd/system/*.service.d/firewall.conf "
    "etc/systemd/system/nftables.service.d/psfleet.conf etc/systemd/system/psfleet-firewall.service "
    "etc/systemd/system/sysinit.target.wants/psfleet-firewall.service"
)
# Of all that a start may change beside the release, but for what only its proof reads.
DIGEST = (
    f"cd /\nfind etc/trainer etc/systemd/system/trainer@.service {_DROP_INS} {_WALLS} -path etc/trainer/secrets-coming "
    "-prune -o -type f -exec sha256sum {} + 2>/dev/null | sort | sha256sum"
)
REMEMBER = f"""set -e
umask 077
rm -rf {BEFORE}.new
mkdir -p {BEFORE}.new
cd /
ls -d {CURRENT[1:]} etc/trainer etc/systemd/system/trainer@.service {_WANTED} {_DROP_INS} {_WALLS} \\
  >{BEFORE}.new/names 2>/dev/null || true
tar -cf {BEFORE}.new/files.tar -T {BEFORE}.new/names
systemctl list-units --plain --no-legend --state=active,activating,reloading "trainer@*.service" |
  cut -d" " -f1 >{BEFORE}.new/running
chmod go+rx {BEFORE}.new
chmod go+r {BEFORE}.new/running  # the archive has secrets
rm -rf {BEFORE}
mv {BEFORE}.new {BEFORE}
"""
PUT_BACK = f"""set -e
tar -tf {BEFORE}/files.tar >/dev/null
systemctl stop "trainer@*.service"
systemctl reset-failed "trainer@*.service" 2>/dev/null || true
cd /
rm -rf etc/trainer {_WANTED} {_DROP_INS} {_WALLS} run/psfleet-firewall/tried.nft
tar -xf {BEFORE}/files.tar
systemctl daemon-reload
if [ -e {_TABLE} ]; then
  systemctl restart psfleet-firewall.service
elif nft list table inet psfleet >/dev/null 2>&1; then
  systemctl stop psfleet-firewall.service 2>/dev/null || true
  nft delete table inet psfleet
  rm -rf run/psfleet-firewall
fi
"""


_SHOW = 'show() { systemctl show --value --property="$1" "$unit"; }; '
# A supervisor that heeds SIGHUP (bit 0 of SigCgt) ends its child and keeps what it has imported. One that is not up
# yet, or is of an older kit, is stopped; so is one that ended meanwhile, or whose child did not end in five minutes.
_PARK = (
    _SHOW
    + """waits= cold= until=$(($(date +%s) + 300))
for unit; do
  main=$(show MainPID)
  if [ "$(show ActiveState)" = active ] && grep -qs "^SigCgt:.*[13579bdf]$" "/proc/$main/status" && kill -HUP "$main"
  then waits="$waits $unit=$main"
  else cold="$cold $unit"
  fi
done
[ -z "$cold" ] || systemctl stop $cold || exit
cold=
for each in $waits; do
  unit=${each%=*} main=${each##*=}
  while :; do
    case $(show StatusText) in parked*) break ;; esac
    if [ "$(show MainPID)" != "$main" ] || [ "$(date +%s)" -gt "$until" ]; then cold="$cold $unit" && break; fi
    sleep 0.05
  done
done
[ -z "$cold" ] || systemctl stop $cold"""
)
_GO_ON = (
    _SHOW
    # Also one whose child has still to end: bit 9 of SigCgt says that it heeds SIGUSR1.
    + 'for unit; do main=$(show MainPID); grep -qs "^SigCgt:.*[2367abef]..$" "/proc/$main/status" && '
    + 'kill -USR1 "$main" 2>/dev/null; done; true'
)

# Of each main process: what works is the child that it has forked.
_DIRECTORIES = (
    "for pid; do read child rest 2>/dev/null </proc/$pid/task/$pid/children; "
    'echo "$pid $(readlink /proc/${child:-$pid}/cwd)"; child=; done'
)


@dataclass
class Observation:
    """What the hosts said. A task on a host that said nothing has no unit here."""

    units: dict[str, Unit] = field(default_factory=dict)  # by task name
    listening: dict[str, bool] = field(default_factory=dict)  # by task name, of the tasks that have a port
    configured: dict[str, bool] = field(default_factory=dict)  # by task name: has it an environment file?
    releases: dict[str, str | None] = field(default_factory=dict)  # by host
    running: dict[str, str] = field(default_factory=dict)  # by task name: its process's release, where it was asked for
    settings: dict[str, str] = field(default_factory=dict)  # by host, where asked for: a digest of the configuration
    looks: dict[str, Any] = field(default_factory=dict)  # by host: what fleet/agent.py says, where it was asked
    failed: dict[str, str] = field(default_factory=dict)  # by host: why what it was to do first was not done
    clocks: dict[str, float] = field(default_factory=dict)  # by host: seconds since 1970
    unreachable: dict[str, str] = field(default_factory=dict)  # by host: why
    run: Run | None = None
    run_error: FleetError | None = None  # why there is no run
    selection: dict[str, Any] = field(default_factory=dict)

    def take(self, other: Observation) -> None:
        """Take what another look has said; what it doesn't speak of stays."""
        for each in fields(self):
            known, said = getattr(self, each.name), getattr(other, each.name)
            if isinstance(known, dict):
                known |= said
            elif said is not None:
                setattr(self, each.name, said)

    @property
    def release(self) -> str | None:
        """The release that every host has, or None when they differ or have none."""
        found = set(self.releases.values())
        return found.pop() if len(found) == 1 else None


class Cluster:
    """An inventory's tasks on its hosts."""

    def __init__(self, inventory: Inventory, hosts: Hosts) -> None:
        self.inventory = inventory
        self.hosts = hosts

    def observe(
        self,
        only: Iterable[str] | None = None,
        running: bool = False,
        settings: bool = False,
        looks: Mapping[str, Mapping[str, Any]] | None = None,
        by_trainer: bool = False,
        new_is_enough: bool = False,
        first: Mapping[str, str] | None = None,
    ) -> Observation:
        """Ask the hosts (all of them, or those named) for units, ports and release, the chief's host for the run.

        `running` asks for the release of each task's process too, which only root may see; `settings` for the digest
        of what the tasks are configured with; `looks` for what fleet/agent.py is to look at on a host.
        The run is read from its files where they say all of it. `by_trainer` asks the trainer in any case, which
        refuses wrong settings. With `new_is_enough` it is not asked what a run will train that has told nothing yet.
        `first` are scripts that hosts run before they look; `failed` has why one did not do it.
        """
        asked = list(self.inventory.hosts if only is None else only)
        scripts = {host: self._observe_script(host, running, settings, by_trainer) for host in asked}
        if looks:
            # First: it reads all of standard input.
            scripts |= {host: f"echo '@look'; {self._agent(host)}; echo\n{scripts[host]}" for host in looks}
            answers = self.hosts.run(scripts, LOOK_SECONDS, {host: feed(asked) for host, asked in looks.items()})
        elif first:
            told = "2>&1; code=$?; echo; echo '@first-code'; echo $code"
            scripts |= {host: f"echo '@first'; {{ {each}; }} {told}\n{scripts[host]}" for host, each in first.items()}
            answers = self.hosts.run(scripts, STOP_SECONDS)
        else:
            answers = self.hosts.run(scripts)
        observation = Observation()
        for host, answer in answers.items():
            if answer.unreachable:
                observation.unreachable[host] = answer.unreachable
            else:
                self._read(host, answer, observation, new_is_enough)
        chief = self.inventory.chief.host
        if observation.releases.get(chief) and observation.run is None and observation.run_error is None:
            said = self.hosts.run({chief: _STATUS})[chief]
            if said.unreachable:
                observation.unreachable[chief] = said.unreachable
            else:
                self._read_run(chief, {"run": "", **_split_sections(said.stdout)}, said, observation)
        return observation

    def act(self, asked: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        """Have fleet/agent.py do something on hosts, all at once; returns what it says of each.

        Raises HostsUnreachable, and ClusterTrouble where it can't be run.
        """
        scripts = {host: self._agent(host) for host in asked}
        answers = self.hosts.run(scripts, seconds, {host: feed(each) for host, each in asked.items()})
        _refuse_bad_answers(answers, "it can't be asked")
        return {host: json.loads(answer.stdout) for host, answer in answers.items()}

    def _agent(self, host: str) -> str:
        python = self.inventory.variables[host].get("ansible_python_interpreter") or "/usr/bin/python3"
        return f"root {shlex.quote(str(python))} -c {shlex.quote(RECEIVE)}"

    def keep_starts_away(self, what: str = "start") -> None:
        """Have no other start or drill begin until `let_starts_in`, or until this process or its connection ends.

        Raises OperatorMistake where another is at work. A chief's host that doesn't answer keeps nobody away.
        """
        take_lock(self.hosts, self.inventory.chief.host, what)

    def refuse_when_others_may_start(self) -> None:
        """Raise ClusterTrouble where `keep_starts_away` keeps nobody away any more."""
        if not self.hosts.is_holding():
            raise ClusterTrouble(
                f"the connection to {self.inventory.chief.host} that kept other starts away is lost, and one may have "
                "begun meanwhile. Look: fab status. Then start again"
            )

    def let_starts_in(self) -> None:
        """Let others start, which `keep_starts_away` kept from it."""
        self.hosts.let_go()

    def start(self, tasks: Sequence[Task]) -> None:
        """Enable and start units on all hosts at once, without waiting for them; one that runs is left alone.

        One that is parked goes on.
        """
        self._systemctl(
            tasks,
            f"root {_FORGET_DRAINED}; root systemctl reset-failed {{units}} 2>/dev/null; "
            "root systemctl enable --quiet {units} && root systemctl start --no-block {units} && "
            f"root sh -c {_quoted(_GO_ON)} sh {{units}}",
        )

    def park(self, tasks: Sequence[Task]) -> None:
        """Stop units on all hosts at once and wait until they are down; supervisors that can stay up, with no child.

        A supervisor goes on with `start`, in the release that is current then. By itself it does so after 15 minutes.
        """
        self._systemctl(tasks, f"root sh -c {_quoted(_PARK)} sh {{units}}", STOP_SECONDS)

    def stop(self, tasks: Sequence[Task]) -> None:
        """Stop units on all hosts at once and wait until they are down."""
        self._systemctl(tasks, "root systemctl stop {units}", STOP_SECONDS)

    def disable(self, tasks: Sequence[Task]) -> None:
        """Keep units down at the host's next boot, and forget why they failed."""
        self._systemctl(tasks, f"root sh -c {_quoted(_DISABLE)} sh {{units}}")

    def take_down(self, tasks: Sequence[Task], all_of_them: Sequence[Task]) -> Observation:
        """Stop units and keep `all_of_them` down at the next boot, on all hosts at once; returns what is seen then."""
        stopping, disabling = _by_host(tasks), _by_host(all_of_them)
        first = {}
        for host in self.inventory.hosts:
            stop, off = (" ".join(task.unit for task in some.get(host, ())) for some in (stopping, disabling))
            script = f"systemctl stop {stop}; stopped=$?; " if stop else "stopped=0; "
            script += f"{_DISABLE} && exit $stopped" if off else "exit $stopped"
            first[host] = f"root sh -c {shlex.quote(script)} sh {off}"
        return self.observe(first=first)

    def remember(self, hosts: Iterable[str]) -> None:
        """Have hosts keep what a start changes: the current release, the tasks' files and units, and which run."""
        answers = self.hosts.run(dict.fromkeys(hosts, f"root sh -c {shlex.quote(REMEMBER)}"))
        _refuse_bad_answers(answers, f"{BEFORE} can't be written")

    def put_back(self, hosts: Iterable[str]) -> None:
        """End what runs on hosts, and bring back the release, files and units that they remember."""
        answers = self.hosts.run(dict.fromkeys(hosts, f"root sh -c {shlex.quote(PUT_BACK)}"), STOP_SECONDS)
        _refuse_bad_answers(answers, f"what {BEFORE} holds can't be put back")

    def start_again(self, hosts: Iterable[str]) -> None:
        """Start what hosts remember as running, whether the inventory knows it still or not."""
        script = f"root systemctl start --no-block $(cat {BEFORE}/running) 2>&1"
        answers = self.hosts.run(dict.fromkeys(hosts, f"if [ -s {BEFORE}/running ]; then {script}; fi"))
        _refuse_bad_answers(answers, "what ran before can't be started")

    def tell_release(self, release: str) -> None:
        """Have every task know which release the cluster runs; a host that has another one doesn't join."""
        if self.inventory.is_shared:
            self._write_shared("release.json", {"release": release})

    def select(self, selection: Mapping[str, Any]) -> None:
        """Write what the operator chose, which every task lays over run.json; nothing removes the file."""
        self._write_shared("selection.json", selection)

    def _write_shared(self, name: str, record: Mapping[str, Any]) -> None:
        path = f"{self.inventory.shared_dir}/{name}"
        # Flushed before it takes the old one's place: a power cut leaves the one or the other, never half a file.
        write = f"cat > {shlex.quote(path)}.new && sync {shlex.quote(path)}.new && mv {shlex.quote(path)}.new " + (
            shlex.quote(path)
        )
        script = (
            f"printf '%s\\n' {shlex.quote(json.dumps(dict(record)))} | "
            f"{AS_TRAINER} sh -c {shlex.quote('umask 022; ' + write)}"
        )
        if not record:
            script = f"{AS_TRAINER} rm -f {shlex.quote(path)}"
        self._on_shared(script, f"{path} can't be written")

    def _on_shared(self, script: str, trouble: str) -> None:
        chief = self.inventory.chief.host
        others = [host for host in self.inventory.hosts if host != chief] if self.inventory.is_shared else []
        away: dict[str, str] = {}
        for host in (chief, *others):  # any host that is there can write where they share the path
            answer = self.hosts.run({host: f"{_REMOUNT}; {script}"})[host]
            if answer.unreachable:
                away[host] = answer.unreachable
            elif answer.code:
                raise ClusterTrouble(f"{trouble} on {host}: {_last_line(answer)}")
            else:
                return
        raise HostsUnreachable(away)

    def list_runs(self) -> list[dict[str, Any]]:
        """Ask the trainer for the runs below the shared path."""
        host = self.inventory.chief.host
        answer = self._ask(host, _TRAINER.format(verb="runs"))
        runs = _load_json(answer.stdout)
        if answer.code or not isinstance(runs, list):
            self.refuse_when_not_installed(self.observe([host]))
            raise ClusterTrouble(f"the trainer on {host} can't list the runs: {_last_line(answer)}")
        return runs

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
        return bool(self._ask_trainer("begin", words, dict, f"{_REMOUNT}; ").get("made"))

    def forget(self, run: str) -> None:
        """Remove a run that `begin` has made and no task has seen."""
        path = f"{self.inventory.shared_dir}/runs/{run}"
        self._on_shared(f"{AS_TRAINER} rm -rf {shlex.quote(path)}", f"{path} can't be removed")

    def export_run(self, run: str | None) -> dict[str, Any]:
        """Have the trainer export the newest checkpoint of a run that has ended; returns step and place."""
        words = ["--run", run] if run else []
        return cast(dict[str, Any], self._ask_trainer("export", words, dict, f"{_REMOUNT}; ", EXPORT_SECONDS))

    def upkeep(self, verb: str, words: Sequence[str], hear: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Have a host that shares the runs' path work on whole runs; returns the answer of `python -m trainer VERB`.

        `hear` is given each answer in between, such as {"done": bytes}. The work ends with this connection.

        Raises OperatorMistake for what the trainer calls an error, ClusterTrouble and HostsUnreachable.
        """
        chief = self.inventory.chief.host
        others = [host for host in self.inventory.hosts if host != chief] if self.inventory.is_shared else []
        away: dict[str, str] = {}
        for host in (chief, *others):
            said: list[dict[str, Any]] = []
            other: list[str] = []

            def read(_: str, line: str, said: list[dict[str, Any]] = said, other: list[str] = other) -> None:
                record = _load_json(line)
                if not isinstance(record, dict):
                    other.append(line)
                elif record.keys() == {"done"}:
                    hear(record)
                else:
                    said.append(record)

            script = f"{_REMOUNT}; {_TRAINER.format(verb=verb)} {shlex.join(words)}"
            answer = self.hosts.follow({host: script}, read)[host]
            if answer.unreachable:
                away[host] = answer.unreachable
                continue
            if answer.code == 0 and said:
                return {**said[-1], "host": host}
            last = next((line.strip() for line in reversed(other) if line.strip()), f"exit code {answer.code}")
            if last.startswith("error: "):
                raise OperatorMistake(last.removeprefix("error: "))
            self.refuse_when_not_installed(self.observe([host]))
            raise ClusterTrouble(f"the trainer on {host} can't do `{verb}`: {last}")
        raise HostsUnreachable(away)

    def _ask_trainer(
        self, verb: str, words: Sequence[str], kind: type, first: str = "", seconds: float = ANSWER_SECONDS
    ) -> Any:
        """Run one of the trainer's commands on the chief's host; what it calls an error is the operator's."""
        host = self.inventory.chief.host
        answer = self._ask(host, f"{first}{_TRAINER.format(verb=verb)} {shlex.join(words)}", seconds)
        said = _load_json(answer.stdout)
        if answer.code == 0 and isinstance(said, kind):
            return said
        last = _last_line(answer)
        if last.startswith("error: "):
            raise OperatorMistake(last.removeprefix("error: "))
        self.refuse_when_not_installed(self.observe([host]))
        raise ClusterTrouble(f"the trainer on {host} can't do `{verb}`: {last}")

    def read_sweep(self, name: str | None = None) -> dict[str, Any] | None:
        """Ask the trainer for a sweep: the one of this name, the selected or the last one; None where there is none."""
        host = self.inventory.chief.host
        verb = f"sweep --name {shlex.quote(name)}" if name else "sweep"
        answer = self._ask(host, _TRAINER.format(verb=verb))
        sweep = _load_json(answer.stdout)
        # A release of before there were sweeps has none.
        if "there is no sweep" in answer.stderr or "invalid choice: 'sweep'" in answer.stderr:
            return None
        if answer.code or not isinstance(sweep, dict):
            self.refuse_when_not_installed(self.observe([host]))
            raise ClusterTrouble(f"the trainer on {host} can't tell the sweep: {_last_line(answer)}")
        return sweep

    def read_journal(
        self, tasks: Sequence[Task], lines: int, show: Callable[[Entry], None], chosen: Chosen = EVERY_LINE
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
        _refuse_bad_journals(answers)

    def follow_journal(
        self, tasks: Sequence[Task], lines: int, show: Callable[[Entry], None], chosen: Chosen = EVERY_LINE
    ) -> None:
        """Hand over entries as the journals grow, until the operator leaves or the hosts are gone."""

        def read(host: str, text: str) -> None:
            entry = journal.parse(text)
            if entry is None and text:
                entry = Entry(0.0, host, text)  # journalctl's own words
            if entry and entry.run in (None, chosen.run or entry.run):
                show(entry)

        scripts = {host: journal.script(mine, lines, chosen, follow=True) for host, mine in _by_host(tasks).items()}
        _refuse_bad_journals(self.hosts.follow(scripts, read))

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

    def refuse_when_not_installed(self, observation: Observation) -> None:
        """Raise OperatorMistake when a host that answered lacks the release or the unit."""
        without = [host for host, release in observation.releases.items() if release is None]
        if without:
            raise OperatorMistake(
                f"nothing is installed on {', '.join(without)}: there is no {CURRENT}. "
                "Run `ansible-playbook site.yml` first"
            )
        for task in self.inventory.tasks:
            unit = observation.units.get(task.name)
            if unit and unit.health is Health.ABSENT:
                raise OperatorMistake(
                    f"{task.host} isn't set up: there is no trainer@.service. Run `ansible-playbook site.yml` first"
                )

    def refuse_when_not_configured(self, observation: Observation) -> None:
        """Raise OperatorMistake when a host that answered lacks a task's environment; shipping writes it."""
        for name, configured in observation.configured.items():
            if not configured:
                raise OperatorMistake(
                    f"{self.inventory.task(name).host} isn't set up for {name}: there is no /etc/trainer/{name}.env. "
                    "`fab start-cluster` writes it, and `ansible-playbook site.yml`"
                )

    def _observe_script(self, host: str, running: bool, settings: bool, by_trainer: bool) -> str:
        tasks = self.inventory.tasks_on(host)
        names = " ".join(task.unit for task in tasks)
        script = [
            "echo '@now'; date +%s.%N",
            f"echo '@release'; readlink {CURRENT}",
            "echo '@environments'; (cd /etc/trainer 2>/dev/null && echo *)",
            "echo '@ports'; ss -Hltn",
            f"echo '@units'; units=$(systemctl show --property={','.join(PROPERTIES)} {names})",
            "printf '%s\\n' \"$units\"",
        ]
        if settings:
            script.append(f"echo '@settings'; root sh -c {shlex.quote(DIGEST)}")
        if running:
            script.append(
                f"echo '@directories'; root sh -c {shlex.quote(_DIRECTORIES)} sh "
                "$(printf '%s\\n' \"$units\" | sed -n 's/^MainPID=//p')"
            )
        if host == self.inventory.chief.host:
            selection = shlex.quote(f"{self.inventory.shared_dir}/selection.json")
            chosen = f"echo '@selection'; {AS_TRAINER} cat {selection} 2>/dev/null; echo"
            script += [chosen, _STATUS] if by_trainer else [script_of_files(self.inventory.shared_dir)]
        return "\n".join(script)

    def _read(self, host: str, answer: Answer, observation: Observation, new_is_enough: bool) -> None:
        parts = _split_sections(answer.stdout)
        observation.clocks[host] = float(parts.get("now") or 0)
        observation.releases[host] = parts.get("release", "").rpartition("/")[2] or None
        units = parse_units(parts.get("units", ""))
        ports = {line.split()[3].rpartition(":")[2] for line in parts.get("ports", "").splitlines() if line.strip()}
        environments = parts.get("environments", "").split()
        if parts.get("first-code", "0") != "0":
            observation.failed[host] = _last_line(Answer(parts.get("first", ""), code=int(parts["first-code"])))
        if isinstance(look := _load_json(parts.get("look", "")), dict):
            observation.looks[host] = look
        if "settings" in parts:
            observation.settings[host] = parts["settings"]
        directories = dict(line.split(" ", 1) for line in parts.get("directories", "").splitlines() if " " in line)
        for task in self.inventory.tasks_on(host):
            if task.unit not in units:
                observation.unreachable[host] = f"systemd says nothing about {task.unit}: {_last_line(answer)}"
                return
            observation.units[task.name] = units[task.unit]
            observation.configured[task.name] = f"{task.name}.env" in environments
            if task.port is not None:
                observation.listening[task.name] = str(task.port) in ports
            release = _RELEASE.search(directories.get(str(units[task.unit].pid), ""))
            if release:
                observation.running[task.name] = release[1]
        if host == self.inventory.chief.host:
            self._read_run(host, parts, answer, observation)
            if "run" not in parts and (run := read_files(parts, self.inventory.shared_dir)):
                observation.run = run if run.state != "new" or new_is_enough else None

    def _read_run(self, host: str, parts: Mapping[str, str], answer: Answer, observation: Observation) -> None:
        selection = _load_json(parts.get("selection", ""))
        if isinstance(selection, dict):
            observation.selection = selection
        run = _load_json(parts.get("run", ""))
        if isinstance(run, dict):
            observation.run = parse_run(run)
        elif observation.releases[host] and "run" in parts:
            mistake = parts.get("run-code") == str(USER_ERROR)
            kind = OperatorMistake if mistake else ClusterTrouble
            observation.run_error = kind(f"the trainer on {host} can't tell its run: {_last_line(answer)}")

    def _systemctl(self, tasks: Sequence[Task], script: str, timeout: float = ANSWER_SECONDS) -> None:
        scripts = {
            host: script.format(units=" ".join(task.unit for task in mine)) for host, mine in _by_host(tasks).items()
        }
        _refuse_bad_answers(self.hosts.run(scripts, timeout), "systemctl failed")

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


def _refuse_bad_answers(answers: Mapping[str, Answer], what: str) -> None:
    failed = [f"{host}: {what}: {_last_line(answer)}" for host, answer in answers.items() if answer.code]
    unreachable = {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}
    if unreachable:
        raise HostsUnreachable(unreachable, "\n".join(failed))
    if failed:
        raise ClusterTrouble("\n".join(failed))


def _refuse_bad_journals(answers: Mapping[str, Answer]) -> None:
    for answer in answers.values():
        if "pattern" in answer.stderr:  # as in "Bad pattern"
            raise OperatorMistake(f"--grep: expected a regular expression (PCRE): {_last_line(answer)}")
    # With --grep it ends with 1 where nothing is found.
    found = {
        host: replace(each, code=0) if each.code == 1 and not each.stderr else each for host, each in answers.items()
    }
    _refuse_bad_answers(found, "the journal can't be read")


def _split_sections(text: str) -> dict[str, str]:
    """Cut a script's output at its lines `@name`."""
    parts: dict[str, list[str]] = {}
    for line in text.split("\n"):  # a status may hold what splitlines() takes for the end of a line
        if line.startswith("@"):
            parts[line[1:]] = current = []
        elif parts:
            current.append(line)
    return {name: "\n".join(lines).strip() for name, lines in parts.items()}


def _load_json(text: str) -> Any:
    """Parse JSON; None for what is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _last_line(answer: Answer) -> str:
    lines = [line for line in (answer.stderr or answer.stdout).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else f"exit code {answer.code}"
    if last.startswith("sudo:"):
        last += ". Give ansible_user sudo without a password"
    return last
