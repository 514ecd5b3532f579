"""Which worker reads which file, with `input_sharding: dynamic`: the one that is free gets the next (docs/input.md).

Knows no TensorFlow. Workers' readings begin on threads of TensorFlow's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from trainer.core.config import Config
from trainer.core.failures import UserError
from trainer.run.file_list import File, FileList
from trainer.run.position import Position

log = logging.getLogger(__name__)
EMPTY_FILES = 1000  # in a row, which a worker has looked for an example in
MOST_AHEAD = 32
RECENT_SECONDS = 1.0


class Mailbox(Protocol):
    """Where a reading of a worker gets its files."""

    def put(self, ticket: int, order: int, taken: int, name: str) -> None: ...
    def size(self) -> int:
        """Return how many files it has that the worker has not taken yet."""


Box = TypeVar("Box", bound=Mailbox)


@dataclasses.dataclass
class Reading(Generic[Box]):
    """What a worker reads with one iterator: its tickets, each for a file, in their order."""

    mailbox: Box
    began: float
    tickets: deque[int] = dataclasses.field(default_factory=deque)
    ended: deque[float] = dataclasses.field(default_factory=deque)
    """When each of the last files was done."""

    def ahead(self, now: float) -> int:
        """Return how many files its mailbox should have: more where its files are small."""
        while self.ended and now - self.ended[0] > RECENT_SECONDS:
            self.ended.popleft()
        return min(MOST_AHEAD, 1 + len(self.ended))


class FileOrder(Generic[Box]):
    """Gives each worker its next file before it needs it, and counts what is trained of each."""

    exact = seeded = True

    def __init__(self, config: Config, workers: int, seed: int, make: Callable[[], Box]) -> None:
        """`make` makes a mailbox; the workers begin to read once `look` is known."""
        self.workers = workers
        self.waits = config.input_new_files_seconds > 0
        """Whether files come while the run trains, and each is trained once."""
        self.files = FileList(seed, arriving=self.waits)
        self._patience = config.input_no_files_seconds or math.inf
        self._came = time.monotonic()  # when the last file was found, or trained
        self._is_end = False
        self.look: Callable[[], Sequence[str]] = list
        """Returns the names of the files that are there; set when the program has named them."""
        self.pattern = ""
        self.patterns: Sequence[str] = ()
        self._make = make
        self._own_seed = config.seed
        self._data = {"program": config.program, "program_args": json.loads(json.dumps(dict(config.program_args)))}
        self._readings: dict[int, Reading[Box]] = {}
        self._old: list[Box] = []  # a worker that was frozen may still look into its own
        self._given: dict[int, tuple[File, Reading[Box]]] = {}  # by the ticket
        self._tickets = 0
        self._lock = threading.RLock()

    def join(self) -> None:
        """One more worker reads: it gets a mailbox when it begins."""
        self.workers += 1

    def begin(self, step: int) -> None:
        """The reading begins: look for the files."""
        with self._lock:
            self._came = time.monotonic()
            if not self.waits:
                self.files.find(self._found())

    def come(self, names: Sequence[str], is_end: bool) -> None:
        """These files were found, in this order; `is_end` says that no more will come."""
        with self._lock:
            self.files.come(names)
            if names:
                self._came = time.monotonic()
            self._is_end = is_end and not names

    def known(self) -> set[str]:
        """Return the names of the files that need not be found."""
        with self._lock:
            return self.files.known

    @property
    def is_over(self) -> bool:
        """Whether all files are trained, and no more come."""
        with self._lock:
            quiet = time.monotonic() - self._came
            return self.waits and self.files.is_through and (self._is_end or quiet > self._patience)

    @property
    def news(self) -> str:
        """What a run says that waits for files; empty where it has some."""
        with self._lock:
            if not (self.waits and self.files.is_through):
                return ""
            return f"waiting for new files of {self.pattern}: {self.files.counts()['done']:,} are trained"

    def counts(self) -> dict[str, int]:
        """Return what FileList.counts does."""
        with self._lock:
            return self.files.counts()

    def count(self, step: int) -> None:
        """A call has told this step, of which no file depends."""

    def mailbox(self, worker: int) -> Box:
        """Begin a worker's reading; returns where it gets its files. What it had before goes to the others."""
        with self._lock:
            self._end(worker)
            reading = self._readings[worker] = Reading(self._make(), time.monotonic())
            self._fill(reading)
            return reading.mailbox

    def lose(self, out: Mapping[int, float]) -> None:
        """Give what lost workers had to the others; `out` has since when each is lost (of time.monotonic)."""
        with self._lock:
            for worker, since in out.items():
                if worker in self._readings and self._readings[worker].began < since:
                    self._end(worker)

    def fill(self) -> None:
        """Give each worker its next files; raises UserError where files have no examples."""
        with self._lock:
            for reading in self._readings.values():
                self._fill(reading)

    def take(self, worker: int, place: tuple[int, int]) -> None:
        """A worker has trained so much: a ticket, and the examples of its file that are taken by now; -1 for all."""
        with self._lock:
            ticket, taken = place
            if ticket not in self._given:  # its file was given to another one since
                return
            file, reading = self._given[ticket]
            while reading.tickets[0] != ticket:
                done, _ = self._given.pop(reading.tickets.popleft())
                self._finish(done, reading)
            if taken < 0:
                self._given.pop(reading.tickets.popleft())
                self._finish(file, reading)
            else:
                self.files.reach(file, taken)

    def _finish(self, file: File, reading: Reading[Box]) -> None:
        self.files.finish(file)
        self._came = time.monotonic()
        reading.ended.append(self._came)

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
            self._old += [reading.mailbox for reading in self._readings.values()]
            self._readings, self._given = {}, {}
        return ""

    def _fill(self, reading: Reading[Box]) -> None:
        for _ in range(max(0, reading.ahead(time.monotonic()) - reading.mailbox.size())):
            if len(reading.tickets) >= EMPTY_FILES:
                raise UserError(
                    f"{EMPTY_FILES:,} files of {self.pattern!r} in a row have no example; expected files with "
                    "examples: look at what train_dataset makes of one of them"
                )
            file = self.files.give() or (None if self.waits else self._next_turn())
            if file is None:
                return
            self._tickets += 1
            self._given[self._tickets] = file, reading
            reading.tickets.append(self._tickets)
            reading.mailbox.put(self._tickets, file.order(self.files.seed), file.taken, file.name)

    def _next_turn(self) -> File:
        self.files.find(self._found())
        self.files.next_turn()
        file = self.files.give()
        assert file is not None
        return file

    def _found(self) -> Sequence[str]:
        names = self.look()
        if not names:
            raise UserError(
                f"no file matches {self.pattern!r}; expected files that the coordinator's host sees under the same "
                "names as the workers: write them first, or mend the pattern"
            )
        return names

    def _end(self, worker: int) -> None:
        """End a worker's reading: its files go to the others."""
        reading = self._readings.pop(worker, None)
        if reading is None:
            return
        for ticket in reversed(reading.tickets):
            file, _ = self._given.pop(ticket)
            self.files.give_back(file)
        self._old.append(reading.mailbox)
