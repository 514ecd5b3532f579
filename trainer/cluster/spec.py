"""The members of the cluster and the task of this process, as TF_CONFIG or the task's flags say it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import random
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.core.settings.config import ConfigError
from trainer.core.settings.strategies import STRATEGIES
from trainer.core.task_id import TaskId

# Jobs of the data service, which TensorFlow's strategies know nothing of.
SERVICE_JOBS = ("dispatcher", "data")
# All jobs, in the order in which tasks are listed. The evaluator listens on nothing: TensorFlow gives it no server.
JOBS = ("chief", "ps", "worker", "evaluator", *SERVICE_JOBS)
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT = 12000  # below are most ports that services are known by
TRIES = 100
# Stands in TF_CONFIG for a member that no machine is: nothing listens there.
VACANT = "127.0.0.1:1"
ADDRESS = re.compile(r"([^\s/:]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The addresses (host:port) of each job, and this process's job and index."""

    jobs: dict[str, list[str]]
    job: str
    index: int
    service: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The addresses of the data service's jobs; empty where there is none."""
    source: Path | None = dataclasses.field(default=None, compare=False)
    """The file with this task's TF_CONFIG, which may name more members later; None where nothing is read again."""

    @classmethod
    def from_tf_config(cls, text: str) -> ClusterConfig:
        """Read TF_CONFIG; raises ConfigError that says what is wrong with it."""
        try:
            value = json.loads(text)
            jobs, task = dict(value.get("cluster", {})), value["task"]
            job, index = str(task["type"]), int(task.get("index", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                'TF_CONFIG must be JSON like {"cluster": {"chief": ["host:port"], "worker": [...], "ps": [...]}, '
                f'"task": {{"type": "worker", "index": 0}}}}: {error!r}'
            ) from error
        with naming("TF_CONFIG"):
            return cls.checked(jobs, job, index)

    @classmethod
    def checked(cls, jobs: Mapping[str, Any], job: str, index: int) -> ClusterConfig:
        """Return the cluster, or raise ConfigError that says which member or which task is wrong."""
        if job not in JOBS:
            raise ConfigError(f"unknown task type {job!r}: expected one of {', '.join(JOBS)}{renamed_job(job)}")
        # The coordinator would wait for ever for an evaluator in its cluster (tensorflow#46169).
        given = {name: addresses(name, jobs[name]) for name in jobs if name != "evaluator"}
        members_of = {name: given[name] for name in given if name not in SERVICE_JOBS}
        service = {name: given[name] for name in SERVICE_JOBS if given.get(name)}
        cluster = cls(members_of, job, index, service)
        if service and len(service.get("dispatcher", [])) != 1:
            raise ConfigError(
                f"the data service has {cluster.describe()}; expected one dispatcher beside its data workers"
            )
        if job == "evaluator":
            return cluster
        members = given.get(job, [])
        if not 0 <= index < len(members):
            raise ConfigError(f"the task is {job} {index}, and the cluster lists no such member: {cluster.describe()}")
        if not cluster.jobs.get("chief"):
            raise ConfigError(
                "the cluster has no chief. In TensorFlow 1 worker 0 was it; here it schedules the steps and is a "
                'process of its own: add "chief": ["host:port"] (as a flag: --chief-hosts=host:port) for every task, '
                "and start one more task with that job"
            )
        if len(cluster.jobs["chief"]) > 1:
            raise ConfigError(f"a cluster has one chief, not {', '.join(cluster.jobs['chief'])}")
        return cluster

    def as_tf_config(self) -> str:
        """Return the cluster as TF_CONFIG says it."""
        return json.dumps({"cluster": self.jobs | self.service, "task": {"type": self.job, "index": self.index}})

    @property
    def task(self) -> str:
        return str(TaskId(self.job, self.index))

    @property
    def address(self) -> str:
        return (self.jobs | self.service)[self.job][self.index]

    @property
    def addresses(self) -> list[str]:
        """The address of every member and of the data service."""
        return [address for members in (self.jobs | self.service).values() for address in members]

    @property
    def workers(self) -> int:
        return len(self.jobs.get("worker", []))

    @property
    def servers(self) -> dict[str, str]:
        """Task name to address, for every worker and ps that a machine is."""
        return {
            str(TaskId(job, index)): address
            for job in ("worker", "ps")
            for index, address in enumerate(self.jobs.get(job, []))
            if address != VACANT
        }

    def only(self, tasks: Collection[str]) -> ClusterConfig:
        """Return the cluster without the workers and ps that are not named; those that are left move up."""
        kept = {
            job: [address for index, address in enumerate(members) if f"{job}-{index}" in tasks]
            for job, members in self.jobs.items()
            if job != "chief"
        }
        return dataclasses.replace(self, jobs={"chief": self.jobs["chief"], **kept})

    @property
    def trains(self) -> bool:
        """Whether this process runs the training program: the coordinator, or a worker of a cluster without ps."""
        return self.job == "chief" or (self.job == "worker" and not self.jobs.get("ps"))

    def check_strategy(self, strategy: str) -> None:
        """Raise ConfigError unless the cluster has the jobs that the strategy needs, and no other."""
        traits = STRATEGIES[strategy]
        wanted = traits.jobs
        missing = [job for job in wanted if not self.jobs.get(job)]
        if missing:
            raise ConfigError(
                f"strategy {strategy} needs at least one {' and one '.join(missing)} in the cluster, "
                f"which has {self.describe()}"
            )
        unwanted = [job for job in self.jobs if self.jobs[job] and job not in wanted]
        if unwanted:
            why = (
                "TensorFlow would wait for them for ever"
                if traits.in_step
                else f"it trains on {' and '.join(wanted)} alone"
            )
            raise ConfigError(
                f"strategy {strategy} can't use the {' and '.join(unwanted)} of the cluster, which has "
                f"{self.describe()}: {why}: leave them out, or choose another strategy"
            )

    def check_input(self, given: str) -> None:
        """Raise ConfigError where the data service is to read and the cluster has none."""
        if given == "service" and not self.service.get("data"):
            raise ConfigError(
                f"input: service: the cluster has no data service, but {self.describe()}: add a dispatcher and data "
                "workers (in an inventory the group data), or leave input out"
            )

    def describe(self) -> str:
        """Return the size of each job, as `1 chief, 2 worker`."""
        jobs = self.jobs | self.service
        return ", ".join(f"{len(members)} {job}" for job, members in jobs.items() if members) or "no member"


@contextlib.contextmanager
def naming(source: str) -> Iterator[None]:
    """Put where it was said before what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def addresses(job: str, value: object) -> list[str]:
    """Return a job's members, or raise ConfigError unless each is host:port."""
    if job not in JOBS:
        raise ConfigError(f"unknown job {job!r} in the cluster: expected one of {', '.join(JOBS)}{renamed_job(job)}")
    if not isinstance(value, list):
        raise ConfigError(f"job {job!r} must be a list of host:port, not {value!r}")
    for item in value:
        match = ADDRESS.fullmatch(item) if isinstance(item, str) else None
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise ConfigError(f"job {job!r} must be a list of host:port, and {item!r} is none")
    return value


def renamed_job(job: str) -> str:
    """Say what TensorFlow 1's name of a job is called now."""
    return " (master is called chief now)" if job == "master" else ""


def free_addresses(number: int) -> list[str]:
    """Return so many different addresses where no process listens now, below the ports of outgoing connections.

    A connection could take any other before the task that is to listen there has begun.
    """
    limit = first_outgoing_port()
    with contextlib.ExitStack() as stack:
        bound = [bind_below(limit, stack) for _ in range(number)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in bound]


def first_outgoing_port() -> int:
    """Return the least port that the kernel gives to outgoing connections; 0 where it does not say."""
    try:
        return int(OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def bind_below(limit: int, stack: contextlib.ExitStack) -> socket.socket:
    """Bind a socket to a free port from MIN_PORT to the limit, by chance; to any where none is found there."""
    ports = range(MIN_PORT, limit)
    for port in [*random.SystemRandom().sample(ports, min(TRIES, len(ports))), 0]:
        one = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return one
    raise OSError(errno.EADDRINUSE, "no port of the loopback interface is free")
