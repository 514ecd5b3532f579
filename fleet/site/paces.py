"""Which hosts are far below their peers, by what roles/host_check measures on each: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

# A host is far below its peers at one part in so many of their median; of fewer hosts there is none.
FAR_BELOW, FEWEST_PEERS = 4.0, 3
PACES = {
    "disk_pace": ("disk", "writes {value} MiB/s to /var/tmp", "look at its disk: `dmesg`, `iostat -x 1`"),
    "memory_pace": ("memory", "copies {value} GiB/s of memory", "look for other work there: `top`"),
    "shared_pace": ("link", "writes {value} MiB/s to the shared path", "look at its link: `ip -s link`, fab ways"),
}  # fmt: skip


class SlowHost(NamedTuple):
    """A host that is far below its peers."""

    host: str
    part: str
    what: str
    fix: str


def far_below(paces: Mapping[str, Mapping[str, Any]], *, or_unmeasured: bool = False) -> list[SlowHost]:
    """Return the hosts that are far below their peers, in what PACES names.

    Args:
        paces: by host what host_pace returned.
        or_unmeasured: return hosts without a pace as well, as where a write took too long, if any peer has one.
    """
    found = []
    for key, (part, text, fix) in PACES.items():
        known = {host: pace for host, each in paces.items() if (pace := pace_of(each, key)) is not None}
        middle = median(known.values()) if known else 0.0
        for host, each in paces.items() if known else ():
            pace = known.get(host)
            if pace is not None and len(known) >= FEWEST_PEERS and pace * FAR_BELOW < middle:
                what = text.format(value=f"{pace:.3g}")
            elif pace is None and or_unmeasured and (key != "shared_pace" or each["shared"]):
                why = each["shared"]["why"] if key == "shared_pace" else each.get("disk_why", "")
                what = f"{text.format(value='?')} ({why})"
            else:
                continue
            found.append(SlowHost(host, part, f"{what}, and its peers {middle:.3g} (median)", fix))
    return found


def pace_of(measured: Mapping[str, Any], key: str) -> float | None:
    if key == "shared_pace":
        return measured["shared"]["pace"] if measured["shared"] else None
    pace: float | None = measured[key]
    return pace


def slow_hosts(hosts: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say of a play's hosts which are far below the others, by what each has measured now or noted before."""
    paces = {}
    for host in hosts:
        variables = hostvars[host]
        now = variables.get("__host_check_pace", {})
        measured = now if "disk_pace" in now else variables.get("__host_check_seen", {}).get("pace")
        if measured:
            paces[host] = measured
    found = far_below(paces, or_unmeasured=True)
    return [f"host '{each.host}': it {each.what}: {each.fix}. Measure again: fab doctor" for each in found]
