"""Which hosts have which tasks, and where these listen: what groups and the hosts' variables say, each by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.site.wireguard import WireguardError, endpoint, is_encrypted, tunnel_address
from trainer.cluster.spec import JOBS, SERVICE_JOBS
from trainer.core.settings.config import Config, strategy_problem
from trainer.core.settings.search_space import is_whole
from trainer.core.settings.strategies import STRATEGIES

# The first port of a job on a host; its second task there listens on the next one, and so on.
DEFAULT_PORTS = {
    "chief": 2222, "ps": 2300, "worker": 2400, "dispatcher": 2500, "data": 2600, "metrics": 2700, "tensorboard": 6006,
    "prometheus": 9090, "alertmanager": 9093, "node_exporter": 9100,
}  # fmt: skip
# Groups whose hosts have no tasks of their own for it.
SERVICES = ("tensorboard", "prometheus", "alertmanager")
# By group whose hosts serve something beside the tasks: the unit that does.
SERVING_UNITS = {
    "nfs_server": "nfs-server.service",
    "tensorboard": "tensorboard.service",
    "prometheus": "prometheus.service",
    "alertmanager": "prometheus-alertmanager.service",
}
# Jobs of many members, whose hosts may say which index they have.
NUMBERED_JOBS = ("ps", "worker")
MAX_INDEX = 9999
# Each host's own directory where no path is shared (an empty cluster_shared_dir), unless cluster_local_dir names one.
LOCAL_DIR = "/var/lib/trainer/local"

Groups = Mapping[str, Sequence[str]]
"""The hosts of each group, in the order written."""
HostVars = Mapping[str, Mapping[str, Any]]
"""Each host's variables."""


class ClusterSpecError(ValueError):
    """The inventory describes no cluster. The message names the value, what was expected and the fix."""


def busy_jobs(groups: Groups, hostvars: HostVars) -> tuple[str, ...]:
    """Which jobs have tasks under the run settings: the strategy's, the evaluator's and the data service's."""
    settings = run_settings(groups, hostvars)
    busy = set(STRATEGIES[strategy_of(groups, hostvars)].jobs)
    if settings.get("evaluation", Config.evaluation) == "sidecar":
        busy.add("evaluator")
    if settings.get("input", Config.input) == "service":
        busy.update(SERVICE_JOBS)
    return tuple(job for job in JOBS if job in busy)


def hosts_of(job: str, groups: Groups) -> Sequence[str]:
    """The hosts of a job: its group's. The dispatcher has none of its own, and runs on the chief's host.

    That host can't be spared anyhow, and any host of the group data can.
    """
    return groups.get("chief" if job == "dispatcher" else job, ())


def strategy_of(groups: Groups, hostvars: HostVars) -> str:
    """The strategy that the run settings name, or the default; raises ClusterSpecError for an unknown one."""
    strategy = run_settings(groups, hostvars).get("strategy", Config.strategy)
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ClusterSpecError(f"trainer_run: {strategy_problem('strategy', strategy)}")
    return strategy


def run_settings(groups: Groups, hostvars: HostVars) -> Mapping[str, Any]:
    """The site's `trainer_run` as the coordinator's host has it; empty where it is no mapping."""
    settings = site_of(groups, hostvars).get("trainer_run")
    return settings if isinstance(settings, Mapping) else {}


@dataclass(frozen=True)
class RunStorage:
    """Where the runs lie, and whether all hosts share it."""

    path: Any
    """As the inventory has it: only a text that begins with a slash is right."""
    shared: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The run settings that say so."""
        return {"shared_dir": self.path} | ({} if self.shared else {"local_run_dir": True})

    def as_plain(self) -> dict[str, Any]:
        return {"path": self.path, "shared": self.shared, "settings": self.settings}


def storage_of(site: Mapping[str, Any]) -> RunStorage:
    """Say where the runs lie. An empty `cluster_shared_dir` means that the hosts share no path.

    Then each has a directory of its own there, and the chief's has the runs.
    """
    shared = site.get("cluster_shared_dir") != ""
    return RunStorage(site.get("cluster_shared_dir") if shared else site.get("cluster_local_dir", LOCAL_DIR), shared)


def site_of(groups: Groups, hostvars: HostVars) -> Mapping[str, Any]:
    """The site's variables, as the coordinator's host has them."""
    host = next(iter(groups.get("chief") or groups.get("all") or ()), None)
    return hostvars[host] if host is not None else {}


def address_of(host: str, variables: Mapping[str, Any]) -> str:
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


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def task_count(host: str, job: str, variables: Mapping[str, Any]) -> int:
    name = "chief_tasks" if job == "dispatcher" else f"{job}_tasks"  # it is where the coordinator is
    count = variables.get(name, 1)
    if not is_whole(count) or count < 0:
        raise ClusterSpecError(f"host '{host}' has {name}: {count!r}; expected a number of tasks such as 2")
    return count


def task_indices(job: str, hosts: Sequence[str], hostvars: HostVars) -> dict[tuple[str, int], int]:
    """Give each task of a job, {(host, number on the host): index}."""
    slots = [(host, slot) for host in hosts for slot in range(task_count(host, job, hostvars[host]))]
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
    if not is_whole(index) or not 0 <= index <= MAX_INDEX:
        raise ClusterSpecError(
            f"host '{host}' has {job}_index: {given!r}; expected the index of its first {job} task, a number from 0 to "
            f"{MAX_INDEX}"
        )
    return int(index)


def port_of(host: str, job: str, variables: Mapping[str, Any]) -> int | None:
    if job not in DEFAULT_PORTS:
        return None
    port = variables.get(f"{job}_port", DEFAULT_PORTS[job])
    if not is_whole(port) or not 1 <= port <= 65535:
        raise ClusterSpecError(
            f"host '{host}' has {job}_port: {port!r}; expected a number from 1 to 65535, such as {DEFAULT_PORTS[job]}"
        )
    return port


def metrics_port_of(host: str, variables: Mapping[str, Any], scraped: bool) -> int | None:
    """Return the first port where a host's tasks are scraped: as the host says, else where Prometheus scrapes."""
    if "metrics_port" not in variables and not scraped:
        return None
    return None if variables.get("metrics_port") == 0 else port_of(host, "metrics", variables)
