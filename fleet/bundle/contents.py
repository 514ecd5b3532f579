"""What a bug report needs of each host, and of the control machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CURRENT
from fleet.hosts.observation import last_line
from fleet.site.inventory import Inventory

SECONDS = 60
# What hangs, as on a shared path that is gone, must not take the time of all that comes after it.
EACH_SECONDS, JOURNAL_SECONDS, RUN_FILE_SECONDS = 10, 20, 3
TAIL_BYTES = 200_000
# By file name: what a host runs for it, as root. What is missing says so in its file. {services} are its units.
COMMANDS = {
    "system.txt": "cat /etc/os-release; uname -a; uptime; systemd-detect-virt; nproc",
    "memory-and-disks.txt": "free -m; df -h; df -i; findmnt --real",
    "clock.txt": "timedatectl; chronyc tracking",
    "network.txt": "ip -brief address; ip route; ip -6 route; ss -Hltn",
    "firewall.txt": "nft list table inet psfleet",
    "units.txt": "systemctl list-units --all --no-pager --plain 'trainer@*' 'psfleet-*' {services}; "
    "systemctl --failed --no-pager --plain; systemctl status --no-pager --lines=0 'trainer@*' 'psfleet-*' {services}",
    "kernel.txt": "journalctl --dmesg --no-pager --lines=200 --priority=warning",
    "release.json": f"cat {CURRENT}/release.json",
    "configuration.txt": "tail -n +1 /etc/trainer/run.json /etc/trainer/*.env",
    "releases.txt": "ls -l --time-style=full-iso /opt/trainer /opt/trainer/releases /opt/trainer/envs",
}
JOURNAL = "journalctl --no-pager --output=short-iso-precise --lines={lines} --unit='trainer@*' --unit='psfleet-*'"
# Of the run, on the host that has the shared path.
RUN_FILES = ("run.json", "state.json", "status.json", "evaluation.json", "export.json", "attempts.json", "events.jsonl")
PACKAGES = ("psfleet", "ansible", "ansible-core", "fabric", "paramiko", "invoke", "jsonschema", "PyYAML")


def host_files(cluster: Cluster, run: str | None, lines: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return texts by their names in the archive, and who did not answer and why."""
    inventory = cluster.inventory
    scripts = {host: _script(inventory, host, run, lines) for host in inventory.everyone}
    answers = cluster.hosts.run(scripts, SECONDS)
    found: dict[str, str] = {}
    for host, answer in answers.items():
        for name, text in split_files(answer.stdout).items():
            found[f"run/{name}" if name in RUN_FILES and host == inventory.chief.host else f"hosts/{host}/{name}"] = (
                text
            )
    failed = {host: f"not all of it: {last_line(answer)}" for host, answer in answers.items() if answer.code}
    return found, failed | {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}


def _script(inventory: Inventory, host: str, run: str | None, lines: int) -> str:
    services = inventory.services_on(host).values()
    known = {name: command.replace("{services}", " ".join(services)) for name, command in COMMANDS.items()}
    commands = {name: (command, EACH_SECONDS) for name, command in known.items()}
    journal = [JOURNAL.format(lines=lines), *(f"--unit={unit}" for unit in services)]
    commands["journal.txt"] = (" ".join(journal), JOURNAL_SECONDS)
    if run is not None and host == inventory.chief.host:
        place = shlex.quote(f"{inventory.shared_dir}/runs/{run}")
        # As the tasks' user: root of a client of NFS has no rights.
        as_trainer = "setpriv --reuid=trainer --regid=trainer --init-groups --"
        tail = f"{as_trainer} tail -c {TAIL_BYTES} {place}"
        commands |= {name: (f"{tail}/{name}", RUN_FILE_SECONDS) for name in RUN_FILES}
    asked = "\n".join(
        f"echo '@@file {name}'; timeout -k 1 {seconds} sh -c {shlex.quote(command)} 2>&1; "
        f"case $? in 124 | 137) echo '(no end within {seconds} s)' ;; esac"
        for name, (command, seconds) in commands.items()
    )
    return f"root env SYSTEMD_COLORS=0 SYSTEMD_PAGER= timeout {SECONDS - 5} sh -c {shlex.quote(asked)}"


def split_files(printed: str) -> dict[str, str]:
    """Cut what a host printed at its lines `@@file NAME`."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in printed.splitlines():
        if line.startswith("@@file "):
            lines = found[line.removeprefix("@@file ")] = []
        else:
            lines.append(line)
    return {name: "\n".join(each) + "\n" for name, each in found.items()}


def versions() -> dict[str, Any]:
    """Return this machine's versions."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "from a checkout" if name == "psfleet" else "missing"
    return {"python": sys.version, "system": platform.platform(), "packages": packages}


def as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, sort_keys=True, default=str) + "\n"
