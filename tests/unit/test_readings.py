"""Which tickets a worker's reading has, what is done when it tells of one, and when files have come to their end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.run.file_list import File
from trainer.training.steps.readings import MAX_AHEAD, RECENT_SECONDS, EndOfFiles, Readings

A, B, C = (File(0, name) for name in "abc")


@dataclasses.dataclass
class Box:
    tickets: list[int] = dataclasses.field(default_factory=list)

    def put(self, ticket: int, *rest: Any) -> None:
        self.tickets.append(ticket)

    def size(self) -> int:
        return len(self.tickets)


def readings(*files: File) -> Readings[Box]:
    """Return the reading of worker 0, which began at second 10 and has these files: tickets from 1."""
    made = Readings(Box)
    reading = made.begin(0, 10.0)
    for file in files:
        made.give(reading, file, seed=1)
    return made


def test_a_ticket_ends_those_before_it_and_itself_where_it_is_done() -> None:
    made = readings(A, B, C)
    assert made.reach(2, 11.0, is_done=False) == ([A], B)
    assert made.reach(2, 12.0, is_done=True) == ([B], None)
    assert made.reach(2, 13.0, is_done=True) == ([], None)
    assert made.end(0) == [C]


def test_tickets_of_a_reading_that_has_ended_say_nothing() -> None:
    made = readings(A)
    assert made.end(0) == [A]
    assert made.end(0) == []
    made.give(made.begin(0, 11.0), A, seed=1)
    assert made.reach(1, 12.0, is_done=True) == ([], None)
    made.clear()
    assert made.reach(2, 12.0, is_done=True) == ([], None)
    assert list(made) == []


@pytest.mark.parametrize(("since", "found"), [(9.0, []), (11.0, [0])])
def test_a_reading_that_began_since_its_worker_was_lost_goes_on(since: float, found: list[int]) -> None:
    assert readings().begun_before({0: since, 1: since}) == found


def test_a_mailbox_lacks_as_many_files_as_were_read_lately() -> None:
    made = readings(*[A] * 50)
    [reading] = made
    reading.mailbox.tickets.clear()
    made.reach(5, 20.0, is_done=True)
    assert reading.lacks(20.0) == 6
    reading.mailbox.tickets += [6, 7]
    assert reading.lacks(20.0) == 4
    made.reach(50, 20.0, is_done=True)
    assert reading.lacks(20.0) == MAX_AHEAD - 2
    assert reading.lacks(20.1 + RECENT_SECONDS) == 0


def test_files_end_where_that_is_told_and_nothing_was_found() -> None:
    end = EndOfFiles(0, now=0.0)
    end.found(["a"], is_end=True, now=1.0)
    assert not end.is_reached(1e9)
    end.found([], is_end=True, now=2.0)
    assert end.is_reached(2.0)
    end.found([], is_end=False, now=3.0)
    assert not end.is_reached(3.0)


def test_files_end_where_none_was_found_or_trained_for_too_long() -> None:
    end = EndOfFiles(60.0, now=0.0)
    assert not end.is_reached(60.0)
    assert end.is_reached(61.0)
    end.found(["a"], is_end=False, now=50.0)
    end.found([], is_end=False, now=100.0)
    assert not end.is_reached(110.0)
    assert end.is_reached(111.0)
    end.moved(112.0)
    assert not end.is_reached(172.0)
