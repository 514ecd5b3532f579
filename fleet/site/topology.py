"""From the inventory to TensorFlow's cluster spec: pure functions, used by Ansible, Fabric and the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fleet.site.gpus import GpuError, computes, host_devices, share_devices
from fleet.site.members import (
    SERVICES,
    ClusterSpecError,
    Groups,
    HostVars,
    RunStorage,
    address_of,
    bracketed,
    busy_jobs,
    hosts_of,
    metrics_port_of,
    port_of,
    site_of,
    storage_of,
    strategy_of,
    task_count,
    task_indices,
)
from fleet.site.wireguard import endpoint, is_encrypted, wireguard_hosts
from trainer.cluster.spec import JOBS, SERVICE_JOBS, VACANT
from trainer.core.runtime import NO_GPU
from trainer.core.settings.strategies import STRATEGIES

# The kernel refuses one environment string of 128 KiB or more (MAX_ARG_STRLEN), its name and `=` included.
MAX_ENVIRONMENT_STRING = 131_071
# Of the packet filter: every host of the cluster, whatever its jobs.
MEMBER = "member"
# And where their encrypted packets come from.
ENDPOINT = "endpoint"


@dataclass(frozen=True)
class Task:
    """One task of the cluster: a systemd unit on a host."""

    job: str
    index: int
    host: str
    address: str
    port: int | None
    """None where it listens on nothing."""
    server: bool
    """It waits for the coordinator's orders; the others train or evaluate, and end with the run."""
    metrics_port: int | None = None
    """None where it is not scraped."""
    devices: str | None = None
    """On hosts of the group gpu: its CUDA_VISIBLE_DEVICES."""

    @property
    def trains(self) -> bool:
        """Whether it runs the training program: the coordinator, and without parameter servers each worker."""
        return not self.server and self.job != "evaluator"

    @property
    def name(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def endpoint(self) -> str:
        """Return where other members find it, as TF_CONFIG says it."""
        return f"{bracketed(self.address)}:{self.port}"

    @property
    def unit(self) -> str:
        return f"trainer@{self.name}.service"

    def as_plain(self) -> dict[str, Any]:
        plain = {"name": self.name, **vars(self)}
        devices = plain.pop("devices")
        return plain | ({} if devices is None else {"cuda_visible_devices": devices})


@dataclass(frozen=True)
class Listener:
    """Where a host's service listens."""

    address: str
    port: int | None


@dataclass(frozen=True)
class Gpus:
    """A host's GPUs; `devices` as CUDA_VISIBLE_DEVICES names them."""

    count: int | None
    devices: Sequence[str]


@dataclass(frozen=True)
class Topology:
    """The whole cluster, as the inventory has it."""

    cluster: Mapping[str, Sequence[str]]
    """What TF_CONFIG carries, `{job: [address:port]}`: the strategy's jobs and the data service's that have tasks."""
    tasks: Sequence[Task]
    """By job and index, the evaluator's too."""
    hosts: Sequence[str]
    """Those of all jobs, with or without tasks."""
    listeners: Mapping[str, Mapping[str, Listener]]
    """By service and host; node_exporter is on every host of psfleet's groups, where the group prometheus has hosts."""
    gpus: Mapping[str, Gpus]
    """By host."""
    sources: Mapping[str, Sequence[str]]
    """The addresses from which each job's hosts send, and all hosts of the cluster under MEMBER, for the packet filter;
    with encryption the addresses of all hosts outside the tunnel under ENDPOINT."""
    storage: RunStorage

    @cached_property
    def cluster_json(self) -> str:
        return _json(self.cluster)

    @property
    def vacant(self) -> list[str]:
        """The members below a job's highest index that no host is."""
        members = [(job, index, at) for job, places in self.cluster.items() for index, at in enumerate(places)]
        return [f"{job}-{index}" for job, index, at in members if at == VACANT]

    @property
    def scraped_workers(self) -> dict[str, str]:
        """Where each worker is scraped, which the chief does as well."""
        workers = [task for task in self.tasks if task.job == "worker" and task.metrics_port is not None]
        return {task.name: f"{bracketed(task.address)}:{task.metrics_port}" for task in workers}

    def as_plain(self) -> dict[str, Any]:
        """Return what Ansible hands from one filter to the next: texts, numbers, lists and dicts alone.

        `by_host` has the same tasks host by host; what a host only writes into a file is a line of JSON.
        """
        tasks = [task.as_plain() for task in self.tasks]
        by_host: dict[str, list[dict[str, Any]]] = {}
        for task in tasks:
            by_host.setdefault(task["host"], []).append(task)
        return {
            "cluster": {job: list(members) for job, members in self.cluster.items()},
            "cluster_json": self.cluster_json,
            "scraped_json": _json(self.scraped_workers) if self.scraped_workers else "",
            "tasks": tasks,
            "by_host": by_host,
            "hosts": list(self.hosts),
            **{name: {host: asdict(each) for host, each in found.items()} for name, found in self.listeners.items()},
            "gpus": {host: asdict(each) for host, each in self.gpus.items()},
            "vacant": self.vacant,
            "sources_json": _json(self.sources),
            "storage": self.storage.as_plain(),
        }


def cluster_spec(groups: Groups, hostvars: HostVars) -> dict[str, Any]:
    """Derive the whole cluster from the inventory, as plain data for Ansible; raises ClusterSpecError."""
    return derive_topology(groups, hostvars).as_plain()


def derive_topology(groups: Groups, hostvars: HostVars) -> Topology:
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

    Raises:
        ClusterSpecError: a host has no literal address, a number of tasks, a port or an index is no such number, an
            index is missing or given twice, or the strategy is unknown.
    """
    cluster: dict[str, list[str]] = {}
    tasks: list[Task] = []
    for job in busy_jobs(groups, hostvars):
        members, own = _members_of(job, groups, hostvars)
        tasks += own
        # An evaluator in the cluster would be waited for for ever (tensorflow#46169).
        if members and job != "evaluator":
            cluster[job] = members
    tasks.sort(key=lambda task: (JOBS.index(task.job), task.index))
    tasks = _with_metrics_ports(tasks, hostvars, bool(groups.get("prometheus")))
    gpus = {host: _host_gpus(host, hostvars[host]) for host in groups.get("gpu", ())}
    tasks = _with_devices(tasks, gpus, strategy_of(groups, hostvars))
    listeners = {service: _listeners(service, groups.get(service, ()), hostvars) for service in SERVICES}
    return Topology(
        cluster,
        tasks,
        list(dict.fromkeys(host for job in JOBS for host in groups.get(job, ()))),
        {**listeners, "node_exporter": _listeners("node_exporter", _watched(groups), hostvars)},
        gpus,
        _sources(tasks, groups, hostvars),
        storage_of(site_of(groups, hostvars)),
    )


def _members_of(job: str, groups: Groups, hostvars: HostVars) -> tuple[list[str], list[Task]]:
    """Return a job's addresses by index, and its tasks host by host."""
    jobs = busy_jobs(groups, hostvars)
    member_jobs = STRATEGIES[strategy_of(groups, hostvars)].jobs
    # A coordinator without other members has an address for TensorFlow and listens on nothing.
    listens = len(member_jobs) > 1 or job in SERVICE_JOBS
    # Where there are parameter servers, the workers are servers as well; else they train.
    server = job in ("ps", *SERVICE_JOBS) or (job == "worker" and "ps" in jobs)
    hosts = hosts_of(job, groups)
    indices = task_indices(job, hosts, hostvars)
    members = [VACANT] * (max(indices.values(), default=-1) + 1)
    tasks = []
    for host in hosts:
        address, first_port = address_of(host, hostvars[host]), port_of(host, job, hostvars[host])
        for slot in range(task_count(host, job, hostvars[host])):
            index = indices[host, slot]
            port = None if first_port is None else first_port + slot
            members[index] = f"{bracketed(address)}:{port}"
            tasks.append(Task(job, index, host, address, port if listens else None, server))
    return members, tasks


def _with_metrics_ports(tasks: Iterable[Task], hostvars: HostVars, scraped: bool) -> list[Task]:
    """Give each host's tasks the ports where they are scraped, one after the other."""
    given: dict[str, int] = {}
    found = []
    for task in tasks:
        first = metrics_port_of(task.host, hostvars[task.host], scraped)
        slot = given[task.host] = given.get(task.host, -1) + 1
        found.append(replace(task, metrics_port=first + slot if first else None))
    return found


def _with_devices(tasks: Sequence[Task], gpus: Mapping[str, Gpus], strategy: str) -> list[Task]:
    """Say for each task on a host with GPUs which of them it sees."""
    training: dict[str, list[str]] = {}
    for task in tasks:
        if computes(task.job, strategy):
            training.setdefault(task.host, []).append(task.name)
    shares: dict[str, str] = {}
    for host, found in gpus.items():
        names = training.get(host, [])
        try:
            shares |= zip(names, share_devices(host, found.devices, len(names)), strict=True)
        except GpuError as error:
            raise ClusterSpecError(str(error)) from error
    return [replace(task, devices=shares.get(task.name, NO_GPU)) if task.host in gpus else task for task in tasks]


def _sources(tasks: Sequence[Task], groups: Groups, hostvars: HostVars) -> dict[str, list[str]]:
    """Return the addresses of each job's hosts, and of every host of the cluster, with tasks or without."""
    by_job: dict[str, dict[str, None]] = {}
    for task in tasks:
        by_job.setdefault(task.job, {})[task.address] = None
    everyone = dict.fromkeys(host for group in (*JOBS, "tensorboard", "nfs_server") for host in groups.get(group, ()))
    members = dict.fromkeys(address_of(host, hostvars[host]) for host in everyone if endpoint(hostvars[host]))
    sources = {job: list(addresses) for job, addresses in by_job.items()} | {MEMBER: list(members)}
    # They read of the members, and no member needs to know them.
    if scrapers := groups.get("prometheus"):
        sources["prometheus"] = [address_of(host, hostvars[host]) for host in scrapers]
    if is_encrypted(site_of(groups, hostvars)):
        ends = (endpoint(hostvars[host]) for host in wireguard_hosts(groups))
        sources[ENDPOINT] = list(dict.fromkeys(str(end) for end in ends if end))
    return sources


def _listeners(service: str, hosts: Iterable[str], hostvars: HostVars) -> dict[str, Listener]:
    """Return where each host's service listens."""
    return {host: Listener(address_of(host, hostvars[host]), port_of(host, service, hostvars[host])) for host in hosts}


def _watched(groups: Groups) -> list[str]:
    """Return the hosts that node_exporter is for: all of psfleet's, where Prometheus scrapes them."""
    if not groups.get("prometheus"):
        return []
    ours = (*JOBS, *SERVICES, "nfs_server", "gpu")
    return list(dict.fromkeys(host for group in ours for host in groups.get(group, ())))


def _host_gpus(host: str, variables: Mapping[str, Any]) -> Gpus:
    try:
        return Gpus(variables.get("gpu_count"), host_devices(host, variables))
    except GpuError as error:
        raise ClusterSpecError(str(error)) from error


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


def host_tasks(spec: Mapping[str, Any], host: str) -> list[dict[str, Any]]:
    """Pick the tasks of one host, each with its TF_CONFIG as one line of JSON under `tf_config`.

    `metrics` is where it is scraped, as `address:port`, instead of `metrics_port`; empty where it is not. The chief has
    the workers' in `metrics_of_workers`, as a line of JSON.

    Called for every host, so it takes care not to walk through all tasks: Ansible makes each element that a filter
    touches again (0.2 s a call for 1,000 tasks).
    """
    tasks = []
    for task in spec["by_host"].get(host, ()):
        given = {**task, "tf_config": tf_config(spec["cluster_json"], task["job"], task["index"])}
        port = given.pop("metrics_port")
        given["metrics"] = "" if port is None else f"{bracketed(task['address'])}:{port}"
        given["metrics_of_workers"] = spec["scraped_json"] if task["job"] == "chief" else ""
        tasks.append(given)
    return tasks


def tf_config(cluster_json: str, job: str, index: int) -> str:
    """Put one task's TF_CONFIG together, as TensorFlow's TFConfigClusterResolver reads it."""
    return f'{{"cluster":{cluster_json},"task":{_json({"type": job, "index": index})}}}'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
