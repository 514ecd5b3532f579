"""A cluster whose tasks are started again when they end, as systemd does it, and what can befall them.

A fault hits the process that does the work: of psfleet's tasks the child, which its supervisor replaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.networks import Networks
from bench.tasks import TaskProcess
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import FINISHED, USER_ERROR
from trainer.tasks.local import local_cluster

RESTART_SECONDS = 1.0
PORT = 6000


class KeptTask:
    """A task with one process after another.

    `starts` has the time of each (seconds since 1970), also of those that a supervisor forks.
    """

    def __init__(self, name: str, start: Callable[[], TaskProcess]) -> None:
        self.name = name
        self.starts: list[float] = []
        self.processes: list[TaskProcess] = []
        self._start = start
        self._ended_at: float | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        return self.processes[-1].pid

    def start(self) -> None:
        self._ended_at = None
        self.processes.append(self._start())
        self._pid = self.pid
        self.starts.append(time.time())

    def keep(self) -> None:
        """Start it again when it has ended, after a pause; not after an end that is meant to last."""
        code = self.processes[-1].process.poll()
        if code is None and self.pid != self._pid:
            # A supervisor's first child is no restart.
            if self._pid != self.processes[-1].process.pid:
                self.starts.append(time.time())
            self._pid = self.pid
        if code is None or code in (FINISHED, USER_ERROR):
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at >= RESTART_SECONDS:
            self.start()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def output(self) -> str:
        return "".join(process.output() for process in self.processes)


class KeptCluster:
    """A chief, two workers and two ps, each in a network of its own if there are any."""

    def __init__(
        self,
        directory: Path,
        commands: Mapping[str, tuple[str, ...]],
        networks: Networks | None = None,
        **environment: str,
    ) -> None:
        """Take the commands (of Python) of the jobs."""
        self._networks = networks
        self._logs = itertools.count()
        self.jobs = jobs = in_networks(networks) if networks else local_cluster(2, 2)
        self.tasks: dict[str, KeptTask] = {}
        for job in ("ps", "worker", "chief"):
            for index in range(len(jobs[job])):
                cluster = ClusterConfig(jobs, job, index)

                def start(cluster: ClusterConfig = cluster, command: tuple[str, ...] = commands[job]) -> TaskProcess:
                    log = directory / f"{cluster.task}-{next(self._logs)}.log"
                    under = networks.under(cluster.task) if networks else ()
                    more = {**environment, "TF_CONFIG": cluster.as_tf_config()}
                    return TaskProcess(cluster.task, list(command), log, more, under)

                self.tasks[cluster.task] = KeptTask(cluster.task, start)

    @contextlib.contextmanager
    def running(self) -> Iterator[KeptCluster]:
        """Start all tasks; end them afterwards."""
        try:
            for task in self.tasks.values():
                task.start()
            yield self
        finally:
            for task in self.tasks.values():
                if task.processes:
                    task.processes[-1].end()

    def keep(self) -> None:
        for task in self.tasks.values():
            task.keep()

    def kill(self, task: str) -> None:
        self.tasks[task].send(signal.SIGKILL)

    def freeze(self, task: str) -> Callable[[], None]:
        """Stop a process; returns what lets it go on, if it is still the same one."""
        pid = self.tasks[task].pid
        os.kill(pid, signal.SIGSTOP)

        def thaw() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return thaw

    def cut(self, task: str) -> Callable[[], None]:
        """Cut a task's network; returns what restores it."""
        networks = self._networks
        assert networks is not None
        networks.cut(task)
        return lambda: networks.restore(task)


def in_networks(networks: Networks) -> dict[str, list[str]]:
    """Return the cluster with each task at its network's address."""
    names = {"chief": ["chief-0"], "worker": ["worker-0", "worker-1"], "ps": ["ps-0", "ps-1"]}
    return {job: [f"{networks.address(task)}:{PORT}" for task in tasks] for job, tasks in names.items()}


NAMES = ["chief-0", "worker-0", "worker-1", "ps-0", "ps-1"]
