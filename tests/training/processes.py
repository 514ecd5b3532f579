"""Real trainer processes on the loopback interface, watched through what an operator sees: output and status.

`Runs.start` starts what a user types. Single tasks, the tasks of `local` and the scripts beside the tests are forked
from one process of the whole session that has imported TensorFlow (forks.py), which saves most of their time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.process.fork_server import PARENT, Forked, ForkServer, start_process
from trainer.run.directory import RunDirectory
from trainer.tasks.local import FORK_SERVER

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
DIGITS = "trainer.examples.digits:Digits"
MINUTE = 60.0
STEPS_OF_A_ROUND = os.environ.get("STEPS_OF_A_ROUND", "1")  # in the tests' own process and in checks (forks.py)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TF_", "TRAINER_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "TF_USE_LEGACY_KERAS": "1", **more}


def until(holds: Callable[[], Any], what: str, deadline: float = 2 * MINUTE, say: Callable[[], str] = str) -> Any:
    """Poll until the condition holds, and return what it returned."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {deadline:.0f} s: {what}\n{say()}")


@functools.cache
def fork_server(steps_of_a_round: str = "2") -> ForkServer:
    """Start the session's server of processes that train in such rounds; it ends with the tests."""
    server = ForkServer(Path(tempfile.mkdtemp(prefix="psfleet-tests-")) / "forks")
    command = [sys.executable, "-u", str(Path(__file__).with_name("forks.py")), str(server.path), str(os.getpid())]
    subprocess.Popen(command, env=environment(STEPS_OF_A_ROUND=steps_of_a_round), process_group=0)
    atexit.register(shutil.rmtree, server.path.parent)
    assert server.wait(3 * MINUTE), "the fork server is not ready"
    return server


class Process:
    """A trainer process, its output so far, and its exit code."""

    def __init__(
        self, arguments: list[str], directory: Path = PROGRAMS, forks: ForkServer | None = None, **more: str
    ) -> None:
        self._lines: list[str] = []
        self._process = start_process(forks, arguments, environment(**more), directory)
        assert forks is None or isinstance(self._process, Forked), "the fork server did not fork it"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(iter(self._process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.poll()

    def search(self, pattern: str, deadline: float = 2 * MINUTE) -> re.Match[str]:
        """Wait until a line of the output matches."""

        def found() -> re.Match[str] | None:
            ended = self._process.poll() is not None and not self._reader.is_alive()  # before the output is read
            match = re.search(pattern, self.output, re.MULTILINE)
            if match is None and ended:
                pytest.fail(f"ended with {self._process.returncode} without {pattern!r}:\n{self.output}")
            return match

        return until(found, pattern, deadline, lambda: self.output)

    def wait(self, deadline: float = 3 * MINUTE) -> int:
        until(lambda: self._process.poll() is not None, "the end of the process", deadline, lambda: self.output)
        self._reader.join(timeout=5)
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def children(self) -> list[int]:
        """The processes that it has forked and that live, oldest first."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text(encoding="ascii").split()]

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def pids(self, task: str) -> list[int]:
        """Return the pids that a local cluster's task has had, oldest first."""
        return [int(pid) for pid in re.findall(rf"^{task} *\| started, pid (\d+)$", self.output, re.MULTILINE)]


def last_json(output: str) -> Any:
    """Return what the last line says that begins with an object or a list: TensorFlow may write behind and below it."""
    for line in reversed([line for line in output.splitlines() if line.startswith(("{", "["))]):
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(line)[0]
    raise AssertionError(f"no line is JSON:\n{output[-3000:]}")


def run_check(script: str, *arguments: str, deadline: float = 2 * MINUTE, forked: bool = True, **variables: str) -> Any:
    """Run one of the scripts beside the tests to its end, and return the JSON that it said last.

    `forked` says that it need not import TensorFlow itself.
    """
    forks = fork_server(variables.get("STEPS_OF_A_ROUND", STEPS_OF_A_ROUND)) if forked else None
    command = [str(Path(__file__).with_name(script)), *arguments]
    variables = {"PYTHONPATH": f"{ROOT}:{PROGRAMS}", **variables}
    if forks:
        process = Process(command, PROGRAMS, forks, **variables)
        try:
            assert process.wait(deadline) == 0, process.output[-3000:]
        finally:
            process.end()
        return last_json(process.output)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=PROGRAMS,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=deadline,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class Runs:
    """Starts trainers on one shared path and ends what is left of them."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._started: list[Process] = []

    def local(self, program: str, run: str, steps: int, *more: str, **variables: str) -> Process:
        arguments = ["-m", "trainer", "local", "--program", program, "--run", run, "--steps", str(steps)]
        arguments += [] if "--strategy" in more else ["--ps", "2"]
        variables = {FORK_SERVER: str(fork_server().path), **variables}
        return self.start([*arguments, "--shared-dir", str(self.shared), *more], **variables)

    def start(self, arguments: list[str], directory: Path = PROGRAMS, **more: str) -> Process:
        process = Process(arguments, directory, **more)
        self._started.append(process)
        return process

    def task(self, *arguments: str, directory: Path = PROGRAMS, **more: str) -> Process:
        """Start the process that a task's supervisor forks, with no supervisor: what ends stays ended."""
        process = Process(["-m", "trainer", *arguments, "--parent", PARENT], directory, fork_server(), **more)
        self._started.append(process)
        return process

    def script(self, *arguments: str, **more: str) -> Process:
        """Start a script, a command or a supervisor that need not import TensorFlow itself."""
        process = Process(list(arguments), PROGRAMS, fork_server(), **more)
        self._started.append(process)
        return process

    def directory(self, run: str) -> Path:
        return self.shared / "runs" / run

    def status(self, run: str) -> dict[str, Any]:
        arguments = ["-m", "trainer", "status", "--json", "--run", run, "--shared-dir", str(self.shared)]
        asked = Process(arguments, PROGRAMS, fork_server())
        assert asked.wait() == 0, asked.output
        return last_json(asked.output)

    def checkpoints(self, run: str) -> list[int]:
        return RunDirectory(self.shared, run).catalogue.steps()

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """End what is started within it: a training that no test looks at slows down the tests that come after."""
        before = len(self._started)
        try:
            yield
        finally:
            while len(self._started) > before:
                self._started.pop().end()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
