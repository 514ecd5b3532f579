"""Faults of one way: what a task's host sends to a ps is lost in part, while all other ways are well.

Rules are nftables', in a table of the drill's own; a delay is that of a process. Each proves itself by what it has
counted, and is taken back by a timer of the host where nothing else does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fleet.drills import packet_delay
from fleet.drills.faults import SELF_REVERT_SECONDS, TABLE, Aimed, Kill, run_everywhere
from fleet.drills.testbed import DrillFailed, NotHere, Testbed
from fleet.site.topology import Task

# What is lost, for packets from a worker's host ($from) to a ps's ($to, its port $port).
LOST: Mapping[str, tuple[str, ...]] = {
    "direction": ("out $family daddr $to",),
    "port": ("out $family daddr $to tcp dport $port",),
    "syn": ("out $family daddr $to tcp dport $port tcp flags & (syn | ack) == syn",),
    "large": ("out $family daddr $to meta length > 1000", "in $family saddr $to meta length > 1000"),
    "loss": ("out $family daddr $to numgen random mod 3 == 0", "in $family saddr $to numgen random mod 3 == 0"),
}
LOST_IS = {
    "direction": "packets",
    "port": "packets for one port",
    "syn": "packets that open a connection",
    "large": "large packets",
    "loss": "a third of the packets",
}
DELAY_MS = 200
CONNECT = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()
except ConnectionRefusedError:
    pass  # an answer too, of a host whose ps is about to start
print(round(1000 * (time.monotonic() - began)))
"""
LATE = "psfleet_late"  # the unit, the table and the device: of 15 letters at most
TUN = "root sh -c ': <>/dev/net/tun' 2>/dev/null"
PROOF_SECONDS = 30.0


def reverts_itself(command: str) -> str:
    """The lines that have systemd run a command later, should the control machine be gone.

    What a drill left that was ended by force is in the way.
    """
    return f"""
root systemctl stop {TABLE}.timer 2>/dev/null; root {command} 2>/dev/null
root systemd-run --quiet --collect --unit={TABLE} --on-active={SELF_REVERT_SECONDS} {command} || exit 1
"""


def reverts(command: str) -> str:
    """The lines that take a fault back now."""
    return f"root {command} 2>/dev/null; root systemctl stop {TABLE}.timer 2>/dev/null; true"


def device_to(address: str) -> str:
    """The shell's words for the device by which packets leave for an address."""
    return f"$(ip route get {address} | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' | head -n 1)"


def loads(chains: str) -> str:
    """The lines that load a drill's table."""
    return f"root nft -f - <<END || exit 1\ntable inet {TABLE} {{\n{chains}\n}}\nEND\n"


REMOVE = f"nft delete table inet {TABLE}"


def other_ps(testbed: Testbed, task: Task) -> Task:
    """The last ps on another host than the task's, and not on the coordinator's if it can be; raises NotHere."""
    others = [each for each in testbed.tasks("ps") if each.host != task.host]
    if not others:
        raise NotHere(f"every ps is on {task.host}, the host of {task.name}: there is no way to break")
    return next((each for each in reversed(others) if each.host != testbed.chief.host), others[-1])


def counted(testbed: Testbed, host: str, table: str, first: str = "") -> int:
    """How many packets a table on a host has counted, after a script that the host runs `first`."""
    shown = testbed.on(host, f"{first}root nft list table inet {table}")
    return sum(int(count) for count in re.findall(r"counter packets (\d+)", shown))


@dataclass(frozen=True)
class WayFault(Aimed):
    """A fault of the way from the chosen task's host to one ps."""

    lasts: float = 60.0
    takes_away: ClassVar[bool] = True

    def ends(self, testbed: Testbed) -> tuple[Task, Task]:
        task = self.choice(testbed)[0]
        return task, other_ps(testbed, task)

    def reaches(self, testbed: Testbed) -> set[str]:
        """Raises NotHere where there is no such way."""
        self.ends(testbed)
        return set()

    def revert(self, testbed: Testbed) -> None:
        testbed.on(self.choice(testbed)[0].host, reverts(REMOVE))


@dataclass(frozen=True)
class Lossy(WayFault):
    """nftables drops what `LOST` says of the packets between a worker's host and a ps."""

    what: str = "direction"

    def inject(self, testbed: Testbed) -> str:
        task, ps = self.ends(testbed)
        family = "ip6" if ":" in ps.address else "ip"
        rules: dict[str, list[str]] = {"in": [], "out": []}
        for rule in LOST[self.what]:
            chain, _, match = rule.partition(" ")
            for name, value in (("$family", family), ("$to", ps.address), ("$port", str(ps.port))):
                match = match.replace(name, value)
            rules[chain].append(f"    {match} counter drop")
        hooks = {"in": "input", "out": "output"}
        chains = "\n".join(
            f"  chain {chain} {{\n    type filter hook {hooks[chain]} priority -300; policy accept;\n"
            + "\n".join(lines)
            + "\n  }"
            for chain, lines in rules.items()
        )
        script = reverts_itself(REMOVE) + loads(chains)
        run_everywhere(testbed, {task.host: script})
        count = testbed.wait(
            lambda: counted(testbed, task.host, TABLE), PROOF_SECONDS, f"{task.host} drops {LOST_IS[self.what]}"
        )
        return f"{task.host} dropped {count} of {LOST_IS[self.what]} between it and {ps.name}"


@dataclass(frozen=True)
class NoConnection(Lossy):
    """No further connection comes about; the task is killed, since those that there are still work."""

    what: str = "syn"

    def inject(self, testbed: Testbed) -> str:
        task, _ = self.ends(testbed)
        # The rule counts when the host tries its ways, which needs a connection each time.
        return f"{super().inject(testbed)}, {Kill(lambda testbed: [task]).inject(testbed)}"


@dataclass(frozen=True)
class Delay(WayFault):
    """Everything that a host sends to a ps's comes later (`packet_delay.py`, a process of the host)."""

    def reaches(self, testbed: Testbed) -> set[str]:
        return {self.ends(testbed)[1].host}

    def inject(self, testbed: Testbed) -> str:
        task, ps = self.ends(testbed)
        program = shlex.quote(Path(packet_delay.__file__).read_text(encoding="utf-8"))
        script = f"""
root systemctl stop {LATE} 2>/dev/null
root systemd-run --quiet --collect --unit={LATE} --service-type=notify \\
  --property=RuntimeMaxSec={SELF_REVERT_SECONDS} python3 -c {program} {ps.address} {DELAY_MS} {LATE}
"""
        if testbed.on(task.host, f"{TUN} && echo there || true").strip() != "there":
            raise NotHere(f"{task.host} can't open /dev/net/tun, which delays packets: modprobe tun")
        run_everywhere(testbed, {task.host: script})
        took = testbed.on(task.host, f"python3 -c {shlex.quote(CONNECT)} {ps.address} {ps.port}").strip()
        if float(took or 0) < DELAY_MS:
            raise DrillFailed(f"{task.host} reached {ps.name} in {took} ms: nothing came late")
        return f"{task.host} reached {ps.name} in {took} ms, and {counted(testbed, task.host, LATE)} packets were late"

    def revert(self, testbed: Testbed) -> None:
        testbed.on(self.choice(testbed)[0].host, f"root systemctl stop {LATE} 2>/dev/null; true")


@dataclass(frozen=True)
class Doubled(WayFault):
    """A ps's host takes the coordinator's host for the worker's, as where both have the address.

    Its packets for the worker go to the coordinator's hardware address, and that host takes the address for its own.
    """

    def ends(self, testbed: Testbed) -> tuple[Task, Task]:
        task, ps = super().ends(testbed)
        if testbed.chief.host in (task.host, ps.host):
            raise NotHere(f"{testbed.chief.host} has {task.name} or {ps.name}, and can't stand for another host")
        return task, ps

    def reaches(self, testbed: Testbed) -> set[str]:
        return {self.ends(testbed)[1].host, testbed.chief.host}

    def inject(self, testbed: Testbed) -> str:
        task, ps = self.ends(testbed)
        claim = f"""
device={device_to(ps.address)}
hardware=$(cat /sys/class/net/$device/address)
[ -n "$hardware" ] || exit 0
{reverts_itself(self._give_up(task))}
sysctl -n net.ipv4.conf.$device.arp_ignore | root tee /run/{TABLE}-arp >/dev/null
root sysctl -q net.ipv4.conf.$device.arp_ignore=1 && root ip addr add {task.address}/{bits_of(task)} dev lo || exit 1
echo "$hardware"
"""
        chief = testbed.chief
        [*_, hardware] = run_everywhere(testbed, {chief.host: claim})[chief.host].split() or [""]
        if not hardware:
            raise NotHere(f"packets leave {chief.host} by a device without a hardware address, such as a tunnel's")
        mislead = f"""
device={device_to(task.address)}
{reverts_itself(f'ip neigh del {task.address} dev "$device"')}
root ip neigh replace {task.address} lladdr {hardware} dev "$device" nud permanent || exit 1
ip neigh show {task.address}
"""
        shown = run_everywhere(testbed, {ps.host: mislead})[ps.host]
        if hardware not in shown:
            raise DrillFailed(f"{ps.host} has another neighbour at {task.address}: {shown.strip()}")
        return f"{ps.host} takes {chief.host} for {task.host}"

    def revert(self, testbed: Testbed) -> None:
        task, ps = self.ends(testbed)
        command = reverts(f'ip neigh del {task.address} dev "$device"')
        testbed.on(ps.host, f"device={device_to(task.address)}; {command}")
        restore = (
            f'[ ! -e /run/{TABLE}-arp ] || root sysctl -q net.ipv4.conf.$device.arp_ignore="$(cat /run/{TABLE}-arp)"'
        )
        testbed.on(
            testbed.chief.host,
            f"device={device_to(ps.address)}; {restore}; root rm -f /run/{TABLE}-arp; {reverts(self._give_up(task))}",
        )

    def _give_up(self, task: Task) -> str:
        return f"ip addr del {task.address}/{bits_of(task)} dev lo"


def bits_of(task: Task) -> int:
    """How many bits a task's address has."""
    return 128 if ":" in task.address else 32


@dataclass(frozen=True)
class NoWayIn(WayFault):
    """A ps's host drops what comes from the hosts of all workers."""

    def reaches(self, testbed: Testbed) -> set[str]:
        self._workers(testbed)
        return set()

    def _workers(self, testbed: Testbed) -> list[str]:
        """The addresses of workers on other hosts than the ps's; raises NotHere."""
        (ps,) = self.choice(testbed)
        workers = sorted({task.address for task in testbed.tasks("worker")} - {ps.address})
        if not workers:
            raise NotHere(f"every worker is on {ps.host}, the host of {ps.name}: there is no way to break")
        return workers

    def inject(self, testbed: Testbed) -> str:
        (ps,), workers = self.choice(testbed), self._workers(testbed)
        family = "ip6" if ":" in ps.address else "ip"
        rule = f"{family} saddr {{ {', '.join(workers)} }} tcp dport {ps.port} counter drop"
        chain = f"  chain in {{\n    type filter hook input priority -300; policy accept;\n    {rule}\n  }}"
        script = reverts_itself(REMOVE) + loads(chain)
        run_everywhere(testbed, {ps.host: script})
        return f"{ps.host} drops what {len(workers)} hosts send to {ps.name}"
