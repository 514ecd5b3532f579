"""Which release each server runs, where no path is shared on which a host could see that it missed one.

A server works in the directory of its release, and TensorFlow reads a file there for every client of its port. So one
of any release answers, also one that knows nothing of this question.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable

from trainer.cluster.remote_commands import session_on
from trainer.core.failures import first_line
from trainer.run.release import RECORD

log = logging.getLogger(__name__)
THREADS = 8  # of which a server that is frozen holds one, for the deadline of its session
PAUSE_SECONDS = 1.0
TRIES = 3
NONE = "none"
UNKNOWN = "unknown"


def read_release(task: str, address: str) -> str:
    """Return the release that a server runs, or "none"; raises TensorFlow's OpError when it does not answer."""
    import tensorflow as tf

    try:
        with session_on(task, address) as session:
            record = json.loads(session.run(tf.io.read_file(RECORD)))
    except (tf.errors.NotFoundError, ValueError):
        return NONE
    return str(record.get("id") or NONE) if isinstance(record, dict) else NONE


class ServerReleases:
    """Asks each process once, beside those that want to know."""

    def __init__(self, own: str, read: Callable[[str, str], str] = read_release) -> None:
        """Take the release that all must run."""
        self._own = own
        self._read = read
        self._found: dict[str, str] = {}  # by process
        self._asked: set[str] = set()
        self._questions: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self._ask, name="releases", daemon=True).start()

    def other(self, task: str, address: str, process: str) -> str | None:
        """Say what that process runs instead, nothing when it runs the same, None while that is not known."""
        if process not in self._asked:
            self._asked.add(process)
            self._questions.put((task, address, process))
        found = self._found.get(process)
        if found is None or found == self._own:
            return found and ""
        if found == UNKNOWN:
            return f"does not say which release it runs, and the coordinator runs {self._own}"
        return f"runs release {found}, and the coordinator {self._own}"

    def _ask(self) -> None:
        while True:
            task, address, process = self._questions.get()
            for _ in range(TRIES):
                try:
                    self._found[process] = self._read(task, address)
                    break
                except Exception as error:
                    log.warning("cannot ask %s (%s) which release it runs: %s", task, address, first_line(error))
                    time.sleep(PAUSE_SECONDS)
            else:
                # It is no longer waited for; its next answer has it asked again.
                self._found[process] = UNKNOWN
                self._asked.discard(process)
