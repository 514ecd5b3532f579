"""What a coordinator tells and asks servers that share no path with it.

They can't see the run's state record, which has them end or restart.

TensorFlow brings them the command: each of its servers writes a file for every client of its port. A session of its own
carries it, so that it needs no strategy and no cluster, and the file lies where temporary files do (systemd gives each
task a directory of its own). Its name is the incarnation of the process that it is for: no other one reads it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.cluster.probe import incarnation
from trainer.core.failures import FINISHED, TRY_AGAIN, first_line
from trainer.core.task_id import TaskId
from trainer.run.records import read_record

log = logging.getLogger(__name__)
COMMANDS = Path("/tmp")
ASKED = "restarting, as the coordinator asks: what an earlier one left here is in the way"
DEADLINE_SECONDS = 5.0
POLL_SECONDS = 1.0
END_SECONDS = 30.0  # for servers that have trained a moment ago
COMING_SECONDS = 60.0  # for servers that were started together with the coordinator


def received(process: str | None) -> tuple[int | None, str]:
    """Return what the server's process was told to exit with and why, or None."""
    record = (read_record(command_path(process)) if process else None) or {}
    return record.get("code"), record.get("why", "")


def command_path(process: str) -> Path:
    return COMMANDS / f"psfleet-command-{process}.json"


def send(task: str, address: str, process: str, code: int, why: str) -> bool:
    """Tell a server's process to exit; returns whether that has arrived."""
    import tensorflow as tf

    try:
        with session_on(task, address) as session:
            session.run(tf.io.write_file(str(command_path(process)), json.dumps({"code": code, "why": why})))
    except tf.errors.OpError as error:
        log.warning("cannot send a command to %s (%s), trying again: %s", task, address, first_line(error))
        return False
    return True


@contextlib.contextmanager
def session_on(task: str, address: str) -> Iterator[Any]:
    """Open a session whose operations run on that server alone; one that does not answer in time raises an OpError."""
    import tensorflow as tf

    name = TaskId.parse(task)
    server = f"/job:{name.job}/replica:0/task:{name.index}"
    # Without the filter the server would first look for all the others.
    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(1000 * DEADLINE_SECONDS), device_filters=[server])
    with (
        tf.Graph().as_default(),
        tf.compat.v1.Session(f"grpc://{address}", config=config) as session,
        tf.device(f"{server}/device:CPU:0"),
    ):
        yield session


def shut_down_servers(servers: Mapping[str, str], seconds: float = END_SECONDS) -> None:
    """Have servers (task name to address) end, since the run is finished; one that does not answer in time is left."""
    deadline = time.monotonic() + seconds

    def send_until_received(task: str, address: str) -> bool:
        while time.monotonic() < deadline:
            process = incarnation(address)
            if process is not None and send(task, address, process, FINISHED, "the run is finished"):
                return True
            time.sleep(POLL_SECONDS)
        return False

    if not servers:
        return
    with ThreadPoolExecutor(max_workers=min(64, len(servers))) as pool:
        received = dict(zip(servers, pool.map(send_until_received, servers, servers.values()), strict=True))
    if left := [f"{task} ({servers[task]})" for task in servers if not received[task]]:
        log.warning("%s did not hear that the run is finished, and serves on until it is stopped", ", ".join(left))


class Messenger:
    """Tells processes to restart, also those that answer only later; a thread does."""

    def __init__(self, servers: Mapping[str, str]) -> None:
        """Take the servers (task name to address)."""
        self._servers = servers
        self._wanted: dict[str, str] = {}
        self._received: set[str] = set()
        self._news = threading.Event()
        threading.Thread(target=self._deliver, name="commands", daemon=True).start()

    def send(self, restart: Mapping[str, str]) -> None:
        """Tell these processes (task name to incarnation) to restart from now on, and no others."""
        self._wanted = dict(restart)
        self._news.set()

    def _deliver(self) -> None:
        while True:
            wanted = {task: process for task, process in self._wanted.items() if process not in self._received}
            for task, process in wanted.items():
                address = self._servers.get(task)
                if address and incarnation(address) == process and send(task, address, process, TRY_AGAIN, ASKED):
                    self._received.add(process)
            # No process is left to ask, or one that does not answer yet.
            self._news.wait(POLL_SECONDS if wanted else None)
            self._news.clear()
