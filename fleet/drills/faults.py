"""The faults: each is done to live hosts over SSH, proves that it happened, and can be taken back.

`inject` returns what was proven and raises DrillFailed when it can't be; `revert` may be called twice, and where
nothing was injected. `lasts` is how long the fault stays (seconds; 0: it is over at once), `aims` at whom it is done,
`hits` whose processes it ends, freezes or cuts off. `injects_late`: it happens at the end of `inject` rather than at
its beginning; `takes_ssh`: the hosts can't be asked while it lasts; `takes_away`: the training goes on without the
members that it hits, and takes them in again afterwards.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fleet.drills.testbed import DrillFailed, Process, Testbed
from fleet.hosts.run import AS_TRAINER
from fleet.site.topology import Task

# A host reverts its fault by itself after this time: the control machine may be gone.
SELF_REVERT_SECONDS = 900
TABLE = "psfleet_drill"

TaskChoice = Callable[[Testbed], list[Task]]
# The task is the child of its unit's main process, the supervisor; where there is none, it is the main process itself.
Part = Literal["task", "unit"]
Victims = Mapping[str, list[tuple[Task, Process]]]


class Fault:
    lasts: float = 0.0
    injects_late: ClassVar[bool] = False
    takes_ssh: ClassVar[bool] = False
    takes_away: ClassVar[bool] = False

    def aims(self, testbed: Testbed) -> list[Task]:
        return []

    def hits(self, testbed: Testbed) -> list[Task]:
        return self.aims(testbed)

    def chosen(self, testbed: Testbed) -> list[Task]:
        """Those of them in whose place `at` puts another task."""
        return self.aims(testbed)

    def reaches(self, testbed: Testbed) -> set[str]:
        """Further hosts that it needs well: it acts on them, or is proven by them."""
        return set()

    def at(self, task: Task | None, lasts: float) -> Fault:
        """The same fault, aimed at another task where it is a task's, and so long where it lasts."""
        return self

    def inject(self, testbed: Testbed) -> str:
        raise NotImplementedError

    def revert(self, testbed: Testbed) -> None:
        pass


NOTHING = Fault()  # of drills whose scenario brings its own trouble


@dataclass(frozen=True)
class Aimed(Fault):
    """A fault of chosen tasks."""

    choice: TaskChoice

    def aims(self, testbed: Testbed) -> list[Task]:
        return self.choice(testbed)

    def at(self, task: Task | None, lasts: float) -> Fault:
        assert task
        return replace(self, choice=lambda testbed: [task], **({"lasts": lasts} if self.lasts else {}))


@dataclass(frozen=True)
class AimedAtHost(Aimed):
    """A fault of the chosen task's host, and so of every task there."""

    def host(self, testbed: Testbed) -> str:
        return self.choice(testbed)[0].host

    def hits(self, testbed: Testbed) -> list[Task]:
        return testbed.inventory.tasks_on(self.host(testbed))


def one(*jobs: str) -> TaskChoice:
    return lambda testbed: [testbed.victim(job) for job in jobs]


def every(*jobs: str) -> TaskChoice:
    return lambda testbed: testbed.tasks(*jobs)


def by_host(testbed: Testbed, tasks: list[Task]) -> Victims:
    """Each host's tasks with their processes; raises DrillFailed when one has none."""
    processes = testbed.processes([task.host for task in tasks])
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
    parts = []
    for task, process in (one for mine in victims.values() for one in mine):
        numbers = " and ".join(map(str, pids(process, part)))
        parts.append(f"{task.name}'s {'processes' if ' ' in numbers else 'process'} {numbers} {become}")
    return ", ".join(parts)


def run_everywhere(testbed: Testbed, scripts: Mapping[str, str], timeout: float = 60.0) -> dict[str, str]:
    """Run each host's script at once; raise DrillFailed with what one said that failed."""
    answers = testbed.cluster.hosts.run(scripts, timeout)
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

    def inject(self, testbed: Testbed) -> str:
        victims = by_host(testbed, self.hits(testbed))
        scripts = {
            host: self._script([pid for _, process in mine for pid in pids(process, self.part)])
            for host, mine in victims.items()
        }
        run_everywhere(testbed, scripts)
        return describe(victims, self.part, "gone")

    def _script(self, pids: list[int]) -> str:
        # 30 s: asked to end (TERM), the coordinator saves first.
        return f"root kill -{self.signal} {' '.join(map(str, pids))} || exit 1\n" + "\n".join(
            f"n=0; while [ -e /proc/{pid}/exe ] || grep -qs '^State:.[^Z]' /proc/{pid}/status; do n=$((n+1)); "
            f"[ $n -lt 600 ] || {{ echo 'process {pid} lives on' >&2; exit 1; }}; sleep 0.05; done"
            for pid in pids
        )


def await_save(testbed: Testbed) -> str:
    """The command that waits until files of a checkpoint are being written."""
    look = "import os, sys, time\nend = time.time() + 60\n"
    look += "while not any('temp' in name for name in os.listdir(sys.argv[1])):\n"
    look += " time.sleep(0.002)\n assert time.time() < end, 'no save in 60 s'\n"
    return f"{AS_TRAINER} python3 -c {shlex.quote(look)} {shlex.quote(testbed.checkpoint_dir)}"


@dataclass(frozen=True)
class KillWhileSaving(Kill):
    """SIGKILL at the moment when files of a checkpoint are being written."""

    injects_late: ClassVar[bool] = True

    def inject(self, testbed: Testbed) -> str:
        ((host, mine),) = by_host(testbed, self.hits(testbed)).items()
        killed = " ".join(str(process.pid) for _, process in mine)
        # At once, since the next coordinator comes in a moment, and removes what is left behind.
        script = (
            f"{await_save(testbed)} && root kill -9 {killed} && {AS_TRAINER} ls {shlex.quote(testbed.checkpoint_dir)}"
        )
        left = run_everywhere(testbed, {host: script}, 90.0)[host].split()
        half = [name for name in left if "temp" in name]
        if not half:
            raise DrillFailed("the save was over before its process was killed")
        return f"{', '.join(task.name for task, _ in mine)} killed, {half[0]} left behind"


@dataclass(frozen=True)
class Freeze(Aimed):
    """SIGSTOP: the process exists, its sockets are open, and it does nothing."""

    part: Part = "task"

    def inject(self, testbed: Testbed) -> str:
        victims = by_host(testbed, self.hits(testbed))
        stop = (
            "root kill -STOP {0} || exit 1; n=0; until grep -q '^State:.T' /proc/{0}/status; "
            "do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done"
        )
        scripts = for_each(
            victims, lambda task, process: "\n".join(stop.format(pid) for pid in pids(process, self.part))
        )
        run_everywhere(testbed, scripts)
        return describe(victims, self.part, "stopped")

    def revert(self, testbed: Testbed) -> None:
        """Let what is still stopped go on; its supervisor or systemd has usually put an end to it."""
        for process, task in [(testbed.processes([task.host])[task.name], task) for task in self.hits(testbed)]:
            thaw = "! grep -qs '^State:.T' /proc/{0}/status || root kill -CONT {0}"
            testbed.on(task.host, "\n".join(thaw.format(pid) for pid in process.pids))


@dataclass(frozen=True)
class Throttle(Aimed):
    """A task's processes get a fiftieth of a processor: 2 of every 100 ms, as the kernel's CPUQuota would do it.

    By the freezer of its control group: a container may have no part in the kernel's share of processors.
    """

    lasts: float = 60.0

    def inject(self, testbed: Testbed) -> str:
        def slow(task: Task, process: Process) -> str:
            unit = f"{TABLE}-{task.name}"
            return f"""
root systemctl stop {unit} 2>/dev/null
root systemd-run --quiet --collect --unit={unit} --property=RuntimeMaxSec={SELF_REVERT_SECONDS} \\
  python3 -c {shlex.quote(THROTTLE)} {task.unit} || exit 1
group=/sys/fs/cgroup$(systemctl show --property=ControlGroup --value {task.unit})
[ -e "$group" ] || group=/sys/fs/cgroup/unified${{group#/sys/fs/cgroup}}
n=0; until grep -q 'frozen 1' $group/cgroup.events; do n=$((n+1)); [ $n -lt 500 ] || exit 1; sleep 0.01; done
"""

        victims = by_host(testbed, self.hits(testbed))
        run_everywhere(testbed, for_each(victims, slow))
        return f"{', '.join(task.name for mine in victims.values() for task, _ in mine)} gets 2 % of a processor"

    def revert(self, testbed: Testbed) -> None:
        for task in self.hits(testbed):
            testbed.on(task.host, f"root systemctl stop {TABLE}-{task.name} 2>/dev/null; true")


# Every process of the unit, also one that is started meanwhile. Unlike SIGSTOP it shows in no process's state, and
# signals no process; ended, it leaves none frozen.
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

    def inject(self, testbed: Testbed) -> str:
        victims = by_host(testbed, self.hits(testbed))
        kill = "root kill -KILL {0}; root systemctl stop {1}; ! [ -e /proc/{0}/exe ] || exit 1"
        run_everywhere(testbed, for_each(victims, lambda task, process: kill.format(process.pid, task.unit)))
        return f"{', '.join(task.name for mine in victims.values() for task, _ in mine)} down"

    def revert(self, testbed: Testbed) -> None:
        testbed.cluster.start(self.hits(testbed))
