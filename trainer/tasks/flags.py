"""The flags that say what TF_CONFIG says: TensorFlow 1's hosts, job and index, or a cluster file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.cluster.spec import JOBS, ClusterConfig, naming
from trainer.core.settings.config import ConfigError

HOSTS = {job: f"{job}_hosts" for job in JOBS}


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group(
        "a task's flags (instead of TF_CONFIG)", "An underscore will do for a hyphen, as in --ps_hosts."
    )
    for job, key in HOSTS.items():
        flags.add_argument(option(key), metavar="HOST:PORT,...", help=f"the members of the job {job}")
    flags.add_argument(
        "--cluster", metavar="FILE", help='instead of the hosts: {"chief": [...], ...}, or a whole TF_CONFIG'
    )
    flags.add_argument("--job-name", "--task-type", metavar="JOB", help=f"this task's job: {', '.join(JOBS)}")
    flags.add_argument("--task-index", type=int, metavar="N", help="its number in the job, from 0")


def with_hyphens(argument: str) -> str:
    """Return an option as argparse knows it: TensorFlow 1 wrote --ps_hosts."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def reject_task_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError when a task's flag stands before a command, which would not heed it."""
    if given := given_flags(options):
        raise ConfigError(f"{given[0]} is for a task, and {options.command} is a command: leave one of them out")


def read_cluster(options: argparse.Namespace, environment: Mapping[str, str]) -> ClusterConfig:
    """Return the cluster of the flags or of TF_CONFIG; raises ConfigError when they say different things."""
    flags = cluster_from_flags(options)
    if "TF_CONFIG" not in environment:
        if flags is None:
            raise ConfigError(
                "TF_CONFIG is not set: it names the cluster and this process's task "
                "(or say it with --chief-hosts ... or --cluster FILE; or use: local)"
            )
        return flags
    cluster = ClusterConfig.from_tf_config(environment["TF_CONFIG"])
    if source := environment.get("TRAINER_MEMBERS"):
        cluster = replace(cluster, source=Path(source))
    if flags is not None and (difference := differ(cluster, flags)):
        raise ConfigError(f"{difference}: unset TF_CONFIG, or leave the flags out")
    return cluster


def cluster_from_flags(options: argparse.Namespace) -> ClusterConfig | None:
    """Return what the flags say, or None when there is none; raises ConfigError, naming the flag."""
    given = given_flags(options)
    if not given:
        return None
    file, job, index = options.cluster, options.job_name, options.task_index
    hosts = {name: split(getattr(options, key)) for name, key in HOSTS.items() if option(key) in given}
    if file and hosts:
        raise ConfigError(f"--cluster and {option(HOSTS[next(iter(hosts))])} both say the cluster: leave one out")
    if not job:
        raise ConfigError(f"{given[0]} is set, and not which task this is: add --job-name and --task-index")
    if not file and not hosts and job != "evaluator":
        raise ConfigError("--job-name is set, and not the cluster: add --chief-hosts, --worker-hosts and --ps-hosts")
    jobs = read_file(Path(file), job, index) if file else hosts
    members = jobs.get(job)
    if index is None and isinstance(members, list) and len(members) > 1:
        raise ConfigError(f"--task-index is missing: there are {len(members)} members of the job {job}, counted from 0")
    with naming(f"--cluster {file}" if file else "the flags"):
        return ClusterConfig.checked(jobs, job, index or 0)


def read_file(path: Path, job: str, index: int | None) -> dict[str, Any]:
    """Read a cluster, alone or with a task, which must be the flags'; raises ConfigError, naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--cluster: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--cluster: {path} is not JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("cluster"), dict):
        task = value.get("task")
        if isinstance(task, dict) and (task.get("type"), task.get("index", 0)) != (job, index or 0):
            raise ConfigError(
                f"--cluster: {path} says task {task.get('type')} {task.get('index', 0)}, the flags say "
                f"{job} {index or 0}: take the task out of the file, or fix the flags"
            )
        value = value["cluster"]
    if not isinstance(value, dict):
        raise ConfigError(f'--cluster: {path} must be like {{"chief": ["host:port"], ...}}, not {value!r}')
    return value


def split(text: str) -> list[str]:
    """Return the addresses of one flag; an empty one in between is for the cluster to refuse, not to skip."""
    return [item.strip() for item in text.split(",")] if text.strip() else []


def given_flags(options: argparse.Namespace) -> list[str]:
    keys = (*HOSTS.values(), "cluster", "job_name", "task_index")
    return [option(key) for key in keys if getattr(options, key, None) is not None]


def option(key: str) -> str:
    return "--" + key.replace("_", "-")


def differ(cluster: ClusterConfig, flags: ClusterConfig) -> str:
    """Say the first difference between TF_CONFIG and the flags, or nothing."""
    if cluster.task != flags.task:
        return f"TF_CONFIG says task {cluster.job} {cluster.index}, the flags say {flags.job} {flags.index}"
    ours, theirs = cluster.jobs | cluster.service, flags.jobs | flags.service
    for job in {**ours, **theirs}:
        one, other = ours.get(job, []), theirs.get(job, [])
        if one != other:
            return f"TF_CONFIG says {job} {','.join(one) or '(none)'}, the flags say {','.join(other) or '(none)'}"
    return ""
