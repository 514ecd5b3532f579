"""What is wrong with the NFS server, the webhook and the alerts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from fleet.site.schema import checks, formats
from fleet.site.schema.definition import definition
from fleet.site.schema.inventory_reading import InventoryReading
from fleet.site.schema.problems import Problem, name_hosts, name_some, show


def nfs_problems(reading: InventoryReading) -> Iterator[Problem]:
    for server in reading.groups.get("nfs_server", ()):
        values = reading.values[server]
        served, shared_dir = values.get("cluster_nfs_dir"), values.get("cluster_shared_dir")
        if served is None and "cluster_nfs_dir" not in reading.places[server]:
            yield Problem(
                f"host {server!r} is the nfs_server, and cluster_nfs_dir is missing; expected "
                f"{definition().variables['cluster_nfs_dir'].expected}, in group_vars/all.yml",
                (server,),
                "cluster_nfs_dir",
            )
        elif (
            served
            and shared_dir
            and (PurePosixPath(served).is_relative_to(shared_dir) or PurePosixPath(shared_dir).is_relative_to(served))
        ):
            text = (
                f"cluster_nfs_dir is {served}, and cluster_shared_dir is {shared_dir}; expected two paths, neither in "
                "the other: the one is the server's own directory, the other is where every host mounts it"
            )
            yield reading.problem(text, [server], "cluster_nfs_dir", served)


def nfs_port_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a port on which our own NFS server does not listen: each client would wait for it in vain."""
    if not reading.groups.get("nfs_server"):
        return
    ours = next(port for port, what in definition().listeners.items() if what == "NFS")
    wrong = [
        host for host in checks.our_hosts(reading.groups) if reading.values[host].get("nfs_client_port", ours) != ours
    ]
    if wrong:
        port = str(reading.values[wrong[0]]["nfs_client_port"])
        text = (
            f"{name_hosts(wrong)}: nfs_client_port is {port}, and the host in nfs_server serves on {ours}; expected "
            f"{ours}. Leave the line out"
        )
        yield reading.problem(text, wrong, "nfs_client_port", port)


def notify_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a notification that would never go out: a secret that no host has, a program that the unit hides."""
    chief = checks.reference_host(reading.groups)
    values, places = reading.values[chief or ""], reading.places[chief or ""]
    run, secrets = values.get("trainer_run"), values.get("trainer_secrets", {})
    if not isinstance(run, dict) or ("trainer_secrets" in places and "trainer_secrets" not in values):
        return
    name, command = run.get("notify_webhook_secret"), run.get("notify_command")
    if isinstance(name, str) and name and name not in secrets:
        has = f"has {name_some(secrets)}" if secrets else "is empty"
        text = (
            f"trainer_run: notify_webhook_secret is {show(name)}, and trainer_secrets {has}; expected the name of one "
            "of these, whose text is the webhook's address. Otherwise no notification would go out"
        )
        yield reading.problem(text, [str(chief)], "trainer_run.notify_webhook_secret", show(name))
    hidden = [tree for tree in formats.HIDDEN_TREES if isinstance(command, str) and command.startswith(f"{tree}/")]
    if hidden:
        text = (
            f"trainer_run: notify_command is {show(command)}, and the tasks' units have no access to {hidden[0]}; "
            "expected a program elsewhere on the chief's host, such as /usr/local/bin/notify"
        )
        yield reading.problem(text, [str(chief)], "trainer_run.notify_command", show(command))


def alert_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse what Alertmanager would not take: its own message is not shown, since a receiver has its password."""
    hosts_by_text: dict[str, list[str]] = {}
    for host in reading.groups.get("alertmanager", ()):
        values = reading.values[host]
        names = [each["name"] for each in values.get("alertmanager_receivers", ())]
        if twice := next((name for name in names if names.count(name) > 1), None):
            text = f"alertmanager_receivers has {show(twice)} twice; expected one receiver of each name"
            hosts_by_text.setdefault(text, []).append(host)
        for name in _receivers_of(values.get("alertmanager_routes", ())):
            if name not in names:
                known = f"the receivers are {name_some(names)}" if names else "alertmanager_receivers is empty"
                text = f"alertmanager_routes names the receiver {show(name)}, and {known}; expected one of them"
                hosts_by_text.setdefault(text, []).append(host)
    for text, hosts in hosts_by_text.items():
        yield reading.problem(f"{name_hosts(hosts)}: {text}", hosts, text.partition(" ")[0])


def _receivers_of(routes: object) -> Iterator[str]:
    for route in routes if isinstance(routes, list) else ():
        if isinstance(route, dict):
            if isinstance(route.get("receiver"), str):
                yield route["receiver"]
            yield from _receivers_of(route.get("routes"))
