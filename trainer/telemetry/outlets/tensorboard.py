"""Event files of TensorBoard, written without TensorFlow's runtime."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.core.failures import first_line
from trainer.core.settings.config import Config
from trainer.core.settings.parameters import describe_value
from trainer.telemetry.events import describe_event

log = logging.getLogger(__name__)
REOPEN_SECONDS = 60.0
_files = itertools.count()


class EventWriter:
    """Scalars for TensorBoard, written without TensorFlow's runtime, which a lost ps takes its resources from."""

    def __init__(self, directory: Path) -> None:
        import tensorflow as tf

        self._tf = tf
        self._directory = directory
        self._file: Any = None
        self._open_at = 0.0

    def write(self, step: int, values: dict[str, float], at: float | None = None) -> None:
        """Write the values of a time (default: now); what can't be written is lost, with a warning."""
        summary = self._tf.compat.v1.Summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(step, summary, time.time() if at is None else at)

    def write_text(self, step: int, name: str, markdown: str, at: float | None = None) -> None:
        """Write a page for TensorBoard's text."""
        from tensorboard.plugins.text.summary import pb

        self._write(step, pb(name, markdown), time.time() if at is None else at)

    def write_parameters(self, values: Mapping[str, Any]) -> None:
        """Write the program's parameters for TensorBoard's HParams; the directories below this one have the metrics."""
        from tensorboard.plugins.hparams.summary import session_start_pb

        if any(self._directory.glob("events.out.tfevents.*")):
            return  # an earlier process of the run has
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        texts = {name: describe_value(value) for name, value in values.items() if name not in numbers}
        self._write(0, session_start_pb(numbers | texts), time.time())

    def _write(self, step: int, summary: Any, at: float) -> None:
        try:
            if self._file is None and time.monotonic() >= self._open_at:
                self._file = self._open(at)
            if self._file is not None:
                self._append(wall_time=at, step=step, summary=summary)
        except OSError as error:
            # What follows half a record in a file can't be read.
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file, self._open_at = None, time.monotonic() + REOPEN_SECONDS
            log.warning("cannot write TensorBoard's events of step %d: %s", step, first_line(error))

    def _open(self, at: float) -> Any:
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a directory's files in the order of their names.
        name = f"events.out.tfevents.{at:017.6f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        # TensorFlow's writer holds Python's lock while the path hangs, and so all threads of the process.
        self._file = (self._directory / name).open("ab", buffering=0)
        self._append(wall_time=at, file_version="brain.Event:2")
        return self._file

    def _append(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(self._tf.compat.v1.Event(**fields).SerializeToString())
        if self._file.write(record.getvalue()) != len(record.getvalue()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_mark(board: EventWriter, number: int, record: Mapping[str, Any]) -> None:
    """Let a curve rise by one, and add to a page: TensorBoard has no marks."""
    step, at = record["step"], record["time"]
    board.write(step, {"faults": number - 1}, at)
    board.write(step, {"faults": number}, at)
    board.write_text(step, "faults", "    " + describe_event(record), at)  # as it stands: code


def describe_settings(config: Config) -> str:
    """Return the run settings as a table of Markdown, without those that say whom to notify."""
    rows = [(key, value) for key, value in config.as_dict().items() if not key.startswith("notify_")]
    cells = [(f"`{key}`", f"`{describe_value(value)}`".replace("|", "\\|")) for key, value in rows]
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells)])
