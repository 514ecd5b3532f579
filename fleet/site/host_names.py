"""Hosts as an operator names them."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.errors import OperatorMistake
from fleet.site.inventory import Inventory
from fleet.site.schema.problems import name_known, name_some, show


def is_meant(inventory: Inventory, given: str) -> bool:
    """Whether a name that is no host's is another one of a host: in other letters, its address, or a task's."""
    names = {name for task in inventory.tasks for name in (task.name, task.address)}
    return given in names or given.casefold() in map(str.casefold, inventory.hosts)


def find_host(inventory: Inventory, given: str, beside: bool = False) -> str:
    """Return the one host that is named; raises OperatorMistake for several, or one that the inventory has not."""
    found = find_hosts(inventory, [given], beside)
    if len(found) > 1:
        raise OperatorMistake(f"{given} names {len(found)} hosts; expected one, and then the next: {found[0]}")
    return found[0]


def find_hosts(inventory: Inventory, given: Sequence[str], beside: bool = False) -> list[str]:
    """Return the hosts that are named, each once; raises OperatorMistake for one that the inventory has not.

    With `beside` also hosts without a task, as one that serves the shared path.
    """
    named = [each for text in given for each in text.split(",") if each]
    hosts = inventory.everyone if beside else inventory.hosts
    with_task = "" if beside else " with a task"
    if not named:
        raise OperatorMistake(f"name a host of {inventory.source}: {name_some(hosts)}")
    for name in named:
        if name not in hosts:
            task = next((task for task in inventory.tasks if name in (task.name, task.address)), None)
            hint = f": {name} is {'a task, on' if name == task.name else 'the address of'} {task.host}" if task else ""
            missing = f"{inventory.source} has no host {show(name)}{with_task}{hint}"
            raise OperatorMistake(f"{missing}. {name_known(task.host if task else name, list(hosts))}")
    return list(dict.fromkeys(named))
