"""The ways between hosts that go through WireGuard: pure functions of the inventory and of the hosts' public keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

INTERFACE = "psfleet0"
# RFC 4193's private addresses. Only psfleet's tunnels have them, and a host is in one cluster.
NETWORK = "fd6c:1d0e:77b2::/64"
PORT = 51820
# An address can be made of a host's name where this many bits are free.
NAME_BITS = 64
# Beside the inventory, as group_vars is. Ansible reads no file of this ending as a list of hosts.
KEYS_FILE = "wireguard-keys.txt"
HEADER = """\
# The public WireGuard keys of the hosts. site.yml writes this file: keep it with the inventory, in version control.
# Nothing in it is secret. A host that does not answer keeps its line, so that the others know it when it is back.
"""
GROUPS = (
    "chief", "ps", "worker", "evaluator", "data", "tensorboard", "prometheus", "alertmanager", "nfs_server", "gpu",
)  # fmt: skip


class WireguardError(ValueError):
    """The message names the value, what was expected and the fix."""


def is_encrypted(variables: Mapping[str, Any]) -> bool:
    """Whether the hosts speak through WireGuard."""
    return variables.get("cluster_encryption") is True


def endpoint(variables: Mapping[str, Any]) -> str | None:
    """Where a host's encrypted packets go: the address that the others know it by without encryption."""
    return variables.get("cluster_address") or variables.get("ansible_host")


def tunnel_network(variables: Mapping[str, Any]) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of all tunnels' addresses."""
    return ipaddress.ip_network(variables.get("wireguard_network", NETWORK))


def tunnel_address(host: str, variables: Mapping[str, Any]) -> str:
    """Return a host's address in the tunnel: what the inventory says, or one that is made of its name.

    Nothing is counted and nothing kept: a host has the same address whichever hosts come or go.
    """
    if given := variables.get("wireguard_address"):
        return str(ipaddress.ip_address(given))
    network = tunnel_network(variables)
    if network.max_prefixlen - network.prefixlen < NAME_BITS:
        raise WireguardError(
            f"host '{host}' has no wireguard_address, and {network} has too few addresses to make one of its name; "
            f"expected wireguard_address: {network[1]} or another one of that network on each host, or a "
            f"wireguard_network such as {NETWORK}"
        )
    digest = hashlib.sha256(f"psfleet {host}".encode()).digest()
    return str(network[int.from_bytes(digest[: NAME_BITS // 8], "big")])


def wireguard_hosts(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The hosts that have a tunnel: all that speak with one another."""
    return list(dict.fromkeys(host for group in GROUPS for host in groups.get(group, ())))


def wireguard_peers(
    groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], keys: Mapping[str, str]
) -> list[dict[str, Any]]:
    """List the tunnel's ends, `[{"host", "key", "address", "endpoint"}]`. A host whose key is unknown is left out."""
    peers = []
    for host in wireguard_hosts(groups):
        if host in keys:
            values = hostvars[host]
            where = endpoint(values) or host
            port = values.get("wireguard_port", PORT)
            peers.append(
                {
                    "host": host,
                    "key": keys[host],
                    "address": tunnel_address(host, values),
                    "endpoint": f"{f'[{where}]' if ':' in where else where}:{port}",
                }
            )
    return peers


def other_peers(peers: Iterable[Mapping[str, Any]], host: str) -> list[Mapping[str, Any]]:
    """Return all ends but a host's own."""
    return [peer for peer in peers if peer["host"] != host]


def keys_file(sources: Iterable[str]) -> Path:
    """Where an inventory's keys are kept: in its directory."""
    first = next((Path(source) for source in sources if "," not in source), None)
    if first is None:
        raise WireguardError(
            "cluster_encryption keeps the hosts' public keys beside the inventory, and this one is no file; expected a "
            "file or a directory: -i inventory/<site>"
        )
    return (first if first.is_dir() else first.parent) / KEYS_FILE


def read_keys(text: str) -> dict[str, str]:
    """Read the file of keys: a host's name and its public key on each line."""
    keys = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        host, _, key = line.strip().partition(" ")
        if not is_key(key.strip()):
            raise WireguardError(
                f"line {number} of {KEYS_FILE} is {line.strip()[:80]!r}; expected a host's name and its public key of "
                "44 characters. Remove the line: site.yml writes it again"
            )
        keys[host] = key.strip()
    return keys


def is_key(text: str) -> bool:
    """Whether a text is a key as wg writes it: 32 bytes in base64."""
    try:
        return len(text) == 44 and len(base64.b64decode(text, validate=True)) == 32
    except (binascii.Error, ValueError):
        return False


def merge_keys(known: Mapping[str, str], reported: Mapping[str, str], hosts: Collection[str]) -> dict[str, str]:
    """Return the keys of an inventory's hosts: those reported now, and of the other hosts the known ones."""
    merged = {**known, **reported}
    for host, key in reported.items():
        twin = next((other for other in hosts if other != host and merged.get(other) == key), None)
        if twin:
            raise WireguardError(
                f"the hosts {twin} and {host} have the same key; expected one each. One was copied from the other: "
                f"remove /etc/psfleet/wireguard/private.key on {host}, and run site.yml again"
            )
    return {host: merged[host] for host in hosts if host in merged}


def keys_text(keys: Mapping[str, str]) -> str:
    """Write the file of keys, in the order of the names, so that a host changes one line."""
    return HEADER + "".join(f"{host} {keys[host]}\n" for host in sorted(keys))


def deaf_hosts(
    groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], asked: Collection[str]
) -> list[str]:
    """Say of which hosts it is not known that they will switch keys, and why."""
    deaf = []
    for host in wireguard_hosts(groups):
        answer = hostvars[host].get("__wireguard_armed") or {}
        if host in asked and answer.get("rc") != 0:
            deaf.append(f"{host}: {answer.get('stderr') or answer.get('msg') or 'it did not answer'}")
    return deaf
