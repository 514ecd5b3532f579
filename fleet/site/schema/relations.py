"""Values of an inventory that are right alone and senseless together: each relation with the sentence that refuses it.

What decides which tasks there are is `fleet/site/preflight/`'s, and what the run settings say among
themselves `trainer/core/settings/config.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

from fleet.site.schema.checks import HIDDEN, our_hosts, reference_host
from fleet.site.schema.definition import definition
from fleet.site.schema.inventory_reading import NOWHERE, InventoryReading
from fleet.site.schema.problems import Problem, name_hosts, name_some, show
from trainer.core.settings.config import Config
from trainer.core.settings.formats import SOURCE

# Roles of psfleet call them; the list in the inventory takes the place of the default.
NEEDED_PACKAGES = ("acl", "nftables", "rsync")


def relation_problems(reading: InventoryReading) -> Iterator[Problem]:
    """Say which values don't fit together. Values that were refused by themselves are left out."""
    yield from _stray_variables(reading)
    yield from _families(reading)
    yield from _uncounted_gpus(reading)
    yield from _stops(reading)
    yield from _planned_reboots(reading)
    yield from _leases(reading)
    yield from _alerts_that_always_fire(reading)
    yield from _services_without_tasks(reading)
    yield from _times(reading)
    yield from _packages(reading)
    yield from _own_weights(reading)
    yield from _directories(reading)
    yield from _plugs(reading)


def setting(reading: InventoryReading, key: str) -> float:
    """A number of the run settings, or its default where it is missing or no number."""
    value = _run(reading).get(key)
    default: float = getattr(Config, key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def value_of(reading: InventoryReading, host: str, name: str) -> Any:
    """A variable of a host, or its default."""
    return reading.values[host].get(name, definition().variables[name].schema.get("default"))


def _run(reading: InventoryReading) -> dict[str, Any]:
    chief = reference_host(reading.groups)
    run = reading.values.get(chief or "", {}).get("trainer_run")
    return run if isinstance(run, dict) else {}


def _problem(reading: InventoryReading, hosts: list[str], name: str, text: str) -> Problem:
    value = _shown(reading, hosts[0], name)
    return reading.problem(f"{name_hosts(hosts)}: {text}", hosts, name, value)


def _shown(reading: InventoryReading, host: str, name: str) -> str:
    return HIDDEN if definition().variables[name].secret else show(reading.values[host].get(name))


def _each_once(reading: InventoryReading, name: str, texts: dict[str, list[str]]) -> Iterator[Problem]:
    """One problem for each text, with all the hosts that it is true of."""
    for text, hosts in texts.items():
        yield _problem(reading, hosts, name, text)


def _stray_variables(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a variable for the hosts of a group on a host that is not in it, unless others need it as well."""
    ours = our_hosts(reading.groups)
    for name, variable in definition().variables.items():
        group = str(variable.schema.get("group", ""))
        having = [host for host in ours if _says_something(name, reading.values[host].get(name))] if group else []
        members = [host for host in having if host in reading.groups.get(group, ())]
        shared = {_where(reading, host, name) for host in members}
        if len({show(reading.values[host][name]) for host in having}) == 1 and len(having) == len(ours):
            continue  # in group_vars/all.yml
        strays = [host for host in having if host not in members and _where(reading, host, name) not in shared]
        if strays:
            text = f"{name} is {_shown(reading, strays[0], name)}, and it is for hosts of the group {group}"
            fix = f"expected {'the host' if len(strays) == 1 else 'these hosts'} in that group, or the line left out"
            yield _problem(reading, strays, name, f"{text}; {fix}")


def _says_something(name: str, value: Any) -> bool:
    """Clouds compose an empty value for a machine without the tag, and no task at all is what a stranger runs."""
    return value is not None and value != "" and not (name.endswith("_tasks") and value == 0)


def _where(reading: InventoryReading, host: str, name: str) -> object:
    place = reading.place(host, name)
    return place if place != NOWHERE else show(reading.values[host][name])


def _families(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse addresses of both families: a host's packets to the other one come from an address that is not listed."""
    families: dict[int, list[str]] = {}
    for host in our_hosts(reading.groups):
        values = reading.values[host]
        try:
            address = ip_address(str(values.get("cluster_address") or values.get("ansible_host")))
        except ValueError:
            continue  # a name: ansible/host_check.yml asks the hosts what it means
        families.setdefault(address.version, []).append(host)
    if len(families) > 1:
        few, many = sorted(families.values(), key=len)
        version = next(version for version, hosts in families.items() if hosts is few)
        yield _problem(
            reading,
            few,
            "cluster_address",
            f"the address is of IPv{version}, and {name_some(many)} {'has' if len(many) == 1 else 'have'} one of "
            f"IPv{10 - version}; expected one family for all hosts. Set cluster_address to addresses of one family",
        )


def _uncounted_gpus(reading: InventoryReading) -> Iterator[Problem]:
    for host in reading.groups.get("gpu", ()):
        devices, count = (reading.values[host].get(name) for name in ("gpu_devices", "gpu_count"))
        if not isinstance(devices, list) or not isinstance(count, int):
            continue
        whole = not any(str(each).startswith("MIG-") for each in devices)
        if len(devices) < count or (whole and len(devices) > count):
            text = (
                f"gpu_devices names {len(devices)}, and gpu_count is {count}; expected as many. Leave gpu_count out "
                "where the tasks are to have only some of the host's GPUs"
            )
            yield _problem(reading, [host], "gpu_devices", text)


def _stops(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a stop that kills a coordinator while it saves, as long as a save may take."""
    chief = reference_host(reading.groups)
    if chief is None:
        return
    stop, save = value_of(reading, chief, "trainer_stop_seconds"), setting(reading, "saving_timeout_seconds")
    usual = definition().variables["trainer_stop_seconds"].schema["default"]
    # Two defaults are no mistake of the operator's: few saves take as long as they may.
    need = save if "saving_timeout_seconds" in _run(reading) else min(save, usual)
    if isinstance(stop, int) and stop < need:
        yield _problem(
            reading,
            [chief],
            "trainer_stop_seconds",
            f"trainer_stop_seconds is {stop}, and a save may take saving_timeout_seconds, {save:g}: a stop would kill "
            f"the coordinator before its checkpoint is whole; expected {need:g} or more, or a smaller "
            "saving_timeout_seconds in trainer_run",
        )


def _planned_reboots(reading: InventoryReading) -> Iterator[Problem]:
    wait = setting(reading, "ps_grace_seconds")
    texts: dict[str, list[str]] = {}
    for host in reading.groups.get("ps", ()):
        patience = value_of(reading, host, "trainer_return_seconds")
        if isinstance(patience, int) and patience <= wait:
            text = (
                f"trainer_return_seconds is {patience}, and ps_grace_seconds is {wait:g}: a planned reboot would be "
                f"given up before the training goes on without the host; expected more than {wait:g}"
            )
            texts.setdefault(text, []).append(host)
    yield from _each_once(reading, "trainer_return_seconds", texts)


def _leases(reading: InventoryReading) -> Iterator[Problem]:
    lease = setting(reading, "lease_seconds")
    texts: dict[str, list[str]] = {}
    for host in our_hosts(reading.groups):
        seen = value_of(reading, host, "storage_rename_seconds")
        if isinstance(seen, int) and seen > lease:
            text = (
                f"storage_rename_seconds is {seen}, and lease_seconds is {lease:g}: a lease that was renewed in time "
                f"could be taken over before the other host sees it; expected {lease:g} at most, or a longer lease"
            )
            texts.setdefault(text, []).append(host)
    yield from _each_once(reading, "storage_rename_seconds", texts)


ALERTS = {
    "prometheus_checkpoint_seconds": ("checkpoint_seconds", "a checkpoint is saved every"),
    "prometheus_no_step_seconds": ("log_seconds", "steps are reported every"),
    "prometheus_evaluation_seconds": ("evaluate_poll_seconds", "the evaluator looks for a checkpoint every"),
    "prometheus_down_seconds": ("heartbeat_timeout_seconds", "a silent member is noticed after"),
}


def _alerts_that_always_fire(reading: InventoryReading) -> Iterator[Problem]:
    for host in reading.groups.get("prometheus", ()):
        for name, (key, why) in ALERTS.items():
            limit, every = value_of(reading, host, name), setting(reading, key)
            # Two defaults fit; a run that is saved by steps has no interval.
            if isinstance(limit, int) and limit <= every and not (key == "checkpoint_seconds" and _by_steps(reading)):
                text = (
                    f"{name} is {limit}, and {why} {key}, {every:g}: the alert would tell of a training that is well; "
                    f"expected more than {every:g}"
                )
                yield _problem(reading, [host], name, text)


def _by_steps(reading: InventoryReading) -> bool:
    return setting(reading, "checkpoint_steps") > 0


def _services_without_tasks(reading: InventoryReading) -> Iterator[Problem]:
    groups = reading.groups
    watchers, tellers = list(groups.get("prometheus", ())), list(groups.get("alertmanager", ()))
    if tellers and not watchers:
        text = "group alertmanager has it, and group prometheus is empty: it would get no alert"
        yield _problem(reading, tellers, "alertmanager_port", f"{text}; expected a host in prometheus, or neither")
    working = [host for job in ("chief", "ps", "worker", "evaluator", "data") for host in groups.get(job, ())]
    if watchers and working and all(reading.values[host].get("metrics_port") == 0 for host in working):
        text = "metrics_port is 0 on every host with tasks, so that Prometheus would have no task to scrape"
        yield _problem(reading, watchers, "metrics_port", f"{text}; expected ports, or group prometheus empty")


def _times(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a host that takes the time from itself."""
    for host in our_hosts(reading.groups):
        values = reading.values[host]
        own = {host, values.get("ansible_host"), values.get("cluster_address")} - {None}
        if mine := [each for each in values.get("common_time_servers", ()) if each in own]:
            text = f"common_time_servers has {mine[0]}, which is the host itself; expected another machine's address"
            yield _problem(reading, [host], "common_time_servers", text)


def _packages(reading: InventoryReading) -> Iterator[Problem]:
    texts: dict[str, list[str]] = {}
    for host in our_hosts(reading.groups):
        packages = value_of(reading, host, "common_packages")
        if missing := [each for each in NEEDED_PACKAGES if each not in packages]:
            text = (
                f"common_packages has no {', '.join(missing)}, and it takes the place of the default; expected "
                f"{', '.join(NEEDED_PACKAGES)} in it, with packages of yours beside them"
            )
            texts.setdefault(text, []).append(host)
    yield from _each_once(reading, "common_packages", texts)


def _own_weights(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a run that is to begin with a checkpoint of its own. A selection may name another run."""
    chief, run = reference_host(reading.groups), _run(reading)
    source = SOURCE.fullmatch(str(run.get("initial_weights", "")))
    name = run.get("run", Config.run)
    if chief and source and source["run"] == name:
        text = (
            f"trainer_run: initial_weights is {show(run['initial_weights'])}, which is a checkpoint of the run itself; "
            "expected another run's. A run goes on from its newest checkpoint by itself"
        )
        yield reading.problem(text, [chief], "trainer_run.initial_weights", show(run["initial_weights"]))


def _directories(reading: InventoryReading) -> Iterator[Problem]:
    chief = reference_host(reading.groups)
    if chief is None:
        return
    shared, own = (reading.values[chief].get(name) for name in ("cluster_shared_dir", "cluster_local_dir"))
    if shared and own:
        text = (
            f"cluster_local_dir is {own}, and cluster_shared_dir is {shared}: each host has a directory of its own "
            "only where none is shared; expected one of the two. Leave cluster_local_dir out, or empty "
            "cluster_shared_dir"
        )
        yield _problem(reading, [chief], "cluster_local_dir", text)
    serving = [host for host in our_hosts(reading.groups) if reading.values[host].get("cluster_nfs_dir")]
    if serving and not reading.groups.get("nfs_server"):
        text = (
            f"cluster_nfs_dir is {reading.values[serving[0]]['cluster_nfs_dir']}, and group nfs_server is empty: no "
            "host would serve it; expected one host in that group, or the line left out"
        )
        yield _problem(reading, serving, "cluster_nfs_dir", text)


def _plugs(reading: InventoryReading) -> Iterator[Problem]:
    """Refuse a plug that is never put back, and one command for several machines that names none of them."""
    hosts = our_hosts(reading.groups)
    for name, other in (("drill_power_off", "drill_power_on"), ("drill_power_on", "drill_power_off")):
        alone = [host for host in hosts if reading.values[host].get(name) and not reading.values[host].get(other)]
        if alone:
            text = f"{name} is set, and {other} is not; expected both: a drill takes a host's power away and gives it"
            yield _problem(reading, alone, name, f"{text} back")
        commands: dict[str, list[str]] = {}
        for host in hosts:
            command = str(reading.values[host].get(name) or "")
            if command and "{host}" not in command and "{address}" not in command:
                commands.setdefault(command, []).append(host)
        for command, having in commands.items():
            if len(having) > 1:
                text = f"{name} is {show(command)} for each of them; expected {{host}} or {{address}} in it"
                yield _problem(reading, having, name, f"{text}, or it meets one machine whichever is meant")
