"""`fab advise`: two minutes of a training, then what holds it up, in sentences with figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fleet.actions.console import Console
from fleet.doctor import advice
from fleet.doctor.advice import HostUsage, Measurement
from fleet.errors import HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.hosts.units import properties_of

FIRST_STEPS_SECONDS = 30
PARTS = 4  # of the time: whether memory falls in each of them
# Where a host sends from; of bonds, bridges and containers the parts would count twice.
_LINK = "ip route show default | sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' | head -1"
# Processor time of a unit's processes, with their ended children's: systemd has none where it may not use the
# controller. Control groups are in one of these places, by their version.
_TICKS = r"""
for unit in {units}; do
    group=$(systemctl show --property=ControlGroup --value "$unit")
    for place in {system}/fs/cgroup {system}/fs/cgroup/systemd {system}/fs/cgroup/unified; do
        [ -n "$group" ] && [ -r "$place$group/cgroup.procs" ] || continue
        for pid in $(cat "$place$group/cgroup.procs"); do cat "{processes}/$pid/stat"; done 2>/dev/null |
            sed 's/.*) //' |
            awk -v unit="$unit" '{{ sum += $12 + $13 + $14 + $15 }} END {{ printf "%s=%.0f\n", unit, sum }}'
        break
    done
done"""


def advise(cluster: Cluster, console: Console, seconds: float) -> None:
    """Look for so many seconds, and say what the training waits for. Nothing is changed.

    Raises HostsUnreachable, after the advice, where it lacks a host that isn't drained.
    """
    away: dict[str, str] = {}
    looks = [first_look(cluster, console)]
    begun = console.clock()
    for number in range(1, PARTS + 1):
        _wait(console, begun + seconds * number / PARTS, begun + seconds)
        away.clear()
        try:
            looks.append(measure(cluster, away))
        except HostsUnreachable as silent:  # of the chief's host, for a moment or to the end
            away |= silent.reasons
        except OperatorMistake as ended:
            if len(looks) == 1:
                raise
            console.print(f"{ended}. This is of the {looks[-1].time - looks[0].time:.0f} s before")
            break
    if len(looks) == 1:
        raise HostsUnreachable(away)
    found = advice.advise(looks[0], looks[-1], looks[1:-1])
    record = {"seconds": seconds, "advice": [asdict(each) for each in found]}
    console.answer("advise", record, "\n".join(f"{each.part}: {each.text}" for each in found))
    if away:
        raise HostsUnreachable(away, "The advice lacks what they did since they last answered")


def _wait(console: Console, until: float, end: float) -> None:
    """Wait, and show for how long it still measures."""
    with console.progress() as progress:
        while (left := until - console.clock()) > 0:
            progress.show(f"measuring for {end - console.clock():.0f} s more")
            console.sleep(min(5.0, left))


class NoStepsYet(OperatorMistake):
    """No worker has said how many steps it has trained."""


def first_look(cluster: Cluster, console: Console) -> Measurement:
    """Look as soon as the workers' steps are known, which a run that has just begun says after some seconds."""
    has_ps = any(task.job == "ps" for task in cluster.inventory.tasks)
    end = console.clock() + FIRST_STEPS_SECONDS
    while True:
        try:
            return measure(cluster)
        except NoStepsYet:
            if not has_ps or console.clock() >= end:
                raise
            console.sleep(2.0)


def measure(cluster: Cluster, away: dict[str, str] | None = None) -> Measurement:
    """Ask each host for its processors, its link and its tasks, the chief's for the workers' steps.

    `away` gets why a host did not answer.
    """
    inventory = cluster.inventory
    seen = cluster.observe([inventory.chief.host], new_is_enough=True)
    if seen.unreachable:
        raise HostsUnreachable(seen.unreachable)
    if seen.run is None or seen.run.state != "training":
        state = seen.run.state if seen.run else "unknown"
        raise OperatorMistake(f"nothing trains (the run is {state}): start it, and ask again while it trains")
    if not seen.run.workers:
        raise NoStepsYet("no worker gives steps of its own here: advise is for strategy parameter_server")
    scripts = {host: script([task.unit for task in inventory.tasks_on(host)]) for host in inventory.hosts}
    hosts: dict[str, HostUsage] = {}
    used: dict[str, float] = {}
    for host, answer in cluster.hosts.run(scripts).items():
        if answer.unreachable or answer.code:
            if answer.unreachable and away is not None and host not in seen.drains:
                away[host] = answer.unreachable
            continue
        hosts[host], units = read(answer)
        used |= {task.name: units[task.unit] for task in inventory.tasks_on(host) if task.unit in units}
    workers = {task: int(each["steps"]) for task, each in seen.run.workers.items()}
    places = {task.name: task.host for task in inventory.tasks}
    return Measurement(
        seen.run.updated or seen.clocks[inventory.chief.host],
        workers,
        used,
        hosts,
        places,
        waits_of(seen.run.workers),
        seen.run.lookups,
        tuple(seen.run.tables),
        seen.run.data,
    )


def waits_of(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return for how many seconds each worker's steps have waited for their batches, of those that say it."""
    seconds = {task: each.get("input_wait_seconds") for task, each in workers.items()}
    return {task: float(each) for task, each in seconds.items() if each is not None}


def script(units: list[str], system: str = "/sys", processes: str = "/proc") -> str:
    """Return what a host runs: figures by name, then each unit's processor time, as systemd counts it."""
    return "\n".join(
        (
            "echo cores=$(nproc)",
            "echo boot=$(cat /proc/sys/kernel/random/boot_id)",
            "sed -n 's/^cpu  */stat=/p' /proc/stat",
            f"link=$({_LINK})",
            "echo sent=$(cat /sys/class/net/$link/statistics/tx_bytes 2>/dev/null)",
            "echo received=$(cat /sys/class/net/$link/statistics/rx_bytes 2>/dev/null)",
            "echo speed=$(cat /sys/class/net/$link/speed 2>/dev/null)",
            _TICKS.format(units=" ".join(units), system=system, processes=processes) if units else "",
            r"sed -n 's/^MemAvailable: *\([0-9]*\).*/available=\1\n/p' /proc/meminfo",
            f"systemctl show --property=Id,CPUUsageNSec {' '.join(units)}",
        )
    )


def read(answer: Answer) -> tuple[HostUsage, dict[str, float]]:
    """Read what `script` printed; a unit without a count is left out."""
    figures, _, units = answer.stdout.partition("\n\n")
    values = dict(line.split("=", 1) for line in figures.splitlines() if "=" in line)
    counted = properties_of(units)
    used = {unit: int(values[unit]) / 100 for unit in counted if values.get(unit, "").isdecimal()}
    nanoseconds = {unit: each.get("CPUUsageNSec", "") for unit, each in counted.items()}
    used |= {
        unit: int(each) / 1e9
        for unit, each in nanoseconds.items()
        if each.isdecimal() and len(each) < 20 and each != str(2**64 - 1)
    }
    ticks = [int(each) / 100 for each in values.get("stat", "").split()] + [0.0] * 8
    user, nice, system, _, storage, interrupts, soft, stolen = ticks[:8]
    busy = user + nice + system + interrupts + soft + stolen
    speed = _number(values.get("speed"))
    link = speed * 1e6 / 8 if speed > 0 else None
    host = HostUsage(_number(values.get("cores")) or 1.0, busy, storage, _number(values.get("sent")),
                _number(values.get("received")), link, 1024 * _number(values.get("available")) or None,
                values.get("boot", ""))  # fmt: skip
    return host, used


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return 0.0
