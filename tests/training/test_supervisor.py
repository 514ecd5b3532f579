"""The supervisor with TensorFlow: what it forks serves at once, again and again, and as the task that it is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import MINUTE, PROGRAMS, ROOT, Process, Runs, is_alive, run_check, until

from trainer.cluster.probe import answers, incarnation
from trainer.core.failures import USER_ERROR
from trainer.tasks.local import local_cluster

pytestmark = pytest.mark.timeout(300)
KILLS = 20


def start_server(runs: Runs, cluster: dict[str, list[str]], **more: str) -> Process:
    config = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}})
    return runs.start(["-m", "trainer"], TF_CONFIG=config, **more)


def test_a_server_that_is_killed_twenty_times_serves_again_each_time(runs: Runs) -> None:
    cluster = local_cluster(1, 1)
    [address] = cluster["ps"]
    server = start_server(runs, cluster)
    seen: list[str] = []

    def answers_again() -> bool:
        who = incarnation(address, 1.0)
        if who is None or who in seen:
            return False
        seen.append(who)
        return True

    until(answers_again, "the first process's answer")
    supervisor, serves = server.pid, f"ps-0 serves at {address}"
    for number in range(KILLS):
        # It answers a moment before it says so.
        until(lambda number=number: server.output.count(serves) > number, serves)  # type: ignore[misc]
        child = server.children[0]
        os.kill(child, signal.SIGKILL)
        until(answers_again, f"an answer after kill {number + 1}", MINUTE, lambda: server.output)
        assert not is_alive(child)
    assert server.pid == supervisor
    assert "fresh process" not in server.output
    # The journal's order: each process's lines lie between the supervisor's own.
    messages = [line.split(" ", 1)[1] for line in server.output.splitlines() if "ps-0" in line]
    ended = "ps-0 ended with 137 (SIGKILL): starting the next"
    assert messages == [serves, *[ended, serves] * KILLS]
    last = server.children[0]
    server.send(signal.SIGTERM)
    assert server.wait(MINUTE) == -signal.SIGTERM
    until(lambda: not is_alive(last), "the end of the child")


def test_systemd_hears_of_a_server_and_a_frozen_one_is_replaced(runs: Runs, tmp_path: Path) -> None:
    cluster = local_cluster(1, 1)
    [address] = cluster["ps"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(MINUTE)

        def hear(wanted: str) -> None:
            end = time.monotonic() + MINUTE
            while (message := systemd.recv(1000).decode()) != wanted:
                assert time.monotonic() < end, message

        server = start_server(runs, cluster, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="30000000")
        hear(f"READY=1\nSTATUS=ps-0 serves at {address}")
        hear("WATCHDOG=1")
        frozen = server.children[0]
        os.kill(frozen, signal.SIGSTOP)
        hear(f"STATUS=ps-0 serves at {address} (restart 1)")
        assert not is_alive(frozen)
        until(lambda: answers(address), "an answer")
        assert "ps-0 is stopped by a signal: killing it" in server.output
    server.end()


def test_a_parked_server_has_no_process_and_then_another(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(PROGRAMS)
    cluster = local_cluster(1, 1)
    [address] = cluster["ps"]
    server = start_server(runs, cluster, TRAINER_RELEASE=str(tmp_path / "current"))
    until(lambda: answers(address), "an answer")
    first = incarnation(address, 1.0)
    server.send(signal.SIGHUP)
    server.search("ps-0 is parked")
    assert not server.children
    assert not answers(address)
    server.send(signal.SIGUSR1)
    until(lambda: answers(address), "an answer", MINUTE, lambda: server.output)
    assert incarnation(address, 1.0) not in (None, first)
    assert "fresh process" not in server.output
    server.end()


def test_a_program_that_ends_its_process_as_if_finished_fails_the_run(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\n\nos._exit(0)\n")
    chief = begin_chief(runs, tmp_path, "leaves:Program", max_restarts_without_step=1)
    assert chief.wait(MINUTE) == USER_ERROR, chief.output
    assert chief.output.count("chief-0 ended with 0 before its task was over (does the program call os._exit?)") == 2
    assert runs.status("left")["state"] == "failed"


def test_a_program_whose_import_crashes_in_native_code_soon_fails_the_run(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text("import ctypes\n\nctypes.string_at(0)\n")
    chief = begin_chief(runs, tmp_path, "crashes:Program")
    assert chief.wait(MINUTE) == USER_ERROR, chief.output
    assert chief.output.count("chief-0 ended with 139 (SIGSEGV): starting the next") == 3
    assert "crashed each time while TensorFlow and the program were imported" in runs.status("left")["message"]


def begin_chief(runs: Runs, tmp_path: Path, program: str, **more: object) -> Process:
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"program": program, "run": "left", "shared_dir": str(runs.shared), **more}))
    config = json.dumps({"cluster": local_cluster(1, 1), "task": {"type": "chief", "index": 0}})
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    return runs.start(["-m", "trainer"], TF_CONFIG=config, TRAINER_SETTINGS=str(settings), PYTHONPATH=path)


def test_what_is_forked_from_one_parent_shares_neither_numbers_nor_a_growing_memory() -> None:
    found = run_check("supervisor_check.py", "forks", deadline=4 * MINUTE, forked=False)
    assert found["unsafe"] == ""
    assert len(set(map(tuple, found["numbers"]))) == len(found["numbers"]) == 5
    assert found["grown"] < 4  # MiB, over 100 forks


@pytest.mark.parametrize("what", ["constant", "dataset", "channel", "thread"])
def test_a_parent_that_has_used_tensorflow_is_no_parent_to_fork_from(what: str) -> None:
    assert run_check("supervisor_check.py", what, forked=False)["unsafe"]


FULL = """
for place in /tmp /var/tmp; do
    mount -t tmpfs -o size=4k tmpfs $place && dd if=/dev/zero of=$place/fill bs=4k count=2 2>/dev/null
done
cd /tmp && unset TMPDIR && exec "$1" -c "
import tempfile
from trainer.process.warm_start import warm_up
warm_up()
try:
    tempfile.gettempdir()
except FileNotFoundError:
    print('imported')
"
"""


@pytest.mark.skipif(Path("/usr/tmp").exists(), reason="Python would write there")
def test_a_task_starts_on_a_full_disk() -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", sys.executable]
    done = subprocess.run(unshare, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
