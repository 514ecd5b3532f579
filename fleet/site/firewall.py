"""What each host's packet filter lets in: pure functions of the cluster spec, used by the role firewall."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.site.topology import ENDPOINT, MEMBER
from fleet.site.wireguard import INTERFACE, PORT, is_encrypted, tunnel_network

NFS_PORT = 2049
# Local users that may reach a port on their own host: who logged in, and Prometheus with its exporters.
LOGIN, SCRAPER = "login", "prometheus"
TIME_PORT = 123
# What the kernel gives to a program that names no port, and NCCL names none.
FREE_PORTS = "1024-65535"
ANYONE = "any"
LEASE_PORTS = (68, 546)
# systemd reads no more of a list.
MAX_LIST_BYTES = 2**20
# Other filters on the host: an accept in our table is not the last word.
OTHERS = {
    "firewalld": "what our table lets in, it may refuse. Let each member in there, too: firewall-cmd --permanent "
    "--zone=trusted --add-source=ADDRESS, then firewall-cmd --reload",
    "ufw": "what our table lets in, it may refuse. Let each member in there, too: ufw allow from ADDRESS",
    "docker": "ports that it publishes are forwarded, which this table does not see. They stay as open as they were",
}


def opened_by(jobs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Say for each job whose hosts open connections to it, by the jobs that the cluster has.

    Seen by counting them (tests/security/test_training.py): a process with a part of a function fetches what the others
    computed. Members in step call the chief, and one another.
    """
    present = set(jobs)
    if "ps" in present:
        table = {"chief": ("ps", "worker"), "ps": ("chief", "ps", "worker"), "worker": ("chief", "ps")}
    else:
        table = {"chief": ("worker",), "worker": ("chief", "worker")}
    readers = ("chief", "worker")
    table |= {"dispatcher": (*readers, "data"), "data": (*readers, "dispatcher")}
    return {job: tuple(each for each in by if each in present) for job, by in table.items() if job in present}


def firewall_sources(spec: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the addresses of each job's hosts, and of all together under the name MEMBER."""
    sources: dict[str, list[str]] = json.loads(spec["sources_json"])
    return sources


def firewall_rules(
    spec: Mapping[str, Any], host: str, groups: Mapping[str, Sequence[str]], variables: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List what listens on a host, and who may come in.

    Args:
        spec: the cluster, as `cluster_spec` derives it.
        host: whose rules.
        groups: who serves the shared path, and whose GPUs speak with one another.
        variables: the host's own; read are `common_time_clients`, and `wireguard_port` with `cluster_encryption`.

    Returns:
        `[{"name", "protocol", "ports", "sources", "networks", "guarded", "users"}]`. `sources` are names of
        `firewall_sources`, `users` those of this host who may come in besides the tasks': LOGIN, SCRAPER.
        A guarded rule is closed to all others, also to connections that are open already.
    """
    callers = opened_by(firewall_sources(spec))
    ports: dict[str, list[int]] = {}
    for task in spec["by_host"].get(host, ()):
        if task["port"] is not None:
            ports.setdefault(task["job"], []).append(task["port"])
    rules = [_rule(job, numbers, sources=callers[job]) for job, numbers in ports.items()]
    if host in spec["tensorboard"]:
        rules.append(_rule("tensorboard", [spec["tensorboard"][host]["port"]], sources=[MEMBER], users=[LOGIN]))
    rules += _monitoring_rules(spec, host)
    if host in groups.get("nfs_server", ()):
        rules.append(_rule("nfs", [NFS_PORT], sources=[MEMBER]))
    if is_encrypted(variables):
        port = variables.get("wireguard_port", PORT)
        rules.append(_rule("wireguard", [port], protocol="udp", sources=[ENDPOINT], guarded=False))
    if clients := variables.get("common_time_clients"):
        rules.append(_rule("time", [TIME_PORT], protocol="udp", networks=clients, guarded=False))
    if "worker" in callers and "ps" not in callers and ports and host in groups.get("gpu", ()):
        rules.append(_rule("nccl", [FREE_PORTS], sources=["chief", "worker"], guarded=False))
    return rules


def _monitoring_rules(spec: Mapping[str, Any], host: str) -> list[dict[str, Any]]:
    """List what is scraped on a host, and the services that scrape and warn: they are reached by these hosts alone.

    The chief asks the workers what they take of their machines, for the run's page.
    """
    scrapers = ["prometheus"] if spec["prometheus"] else []
    rules = []
    if scraped := [task for task in spec["by_host"].get(host, ()) if task["metrics_port"] is not None]:
        sources = [*scrapers, *(["chief"] if any(task["job"] == "worker" for task in scraped) else [])]
        rules.append(_rule("metrics", [task["metrics_port"] for task in scraped], sources=sources, users=[SCRAPER]))
    if host in spec["node_exporter"]:
        port = spec["node_exporter"][host]["port"]
        rules.append(_rule("node_exporter", [port], sources=scrapers, users=[SCRAPER]))
    for service in ("prometheus", "alertmanager"):
        if host in spec[service]:
            rules.append(_rule(service, [spec[service][host]["port"]], sources=scrapers, users=[LOGIN, SCRAPER]))
    return rules


def firewall_tunnel(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the `interface` and the `network` of encrypted packets; empty where nothing is encrypted."""
    if not is_encrypted(variables):
        return {}
    return {"interface": INTERFACE, "network": str(tunnel_network(variables))}


def _rule(
    name: str,
    ports: Sequence[int | str],
    sources: Sequence[str] = (),
    networks: Sequence[str] = (),
    protocol: str = "tcp",
    guarded: bool = True,
    users: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        "name": name,
        "protocol": protocol,
        "ports": list(ports),
        "sources": list(sources),
        "networks": list(networks),
        "guarded": guarded,
        "users": list(users),
    }


def uids_of(rule: Mapping[str, Any], facts: Mapping[str, Any]) -> list[int]:
    """Return the numbers of a rule's local users on this host; a user that the host lacks has none."""
    known = {LOGIN: facts["login_uid"], SCRAPER: facts["scraper_uid"]}
    return [known[user] for user in rule["users"] if known[user] is not None]


def guarded_ports(rules: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ports of all guarded rules."""
    return sorted({port for rule in rules if rule["guarded"] for port in rule["ports"]})


def of_family(addresses: Iterable[str], version: int, resolved: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the addresses of one family (4 or 6), each once; a name stands for those that `resolved` has for it."""
    literals = [literal for each in addresses for literal in resolved.get(each, [each])]
    found = dict.fromkeys(ip for each in literals if (ip := _ip(each)) and ip.version == version)
    return [str(ip) for ip in sorted(found, key=int)]


def networks_of_family(networks: Iterable[str], version: int) -> list[str]:
    """Return the networks of one family, in one spelling."""
    given = [ipaddress.ip_network(each) for each in networks]
    return list(dict.fromkeys(str(each) for each in given if each.version == version))


def names_among(sources: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the members that are known by a name, which no packet has."""
    return sorted({each for addresses in sources.values() for each in addresses if _ip(each) is None})


def reached(
    rules: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    opened: Sequence[Mapping[str, Any]],
    outward: Sequence[str],
    addresses: Sequence[str],
) -> list[str]:
    """Say with whom a unit exchanges packets, as systemd's IPAddressAllow= takes it; `["any"]` where it is anyone.

    Args:
        rules: the host's.
        names: which of them are the unit's.
        opened: what the user opened on this host (`firewall_open`).
        outward: networks that the unit may reach besides (`firewall_egress`).
        addresses: the members', and the name servers'.
    """
    ports = {port for rule in rules if rule["name"] in names for port in rule["ports"]}
    given = [*outward]
    for entry in opened:
        if entry.get("protocol", "tcp") == "tcp" and any(_has(entry["port"], port) for port in ports):
            given += entry.get("from") or [ANYONE]
    if ANYONE in given:
        return [ANYONE]
    return list(dict.fromkeys(["localhost", *addresses, *(str(ipaddress.ip_network(each)) for each in given)]))


def firewall_refusals(
    facts: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    opened: Sequence[Mapping[str, Any]],
    closed: bool,
    sources: Mapping[str, Sequence[str]],
    lists: Iterable[Sequence[str]],
) -> list[str]:
    """Say why a host is not closed: its first table would cut off rightful clients, or a list is too long.

    Args:
        facts: the host's, of `firewall_facts`.
        rules: the host's.
        opened: what the user opened on this host (`firewall_open`).
        closed: whether all ports are closed.
        sources: `firewall_sources`.
        lists: whom the units speak with, as `reached` has it.
    """
    problems = _too_long(lists)
    if not facts["first"]:
        return problems
    return problems + _cut_off(facts, rules, opened, sources) + (_cut_vpn(facts["vpn"], opened) if closed else [])


def _too_long(lists: Iterable[Sequence[str]]) -> list[str]:
    """Say which list of addresses systemd would not take."""
    for peers in lists:
        size = sum(len(f"IPAddressAllow={peer}\n") for peer in peers)
        if size >= MAX_LIST_BYTES:
            return [
                f"the units' list of addresses has {len(peers)} entries and {size} bytes; expected less than "
                f"{MAX_LIST_BYTES} bytes. Name fewer and larger networks in firewall_open and firewall_egress, or "
                "firewall_egress: [any]"
            ]
    return []


def _cut_off(
    facts: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    opened: Sequence[Mapping[str, Any]],
    sources: Mapping[str, Sequence[str]],
) -> list[str]:
    """Say whose connection to NFS the first table would cut."""
    # Strangers at a task's port are what the table is for; at NFS's they may be clients of another export.
    ports = [port for rule in rules if rule["name"] == "nfs" for port in rule["ports"]]
    return [
        f"{peer['address']} is no member, and has a connection to port {peer['port']} (NFS) open, which the "
        f"table would cut. If it is to stay: firewall_open: [{{port: {peer['port']}, from: "
        f"[{peer['address']}]}}]. If not, unmount there what this host exports"
        for peer in _others(facts, rules, opened, sources)
        if peer["port"] in ports
    ]


def _cut_vpn(vpn: Mapping[str, Any], opened: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which ports of the VPN through which this run came the table would close."""
    problems = []
    for each in vpn.get("ports", ()):
        port, protocol = each.split("/")
        if not any(entry.get("protocol", "tcp") == protocol and _has(entry["port"], int(port)) for entry in opened):
            problems.append(
                f"this run came through the VPN {vpn['device']} ({vpn['kind']}), which ends on this "
                f"host, and the table would close its port {each}. Open it: firewall_open: [{{port: {port}, protocol: "
                f"{protocol}}}]. Or leave what isn't psfleet's alone: firewall_closes: ports"
            )
    return problems


def _others(
    facts: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    opened: Sequence[Mapping[str, Any]],
    sources: Mapping[str, Sequence[str]],
) -> list[Mapping[str, Any]]:
    """Return who has a connection open that the table would cut."""
    admitted: dict[int, list[Any]] = {}
    for rule in rules:
        for port in rule["ports"] if rule["guarded"] else ():
            members = [each for source in rule["sources"] for each in sources[source]]
            names = [literal for each in members for literal in facts["resolved"].get(each, [each])]
            admitted.setdefault(port, []).extend(ipaddress.ip_network(each) for each in names)
    for entry in opened:
        for port in admitted if entry.get("protocol", "tcp") == "tcp" else ():
            if _has(entry["port"], port):
                admitted[port] += map(ipaddress.ip_network, entry.get("from") or ["0.0.0.0/0", "::/0"])
    return [
        peer
        for peer in facts["peers"]
        if not any(ipaddress.ip_address(peer["address"]) in network for network in admitted[peer["port"]])
    ]


def firewall_notes(
    facts: Mapping[str, Any],
    rules: Sequence[Mapping[str, Any]],
    opened: Sequence[Mapping[str, Any]],
    closed: bool,
    sources: Mapping[str, Sequence[str]],
) -> list[str]:
    """Say what the table does not do, and what it closes that listens now; `closed` where it closes all ports."""
    notes = [
        f"{name} is unknown to this host's resolver: that member can't come in until site.yml finds its name"
        for name, addresses in facts["resolved"].items()
        if not addresses
    ]
    notes += [f"{other} is running: {OTHERS[other]}" for other in facts["others"]]
    if cut := [f"{peer['address']} (port {peer['port']})" for peer in _others(facts, rules, opened, sources)]:
        notes.append(
            f"no members, and cut off: {', '.join(cut)}. To let others reach a port, list them in firewall_open"
        )
    if closed:
        known = {("tcp", port) for port in [*facts["ssh_ports"], *guarded_ports(rules)]}
        known |= {("udp", port) for port in LEASE_PORTS}
        through = [*rules, *({"ports": [entry["port"]], **entry} for entry in opened)]
        lost = []
        for line in facts["listening"]:
            number, protocol = line.split()[0].split("/")
            is_open = any(
                rule.get("protocol", "tcp") == protocol and any(_has(ports, int(number)) for ports in rule["ports"])
                for rule in through
            )
            if (protocol, int(number)) not in known and not is_open:
                lost.append(line)
        if lost:
            notes.append(
                f"closed to others, and listening: {', '.join(lost)}. What others are to reach stands in firewall_open"
            )
    return notes


def _has(ports: int | str, port: int) -> bool:
    first, _, last = str(ports).partition("-")
    return int(first) <= port <= int(last or first)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
