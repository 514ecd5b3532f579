"""What the role wireguard writes on one host, with directories of the tests' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleet.site import wireguard
from tests.rendered_firewall import render

ROLE = Path(__file__).parents[1] / "roles/wireguard"
VARIABLES = yaml.safe_load((ROLE / "defaults/main.yml").read_text()) | yaml.safe_load(
    (ROLE / "vars/main.yml").read_text()
)


def files(
    groups: Mapping[str, Sequence[str]],
    hostvars: Mapping[str, Mapping[str, Any]],
    host: str,
    keys: Mapping[str, str],
    directory: Path,
) -> dict[str, str]:
    """Render the role's templates for a host: texts by the names of the files."""
    values = VARIABLES | dict(hostvars[host])
    values |= {
        "__wireguard_directory": str(directory),
        "__wireguard_program": str(directory / "psfleet-wireguard"),
        "__wireguard_running": str(directory / "running"),
        "__wireguard_known": {"peers": wireguard.wireguard_peers(groups, hostvars, keys)},
        "wireguard_tunnel_address": wireguard.tunnel_address(host, hostvars[host]),
        "wireguard_tunnel_bits": wireguard.tunnel_network(hostvars[host]).prefixlen,
        "inventory_hostname": host,
    }
    names = ("psfleet-wireguard", "psfleet-wireguard.service", "psfleet0.conf", "peers.conf", "unit.conf")
    return {name: render(f"{name}.j2", ROLE, **values) for name in names}
