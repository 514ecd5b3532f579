"""Files that come while a run trains: which of them are whole, and whether more will come.

A file is taken once two looks in a row have found it with the same size and time, or when it is older than the time
between two looks at the first. Names that begin with a dot or an underscore, or end with .tmp, are left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from trainer.training.data.file_names import matching

log = logging.getLogger(__name__)
END = "_END"  # beside the files: no more will come
UNFINISHED = ".tmp"


class Arrivals:
    """Looks into the directories of some patterns again and again, on a thread of its own."""

    def __init__(self, patterns: Sequence[str], seconds: float) -> None:
        """Look every so many seconds."""
        self._patterns, self._seconds = patterns, seconds
        self._seen: dict[str, tuple[int, int]] = {}  # sizes and times of files that are not whole yet
        self._first = True
        self._over = threading.Event()

    def poll(self, known: Collection[str]) -> tuple[list[str], bool]:
        """Return the whole files that are not known, those written first leading; and whether no more will come.

        Raises OSError where a folder can't be read: the end would come before its files.
        """
        names = set(matching(self._patterns))
        looks = {name: stat_of(name) for name in names.difference(known) if is_ready(name)}
        whole = []
        for name, look in looks.items():
            age = time.time() - look[1] / 1e9 if look else 0.0
            if look is not None and (self._seen.get(name) == look or (self._first and age > self._seconds)):
                whole.append((look[1], name))
        self._seen = {name: look for name, look in looks.items() if look is not None}
        self._first = False
        waiting = len(looks) > len(whole)
        return [name for _, name in sorted(whole)], not waiting and self._is_end()

    def follow(self, known: Callable[[], Collection[str]], tell: Callable[[list[str], bool], object]) -> None:
        """Look until `close`, and tell what is found each time."""

        def work() -> None:
            while not self._over.wait(self._seconds):
                try:
                    tell(*self.poll(known()))
                except (tf.errors.OpError, OSError) as error:
                    log.warning("cannot look for new files: %s", error)

        threading.Thread(target=work, name="files", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _is_end(self) -> bool:
        directories = {pattern.rpartition("/")[0] for pattern in self._patterns}
        return any(tf.io.gfile.glob(f"{directory}/{END}") for directory in directories)


def is_ready(name: str) -> bool:
    """Return whether the name is none of a file that is being written."""
    last = name.rpartition("/")[2]
    return not last.startswith((".", "_")) and not last.endswith(UNFINISHED)


def stat_of(name: str) -> tuple[int, int] | None:
    """Return a file's size and time (ns); None where it has gone."""
    try:
        found: Any = tf.io.gfile.stat(name)
    except tf.errors.NotFoundError:
        return None
    return int(found.length), int(found.mtime_nsec)
