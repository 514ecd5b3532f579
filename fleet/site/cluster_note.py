"""Which cluster a host belongs to.

Each host keeps the name of its cluster in NOTE, which site.yml writes (roles/common). Another inventory that names the
host is refused: its tasks, ports, user and packet filter would replace those of the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.site.wireguard import endpoint

NOTE = "/var/lib/psfleet/cluster.json"


def cluster_name(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the inventory's `cluster_name`, or the address of the coordinator's host, which has one coordinator.

    The address is that of an unencrypted cluster, so that encryption makes no other cluster of it. Empty without chief.
    """
    for chief in groups.get("chief", ()):
        variables = hostvars[chief]
        return str(variables.get("cluster_name") or endpoint(variables) or chief)
    return ""


def former_names(
    groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], given: str = ""
) -> list[str]:
    """Return by which names the hosts may know this cluster too: the one `given`, the chief's addresses and its name.

    An inventory may get a `cluster_name` or a `cluster_address` later.
    """
    name = next(iter(groups.get("chief", ())), "")
    chief = hostvars[name] if name else {}
    return [str(each) for each in (given, chief.get("cluster_address"), chief.get("ansible_host"), name) if each]


def takes_over_option(before: str, after: str) -> str:
    """Return what the next site.yml needs, behind a space, where the cluster's name changes; empty where it stays."""
    return "" if before == after else f" -e cluster_takes_over={before}"


def cluster_problems(note: Any, host: str, name: str, takes_over: Sequence[str] = ()) -> list[str]:
    """Say that a host belongs to another cluster, with how to take it over; nothing where it belongs to this or none.

    Args:
        note: what the host has in NOTE, parsed; whatever is no note counts as none.
        name: this inventory's cluster.
        takes_over: the clusters whose hosts may be taken over.
    """
    noted = note.get("name") if isinstance(note, Mapping) else None
    if not noted or noted in (name, *takes_over):
        return []
    return [
        f"host '{host}': it belongs to the cluster {noted}{_since(note)}, and this inventory is the cluster {name}; "
        f"expected a host of this cluster, or of none. Free it with the inventory of {noted}: `fab remove-host`, or "
        f"reset.yml. Or, where {noted} is gone or was this cluster, once: site.yml -e cluster_takes_over={noted}"
    ]


def _since(note: Mapping[str, Any]) -> str:
    since = note.get("since")
    text = ""
    if isinstance(since, (int, float)):
        text += time.strftime(" since %Y-%m-%d %H:%M", time.localtime(since))
    return f"{text} (site.yml of {note['who']})" if note.get("who") else text
