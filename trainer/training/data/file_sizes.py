"""How large the files of the training data are, so that uneven parts can be named."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.telemetry.uneven_files import Files, sizes_of_data

log = logging.getLogger(__name__)
MAX_FILES = 10_000  # a look at more would keep a shared path busy


class FileSizes:
    """Looks at files on a thread of its own: a shared path may be slow."""

    def __init__(self) -> None:
        self._groups: list[tuple[str, ...]] = []  # what the program has asked for, each time for the files of a pattern
        self._known: dict[tuple[str, ...], Files] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The program asks for its files again."""
        self._groups = []

    def found(self, names: Sequence[str]) -> None:
        """The program has asked for these files."""
        group = tuple(names)
        self._groups.append(group)
        if group not in self._known and len(group) <= MAX_FILES:
            threading.Thread(target=self._read_sizes, args=(group,), name="sizes", daemon=True).start()

    def sizes(self, parts: int) -> dict[str, Any]:
        """Return what sizes_of_data does of so many parts, 0 for undivided data; nothing until all sizes are known."""
        known = [self._known.get(group) for group in self._groups]
        return sizes_of_data([each for each in known if each is not None], parts) if None not in known else {}

    def _read_sizes(self, names: tuple[str, ...]) -> None:
        try:
            files = [(name, size_of(name)) for name in names]
        except (OSError, tf.errors.OpError) as error:
            log.debug("can't look at the sizes of files: %s", error)
            return
        with self._lock:
            self._known = {group: each for group, each in self._known.items() if group in self._groups} | {names: files}


def size_of(name: str) -> int:
    """Return a file's bytes, also in a store that TensorFlow knows."""
    return int(tf.io.gfile.stat(name).length) if "://" in name else Path(name).stat().st_size
