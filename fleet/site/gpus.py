"""Which GPUs of a host each of its tasks may use: pure functions, used by cluster_spec and preflight."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from fleet.site.nvidia import branch_problem, capability_problem
from trainer.core.runtime import NO_GPU
from trainer.core.settings.strategies import STRATEGIES

# A UUID as `nvidia-smi -L` prints it. CUDA takes the beginning of one too, but then it can't be compared.
_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Computing(Protocol):
    """A task, as the topology has it."""

    @property
    def name(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def devices(self) -> str | None: ...


class GpuError(ValueError):
    """A host's GPUs can't be shared out. The message names the value, what was expected and the fix."""


def computes(job: str, strategy: str) -> bool:
    """Whether a job's tasks compute on GPUs: those that train. The coordinator of parameter servers gives orders."""
    return job == "worker" or (job == "chief" and not STRATEGIES[strategy].remote)


def host_devices(host: str, variables: Mapping[str, Any]) -> list[str]:
    """Name a host's GPUs as CUDA_VISIBLE_DEVICES does: by `gpu_devices` (UUIDs), else numbers up to `gpu_count`."""
    devices, count = variables.get("gpu_devices"), variables.get("gpu_count")
    if devices is None or count is not None:
        _check_count(host, count)
    if devices is not None:
        uuids = isinstance(devices, list) and all(isinstance(each, str) and _UUID.fullmatch(each) for each in devices)
        if not uuids or not devices or len(set(devices)) != len(devices):
            raise GpuError(
                f"host '{host}' has gpu_devices: {devices!r}; expected UUIDs as `nvidia-smi -L` prints them, each "
                "once, such as [MIG-fb42055e-9e53-5764-9278-438605a3014c]"
            )
        return list(devices)
    return [str(number) for number in range(variables["gpu_count"])]


def _check_count(host: str, count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise GpuError(
            f"host '{host}' is in the group gpu and has gpu_count: {count!r}; expected how many GPUs it has, such as "
            "gpu_count: 8 (or gpu_devices: the UUIDs of its MIG instances)"
        )


def share_devices(host: str, devices: Sequence[str], tasks: int) -> list[str]:
    """Deal a host's GPUs out to its tasks that compute, as many to each: one CUDA_VISIBLE_DEVICES a task."""
    if not tasks:
        return []
    if len(devices) % tasks:
        raise GpuError(
            f"host '{host}' has {len(devices)} GPUs for {tasks} tasks; expected as many for each. Set worker_tasks "
            f"there to a divisor of {len(devices)}"
        )
    each = len(devices) // tasks
    shares = [devices[number * each : (number + 1) * each] for number in range(tasks)]
    if each > 1 and any(device.startswith("MIG-") for device in devices):
        raise GpuError(
            f"host '{host}' has {len(devices)} MIG instances for {tasks} tasks; CUDA shows a process only one of "
            f"them. Set worker_tasks: {len(devices)} there"
        )
    return [",".join(share) for share in shares]


def gpu_problems(
    groups: Mapping[str, Sequence[str]],
    hostvars: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[Computing],
    strategy: str,
) -> Iterator[str]:
    """List what is wrong with the inventory's GPUs, beyond what made cluster_spec fail."""
    members = groups.get("gpu", ())
    if not members:
        return
    for host in members:
        variables = hostvars[host]
        branch, capability = variables.get("nvidia_driver_branch", ""), variables.get("nvidia_driver_capability", "")
        for problem in (branch_problem(str(branch)) if branch else None, capability_problem(str(capability))):
            if problem:
                yield f"host '{host}': {problem}"
        version = str(variables.get("nvidia_driver_version", ""))
        if branch and version and version.partition(".")[0] != str(branch):
            yield (
                f"host '{host}' has nvidia_driver_version: {version}, and nvidia_driver_branch: {branch}; expected a "
                "version of that branch. Leave the branch out, which the version has too"
            )
    yield from _shared_devices(members, hostvars)
    numbers: dict[int, list[str]] = {}
    for task in tasks:
        if computes(task.job, strategy):
            numbers.setdefault(count_devices(task.devices), []).append(f"{task.name} on {task.host}")
    if len(numbers) > 1:
        yield (
            "TensorFlow wants the same number of GPUs in each task that trains. "
            + "; ".join(f"{number}: {', '.join(names)}" for number, names in sorted(numbers.items()))
            + ". Even it out with worker_tasks, gpu_count or gpu_devices, or take hosts out of worker or gpu"
        )


def _shared_devices(members: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Refuse a GPU that two hosts name: a UUID is one device's in the whole world."""
    owners: dict[str, str] = {}
    for host in members:
        for uuid in hostvars[host].get("gpu_devices") or ():
            other = owners.setdefault(uuid, host)
            if other != host:
                yield (
                    f"the hosts {other}, {host} both have {uuid} in gpu_devices; expected each GPU on one host. Type "
                    f"`nvidia-smi -L` on {host}, and set gpu_devices there, in host_vars/{host}.yml"
                )
                break


def count_devices(devices: str | None) -> int:
    """Count the GPUs that a task may use, by its CUDA_VISIBLE_DEVICES."""
    return 0 if devices is None or devices == NO_GPU else len(devices.split(","))
