"""What is wrong with an inventory's groups, names and values, each by itself. `fleet/site/preflight/` has
what must fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fleet.site.schema import formats
from fleet.site.schema.definition import RUN_SETTINGS, Variable, definition, meant_group, meant_variable
from fleet.site.schema.inventory_reading import InventoryReading, read
from fleet.site.schema.problems import Problem, name_hosts, name_some, show
from trainer.core.settings.config import Config, ConfigError, key_problem
from trainer.core.settings.setting import unknown_key

# TF_CONFIG, which every task gets, has room for some 5,000 members.
MAX_HOSTS = 10_000
MAX_TASKS = 10_000
ANSIBLES_GROUPS = ("all", "ungrouped")
ONCE = "Set it once, in group_vars/all.yml"
HIDDEN = "not shown here"
DERIVED_SETTINGS = {
    "shared_dir": "the shared path is cluster_shared_dir",
    "local_run_dir": "an empty cluster_shared_dir says that",
}


def our_hosts(groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The hosts of psfleet's groups; other hosts of the inventory are none of its business."""
    return list(dict.fromkeys(host for group in definition().groups for host in groups.get(group, ())))


def reference_host(groups: Mapping[str, Sequence[str]]) -> str | None:
    """The host whose values count for the whole site: the coordinator's, as for the deployment."""
    return next(iter(groups.get("chief") or our_hosts(groups) or groups.get("all") or ()), None)


def size_problem(groups: Mapping[str, Sequence[str]]) -> Problem | None:
    """Refuse a number of hosts that no cluster has, before anything is made of it."""
    number = len(groups.get("all", ()))
    if number <= MAX_HOSTS:
        return None
    return Problem(
        f"the inventory has {number:,} hosts; expected {MAX_HOSTS:,} at most. Look for a range such as [1:9]"
    )


def group_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse groups that are neither psfleet's nor declared as the user's own."""
    known = definition().groups
    chief = reference_host(reading.groups)
    own = reading.values.get(chief, {}).get("cluster_own_groups") if chief else None
    patterns = [each for each in own if isinstance(each, str)] if isinstance(own, list) else []
    for pattern in patterns:
        if taken := next((each for each in known if fnmatchcase(each, pattern)), None):
            text = (
                f"cluster_own_groups has {show(pattern)}, which takes in psfleet's {taken}, and what is misspelt for it"
            )
            fix = f"expected names of your own, such as site_* or {taken}_*"
            place = reading.place(str(chief), "cluster_own_groups")
            yield Problem(f"{text}; {fix}", (), "cluster_own_groups", show(pattern), *place)
    for group, hosts in reading.groups.items():
        if group in known or group in ANSIBLES_GROUPS or any(fnmatchcase(group, each) for each in patterns):
            continue
        meant = meant_group(group)
        lost = f", and {name_some(hosts)} would get nothing for it" if hosts else ""
        fix = f"Did you mean {meant}? " if meant else f"psfleet's are {', '.join(known)}. "
        file, line = reading.group_places.get(group, (None, None))
        yield Problem(
            f"group {show(group)} is none of psfleet's{lost}. {fix}A group of your own is left alone where "
            f"cluster_own_groups has its name",
            tuple(hosts),
            file=file,
            line=line,
        )


def host_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse hosts' names that are not safe everywhere."""
    for host in our_hosts(reading.groups):
        try:
            formats.host_name(host)
            if host in definition().groups and host not in reading.groups.get(host, ()):
                raise ValueError("Ansible would take it into the plays of the group of this name")
        except ValueError as error:
            yield Problem(
                f"host {show(host)} can't have this name: {error}. Rename it in the inventory (of a cloud: the "
                "machine's tag), and give its address as ansible_host",
                (host,),
            )


def value_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse unknown variables and wrong values, each once with all the hosts that have it; remove the wrong ones."""
    yield from _unknown(reading)
    yield from _wrong(reading, set(our_hosts(reading.groups)))
    yield from site_problems(reading)


def loose_problems(variables: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """What is wrong with variables by themselves: {file: its variables}, where the hosts can't be read."""
    reading = read({"all": list(variables)}, variables)
    return [*reading.problems, *_unknown(reading), *_wrong(reading, set(variables))]


def _unknown(reading: InventoryReading) -> Iterator[Problem]:
    known = definition().variables
    unknown: dict[str, list[str]] = {}
    ours = set(our_hosts(reading.groups)) or set(reading.places)
    for host, names in reading.places.items():
        for name in names:
            if host not in ours and (name in RUN_SETTINGS or not name.startswith(definition().prefixes)):
                continue
            if name not in known or known[name].scope == "derived":
                unknown.setdefault(name, []).append(host)
    for name, hosts in unknown.items():
        if name in known:
            source = known[name].schema["from"]
            fix = f"psfleet sets it itself, from {source}: " + ("set that" if source in known else "leave it out")
            fix = known[name].schema.get("instead", fix)
        elif name in RUN_SETTINGS:
            fix = "it is a run setting: write it below trainer_run, or give a variable of your own another name"
        elif meant := meant_variable(name):
            own = "" if name.startswith(definition().prefixes) else " Give a variable of your own another name"
            fix = f"did you mean {meant}?{own}"
        else:
            fix = (
                "it has a prefix that is psfleet's. docs/inventory.md lists what there is; give a variable of your own "
                "another prefix"
            )
        what = f"{name} can't be set" if name in known else f"unknown variable {show(name)}"
        text = f"{what} ({name_hosts(hosts)}): {fix}"
        yield reading.problem(text, hosts, name)
        for host in hosts:
            reading.values[host].pop(name, None)


def _wrong(reading: InventoryReading, ours: set[str]) -> Iterator[Problem]:
    judged: dict[Any, str | None] = {}
    found: dict[tuple[str, str, str], list[str]] = {}
    for host, values in reading.values.items():
        if host not in ours:
            continue
        for name, value in list(values.items()):
            variable = definition().variables[name]
            if name == "trainer_run":  # its keys are run_problems' to judge
                reason = None if isinstance(value, dict) else ""
            else:
                key = (name, type(value), value if not isinstance(value, (list, dict)) else _as_text(value))
                if key not in judged:
                    judged[key] = variable.reason_against(value)
                reason = judged[key]
            if reason is not None:
                found.setdefault((name, HIDDEN if variable.secret else show(value), reason), []).append(host)
                del values[name]
    for (name, value, reason), hosts in found.items():
        variable = definition().variables[name]
        text = f"{_subject(variable, value, hosts)}; expected {variable.expected}" + (f" ({reason})" if reason else "")
        yield reading.problem(text, hosts, name, value)


def _as_text(value: object) -> str:
    """A text that two equal values have in common."""
    try:
        return repr(value)
    except ValueError:  # a number of more than 4300 digits, which is refused whatever is beside it
        return "too long"


def _subject(variable: Variable, value: str, hosts: Sequence[str]) -> str:
    if variable.scope != "host":
        return f"{variable.name} is {value}"
    return f"{name_hosts(hosts)} {'has' if len(hosts) == 1 else 'have'} {variable.name}: {value}"


def site_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a value of the whole site that is not the same on each host, or missing."""
    groups = reading.groups
    chief = reference_host(groups)
    if chief is None:
        return
    site = reading.values[chief]
    for name in definition().named("site"):
        variable = definition().variables[name]
        if name not in site and name in reading.places[chief]:
            continue  # refused already
        if name not in site and variable.mandatory:
            yield Problem(f"{name} is missing; expected {variable.expected}, in group_vars/all.yml", (chief,), name)
        default = variable.schema.get("default")
        mine = site.get(name, default)
        for host in our_hosts(groups):
            theirs = reading.values[host].get(name, default)
            refused = name in reading.places[host] and name not in reading.values[host]
            if refused or (type(theirs) is type(mine) and theirs == mine):
                continue
            text = f"{name} differs between {show(chief)} and {show(host)}; expected the same on all hosts. {ONCE}"
            text = text if variable.secret else _difference(name, mine, chief, theirs, host)
            value = HIDDEN if variable.secret else show(theirs)
            yield Problem(text, (chief, host), name, value, *reading.place(host, name))
            break


def _difference(name: str, mine: Any, chief: str, theirs: Any, host: str) -> str:
    what, left, right = name, mine, theirs
    if isinstance(mine, dict) and isinstance(theirs, dict):
        part = next(key for key in [*mine, *theirs] if key not in mine or key not in theirs or mine[key] != theirs[key])
        what, left, right = f"{name}: {part}", mine.get(part), theirs.get(part)
    return (
        f"{what} is {show(left)} on {show(chief)} and {show(right)} on {show(host)}; expected the same on all hosts. "
        f"{ONCE}"
    )


def run_problems(reading: InventoryReading, storage: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse run settings that are unknown or wrong; `storage` are those that psfleet adds."""
    chief = reference_host(reading.groups)
    run = reading.values.get(chief, {}).get("trainer_run") if chief else None
    if not isinstance(run, dict):
        return
    known = list(Config.__dataclass_fields__)
    wrong = False
    for key, value in run.items():
        file, line = reading.parts.get(str(key), (None, None))
        if key in DERIVED_SETTINGS:
            text = f"trainer_run has {key}; {DERIVED_SETTINGS[key]}. Leave it out of trainer_run"
        elif key not in known:
            text = f"trainer_run: {unknown_key(show(key) if not isinstance(key, str) else key[:60], known)}"
        elif (problem := _key_problem(key, value)) is not None:
            text = f"trainer_run: {problem}"
        else:
            continue
        wrong = True
        yield Problem(text, (chief,) if chief else (), f"trainer_run.{show(key)}", show(value), file, line)
    if wrong:
        return
    try:
        Config.from_dict({**storage, **run})
    except ConfigError as error:
        yield reading.problem(f"trainer_run: {error}", [str(chief)], "trainer_run")


def _key_problem(key: str, value: Any) -> str | None:
    shown = show(value)
    if isinstance(value, int) and value.bit_length() > 200:
        return f"{key}: expected a number that fits into 64 bits, not {shown}"
    problem = key_problem(key, value)
    # What a wrong value looks like, in one short line.
    problem = problem and problem.replace(repr(value), shown)
    return problem if problem is None or len(problem) < 400 else f"{key} is {shown}: it is of another kind"
