"""The supervisor of one task, with small functions in place of TensorFlow's import and of the task."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from trainer.process.fork_server import Forked, ForkServer

pytestmark = pytest.mark.timeout(120)
MINUTE = 60.0
HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from trainer.process import parking, supervisor
from trainer.telemetry.logs import set_up_logging
from trainer.telemetry.outlets.systemd import Notifier

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
set_up_logging(journal=True)
supervisor.warm_up = lambda: None
supervisor.why_unsafe = lambda: ""
here = Path(sys.argv[1])
fresh, release, wait, park_file, fork_socket = [], None, None, None, None

def count():
    "Return how many processes of the task there were before this one."
    with (here / "starts").open("a+") as starts:
        starts.write(f"{os.getpid()}\\n")
    return len((here / "starts").read_text().split()) - 1
"""
TAIL = """
notifier = Notifier.from_environment(os.environ)
task = supervisor.SupervisedTask("worker-0", task, fresh, wait)
sys.exit(supervisor.Supervisor(task, notifier, release, park_file, fork_socket).run())
"""
FOREVER = "\n    while True: time.sleep(0.01)"
Start = Callable[..., "Supervised"]


class Supervised:
    """A supervisor in a process of its own, and what systemd would hear of it."""

    def __init__(self, directory: Path, body: str, watchdog: float | None = None) -> None:
        self.directory = directory
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
            return [int(pid) for pid in (self.directory / "starts").read_text().split()]
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
            last.sendto(b"last", str(self.directory / "notify"))
        until(lambda: self.heard[-1:] == ["last"])
        self.heard.pop()
        return self.process.returncode, logged

    def end(self) -> None:
        """Leave no process, whatever the supervisor has failed to do."""
        self.process.kill()
        self.process.wait()
        for pid in self.pids:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if str(self.directory) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        self.systemd.close()


def gone(pid: int) -> bool:
    """Return whether a process has ended, though its exit code may not have been asked for yet."""
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
    ("end", "reason"),
    [
        ("return 75", "75"),
        ("return 1", "1"),
        ("sys.exit(75)", "75"),
        ("raise ValueError('a fault of the task')", "1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "137 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "139 (SIGSEGV)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "143 (SIGTERM)"),
        ("os._exit(0)", "0 before its task was over (does the program call os._exit?)"),
    ],
)
def test_any_other_end_is_followed_by_the_next_process(start: Start, end: str, reason: str) -> None:
    supervised = start(
        f"def task(notifier):\n    if count() == 2: return 0\n    notifier.ready('up')\n    time.sleep(0.05)\n    {end}"
    )
    code, logged = supervised.wait()
    assert (code, len(set(supervised.pids))) == (0, 3)
    assert logged.count(f"worker-0 ended with {reason}: starting the next\n") == 2


@pytest.mark.parametrize(("end", "crash"), [("SIGSEGV", "SIGSEGV"), ("SIGABRT", "SIGABRT"), ("SIGKILL", "")])
def test_the_next_process_hears_of_a_crash_in_native_code(start: Start, end: str, crash: str) -> None:
    supervised = start(
        "def task(notifier):\n    print(f'before: {notifier.crash}.', file=sys.stderr)\n"
        f"    if count() == 1: return 0\n    notifier.ready('up')\n    os.kill(os.getpid(), signal.{end})"
    )
    code, logged = supervised.wait()
    assert (code, re.findall("before: (.*)[.]", logged)) == (0, ["", crash])


def test_the_next_process_hears_that_memory_ran_out_and_systemd_shows_it(start: Start) -> None:
    supervised = start(
        "from trainer.process import children\nchildren.memory_kills = lambda: 10**9\n"
        "def task(notifier):\n    print(f'before: {notifier.lack}.', file=sys.stderr)\n    notifier.ready('up')\n"
        "    if count() == 1: return 0\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    code, logged = supervised.wait()
    before = re.findall("before: (.*)[.]", logged)
    assert (code, before[0]) == (0, "")
    assert re.fullmatch(r"out of memory, limit \d+[.]\d GiB: .*shuffle.*batches.*more ps.*trainer_limits", before[1])
    assert f"worker-0 ended with 137 (SIGKILL), {before[1]}: starting the next\n" in logged
    assert supervised.heard == ["READY=1\nSTATUS=up", f"STATUS=up ({before[1].partition(':')[0]}; restart 1)"]


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


def test_a_supervisor_that_finds_no_room_for_a_process_lives_and_tries_again(start: Start) -> None:
    supervised = start(
        """
def full(run):
    count()
    raise OSError(11, "Resource temporarily unavailable")

supervisor.fork = full
task = None
""",
        watchdog=2.0,
    )
    supervised.child(3)
    until(lambda: supervised.heard.count("WATCHDOG=1") >= 3)
    supervised.process.send_signal(signal.SIGTERM)
    code, logged = supervised.process.wait(MINUTE), supervised.process.stderr
    assert code == 143
    assert logged is not None
    assert "cannot start worker-0: Resource temporarily unavailable" in logged.read()


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
    messages = supervised.heard
    assert [line for line in messages if not line.startswith("WATCHDOG")] == [
        "READY=1\nSTATUS=serves 0",
        "STATUS=works",
        "STATUS=serves 1 (restart 1)",
        "STATUS=works (restart 1)",
    ]
    assert messages.count("WATCHDOG=1") >= 3


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


def test_a_task_that_was_frozen_with_its_supervisor_lives_on(start: Start) -> None:
    """As a machine is that its hypervisor stops for a while: the supervisor could hear nothing."""
    supervised = start(
        "def task(notifier):\n    notifier.ready('up')\n    notifier.watch(lambda: True)\n    count()" + FOREVER,
        watchdog=2,
    )
    both = supervised.child(), supervised.process.pid
    until(lambda: supervised.heard.count("WATCHDOG=1") >= 2)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in both:
            os.kill(pid, number)
        time.sleep(3 if number == signal.SIGSTOP else 1)
    supervised.process.send_signal(signal.SIGTERM)
    logged = supervised.wait()[1]
    assert (len(supervised.pids), "killing it" in logged) == (1, False)


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
    messages = supervised.heard
    assert "EXTEND_TIMEOUT_USEC=45000000" in messages[: messages.index("READY=1\nSTATUS=up")]


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


def test_what_a_fork_can_not_fix_is_left_to_systemd(start: Start) -> None:
    supervised = start("def task(notifier):\n    count()\n    notifier.restart_unit()\n    return 75")
    assert supervised.wait()[0] == 75
    assert len(supervised.pids) == 1


RELEASED = """
release = here / "current"
os.chdir(release)
from trainer.process.warm_start import import_from
import_from([os.getcwd(), *sys.path])
def stop(number, frame):
    print("saved", file=sys.stderr)
    sys.exit(143)
def task(notifier):
    signal.signal(signal.SIGTERM, stop)
    import program
    number = count()
    notifier.ready(f"{Path.cwd().name} {program.NAME} {number}")
    notifier.watch(lambda: True)
    while not (here / f"go{number}").exists(): time.sleep(0.01)
    return 75
"""


@pytest.fixture
def releases(tmp_path: Path) -> Callable[[str], None]:
    """Releases of one kit, and of two others; the function returned makes one current."""

    def switch(release: str) -> None:
        (tmp_path / "new").symlink_to(release)
        (tmp_path / "new").rename(tmp_path / "current")

    made = {"one": ("kit", "env"), "two": ("kit", "env"), "kit": ("another", "env"), "env": ("kit", "another")}
    for name, (kit, environment) in made.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "program.py").write_text(f"NAME = {name!r}\n")
        sums = f"# psfleet release {name}\n{name:0<64}  program.py\n{kit:0<64}  trainer/__main__.py\n"
        (tmp_path / name / "SHA256SUMS").write_text(sums)
        (tmp_path / name / "env").symlink_to(f"../../envs/{environment}")
    switch("one")
    return switch


@pytest.mark.parametrize("other", ["kit", "env"])
def test_another_kit_or_environment_is_started_by_systemd(
    start: Start, tmp_path: Path, releases: Callable[[str], None], other: str
) -> None:
    supervised = start(RELEASED)
    supervised.child()
    releases(other)
    (tmp_path / "go0").touch()
    code, logged = supervised.wait()
    assert (code, len(supervised.pids)) == (75, 1)
    assert "needs another kit or environment: leaving it to systemd" in logged


def test_a_task_whose_own_temporary_files_were_removed_gets_others_from_systemd(
    start: Start, tmp_path: Path, releases: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    supervised = start(RELEASED)
    supervised.child()
    (tmp_path / "own").rmdir()
    (tmp_path / "go0").touch()
    code, logged = supervised.wait()
    assert (code, len(supervised.pids)) == (75, 1)
    assert f"{tmp_path / 'own'} of this unit was removed: leaving it to systemd" in logged


def shut(supervised: Supervised) -> None:
    """Read no more of what a supervisor prints."""
    assert supervised.process.stderr
    supervised.process.stderr.close()


def test_a_task_whose_journal_was_stopped_gets_another_from_systemd(
    start: Start, tmp_path: Path, releases: Callable[[str], None]
) -> None:
    supervised = start(RELEASED)
    supervised.child()
    shut(supervised)
    (tmp_path / "go0").touch()
    assert supervised.process.wait(MINUTE) == 75
    assert len(supervised.pids) == 1


def test_a_task_whose_output_nothing_reads_is_followed_by_the_next(start: Start, tmp_path: Path) -> None:
    supervised = start(
        "def task(notifier):\n    number = count()\n    while not (here / 'go').exists(): time.sleep(0.01)\n"
        "    return 0 if number else 75"
    )
    supervised.child()
    shut(supervised)
    (tmp_path / "go").touch()
    assert supervised.process.wait(MINUTE) == 0
    assert len(supervised.pids) == 2


def test_a_release_of_the_same_kit_is_where_the_next_process_works(
    start: Start, tmp_path: Path, releases: Callable[[str], None]
) -> None:
    supervised = start(RELEASED)
    for number, name in enumerate(("two", "one")):
        supervised.child(number)
        releases(name)
        (tmp_path / f"go{number}").touch()
    until(lambda: sum("STATUS" in line for line in supervised.heard) == 3)
    supervised.process.terminate()
    code, logged = supervised.wait()
    assert code == 143
    assert [line for line in supervised.heard if "STATUS" in line] == [
        "READY=1\nSTATUS=one one 0",
        "STATUS=two two 1 (restart 1)",
        "STATUS=one one 2 (restart 2)",
    ]
    assert "worker-0 goes on with release two" in logged


def parked(supervised: Supervised) -> bool:
    """Return whether the last line of its status says so."""
    states = [line for line in supervised.heard if "STATUS=" in line]
    return bool(states) and "STATUS=parked" in states[-1]


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_parked_task_goes_on_in_the_release_that_is_current_then(
    start: Start, releases: Callable[[str], None], name: str
) -> None:
    supervised = start(RELEASED, watchdog=0.4)
    first = supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    assert gone(first)
    supervised.process.send_signal(signal.SIGHUP)  # again is nothing new
    heard = len(supervised.heard)
    until(lambda: supervised.heard[heard:].count("WATCHDOG=1") >= 3)
    assert len(supervised.pids) == 1
    releases(name)
    supervised.process.send_signal(signal.SIGUSR1)
    supervised.child(1)
    until(lambda: f"STATUS={name} {name} 1" in supervised.heard)  # without a count of restarts
    supervised.process.send_signal(signal.SIGUSR1)  # who is not parked goes on anyway
    supervised.process.terminate()
    code, logged = supervised.wait()
    assert (code, len(supervised.pids)) == (143, 2)
    assert logged.count("saved\n") == 2


@pytest.mark.parametrize("name", ["kit", "env"])
def test_a_parked_task_whose_kit_or_environment_is_replaced_is_started_by_systemd(
    start: Start, releases: Callable[[str], None], name: str
) -> None:
    supervised = start(RELEASED)
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    releases(name)
    supervised.process.send_signal(signal.SIGUSR1)
    assert supervised.wait()[0] == 75
    assert len(supervised.pids) == 1


def test_a_parked_task_stops_at_once(start: Start, releases: Callable[[str], None]) -> None:
    supervised = start(RELEASED)
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    supervised.process.terminate()
    assert supervised.wait()[0] == 143
    assert len(supervised.pids) == 1


def test_a_task_that_nobody_asks_to_go_on_does_so_by_itself(start: Start, releases: Callable[[str], None]) -> None:
    supervised = start("parking.PARKED_SECONDS = 0.5" + RELEASED)
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    supervised.child(1)
    supervised.process.terminate()
    assert "worker-0 was asked for nothing in " in supervised.wait()[1]


def test_a_task_is_parked_once_its_import_is_over(start: Start, releases: Callable[[str], None]) -> None:
    supervised = start(
        RELEASED + "def warm():\n    (here / 'importing').touch()\n    time.sleep(1)\n    (here / 'imported').touch()\n"
        "supervisor.warm_up = warm\n"
    )
    here = supervised.directory
    until((here / "importing").exists)
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    assert (here / "imported").exists()
    assert not supervised.pids
    supervised.process.send_signal(signal.SIGUSR1)
    supervised.child()
    supervised.process.terminate()
    supervised.wait()


@pytest.mark.parametrize("name", ["two", "kit"])
def test_a_release_that_comes_during_the_import_is_where_the_first_process_works(
    start: Start, releases: Callable[[str], None], name: str
) -> None:
    supervised = start(
        RELEASED + "def warm():\n    (here / 'importing').touch()\n"
        "    while not (here / 'imported').exists(): time.sleep(0.01)\nsupervisor.warm_up = warm\n"
    )
    until((supervised.directory / "importing").exists)
    releases(name)
    (supervised.directory / "imported").touch()
    if name == "kit":
        assert supervised.wait()[0] == 75
        assert not supervised.pids
        return
    supervised.child()
    until(lambda: f"READY=1\nSTATUS={name} {name} 0" in supervised.heard)
    supervised.process.terminate()
    supervised.wait()


def test_one_that_is_asked_to_go_on_while_its_child_still_saves_does(
    start: Start, releases: Callable[[str], None]
) -> None:
    """Who parked it has died, and another start follows at once."""
    supervised = start(RELEASED.replace("sys.exit(143)", "(here / 'saving').touch(); time.sleep(1); sys.exit(143)"))
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until((supervised.directory / "saving").exists)
    supervised.process.send_signal(signal.SIGUSR1)
    supervised.child(1)
    supervised.process.terminate()
    assert supervised.wait()[0] == 143


def test_a_task_is_parked_as_it_is_forked(start: Start, releases: Callable[[str], None]) -> None:
    supervised = start(
        RELEASED + "forked = supervisor.fork\ndef fork(run):\n    pid = forked(run)\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n    return pid\nsupervisor.fork = fork\n"
    )
    until(lambda: parked(supervised))
    supervised.process.terminate()
    assert supervised.wait()[0] == 143


@pytest.mark.parametrize("end", ["return 0", "return 78", "notifier.restart_unit(); return 75"])
def test_however_a_task_ends_that_is_to_be_parked_its_supervisor_is(
    start: Start, releases: Callable[[str], None], end: str
) -> None:
    body = RELEASED.replace("    return 75", f"    {end}").replace("sys.exit(143)", "(here / 'go0').touch()")
    supervised = start(body)
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    until(lambda: parked(supervised))
    supervised.process.send_signal(signal.SIGUSR1)
    if "restart" in end:
        assert supervised.wait()[0] == 75
        return
    supervised.child(1)
    supervised.process.terminate()
    (supervised.directory / "go1").touch()
    supervised.wait()


PARK_FILE = (
    RELEASED
    + """
park_file = here / "park"
if not (here / "imported").exists(): park_file.touch()
supervisor.warm_up = lambda: (here / "imported").touch()
"""
)


def test_a_task_that_begins_parked_has_imported_and_goes_on_in_the_release_that_is_current_then(
    start: Start, releases: Callable[[str], None]
) -> None:
    supervised = start(PARK_FILE, watchdog=0.4)
    until(lambda: parked(supervised))
    assert supervised.heard[0].startswith("READY=1")  # systemd's patience with a start is not for the proof
    assert (supervised.directory / "imported").exists()
    heard = len(supervised.heard)
    until(lambda: supervised.heard[heard:].count("WATCHDOG=1") >= 3)
    assert not supervised.pids
    releases("two")
    (supervised.directory / "park").unlink()
    supervised.process.send_signal(signal.SIGUSR1)
    supervised.child()
    until(lambda: "STATUS=two two 0" in supervised.heard)
    supervised.process.terminate()
    assert supervised.wait()[0] == 143


def test_a_task_that_is_asked_to_go_on_during_its_first_import_does(
    start: Start, releases: Callable[[str], None]
) -> None:
    supervised = start(PARK_FILE + "supervisor.warm_up = lambda: ((here / 'imported').touch(), time.sleep(1))\n")
    until((supervised.directory / "imported").exists)
    (supervised.directory / "park").unlink()
    supervised.process.send_signal(signal.SIGUSR1)
    supervised.child()
    supervised.process.terminate()
    assert supervised.wait()[0] == 143


@pytest.mark.parametrize("seconds", [0.5, -1.0])
def test_a_task_that_begins_parked_and_that_nobody_starts_ends_and_stays_down(
    start: Start, releases: Callable[[str], None], seconds: float
) -> None:
    """Also where the file is older than that: it is of a `fab` that died, and what it wanted is not known."""
    supervised = start(f"parking.PARKED_SECONDS = {seconds}" + PARK_FILE)
    code, logged = supervised.wait()
    assert (code, supervised.pids) == (0, [])  # systemd doesn't start it again
    assert "worker-0 was asked for nothing in " in logged


def test_a_task_that_begins_parked_stops_at_once(start: Start, releases: Callable[[str], None]) -> None:
    supervised = start(PARK_FILE)
    until(lambda: parked(supervised))
    supervised.process.terminate()
    assert supervised.wait()[0] == 143
    assert not supervised.pids


def client(supervised: Supervised, script: str) -> Forked | None:
    """Ask a supervisor for a process."""
    forks = ForkServer(supervised.directory / "forks")
    assert forks.wait(MINUTE)
    (supervised.directory / "script.py").write_text(script)
    return forks.start([str(supervised.directory / "script.py")], os.environ, supervised.directory, 1)


LENDS = """
fork_socket = here / "forks"
def task(notifier):
    number = count()
    notifier.ready("up")
    while not (here / f"go{number}").exists(): time.sleep(0.01)
    return 75
"""


def test_a_supervisor_lends_its_import_and_what_it_lends_outlives_a_child(start: Start) -> None:
    supervised = start(LENDS, watchdog=1)
    first = supervised.child()
    place = supervised.directory
    lent = client(
        supervised, f"import os, time\nopen({str(place / 'lent')!r}, 'w').write(str(os.getppid()))\ntime.sleep(60)"
    )
    assert lent is not None
    until((place / "lent").exists)
    until(lambda: int((place / "lent").read_text() or 0))
    between = int((place / "lent").read_text())
    assert f"PPid:\t{supervised.process.pid}\n" in Path(f"/proc/{between}/status").read_text()
    (place / "go0").touch()
    supervised.child(1)
    assert gone(first)
    time.sleep(1.2)  # longer than the watchdog waits
    assert lent.poll() is None
    lent.kill()
    assert lent.wait(MINUTE) == -signal.SIGKILL
    again = client(supervised, "raise SystemExit(3)")
    assert again is not None
    assert again.wait(MINUTE) == 3
    last = client(supervised, "import time; time.sleep(60)")
    assert last is not None
    supervised.process.terminate()
    assert supervised.wait()[0] == -signal.SIGTERM
    assert last.wait(MINUTE) == -signal.SIGKILL  # with the unit
    assert gone(between)


def test_a_supervisor_that_can_not_fork_lends_nothing(start: Start) -> None:
    supervised = start(
        LENDS + "supervisor.why_unsafe = lambda: 'it has opened a GPU' if (here / 'go0').exists() else ''\n"
    )
    supervised.child()
    (supervised.directory / "go0").touch()
    assert client(supervised, "") is None
    supervised.process.terminate()
    supervised.wait()


def test_a_task_without_a_unit_is_never_parked(start: Start) -> None:
    supervised = start("def task(notifier):\n    count()" + FOREVER)
    supervised.child()
    supervised.process.send_signal(signal.SIGHUP)
    assert supervised.wait()[0] == -signal.SIGHUP


def test_a_fresh_process_is_started_where_a_fork_would_be_unsafe(start: Start, tmp_path: Path) -> None:
    fresh = (
        "import os, sys\nfrom trainer.telemetry.outlets.systemd import Notifier\n"
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
    if number == 1: return END
    return 75
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
