"""The faults: each is done to live hosts over SSH, proves that it happened, and can be taken back.

`strike` returns what was proven and raises DrillFailed when it can't be; `heal` may be called twice, and where nothing
was struck. `lasts` is how long the fault stays (seconds; 0: it is over at once), `aims` at whom it is done, `hits`
whose processes it ends, freezes or cuts off. `strikes_late`: it happens at the end of `strike` rather than at its
beginning; `takes_ssh`: the hosts can't be asked while it lasts; `takes_away`: the training goes on without the members
that it hits, and takes them in again afterwards.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from fleet.cluster import AS_TRAINER
from fleet.drills.stage import DrillFailed, Process, Stage
from fleet.errors import HostsUnreachable
from fleet.site.inventory import Host, Task

# A host that nobody heals any more, because the control machine is gone, heals itself after this time.
HEALS_ITSELF_SECONDS = 900
POWER_SECONDS = 120.0
TABLE = "psfleet_drill"

Choice = Callable[[Stage], list[Task]]
# The task is the child of its unit's main process, the supervisor; where there is none, it is the main process itself.
Part = Literal["task", "unit"]
Victims = Mapping[str, list[tuple[Task, Process]]]


class Fault:
    lasts: float = 0.0
    strikes_late: ClassVar[bool] = False
    takes_ssh: ClassVar[bool] = False
    takes_away: ClassVar[bool] = False

    def aims(self, stage: Stage) -> list[Task]:
        return []

    def hits(self, stage: Stage) -> list[Task]:
        return self.aims(stage)

    def chosen(self, stage: Stage) -> list[Task]:
        """Those of them in whose place `at` puts another task."""
        return self.aims(stage)

    def at(self, task: Task | None, lasts: float) -> Fault:
        """The same fault, aimed at another task where it is a task's, and so long where it lasts."""
        return self

    def strike(self, stage: Stage) -> str:
        raise NotImplementedError

    def heal(self, stage: Stage) -> None:
        pass


NOTHING = Fault()  # of drills whose scene brings its own trouble


@dataclass(frozen=True)
class Aimed(Fault):
    """A fault of chosen tasks."""

    choice: Choice

    def aims(self, stage: Stage) -> list[Task]:
        return self.choice(stage)

    def at(self, task: Task | None, lasts: float) -> Fault:
        assert task
        return replace(self, choice=lambda stage: [task], **({"lasts": lasts} if self.lasts else {}))


@dataclass(frozen=True)
class AimedAtHost(Aimed):
    """A fault of the chosen task's host, and so of every task there."""

    def host(self, stage: Stage) -> str:
        return self.choice(stage)[0].host

    def hits(self, stage: Stage) -> list[Task]:
        return stage.inventory.tasks_on(self.host(stage))


def one(*jobs: str) -> Choice:
    return lambda stage: [stage.victim(job) for job in jobs]


def every(*jobs: str) -> Choice:
    return lambda stage: stage.tasks(*jobs)


def by_host(stage: Stage, tasks: list[Task]) -> Victims:
    """Each host's tasks with their processes; raises DrillFailed when one has none."""
    processes = stage.processes([task.host for task in tasks])
    found: dict[str, list[tuple[Task, Process]]] = {}
    for task in tasks:
        process = processes.get(task.name)
        if process is None or not process.pid:
            raise DrillFailed(f"{task.name} on {task.host} has no process before the fault")
        found.setdefault(task.host, []).append((task, process))
    return found


def pids(process: Process, part: Part) -> list[int]:
    return process.pids if part == "unit" else [process.pid]


def describe(victims: Victims, part: Part, become: str) -> str:
    """Say what has become of each process."""
    said = []
    for task, process in (one for mine in victims.values() for one in mine):
        numbers = " and ".join(map(str, pids(process, part)))
        said.append(f"{task.name}'s {'processes' if ' ' in numbers else 'process'} {numbers} {become}")
    return ", ".join(said)


def run_everywhere(stage: Stage, scripts: Mapping[str, str], timeout: float = 60.0) -> dict[str, str]:
    """Run each host's script at once; raise DrillFailed with what one said that failed."""
    answers = stage.cluster.hosts.run(scripts, timeout)
    for host, answer in answers.items():
        if answer.unreachable or answer.code:
            raise DrillFailed(f"the fault on {host}: {answer.unreachable or answer.stderr.strip() or answer.code}")
    return {host: answer.stdout for host, answer in answers.items()}


def for_each(victims: Victims, line: Callable[[Task, Process], str]) -> dict[str, str]:
    """Return each host's script: a line for each of its tasks."""
    return {host: "\n".join(line(task, process) for task, process in mine) for host, mine in victims.items()}


@dataclass(frozen=True)
class Kill(Aimed):
    """SIGKILL, after which the tasks are started again."""

    signal: str = "KILL"
    part: Part = "task"

    def strike(self, stage: Stage) -> str:
        victims = by_host(stage, self.hits(stage))
        scripts = {
            host: self._script([pid for _, process in mine for pid in pids(process, self.part)])
            for host, mine in victims.items()
        }
        run_everywhere(stage, scripts)
        return describe(victims, self.part, "gone")

    def _script(self, pids: list[int]) -> str:
        # 30 s: asked to end (TERM), the coordinator saves first.
        return f"root kill -{self.signal} {' '.join(map(str, pids))} || exit 1\n" + "\n".join(
            f"n=0; while [ -e /proc/{pid}/exe ] || grep -qs '^State:.[^Z]' /proc/{pid}/status; do n=$((n+1)); "
            f"[ $n -lt 600 ] || {{ echo 'process {pid} lives on' >&2; exit 1; }}; sleep 0.05; done"
            for pid in pids
        )


def await_save(stage: Stage) -> str:
    """The command that waits until files of a checkpoint are being written."""
    look = "import os, sys, time\nend = time.time() + 60\n"
    look += "while not any('temp' in name for name in os.listdir(sys.argv[1])):\n"
    look += " time.sleep(0.002)\n assert time.time() < end, 'no save in 60 s'\n"
    return f"{AS_TRAINER} python3 -c {shlex.quote(look)} {shlex.quote(stage.checkpoint_dir)}"


@dataclass(frozen=True)
class KillWhileSaving(Kill):
    """SIGKILL at the moment when files of a checkpoint are being written."""

    strikes_late: ClassVar[bool] = True

    def strike(self, stage: Stage) -> str:
        ((host, mine),) = by_host(stage, self.hits(stage)).items()
        killed = " ".join(str(process.pid) for _, process in mine)
        # At once, since the next coordinator is there in a moment, and removes what is left behind.
        script = f"{await_save(stage)} && root kill -9 {killed} && {AS_TRAINER} ls {shlex.quote(stage.checkpoint_dir)}"
        left = run_everywhere(stage, {host: script}, 90.0)[host].split()
        half = [name for name in left if "temp" in name]
        if not half:
            raise DrillFailed("the save was over before its process was killed")
        return f"{', '.join(task.name for task, _ in mine)} killed, {half[0]} left behind"


@dataclass(frozen=True)
class Freeze(Aimed):
    """SIGSTOP: the process is there, its sockets are open, and it does nothing."""

    part: Part = "task"

    def strike(self, stage: Stage) -> str:
        victims = by_host(stage, self.hits(stage))
        stop = (
            "root kill -STOP {0} || exit 1; n=0; until grep -q '^State:.T' /proc/{0}/status; "
            "do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done"
        )
        scripts = for_each(
            victims, lambda task, process: "\n".join(stop.format(pid) for pid in pids(process, self.part))
        )
        run_everywhere(stage, scripts)
        return describe(victims, self.part, "stopped")

    def heal(self, stage: Stage) -> None:
        """Let what is still stopped go on; its supervisor or systemd has usually put an end to it."""
        for process, task in [(stage.processes([task.host])[task.name], task) for task in self.hits(stage)]:
            thaw = "! grep -qs '^State:.T' /proc/{0}/status || root kill -CONT {0}"
            stage.on(task.host, "\n".join(thaw.format(pid) for pid in process.pids))


@dataclass(frozen=True)
class Slow(Aimed):
    """A task's processes get a fiftieth of a processor: 2 of every 100 ms, as the kernel's CPUQuota would do it.

    By the freezer of its control group: a container may have no part in the kernel's share of processors.
    """

    lasts: float = 60.0

    def strike(self, stage: Stage) -> str:
        def slow(task: Task, process: Process) -> str:
            unit = f"{TABLE}-{task.name}"
            return f"""
root systemctl stop {unit} 2>/dev/null
root systemd-run --quiet --collect --unit={unit} --property=RuntimeMaxSec={HEALS_ITSELF_SECONDS} \\
  python3 -c {shlex.quote(THROTTLE)} {task.unit} || exit 1
group=/sys/fs/cgroup$(systemctl show --property=ControlGroup --value {task.unit})
[ -e "$group" ] || group=/sys/fs/cgroup/unified${{group#/sys/fs/cgroup}}
n=0; until grep -q 'frozen 1' $group/cgroup.events; do n=$((n+1)); [ $n -lt 500 ] || exit 1; sleep 0.01; done
"""

        victims = by_host(stage, self.hits(stage))
        run_everywhere(stage, for_each(victims, slow))
        return f"{', '.join(task.name for mine in victims.values() for task, _ in mine)} gets 2 % of a processor"

    def heal(self, stage: Stage) -> None:
        for task in self.hits(stage):
            stage.on(task.host, f"root systemctl stop {TABLE}-{task.name} 2>/dev/null; true")


# Every process of the unit, also one that is started meanwhile. Unlike SIGSTOP it shows in no process's state, and
# signals nobody; ended, it leaves none frozen.
THROTTLE = """
import os, signal, subprocess, sys, time
group = subprocess.run(["systemctl", "show", "--property=ControlGroup", "--value", sys.argv[1]],
                       check=True, capture_output=True, text=True).stdout.strip()
places = [f"/sys/fs/cgroup{root}{group}/cgroup.freeze" for root in ("", "/unified")]
(place, *_) = filter(os.path.exists, places)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
def freeze(word):
    try:
        with open(place, "w") as file: file.write(word)
    except OSError: pass  # the unit is between two processes
try:
    while True:
        freeze("1"); time.sleep(0.098)
        freeze("0"); time.sleep(0.002)
finally:
    freeze("0")
"""


@dataclass(frozen=True)
class Down(Aimed):
    """SIGKILL, and kept down."""

    lasts: float = 60.0

    def strike(self, stage: Stage) -> str:
        victims = by_host(stage, self.hits(stage))
        kill = "root kill -KILL {0}; root systemctl stop {1}; ! [ -e /proc/{0}/exe ] || exit 1"
        run_everywhere(stage, for_each(victims, lambda task, process: kill.format(process.pid, task.unit)))
        return f"{', '.join(task.name for mine in victims.values() for task, _ in mine)} down"

    def heal(self, stage: Stage) -> None:
        stage.cluster.start(self.hits(stage))


@dataclass(frozen=True)
class Cut(AimedAtHost):
    """A host drops every packet but those of the control machine's SSH."""

    lasts: float = 60.0
    takes_away: ClassVar[bool] = True

    def strike(self, stage: Stage) -> str:
        host = self.host(stage)
        script = f"""
set -- $SSH_CONNECTION
case $1 in *:*) family=ip6;; *) family=ip;; esac
# What a drill left that was ended by force is in the way.
root systemctl stop {TABLE}.timer 2>/dev/null; root nft delete table inet {TABLE} 2>/dev/null
# Should the control machine be gone, the host must not stay cut off.
root systemd-run --quiet --collect --unit={TABLE} --on-active={HEALS_ITSELF_SECONDS} \\
  nft delete table inet {TABLE} || exit 1
root nft -f - <<END || exit 1
table inet {TABLE} {{
  chain in {{
    type filter hook input priority -300; policy accept;
    iifname "lo" accept
    $family saddr $1 tcp dport $4 accept
    counter drop
  }}
  chain out {{
    type filter hook output priority -300; policy accept;
    oifname "lo" accept
    $family daddr $1 tcp sport $4 accept
    counter drop
  }}
}}
END
"""
        run_everywhere(stage, {host: script})
        dropped = stage.wait(lambda: self._dropped(stage, host), 20.0, f"{host} drops a packet")
        return f"{host} dropped {dropped} packets"

    def _dropped(self, stage: Stage, host: str) -> int:
        # A packet of its own: in the start of a run, on a busy machine, nobody may speak with it for a while.
        knock = """set -- $SSH_CONNECTION; timeout 1 bash -c ": >/dev/tcp/$1/9" 2>/dev/null; """
        shown = stage.on(host, knock + f"root nft list table inet {TABLE}")
        return sum(int(count) for count in re.findall(r"counter packets (\d+)", shown))

    def heal(self, stage: Stage) -> None:
        host = self.host(stage)
        stage.on(
            host,
            f"root nft delete table inet {TABLE} 2>/dev/null; root systemctl stop {TABLE}.timer 2>/dev/null; "
            f"! root nft list table inet {TABLE} 2>/dev/null",
        )


@dataclass(frozen=True)
class PowerOff(AimedAtHost):
    """A host loses its power, by the site's own command, and gets it back."""

    lasts: float = 60.0
    takes_ssh: ClassVar[bool] = True
    takes_away: ClassVar[bool] = True

    def strike(self, stage: Stage) -> str:
        host = self.host(stage)
        power(stage, "off", stage.inventory.hosts[host])
        stage.wait(lambda: is_unreachable(stage, host), POWER_SECONDS, f"{host} is unreachable")
        return f"{host} is unreachable"

    def heal(self, stage: Stage) -> None:
        host = self.host(stage)
        if is_unreachable(stage, host):
            power(stage, "on", stage.inventory.hosts[host])
            stage.wait(lambda: not is_unreachable(stage, host), POWER_SECONDS, f"{host} is back")


def power(stage: Stage, way: str, host: Host) -> None:
    """Run the inventory's command for a host's power on the control machine."""
    template = stage.inventory.variables[host.name][f"drill_power_{way}"]
    command = template.format(host=shlex.quote(host.name), address=shlex.quote(host.address))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=POWER_SECONDS)
    if done.returncode:
        raise DrillFailed(f"`{command}` ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")


def is_unreachable(stage: Stage, host: str) -> bool:
    try:
        stage.on(host, "true", timeout=5.0)
    except HostsUnreachable:
        return True
    return False


@dataclass(frozen=True)
class Reboot(Fault):
    """Every host at once is told to reboot."""

    def hits(self, stage: Stage) -> list[Task]:
        return list(stage.inventory.tasks)

    def strike(self, stage: Stage) -> str:
        hosts = list(stage.inventory.hosts)
        # When PID 1 began: a container has its machine's boot id.
        began = "stat --format=%Y /proc/1"
        before = stage.everywhere(began)
        # From systemd rather than from this session, which the reboot ends.
        stage.everywhere("root systemd-run --quiet --collect --on-active=1 systemctl reboot")

        def rebooted() -> bool:
            after = stage.everywhere(began, timeout=5.0)
            return all(after[host] != before[host] for host in hosts)

        stage.wait(rebooted, 300.0, "every host has rebooted")
        return f"{len(hosts)} hosts have rebooted"


@dataclass(frozen=True)
class Damage(Fault):
    """Something is done to the checkpoints while the coordinator is stopped; then it is killed, and a ps before it.

    With all ps alive the next coordinator would go on with their variables, and read no checkpoint.

    `script` runs as the tasks' user in the checkpoints' directory, with $newest as the name of the newest one, and
    says what it did.
    """

    script: str
    killed: Choice = field(default_factory=lambda: one("ps"))

    def chosen(self, stage: Stage) -> list[Task]:
        return self.killed(stage)

    def aims(self, stage: Stage) -> list[Task]:
        return [stage.chief, *self.killed(stage)]

    def at(self, task: Task | None, lasts: float) -> Fault:
        assert task
        return replace(self, killed=lambda stage: [task])

    def strike(self, stage: Stage) -> str:
        ((host, ((_, process),)),) = by_host(stage, [stage.chief]).items()
        pids = " ".join(map(str, process.pids))
        place = shlex.quote(stage.checkpoint_dir)
        damage = f"cd {place}; newest=$1; {self.script}"
        script = f"""
endings=index; {AS_TRAINER} ls {place} | grep -q 'manifest.json$' && endings=manifest.json
newest=$({AS_TRAINER} ls {place} | sed -n "s/^\\(ckpt-[0-9]*\\)\\.$endings\\$/\\1/p" | sort -t - -k 2 -n | tail -n 1)
[ -n "$newest" ] || {{ echo 'there is no checkpoint' >&2; exit 1; }}
root kill -STOP {pids} || exit 1
{AS_TRAINER} sh -ec {shlex.quote(damage)} sh "$newest" || {{ root kill -CONT {pids}; exit 1; }}
"""
        done = run_everywhere(stage, {host: script})[host].strip()
        try:
            killed = Kill(self.killed).strike(stage)
        finally:
            run_everywhere(stage, {host: f"root kill -KILL {pids} || true"})
        return f"{done}, {killed}, {stage.chief.name} killed"


HALVE = "truncate --size=$(($(stat --format=%s {0}) / 2)) {0}; "
TRUNCATE_DATA = 'file=$(ls "$newest".data-* | head -n 1); ' + HALVE.format('"$file"') + 'echo "$file truncated"'
TRUNCATE_INDEX = HALVE.format('"$newest.index"') + 'echo "$newest.index truncated"'
REMOVE_STATE_FILE = 'rm checkpoint; ! [ -e checkpoint ]; echo "checkpoint removed"'
TRUNCATE_ALL = "for file in ckpt-*.index; do " + HALVE.format('"$file"') + 'done; echo "every index truncated"'


@dataclass(frozen=True)
class Full(Fault):
    """The shared path has no byte left."""

    lasts: float = 30.0

    def at(self, task: Task | None, lasts: float) -> Fault:
        return replace(self, lasts=lasts)

    def _file(self, stage: Stage) -> str:
        return shlex.quote(f"{stage.shared_dir}/.psfleet-drill-fill")

    def strike(self, stage: Stage) -> str:
        file = self._file(stage)
        fill = (
            f"size=$(df --output=avail --block-size=1 {shlex.quote(stage.shared_dir)} | tail -n 1); "
            f"fallocate --length $size {file} 2>/dev/null; "
            f"cat /dev/zero >>{file} 2>/dev/null; ! head -c 65536 /dev/zero >{file}.more 2>/dev/null || exit 1; "
            f"rm -f {file}.more"
        )
        run_everywhere(stage, {stage.chief.host: f"{AS_TRAINER} sh -c {shlex.quote(fill)}"}, 300.0)
        return f"no 64 KiB can be written below {stage.shared_dir}"

    def heal(self, stage: Stage) -> None:
        stage.on(stage.chief.host, f"{AS_TRAINER} rm -f {self._file(stage)} {self._file(stage)}.more")


@dataclass(frozen=True)
class ReadOnly(Fault):
    """The run's directory is read-only on every host: a mount over it, which the tasks see too."""

    lasts: float = 30.0

    def strike(self, stage: Stage) -> str:
        run = shlex.quote(stage.run_dir)
        # Made read-only elsewhere first: what reaches the tasks' own view is one mount, with its flags.
        script = f"""
root mkdir -p /run/{TABLE} && root mount --bind {run} /run/{TABLE} || exit 1
root mount -o remount,bind,ro /run/{TABLE} && root mount --bind /run/{TABLE} {run} || exit 1
for pid in $(systemctl show --property=MainPID --value 'trainer@*'); do
  [ "$pid" = 0 ] || ! root nsenter --target $pid --mount setpriv --reuid=trainer --regid=trainer --init-groups -- \\
    touch {run}/.psfleet-drill 2>/dev/null || {{ echo "process $pid can still write" >&2; exit 1; }}
done
"""
        run_everywhere(stage, dict.fromkeys(stage.inventory.hosts, script))
        return f"no task can write below {stage.run_dir}"

    def heal(self, stage: Stage) -> None:
        run = shlex.quote(stage.run_dir)
        stage.everywhere(
            f"while mountpoint --quiet {run}; do root umount --lazy {run} || exit 1; done; "
            f"while mountpoint --quiet /run/{TABLE}; do root umount --lazy /run/{TABLE} || exit 1; done"
        )
