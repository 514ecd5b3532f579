"""What workers read of files that are given out one by one, and when no more come; time is an argument."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from trainer.run.file_list import File

MAX_AHEAD = 32
RECENT_SECONDS = 1.0


class Mailbox(Protocol):
    """Where a reading of a worker gets its files."""

    def put(self, ticket: int, order: int, taken: int, name: str) -> None: ...
    def size(self) -> int:
        """Return how many files it has that the worker has not taken yet."""


Box = TypeVar("Box", bound=Mailbox)


@dataclasses.dataclass
class WorkerReading(Generic[Box]):
    """What a worker reads with one iterator: its tickets, each for a file, in their order."""

    mailbox: Box
    began: float
    tickets: deque[int] = dataclasses.field(default_factory=deque)
    ended: deque[float] = dataclasses.field(default_factory=deque)
    """When each of the last files was done."""

    def lacks(self, now: float) -> int:
        """Return how many files its mailbox should have and has not: more where its files are small."""
        while self.ended and now - self.ended[0] > RECENT_SECONDS:
            self.ended.popleft()
        return max(0, min(MAX_AHEAD, 1 + len(self.ended)) - self.mailbox.size())


class Readings(Generic[Box]):
    """The present reading of each worker, and which file each of its tickets is for."""

    def __init__(self, make: Callable[[], Box]) -> None:
        """`make` makes a mailbox."""
        self._make = make
        self._of: dict[int, WorkerReading[Box]] = {}  # by the worker
        self._old: list[Box] = []  # a worker that was frozen may still look into its own
        self._given: dict[int, tuple[File, WorkerReading[Box]]] = {}  # by the ticket
        self._tickets = 0

    def __iter__(self) -> Iterator[WorkerReading[Box]]:
        return iter(self._of.values())

    def begin(self, worker: int, now: float) -> WorkerReading[Box]:
        """Begin a worker's reading; that before must have ended."""
        reading = self._of[worker] = WorkerReading(self._make(), now)
        return reading

    def begun_before(self, lost: Mapping[int, float]) -> list[int]:
        """Return the workers that have not begun again since they were lost; `lost` has since when each is."""
        return [worker for worker, since in lost.items() if worker in self._of and self._of[worker].began < since]

    def give(self, reading: WorkerReading[Box], file: File, seed: int) -> None:
        """Give a reading one more file."""
        self._tickets += 1
        self._given[self._tickets] = file, reading
        reading.tickets.append(self._tickets)
        reading.mailbox.put(self._tickets, file.order(seed), file.taken, file.name)

    def reach(self, ticket: int, now: float, *, is_done: bool) -> tuple[list[File], File | None]:
        """A worker has come to this ticket, or to its end; returns the files that are done by that, and its own."""
        if ticket not in self._given:  # its file was given to another one since
            return [], None
        file, reading = self._given[ticket]
        count = reading.tickets.index(ticket) + is_done
        reading.ended.extend([now] * count)
        return [self._given.pop(reading.tickets.popleft())[0] for _ in range(count)], None if is_done else file

    def end(self, worker: int) -> list[File]:
        """End a worker's reading, where it has one; returns the files that it had, in their order."""
        if worker not in self._of:
            return []
        reading = self._of.pop(worker)
        self._old.append(reading.mailbox)
        return [self._given.pop(ticket)[0] for ticket in reading.tickets]

    def clear(self) -> None:
        """End all readings, whose files count no more."""
        for worker in list(self._of):
            self.end(worker)


class EndOfFiles:
    """Whether no more files come: that is announced, or none was found or trained for too long."""

    def __init__(self, patience: float, now: float) -> None:
        """Take for how many seconds none may be found or trained; 0 for any time."""
        self._patience = patience or math.inf
        self._moved_at = now
        self._is_announced = False

    def moved(self, now: float) -> None:
        """The reading has begun, or a file was trained."""
        self._moved_at = now

    def found(self, names: Collection[str], is_end: bool, now: float) -> None:
        """These files were found last; `is_end` says that no more will come after them."""
        if names:
            self._moved_at = now
        self._is_announced = is_end and not names

    def is_reached(self, now: float) -> bool:
        """Return whether no more files come."""
        return self._is_announced or now - self._moved_at > self._patience
