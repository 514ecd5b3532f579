"""What is wrong with the ports where tasks and services listen."""

from __future__ import annotations

from collections.abc import Iterator

from fleet.site.members import DEFAULT_PORTS, SERVICES
from fleet.site.schema import checks
from fleet.site.schema.definition import definition
from fleet.site.schema.inventory_reading import InventoryReading
from fleet.site.schema.problems import Problem, name_hosts
from fleet.site.topology import Topology


def port_problems(topology: Topology, reading: InventoryReading) -> Iterator[Problem]:
    listeners = [(task.port, task.host, task.name) for task in topology.tasks if task.port]
    listeners += [(task.metrics_port, task.host, "metrics") for task in topology.tasks if task.metrics_port]
    for service in (*SERVICES, "node_exporter"):
        listeners += [(each.port, host, service) for host, each in topology.listeners[service].items() if each.port]
    taken: dict[tuple[str, int], str] = {}
    for host in checks.our_hosts(reading.groups):
        values = reading.values[host]
        # Where the two differ, the port may be that of a machine in between.
        if not values.get("cluster_address") or values.get("cluster_address") == values.get("ansible_host"):
            taken[host, int(values.get("ansible_port") or 22)] = "SSH"
    for port, host, name in listeners:
        variable = f"{name.split('-')[0]}_port"
        reserved = None if port == DEFAULT_PORTS.get(name) else definition().listeners.get(port)
        other = taken.get((host, port)) or reserved
        if other:
            text = (
                f"port {port} on host {host!r} is taken twice, by {other} and by {name}. Set {variable} on that host "
                "to another first port"
            )
            yield reading.problem(text, [host], variable, str(port))
        elif port > 65535:
            text = f"{name} on '{host}' would listen on port {port}; the highest is 65535. Lower {variable} there"
            yield reading.problem(text, [host], variable, str(port))
        taken[host, port] = name


def opened_problems(topology: Topology, reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a task's port that is opened to everybody: TensorFlow's servers run whatever they are sent, by anyone.

    TensorBoard's may be opened; it shows the training and runs nothing.
    """
    ports: dict[str, dict[int, str]] = {}
    for task in topology.tasks:
        if task.port:
            ports.setdefault(task.host, {})[task.port] = task.name
    opened: dict[str, list[str]] = {}
    for host, names in ports.items():
        for entry in reading.values[host].get("firewall_open", ()):
            first, _, last = str(entry["port"]).partition("-")
            anyone = any(network.endswith("/0") for network in entry.get("from", ["0.0.0.0/0"]))
            hit = next((port for port in names if int(first) <= port <= int(last or first)), None)
            if hit is not None and anyone and entry.get("protocol", "tcp") == "tcp":
                opened.setdefault(f"port {entry['port']} to everybody, and {hit} is {names[hit]}'s", []).append(host)
    for rule, hosts in opened.items():
        text = (
            f"{name_hosts(hosts)}: firewall_open opens {rule}, whose server runs what it is sent; expected a port of "
            "another program, or `from` with the networks that may reach it. Members reach it in any case"
        )
        yield reading.problem(text, hosts, "firewall_open")
