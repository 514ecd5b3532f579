"""What is wrong with an inventory, or with the control machine, before any host is touched."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from cluster_spec import (  # noqa: E402
    JOBS,
    MAX_ENVIRONMENT_STRING,
    NUMBERED_JOBS,
    ClusterSpecError,
    busy_jobs,
    cluster_spec,
    run_settings,
    storage_of,
    strategy_of,
    tf_config,
)
from gpu_devices import gpu_problems  # noqa: E402
from nfs import nfs_source  # noqa: E402

from trainer.config import STRATEGIES, Config, ConfigError, url_problem  # noqa: E402

KNOWN_GROUPS = (*JOBS, "tensorboard", "nfs_server", "gpu", "monitoring")
ANSIBLE = ((2, 19), (2, 20))
# More vacant places for each member that is there are no machines that went, but a mistyped index.
MOST_VACANT = 10
COLLECTIONS = ("ansible.posix",)
COMMANDS = {"rsync": "apt-get install rsync", "ssh": "apt-get install openssh-client"}


def preflight_problems(
    groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], ansible_version: str
) -> list[str]:
    """List everything that is wrong, each with the value and the mend. Empty when all is right."""
    problems = list(_control_problems(ansible_version))
    if not groups.get("all"):
        return [
            *problems,
            "the inventory has no hosts. Name yours with -i inventory/<site>, or in ansible.cfg; "
            "docs/first-cluster.md starts one",
        ]
    site = hostvars[groups["all"][0]]
    problems += _site_problems(site)
    problems += _group_problems(groups, hostvars)
    if not storage_of(site)["shared"]:
        problems += _unshared_problems(groups)
    try:
        problems += _missing_jobs(groups, hostvars)
        spec = cluster_spec(groups, hostvars)
    except ClusterSpecError as error:
        # An unknown strategy is among the run settings' problems already.
        return list(dict.fromkeys([*problems, str(error)]))
    gpus = gpu_problems(groups, hostvars, spec["tasks"], strategy_of(groups, hostvars))
    return [*problems, *_vacancy_problems(spec, groups, hostvars), *_port_problems(spec), *_size_problems(spec), *gpus]


def preflight_notes(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List what is right and yet may surprise: no shared path, groups without a task, a training nobody evaluates."""
    strategy, busy = strategy_of(groups, hostvars), busy_jobs(groups, hostvars)
    evaluation = run_settings(groups, hostvars).get("evaluation", Config.evaluation)
    notes = [
        f"group {job} ({', '.join(groups[job])}) stands idle: the strategy {strategy} has no {job}"
        for job in JOBS
        if groups.get(job) and job not in busy and job != "evaluator"
    ]
    storage = storage_of(hostvars[groups["chief"][0]])
    if not storage["shared"]:
        notes.append(
            f"no path is shared (cluster_shared_dir is empty): the runs lie on the disk of {groups['chief'][0]} alone, "
            f"in {storage['path']}, and checkpoints go through the coordinator's memory; wheels are copied to each "
            "host; there is no evaluator, and no lease that another host would see: docs/storage.md"
        )
    if groups.get("evaluator") and "evaluator" not in busy:
        notes.append(
            f"group evaluator ({', '.join(groups['evaluator'])}) stands idle: it evaluates with evaluation: sidecar, "
            f"and this is {evaluation}"
        )
    if evaluation == "sidecar" and not _tasks_of(groups, hostvars, "evaluator"):
        notes.append(
            "nobody evaluates: evaluation is sidecar and the group evaluator is empty. "
            + ("Put a host there, or let the " if storage["shared"] else "Let the ")
            + "coordinator do it with trainer_run: {evaluation: inline}"
        )
    numbered = any(f"{job}_index" in hostvars[groups[job][0]] for job in NUMBERED_JOBS if groups.get(job))
    vacant = ", ".join(cluster_spec(groups, hostvars)["vacant"]) if numbered else ""
    if vacant:
        notes.append(f"no host is {vacant}: the training goes on without, until a new machine has that index")
    return notes


def _control_problems(ansible_version: str) -> Iterator[str]:
    version = tuple(int(part) for part in ansible_version.split(".")[:2])
    oldest, newest = ANSIBLE
    if not oldest <= version < newest:
        yield (
            f"this is ansible-core {ansible_version}; psfleet is made for {oldest[0]}.{oldest[1]}. "
            "`make venv` installs it in .venv"
        )
    for collection in COLLECTIONS:
        if importlib.util.find_spec(f"ansible_collections.{collection}") is None:
            yield f"the collection {collection} is missing. The PyPI package ansible has it; `make venv` installs it"
    for command, mend in COMMANDS.items():
        if shutil.which(command) is None:
            yield f"this machine has no `{command}`, which carries files to the hosts. Install it: {mend}"


def _is_path(value: object) -> TypeGuard[str]:
    """Whether it is an absolute path that needs no quotes anywhere."""
    return isinstance(value, str) and re.fullmatch(r"(/[\w.-]+)+", value) is not None


def _site_problems(site: Mapping[str, Any]) -> Iterator[str]:
    storage, uid = storage_of(site), site.get("cluster_uid")
    settings = storage["settings"]
    if not _is_path(storage["path"]):
        settings = settings | {"shared_dir": "/srv/trainer"}
        if not storage["shared"]:
            yield (
                f"cluster_local_dir is {storage['path']!r}; expected the absolute path of a directory that each host "
                "has for itself, of letters, digits, dots and dashes. Leave it out for /var/lib/trainer/local"
            )
        elif isinstance(storage["path"], str) and (problem := url_problem("cluster_shared_dir", storage["path"])):
            yield problem
        else:
            yield (
                f"cluster_shared_dir is {storage['path']!r}; expected the absolute path that all hosts share, of "
                'letters, digits, dots and dashes, such as /srv/trainer, in group_vars/all.yml; or "" where they '
                "share none"
            )
    if not isinstance(uid, int) or isinstance(uid, bool) or not 100 <= uid < 65534:
        yield (
            f"cluster_uid is {uid!r}; expected the user number of the training tasks on every host, free on all of "
            "them, such as 6006, in group_vars/all.yml"
        )
    run = site.get("trainer_run")
    if not isinstance(run, Mapping):
        yield f"trainer_run is {run!r}; expected the run settings, at least program: package.module:Name"
        return
    if "shared_dir" in run:
        yield "trainer_run has shared_dir; the shared path is cluster_shared_dir. Leave it out of trainer_run"
    if "local_run_dir" in run:
        yield "trainer_run has local_run_dir; an empty cluster_shared_dir says that. Leave it out of trainer_run"
    try:
        Config.from_dict({**settings, **run})
    except ConfigError as error:
        yield f"trainer_run: {error}"


def _group_problems(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    chiefs = _tasks_of(groups, hostvars, "chief")
    if len(chiefs) != 1:
        named = f"has {len(chiefs)} ({', '.join(chiefs)})" if chiefs else "is empty"
        yield f"group chief {named}; expected exactly one host: the one that runs the coordinator"
    servers = groups.get("nfs_server", ())
    if len(servers) > 1:
        yield (
            f"group nfs_server has {', '.join(servers)}; expected one host, or none where the shared path comes from "
            "outside"
        )
    for server in servers:
        yield from _nfs_problems(server, hostvars)
    evaluators = _tasks_of(groups, hostvars, "evaluator")
    if len(evaluators) > 1:
        yield f"group evaluator has {len(evaluators)} ({', '.join(evaluators)}); expected one host, or none"
    placed = {host for group in KNOWN_GROUPS for host in groups.get(group, ())}
    for group, hosts in groups.items():
        meant = difflib.get_close_matches(group, KNOWN_GROUPS, n=1, cutoff=0.75)
        lost = [host for host in hosts if host not in placed]
        if meant and group not in KNOWN_GROUPS and lost:
            yield f"group {group} is no job, so {', '.join(lost)} would do nothing. Did you mean {meant[0]}?"


def _unshared_problems(groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What needs a path that all hosts share, where there is none."""
    why = "cluster_shared_dir is empty: the chief alone has the run directory"
    if groups.get("evaluator"):
        yield (
            f"group evaluator has {', '.join(groups['evaluator'])}, and {why}. Empty the group, and let the "
            "coordinator evaluate with trainer_run: {evaluation: inline}; or give all hosts a shared path"
        )
    if groups.get("nfs_server"):
        yield (
            f"group nfs_server has {', '.join(groups['nfs_server'])}, and cluster_shared_dir is empty. Name there the "
            "path where every host mounts what it serves, such as /srv/trainer; or empty the group"
        )
    if boards := [host for host in groups.get("tensorboard", ()) if host not in groups.get("chief", ())]:
        yield (
            f"group tensorboard has {', '.join(boards)}, and {why}. Put the chief's host into the group instead; or "
            "give all hosts a shared path"
        )


def _missing_jobs(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    strategy = strategy_of(groups, hostvars)
    for job in STRATEGIES[strategy].jobs:
        if job != "chief" and not _tasks_of(groups, hostvars, job):
            yield f"group {job} is empty; the strategy {strategy} needs at least one {job}"


def _nfs_problems(server: str, hostvars: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    served, shared_dir = hostvars[server].get("cluster_nfs_dir"), hostvars[server].get("cluster_shared_dir")
    try:
        nfs_source({"nfs_server": [server]}, hostvars, host="")
    except ClusterSpecError as error:
        yield str(error)
    if not _is_path(served):
        yield (
            f"cluster_nfs_dir is {served!r}; expected the absolute path of the directory that the nfs_server serves, "
            "of letters, digits, dots and dashes, such as /srv/nfs/trainer, in group_vars/all.yml"
        )
    elif _is_path(shared_dir) and (
        PurePosixPath(served).is_relative_to(shared_dir) or PurePosixPath(shared_dir).is_relative_to(served)
    ):
        yield (
            f"cluster_nfs_dir is {served}, and cluster_shared_dir is {shared_dir}; expected two paths, neither in the "
            "other: the one is the server's own directory, the other is where every host mounts it"
        )


def _tasks_of(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]], job: str) -> list[str]:
    """Name a job's hosts, each as often as it runs the job. Wrong counts are cluster_spec's to refuse."""
    named: list[str] = []
    for host in groups.get(job, ()):
        count = hostvars[host].get(f"{job}_tasks", 1)
        named += [host] * (count if isinstance(count, int) else 1)
    return named


def _vacancy_problems(
    spec: Mapping[str, Any], groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    strategy = strategy_of(groups, hostvars)
    elastic = STRATEGIES[strategy].remote and run_settings(groups, hostvars).get("elastic", Config.elastic)
    for job in NUMBERED_JOBS:
        places = [name for name in spec["vacant"] if name.startswith(f"{job}-")]
        present = [task for task in spec["tasks"] if task["job"] == job]
        if len(places) > MOST_VACANT * len(present):
            last = max(present, key=lambda task: int(task["index"]))
            yield (
                f"{last['name']} on '{last['host']}' has the highest {job}_index, and of the places below "
                f"{len(places)} are vacant; {len(present)} are taken. Number the hosts from 0 on, with few gaps"
            )
    if spec["vacant"] and not elastic:
        why = "elastic: false" if STRATEGIES[strategy].remote else f"the strategy {strategy}"
        yield (
            f"no host is {', '.join(spec['vacant'])}, and {why} needs every member. Give a new machine that index "
            "(ps_index, worker_index), or number the hosts without a gap"
        )


def _port_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    listeners = [(task["address"], task["port"], task["host"], task["name"]) for task in spec["tasks"] if task["port"]]
    listeners += [(board["address"], board["port"], host, "tensorboard") for host, board in spec["tensorboard"].items()]
    taken: dict[tuple[str, int], str] = {}
    for address, port, host, name in listeners:
        if (address, port) in taken:
            yield (
                f"port {port} on {address} (host '{host}') is taken twice, by {taken[address, port]} and by {name}. "
                f"Set {name.split('-')[0]}_port on that host to another first port"
            )
        taken[address, port] = name
    for task in spec["tasks"]:
        if task["port"] and task["port"] > 65535:
            yield f"{task['name']} on '{task['host']}' would listen on port {task['port']}; the highest is 65535"
    addresses = Counter(address for _, address in {(task["host"], task["address"]) for task in spec["tasks"]})
    for address, count in addresses.items():
        if count > 1:
            hosts = sorted({task["host"] for task in spec["tasks"] if task["address"] == address})
            yield f"the hosts {', '.join(hosts)} have the same address {address}; expected one each"


def _size_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    if not spec["tasks"]:
        return
    longest = max(spec["tasks"], key=lambda task: len(task["name"]))
    size = len("TF_CONFIG=") + len(tf_config(spec["cluster_json"], longest["job"], longest["index"]))
    if size > MAX_ENVIRONMENT_STRING:
        yield (
            f"TF_CONFIG for {len(spec['tasks'])} tasks is {size:,} bytes; one environment variable holds at most "
            f"{MAX_ENVIRONMENT_STRING:,}. Use fewer tasks"
        )


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"preflight_problems": preflight_problems, "preflight_notes": preflight_notes}
