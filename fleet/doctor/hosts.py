"""What is wrong with hosts, from what each of them has measured and said (probe.py): pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from fleet.doctor.finding import ERROR, WARNING, Finding
from fleet.hosts.cluster import Observation
from fleet.hosts.foreign_hosts import foreign_hosts
from fleet.hosts.observation import NO_SYSTEMD
from fleet.output.tables import render_duration
from fleet.site.host_check import taken_ports
from fleet.site.inventory import Inventory
from fleet.site.paces import FEWEST_PEERS, far_below

Facts = Mapping[str, Any]
LITTLE_BYTES = 2 * 10**9  # a release with its environment takes 1.6 GB, and 1.9 while it is installed
NO_BYTES = 200 * 10**6
RUN_BYTES = 20 * 10**6  # without 16 MiB systemd reads no unit again
LITTLE_FILES = 30_000  # an environment has 16,000, and 27,000 while it is installed
LITTLE_MEMORY = 256 * 2**20
CLOCK_SECONDS = 5.0  # between two hosts; host_look has those from the control machine
SLOW_PATH = 5.0  # MiB/s
OPEN_FILES = 1_048_576  # as trainer@.service has it


def judge_hosts(inventory: Inventory, observation: Observation, facts: Mapping[str, Facts]) -> list[Finding]:
    """Return what is wrong with each host by itself, and with one among its peers."""
    found: list[Finding] = []
    for host, why in observation.unreachable.items():
        if host in observation.drains:  # it may be off, as `fab hosts` has it
            continue
        if why.startswith(NO_SYSTEMD):
            fix = "see `systemctl is-system-running`, there; a container needs systemd as its first process"
            found.append(Finding(ERROR, host, "systemd", why, fix))
        else:
            found.append(Finding(ERROR, host, "SSH", f"it can't be reached: {why}", advise_ssh(inventory, host, why)))
    for host, what in foreign_hosts(inventory, observation).items():
        found.append(
            Finding(ERROR, host, "cluster", what, f"take {host} out of {inventory.source}, or free it as that says")
        )
    for host, each in facts.items():
        for judge in JUDGES if host in inventory.hosts else (_room, _memory, _units, _proxies):
            found += judge(inventory, host, each)
    found += judge_services(observation)
    return [*found, *judge_clocks(facts), *judge_peers({h: each for h, each in facts.items() if h in inventory.hosts})]


def judge_services(observation: Observation) -> list[Finding]:
    """Return what hosts should serve beside their tasks and don't."""
    down = [(host, unit) for host, units in observation.services.items() for unit in units if not unit.up]
    fix = "journalctl -u {unit} -n 30, there; then ansible-playbook site.yml --limit {host}"
    return [
        Finding(ERROR, host, "units", f"{unit.name} {unit.describe_down()}", fix.format(unit=unit.name, host=host))
        for host, unit in down
    ]


def advise_ssh(inventory: Inventory, host: str, why: str) -> str:
    """Return the command that shows, or fixes, why SSH does not come in."""
    if "ssh-keygen -R" in why or "Connect once" in why:
        return why.rpartition(": ")[2]
    known = inventory.everyone[host]
    key = f" -i {known.key_file}" if known.key_file else ""
    port = f" -p {known.port}" if known.port else ""
    return f"ssh -v{key}{port} {f'{known.user}@' if known.user else ''}{known.address}"


def _disk(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    if why := facts["unmeasured"]:
        what = f"how fast disk, memory and shared path are is unknown: {why}"
        yield Finding(WARNING, host, "disk", what, "df /run /var/tmp, and `free -m`, there; then fab doctor again")
    elif facts["disk_pace"] is None:
        fix = "findmnt --target /var/tmp, `dmesg | tail` and `iostat -x 1`: a broken disk is slow, or read-only"
        yield Finding(ERROR, host, "disk", f"a test file can't be written to /var/tmp: {facts['disk_why']}", fix)


def _room(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    seen = set()
    for path, room in facts["room"].items():
        if room is None or tuple(room.values()) in seen:  # one file system has several of these paths
            continue
        seen.add(tuple(room.values()))
        fix = (
            "fab prune --keep 5 --plan"
            if path in (inventory.shared_dir, inventory.variables[host].get("cluster_nfs_dir"))
            else f"free some there: `du -xh {path} | sort -h | tail`"
        )
        little, none = (RUN_BYTES, RUN_BYTES) if path == "/run" else (LITTLE_BYTES, NO_BYTES)
        if room["free"] < little:
            what = f"{path} has {room['free'] / 1e6:,.0f} MB free of {room['size'] / 1e9:,.1f} GB"
            yield Finding(ERROR if room["free"] < none else WARNING, host, "room", what, fix)
        if room["files"] and room["files_free"] < LITTLE_FILES:
            yield Finding(WARNING, host, "room", f"{path} has room for {room['files_free']:,} more files", fix)


def _memory(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    if facts["memory"]["available"] < LITTLE_MEMORY:
        left = facts["memory"]["available"] / 2**20
        what = f"{left:.0f} MiB of memory are left of {facts['memory']['size'] / 2**30:.1f} GiB"
        yield Finding(WARNING, host, "memory", what, "see what takes it: `ps --sort=-rss -eo rss,cmd | head`")


def _path(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    check = facts["path"]
    if check["rc"] is None:
        yield Finding(
            ERROR, host, "shared path", "its check is not installed", f"ansible-playbook site.yml --limit {host}"
        )
    elif check["rc"]:
        yield Finding(
            ERROR, host, "shared path", check["why"] or "its check fails", "systemctl start psfleet-remount, there"
        )
    shared = facts["shared"]
    if shared and shared["pace"] is None and not check["rc"]:
        what = f"the user trainer can't write to {inventory.shared_dir}: {shared['why']}"
        yield Finding(ERROR, host, "shared path", what, f"df {inventory.shared_dir}, and its provider's rights")
    elif shared and shared["pace"] is not None and shared["pace"] < SLOW_PATH:
        what = f"{shared['pace']:.2g} MiB/s to the shared path: a checkpoint takes long"
        yield Finding(WARNING, host, "shared path", what, "look at the link and at the server: `nfsiostat 1`")


def _ports(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    for what, fix in taken_ports(inventory.listeners_on(host), facts["listeners"]):
        yield Finding(ERROR, host, "ports", what, fix)


def _units(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    for unit in facts["units"]["failed"]:
        # The tasks say more themselves, and what a host serves is asked for by name.
        if not unit.startswith("trainer@") and unit not in inventory.services_on(host).values():
            fix = f"journalctl -u {unit} -n 30, there; then ansible-playbook site.yml --limit {host}"
            yield Finding(ERROR, host, "units", f"{unit} has failed", fix)
    if not facts["units"]["clock"]:
        what = "no service keeps its clock"
        yield Finding(WARNING, host, "clock", what, "apt install chrony, there, or ansible-playbook site.yml")


def _limits(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    for unit, limit in facts["limits"].items():
        if limit < OPEN_FILES:
            what = f"{unit} may open {limit:,} files, fewer than the {OPEN_FILES:,} of its unit"
            yield Finding(WARNING, host, "limits", what, f"systemctl cat {unit}, there: a drop-in lowers LimitNOFILE")


def _umask(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    for path in facts["unreadable"]:
        what = f"the user trainer can't read {path}, as after an installation by hand under umask 077"
        yield Finding(ERROR, host, "umask", what, f"ansible-playbook site.yml --limit {host}")


def _proxies(inventory: Inventory, host: str, facts: Facts) -> Iterator[Finding]:
    for address, why in facts["proxies"].items():
        what = f"the proxy {address} of systemd's environment takes no connection: {why}. Webhooks and downloads wait"
        yield Finding(WARNING, host, "proxies", what, "fix DefaultEnvironment in /etc/systemd/system.conf*, there")


JUDGES = (_disk, _room, _memory, _path, _ports, _units, _limits, _umask, _proxies)


def judge_clocks(facts: Mapping[str, Facts]) -> list[Finding]:
    """Return the hosts whose clocks are not those of the others."""
    known = {host: each["apart"] for host, each in facts.items() if each["apart"] is not None}
    if len(known) < FEWEST_PEERS:
        return []
    found = []
    for host, clock in known.items():
        apart = clock - median(known.values())
        if abs(apart) > CLOCK_SECONDS:
            what = f"its clock is {render_duration(abs(apart))} {'ahead of' if apart > 0 else 'behind'} the others'"
            found.append(Finding(ERROR, host, "clock", what, "timedatectl set-ntp true, there; then chronyc makestep"))
    return found


def judge_peers(facts: Mapping[str, Facts]) -> list[Finding]:
    """Return the hosts that are far below their peers."""
    return [Finding(WARNING, *slow) for slow in far_below(facts)]
