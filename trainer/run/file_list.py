"""The files of a run that are given out one by one: which are done, under way, and left (docs/input.md).

Knows no TensorFlow, and no directory: others look for the names.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

ORDERS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class File:
    """A file to be read in a pass, from its first example that was not taken before."""

    turn: int
    """The number of the pass."""
    name: str
    taken: int = 0

    def order(self, seed: int) -> int:
        """Return the number of the order in which its examples are read: the same for the same pass."""
        return number_of(seed, self.turn, self.name)


class FileList:
    """Gives each file once a pass, in an order that follows from the seed and the pass.

    Where files are `arriving` there is one pass, in the order in which they were found.
    """

    def __init__(self, seed: int, *, arriving: bool = False) -> None:
        self.seed = seed
        self.arriving = arriving
        self.turn = 0
        self._names: list[str] = []
        self._done: set[str] = set()  # of this pass
        self._open: dict[tuple[int, str], int] = {}  # the examples that were taken of what is given
        self._left: list[File] = []  # next one last
        self._back: list[File] = []

    def find(self, names: Collection[str]) -> None:
        """Take the names of the files that exist now."""
        self._names = sorted(set(names))
        self._line_up()

    def leave_out(self, names: Collection[str]) -> list[str]:
        """Leave out the files that were given before and are not among these; returns them."""
        gone = {name for _, name in self._open}.difference(names)
        self._open = {key: taken for key, taken in self._open.items() if key[1] not in gone}
        self._back = [file for file in self._back if file.name not in gone]
        self._names = [name for name in self._names if name not in gone]
        return sorted(gone)

    def come(self, names: Sequence[str]) -> None:
        """Take files that were found since, in this order."""
        there = set(self._names)
        self._names += [name for name in names if name not in there]
        self._line_up()

    @property
    def known(self) -> set[str]:
        """The names of all that was found, or is done."""
        return {*self._names, *self._done, *(name for _, name in self._open)}

    @property
    def is_through(self) -> bool:
        """Whether all files are done."""
        return not (self._open or self._back or self._left)

    def give(self) -> File | None:
        """Return the file to be read next: one that was given back, else one of this pass; None where it has none."""
        line = self._back or self._left
        if not line:
            return None
        file = line.pop()
        self._open[file.turn, file.name] = file.taken
        return file

    def next_turn(self) -> None:
        """Begin the next pass; files of this one may be under way still."""
        self.turn += 1
        self._done = set()
        self._line_up()

    def reach(self, file: File, taken: int) -> None:
        """So many examples of a file that was given are trained."""
        self._open[file.turn, file.name] = taken

    def finish(self, file: File) -> None:
        """All examples of a file are trained."""
        self._open.pop((file.turn, file.name), None)
        if file.turn == self.turn:
            self._done.add(file.name)

    def give_back(self, file: File) -> None:
        """Have a file given to another reader, which goes on where this one has come to."""
        taken = self._open[file.turn, file.name]
        self._back.append(dataclasses.replace(file, taken=taken))

    def counts(self) -> dict[str, int]:
        """Return the number of the pass, how many files it has and of these are done, and how many are under way."""
        counts = {"done": len(self._done), "under_way": len(self._open), "found": len(self._names)}
        return counts if self.arriving else {"pass": self.turn, **counts}

    def as_record(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        done: dict[str, list[str]] = {}
        for name in sorted(self._done):
            directory, slash, rest = name.rpartition("/")
            done.setdefault(directory + slash, []).append(rest)
        under_way = sorted([turn, name, taken] for (turn, name), taken in self._open.items())
        return {"turn": self.turn, "done": done, "open": under_way}

    def restore(self, record: Mapping[str, Any], *, same: bool) -> None:
        """Go on there. Where the pipeline is not the `same`, files under way are read from their beginning."""
        self.turn = record["turn"]
        self._done = {directory + name for directory, names in record["done"].items() for name in names}
        self._open = {(turn, name): taken if same else 0 for turn, name, taken in record["open"]}
        self._back = [File(turn, name, taken) for (turn, name), taken in sorted(self._open.items(), reverse=True)]
        if self.arriving:  # these are not found again
            self._names = [*sorted(self._done), *(name for _, name in self._open)]
        self._line_up()

    def _line_up(self) -> None:
        """Put the files of this pass that are left in its order."""
        given = {name for turn, name in self._open if turn == self.turn} | self._done
        files = [File(self.turn, name) for name in self._names if name not in given]
        if self.arriving:
            self._left = files[::-1]
        else:
            self._left = sorted(files, key=lambda file: (file.order(self.seed), file.name), reverse=True)


def number_of(*values: object) -> int:
    """Return a number from 1 to 2^31 - 1 that follows from these values."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (ORDERS - 1)
