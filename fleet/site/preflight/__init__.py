"""What is wrong with an inventory, or with the control machine, before any host is touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.site.gpus import gpu_problems
from fleet.site.members import ClusterSpecError, Groups, HostVars, busy_jobs, storage_of, strategy_of
from fleet.site.preflight.addresses import address_problems, connection_problems, keys_problems, tunnel_problems
from fleet.site.preflight.control_machine import control_problems
from fleet.site.preflight.jobs import (
    group_problems,
    idle_minimum_problems,
    minimum_problems,
    missing_jobs,
    size_problems,
    task_problem,
    taskless_problems,
    unevaluated_problems,
    unshared_problems,
    unwaited_problems,
    vacancy_problems,
    zero_problems,
)
from fleet.site.preflight.ports import opened_problems, port_problems
from fleet.site.preflight.services import alert_problems, nfs_port_problems, nfs_problems, notify_problems
from fleet.site.schema import checks
from fleet.site.schema.control_files import control_file_problems
from fleet.site.schema.inventory_files import beside_problems, file_problems, range_problems, special_file_problems
from fleet.site.schema.inventory_reading import InventoryReading, read
from fleet.site.schema.problems import Problem
from fleet.site.schema.relations import relation_problems
from fleet.site.schema.yaml_structure import shape_problems
from fleet.site.schema.yaml_text import text_problems, unread_problems
from fleet.site.topology import derive_topology
from fleet.site.wireguard import is_encrypted


def preflight_problems(
    groups: Groups, hostvars: HostVars, ansible_version: str, sources: Sequence[str] = (), project: str = ""
) -> list[str]:
    """List everything that is wrong, each with the value and the fix. Empty when all is right.

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
        *keys_problems(groups, hostvars, paths),
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
    if too_many := checks.size_problem(groups):
        return [too_many]
    reading = read(groups, hostvars)
    problems = [
        *reading.problems,
        *checks.group_problems(reading),
        *checks.host_problems(reading),
        *checks.value_problems(reading),
    ]
    problems += _cluster_problems(reading)
    return [*problems, *(control_file_problems(reading, root) if root else ())]


def _cluster_problems(reading: InventoryReading) -> Iterator[Problem]:
    """What must fit together. Values that were refused by themselves are left out."""
    groups = reading.groups
    chief = checks.reference_host(groups)
    if chief is None:
        yield Problem("the inventory has no host in any of psfleet's groups; expected chief, ps and worker")
        return
    storage = storage_of(reading.values[chief])
    settings = storage.settings | ({} if isinstance(storage.path, str) else {"shared_dir": "/srv/trainer"})
    yield from checks.run_problems(reading, settings)
    yield from group_problems(reading)
    yield from nfs_problems(reading)
    if not storage.shared:
        yield from unshared_problems(groups)
    yield from address_problems(reading)
    if is_encrypted(reading.values[chief]):
        yield from tunnel_problems(reading)
    yield from connection_problems(reading)
    yield from notify_problems(reading)
    yield from alert_problems(reading)
    yield from nfs_port_problems(reading)
    yield from minimum_problems(reading)
    yield from relation_problems(reading)
    if too_many := task_problem(reading):
        yield too_many
    else:
        yield from _topology_problems(reading, _complete(reading))


def _topology_problems(reading: InventoryReading, hostvars: HostVars) -> Iterator[Problem]:
    """What is wrong with the tasks together: which there are, where they listen, what they share."""
    groups = reading.groups
    try:
        yield from missing_jobs(groups, hostvars)
        busy = busy_jobs(groups, hostvars)
        yield from zero_problems(reading, busy)
        yield from idle_minimum_problems(reading, busy)
        yield from unwaited_problems(reading, busy)
        yield from taskless_problems(reading, busy)
        yield from unevaluated_problems(reading, busy)
        topology = derive_topology(groups, hostvars)
    except ClusterSpecError as error:
        # An unknown strategy is among the run settings' problems already.
        if not str(error).startswith("trainer_run"):
            yield Problem(str(error))
        return
    yield from vacancy_problems(topology, groups, hostvars)
    yield from port_problems(topology, reading)
    yield from opened_problems(topology, reading)
    yield from size_problems(topology)
    for text in gpu_problems(groups, hostvars, topology.tasks, strategy_of(groups, hostvars)):
        yield Problem(text)


def _complete(reading: InventoryReading) -> dict[str, dict[str, Any]]:
    """The variables with a stand-in for each address that was refused or is missing, so that the rest is looked at."""
    complete = {}
    for number, (host, values) in enumerate(reading.values.items()):
        has = values.get("cluster_address") or values.get("ansible_host")
        complete[host] = values if has else values | {"ansible_host": f"unknown-{number}"}
    return complete
