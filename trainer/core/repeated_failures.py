"""Tell a program's error from a worker's trouble, where TensorFlow takes the one for the other.

It calls some errors a worker's failure, lets go of the worker, takes it in again and repeats the call: for ever where
the program is at fault. Such an error comes from every worker, in the same words, and no process has ended.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection

from trainer.core.failures import UserError, explain, first_line
from trainer.core.transport_errors import OF_A_CALL

FAILURES = 3  # with one message
# What differs between two reports of one error: the numbers of tasks and functions, addresses, keys.
VARIES = re.compile(r"0x[0-9a-f]+|[0-9]+", re.IGNORECASE)


def signature(message: str) -> str:
    """Return what two reports of one error have in common: the first line, or the first of several root errors."""
    return VARIES.sub("#", first_line(Exception(message)))


class RepeatedFailures:
    """Counts the failures of calls by what they report, since a call ended well; called from workers' threads."""

    def __init__(self, failures: int = FAILURES) -> None:
        """`failures` says how many make an error the program's, at least one of each worker."""
        self._failures = failures
        self._lock = threading.Lock()
        self._seen: dict[str, dict[tuple[str, str | None], int]] = {}

    def add(self, task: str, process: str | None, classes: Collection[str], message: str) -> None:
        """Count a failure on a worker; `classes` names the error's class and those above it.

        What breaks a call from outside is not counted: a closed connection, a deadline.
        """
        if set(OF_A_CALL) & set(classes):
            return
        with self._lock:
            counts = self._seen.setdefault(signature(message), {})
            counts[task, process] = counts.get((task, process), 0) + 1

    def are_the_programs(self, message: str, processes: Collection[tuple[str, str | None]]) -> bool:
        """Return whether each of these processes of workers has failed with this message, together often enough."""
        with self._lock:
            counts = self._seen.get(signature(message), {})
            failed = [counts.get(process, 0) for process in processes]
            return all(failed) and sum(failed) >= self._failures

    def clear(self) -> None:
        """Begin again: a call has ended well."""
        with self._lock:
            self._seen.clear()

    @property
    def any(self) -> bool:
        """Whether a call has failed since one ended well."""
        return bool(self._seen)


def failed_alike(error: Exception) -> UserError:
    """Return the error that the program has, where every worker reports it and none has ended."""
    return UserError(
        f"every worker fails in the same way, again and again, and none of them has ended: {explain(error)}. "
        "So the program or its data are at fault, not a machine. Where it names a device: make in build_model what a "
        "step or a dataset uses. A variable, table, optimizer or generator that is made elsewhere lies in the "
        "coordinator, where workers can't reach it (docs/programs.md)"
    )
