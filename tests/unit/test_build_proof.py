"""A build that is watched: what it may take, and what becomes of it when it takes more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.core.failures import FINISHED, TRY_AGAIN, USER_ERROR
from trainer.process.fork_server import ForkServer
from trainer.tasks import build_proof
from trainer.tasks.build_proof import UNPROVEN, free_memory, watch_build

SAYS = "import os, signal, sys, time; print('loading', flush=True); print('proven: release a', flush=True); "


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_proof, "POLL_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("program", "free", "code", "message"),
    [
        ("print('its model is built')", 0.5, FINISHED, "its model is built\n"),
        ("sys.exit(78)", 0.5, USER_ERROR, ""),
        ("sys.exit(75)", 0.5, TRY_AGAIN, ""),
        ("time.sleep(600)", 0.5, FINISHED, f"{UNPROVEN}build_model: it took more than 1 s\n"),
        (
            "print('building: rates-1'); print('building: rates-2, point 2 of 3', flush=True); time.sleep(600)",
            *(
                0.5,
                FINISHED,
                f"{UNPROVEN}build_model of rates-2, point 2 of 3: the points together took more than 1 s\n",
            ),
        ),
        ("time.sleep(600)", 0.01, FINISHED, "it would leave less than 10% of this machine's memory free\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 0.5, FINISHED, "the kernel ended it, for its memory\n"),
        # What it has started ends with it, and holds nothing up.
        ("os.fork() or time.sleep(600)", 0.5, FINISHED, "proven: release a\n"),
        # What it prints is read all along: a full pipe would hold it up.
        ("[print('x' * 99) for _ in range(5000)]; sys.exit(78)", 0.5, USER_ERROR, ""),
    ],
)
def test_only_an_error_of_the_programs_refuses_it(
    program: str, free: float, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watch_build([sys.executable, "-c", SAYS + program], 1.0, lambda: free) == code
    out = capfd.readouterr().out
    assert "proven: release a\n" in out
    assert out.endswith(message)


def test_a_crash_is_the_programs_where_all_else_is_proven(capfd: pytest.CaptureFixture[str]) -> None:
    crash = "import os, signal, time; time.sleep(0.1); os.kill(os.getpid(), signal.SIGABRT)"
    assert watch_build([sys.executable, "-c", SAYS + crash]) == USER_ERROR
    assert "ended with SIGABRT. If only the cluster can build it, say release_build_proof" in capfd.readouterr().err
    assert watch_build([sys.executable, "-c", crash]) == TRY_AGAIN
    assert "release_build_proof" not in capfd.readouterr().err


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that forks others, at `forks`."""
    serve = (
        "from trainer.process import fork_server\nfork_server.why_unsafe = lambda: ''\n"
        "fork_server.WarmParent().run(fork_server.listen_at('forks'))\n"
    )
    server = subprocess.Popen([sys.executable, "-c", serve], cwd=tmp_path, env=ENVIRONMENT)
    try:
        assert ForkServer(tmp_path / "forks").wait(30)
        yield server
    finally:
        server.kill()
        server.wait()


def build_with_lender(
    directory: Path, program: str, forks: str = "fork_server.ForkServer(Path('forks'))"
) -> subprocess.CompletedProcess[str]:
    """Watch a build of this program, which reads "a point"."""
    (directory / "program.py").write_text(SAYS + program)
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom trainer.process import fork_server\n"
        "from trainer.tasks import build_proof\n"
        "build_proof.free_memory = lambda: 0.5\n"
        f"sys.exit(build_proof.run_build([sys.executable, 'program.py', '-'], {forks}))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], input="a point", capture_output=True, text=True, timeout=60, cwd=directory,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip


def test_a_build_whose_lender_ends_is_made_again_in_a_new_process(
    tmp_path: Path, lender: subprocess.Popen[bytes]
) -> None:
    """A supervisor ends with its run, and all that it has forked ends with it."""
    program = (
        "import os, signal\nprint('building:', sys.stdin.read(), flush=True)\n"
        # Not before the lender has said which process it is.
        f"time.sleep(1)\nos.getppid() == {lender.pid} and os.kill(os.getppid(), signal.SIGKILL)\nsys.exit(0)\n"
    )
    done = build_with_lender(tmp_path, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * "loading\nproven: release a\nbuilding: a point\n"
    assert lender.wait(10) == -signal.SIGKILL


def test_a_new_process_reads_what_one_has_read_whose_lender_never_answered(tmp_path: Path) -> None:
    never = "type('', (), {'comes': lambda *_: True, 'start': lambda *_: os.read(0, 99) and None})()"
    done = build_with_lender(tmp_path, "print('building:', sys.stdin.read())\n", never)
    assert (done.returncode, done.stdout) == (0, "loading\nproven: release a\nbuilding: a point\n")


def test_a_build_that_leaves_a_process_in_a_session_of_its_own_ends(tmp_path: Path) -> None:
    """It has the output and errors of the proof, whose reader would wait for it."""
    program = "import subprocess\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    done = build_with_lender(tmp_path, program, "None")
    assert done.returncode == 0
    assert not Path("/proc", done.stdout.split()[-1]).exists()


def test_a_build_is_forked_where_a_process_has_imported(tmp_path: Path, lender: subprocess.Popen[bytes]) -> None:
    program = (
        "import os\nprint('building:', sys.stdin.read(), flush=True)\n"
        "print('error: as', os.getppid(), file=sys.stderr)\nos.fork() or time.sleep(600)\nsys.exit(78)\n"
    )
    for is_there in (True, False):
        done = build_with_lender(tmp_path, program)
        assert (done.returncode, done.stdout) == (USER_ERROR, "loading\nproven: release a\nbuilding: a point\n")
        assert (f"error: as {lender.pid}" in done.stderr) == is_there
        lender.kill()  # then a new process does it
        lender.wait()


def test_a_build_that_reads_nothing_leaves_its_input_to_others(tmp_path: Path) -> None:
    """As the next line of a list, in a shell's loop over programs."""
    (tmp_path / "programs").write_text("first\nsecond\n")
    script = "import sys; from trainer.tasks.build_proof import watch_build; watch_build([sys.executable, '-c', ''])"
    with (tmp_path / "programs").open("rb", buffering=0) as programs:
        assert programs.readline() == b"first\n"
        subprocess.run([sys.executable, "-c", script], stdin=programs, env=ENVIRONMENT, timeout=60, check=True)
        assert programs.readline() == b"second\n"


def test_the_limits_do_not_count_before_the_rest_is_proven() -> None:
    slow = "import sys, time; time.sleep(0.5); sys.exit(78)"
    assert watch_build([sys.executable, "-c", slow], 0.1, lambda: 0.0) == USER_ERROR


def test_the_memory_that_is_free_is_a_part() -> None:
    assert 0 < free_memory() < 1
