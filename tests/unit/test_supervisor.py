"""The supervisor of one task, with small functions in place of TensorFlow's import and of the task."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)
MINUTE = 60.0
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trainer import supervisor
from trainer.reporting.logs import set_up_logging
from trainer.reporting.notify import Notifier

set_up_logging(journal=True)
supervisor.warm_up = lambda: None
supervisor.why_unsafe = lambda: ""
here = Path(sys.argv[1])
fresh, release, wait = [], None, None

def count():
    "Return how many processes of the task there were before this one."
    with (here / "starts").open("a+") as starts:
        starts.write(f"{os.getpid()}\\n")
    return len((here / "starts").read_text().split()) - 1
"""
TAIL = """
notifier = Notifier.from_environment(os.environ)
sys.exit(supervisor.Supervisor("worker-0", task, fresh, notifier, release, wait).run())
"""
FOREVER = "\n    while True: time.sleep(0.01)"
Start = Callable[..., "Supervised"]


class Supervised:
    """A supervisor in a process of its own, and what systemd would hear of it."""

    def __init__(self, directory: Path, body: str, watchdog: float | None = None) -> None:
        self._directory = directory
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(str(directory / "notify"))
        self.heard: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        environment = {key: value for key, value in os.environ.items() if key != "WATCHDOG_USEC"}
        environment["NOTIFY_SOCKET"] = str(directory / "notify")
        if watchdog:
            environment["WATCHDOG_USEC"] = f"{watchdog * 1e6:.0f}"
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", HEAD + body + TAIL, str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pids(self) -> list[int]:
        """The task's processes, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in (self._directory / "starts").read_text().split()]
        return []

    def child(self, number: int = 0) -> int:
        """Wait for the process of this number, and return its pid."""
        until(lambda: len(self.pids) > number)
        return self.pids[number]

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.heard.append(self.systemd.recv(1000).decode())

    def wait(self) -> tuple[int, str]:
        """Return the exit code and what was logged; no process of the task is left."""
        _, logged = self.process.communicate(timeout=MINUTE)
        until(lambda: all(map(gone, self.pids)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:  # what was sent before it is read before it
            last.sendto(b"last", str(self._directory / "notify"))
        until(lambda: self.heard[-1:] == ["last"])
        self.heard.pop()
        return self.process.returncode, logged

    def end(self) -> None:
        """Leave no process, whatever the supervisor has failed to do."""
        self.process.kill()
        self.process.wait()
        for pid in self.pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if str(self._directory) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        self.systemd.close()


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + MINUTE
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in a minute"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Return whether a process has ended, though nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def begin(body: str, watchdog: float | None = None) -> Supervised:
        started.append(Supervised(tmp_path, body, watchdog))
        return started[-1]

    yield begin
    for supervised in started:
        supervised.end()


@pytest.mark.parametrize("code", [0, 78, 143])
def test_a_task_that_is_done_takes_its_supervisor_with_it(start: Start, code: int) -> None:
    supervised = start(f"def task(notifier):\n    count()\n    return {code}")
    assert supervised.wait()[0] == code
    assert len(supervised.pids) == 1


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("return 75", "75"),
        ("return 1", "1"),
        ("sys.exit(75)", "75"),
        ("raise ValueError('a fault of the task')", "1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "137 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "139 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "143 (SIGTERM)"),
    ],
)
def test_any_other_end_is_followed_by_the_next_process(start: Start, end: str, said: str) -> None:
    supervised = start(
        f"def task(notifier):\n    if count() == 2: return 0\n    notifier.ready('up')\n    time.sleep(0.05)\n    {end}"
    )
    code, logged = supervised.wait()
    assert (code, len(set(supervised.pids))) == (0, 3)
    assert logged.count(f"worker-0 ended with {said}: starting the next\n") == 2


def test_a_process_that_was_not_ready_is_followed_after_a_pause(start: Start) -> None:
    supervised = start(
        "supervisor.PAUSE_SECONDS = 0.7\n"
        "def task(notifier):\n    count()\n    print(time.monotonic(), file=sys.stderr)\n"
        "    return 0 if count() == 5 else 75"
    )
    code, logged = supervised.wait()
    times = [float(line) for line in logged.splitlines() if line.replace(".", "").isdigit()]
    assert code == 0
    assert len(times) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.7


SAVES = """
def task(notifier):
    def stop(number, frame):
        print("saved", file=sys.stderr)
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    notifier.ready("up")
    count()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_task_which_may_save(start: Start, number: int) -> None:
    supervised = start(SAVES + FOREVER)
    supervised.child()
    supervised.process.send_signal(number)
    assert supervised.wait() == (143, "saved\n")


@pytest.mark.parametrize(("end", "code"), [("SIG_DFL", -signal.SIGTERM), ("lambda *_: os._exit(75)", 75)])
def test_no_process_follows_a_stop(start: Start, end: str, code: int) -> None:
    end = f"signal.{end}" if end == "SIG_DFL" else end
    supervised = start(f"def task(notifier):\n    signal.signal(signal.SIGTERM, {end})\n    count()" + FOREVER)
    supervised.child()
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait()[0] == code
    assert len(supervised.pids) == 1


def test_a_stop_ends_the_pause_between_two_processes(start: Start) -> None:
    supervised = start("supervisor.PAUSE_SECONDS = 3600\ndef task(notifier):\n    count()\n    return 75")
    assert supervised.process.stderr is not None
    assert supervised.process.stderr.readline() == "worker-0 ended with 75: starting the next\n"
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait()[0] == 143
    assert len(supervised.pids) == 1


def test_a_stop_at_any_moment_leaves_no_process(tmp_path: Path) -> None:
    """The task ends as soon as it is ready, so that the supervisor is mostly in the middle of a fork."""
    body = "def task(notifier):\n    notifier.ready('up')\n    count()\n    return 75"
    for number in range(12):
        directory = tmp_path / str(number)
        directory.mkdir()
        supervised = Supervised(directory, body)
        try:
            supervised.child(3)
            time.sleep(random.random() / 20)
            supervised.process.send_signal(signal.SIGTERM)
            code, _ = supervised.wait()
        finally:
            supervised.end()
        assert code in (75, 143, -signal.SIGTERM)


def test_a_process_that_is_killed_as_it_is_forked_is_followed_by_the_next(start: Start) -> None:
    supervised = start(
        "supervisor.PAUSE_SECONDS = 0\ndef task(notifier):\n    count()\n    notifier.ready('up')" + FOREVER
    )
    parent, killed = supervised.process.pid, set[int]()
    children = Path(f"/proc/{parent}/task/{parent}/children")
    deadline = time.monotonic() + MINUTE
    while len(killed) < 30 and supervised.process.poll() is None and time.monotonic() < deadline:
        for pid in set(map(int, children.read_text().split())) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    until(lambda: set(supervised.pids) - killed)
    supervised.process.send_signal(signal.SIGTERM)
    code, logged = supervised.wait()
    assert (code, len(killed)) == (-signal.SIGTERM, 30)
    assert logged.count("ended with 137 (SIGKILL): starting the next\n") == 30


def test_the_task_dies_with_a_killed_supervisor(start: Start) -> None:
    supervised = start("def task(notifier):\n    count()" + FOREVER)
    pid = supervised.child()
    supervised.process.kill()
    until(lambda: gone(pid))


def test_what_the_task_started_dies_with_it(start: Start) -> None:
    supervised = start(
        "def task(notifier):\n    if count(): return 0\n"
        "    left = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "    with (here / 'starts').open('a') as starts: starts.write(f'{left.pid}\\n')\n"
        "    return 75"
    )
    assert supervised.wait()[0] == 0
    assert len(supervised.pids) == 3


def test_systemd_hears_the_task_and_that_it_lives(start: Start) -> None:
    supervised = start(
        "def task(notifier):\n    number = count()\n    notifier.ready(f'serves {number}')\n"
        "    notifier.watch(lambda: True)\n    notifier.status('works')\n"
        "    if number: time.sleep(2); return 0\n    time.sleep(0.5); return 75",
        watchdog=0.4,
    )
    assert supervised.wait()[0] == 0
    said = supervised.heard
    assert [line for line in said if not line.startswith("WATCHDOG")] == [
        "READY=1\nSTATUS=serves 0",
        "STATUS=works",
        "STATUS=serves 1 (restart 1)",
        "STATUS=works (restart 1)",
    ]
    assert said.count("WATCHDOG=1") >= 3


def test_a_task_that_is_stopped_by_a_signal_is_replaced(start: Start) -> None:
    supervised = start(
        "def task(notifier):\n    notifier.ready('up')\n    notifier.watch(lambda: True)\n    count()" + FOREVER,
        watchdog=3600,
    )
    pid = supervised.child()
    os.kill(pid, signal.SIGSTOP)
    assert supervised.child(1) != pid
    assert gone(pid)
    supervised.process.send_signal(signal.SIGTERM)
    assert "worker-0 is stopped by a signal: killing it" in supervised.wait()[1]


def test_a_task_that_no_longer_says_that_it_lives_is_replaced(start: Start) -> None:
    supervised = start(
        "def task(notifier):\n    began = time.monotonic()\n    notifier.ready('up')\n"
        "    notifier.watch(lambda: time.monotonic() - began < 2)\n"
        "    if count(): return 0" + FOREVER,
        watchdog=1,
    )
    code, logged = supervised.wait()
    assert code == 0
    assert "worker-0 has given no sign of life for 1 s: killing it" in logged


def test_a_task_that_hangs_in_its_start_is_replaced(start: Start) -> None:
    supervised = start("def task(notifier):\n    if count(): return 0\n    time.sleep(3600)", watchdog=1)
    code, logged = supervised.wait()
    assert code == 0
    assert "no sign of life for 1 s, and is not ready: killing it" in logged


def test_a_start_that_works_is_given_time(start: Start) -> None:
    supervised = start(
        "def task(notifier):\n    count()\n    end = time.process_time() + 2\n"
        "    while time.process_time() < end: pass\n    notifier.ready('up')\n    return 0",
        watchdog=1,
    )
    assert supervised.wait()[0] == 0
    assert len(supervised.pids) == 1
    said = supervised.heard
    assert "EXTEND_TIMEOUT_USEC=45000000" in said[: said.index("READY=1\nSTATUS=up")]


@pytest.mark.parametrize(("works", "asks"), [("time.process_time() < 1.5", True), ("time.monotonic() < end", False)])
def test_an_import_asks_for_time_only_while_it_works(start: Start, works: str, asks: bool) -> None:
    pause = "pass" if asks else "time.sleep(0.3)"
    supervised = start(
        f"def warm():\n    end = time.monotonic() + 1.5\n    while {works}: {pause}\n"
        "supervised = supervisor.warm_up = warm\n"
        "def task(notifier): return 0",
        watchdog=30,
    )
    assert supervised.wait()[0] == 0
    assert ("EXTEND_TIMEOUT_USEC=45000000" in supervised.heard) is asks


def test_what_a_fork_can_not_mend_is_left_to_systemd(start: Start) -> None:
    supervised = start("def task(notifier):\n    count()\n    notifier.restart_unit()\n    return 75")
    assert supervised.wait()[0] == 75
    assert len(supervised.pids) == 1


def test_another_release_is_started_by_systemd(start: Start, tmp_path: Path) -> None:
    for release in ("one", "two"):
        (tmp_path / release).mkdir()
    link = tmp_path / "current"
    link.symlink_to("one")
    supervised = start(
        "release = here / 'current'\ndef task(notifier):\n    count()\n    notifier.ready('up')\n"
        "    while not (here / 'go').exists(): time.sleep(0.01)\n    return 75"
    )
    supervised.child()
    link.unlink()
    link.symlink_to("two")
    (tmp_path / "go").touch()
    code, logged = supervised.wait()
    assert (code, len(supervised.pids)) == (75, 1)
    assert "there is another release: leaving it to systemd" in logged


def test_a_fresh_process_is_started_where_a_fork_would_be_unsafe(start: Start, tmp_path: Path) -> None:
    fresh = (
        "import os, sys\nfrom trainer.reporting.notify import Notifier\n"
        "Notifier.from_environment(os.environ).ready(' '.join(sys.argv[1:]))\nsys.exit(78)"
    )
    supervised = start(
        f"supervisor.why_unsafe = lambda: 'it has 2 threads'\nfresh = [sys.executable, '-c', {fresh!r}]\n"
        "def task(notifier): return 0"
    )
    code, logged = supervised.wait()
    assert code == 78
    assert "worker-0 is started as a fresh process, since this one can't fork: it has 2 threads\n" in logged
    assert supervised.heard == [f"READY=1\nSTATUS=--parent {supervised.process.pid}"]


WAITS = """
supervisor.warm_up = lambda: print("imports", file=sys.stderr)
def wait(notifier):
    number = count()
    notifier.ready(f"waits {number}")
    if number == 1: sys.exit(END)
    sys.exit(75)
def task(notifier):
    notifier.status(f"works {count()}")
    return 0
"""


@pytest.mark.parametrize(("end", "code", "works"), [("supervisor.NEEDED", 0, True), ("0", 0, False), ("78", 78, False)])
def test_tensorflow_is_imported_once_a_waiting_task_needs_it(start: Start, end: str, code: int, works: bool) -> None:
    supervised = start(WAITS.replace("END", end))
    found, logged = supervised.wait()
    assert (found, logged.count("imports")) == (code, works)
    waited = ["READY=1\nSTATUS=waits 0", "STATUS=waits 1 (restart 1)"]
    assert supervised.heard == waited + ["STATUS=works 2 (restart 1)"] * works


def test_an_import_that_works_answers_for_a_unit_that_is_up(start: Start) -> None:
    supervised = start(
        "def warm():\n    end = time.process_time() + 2\n    while time.process_time() < end: pass\n"
        "supervisor.warm_up = warm\n"
        "def wait(notifier):\n    notifier.ready('waits')\n    return supervisor.NEEDED\n"
        "def task(notifier): return 0",
        watchdog=30,
    )
    assert supervised.wait()[0] == 0
    assert supervised.heard.count("WATCHDOG=1") >= 3


def test_a_stop_while_a_task_waits_is_followed_by_no_import(start: Start) -> None:
    supervised = start(
        "supervisor.warm_up = lambda: print('imports', file=sys.stderr)\ndef wait(notifier):\n    count()"
        + FOREVER
        + "\ntask = None"
    )
    supervised.child()
    supervised.process.send_signal(signal.SIGTERM)
    code, logged = supervised.wait()
    assert (code, logged) == (-signal.SIGTERM, "")
