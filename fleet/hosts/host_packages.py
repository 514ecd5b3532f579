"""What a host says of its packages of Debian and of its boot, and the scripts that update and reboot it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.errors import ClusterTrouble, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import last_line

LOOK_SECONDS = 300.0
INSTALL_SECONDS = 3600.0
MAX_NAMES = 8  # of packages, on a line

# A mirror may fail once, and apt may be at work by itself.
REFRESH = """
refresh() { apt-get -qq --option APT::Update::Error-Mode=any update; }
refresh 2>/dev/null || { sleep 10; refresh; } || exit
"""
# A container has its machine's boot id, and a machine starts PID 1 at nearly the same tick of each boot.
BOOT = r"""
ticks=$(cut -d' ' -f22 /proc/1/stat)
began=$(sed -n 's/^btime //p' /proc/stat)
echo "boot=$(cat /proc/sys/kernel/random/boot_id):$ticks"
echo "began=$((began + ticks / $(getconf CLK_TCK)))"
"""
# Debian itself leaves no /run/reboot-required for a kernel.
LOOK = f"""{BOOT}
[ ! -e /run/reboot-required ] || echo "reboot=$(sort -u /run/reboot-required.pkgs 2>/dev/null | tr '\\n' ' ')"
[ -z "$(find /boot -maxdepth 1 -name 'vmlinuz-*' -newerct "@$began" 2>/dev/null)" ] || echo "reboot=a new kernel"
apt-get --quiet --simulate --with-new-pkgs upgrade
"""
# In a unit of its own, which goes on where the connection is lost; a later call waits for it. Files that were
# changed by hand stay as they are.
INSTALL = """
while systemctl is-active --quiet psfleet-update; do sleep 2; done
began=$(date +%s)
systemd-run --quiet --wait --collect --unit=psfleet-update --setenv=DEBIAN_FRONTEND=noninteractive sh -c '
    dpkg --configure -a && apt-get --quiet --yes --with-new-pkgs --option DPkg::Lock::Timeout=600 \
    --option Dpkg::Options::=--force-confdef --option Dpkg::Options::=--force-confold upgrade' && exit
journalctl --unit=psfleet-update --since="@$began" --lines=30 --output=cat |
    grep -E -A 1 '^(E:|dpkg: error)' | head -n 2 | tr -s '\n ' ' ' >&2
exit 1
"""
REBOOT = "systemd-run --quiet --collect --on-active=1 systemctl reboot"


@dataclass(frozen=True)
class HostState:
    """What a host says of its packages and its boot."""

    boot: str
    """Another one after each boot."""
    began: float
    """When that was, in seconds since 1970."""
    updates: Sequence[str]
    """Packages with the version that they have and the one that they get."""
    reboot: str
    """What asks for a reboot; empty where nothing does."""

    def describe(self) -> str:
        """Say how many updates there are, and which packages, or the first of them."""
        names = [update.partition(" ")[0] for update in self.updates]
        which = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
        return f"{len(names)} update{'s' * (len(names) != 1)} ({which})" if names else ""


def look_at(cluster: Cluster, hosts: Sequence[str], script: str = LOOK) -> dict[str, HostState]:
    """Ask hosts for their updates and their boot, or with another script for their boot alone, all at once."""
    if not hosts:
        return {}
    answers = as_root(cluster, hosts, script, LOOK_SECONDS, "Look there: apt-get update")
    found = {}
    for host, text in answers.items():
        values = values_of(text)
        updates = [
            f"{name} {before + ' -> ' if before else ''}{after}"
            for name, before, after in re.findall(r"^Inst (\S+)(?: \[(\S+)\])? \((\S+)", text, re.MULTILINE)
        ]
        reboot = values["reboot"].strip() or "its packages ask for it" if "reboot" in values else ""
        found[host] = HostState(values.get("boot", ""), float(values.get("began", 0)), updates, reboot)
    return found


def values_of(text: str) -> dict[str, str]:
    """Read the lines `name=value` that a host prints."""
    return dict(re.findall(r"^(boot|began|reboot)=(.*)$", text, re.MULTILINE))


def as_root(cluster: Cluster, hosts: Sequence[str], script: str, seconds: float, fix: str) -> Mapping[str, str]:
    """Run a script on hosts as root; returns what each printed."""
    answers = cluster.hosts.run(dict.fromkeys(hosts, f"root sh -c {shlex.quote(script)}"), seconds)
    if away := {host: answer.unreachable for host, answer in answers.items() if answer.unreachable}:
        raise HostsUnreachable(away, fix)
    if failed := [f"{host}: {last_line(answer)}. {fix}" for host, answer in answers.items() if answer.code]:
        raise ClusterTrouble("\n".join(failed))
    return {host: answer.stdout for host, answer in answers.items()}
