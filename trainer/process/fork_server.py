"""Fork processes that have TensorFlow imported, for others on this machine: `local`, the proof of a program, the tests.

python -m trainer.process.fork_server SOCKET PARENT

The server is a process of its own, since its clients have threads and a process with threads can't fork. A client has
one connection for each process: it sends the command with the descriptor for its output, is told the pid, and later the
exit code. When the connection closes, however its client ended, the process is killed. A task's supervisor, which has
imported TensorFlow anyway, forks such a server for each client of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainer.core.runtime import ENVIRONMENT
from trainer.process.children import end_orphans
from trainer.process.signal_selector import SignalSelector
from trainer.process.warm_start import adopt_orphans, die_with_parent, fork, import_from, warm_up, why_unsafe
from trainer.run.release import kit_in

MAX_MESSAGE_BYTES = 1 << 20
# What counts when Python and TensorFlow are loaded: a process that wants another value needs an import of its own.
IMPORTED_WITH = ("TF_", "GRPC_", "PYTHON", "LD_", "OPENBLAS_", "OMP_", "XLA_", "CUDA_")
# CUDA is asked for devices by a process that uses one, which the parent never does.
NOT_IMPORTED_WITH = ("TF_CONFIG", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
# Of Popen: Python 3.10 has no `process_group`.
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
PARENT = "@parent"  # in a command: the pid of the process that will be its parent


def imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what must be the same in two processes for one to be forked in place of the other."""
    kept = {key: value for key, value in {**ENVIRONMENT, **environment}.items() if key.startswith(IMPORTED_WITH)}
    for key in NOT_IMPORTED_WITH:
        kept.pop(key, None)
    return {**kept, "": f"{Path(sys.prefix).resolve()} {own_kit()}"}


def own_kit() -> str:
    """Name the code that this process imports: that of a release by its content, any other by its place."""
    try:
        lines = sorted(kit_in(Path(__file__).resolve().parents[2]))
    except OSError:
        return str(Path(__file__).resolve())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def with_parent(arguments: Sequence[str], parent: int) -> list[str]:
    return [str(parent) if argument == PARENT else argument for argument in arguments]


class ForkServer:
    """A client's view of a server; `start` may be called as soon as `ready`."""

    def __init__(self, path: Path | str, environment: Mapping[str, str] | None = None) -> None:
        """Start a server that listens at this path and ends with this process; without `environment`, use one."""
        self.path = Path(path)
        self._process: subprocess.Popen[bytes] | None = None
        if environment is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "trainer.process.fork_server", str(path), str(os.getpid())],
                env=dict(environment),
                **OWN_GROUP,  # Ctrl-C is for its client
            )

    def ready(self) -> bool:
        """Return whether it listens."""
        return self.path.exists()

    def gone(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait until it is ready; returns whether it is."""
        deadline = time.monotonic() + seconds
        while not self.ready() and not self.gone() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.ready()

    def comes(self, seconds: float) -> bool:
        """Wait for one that must come, where the directory of its socket is there; returns whether it is ready."""
        deadline = time.monotonic() + seconds
        while not self.ready() and self.path.parent.is_dir() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.ready()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: Path | str, *descriptors: int
    ) -> Forked | None:
        """Start Python with such arguments (-m MODULE ... or SCRIPT ...); returns None when that needs a new process.

        `descriptors` become its standard input, output and error; a single one, its output and error.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": str(directory),
            "nice": os.nice(0),
            "imported_with": imported_with(environment),
        }
        try:
            connection.connect(str(self.path))
            socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
            answer = json.loads(connection.recv(MAX_MESSAGE_BYTES) or b"{}")
        except OSError:
            answer = {}
        if "pid" not in answer:
            connection.close()
            return None
        return Forked(int(answer["pid"]), connection)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.path.unlink(missing_ok=True)


class Forked:
    """A process that a server has forked, with the part of subprocess.Popen that its clients use."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None
        self._connection = connection
        connection.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal, once it has ended."""
        if self.returncode is None:
            try:
                message = self._connection.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                message = b""
            # A server that is gone has taken its processes with it.
            self.returncode = int(json.loads(message)["code"]) if message else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout:.0f} s")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        # Until its end was heard of, the server keeps its pid.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_process(
    forks: ForkServer | None, arguments: Sequence[str], environment: Mapping[str, str], directory: Path | str = "."
) -> Forked | subprocess.Popen[str]:
    """Start Python with such arguments, forked where that can be; `stdout` has the lines of its output and errors.

    It has a session of its own: Ctrl-C is for this process.
    """
    if forks is not None and forks.ready():
        reading, writing = os.pipe()
        forked = forks.start(arguments, environment, Path(directory).resolve(), writing)
        os.close(writing)
        if forked is not None:
            forked.stdout = open(reading, errors="replace")  # noqa: SIM115, PTH123 - a descriptor, closed by its reader
            return forked
        os.close(reading)
    return subprocess.Popen(
        [sys.executable, "-u", *with_parent(arguments, os.getpid())],
        cwd=directory,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **OWN_GROUP,
    )


def listen_at(path: Path | str) -> socket.socket:
    """Return a socket that listens at this path, where it is seen once it does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path(f"{path}.new").unlink(missing_ok=True)
    listener.bind(f"{path}.new")
    listener.listen(128)
    Path(f"{path}.new").rename(path)
    return listener


class WarmParent:
    """The process that forks; it has imported TensorFlow."""

    def __init__(self) -> None:
        self._imported_with = imported_with(os.environ)
        own = {*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), "", os.getcwd()}  # noqa: PTH109
        self._libraries = [place for place in sys.path if place not in own]
        self._selector = SignalSelector()
        self._forked: dict[socket.socket, int] = {}
        self._answered: set[socket.socket] = set()

    def run(self, listener: socket.socket | None = None, client: socket.socket | None = None) -> int:
        """Serve all who come to a listener until this process is killed, or one client until that has gone."""
        self._listener = listener
        for each in filter(None, (listener, client)):
            self._selector.add(each)
        with self._selector.signals({}):
            while not self._selector.is_empty():
                for ready in self._selector.wait():
                    if listener and ready is listener:
                        self._selector.add(listener.accept()[0])
                    elif ready in self._forked:
                        self._close(ready)  # a client says nothing more
                    else:
                        self._answer(ready)
                self._send_ends()
        return 0

    def _answer(self, client: socket.socket) -> None:
        """Fork what a client asks for."""
        try:
            message, descriptors, _, _ = socket.recv_fds(client, MAX_MESSAGE_BYTES, 3)
            request = json.loads(message or b"null")
        except (OSError, ValueError):
            request, descriptors = None, []
        if request is None:
            self._close(client)
            return
        try:
            if request["imported_with"] != self._imported_with or why_unsafe():
                self._close(client)
                return
            try:
                pid = fork(lambda: self._become(request, descriptors, client))
            except OSError:  # there is no room for it, and the others live on
                self._close(client)
                return
            self._forked[client] = pid
            with contextlib.suppress(OSError):
                client.send(json.dumps({"pid": pid}).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _become(self, request: dict[str, Any], descriptors: Sequence[int], client: socket.socket) -> int:
        """Be the process that was asked for."""
        self._selector.close()
        for inherited in (client, *self._forked, *filter(None, [self._listener])):
            inherited.close()
        streams = descriptors if len(descriptors) == 3 else (0, *descriptors, *descriptors)
        for number, given in enumerate(streams):
            os.dup2(given, number)
        for given in descriptors:
            os.close(given)
        os.nice(max(0, request["nice"] - os.nice(0)))
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        first, *rest = with_parent(request["arguments"], os.getppid())
        module = first == "-m"
        place = request["directory"] if module else str(Path(first).resolve().parent)
        python_path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        import_from([place, *python_path, *self._libraries])
        sys.argv[:] = rest if module else [first, *rest]
        if module:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
        return 0

    def _send_ends(self) -> None:
        """Tell each client whose process has ended; it stays a zombie, with its pid, until the client has heard."""
        for client, pid in self._forked.items():
            if client in self._answered:
                continue
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._answered.add(client)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                with contextlib.suppress(OSError):
                    client.send(json.dumps({"code": code}).encode())

    def _close(self, client: socket.socket) -> None:
        self._selector.remove(client)
        client.close()
        self._answered.discard(client)
        if (pid := self._forked.pop(client, None)) is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class ForkSocket:
    """A socket at which clients come, each of which gets a server of its own; none where no path is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self.lent: set[int] = set()
        """The servers that clients have."""

    def open(self, selector: SignalSelector) -> None:
        """Let clients come from now on."""
        if self._path is not None:
            self._socket = listen_at(self._path)
            selector.add(self._socket)

    def close(self) -> None:
        """Give it up, in a process that was forked."""
        if self._socket is not None:
            self._socket.close()

    def is_ready(self, file: socket.socket) -> bool:
        """Return whether it is this socket that can be read: a client has come."""
        return self._socket is not None and file is self._socket

    def lend(self, leave: Callable[[], None], *, can_fork: bool) -> None:
        """Fork a server for the client that has come, where this process can fork; it ends with its client.

        `leave` gives up in it what is this process's.
        """
        assert self._socket is not None

        def serve() -> int:
            leave()
            adopt_orphans()
            code = WarmParent().run(client=client)
            end_orphans(())
            return code

        with contextlib.suppress(OSError):
            client, _ = self._socket.accept()
            with client:
                if can_fork:
                    self.lent.add(fork(serve))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    server = WarmParent()
    warm_up()
    server.run(listen_at(sys.argv[1]))
