"""What is wrong with where the hosts are: their addresses, their tunnel's, and the way that SSH takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

from fleet.site.members import Groups, HostVars
from fleet.site.schema import checks, formats
from fleet.site.schema.inventory_reading import InventoryReading
from fleet.site.schema.problems import Problem, name_hosts, name_some
from fleet.site.wireguard import (
    WireguardError,
    endpoint,
    is_encrypted,
    keys_file,
    read_keys,
    tunnel_address,
    tunnel_network,
    wireguard_hosts,
)


def address_problems(reading: InventoryReading) -> Iterator[Problem]:
    """What is wrong with where the hosts are, and with two that are in one place."""
    hosts = checks.our_hosts(reading.groups)
    yield from _no_address(reading, hosts)
    taken: dict[str, str] = {}
    logins: dict[tuple[str, str], str] = {}
    sharing: dict[str, list[str]] = {}
    for host in hosts:
        values = reading.values[host]
        name = "cluster_address" if values.get("cluster_address") else "ansible_host"
        address = values.get(name)
        if host == "localhost" and (len(hosts) > 1 or (address and not formats.is_loopback(formats.address(address)))):
            yield Problem(
                "host 'localhost' is the machine that Ansible runs on; give the other machine a name", (host,)
            )
        if not address:
            continue
        address = formats.address(address)
        if formats.is_loopback(address) and len(hosts) > 1:
            text = (
                f"host {host!r} has {name}: {address}, which means each host itself; expected an address that every "
                "other host can reach, such as 10.0.0.10"
            )
            yield reading.problem(text, [host], name, address)
        elif address in taken:
            sharing.setdefault(address, [taken[address]]).append(host)
        taken.setdefault(address, host)
        yield from _same_machine(reading, host, name, address, logins, taken)
    for address, named in sharing.items():
        text = f"the hosts {name_some(named)} have the same address {address}; expected one each"
        name = "cluster_address" if reading.values[named[1]].get("cluster_address") else "ansible_host"
        yield Problem(text, tuple(named), name, address, *reading.place(named[1], name))


def _no_address(reading: InventoryReading, hosts: Sequence[str]) -> Iterator[Problem]:
    """Refuse hosts without an address, all of them in one problem; one that has a wrong address is refused for it."""
    if lacking := [each for each in hosts if not {"cluster_address", "ansible_host"} & set(reading.places[each])]:
        text = (
            f"{name_hosts(lacking)} {'has' if len(lacking) == 1 else 'have'} no address. Give each one that every "
            "other host can reach: ansible_host: 192.0.2.10 (and cluster_address: 10.0.0.10 where the hosts know one "
            "another by another address). Where names are addresses: ansible_host: '{{ inventory_hostname }}', in "
            "group_vars/all.yml"
        )
        yield Problem(text, tuple(lacking))


def _same_machine(
    reading: InventoryReading,
    host: str,
    name: str,
    address: str,
    logins: dict[tuple[str, str], str],
    taken: Mapping[str, str],
) -> Iterator[Problem]:
    """Refuse two names of one machine: one's cluster_address is the other's ansible_host, behind the same port."""
    values = reading.values[host]
    port = str(values.get("ansible_port") or 22)
    login = formats.address(values.get("ansible_host") or address)
    for where in dict.fromkeys((login, address)):
        other = logins.setdefault((where, port), host)
        if other != host and taken[address] == host:
            text = (
                f"the hosts {other}, {host} are reached at the same address and port ({where}:{port}); "
                "expected one machine for each name. Look at ansible_host and cluster_address of both"
            )
            place = reading.place(host, "ansible_host" if where == login else name)
            yield Problem(text, (other, host), "ansible_host", where, *place)
            break


def tunnel_problems(reading: InventoryReading) -> Iterator[Problem]:
    """What is wrong with the addresses of encrypted packets, and with a host that would take plain ones, too."""
    taken: dict[str, str] = {}
    for host in wireguard_hosts(reading.groups):
        values = reading.values[host]
        network = tunnel_network(values)
        outside = endpoint(values)
        if outside and _is_in(outside, network):
            text = (
                f"host {host!r} is reached at {outside}, which is in wireguard_network ({network}); expected an "
                "address outside of it: encrypted packets go there. Take another wireguard_network"
            )
            yield reading.problem(text, [host], "wireguard_network", str(network))
        if values.get("firewall_closes") == "none":
            text = (
                f"host {host!r} has firewall_closes: none, and cluster_encryption is true; expected all or ports. "
                "Without the table the tasks listen to plain packets, too"
            )
            yield reading.problem(text, [host], "firewall_closes", "none")
        with contextlib.suppress(WireguardError):  # the topology says it
            yield from _tunnel_address_problems(reading, host, tunnel_address(host, values), network, taken)


def _tunnel_address_problems(
    reading: InventoryReading, host: str, address: str, network: IPv4Network | IPv6Network, taken: dict[str, str]
) -> Iterator[Problem]:
    hosts: tuple[str, ...] = (host,)
    text = f"host {host!r} has wireguard_address: {address}; expected "
    if not _is_in(address, network):
        text += f"an address in wireguard_network, {network}"
    elif address in (str(network[0]), str(network[-1])):
        text += f"neither the first nor the last of {network}"
    elif address in taken:
        text = f"the hosts {taken[address]}, {host} have the same wireguard_address {address}; expected one each"
        hosts = (taken[address], host)
    else:
        taken[address] = host
        return
    taken.setdefault(address, host)
    yield Problem(text, hosts, "wireguard_address", address, *reading.place(host, "wireguard_address"))


def _is_in(address: str, network: IPv4Network | IPv6Network) -> bool:
    try:
        return ip_address(address) in network
    except ValueError:
        return False


def keys_problems(groups: Groups, hostvars: HostVars, sources: Sequence[str]) -> Iterator[str]:
    """What is wrong with the file of public keys, where there is one."""
    chief = checks.reference_host(groups)
    if chief is None or not is_encrypted(hostvars[chief]):
        return
    try:
        path = keys_file(sources)
        if path.exists():
            read_keys(path.read_text(encoding="utf-8", errors="replace"))
    except (WireguardError, OSError) as error:
        yield str(error)


def connection_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse hosts that Ansible would not go to, but do everything of theirs on the control machine."""
    hosts = checks.our_hosts(reading.groups)
    local = [host for host in hosts if reading.values[host].get("ansible_connection") == "local"]
    if local and len(hosts) > 1:
        text = (
            f"{name_hosts(local)}: ansible_connection is local, so that all would be done on the control machine; "
            "expected ssh. Leave the line out"
        )
        yield reading.problem(text, local, "ansible_connection", "local")
