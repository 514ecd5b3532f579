"""What is wrong with an inventory, or with the control machine, before any host is touched."""

from __future__ import annotations

import importlib.util
import ipaddress
import shutil
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from fleet.site.gpus import gpu_problems
from fleet.site.schema import check, formats
from fleet.site.schema.control import control_file_problems
from fleet.site.schema.definition import definition
from fleet.site.schema.problems import Problem, name_hosts, name_some, show
from fleet.site.schema.reading import Reading, read
from fleet.site.schema.relations import relation_problems
from fleet.site.schema.shapes import shape_problems
from fleet.site.schema.sources import beside_problems, file_problems, range_problems, special_file_problems
from fleet.site.schema.texts import text_problems, unread_problems
from fleet.site.topology import (
    DEFAULT_PORTS,
    JOBS,
    MAX_ENVIRONMENT_STRING,
    NUMBERED_JOBS,
    SERVICES,
    ClusterSpecError,
    busy_jobs,
    cluster_spec,
    run_settings,
    storage_of,
    strategy_of,
    tf_config,
)
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
from trainer.core.config import STRATEGIES, Config

Groups = Mapping[str, Sequence[str]]
HostVars = Mapping[str, Mapping[str, Any]]

ANSIBLE = ((2, 19), (2, 20))
# More vacant places for each member that is there are no machines that went, but a mistyped index.
MOST_VACANT = 10
COLLECTIONS = ("ansible.posix",)
_BRINGS_IT = "`pipx install psfleet` brings it, in a checkout `make venv`"
COMMANDS = {"rsync": "apt-get install rsync", "ssh": "apt-get install openssh-client"}


def preflight_problems(
    groups: Groups, hostvars: HostVars, ansible_version: str, sources: Sequence[str] = (), project: str = ""
) -> list[str]:
    """List everything that is wrong, each with the value and the mend. Empty when all is right.

    `sources` are the inventory's files and directories, whose group_vars and host_vars are looked at too; `project` is
    the directory that the program, the locks and the keys are named from.
    """
    root = Path(project) if project else None
    paths = list(map(str, sources))
    files = [
        *special_file_problems(paths),
        *(beside_problems(paths, root) if root else ()),
        *(problem for path in paths for problem in range_problems(path)),
        *unread_problems(paths),
        *shape_problems(paths),
        *text_problems(paths),
        *file_problems(paths, list(map(str, groups)), groups.get("all", ())),
    ]
    return [
        *control_problems(ansible_version),
        *map(str, files),
        *map(str, inventory_problems(groups, hostvars, root)),
        *_keys_problems(groups, hostvars, paths),
    ]


def inventory_problems(groups: Groups, hostvars: HostVars, root: Path | None = None) -> list[Problem]:
    """List everything that is wrong with the inventory itself, and with `root` the files that it names there."""
    if not groups.get("all"):
        return [
            Problem(
                "the inventory has no hosts. Name yours with -i inventory/<site>, or in ansible.cfg; "
                "docs/first-cluster.md starts one"
            )
        ]
    if too_many := check.size_problem(groups):
        return [too_many]
    reading = read(groups, hostvars)
    problems = [
        *reading.problems,
        *check.group_problems(reading),
        *check.host_problems(reading),
        *check.value_problems(reading),
    ]
    problems += _cluster_problems(reading)
    return [*problems, *(control_file_problems(reading, root) if root else ())]


def _cluster_problems(reading: Reading) -> Iterator[Problem]:
    """What must fit together. A value that was refused by itself is not there any more."""
    groups = reading.groups
    chief = check.reference_host(groups)
    if chief is None:
        yield Problem("the inventory has no host in any of psfleet's groups; expected chief, ps and worker")
        return
    storage = storage_of(reading.values[chief])
    settings = storage["settings"] | ({} if isinstance(storage["path"], str) else {"shared_dir": "/srv/trainer"})
    yield from check.run_problems(reading, settings)
    yield from _group_problems(reading)
    yield from _nfs_problems(reading)
    if not storage["shared"]:
        yield from _unshared_problems(groups)
    yield from _address_problems(reading)
    if is_encrypted(reading.values[chief]):
        yield from _tunnel_problems(reading)
    yield from _connection_problems(reading)
    yield from _notify_problems(reading)
    yield from _alert_problems(reading)
    yield from _nfs_port_problems(reading)
    yield from _minimum_problems(reading)
    yield from relation_problems(reading)
    if too_many := _task_problem(reading):
        yield too_many
        return
    hostvars = _complete(reading)
    try:
        yield from _missing_jobs(groups, hostvars)
        busy = busy_jobs(groups, hostvars)
        yield from _zero_problems(reading, busy)
        yield from _idle_minimum_problems(reading, busy)
        yield from _unwaited_problems(reading, busy)
        yield from _taskless_problems(reading, busy)
        yield from _unevaluated_problems(reading, busy)
        spec = cluster_spec(groups, hostvars)
    except ClusterSpecError as error:
        # An unknown strategy is among the run settings' problems already.
        if not str(error).startswith("trainer_run"):
            yield Problem(str(error))
        return
    yield from _vacancy_problems(spec, groups, hostvars)
    yield from _port_problems(spec, reading)
    yield from _opened_problems(spec, reading)
    yield from _size_problems(spec)
    for said in gpu_problems(groups, hostvars, spec["tasks"], strategy_of(groups, hostvars)):
        yield Problem(said)


def _complete(reading: Reading) -> dict[str, dict[str, Any]]:
    """The variables with a stand-in for each address that was refused or is missing, so that the rest is looked at."""
    complete = {}
    for number, (host, values) in enumerate(reading.values.items()):
        has = values.get("cluster_address") or values.get("ansible_host")
        complete[host] = values if has else values | {"ansible_host": f"unknown-{number}"}
    return complete


def preflight_notes(groups: Groups, hostvars: HostVars) -> list[str]:
    """List what is right and yet may surprise: no shared path, groups without a task, a training nobody evaluates."""
    strategy, busy = strategy_of(groups, hostvars), busy_jobs(groups, hostvars)
    evaluation = run_settings(groups, hostvars).get("evaluation", Config.evaluation)
    notes = [
        f"group {job} ({', '.join(groups[job])}) stands idle: the strategy {strategy} has no {job}"
        for job in JOBS
        if groups.get(job) and job not in busy and job not in ("evaluator", "data")
    ]
    storage = storage_of(hostvars[groups["chief"][0]])
    if not storage["shared"]:
        notes.append(
            f"no path is shared (cluster_shared_dir is empty): the runs lie on the disk of {groups['chief'][0]} alone, "
            f"in {storage['path']}, and checkpoints go through the coordinator's memory; wheels are copied to each "
            "host; there is no evaluator, and no lease that another host would see: docs/storage.md"
        )
    if groups.get("evaluator") and "evaluator" not in busy:
        notes.append(
            f"group evaluator ({', '.join(groups['evaluator'])}) stands idle: it evaluates with evaluation: sidecar, "
            f"and this is {evaluation}"
        )
    if groups.get("data") and "data" not in busy:
        notes.append(
            f"group data ({', '.join(groups['data'])}) stands idle: it reads with trainer_run: {{input: service}}, and "
            "this is local"
        )
    if evaluation == "sidecar" and not _tasks_of(groups, hostvars, "evaluator"):
        notes.append(
            "nobody evaluates: evaluation is sidecar and the group evaluator is empty. "
            + ("Put a host there, or let the " if storage["shared"] else "Let the ")
            + "coordinator do it with trainer_run: {evaluation: inline}"
        )
    numbered = any(f"{job}_index" in hostvars[groups[job][0]] for job in NUMBERED_JOBS if groups.get(job))
    vacant = ", ".join(cluster_spec(groups, hostvars)["vacant"]) if numbered else ""
    if vacant:
        notes.append(f"no host is {vacant}: the training goes on without, until a new machine has that index")
    notes += _idle_notes(groups, hostvars)
    notes += _webhook_notes(run_settings(groups, hostvars), groups["chief"][0], hostvars)
    return notes


def _idle_notes(groups: Groups, hostvars: HostVars) -> Iterator[str]:
    """Say which settings do nothing, since the switch that they belong to is off."""
    chief = hostvars[groups["chief"][0]]
    tunnel = next((name for name in chief if str(name).startswith("wireguard_")), None)
    if tunnel and not is_encrypted(chief):
        yield f"{tunnel} is set, and nothing is encrypted: that takes cluster_encryption: true"
    tellers = groups.get("alertmanager", ())
    if tellers and not any(hostvars[host].get("alertmanager_receivers") for host in tellers):
        yield "alertmanager_receivers is empty: Alertmanager shows the alerts, and sends them to nobody"
    elif not tellers and "alertmanager_receivers" in chief:
        yield "alertmanager_receivers is set, and group alertmanager is empty: nobody is told of alerts"


def _webhook_notes(settings: Mapping[str, Any], chief: str, hostvars: HostVars) -> Iterator[str]:
    """Say where the coordinator's list of addresses (firewall_outward) keeps it from a webhook."""
    url, secret = settings.get("notify_webhook"), settings.get("notify_webhook_secret")
    outward = hostvars[chief].get("firewall_outward", [])
    if not (url or secret) or hostvars[chief].get("firewall_closes") == "none" or "any" in outward:
        return
    named = urlsplit(url).hostname or "" if url else ""
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        # A name may lead into the networks that are named; where there are none, only to a member.
        if not outward and named != "localhost":
            where = f"notify_webhook names {named}" if url else f"notify_webhook_secret is {secret}"
            yield (
                f"{where}, and firewall_outward of {chief} is empty: its tasks reach members and name servers alone. "
                "Name the webhook's networks there, or [any]"
            )
        return
    members = {str(value) for each in hostvars.values() for value in map(each.get, ("cluster_address", "ansible_host"))}
    networks = [ipaddress.ip_network(each, strict=False) for each in outward]
    if not address.is_loopback and named not in members and not any(address in network for network in networks):
        yield (
            f"notify_webhook names {named}, which the coordinator does not reach: add it to firewall_outward of "
            f"{chief}, as in firewall_outward: [{named}/{address.max_prefixlen}]"
        )


def control_problems(ansible_version: str) -> Iterator[str]:
    """List what the control machine lacks."""
    version = tuple(int(part) for part in ansible_version.split(".")[:2])
    oldest, newest = ANSIBLE
    if not oldest <= version < newest:
        yield (f"this is ansible-core {ansible_version}; psfleet is made for {oldest[0]}.{oldest[1]}. " + _BRINGS_IT)
    for collection in COLLECTIONS:
        if importlib.util.find_spec(f"ansible_collections.{collection}") is None:
            yield f"the collection {collection} is missing. The PyPI package ansible has it; {_BRINGS_IT}"
    for command, mend in COMMANDS.items():
        if shutil.which(command) is None:
            yield f"this machine has no `{command}`, which carries files to the hosts. Install it: {mend}"


def _group_problems(reading: Reading) -> Iterator[Problem]:
    groups = reading.groups
    chiefs = _tasks_of(groups, reading.values, "chief")
    if len(chiefs) != 1:
        named = f"has {len(chiefs)} ({', '.join(chiefs[:3])})" if chiefs else "is empty"
        yield Problem(f"group chief {named}; expected exactly one host: the one that runs the coordinator")
    servers = groups.get("nfs_server", ())
    if len(servers) > 1:
        yield Problem(
            f"group nfs_server has {', '.join(servers[:3])}; expected one host, or none where the shared path comes "
            "from outside"
        )
    evaluators = _tasks_of(groups, reading.values, "evaluator")
    if len(evaluators) > 1:
        yield Problem(
            f"group evaluator has {len(evaluators)} ({', '.join(evaluators[:3])}); expected one host, or none"
        )


def _unshared_problems(groups: Groups) -> Iterator[Problem]:
    """What needs a path that all hosts share, where there is none."""
    why = "cluster_shared_dir is empty: the chief alone has the run directory"
    if groups.get("evaluator"):
        yield Problem(
            f"group evaluator has {', '.join(groups['evaluator'])}, and {why}. Empty the group, and let the "
            "coordinator evaluate with trainer_run: {evaluation: inline}; or give all hosts a shared path"
        )
    if groups.get("nfs_server"):
        yield Problem(
            f"group nfs_server has {', '.join(groups['nfs_server'])}, and cluster_shared_dir is empty. Name there the "
            "path where every host mounts what it serves, such as /srv/trainer; or empty the group"
        )
    if boards := [host for host in groups.get("tensorboard", ()) if host not in groups.get("chief", ())]:
        yield Problem(
            f"group tensorboard has {', '.join(boards)}, and {why}. Put the chief's host into the group instead; or "
            "give all hosts a shared path"
        )


def _missing_jobs(groups: Groups, hostvars: HostVars) -> Iterator[Problem]:
    strategy = strategy_of(groups, hostvars)
    for job in STRATEGIES[strategy].jobs:
        if job != "chief" and not _tasks_of(groups, hostvars, job):
            yield Problem(f"group {job} is empty; the strategy {strategy} needs at least one {job}")
    if "data" in busy_jobs(groups, hostvars) and not _tasks_of(groups, hostvars, "data"):
        yield Problem(
            "group data is empty, and trainer_run has input: service; expected at least one host there, which reads "
            "the training data. Or leave input out: each worker reads for itself"
        )


def _taskless_problems(reading: Reading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse an evaluator's host that is to evaluate, and to run nothing."""
    hosts = list(reading.groups.get("evaluator", ()))
    if "evaluator" in busy and hosts and not _tasks_of(reading.groups, reading.values, "evaluator"):
        yield Problem(
            f"{name_hosts(hosts)}: evaluator_tasks is 0, and evaluation is sidecar, so that nobody evaluates; expected "
            "1. Or take the host out of the group evaluator, or choose another evaluation",
            tuple(hosts),
            "evaluator_tasks",
            "0",
            *reading.place(hosts[0], "evaluator_tasks"),
        )


def _nfs_problems(reading: Reading) -> Iterator[Problem]:
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
            yield Problem(
                f"cluster_nfs_dir is {served}, and cluster_shared_dir is {shared_dir}; expected two paths, neither in "
                "the other: the one is the server's own directory, the other is where every host mounts it",
                (server,),
                "cluster_nfs_dir",
                served,
                *reading.place(server, "cluster_nfs_dir"),
            )


def _nfs_port_problems(reading: Reading) -> Iterator[Problem]:
    """Refuse a port on which our own NFS server does not listen: each client would wait for it in vain."""
    if not reading.groups.get("nfs_server"):
        return
    ours = next(port for port, what in definition().listeners.items() if what == "NFS")
    wrong = [
        host for host in check.our_hosts(reading.groups) if reading.values[host].get("nfs_client_port", ours) != ours
    ]
    if wrong:
        port = str(reading.values[wrong[0]]["nfs_client_port"])
        yield Problem(
            f"{name_hosts(wrong)}: nfs_client_port is {port}, and the host in nfs_server serves on {ours}; expected "
            f"{ours}. Leave the line out",
            tuple(wrong),
            "nfs_client_port",
            port,
            *reading.place(wrong[0], "nfs_client_port"),
        )


def _tasks_of(groups: Groups, hostvars: HostVars, job: str) -> list[str]:
    """Name a job's hosts, each as often as it runs the job."""
    named: list[str] = []
    for host in groups.get(job, ()):
        count = hostvars[host].get(f"{job}_tasks", 1)
        named += [host] * (count if isinstance(count, int) else 1)
    return named


def _task_problem(reading: Reading) -> Problem | None:
    """Refuse more tasks than any cluster has, before one is made."""
    counts = {
        job: sum(reading.values[host].get(f"{job}_tasks", 1) for host in reading.groups.get(job, ())) for job in JOBS
    }
    number = sum(counts.values())
    if number <= check.MAX_TASKS:
        return None
    most = max(counts, key=lambda job: counts[job])
    return Problem(
        f"the hosts would run {number:,} tasks, {counts[most]:,} of them of {most}; expected {check.MAX_TASKS:,} at "
        f"most. Lower {most}_tasks"
    )


def _address_problems(reading: Reading) -> Iterator[Problem]:
    """What is wrong with where the hosts are, and with two that are in one place."""
    hosts = check.our_hosts(reading.groups)
    taken: dict[str, str] = {}
    doors: dict[tuple[str, str], str] = {}
    for host in hosts:
        values, places = reading.values[host], reading.places[host]
        name = "cluster_address" if values.get("cluster_address") else "ansible_host"
        address = values.get(name)
        if host == "localhost" and (len(hosts) > 1 or (address and not formats.is_loopback(formats.address(address)))):
            yield Problem(
                "host 'localhost' is the machine that Ansible runs on; give the other machine a name", (host,)
            )
        if not address:
            if not {"cluster_address", "ansible_host"} & set(places):
                yield Problem(
                    f"host {host!r} has no address. Give it one that every other host can reach: ansible_host: "
                    "192.0.2.10 (and cluster_address: 10.0.0.10 where the hosts know one another by another address). "
                    "Where names are addresses: ansible_host: '{{ inventory_hostname }}', in group_vars/all.yml",
                    (host,),
                )
            continue
        place = reading.place(host, name)
        address = formats.address(address)
        if formats.is_loopback(address) and len(hosts) > 1:
            yield Problem(
                f"host {host!r} has {name}: {address}, which means each host itself; expected an address that every "
                "other host can reach, such as 10.0.0.10",
                (host,),
                name,
                address,
                *place,
            )
        elif address in taken:
            yield Problem(
                f"the hosts {taken[address]}, {host} have the same address {address}; expected one each",
                (taken[address], host),
                name,
                address,
                *place,
            )
        taken.setdefault(address, host)
        # Where one host's cluster_address is another's ansible_host, behind the same port, both are one machine.
        port = str(values.get("ansible_port") or 22)
        login = formats.address(values.get("ansible_host") or address)
        for where in dict.fromkeys((login, address)):
            other = doors.setdefault((where, port), host)
            if other != host and taken[address] == host:
                yield Problem(
                    f"the hosts {other}, {host} are reached at the same address and port ({where}:{port}); "
                    "expected one machine for each name. Look at ansible_host and cluster_address of both",
                    (other, host),
                    "ansible_host",
                    where,
                    *reading.place(host, "ansible_host" if where == login else name),
                )
                break


def _tunnel_problems(reading: Reading) -> Iterator[Problem]:
    """What is wrong with the addresses of encrypted packets, and with a host that would take plain ones, too."""
    taken: dict[str, str] = {}
    for host in wireguard_hosts(reading.groups):
        values = reading.values[host]
        network = tunnel_network(values)
        outside = endpoint(values)
        if outside and _is_in(outside, network):
            yield Problem(
                f"host {host!r} is reached at {outside}, which is in wireguard_network ({network}); expected an "
                "address outside of it: encrypted packets go there. Take another wireguard_network",
                (host,),
                "wireguard_network",
                str(network),
                *reading.place(host, "wireguard_network"),
            )
        if values.get("firewall_closes") == "none":
            yield Problem(
                f"host {host!r} has firewall_closes: none, and cluster_encryption is true; expected all or ports. "
                "Without the table the tasks listen to plain packets, too",
                (host,),
                "firewall_closes",
                "none",
                *reading.place(host, "firewall_closes"),
            )
        try:
            address = tunnel_address(host, values)
        except WireguardError:
            continue  # cluster_spec says it
        place = reading.place(host, "wireguard_address")
        if not _is_in(address, network):
            yield Problem(
                f"host {host!r} has wireguard_address: {address}; expected an address in wireguard_network, {network}",
                (host,),
                "wireguard_address",
                address,
                *place,
            )
        elif address in (str(network[0]), str(network[-1])):
            yield Problem(
                f"host {host!r} has wireguard_address: {address}; expected neither the first nor the last of {network}",
                (host,),
                "wireguard_address",
                address,
                *place,
            )
        elif address in taken:
            yield Problem(
                f"the hosts {taken[address]}, {host} have the same wireguard_address {address}; expected one each",
                (taken[address], host),
                "wireguard_address",
                address,
                *place,
            )
        taken.setdefault(address, host)


def _is_in(address: str, network: IPv4Network | IPv6Network) -> bool:
    try:
        return ip_address(address) in network
    except ValueError:
        return False


def _keys_problems(groups: Groups, hostvars: HostVars, sources: Sequence[str]) -> Iterator[str]:
    """What is wrong with the file of public keys, where there is one."""
    chief = check.reference_host(groups)
    if chief is None or not is_encrypted(hostvars[chief]):
        return
    try:
        path = keys_file(sources)
        if path.exists():
            read_keys(path.read_text(encoding="utf-8", errors="replace"))
    except (WireguardError, OSError) as error:
        yield str(error)


def _connection_problems(reading: Reading) -> Iterator[Problem]:
    """Refuse hosts that Ansible would not go to, but do everything of theirs on the control machine."""
    hosts = check.our_hosts(reading.groups)
    local = [host for host in hosts if reading.values[host].get("ansible_connection") == "local"]
    if local and len(hosts) > 1:
        yield Problem(
            f"{name_hosts(local)}: ansible_connection is local, so that all would be done on the control machine; "
            "expected ssh. Leave the line out",
            tuple(local),
            "ansible_connection",
            "local",
            *reading.place(local[0], "ansible_connection"),
        )


def _notify_problems(reading: Reading) -> Iterator[Problem]:
    """Refuse a notification that would never go out: a secret that nobody has, a program that the unit hides."""
    chief = check.reference_host(reading.groups)
    values, places = reading.values[chief or ""], reading.places[chief or ""]
    run, secrets = values.get("trainer_run"), values.get("trainer_secrets", {})
    if not isinstance(run, dict) or ("trainer_secrets" in places and "trainer_secrets" not in values):
        return
    name, command = run.get("notify_webhook_secret"), run.get("notify_command")
    if isinstance(name, str) and name and name not in secrets:
        has = f"has {name_some(secrets)}" if secrets else "is empty"
        yield Problem(
            f"trainer_run: notify_webhook_secret is {show(name)}, and trainer_secrets {has}; expected the name of one "
            "of these, whose text is the webhook's address. Otherwise nobody would be notified",
            (str(chief),),
            "trainer_run.notify_webhook_secret",
            show(name),
            *reading.parts.get("notify_webhook_secret", (None, None)),
        )
    hidden = [tree for tree in formats.HIDDEN_TREES if isinstance(command, str) and command.startswith(f"{tree}/")]
    if hidden:
        yield Problem(
            f"trainer_run: notify_command is {show(command)}, and the tasks' units have no access to {hidden[0]}; "
            "expected a program elsewhere on the chief's host, such as /usr/local/bin/notify",
            (str(chief),),
            "trainer_run.notify_command",
            show(command),
            *reading.parts.get("notify_command", (None, None)),
        )


def _alert_problems(reading: Reading) -> Iterator[Problem]:
    """Refuse what Alertmanager would not take: its own message is not shown, since a receiver has its password."""
    said: dict[str, list[str]] = {}
    for host in reading.groups.get("alertmanager", ()):
        values = reading.values[host]
        names = [each["name"] for each in values.get("alertmanager_receivers", ())]
        if twice := next((name for name in names if names.count(name) > 1), None):
            text = f"alertmanager_receivers has {show(twice)} twice; expected one receiver of each name"
            said.setdefault(text, []).append(host)
        for name in _receivers_of(values.get("alertmanager_routes", ())):
            if name not in names:
                known = f"the receivers are {name_some(names)}" if names else "alertmanager_receivers is empty"
                text = f"alertmanager_routes names the receiver {show(name)}, and {known}; expected one of them"
                said.setdefault(text, []).append(host)
    for text, hosts in said.items():
        place = reading.place(hosts[0], text.partition(" ")[0])
        yield Problem(f"{name_hosts(hosts)}: {text}", tuple(hosts), text.partition(" ")[0], None, *place)


def _receivers_of(routes: object) -> Iterator[str]:
    for route in routes if isinstance(routes, list) else ():
        if isinstance(route, dict):
            if isinstance(route.get("receiver"), str):
                yield route["receiver"]
            yield from _receivers_of(route.get("routes"))


def _minimum_problems(reading: Reading) -> Iterator[Problem]:
    """Refuse a minimum that all hosts together don't reach."""
    chief = check.reference_host(reading.groups)
    minimum = reading.values[chief].get("cluster_minimum") if chief else None
    for job, least in minimum.items() if isinstance(minimum, dict) else ():
        number = len(_tasks_of(reading.groups, reading.values, job))
        if isinstance(least, int) and least > number:
            yield Problem(
                f"cluster_minimum: {job} is {least}, and the hosts have {number} of that job; expected {number} at "
                "most, a part such as 0.8, or all",
                (),
                "cluster_minimum",
                str(least),
                *reading.place(str(chief), "cluster_minimum"),
            )


def _zero_problems(reading: Reading, jobs: Sequence[str]) -> Iterator[Problem]:
    """Refuse a minimum of 0 of a job without which nothing is trained."""
    chief = check.reference_host(reading.groups)
    minimum = reading.values[chief].get("cluster_minimum") if chief else None
    for job, least in minimum.items() if isinstance(minimum, dict) else ():
        if least == 0 and job in jobs and job != "evaluator":
            yield Problem(
                f"cluster_minimum: {job} is 0, and nothing is trained without any {job}; expected 1 at least, a part "
                f"such as 0.8, or all. Or leave {job} out: then the strategy says how many it needs",
                (),
                "cluster_minimum",
                "0",
                *reading.place(str(chief), "cluster_minimum"),
            )


def _idle_minimum_problems(reading: Reading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse a minimum of a job that has no tasks: a start would wait for what nobody runs."""
    chief = check.reference_host(reading.groups)
    minimum = reading.values[chief].get("cluster_minimum") if chief else None
    for job, least in minimum.items() if isinstance(minimum, dict) else ():
        if least != 0 and job not in busy:
            yield Problem(
                f"cluster_minimum: {job} is {least}, and with these run settings nobody runs {job}; expected {job} to "
                "be left out. Or see strategy, evaluation and input in trainer_run",
                (),
                "cluster_minimum",
                show(least),
                *reading.place(str(chief), "cluster_minimum"),
            )


def _unwaited_problems(reading: Reading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse a start with some members of a training that waits for all of them."""
    chief = check.reference_host(reading.groups)
    values = reading.values[chief] if chief else {}
    run, minimum = values.get("trainer_run"), values.get("cluster_minimum")
    if not isinstance(run, dict) or not isinstance(minimum, dict) or run.get("elastic", True) is not False:
        return
    for job, least in minimum.items():
        number = len(_tasks_of(reading.groups, reading.values, job))
        part = isinstance(least, float) and least < 1
        if job in ("ps", "worker") and job in busy and (part or (isinstance(least, int) and 0 < least < number)):
            yield Problem(
                f"cluster_minimum: {job} is {least}, and elastic: false has the training wait for all {number}; "
                f"expected all. Or leave elastic out",
                (),
                "cluster_minimum",
                show(least),
                *reading.place(str(chief), "cluster_minimum"),
            )


def _unevaluated_problems(reading: Reading, busy: Sequence[str]) -> Iterator[Problem]:
    """Refuse to keep the best checkpoints where nobody evaluates any."""
    run = reading.values[check.reference_host(reading.groups) or ""].get("trainer_run")
    kept = run.get("checkpoints_kept_best") if isinstance(run, dict) else 0
    if "evaluator" in busy and kept and not _tasks_of(reading.groups, reading.values, "evaluator"):
        yield Problem(
            f"trainer_run: checkpoints_kept_best is {show(kept)}, evaluation is sidecar, and group evaluator is empty, "
            "so that nobody knows which are the best; expected a host there, or evaluation: inline",
            (),
            "trainer_run.checkpoints_kept_best",
            show(kept),
            *reading.parts.get("checkpoints_kept_best", (None, None)),
        )


def _vacancy_problems(spec: Mapping[str, Any], groups: Groups, hostvars: HostVars) -> Iterator[Problem]:
    strategy = strategy_of(groups, hostvars)
    elastic = STRATEGIES[strategy].remote and run_settings(groups, hostvars).get("elastic", Config.elastic)
    for job in NUMBERED_JOBS:
        places = [name for name in spec["vacant"] if name.startswith(f"{job}-")]
        present = [task for task in spec["tasks"] if task["job"] == job]
        if len(places) > MOST_VACANT * len(present):
            last = max(present, key=lambda task: int(task["index"]))
            yield Problem(
                f"{last['name']} on '{last['host']}' has the highest {job}_index, and of the places below "
                f"{len(places)} are vacant; {len(present)} are taken. Number the hosts from 0 on, with few gaps"
            )
    if spec["vacant"] and not elastic:
        why = "elastic: false" if STRATEGIES[strategy].remote else f"the strategy {strategy}"
        yield Problem(
            f"no host is {name_some(spec['vacant'])}, and {why} needs every member. Give a new machine that index "
            "(ps_index, worker_index), or number the hosts without a gap"
        )


def _port_problems(spec: Mapping[str, Any], reading: Reading) -> Iterator[Problem]:
    listeners = [(task["port"], task["host"], task["name"]) for task in spec["tasks"] if task["port"]]
    listeners += [(task["metrics_port"], task["host"], "metrics") for task in spec["tasks"] if task["metrics_port"]]
    for service in (*SERVICES, "node_exporter"):
        listeners += [(each["port"], host, service) for host, each in spec[service].items()]
    taken: dict[tuple[str, int], str] = {}
    for host in check.our_hosts(reading.groups):
        values = reading.values[host]
        # Where the two differ, the port may be that of a machine in between.
        if not values.get("cluster_address") or values.get("cluster_address") == values.get("ansible_host"):
            taken[host, int(values.get("ansible_port") or 22)] = "SSH"
    for port, host, name in listeners:
        variable = f"{name.split('-')[0]}_port"
        place = reading.place(host, variable)
        reserved = None if port == DEFAULT_PORTS.get(name) else definition().listeners.get(port)
        other = taken.get((host, port)) or reserved
        if other:
            yield Problem(
                f"port {port} on host {host!r} is taken twice, by {other} and by {name}. Set {variable} on that host "
                "to another first port",
                (host,),
                variable,
                str(port),
                *place,
            )
        elif port > 65535:
            yield Problem(
                f"{name} on '{host}' would listen on port {port}; the highest is 65535. Lower {variable} there",
                (host,),
                variable,
                str(port),
                *place,
            )
        taken[host, port] = name


def _opened_problems(spec: Mapping[str, Any], reading: Reading) -> Iterator[Problem]:
    """Refuse a task's port that is opened to everybody: TensorFlow's servers run what they are sent, unasked who it is.

    TensorBoard's may be opened; it shows the training and runs nothing.
    """
    ports: dict[str, dict[int, str]] = {}
    for task in spec["tasks"]:
        if task["port"]:
            ports.setdefault(task["host"], {})[task["port"]] = task["name"]
    told: dict[str, list[str]] = {}
    for host, names in ports.items():
        for entry in reading.values[host].get("firewall_open", ()):
            first, _, last = str(entry["port"]).partition("-")
            anyone = any(network.endswith("/0") for network in entry.get("from", ["0.0.0.0/0"]))
            hit = next((port for port in names if int(first) <= port <= int(last or first)), None)
            if hit is not None and anyone and entry.get("protocol", "tcp") == "tcp":
                told.setdefault(f"port {entry['port']} to everybody, and {hit} is {names[hit]}'s", []).append(host)
    for said, hosts in told.items():
        yield Problem(
            f"{name_hosts(hosts)}: firewall_open opens {said}, whose server runs what it is sent; expected a port of "
            "another program, or `from` with the networks that may reach it. Members reach it in any case",
            tuple(hosts),
            "firewall_open",
            None,
            *reading.place(hosts[0], "firewall_open"),
        )


def _size_problems(spec: Mapping[str, Any]) -> Iterator[Problem]:
    if not spec["tasks"]:
        return
    longest = max(spec["tasks"], key=lambda task: len(task["name"]))
    size = len("TF_CONFIG=") + len(tf_config(spec["cluster_json"], longest["job"], longest["index"]))
    if size > MAX_ENVIRONMENT_STRING:
        yield Problem(
            f"TF_CONFIG for {len(spec['tasks'])} tasks is {size:,} bytes; one environment variable holds at most "
            f"{MAX_ENVIRONMENT_STRING:,}. Use fewer tasks"
        )
