"""Bring the members that train in step together, before any of them makes the strategy.

TensorFlow's own waiting is in the strategy's constructor, which holds the interpreter's lock and takes SIGTERM away:
nothing says who is missing, nothing tells systemd that the process lives, and no signal stops it. Here the chief
listens on its own port until every worker has called, then sends all of them into the constructor at once.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import Infrastructure

POLL_SECONDS = 0.2
BEAT_SECONDS = 1.0  # a worker that waits says so this often
DEAF_SECONDS = 5.0  # one that was silent for so long is not there any more: it or its host froze
LONGEST = 1 << 22  # what a worker says first, its settings and its cluster, is shorter by far
GO = b"+"
REFUSED = b"-"


def gather(cluster: ClusterConfig, settings: Mapping[str, Any], on_missing: Callable[[dict[str, str]], None]) -> None:
    """Return when all members are present, on each of them at the same moment.

    `settings` must be the chief's on every member: else they would train different things in step.
    `on_missing` is called with those that are missing (task name to address), again and again.
    Raises Infrastructure on a worker whose settings or cluster are not the chief's, and on a chief whose port is taken.
    """
    agreed = json.dumps([cluster.jobs, settings], sort_keys=True)
    if cluster.job == "chief":
        _await_workers(cluster, agreed, on_missing)
    else:
        _await_chief(cluster, agreed, on_missing)


def _await_workers(cluster: ClusterConfig, agreed: str, on_missing: Callable[[dict[str, str]], None]) -> None:
    port, servers = int(cluster.address.rpartition(":")[2]), cluster.servers
    here: dict[str, _Caller] = {}
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(_listen(port))
        except OSError as error:
            raise Infrastructure(f"{cluster.task} can't listen on port {port}: {error.strerror}") from error
        listener.setblocking(False)
        callers: list[_Caller] = []
        while missing := {task: address for task, address in servers.items() if task not in here}:
            on_missing(missing)
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(BlockingIOError):
                while True:
                    callers.append(_Caller(stack.enter_context(listener.accept()[0])))
            for caller in callers:
                caller.listen()
            callers = [caller for caller in callers if not caller.gone]
            here = {}
            for caller in callers:
                if caller.task in servers:
                    if caller.agreed == agreed:
                        here[caller.task] = caller
                    else:
                        caller.answer(REFUSED)
                        caller.close()
        for caller in here.values():
            caller.answer(GO)
        for caller in here.values():
            caller.close()


class _Caller:
    """A worker's connection, seen from the chief; or a stranger's, who never says a task's name."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.task = ""
        self.agreed = ""
        self._connection = connection
        self._heard = b""
        self._heard_at = time.monotonic()
        self._closed = False

    @property
    def gone(self) -> bool:
        return self._closed or time.monotonic() - self._heard_at > DEAF_SECONDS

    def listen(self) -> None:
        try:
            while data := self._connection.recv(65536):
                self._heard_at = time.monotonic()
                if len(self._heard) < LONGEST:
                    self._heard += data
            self._closed = True
        except BlockingIOError:
            pass
        except OSError:
            self._closed = True
        first, ended, _ = self._heard.partition(b"\n")
        if ended and not self.task:
            with contextlib.suppress(ValueError, TypeError):
                self.task, self.agreed = map(str, json.loads(first))

    def answer(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(word)

    def close(self) -> None:
        """Wait until the worker has read its answer and left: closing on what it still says would drop the answer."""
        self._closed = True
        self._connection.settimeout(DEAF_SECONDS)
        with contextlib.suppress(OSError):
            while self._connection.recv(65536):
                pass
        self._connection.close()


def _await_chief(cluster: ClusterConfig, agreed: str, on_missing: Callable[[dict[str, str]], None]) -> None:
    address = cluster.jobs["chief"][0]
    host, _, port = address.rpartition(":")
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=DEAF_SECONDS) as chief:
                chief.sendall(json.dumps([cluster.task, agreed]).encode() + b"\n")
                answer = _wait_for_answer(chief)
        except OSError:
            answer = b""
        if answer == GO:
            return
        if answer == REFUSED:
            raise Infrastructure(
                f"{cluster.task} has other run settings, or another cluster, than the chief. Both read them when they "
                "start: /etc/trainer and <shared>/selection.json"
            )
        on_missing({"chief-0": address})
        time.sleep(POLL_SECONDS)


def _wait_for_answer(chief: socket.socket) -> bytes:
    """Return the chief's word, or nothing when it has ended; raises OSError when it can't be reached any more."""
    chief.settimeout(BEAT_SECONDS)
    while True:
        try:
            return chief.recv(1)
        except TimeoutError:
            chief.sendall(b".")


def _listen(port: int) -> socket.socket:
    # On every interface, as TensorFlow's own server does there afterwards.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
