"""Which worker reads which file, with `input_sharding: dynamic`: the one that is free gets the next (docs/input.md).

Knows no TensorFlow. Workers' readings begin on threads of TensorFlow's.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.data_position import Position
from trainer.run.file_list import File, FileList
from trainer.training.steps.readings import Box, EndOfFiles, Readings, WorkerReading

log = logging.getLogger(__name__)
EMPTY_FILES = 1000  # in a row, which a worker has looked for an example in


class FileOrder(Generic[Box]):
    """Gives each worker its next file before it needs it, and counts what is trained of each."""

    exact = seeded = True

    def __init__(
        self,
        config: Config,
        workers: int,
        seed: int,
        make: Callable[[], Box],
        matching: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        """`make` makes a mailbox, `matching` finds files by patterns; workers begin to read once these are `named`."""
        self.workers = workers
        self.files = FileList(seed, arriving=config.input_new_files_seconds > 0)
        self.patterns: Sequence[str] = ()
        self._matching = matching
        self._own_seed = config.seed
        self._data = {"program": config.program, "program_args": json.loads(json.dumps(dict(config.program_args)))}
        self._readings = Readings(make)
        self._end = EndOfFiles(config.input_no_files_seconds, time.monotonic())
        self._lock = threading.RLock()

    @property
    def waits(self) -> bool:
        """Whether files come while the run trains, and each is trained once."""
        return self.files.arriving

    @property
    def _pattern(self) -> str:
        return ", ".join(self.patterns)

    def named(self, patterns: Sequence[str]) -> None:
        """The program has named its files."""
        self.patterns = patterns

    def join(self) -> None:
        """One more worker reads: it gets a mailbox when it begins."""
        self.workers += 1

    def begin(self, step: int) -> None:
        """The reading begins: look for the files."""
        with self._lock:
            self._end.moved(time.monotonic())
            names = self._matching(self.patterns) if self.waits else self._found()
            if gone := self.files.leave_out(names):  # removed since, or another pattern's
                log.warning("files under way do not match %r any more and are left out: %s", self._pattern, gone)
            if not self.waits:
                self.files.find(names)

    def come(self, names: Sequence[str], is_end: bool) -> None:
        """These files were found, in this order; `is_end` says that no more will come."""
        with self._lock:
            self.files.come(names)
            self._end.found(names, is_end, time.monotonic())

    def known(self) -> set[str]:
        """Return the names of the files that need not be found."""
        with self._lock:
            return self.files.known

    @property
    def is_over(self) -> bool:
        """Whether all files are trained, and no more come."""
        with self._lock:
            return self.waits and self.files.is_through and self._end.is_reached(time.monotonic())

    @property
    def news(self) -> str:
        """What a run says that waits for files; empty where it has some."""
        with self._lock:
            if not (self.waits and self.files.is_through):
                return ""
            return f"waiting for new files of {self._pattern}: {self.files.counts()['done']:,} are trained"

    def counts(self) -> dict[str, int]:
        """Return what FileList.counts does."""
        with self._lock:
            return self.files.counts()

    def count(self, step: int) -> None:
        """A call has reported this step; no file depends on it."""

    def mailbox(self, worker: int) -> Box:
        """Begin a worker's reading; returns where it gets its files. What it had before goes to the others."""
        with self._lock:
            self._give_back(worker)
            reading = self._readings.begin(worker, time.monotonic())
            self._fill(reading)
            return reading.mailbox

    def lose(self, out: Mapping[int, float]) -> None:
        """Give what lost workers had to the others; `out` has since when each is lost (of time.monotonic)."""
        with self._lock:
            for worker in self._readings.begun_before(out):
                self._give_back(worker)

    def fill(self) -> None:
        """Give each worker its next files; raises UserError where files have no examples."""
        with self._lock:
            for reading in self._readings:
                self._fill(reading)

    def advance(self, worker: int, place: tuple[int, int]) -> None:
        """A worker has trained so much: a ticket, and the examples of its file that are taken by now; -1 for all."""
        with self._lock:
            (ticket, taken), now = place, time.monotonic()
            done, under_way = self._readings.reach(ticket, now, is_done=taken < 0)
            for file in done:
                self.files.finish(file)
                self._end.moved(now)
            if under_way is not None:
                self.files.reach(under_way, taken)

    @property
    def position(self) -> Position | None:
        """How far the data are read."""
        with self._lock:
            return Position(self.files.seed, (), self._data, self.files.as_record())

    def go_on_from(self, position: Position) -> str:
        """Begin there; returns what differs where the position is none of files: then all are read."""
        if position.files is None:
            return "input_sharding is dynamic, and was not"
        with self._lock:
            why = position.differs(self._own_seed, self._data)
            if why and position.files["open"]:
                log.warning("files under way are read again from their beginning: %s", why)
            seed = position.seed if self._own_seed is None else self._own_seed
            files = FileList(seed, arriving=self.waits)
            files.restore(position.files, same=not why)
            self.files = files
            self._readings.clear()
        return ""

    def _fill(self, reading: WorkerReading[Box]) -> None:
        for _ in range(reading.lacks(time.monotonic())):
            if len(reading.tickets) >= EMPTY_FILES:
                raise UserError(
                    f"{EMPTY_FILES:,} files of {self._pattern!r} in a row have no example; expected files with "
                    "examples: look at what train_dataset makes of one of them"
                )
            file = self.files.give() or (None if self.waits else self._next_turn())
            if file is None:
                return
            self._readings.give(reading, file, self.files.seed)

    def _next_turn(self) -> File:
        self.files.find(self._found())
        self.files.next_turn()
        file = self.files.give()
        assert file is not None
        return file

    def _found(self) -> Sequence[str]:
        names = self._matching(self.patterns)
        if not names:
            raise UserError(
                f"no file matches {self._pattern!r}; expected files that the coordinator's host sees under the same "
                "names as the workers: write them first, or fix the pattern"
            )
        return names

    def _give_back(self, worker: int) -> None:
        """End a worker's reading: its files go to the others."""
        for file in reversed(self._readings.end(worker)):
            self.files.give_back(file)
