"""The server of the shared path and the hosts that mount it: pure functions of the inventory (ansible/storage.yml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.site.members import address_of, bracketed
from trainer.cluster.spec import JOBS

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
