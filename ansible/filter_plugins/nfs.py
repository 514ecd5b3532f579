"""Who serves the shared path and who mounts it: pure functions of the inventory, used by ansible/storage.yml."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cluster_spec import JOBS, _address, _bracketed

CLIENT_GROUPS = (*JOBS, "tensorboard")


def nfs_clients(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Addresses of the hosts that mount the shared path, each once; the server itself needs no export."""
    hosts = dict.fromkeys(host for group in CLIENT_GROUPS for host in groups.get(group, ()))
    servers = groups.get("nfs_server", ())
    return list(dict.fromkeys(_address(host, hostvars[host]) for host in hosts if host not in servers))


def nfs_source(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], host: str) -> str:
    """What `host` mounts: `address:path` of the server, and on the server itself the path alone."""
    server = groups["nfs_server"][0]
    path = str(hostvars[server].get("cluster_nfs_dir"))
    return path if host == server else f"{_bracketed(_address(server, hostvars[server]))}:{path}"


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"nfs_clients": nfs_clients, "nfs_source": nfs_source}
