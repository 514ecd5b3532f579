"""The faults of whole hosts and of what they share: packets, power, checkpoints, the shared path."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fleet.drills.faults import TABLE, AimedAtHost, Fault, Kill, TaskChoice, by_host, one, run_everywhere
from fleet.drills.testbed import DrillFailed, Testbed
from fleet.drills.ways import REMOVE, counted, loads, reverts, reverts_itself
from fleet.errors import HostsUnreachable
from fleet.hosts.run import AS_TRAINER
from fleet.site.routes import Host
from fleet.site.topology import Task

POWER_SECONDS = 120.0
# For the shell that has the SSH connection's addresses as its arguments.
ALL_BUT_SSH = """  chain in {
    type filter hook input priority -300; policy accept;
    iifname "lo" accept
    $family saddr $1 tcp dport $4 accept
    counter drop
  }
  chain out {
    type filter hook output priority -300; policy accept;
    oifname "lo" accept
    $family daddr $1 tcp sport $4 accept
    counter drop
  }"""


@dataclass(frozen=True)
class Cut(AimedAtHost):
    """A host drops every packet but those of the control machine's SSH."""

    lasts: float = 60.0
    takes_away: ClassVar[bool] = True

    def inject(self, testbed: Testbed) -> str:
        host = self.host(testbed)
        script = f"""
set -- $SSH_CONNECTION
case $1 in *:*) family=ip6;; *) family=ip;; esac
{reverts_itself(REMOVE)}{loads(ALL_BUT_SSH)}"""
        run_everywhere(testbed, {host: script})
        # A packet of its own: in the start of a run, on a busy machine, it may get none for a while.
        knock = """set -- $SSH_CONNECTION; timeout 1 bash -c ": >/dev/tcp/$1/9" 2>/dev/null; """
        dropped = testbed.wait(lambda: counted(testbed, host, TABLE, knock), 20.0, f"{host} drops a packet")
        return f"{host} dropped {dropped} packets"

    def revert(self, testbed: Testbed) -> None:
        host = self.host(testbed)
        testbed.on(host, f"{reverts(REMOVE)}; ! root nft list table inet {TABLE} 2>/dev/null")


@dataclass(frozen=True)
class PowerOff(AimedAtHost):
    """A host loses its power, by the site's own command, and gets it back."""

    lasts: float = 60.0
    takes_ssh: ClassVar[bool] = True
    takes_away: ClassVar[bool] = True

    def inject(self, testbed: Testbed) -> str:
        host = self.host(testbed)
        power(testbed, "off", testbed.inventory.hosts[host])
        testbed.wait(lambda: is_unreachable(testbed, host), POWER_SECONDS, f"{host} is unreachable")
        return f"{host} is unreachable"

    def revert(self, testbed: Testbed) -> None:
        host = self.host(testbed)
        if is_unreachable(testbed, host):
            power(testbed, "on", testbed.inventory.hosts[host])
            testbed.wait(lambda: not is_unreachable(testbed, host), POWER_SECONDS, f"{host} is back")


def power(testbed: Testbed, way: str, host: Host) -> None:
    """Run the inventory's command for a host's power on the control machine."""
    template = testbed.inventory.variables[host.name][f"drill_power_{way}"]
    command = template.format(host=shlex.quote(host.name), address=shlex.quote(host.address))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=POWER_SECONDS)
    if done.returncode:
        raise DrillFailed(f"`{command}` ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")


def is_unreachable(testbed: Testbed, host: str) -> bool:
    try:
        testbed.on(host, "true", timeout=5.0)
    except HostsUnreachable:
        return True
    return False


@dataclass(frozen=True)
class Reboot(Fault):
    """Have every host reboot at once."""

    def hits(self, testbed: Testbed) -> list[Task]:
        return list(testbed.inventory.tasks)

    def inject(self, testbed: Testbed) -> str:
        hosts = list(testbed.inventory.hosts)
        # When PID 1 began: a container has its machine's boot id.
        began = "stat --format=%Y /proc/1"
        before = testbed.everywhere(began)
        # From systemd rather than from this session, which the reboot ends.
        testbed.everywhere("root systemd-run --quiet --collect --on-active=1 systemctl reboot")

        def rebooted() -> bool:
            after = testbed.everywhere(began, timeout=5.0)
            return all(after[host] != before[host] for host in hosts)

        testbed.wait(rebooted, 300.0, "every host has rebooted")
        return f"{len(hosts)} hosts have rebooted"


@dataclass(frozen=True)
class Damage(Fault):
    """Something is done to the checkpoints while the coordinator is stopped; then it is killed, and a ps before it.

    With all ps alive the next coordinator would go on with their variables, and read no checkpoint.

    `script` runs as the tasks' user in the checkpoints' directory, with $newest as the name of the newest one, and
    says what it did.
    """

    script: str
    killed: TaskChoice = field(default_factory=lambda: one("ps"))

    def chosen(self, testbed: Testbed) -> list[Task]:
        return self.killed(testbed)

    def aims(self, testbed: Testbed) -> list[Task]:
        return [testbed.chief, *self.killed(testbed)]

    def at(self, task: Task | None, lasts: float) -> Fault:
        assert task
        return replace(self, killed=lambda testbed: [task])

    def inject(self, testbed: Testbed) -> str:
        ((host, ((_, process),)),) = by_host(testbed, [testbed.chief]).items()
        pids = " ".join(map(str, process.pids))
        place = shlex.quote(testbed.checkpoint_dir)
        damage = f"cd {place}; newest=$1; {self.script}"
        script = f"""
newest=$({AS_TRAINER} ls {place} | sed -n 's/\\.manifest\\.json$//p' | sort -t - -k 2 -n | tail -n 1)
[ -n "$newest" ] || {{ echo 'there is no checkpoint' >&2; exit 1; }}
root kill -STOP {pids} || exit 1
{AS_TRAINER} sh -ec {shlex.quote(damage)} sh "$newest" || {{ root kill -CONT {pids}; exit 1; }}
"""
        done = run_everywhere(testbed, {host: script})[host].strip()
        try:
            killed = Kill(self.killed).inject(testbed)
        finally:
            run_everywhere(testbed, {host: f"root kill -KILL {pids} || true"})
        return f"{done}, {killed}, {testbed.chief.name} killed"


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

    def _file(self, testbed: Testbed) -> str:
        return shlex.quote(f"{testbed.shared_dir}/.psfleet-drill-fill")

    def inject(self, testbed: Testbed) -> str:
        file = self._file(testbed)
        fill = (
            f"size=$(df --output=avail --block-size=1 {shlex.quote(testbed.shared_dir)} | tail -n 1); "
            f"fallocate --length $size {file} 2>/dev/null; "
            f"cat /dev/zero >>{file} 2>/dev/null; ! head -c 65536 /dev/zero >{file}.more 2>/dev/null || exit 1; "
            f"rm -f {file}.more"
        )
        run_everywhere(testbed, {testbed.chief.host: f"{AS_TRAINER} sh -c {shlex.quote(fill)}"}, 300.0)
        return f"no 64 KiB can be written below {testbed.shared_dir}"

    def revert(self, testbed: Testbed) -> None:
        testbed.on(testbed.chief.host, f"{AS_TRAINER} rm -f {self._file(testbed)} {self._file(testbed)}.more")


@dataclass(frozen=True)
class ReadOnly(Fault):
    """The run's directory is read-only on every host: a mount over it, which the tasks see too."""

    lasts: float = 30.0

    def inject(self, testbed: Testbed) -> str:
        run = shlex.quote(testbed.run_dir)
        # Made read-only elsewhere first: what reaches the tasks' own view is one mount, with its flags.
        script = f"""
root mkdir -p /run/{TABLE} && root mount --bind {run} /run/{TABLE} || exit 1
root mount -o remount,bind,ro /run/{TABLE} && root mount --bind /run/{TABLE} {run} || exit 1
for pid in $(systemctl show --property=MainPID --value 'trainer@*'); do
  [ "$pid" = 0 ] || ! root nsenter --target $pid --mount setpriv --reuid=trainer --regid=trainer --init-groups -- \\
    touch {run}/.psfleet-drill 2>/dev/null || {{ echo "process $pid can still write" >&2; exit 1; }}
done
"""
        run_everywhere(testbed, dict.fromkeys(testbed.inventory.hosts, script))
        return f"no task can write below {testbed.run_dir}"

    def revert(self, testbed: Testbed) -> None:
        run = shlex.quote(testbed.run_dir)
        testbed.everywhere(
            f"while mountpoint --quiet {run}; do root umount --lazy {run} || exit 1; done; "
            f"while mountpoint --quiet /run/{TABLE}; do root umount --lazy /run/{TABLE} || exit 1; done"
        )
