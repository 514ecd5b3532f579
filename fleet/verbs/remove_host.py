"""`fab remove-host HOST` and `fab replace-host OLD NEW`: a machine goes for good, and another may take its place."""

from __future__ import annotations

import shlex
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake, first_line
from fleet.hosts import drains
from fleet.hosts.cluster import STOP_SECONDS, Cluster, Observation
from fleet.hosts.drains import is_drained
from fleet.hosts.foreign_hosts import foreign_hosts, reject_foreign
from fleet.hosts.history import Trail
from fleet.hosts.host_scripts import CLEAN
from fleet.hosts.removed_hosts import forget_removals, note_removal
from fleet.hosts.units import Health
from fleet.planning.cost import Cost, cost_of_restart, find_chief, find_shortages, training
from fleet.site import inventory_file
from fleet.site.cluster_note import cluster_name, takes_over_option
from fleet.site.host_names import find_host, is_meant
from fleet.site.inventory import Inventory
from fleet.site.inventory_file import NotPlain
from fleet.site.members import address_of
from fleet.site.preflight import inventory_problems
from fleet.site.schema.problems import name_known, show
from fleet.site.topology import Task

# The jobs whose tasks have numbers of their own; of the others a place in the group is as good as another.
NUMBERED = ("ps", "worker")
PLAYBOOK = "ansible-playbook site.yml"
RESTART = "each task restarts once, from a checkpoint that is saved first: TF_CONFIG names every member"
UNSAVED = "each task restarts once, and the steps since the newest checkpoint are lost: no coordinator can save"
LOST = "the steps since the newest checkpoint: no coordinator can save"


def remove_host(
    cluster: Cluster, console: Console, host: str, reason: str | None = None, plan_only: bool = False
) -> None:
    """Clean a drained or dead host, and take it out of the inventory; no other task's number moves.

    A host that another cluster has is taken out without being touched. Raises OperatorMistake for a host that still
    takes part, and for the coordinator's.
    """
    if host in cluster.inventory.beside:
        raise OperatorMistake(
            f"{host} has no task: `ansible-playbook reset.yml --limit {host}` cleans it. Then take it out of "
            f"{cluster.inventory.source}, and run `ansible-playbook site.yml`"
        )
    if host not in cluster.inventory.hosts and not is_meant(cluster.inventory, host):
        console.print(
            f"{cluster.inventory.source} has no host {host} with a task: it is removed already, or never had one. "
            + name_known(host, list(cluster.inventory.hosts))
        )
        _answer(console, "remove-host", "nothing to do", [host], [])
        return
    host = find_host(cluster.inventory, host)
    begin_exclusively(cluster, console, "remove-host", plan_only)  # which would bring the tasks back
    seen = _observe_without(cluster, host)
    untouched = _why_untouched(cluster.inventory, seen, host)
    numbers = numbers_to_write(cluster.inventory, host)
    expected = [task for task in cluster.inventory.tasks if task.host != host]
    edit = _composed(
        [partial(inventory_file.without_host, host=host)]
        + [partial(inventory_file.with_number, host=name, job=job, number=number) for name, job, number in numbers]
    )
    steps = [
        f"nothing on the host: it {untouched}" if untouched else "its tasks, files and releases go",
        _step(cluster.inventory, edit, f"{host} leaves {cluster.inventory.source}, with a backup"),
        *(f"{name} gets {job}_index: {number}, so that its task keeps its name" for name, job, number in numbers),
        f"the next `ansible-playbook site.yml` tells the others: {_restart(cluster, seen)}",
    ]
    if _planned(cluster, console, with_reason(f"remove-host {host}", reason), seen, host, steps, plan_only, [host]):
        return
    with Trail(cluster, console, "remove-host", reason) as trail:
        trail.begin(hosts=[host], tasks=[task.name for task in cluster.inventory.tasks_on(host)])
        _clean(cluster, console, seen, host)
        if why := note_removal(cluster.hosts, cluster.inventory.chief.host, host):
            console.print(why)
        lines = [f"remove the host {host} from each group", *(f"give {n} {j}_index: {i}" for n, j, i in numbers)]
        _change(cluster.inventory, console, edit, expected, lines, host)
    restart = _restart(cluster, seen)
    console.print(f"{host} is removed. The others go on; tell them when it suits you: {PLAYBOOK} ({restart})")
    _answer(console, "remove-host", "done", [host], steps)


def replace_host(
    cluster: Cluster,
    console: Console,
    old: str,
    new: str,
    address: str | None = None,
    reason: str | None = None,
    plan_only: bool = False,
) -> None:
    """Have a new machine take an old one's place and numbers; the old one has left, or is dead.

    `address` is the new one's, for Ansible and for the members. An old one that another cluster has is not touched.
    Raises OperatorMistake where the old one takes part.
    """
    inventory = cluster.inventory
    if new in inventory.hosts and old not in inventory.variables:
        console.print(f"{inventory.source} has {new}, and no {old}: it is replaced already, or was never listed")
        _answer(console, "replace-host", "nothing to do", [old, new], [])
        return
    if new in inventory.variables:
        raise OperatorMistake(f"{inventory.source} has a host {show(new)} already: name a new one")
    old = find_host(inventory, old)
    begin_exclusively(cluster, console, "replace-host", plan_only)
    seen = _observe_without(cluster, old)
    untouched = _why_untouched(inventory, seen, old)
    where = address or new
    variables = dict.fromkeys(address_variables(inventory, old, address), where)
    has = ChainMap[str, Any](variables, inventory.variables[old])  # type: ignore[arg-type]
    reject_wrong(inventory, old, new, has)
    at = address_of(new, has)
    edit = partial(inventory_file.renamed, old=old, new=new, variables=variables)
    expected = [replace(task, host=new, address=at) if task.host == old else task for task in inventory.tasks]
    playbook = f"ansible-playbook site.yml{_takes_over(inventory, old, new, has)}"
    steps = [
        f"nothing on the old host: it {untouched}" if untouched else f"tasks and files of {old} go",
        _step(inventory, edit, f"{new} ({where}) takes its place in {inventory.source}, with a backup"),
        *_left_to_the_operator(inventory, seen, old, new, at),
        f"`{playbook}` makes {new} right, and tells the others: {_restart(cluster, seen)}",
    ]
    command = with_reason(f"replace-host {old} {new}" + (f" --address {address}" if address else ""), reason)
    if _planned(cluster, console, command, seen, old, steps, plan_only, [old, new], chief_may_go=True):
        return
    with Trail(cluster, console, "replace-host", reason) as trail:
        trail.begin(hosts=[old, new], tasks=[task.name for task in inventory.tasks_on(old)], new=where)
        _clean(cluster, console, seen, old)
        _keep_out(cluster, console, old, new, expected)
        lines = [f"write {new} instead of {old}", f"ansible_host: {where}"]
        _change(inventory, console, edit, expected, lines, old, new, variables)
    console.print(
        f"{new} has the place of {old}: connect to it once with ssh and compare its host key, then "
        f"`{playbook}` and `fab start-cluster`"
    )
    _answer(console, "replace-host", "done", [old, new], steps, playbook)


def _left_to_the_operator(inventory: Inventory, seen: Observation, old: str, new: str, at: str) -> list[str]:
    """Say what is to be moved, and when only the operator can keep a dead machine out."""
    serves, leads = old in inventory.groups.get("nfs_server", ()), old == inventory.chief.host
    found = []
    if serves or (leads and not inventory.is_shared):
        place = (serves and inventory.variables[old].get("cluster_nfs_dir")) or inventory.shared_dir
        found.append(
            f"runs, queue and history stay on the disk of {old}: bring all of {place} to {new} before site.yml"
        )
    if old not in seen.unreachable:
        return found
    if serves or not inventory.is_shared:
        # The packet filters of the others shut out an old coordinator once site.yml has run there.
        is_open = any(each.get("firewall_closes") == "none" for each in inventory.variables.values())
        until = "for good" if leads and is_open else "until site.yml has run"
        found.append(f"nothing on {old} will say that it is replaced: keep it off {until}")
    if at == address_of(old, inventory.variables[old]):
        found.append(f"{new} gets the address of {old}: keep {old} off this network, where both would answer")
    return found


def _takes_over(inventory: Inventory, old: str, new: str, variables: Mapping[str, Any]) -> str:
    """Return what site.yml needs where the cluster is known by the address of a coordinator's host that goes."""
    if old != inventory.chief.host:
        return ""
    before = cluster_name(inventory.groups, inventory.variables)
    return takes_over_option(before, cluster_name({"chief": [new]}, {new: variables}))


def address_variables(inventory: Inventory, host: str, address: str | None) -> list[str]:
    """Return the variables that say where a host is; raises OperatorMistake where one `address` can't be for both."""
    has = [key for key in ("ansible_host", "cluster_address") if key in inventory.variables[host]]
    if "cluster_address" in has and address:
        raise OperatorMistake(
            f"--address {show(address)}: {host} has both ansible_host and cluster_address, and this is one address. "
            "Edit the inventory by hand"
        )
    return has


def reject_wrong(inventory: Inventory, old: str, new: str, variables: Mapping[str, Any]) -> None:
    """Raise OperatorMistake where the inventory would be wrong with `new` instead of `old`, as with its address."""
    groups = {group: [new if host == old else host for host in hosts] for group, hosts in inventory.groups.items()}
    hostvars = {(new if host == old else host): each for host, each in inventory.variables.items()}
    known = {each.message.replace(new, old) for each in inventory_problems(inventory.groups, inventory.variables)}
    found = inventory_problems(groups, {**hostvars, new: variables})
    if wrong := [each.message for each in found if each.message.replace(new, old) not in known]:
        raise OperatorMistake("\n".join(wrong))


def numbers_to_write(inventory: Inventory, host: str) -> list[tuple[str, str, int]]:
    """Return the hosts, jobs and numbers that must be written down, so that no task's number moves without `host`."""
    found = []
    for job in NUMBERED:
        tasks = [task for task in inventory.tasks if task.job == job]
        leaving = [task.index for task in tasks if task.host == host]
        others = [task for task in tasks if task.host != host]
        known = all(f"{job}_index" in inventory.variables[task.host] for task in others)
        if not leaving or known or max((task.index for task in others), default=-1) < min(leaving):
            continue
        first: dict[str, int] = {}
        for task in others:
            first.setdefault(task.host, task.index)
        found += [(name, job, index) for name, index in first.items()]
    return found


def refusals_of(cluster: Cluster, seen: Observation, host: str, chief_may_go: bool) -> list[str]:
    """Say why a host can't be taken away for good."""
    inventory = cluster.inventory
    if host in inventory.groups.get("nfs_server", ()) and not chief_may_go:
        return ["it serves the shared path, with all runs: copy them, and have another host in the group nfs_server"]
    if host == inventory.chief.host:
        if not chief_may_go:
            return [*find_chief(inventory, [host], True), "To have another machine: fab replace-host OLD NEW"]
        chief = seen.units.get(inventory.chief.name)
        return ["the coordinator runs there: `fab stop-cluster` first"] if chief and chief.up else []
    up = [task.name for task in inventory.tasks_on(host) if task.name in seen.units and seen.units[task.name].up]
    if up:
        return [f"{', '.join(up)} on {host} runs: fab drain {host} first"]
    units = [seen.units[task.name] for task in inventory.tasks_on(host) if task.name in seen.units]
    bare = all(unit.health is Health.ABSENT for unit in units)  # an earlier call was broken off after its cleaning
    started = seen.units.get(inventory.chief.name)
    if started and started.up and not bare and not is_drained(cluster, seen, host):
        return [f"{host} is not drained, and a start would bring its tasks back: fab drain {host} first"]
    return [] if chief_may_go else find_shortages(inventory, [host], [])


def _planned(
    cluster: Cluster,
    console: Console,
    command: str,
    seen: Observation,
    host: str,
    steps: Sequence[str],
    plan_only: bool,
    hosts: Sequence[str],
    chief_may_go: bool = False,
) -> bool:
    """Say what a command does, and whether that is all; raises OperatorMistake where it is refused."""
    verb = command.partition(" ")[0]
    refusals = refusals_of(cluster, seen, host, chief_may_go)
    if plan_only or not refusals:
        console.print("\n".join([f"{verb} {' '.join(hosts)}", *(f"  {step}" for step in steps)]))
    if plan_only:
        cost = _cost_of_site(cluster.inventory, seen, host)
        console.print(cost.render_loss())
        last = "nothing was done" if refusals else f"nothing was done. Do it: fab {command}"
        console.print("\n".join([*(f"  refused {each}" for each in refusals), last]))
        outcome, following = ("refused", "fab hosts") if refusals else ("planned", f"fab {command}")
        _answer(console, verb, outcome, hosts, steps, following, cost)
    if refusals:
        raise OperatorMistake(f"{host} stays: " + "\n".join(refusals))
    return plan_only


def _cost_of_site(inventory: Inventory, seen: Observation, host: str) -> Cost:
    """Work out what the next site.yml costs what trains, whose members are others then."""
    tasks = [task for task in inventory.tasks if task.host != host or task == inventory.chief]  # which saves
    cost = cost_of_restart(inventory, seen, tasks, [])
    if inventory.chief.host in seen.unreachable:
        return replace(cost, lost=LOST)
    return replace(cost, pause=f"at site.yml, {cost.pause}") if training(inventory, seen) else cost


def _clean(cluster: Cluster, console: Console, seen: Observation, host: str) -> None:
    """Take tasks and files off a host that answers, and forget its drain."""
    if untouched := _why_untouched(cluster.inventory, seen, host):
        back = ". Should it come back, its tasks find no place" if host in seen.unreachable else ""
        console.print(f"{host} {untouched}, and was not cleaned{back}")
    else:
        answer = cluster.hosts.run({host: f"root sh -c {shlex.quote(CLEAN)}"}, STOP_SECONDS)[host]
        if answer.unreachable or answer.code:
            why = answer.unreachable or answer.stderr.strip()
            raise ClusterTrouble(f"{host} could not be cleaned: {why}. Type it again")
    if host != cluster.inventory.chief.host:  # with which the places are gone where the coordinator looks
        drains.announce_return(cluster, cluster.inventory.tasks_on(host))
        drains.forget(cluster, host)


def _observe_without(cluster: Cluster, host: str) -> Observation:
    """Ask the hosts; what runs on a host that another cluster has is no task of this one.

    Raises HostsUnreachable where the coordinator's host can't let the other's tasks go for good, and OperatorMistake
    where that one is another cluster's.
    """
    inventory, seen = cluster.inventory, cluster.observe(new_is_enough=True)
    chief = inventory.chief.host
    if chief in seen.unreachable and host != chief:
        rest = f"It has to let the tasks of {host} go: type it again when it is back. Where it is gone for good:"
        raise HostsUnreachable({chief: seen.unreachable[chief]}, f"{rest} fab replace-host {chief} NEW")
    reject_foreign(inventory, seen, [chief])  # where the run, the lock of this verb and the list of removed hosts are
    if host not in foreign_hosts(inventory, seen):
        return seen
    names = {task.name for task in inventory.tasks_on(host)}
    return replace(seen, units={name: unit for name, unit in seen.units.items() if name not in names})


def _why_untouched(inventory: Inventory, seen: Observation, host: str) -> str | None:
    """Say why nothing is done on a host; None where its tasks and files go."""
    if host in foreign_hosts(inventory, seen):
        return "belongs to another cluster"
    return "does not answer" if host in seen.unreachable else None


def _restart(cluster: Cluster, seen: Observation) -> str:
    """Return what the restart of the other tasks costs."""
    return UNSAVED if cluster.inventory.chief.host in seen.unreachable else RESTART


def _step(inventory: Inventory, edit: Callable[[str], str], text: str) -> str:
    """Say what becomes of the inventory: `text`, or that it can't be changed by lines."""
    try:
        inventory_file.edited(inventory, edit)
    except NotPlain as why:
        return f"{inventory.source} is to be changed by hand: {why}"
    return text


def _change(
    inventory: Inventory,
    console: Console,
    edit: Callable[[str], str],
    expected: Sequence[Task],
    by_hand: Sequence[str],
    old: str,
    new: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> None:
    """Change the inventory, or say what to change where that can't be done by lines."""
    try:
        backups = inventory_file.change(inventory, edit, expected, old, new, variables)
    except NotPlain as why:
        files = [
            f"{f'name it {new}' if new else 'take away'}: {_short(each)}"
            for each in inventory_file.own_files(inventory, old)
        ]
        console.print(
            "\n".join([f"change {inventory.source} by hand ({why}):", *(f"  {line}" for line in [*by_hand, *files])])
        )
        return
    console.print(f"changed {inventory.source}; as it was: {', '.join(map(_short, backups))}")


def _keep_out(cluster: Cluster, console: Console, old: str, new: str, expected: Sequence[Task]) -> None:
    """Have the tasks of a replaced host not join, by its name and their old addresses, and forget its drain.

    Another checkout is not to bring it back either.
    """
    chief = cluster.inventory.chief.host  # maybe the old one, which another checkout asks
    forget_removals(cluster.hosts, chief, [new])
    if why := note_removal(cluster.hosts, chief, old):
        console.print(why)
    now = {task.name: _known_as(task) for task in expected}
    moved = {task.name: (_known_as(task), now[task.name]) for task in cluster.inventory.tasks_on(old)}
    try:
        cluster.replace_tasks(moved)
        if cluster.inventory.is_shared:
            drains.forget(cluster, old)
    except FleetError as error:
        console.print(f"the other hosts can't be informed ({first_line(error)}): keep {old} off until site.yml has run")


def _known_as(task: Task) -> set[str]:
    return {task.host} if task.port is None else {task.host, task.endpoint}


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _composed(edits: Sequence[Callable[[str], str]]) -> Callable[[str], str]:
    return lambda text: reduce(lambda known, edit: edit(known), edits, text)


def _answer(
    console: Console,
    verb: str,
    outcome: str,
    hosts: Sequence[str],
    steps: Sequence[str],
    following: str = PLAYBOOK,
    cost: Cost | None = None,
) -> None:
    costs = {"cost": cost.as_json()} if cost else {}
    record = {"outcome": outcome, "hosts": list(hosts), "steps": list(steps), **costs, "next": following}
    console.print_json(verb, record)
