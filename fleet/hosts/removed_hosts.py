"""Hosts that were taken out of the cluster: a checkout that still lists one would bring it back.

Each has a file on the chief's host, with who took it out and when.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fleet.hosts.ssh import Hosts
from fleet.site.origin import origin

REMOVED = "/var/lib/psfleet/removed"
# By coreutils' printf, which says why it can't write.
_NOTE = f"""umask 022
mkdir -p {REMOVED} && env printf '%s\\n' "$2 at $(date --utc '+%Y-%m-%d %H:%M') UTC" >{REMOVED}/"$1\""""
# As root: where root's umask is 077, nobody else may look.
_READ = f"""cd {REMOVED} 2>/dev/null || exit 0
for name in *; do [ ! -s "$name" ] || echo "$name $(cat "$name")"; done"""


def note_removal(hosts: Hosts, chief: str, name: str) -> str:
    """Have the chief's host keep that a host was taken out now, by this operator; returns why it does not, or nothing.

    What was removed by then stays so, whatever becomes of the note.
    """
    script = f"root sh -c {shlex.quote(_NOTE)} sh {shlex.quote(name)} {shlex.quote(origin())}"
    answer = hosts.run({chief: script})[chief]
    if not (answer.unreachable or answer.code):
        return ""
    why = answer.unreachable or answer.stderr.strip()
    return (
        f"{chief} does not keep that {name} was taken out ({why}). Take {name} out of the inventories "
        "of other checkouts too: their site.yml would bring it back"
    )


def forget_removals(hosts: Hosts, chief: str, names: Sequence[str]) -> None:
    """Have hosts back that were taken out."""
    if files := " ".join(f"{REMOVED}/{shlex.quote(name)}" for name in names if name):
        hosts.run({chief: f"root rm -f {files}"})


def find_removed(hosts: Hosts, chief: str, listed: Sequence[str]) -> dict[str, str]:
    """Return who took hosts out that an inventory lists, and when."""
    if not listed:
        return {}
    lines = hosts.run({chief: f"root sh -c {shlex.quote(_READ)}"})[chief].stdout.splitlines()
    known = dict(line.split(" ", 1) for line in lines)
    return {name: known[name] for name in listed if name in known}


def describe_removed(removed: dict[str, str]) -> str:
    """Say why site.yml refuses an inventory."""
    found = "; ".join(f"{name} was taken out of this cluster by {who}" for name, who in removed.items())
    return (
        f"{found}. Expected an inventory without it: take that of the checkout where it was done, or type "
        f"`fab remove-host {next(iter(removed))}`. To have it back, once: site.yml -e "
        f"cluster_brings_back={','.join(removed)}"
    )
