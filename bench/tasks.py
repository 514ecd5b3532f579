"""Tasks of a cluster on this machine: servers that stay, and coordinators that come and go."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.cluster.spec import SERVICE_JOBS, ClusterConfig
from trainer.core.runtime import ENVIRONMENT, PS_ENVIRONMENT
from trainer.process.warm_start import die_with_parent
from trainer.tasks.local import local_cluster

ROOT = Path(__file__).resolve().parents[1]
TRAINER, PLAIN_SERVER = ("-m", "trainer"), ("-m", "bench.plain_server")
DEADLINE = 180.0  # for any one thing that is waited for
POLL_SECONDS = 0.1


class TaskProcess:
    """A process whose output goes to a file, ended with the bench."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str], under: tuple[str, ...] = ()
    ) -> None:
        """Start Python with this command; `under` is a command that is given it and becomes it."""
        self.name = name
        self.log = log
        with log.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-u", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=clean_environment(**environment),
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    @property
    def pid(self) -> int:
        """The process that does the work: the child of psfleet's supervisor, where it has one by now."""
        return self.pids[-1]

    @property
    def pids(self) -> list[int]:
        """The process that was started, and its child."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        except FileNotFoundError:
            children = []
        return [pid, *map(int, children[:1])]

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def says(self, text: str) -> bool:
        return text in self.output()

    def until(self, holds: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
        """Poll until the condition holds and return what it returned; shows the log when the task ends before."""
        end = time.monotonic() + deadline
        while not (found := holds()):
            ended = self.process.poll()
            if ended is not None or time.monotonic() > end:
                why = f"ended with {ended}" if ended is not None else f"took more than {deadline:.0f} s"
                sys.exit(f"bench: {self.name} {why} before {what}:\n{self.output()[-4000:]}")
            time.sleep(POLL_SECONDS)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class LocalCluster:
    """A chief's address, ps, workers and data workers on free ports; the servers are psfleet's own tasks.

    `path` is where the tasks find psfleet before they look in this checkout.
    """

    def __init__(self, workers: int, servers: int, directory: Path, data: int = 0, path: str = "") -> None:
        self._directory = directory
        search = os.pathsep.join([path, str(ROOT)])
        # Else Python looks in the directory where the bench was started first.
        self._path = {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"} if path else {}
        self._jobs = local_cluster(workers, servers, data)
        self.workers = workers
        self.tasks: list[TaskProcess] = []

    @contextlib.contextmanager
    def serving(self, settings: str = "", command: tuple[str, ...] = TRAINER) -> Iterator[LocalCluster]:
        """Start the servers, by default psfleet's, and wait until they answer; end everything afterwards.

        A data service needs `settings`.
        """
        try:
            jobs = [(job, index) for job in (*SERVICE_JOBS, "ps", "worker") for index in range(self._size(job))]
            servers = [self.start(job, index, command, settings) for job, index in jobs]
            for server in servers:
                server.until(partial(server.says, " serves at "), "it served")
            yield self
        finally:
            for task in reversed(self.tasks):
                task.end()

    def spec(self, job: str) -> dict[str, list[str]]:
        """Return the addresses of a job's tasks, as a client of theirs takes them; none where it has no task."""
        return {job: list(self._jobs.get(job, []))}

    def _size(self, job: str) -> int:
        return len(self._jobs.get(job, []))

    def start(
        self,
        job: str,
        index: int,
        command: tuple[str, ...] = TRAINER,
        settings: str = "",
        workers: int | None = None,
        **more: str,
    ) -> TaskProcess:
        """Start a task, by default psfleet's; `settings` is the path of its run settings.

        With `workers` it knows of so many workers alone. `more` is added to its environment.
        """
        jobs = self._jobs if workers is None else {**self._jobs, "worker": self._jobs["worker"][:workers]}
        config = ClusterConfig.checked(jobs, job, index).as_tf_config()
        log = self._directory / f"{job}-{index}-{len(self.tasks)}.log"
        if job == "ps" and command == TRAINER:
            more = {**PS_ENVIRONMENT, **more}
        more = {**self._path, **more, **({"TRAINER_SETTINGS": settings} if settings else {})}
        task = TaskProcess(f"{job}-{index}", list(command), log, {"TF_CONFIG": config, **more})
        self.tasks.append(task)
        return task


def write_settings(shared_dir: Path, run: str, program: str, **more: Any) -> str:
    """Write the run settings of a training, beside its shared path; returns the file's path."""
    path = shared_dir / f"{run}.json"
    settings = {"program": program, "run": run, "shared_dir": str(shared_dir), **more}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return str(path)


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment that every side gets: nothing of TensorFlow's but what psfleet sets on hosts."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TF_", "TRAINER_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1", **ENVIRONMENT, **more}


def processor_seconds(pid: int) -> float:
    """Of a process with all its threads; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
