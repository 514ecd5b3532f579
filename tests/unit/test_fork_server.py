"""The fork server and its clients, with no TensorFlow to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.process import fork_server
from trainer.process.fork_server import PARENT, Forked, ForkServer, start_process

pytestmark = pytest.mark.timeout(60)
SERVER = (
    "import sys\nfrom trainer.process import fork_server\n"
    "fork_server.warm_up = lambda: None\nfork_server.why_unsafe = lambda: ''\n"
    "fork_server.WarmParent().run(fork_server.listen_at(sys.argv[1]))\n"
)
FOREVER = "import time\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-u", "-c", SERVER, str(tmp_path / "forks")])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def forks(server: subprocess.Popen[bytes], tmp_path: Path) -> ForkServer:
    forks = ForkServer(tmp_path / "forks")
    assert forks.wait(30)
    return forks


def start(forks: ForkServer, directory: Path, script: str, *arguments: str, **more: str) -> Forked:
    path = directory / "script.py"
    if not path.exists() or path.read_text() != script:  # another process may be about to read it
        path.write_text(script)
    process = start_process(forks, [str(path), *arguments], {**os.environ, **more}, directory)
    assert isinstance(process, Forked)
    return process


def output(process: Forked | subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_process_has_its_arguments_environment_directory_and_output(
    forks: ForkServer, server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    script = (
        "import os, sys\nprint(sys.argv[1:], os.environ['OWN'], os.environ.get('GONE'), os.getcwd(), sys.path[:2])\n"
        "print('trouble', file=sys.stderr)\nsys.exit(75)\n"
    )
    process = start(forks, tmp_path, script, "a", PARENT, OWN="mine", PYTHONPATH="/some/where")
    assert output(process) == f"['a', '{server.pid}'] mine None {tmp_path} ['{tmp_path}', '/some/where']\ntrouble\n"
    assert process.wait(20) == 75
    module = start_process(forks, ["-m", "script", "b", PARENT], {**os.environ, "OWN": "2"}, tmp_path)
    assert output(module).startswith(f"['b', '{server.pid}'] 2 None {tmp_path} ['{tmp_path}'")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError", 1),
        ("import os\nos._exit(9)", 9),
        ("import os\nos.kill(os.getpid(), 11)", -signal.SIGSEGV),
    ],
)
def test_the_exit_code_is_told(forks: ForkServer, tmp_path: Path, script: str, code: int) -> None:
    assert start(forks, tmp_path, script).wait(20) == code


def test_processes_beside_one_another_are_told_apart(forks: ForkServer, tmp_path: Path) -> None:
    process = [start(forks, tmp_path, FOREVER) for _ in range(3)]
    assert len({one.pid for one in process}) == 3
    process[1].send_signal(signal.SIGTERM)
    assert process[1].wait(20) == -signal.SIGTERM
    process[2].kill()
    assert process[2].wait(20) == -signal.SIGKILL
    assert process[0].poll() is None
    process[0].kill()


def test_a_process_dies_with_its_client(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    client = (
        "import os, time\nfrom trainer.process.fork_server import ForkServer, start_process\n"
        f"p = start_process(ForkServer({str(forks.path)!r}), ['forever.py'], os.environ, {str(tmp_path)!r})\n"
        "print(p.pid, type(p).__name__, flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", client], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, kind = process.stdout.readline().split()
    process.kill()
    process.wait()
    assert kind == "Forked"
    assert ends(int(pid))


def test_a_process_dies_with_the_server(forks: ForkServer, server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    process = start(forks, tmp_path, FOREVER)
    server.kill()
    assert process.wait(20) == -signal.SIGKILL
    assert ends(process.pid)


def test_a_process_that_finds_no_room_takes_no_other_with_it(tmp_path: Path) -> None:
    full = (
        "fork = fork_server.fork\ndef once(run):\n    fork_server.fork = fail\n    return fork(run)\n"
        "def fail(run):\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\nfork_server.fork = once\n"
    )
    script = SERVER.replace("fork_server.WarmParent()", f"{full}fork_server.WarmParent()")
    server = subprocess.Popen([sys.executable, "-u", "-c", script, str(tmp_path / "forks")])
    try:
        forks = ForkServer(tmp_path / "forks")
        assert forks.wait(30)
        first = start(forks, tmp_path, FOREVER)
        (tmp_path / "other.py").write_text("print('here')")
        second = start_process(forks, ["other.py"], os.environ, tmp_path)
        assert isinstance(second, subprocess.Popen)
        assert output(second) == "here\n"
        second.wait()
        assert first.poll() is None
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("name", ["TF_ENABLE_ONEDNN_OPTS", "PYTHONHASHSEED", "OMP_NUM_THREADS"])
def test_what_needs_another_import_is_a_process_of_its_own(forks: ForkServer, tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text("import os, sys\nprint(os.getppid(), sys.argv[1])")
    process = start_process(forks, ["script.py", PARENT], {**os.environ, name: "7"}, tmp_path)
    assert isinstance(process, subprocess.Popen)
    assert output(process) == f"{os.getpid()} {os.getpid()}\n"
    process.wait()


def test_without_a_server_each_process_is_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('here')")
    process = start_process(ForkServer(tmp_path / "nobody"), ["script.py"], os.environ, tmp_path)
    assert output(process) == "here\n"
    process.wait()


def test_a_process_may_have_all_three_streams_and_its_clients_niceness(forks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.stdin.read(), os.nice(0))\nprint('trouble', file=sys.stderr)\n"
    )
    client = (
        "import os, sys\nfrom trainer.process.fork_server import ForkServer\nos.nice(7)\n"
        "environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': '-1'}\n"
        "process = ForkServer('forks').start(['script.py'], environment, os.getcwd(), 0, 1, 2)\n"
        "sys.exit(process.wait(20))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fork_server.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", client], input="asked", capture_output=True, text=True, cwd=tmp_path, env=environment,
        check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == (f"asked {min(19, os.nice(0) + 7)}\n", "trouble\n", 0)


def test_releases_with_one_kit_are_one_and_any_other_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kit(name: str, lines: str) -> str:
        file = tmp_path / name / "trainer/process/fork_server.py"
        file.parent.mkdir(parents=True)
        (tmp_path / name / "SHA256SUMS").write_text(lines)
        monkeypatch.setattr(fork_server, "__file__", str(file))
        return fork_server.own_kit()

    ours = f"# psfleet release {{}}\n{'a' * 64}  trainer/a.py\n{{}}  program.py\n"
    one, edited = kit("one", ours.format("one", "b" * 64)), kit("edited", ours.format("edited", "c" * 64))
    assert one == edited
    assert kit("newer", ours.replace("a" * 64, "d" * 64).format("newer", "b" * 64)) != one
    (tmp_path / "newer/SHA256SUMS").unlink()
    assert fork_server.own_kit() == str(tmp_path / "newer/trainer/process/fork_server.py")


def test_one_that_must_come_is_waited_for(tmp_path: Path) -> None:
    away = ForkServer(tmp_path / "away" / "forks")
    began = time.monotonic()
    assert not away.comes(30)  # its directory is missing: none will
    assert time.monotonic() - began < 5
    (tmp_path / "away").mkdir()
    late = subprocess.Popen(["sh", "-c", f"sleep 0.5; touch {tmp_path}/away/forks"])
    assert away.comes(30)
    late.wait()
