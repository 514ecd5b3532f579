"""The hosts, their tasks and how SSH reaches them, read from the inventory that Ansible reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fleet.errors import OperatorMistake
from fleet.places import site
from fleet.site.host_check import Listener, service_listener, task_listeners
from fleet.site.members import SERVICES, SERVING_UNITS, ClusterSpecError, port_of, storage_of
from fleet.site.reader import Source, read_source
from fleet.site.routes import Host, ssh_host
from fleet.site.schema.checks import loose_problems
from fleet.site.schema.inventory_files import file_problems
from fleet.site.schema.problems import Problem, describe_problems, name_known
from fleet.site.schema.yaml_text import text_problems
from fleet.site.topology import Task, cluster_spec, derive_topology
from fleet.site.wireguard import wireguard_hosts
from trainer.core.settings.config import Config


@dataclass(frozen=True)
class Inventory:
    source: str
    groups: Mapping[str, Sequence[str]]
    hosts: Mapping[str, Host]  # those that have a task
    tasks: Sequence[Task]
    variables: Mapping[str, Mapping[str, Any]]
    tensorboard_url: str | None = None
    vault_password: str | None = field(default=None, repr=False)  # as it was typed
    beside: Mapping[str, Host] = field(default_factory=dict)  # those of our groups without a task

    @property
    def everyone(self) -> Mapping[str, Host]:
        """All hosts of psfleet's groups."""
        return {**self.hosts, **self.beside}

    def services_on(self, host: str) -> dict[str, str]:
        """Return by group what a host serves beside its tasks: the units."""
        return {group: unit for group, unit in SERVING_UNITS.items() if host in self.groups.get(group, ())}

    def listeners_on(self, host: str) -> Iterator[Listener]:
        """Give what listens on a host: its tasks, and what it serves beside them."""
        yield from task_listeners({"name": task.name, **vars(task)} for task in self.tasks_on(host))
        for group in self.services_on(host):
            if group in SERVICES and (port := port_of(host, group, self.variables[host])):
                yield service_listener(group, port)

    @property
    def chief(self) -> Task:
        return next(task for task in self.tasks if task.job == "chief")

    @property
    def evaluator(self) -> Task | None:
        return next((task for task in self.tasks if task.job == "evaluator"), None)

    @property
    def shared_dir(self) -> str:
        """Where the chief's host has the runs: the path that all hosts share, or its own directory."""
        shared = storage_of(self.variables[self.chief.host]).path
        if not isinstance(shared, str) or not shared.startswith("/"):
            raise OperatorMistake(
                f"cluster_shared_dir is {shared!r} in {self.source}; expected the absolute path that every host "
                "shares. Set it in group_vars/all.yml beside the inventory, such as cluster_shared_dir: /srv/trainer"
            )
        return shared

    @property
    def is_shared(self) -> bool:
        """Whether the hosts share a path at all."""
        return storage_of(self.variables[self.chief.host]).shared

    @property
    def steps(self) -> int:
        """How many steps the run settings want."""
        steps: int = self.run_settings.get("steps", Config.steps)
        return steps

    @property
    def run_name(self) -> str:
        """The run that the run settings name, which counts until an operator chooses one."""
        name: str = self.run_settings.get("run", Config.run)
        return name

    @property
    def run_settings(self) -> Mapping[str, Any]:
        """The inventory's trainer_run."""
        settings = self.variables[self.chief.host].get("trainer_run")
        return settings if isinstance(settings, Mapping) else {}

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """The cluster as Ansible's roles get it, in plain data."""
        return cluster_spec(self.groups, self.variables)

    def tasks_on(self, host: str) -> list[Task]:
        return [task for task in self.tasks if task.host == host]

    def task(self, name: str) -> Task:
        for task in self.tasks:
            if task.name == name:
                return task
        known = name_known(name, [task.name for task in self.tasks])
        raise OperatorMistake(f"{self.source} has no task {name!r}. {known}")


def load_inventory(
    given: str | None,
    environment: Mapping[str, str] = os.environ,
    check: bool = False,
    ask_vault_pass: bool | str = False,
) -> Inventory:
    """Read an inventory: the one given, else PSFLEET_INVENTORY's, else ansible.cfg's.

    Raises OperatorMistake when the path is missing or the groups describe no cluster; with `check`, with everything
    that `fab validate` finds wrong. `ask_vault_pass` has the operator type the vault's password, or is what was typed.
    """
    source = read_source(given, environment, check, ask_vault_pass)
    if check and (problems := find_problems(source)):
        raise OperatorMistake(describe_problems([_with_source(source.name, problem) for problem in problems]))
    return describe(source)


def find_problems(source: Source) -> list[Problem]:
    """List everything that `ansible/preflight.yml` would find wrong, and what keeps Ansible from reading."""
    from ansible.release import __version__

    from fleet.site.preflight import inventory_problems
    from fleet.site.preflight.control_machine import control_problems

    tagged = {host: getattr(variables, "tagged", variables) for host, variables in source.variables.items()}
    found = [*source.problems, *map(Problem, control_problems(__version__))]
    if not source.groups.get("all"):
        if not source.problems:
            return [*found, *inventory_problems({}, {})]
        return [*found, *text_problems([source.name]), *loose_problems(tagged)]
    found += [
        *text_problems([source.name]),
        *file_problems([source.name], [str(group) for group in source.groups], source.variables),
        *inventory_problems(source.groups, tagged, site()),
    ]
    if any("all" in (path.stem, path.parent.name) for path in (Path(str(each.file)) for each in source.problems)):
        found = [each for each in found if not each.message.startswith(f"{each.variable} is missing")]  # it is there
    return found


def list_notes(inventory: Inventory) -> list[str]:
    """List what `ansible/preflight.yml` says about a right inventory: which groups are unused, and the like."""
    from fleet.site.preflight.notes import preflight_notes

    return preflight_notes(inventory.groups, inventory.variables)


def describe(source: Source) -> Inventory:
    """Make tasks and hosts of what was read; raises OperatorMistake where the groups describe no cluster."""
    groups = {str(group): list(hosts) for group, hosts in source.groups.items()}
    variables = source.variables
    try:
        topology = derive_topology(groups, variables)
    except ClusterSpecError as error:
        raise OperatorMistake(f"{source.name}: {error}") from error
    tasks = topology.tasks
    # Every verb asks the chief's host for the run. What else a cluster needs is for preflight to say, before a start.
    if not any(task.job == "chief" for task in tasks):
        raise OperatorMistake(
            f"group 'chief' has no task in {source.name}; expected one host, which fab asks for the run. "
            "Put it under `chief:` there and run `ansible-playbook site.yml`"
        )
    boards = [f"http://{board.address}:{board.port}" for board in topology.listeners["tensorboard"].values()]
    hosts = {
        name: ssh_host(name, variables[name], source.defaults) for name in dict.fromkeys(task.host for task in tasks)
    }
    beside = {}
    for name in wireguard_hosts(groups):
        if name not in hosts:
            with contextlib.suppress(OperatorMistake):  # only Ansible reaches it: what trains needs no word of it
                beside[name] = ssh_host(name, variables[name], source.defaults)
    board = boards[0] if boards else None
    return Inventory(source.name, groups, hosts, tasks, variables, board, source.vault_password, beside)


def _with_source(source: str, problem: Problem) -> str:
    return str(problem) if problem.file else f"{source}: {problem}"
