"""From the inventory to TensorFlow's cluster spec: pure functions, used by Ansible, Fabric and the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Jobs in the order in which a host's tasks are listed. The evaluator listens on nothing: TensorFlow gives it no server.
JOBS = ("chief", "ps", "worker", "evaluator")
# The first port of a job on a host; its second task there listens on the next one, and so on.
DEFAULT_PORTS = {"chief": 2222, "ps": 2300, "worker": 2400, "tensorboard": 6006}
# Jobs that the coordinator sees. An evaluator among them would be waited for for ever (tensorflow#46169).
CLUSTER_JOBS = ("chief", "ps", "worker")

# The kernel refuses one environment string of 128 KiB or more (MAX_ARG_STRLEN), its name and `=` included.
MAX_ENVIRONMENT_STRING = 131_071


class ClusterSpecError(ValueError):
    """The inventory describes no cluster. The message names the value, what was expected and the mend."""


def cluster_spec(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Derive the whole cluster from the inventory.

    Args:
        groups: hosts of each group, in the order written. A group's name is a TensorFlow job.
        hostvars: each host's variables. Read are `cluster_address` (else `ansible_host`), and for each job
            `<job>_tasks` (default 1) and `<job>_port` (the first task's port).

    Returns:
        `{"cluster": {job: ["address:port", ...]}, "tasks": [{"name", "job", "index", "host", "address", "port"}],
        "tensorboard": {host: {"address", "port"}}}`. `cluster` is what TF_CONFIG carries (chief, ps and worker, a job
        without tasks left out); `tasks` has the evaluator too, with port None.

    Raises:
        ClusterSpecError: a host has no literal address, or a number of tasks or a port is no such number.
    """
    cluster: dict[str, list[str]] = {}
    tasks: list[dict[str, Any]] = []
    for job in JOBS:
        members: list[str] = []
        for host in groups.get(job, ()):
            variables = hostvars[host]
            address = _address(host, variables)
            first_port = _port(host, job, variables)
            for slot in range(_task_count(host, job, variables)):
                index = len(members)
                port = None if first_port is None else first_port + slot
                members.append(f"{_bracketed(address)}:{port}")
                tasks.append(
                    {
                        "name": f"{job}-{index}",
                        "job": job,
                        "index": index,
                        "host": host,
                        "address": address,
                        "port": port,
                    }
                )
        if members and job in CLUSTER_JOBS:
            cluster[job] = members
    tensorboard = {
        host: {"address": _address(host, hostvars[host]), "port": _port(host, "tensorboard", hostvars[host])}
        for host in groups.get("tensorboard", ())
    }
    return {"cluster": cluster, "tasks": tasks, "tensorboard": tensorboard}


def host_tasks(spec: Mapping[str, Any], host: str) -> list[dict[str, Any]]:
    """Pick the tasks of one host, each with its TF_CONFIG as one line of JSON under `tf_config`."""
    return [
        {**task, "tf_config": tf_config(spec["cluster"], task["job"], task["index"])}
        for task in spec["tasks"]
        if task["host"] == host
    ]


def tf_config(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> str:
    """Serialise one task's TF_CONFIG, as TensorFlow's TFConfigClusterResolver reads it."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}, separators=(",", ":"))


def _address(host: str, variables: Mapping[str, Any]) -> str:
    address = variables.get("cluster_address") or variables.get("ansible_host")
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
    return address


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _task_count(host: str, job: str, variables: Mapping[str, Any]) -> int:
    count = variables.get(f"{job}_tasks", 1)
    if not _is_int(count) or count < 0:
        raise ClusterSpecError(f"host '{host}' has {job}_tasks: {count!r}; expected a number of tasks such as 2")
    return count


def _port(host: str, job: str, variables: Mapping[str, Any]) -> int | None:
    if job not in DEFAULT_PORTS:
        return None
    port = variables.get(f"{job}_port", DEFAULT_PORTS[job])
    if not _is_int(port) or not 1 <= port <= 65535:
        raise ClusterSpecError(
            f"host '{host}' has {job}_port: {port!r}; expected a number from 1 to 65535, such as {DEFAULT_PORTS[job]}"
        )
    return port


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"cluster_spec": cluster_spec, "host_tasks": host_tasks}
