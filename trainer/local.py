"""A whole cluster as processes of this machine, kept as systemd keeps them on hosts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from trainer.checkpoints import RunDirectory
from trainer.config import TYPES, Config, ConfigError
from trainer.failures import FINISHED, STOPPED, USER_ERROR
from trainer.status import describe, read_status

RESTART_SECONDS = 1.0
POLL_SECONDS = 0.1
STOP_SECONDS = 60.0  # the coordinator's time to save
EVALUATE_SECONDS = 120.0  # the evaluator's time for the last checkpoint


def add_local_options(parser: argparse.ArgumentParser) -> None:
    """Add the size of the cluster and one option for every run setting."""
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers (default: 2)")
    parser.add_argument("--ps", type=int, default=1, metavar="N", help="parameter servers (default: 1)")
    parser.add_argument(
        "--evaluator", action=argparse.BooleanOptionalAction, default=True, help="evaluate each checkpoint beside it"
    )
    for field in dataclasses.fields(Config):
        default = "./psfleet-runs" if field.name == "shared_dir" else field.default
        shown = "" if default is dataclasses.MISSING else f" (default: {default})"
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            required=default is dataclasses.MISSING,
            default=argparse.SUPPRESS if field.name != "shared_dir" else default,
            type=lambda text, key=field.name: setting(key, text),  # type: ignore[misc]
            metavar=field.name.upper(),
            help=f"see docs/run-settings.md{shown}",
        )


def setting(key: str, text: str) -> Any:
    """Turn an option's text into the setting's type; Config checks the rest."""
    kinds = get_args(TYPES[key]) or (TYPES[key],)
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def run_local(options: argparse.Namespace) -> int:
    """Start the tasks, keep them alive and return the coordinator's exit code."""
    if options.workers < 1 or options.ps < 1:
        raise ConfigError("--workers and --ps must be at least 1")
    keys = {field.name for field in dataclasses.fields(Config)}
    settings = {key: value for key, value in vars(options).items() if key in keys}
    settings["shared_dir"] = str(Path(settings["shared_dir"]).absolute())
    config = Config.from_dict(settings)
    with tempfile.TemporaryDirectory(prefix="psfleet-") as directory:
        path = Path(directory) / "run.json"
        path.write_text(json.dumps(config.as_dict()), encoding="utf-8")
        tasks = make_tasks(config, path, local_cluster(options.workers, options.ps), options.evaluator)
        code = Supervisor(tasks).run()
    print(describe(read_status(RunDirectory(config.shared_dir, config.run), config.program, config.steps)))
    return code


def local_cluster(workers: int, servers: int) -> dict[str, list[str]]:
    """Return a cluster on free ports of the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(1 + workers + servers)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets]
    return {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}


class Task:
    """One task's process, started again by the supervisor as systemd would."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.process: subprocess.Popen[str] | None = None
        self.code: int | None = None
        self.restart_at: float | None = None
        self._command = command
        self._environment = environment
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.code is None

    def start(self) -> None:
        self.code = self.restart_at = None
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the supervisor, which ends the tasks in order
        )
        say(self.name, f"started, pid {self.process.pid}")
        self._reader = threading.Thread(target=self._relay, args=(self.process,), daemon=True)
        self._reader.start()

    def _relay(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            say(self.name, line.rstrip("\n"))

    def poll(self) -> int | None:
        """Return the exit code as a shell gives it, once the process has ended."""
        if self.process is not None and self.code is None and (code := self.process.poll()) is not None:
            self.code = code if code >= 0 else 128 - code
            if self._reader is not None:
                self._reader.join(timeout=2)
        return self.code

    def send(self, number: int) -> None:
        if self.alive and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def make_tasks(config: Config, settings: Path, jobs: dict[str, list[str]], evaluator: bool) -> list[Task]:
    """Return the tasks with the same environment that Ansible renders for hosts; the coordinator is the last."""
    names = [(job, index) for job in ("ps", "worker") for index in range(len(jobs[job]))]
    names += [("evaluator", 0)] if evaluator else []
    names.append(("chief", 0))
    command = [sys.executable, "-u", "-m", "trainer", "--parent", str(os.getpid())]
    # Said on the command line, so that a selection made on a shared path of real hosts does not count here.
    command += ["--run", config.run, "--program", config.program]
    tasks = []
    for job, index in names:
        tf_config = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
        environment = {**os.environ, "TF_CONFIG": tf_config, "TRAINER_SETTINGS": str(settings)}
        for inherited in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
            environment.pop(inherited, None)
        tasks.append(Task(f"{job}-{index}", command, environment))
    return tasks


class Supervisor:
    """Keeps tasks alive until the coordinator is done or someone asks to stop."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._chief = tasks[-1]
        self._stops = 0

    def run(self) -> int:
        """Return the coordinator's exit code; no process is left."""
        with self._signals():
            try:
                for task in self._tasks:
                    task.start()
                self._keep_alive()
                if self._chief.code == FINISHED:
                    self._wait_for_evaluator()
                return self._chief.code if self._chief.code is not None else STOPPED
            finally:
                self._end_all()

    def _keep_alive(self) -> None:
        stop_by = None
        while True:
            now = time.monotonic()
            if self._stops and stop_by is None:
                say("local", "stopping: the coordinator saves first")
                self._chief.send(signal.SIGTERM)
                stop_by = now + STOP_SECONDS
            if stop_by is not None and (not self._chief.alive or now > stop_by or self._stops > 1):
                self._chief.poll()
                return
            for task in self._tasks:
                if task.restart_at is not None and now >= task.restart_at and stop_by is None:
                    task.start()
                elif task.alive and (code := task.poll()) is not None:
                    if task is self._chief and (final(code) or stop_by is not None):
                        return
                    say(task.name, f"ended with {code}" + ("" if final(code) else "; starting it again"))
                    task.restart_at = None if final(code) else now + RESTART_SECONDS
            time.sleep(POLL_SECONDS)

    def _wait_for_evaluator(self) -> None:
        deadline = time.monotonic() + EVALUATE_SECONDS
        for task in self._tasks:
            if task.name.startswith("evaluator"):
                while task.poll() is None and task.alive and time.monotonic() < deadline and not self._stops:
                    time.sleep(POLL_SECONDS)

    def _end_all(self) -> None:
        for task in self._tasks:
            if task.poll() is None:
                task.send(signal.SIGTERM if task is not self._chief else signal.SIGKILL)
        deadline = time.monotonic() + 5
        for task in self._tasks:
            while task.alive and task.poll() is None:
                if time.monotonic() > deadline:
                    task.send(signal.SIGKILL)
                time.sleep(POLL_SECONDS / 5)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stops += 1

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def final(code: int) -> bool:
    """Return whether systemd's RestartPreventExitStatus would leave it at this exit code."""
    return code in (FINISHED, USER_ERROR)


def say(task: str, line: str) -> None:
    print(f"{task:<11} | {line}", flush=True)


def die_with_parent(parent: int) -> None:
    """End this process when the supervisor dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(STOPPED)
