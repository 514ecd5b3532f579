"""Try the ways from this host to other members: a connection of its own, and a question that fills several packets.

One connection would not notice that no further one comes about, and a small question passes where large
packets are lost. The question is trainer/cluster/probe.py's; its padding is a field that no server knows.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from trainer.cluster.probe import METHOD, PADDING, REFUSED, digest, incarnation
from trainer.cluster.reach.ways import Way

log = logging.getLogger(__name__)
DEADLINE_SECONDS = 4.0
SMALL_SECONDS = 2.0
PERIOD_SECONDS = 10.0
AGAIN_SECONDS = 1.0  # for a way that does not work
STALE_SECONDS = 60.0  # a file that was not written for so long is of a process that has ended
THREADS = 8
RECORDS = Path("/tmp")
PREFIX = "psfleet-ways-"
# Of a process that ended while it was asked: packets came and went.
ENDED = ("Connection reset by peer", "Socket closed")
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
]


def record_path(process: str) -> Path:
    """Return where a process of a server leaves its ways, for the coordinator to read through that server."""
    return RECORDS / f"{PREFIX}{process}.json"


def try_way(address: str) -> Way:
    """Try the way to the server at host:port; takes 6 s at most."""
    began = time.monotonic()
    answer, error = question(address, PADDING, DEADLINE_SECONDS)
    seconds = time.monotonic() - began
    leaves = source(address)
    if answer is not None:
        return Way(address, source=leaves, seconds=seconds, process=digest(answer))
    if any(sign in error for sign in (REFUSED, *ENDED)):
        return Way(address, source=leaves, seconds=seconds, refused=True)
    if not error:
        small, _ = question(address, b"", SMALL_SECONDS)
        error = f"no answer in {DEADLINE_SECONDS:.0f} s"
        if small is not None:
            error = f"small messages pass, and none of {len(PADDING) >> 10} KiB: is the MTU too large for this way?"
        return Way(address, why=error, source=leaves, seconds=seconds, timed_out=True)
    return Way(address, why=error, source=leaves, seconds=seconds)


def question(address: str, request: bytes, deadline: float) -> tuple[bytes | None, str]:
    """Return a server's answer, or what kept it from coming: nothing where that is not known in time."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            answer: bytes = channel.unary_unary(METHOD)(request, timeout=deadline)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None, ""
            # "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.3:2300: No route to host"
            return None, (error.details() or str(error.code())).rpartition(": ")[2].rstrip("]")
    return answer, ""


def source(address: str) -> str:
    """Return the address with which this host's packets leave for host:port; nothing where there is no route."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, end = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(end)
            return str(unsent.getsockname()[0])
    except OSError:
        return ""


def try_all(others: Mapping[str, str], attempt: Callable[[str], Way] = try_way) -> dict[str, Way]:
    """Try the ways to these members (task name to address), several at once."""
    if not others:
        return {}
    with ThreadPoolExecutor(max_workers=min(THREADS, len(others))) as pool:
        return dict(zip(others, pool.map(attempt, others.values()), strict=True))


class Ways:
    """Tries a server's ways again and again, and writes down what it finds; a thread does."""

    def __init__(
        self, own: str, others: Callable[[], Mapping[str, str]], attempt: Callable[[str], Way] = try_way, lack: str = ""
    ) -> None:
        """Take the server's own address, where it is asked which process it is, and what returns the others' (by task).

        Others may come to them. `lack` is what is said of the process before, if memory ran out.
        """
        self._own = own
        self._others = others
        self._attempt = attempt
        self._lack = lack
        self._found: dict[str, Way] = {}
        self._tried_at: dict[str, float] = {}
        self._unwritten = ""

    def start(self) -> None:
        remove_stale()
        threading.Thread(target=self._keep, name="ways", daemon=True).start()

    def _keep(self) -> None:
        while (process := incarnation(self._own)) is None:
            time.sleep(AGAIN_SECONDS)
        while True:
            try:
                if not self._found:
                    self._write(process)  # that nothing is known yet: a reader finds a file
                if self.probe(time.monotonic()) or self._unwritten:
                    self._write(process)
            except Exception:
                log.exception("cannot try the ways to the other members")
            time.sleep(AGAIN_SECONDS)

    def probe(self, now: float) -> dict[str, Way]:
        """Try those that are due (`now` of time.monotonic); returns them."""
        due = {task: address for task, address in self._others().items() if now >= self._due(task)}
        for task, way in try_all(due, self._attempt).items():
            before = self._found.get(task)
            same = before is not None and (before.works, before.process) == (way.works, way.process)
            self._found[task] = dataclasses.replace(way, times=before.times + 1) if before and same else way
            self._tried_at[task] = now
            self._report(task, before, way)
        return {task: self._found[task] for task in due}

    def _due(self, task: str) -> float:
        way = self._found.get(task)
        if way is None:
            return 0.0
        return self._tried_at[task] + (PERIOD_SECONDS if way.works and not way.refused else AGAIN_SECONDS)

    def _report(self, task: str, before: Way | None, way: Way) -> None:
        if not way.works and (before is None or before.works):
            log.warning("no way to %s at %s: %s; packets leave from %s", task, way.address, way.why, way.source or "?")
        elif way.works and before is not None and not before.works:
            log.info("the way to %s at %s works again", task, way.address)

    def _write(self, process: str) -> None:
        path = record_path(process)
        new = path.with_suffix(".new")
        ways = {task: way.as_record() for task, way in self._found.items()}
        try:
            new.write_text(json.dumps({"ways": ways, "lack": self._lack}), encoding="utf-8")
            new.replace(path)
        except OSError as error:  # a full disk; or a cleaner has removed the task's own /tmp
            if str(error.strerror) != self._unwritten:
                log.warning("the coordinator does not hear of this task's ways: %s: %s", new, error.strerror)
            self._unwritten = str(error.strerror)
        else:
            self._unwritten = ""


def remove_stale() -> None:
    """Remove what processes have left that were killed."""
    for path in RECORDS.glob(f"{PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except OSError:
            continue
