"""Who serves the shared path and who mounts it: pure functions of the inventory, used by ansible/storage.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.site.members import JOBS, address_of, bracketed

OLD_HEADER = "# The whole of this machine's exports: psfleet owns this file."
CLIENT_GROUPS = (*JOBS, "tensorboard")


def nfs_clients(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of the hosts that mount the shared path, each once; the server itself needs no export."""
    hosts = dict.fromkeys(host for group in CLIENT_GROUPS for host in groups.get(group, ()))
    servers = groups.get("nfs_server", ())
    return list(dict.fromkeys(address_of(host, hostvars[host]) for host in hosts if host not in servers))


def nfs_source(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], host: str) -> str:
    """What `host` mounts: `address:path` of the server, and on the server itself the path alone."""
    server = groups["nfs_server"][0]
    path = str(hostvars[server].get("cluster_nfs_dir"))
    return path if host == server else f"{bracketed(address_of(server, hostvars[server]))}:{path}"


def without_own_exports(text: str) -> str:
    """Return what /etc/exports has besides the block that psfleet wrote there before it had a file of its own.

    The block is its header, with the line above it, and the exports of one directory right after it.
    """
    lines = text.splitlines(keepends=True)
    header = next((number for number, line in enumerate(lines) if line.startswith(OLD_HEADER)), None)
    if header is None:
        return text
    first, end = header, header + 1
    if first and lines[first - 1].startswith("# "):
        first -= 1
    served = lines[end].split(" ")[0] if end < len(lines) else ""
    while end < len(lines) and served.startswith("/") and lines[end].startswith(f"{served} "):
        end += 1
    return "".join(lines[:first] + lines[end:])
