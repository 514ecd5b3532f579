"""Text for the operator: tables, a line that is rewritten in place, durations."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from fleet.output.terminal import one_line, printable
from trainer.telemetry.status import lay_out

lost: list[TextIO] = []
"""Outputs whose disk was full. A verb that printed there ends with 1: what reads the file finds a part of it."""


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align columns; None is an empty cell. A row is one line, whatever its cells say, and no line ends in blanks."""
    return lay_out([["" if cell is None else one_line(str(cell)) for cell in row] for row in [header, *rows]])


def render_duration(seconds: float | None) -> str:
    """Two units at most: `42 s`, `3 min 5 s`, `2 h 10 min`, `4 d 3 h`."""
    if seconds is None:
        return ""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def put(stream: TextIO, text: str, begin: str = "", end: str = "\n") -> None:
    """Print now, with nothing in the text that steers a terminal: that is for `begin` and `end`, which are the kit's.

    When the reader has gone (`fab status | head`), a verb goes on to its end all the same.
    """
    try:
        stream.write(begin + printable(text) + end)
        stream.flush()
    except OSError as error:
        give_up(stream, error)


def give_up(stream: TextIO, error: OSError) -> None:
    """Have what else is printed there go nowhere, since its reader has gone or its disk is full; raise other errors."""
    if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):  # the second is a terminal that was shut
        raise error
    if error.errno == errno.ENOSPC and stream is not sys.stderr:
        lost.append(stream)
        print("standard output can't be written: the disk is full. The verb goes on to its end", file=sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class ProgressLine:
    """One line that is rewritten in place on a terminal, and elsewhere printed again every few seconds."""

    def __init__(
        self, stream: TextIO, every: float = 5.0, clock: Callable[[], float] = time.monotonic, width: int | None = None
    ) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._terminal = stream.isatty()
        self._width = width
        self._last: float | None = None
        self._text = ""

    def show(self, text: str) -> None:
        if self._terminal:
            width = self._width or shutil.get_terminal_size().columns
            put(self._stream, one_line(text)[: width - 1], "\r", "\x1b[K")
        elif text != self._text and (self._last is None or self._clock() - self._last >= self._every):
            put(self._stream, one_line(text))
            self._last = self._clock()
            self._text = text

    def keep(self, text: str) -> None:
        """Print a line that stays, and leave the one that is rewritten."""
        self.end()
        put(self._stream, text)

    def end(self) -> None:
        """Leave the line; what is printed next starts on its own."""
        if self._terminal:
            put(self._stream, "", "\r\x1b[K", "")
