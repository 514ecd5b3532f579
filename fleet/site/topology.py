"""From the inventory to TensorFlow's cluster spec: pure functions, used by Ansible, Fabric and the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.site.gpus import HIDDEN, GpuError, computes, host_devices, share_devices
from fleet.site.wireguard import WireguardError, endpoint, is_encrypted, tunnel_address, wireguard_hosts
from trainer.cluster.spec import SERVICE_JOBS
from trainer.core.config import CHECKS, STRATEGIES, Config

# Jobs in the order in which a host's tasks are listed. The evaluator listens on nothing: TensorFlow gives it no server.
JOBS = ("chief", "ps", "worker", "evaluator", *SERVICE_JOBS)
# The first port of a job on a host; its second task there listens on the next one, and so on.
DEFAULT_PORTS = {
    "chief": 2222, "ps": 2300, "worker": 2400, "dispatcher": 2500, "data": 2600, "metrics": 2700, "tensorboard": 6006,
    "prometheus": 9090, "alertmanager": 9093, "node_exporter": 9100,
}  # fmt: skip
# Groups whose hosts have no tasks of their own for it.
SERVICES = ("tensorboard", "prometheus", "alertmanager")
# The kernel refuses one environment string of 128 KiB or more (MAX_ARG_STRLEN), its name and `=` included.
MAX_ENVIRONMENT_STRING = 131_071
# Jobs of many members, whose hosts may say which index they have.
NUMBERED_JOBS = ("ps", "worker")
MAX_INDEX = 9999
# Each host's own directory where no path is shared (an empty cluster_shared_dir), unless cluster_local_dir names one.
LOCAL_DIR = "/var/lib/trainer/local"
# Stands in TF_CONFIG for a member that no host is: nothing listens there, and who asks is refused at once.
NOBODY = "127.0.0.1:1"
# Of the packet filter: every host of the cluster, whatever its jobs.
MEMBER = "member"
# And where their encrypted packets come from.
ENDPOINT = "endpoint"


class ClusterSpecError(ValueError):
    """The inventory describes no cluster. The message names the value, what was expected and the mend."""


def cluster_spec(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Derive the whole cluster from the inventory.

    Args:
        groups: hosts of each group, in the order written. A group's name is a TensorFlow job.
        hostvars: each host's variables. Read are `cluster_address` (else `ansible_host`), with `cluster_encryption`
            `wireguard_address` and `wireguard_network` (all addresses are the tunnel's then), for each job
            `<job>_tasks` (default 1) and `<job>_port` (the first task's port), `ps_index` and `worker_index` (the first
            task's index; without it a task's index is its place in the group), `metrics_port` (the port where the
            host's first task is scraped), the ports of the groups' services, in the group gpu `gpu_count` or
            `gpu_devices`, and of `trainer_run` the strategy, the evaluation and the input: they say which of the
            groups have tasks.

    Returns:
        `{"cluster": {job: ["address:port", ...]}, "cluster_json": "...", "tasks": [{"name", "job", "index", "host",
        "address", "port", "server", "metrics_port"}], "by_host": {host: [task, ...]}, "hosts": [host, ...],
        "tensorboard": {host: {"address", "port"}}, "gpus": {host: {"count", "devices"}}, "vacant": [name, ...],
        "sources_json": "...", "scraped_json": "...", "storage": {"path", "shared", "settings"}}`, and as `tensorboard`
        has it `prometheus`, `alertmanager` and `node_exporter`.
        `cluster` is what TF_CONFIG carries: the strategy's jobs and the data service's, one without tasks left out;
        `cluster_json` is the same as a line of text. `tasks` has the evaluator too, and `by_host` the same tasks host
        by host. A task's `port` is None where it listens on nothing; `server` says that it only serves: it waits for
        the coordinator's orders, and reads the run settings anew while it runs. `metrics_port` is None where nobody
        scrapes the task. `node_exporter` has every host of psfleet's groups, where the group prometheus has hosts. On
        hosts of the group gpu each task has `cuda_visible_devices`. `hosts` are those of all jobs, with or without
        tasks. `vacant` names the members below a job's highest index that no host is. `sources_json` has the addresses
        from which each job's hosts send, and all hosts of the cluster under MEMBER, for the packet filter; with
        encryption the addresses of all hosts outside the tunnel under ENDPOINT. `scraped_json` says where each worker
        is scraped, which the chief does as well; empty where nobody is.
        `storage` is `storage_of`'s.

    Raises:
        ClusterSpecError: a host has no literal address, a number of tasks, a port or an index is no such number, an
            index is missing or given twice, or the strategy is unknown.
    """
    member_jobs = STRATEGIES[strategy_of(groups, hostvars)].jobs
    jobs = busy_jobs(groups, hostvars)
    cluster: dict[str, list[str]] = {}
    tasks: list[dict[str, Any]] = []
    for job in jobs:
        hosts = hosts_of(job, groups)
        indices = _task_indices(job, hosts, hostvars)
        members = [NOBODY] * (max(indices.values(), default=-1) + 1)
        for host in hosts:
            variables = hostvars[host]
            address = _address(host, variables)
            first_port = _port(host, job, variables)
            for slot in range(_task_count(host, job, variables)):
                index = indices[host, slot]
                port = None if first_port is None else first_port + slot
                members[index] = f"{_bracketed(address)}:{port}"
                tasks.append(
                    {
                        "name": f"{job}-{index}",
                        "job": job,
                        "index": index,
                        "host": host,
                        "address": address,
                        # A coordinator without other members has an address for TensorFlow and listens on nothing.
                        "port": port if len(member_jobs) > 1 or job in SERVICE_JOBS else None,
                        # Where there are parameter servers, the workers are servers as well; else they train.
                        "server": job in ("ps", *SERVICE_JOBS) or (job == "worker" and "ps" in jobs),
                    }
                )
        # An evaluator in the cluster would be waited for for ever (tensorflow#46169).
        if members and job != "evaluator":
            cluster[job] = members
    tasks.sort(key=lambda task: (JOBS.index(task["job"]), task["index"]))
    by_host: dict[str, list[dict[str, Any]]] = {}
    for task in tasks:
        by_host.setdefault(task["host"], []).append(task)
    for host, own in by_host.items():
        first = _metrics_port(host, hostvars[host], bool(groups.get("prometheus")))
        for slot, task in enumerate(own):
            task["metrics_port"] = first + slot if first else None
    scraped = {
        task["name"]: f"{_bracketed(task['address'])}:{task['metrics_port']}"
        for task in tasks
        if task["job"] == "worker" and task["metrics_port"] is not None
    }
    gpus = {host: _host_gpus(host, hostvars[host]) for host in groups.get("gpu", ())}
    for host, found in gpus.items():
        _give_devices(host, found["devices"], by_host.get(host, []), strategy_of(groups, hostvars))
    return {
        "cluster": cluster,
        "cluster_json": _json(cluster),
        "scraped_json": _json(scraped) if scraped else "",
        "tasks": tasks,
        "by_host": by_host,
        "hosts": list(dict.fromkeys(host for job in JOBS for host in groups.get(job, ()))),
        **{service: _listeners(service, groups.get(service, ()), hostvars) for service in SERVICES},
        "node_exporter": _listeners("node_exporter", _watched(groups), hostvars),
        "gpus": gpus,
        "vacant": [
            f"{job}-{index}"
            for job, members in cluster.items()
            for index, address in enumerate(members)
            if address == NOBODY
        ],
        "sources_json": _json(_sources(tasks, groups, hostvars)),
        "storage": storage_of(_site(groups, hostvars)),
    }


def _sources(
    tasks: Sequence[Mapping[str, Any]], groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Return the addresses of each job's hosts, and of every host of the cluster, with tasks or without."""
    by_job: dict[str, dict[str, None]] = {}
    for task in tasks:
        by_job.setdefault(task["job"], {})[task["address"]] = None
    everyone = dict.fromkeys(host for group in (*JOBS, "tensorboard", "nfs_server") for host in groups.get(group, ()))
    members = dict.fromkeys(_address(host, hostvars[host]) for host in everyone if endpoint(hostvars[host]))
    sources = {job: list(addresses) for job, addresses in by_job.items()} | {MEMBER: list(members)}
    # They read of the members, and no member needs to know them.
    if scrapers := groups.get("prometheus"):
        sources["prometheus"] = [_address(host, hostvars[host]) for host in scrapers]
    if is_encrypted(_site(groups, hostvars)):
        ends = (endpoint(hostvars[host]) for host in wireguard_hosts(groups))
        sources[ENDPOINT] = list(dict.fromkeys(str(end) for end in ends if end))
    return sources


def _listeners(
    service: str, hosts: Iterable[str], hostvars: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return where each host's service listens."""
    return {
        host: {"address": _address(host, hostvars[host]), "port": _port(host, service, hostvars[host])}
        for host in hosts
    }


def _watched(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the hosts that node_exporter is for: all of psfleet's, where somebody scrapes them."""
    if not groups.get("prometheus"):
        return []
    ours = (*JOBS, *SERVICES, "nfs_server", "gpu")
    return list(dict.fromkeys(host for group in ours for host in groups.get(group, ())))


def metrics_targets(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List where each task is scraped, `[{"task", "job", "index", "host", "address", "port"}]`; none where it is not.

    An IPv6 address has no brackets here.
    """
    return [
        {
            "task": task["name"],
            "job": task["job"],
            "index": task["index"],
            "host": task["host"],
            "address": task["address"],
            "port": task["metrics_port"],
        }
        for task in spec["tasks"]
        if task["metrics_port"] is not None
    ]


def _host_gpus(host: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"count": variables.get("gpu_count"), "devices": host_devices(host, variables)}
    except GpuError as error:
        raise ClusterSpecError(str(error)) from error


def _give_devices(host: str, devices: Sequence[str], tasks: Sequence[dict[str, Any]], strategy: str) -> None:
    """Say for each task on a host with GPUs which of them it sees."""
    training = [task["name"] for task in tasks if computes(task["job"], strategy)]
    try:
        shares = share_devices(host, devices, len(training))
    except GpuError as error:
        raise ClusterSpecError(str(error)) from error
    shared = dict(zip(training, shares, strict=True))
    for task in tasks:
        task["cuda_visible_devices"] = shared.get(task["name"], HIDDEN)


def busy_jobs(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Which jobs have tasks under the run settings: the strategy's, the evaluator's and the data service's."""
    settings = run_settings(groups, hostvars)
    busy = set(STRATEGIES[strategy_of(groups, hostvars)].jobs)
    if settings.get("evaluation", Config.evaluation) == "sidecar":
        busy.add("evaluator")
    if settings.get("input", Config.input) == "service":
        busy.update(SERVICE_JOBS)
    return tuple(job for job in JOBS if job in busy)


def hosts_of(job: str, groups: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The hosts of a job: its group's. The dispatcher has none of its own, and runs on the chief's host.

    That host can't be spared anyhow, and any host of the group data can.
    """
    return groups.get("chief" if job == "dispatcher" else job, ())


def strategy_of(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> str:
    """The strategy that the run settings name, or the default; raises ClusterSpecError for an unknown one."""
    strategy = run_settings(groups, hostvars).get("strategy", Config.strategy)
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ClusterSpecError(f"trainer_run: strategy: {CHECKS['strategy'][1]}, not {strategy!r}")
    return strategy


def run_settings(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The site's `trainer_run` as the coordinator's host has it; empty where it is no mapping."""
    settings = _site(groups, hostvars).get("trainer_run")
    return settings if isinstance(settings, Mapping) else {}


def storage_of(site: Mapping[str, Any]) -> dict[str, Any]:
    """Where the runs lie: `path`, whether all hosts share it, and the run settings that say so.

    An empty `cluster_shared_dir` means that they share none: then each host has a directory of its own there, and the
    chief's has the runs.
    """
    shared = site.get("cluster_shared_dir") != ""
    path = site.get("cluster_shared_dir") if shared else site.get("cluster_local_dir", LOCAL_DIR)
    settings = {"shared_dir": path} | ({} if shared else {"local_run_dir": True})
    return {"path": path, "shared": shared, "settings": settings}


def _site(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The site's variables, as the coordinator's host has them."""
    host = next(iter(groups.get("chief") or groups.get("all") or ()), None)
    return hostvars[host] if host is not None else {}


def host_tasks(spec: Mapping[str, Any], host: str) -> list[dict[str, Any]]:
    """Pick the tasks of one host, each with its TF_CONFIG as one line of JSON under `tf_config`.

    `metrics` is where it is scraped, as `address:port`, instead of `metrics_port`; empty where it is not. The chief has
    the workers' in `metrics_of_workers`, as a line of JSON.

    Called for every host, so it takes care not to walk through all tasks: Ansible makes each element that a filter
    touches anew (0.2 s a call for 1,000 tasks).
    """
    tasks = []
    for task in spec["by_host"].get(host, ()):
        given = {**task, "tf_config": tf_config(spec["cluster_json"], task["job"], task["index"])}
        port = given.pop("metrics_port")
        given["metrics"] = "" if port is None else f"{_bracketed(task['address'])}:{port}"
        given["metrics_of_workers"] = spec["scraped_json"] if task["job"] == "chief" else ""
        tasks.append(given)
    return tasks


def tf_config(cluster_json: str, job: str, index: int) -> str:
    """Put one task's TF_CONFIG together, as TensorFlow's TFConfigClusterResolver reads it."""
    return f'{{"cluster":{cluster_json},"task":{_json({"type": job, "index": index})}}}'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _address(host: str, variables: Mapping[str, Any]) -> str:
    """The address by which the others reach a host: with encryption the tunnel's."""
    address = endpoint(variables)
    if not address:
        raise ClusterSpecError(
            f"host '{host}' has no address. Give it one that every other host can reach: ansible_host: 192.0.2.10 "
            "(and cluster_address: 10.0.0.10 where the hosts know one another by another address)"
        )
    if not isinstance(address, str) or "{{" in address or any(c.isspace() for c in address):
        raise ClusterSpecError(
            f"host '{host}' has the address {address!r}; expected a literal such as 192.0.2.10. "
            "A template or a fact would render a smaller cluster when a run is limited to some hosts"
        )
    if is_encrypted(variables):
        try:
            return tunnel_address(host, variables)
        except WireguardError as error:
            raise ClusterSpecError(str(error)) from error
    return address


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _task_count(host: str, job: str, variables: Mapping[str, Any]) -> int:
    name = "chief_tasks" if job == "dispatcher" else f"{job}_tasks"  # it is where the coordinator is
    count = variables.get(name, 1)
    if not _is_int(count) or count < 0:
        raise ClusterSpecError(f"host '{host}' has {name}: {count!r}; expected a number of tasks such as 2")
    return count


def _task_indices(
    job: str, hosts: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, int], int]:
    """Give each task of a job, {(host, number on the host): index}."""
    slots = [(host, slot) for host in hosts for slot in range(_task_count(host, job, hostvars[host]))]
    first = {host: _first_index(host, job, hostvars[host]) for host, _ in slots}
    without = [host for host, index in first.items() if index is None]
    if len(without) == len(first):
        return {place: index for index, place in enumerate(slots)}
    indices = {(host, slot): index + slot for host, slot in slots if (index := first[host]) is not None}
    free = next(index for index in range(len(indices) + 1) if index not in indices.values())
    if without:
        raise ClusterSpecError(
            f"{job}_index is missing on {', '.join(without)}, and other hosts of the group {job} have one. Give each "
            f"its own ({free} is free), or none to any: then a host's place in the group counts"
        )
    taken: dict[int, str] = {}
    for (host, _), index in indices.items():
        if index in taken:
            raise ClusterSpecError(
                f"the hosts '{taken[index]}' and '{host}' are both {job}-{index}. Give one of them another "
                f"{job}_index: {free} is free"
            )
        taken[index] = host
    return indices


def _first_index(host: str, job: str, variables: Mapping[str, Any]) -> int | None:
    given = variables.get(f"{job}_index")
    # Tags are strings, and a tag that a machine lacks may be composed to an empty one.
    if job not in NUMBERED_JOBS or given is None or given == "":
        return None
    index = int(given) if isinstance(given, str) and re.fullmatch("[0-9]{1,4}", given) else given
    if not _is_int(index) or not 0 <= index <= MAX_INDEX:
        raise ClusterSpecError(
            f"host '{host}' has {job}_index: {given!r}; expected the index of its first {job} task, a number from 0 to "
            f"{MAX_INDEX}"
        )
    return int(index)


def _port(host: str, job: str, variables: Mapping[str, Any]) -> int | None:
    if job not in DEFAULT_PORTS:
        return None
    port = variables.get(f"{job}_port", DEFAULT_PORTS[job])
    if not _is_int(port) or not 1 <= port <= 65535:
        raise ClusterSpecError(
            f"host '{host}' has {job}_port: {port!r}; expected a number from 1 to 65535, such as {DEFAULT_PORTS[job]}"
        )
    return port


def _metrics_port(host: str, variables: Mapping[str, Any], scraped: bool) -> int | None:
    """Return the first port where a host's tasks are scraped: as the host says, else where somebody scrapes."""
    if "metrics_port" not in variables and not scraped:
        return None
    return None if variables.get("metrics_port") == 0 else _port(host, "metrics", variables)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
