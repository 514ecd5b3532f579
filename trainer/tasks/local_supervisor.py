"""The processes of a cluster on this machine, kept as systemd keeps them on hosts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

from trainer.core.failures import FINISHED, STOPPED, USER_ERROR
from trainer.process.children import describe_lack, memory_kills, shell_code
from trainer.process.fork_server import Forked, ForkServer, start_process
from trainer.telemetry.outlets.systemd import LACK, RESTARTS

RESTART_SECONDS, STEADY_SECONDS = 1.0, 5.0
POLL_SECONDS = 0.1
STOP_SECONDS = 60.0  # the coordinator's time to save
LEAVE_SECONDS = 5.0  # the other members' time to end, once the coordinator has stopped
END_SECONDS = 30.0  # the other members' time to end, once the coordinator has finished
EVALUATE_SECONDS = 120.0  # the evaluator's time for the last checkpoint
CRASHED = 1  # what Python ends with after an error that was not caught
PRINTING = threading.Lock()


class Restarts:
    """How often a process was started, and when it is to be started again; time is an argument."""

    def __init__(self) -> None:
        self.starts = 0
        self._started = 0.0
        self._due: float | None = None

    def started(self, now: float) -> None:
        """It was started at this time."""
        self.starts, self._started, self._due = self.starts + 1, now, None

    def plan(self, now: float) -> None:
        """Have it started again: at once, unless it has ended soon after its start."""
        self._due = now if now - self._started >= STEADY_SECONDS else now + RESTART_SECONDS

    def is_due(self, now: float) -> bool:
        """Return whether it is to be started now."""
        return self._due is not None and now >= self._due


class LocalTask:
    """One task's process, started again by the supervisor as systemd would."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        environment: dict[str, str],
        trains: bool = False,
        forks: ForkServer | None = None,
    ) -> None:
        """Take the arguments of its Python, and what forks it, if anything does."""
        self.name = name
        self.trains = trains
        self.process: Forked | subprocess.Popen[str] | None = None
        self.kills, self.lack = 0, ""
        self.code: int | None = None
        self._spawn = partial(start_process, forks, arguments)
        self._environment = environment
        self.restarts = Restarts()
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.code is None

    def start(self) -> None:
        self.code, self.kills = None, memory_kills()
        environment = {**self._environment, RESTARTS: str(self.restarts.starts), LACK: self.lack}
        self.process = self._spawn(environment)
        self.restarts.started(time.monotonic())
        say(self.name, f"started, pid {self.process.pid}")
        self._reader = threading.Thread(target=self._relay, args=(self.process,), daemon=True)
        self._reader.start()

    def _relay(self, process: Forked | subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            say(self.name, line.rstrip("\n"))

    def poll(self) -> int | None:
        """Return the exit code as a shell gives it, once the process has ended."""
        if self.process is not None and self.code is None and (code := self.process.poll()) is not None:
            self.code = shell_code(code)
            self.lack = str(describe_lack(self.code, self.kills))
            if self._reader is not None:
                self._reader.join(timeout=2)
        return self.code

    def send(self, number: int) -> None:
        if self.alive and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class LocalSupervisor:
    """Keeps tasks alive until the training is done or someone asks to stop."""

    def __init__(
        self, tasks: list[LocalTask], forks: ForkServer | None = None, is_done: Callable[[], bool] = lambda: True
    ) -> None:
        """Take the tasks, the coordinator as the last; other tasks that train end with it, in their own time.

        What forks them is waited for. `is_done` says whether the run is finished: a program can end its process as if.
        """
        self._is_done = is_done
        self._tasks = tasks
        self._forks = forks
        self._chief = tasks[-1]
        self._trainers = [task for task in tasks if task.trains or task is self._chief]
        self._stops = 0

    def run(self) -> int:
        """Return the coordinator's exit code; no process is left."""
        with self._signals():
            try:
                while self._forks and not self._forks.ready() and not self._forks.gone():
                    if self._stops:
                        return STOPPED
                    time.sleep(POLL_SECONDS / 5)
                for task in self._tasks:
                    task.start()
                code = self._keep_alive()
                if code == FINISHED:
                    self._wait_for(self._trainers, END_SECONDS)
                    self._wait_for(
                        [task for task in self._tasks if task.name.startswith("evaluator")], EVALUATE_SECONDS
                    )
                return code
            finally:
                self._end_all()

    def _keep_alive(self) -> int:
        stop_by, left = None, False
        while True:
            now = time.monotonic()
            if self._stops and stop_by is None:
                say("local", f"stopping: {'the coordinator saves' if len(self._trainers) == 1 else 'all save'} first")
                # One of several members would do: all of them agree to stop after the next block.
                for task in self._trainers:
                    task.send(signal.SIGTERM)
                stop_by = now + STOP_SECONDS
            for task in self._tasks:
                if task.restarts.is_due(now) and stop_by is None:
                    task.start()
                elif task.alive and (code := self._end_of(task)) is not None:
                    if stop_by is None and self._ends_all(task, code):
                        return code
                    after = "" if final(code) or stop_by else "; starting it again"
                    lack = f", {task.lack}" if task.lack else ""
                    say(task.name, f"ended with {code}{lack}{after}")
                    if not final(code):
                        task.restarts.plan(time.monotonic())
            if stop_by is not None and not self._chief.alive and not left:
                # Tasks that still run wait for a coordinator that was stopped before the training began.
                stop_by, left = min(stop_by, now + LEAVE_SECONDS), True
            stopped = not any(task.alive for task in self._trainers)
            if stop_by is not None and (stopped or now > stop_by or self._stops > 1):
                return STOPPED if self._chief.code is None else self._chief.code
            time.sleep(POLL_SECONDS)

    def _end_of(self, task: LocalTask) -> int | None:
        """Return a task's exit code once it has ended: CRASHED for a coordinator that left with 0, unfinished."""
        code = task.poll()
        if task is self._chief and code == FINISHED and not self._is_done():
            say(task.name, "ended with 0 before the run was finished: does the program call os._exit?")
            task.code = code = CRASHED
        return code

    def _ends_all(self, task: LocalTask, code: int) -> bool:
        """Return whether the others have nothing left to do: for a member that trains they would wait for ever."""
        return (task is self._chief and final(code)) or (task in self._trainers and code == USER_ERROR)

    def _wait_for(self, tasks: list[LocalTask], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for task in tasks:
            while task.poll() is None and task.alive and time.monotonic() < deadline and not self._stops:
                time.sleep(POLL_SECONDS)

    def _end_all(self) -> None:
        for task in self._tasks:
            if task.poll() is None:
                task.send(signal.SIGKILL if task in self._trainers else signal.SIGTERM)
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
    with PRINTING:  # print() writes a line and its end apart, and each task has a thread
        print(f"{task:<11} | {line}", flush=True)
