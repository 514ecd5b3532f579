"""How far a run has read its data, as a checkpoint's manifest keeps it (docs/input.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

FIRST = (0, 0)


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where a worker's reading begins: in which order, and how much of it is left out."""

    seed: int
    number: int = 0
    """The step where it begins; with `input_position: exact` the pass over the part."""
    taken: int = 0
    """Examples of the pass that were taken before; for `input_position: exact`."""


@dataclasses.dataclass(frozen=True)
class Position:
    """The seed of the order, and for each part the pass over it and the examples that were taken of that."""

    seed: int
    parts: tuple[tuple[int, int], ...]
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Whose data they are: the program, and its parameters."""
    files: Mapping[str, Any] | None = None
    """Of files that are given out one by one what FileList has; then there are no parts."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        """Return what `as_record` made."""
        parts = tuple((number, taken) for number, taken in record["parts"])
        return cls(record["seed"], parts, record.get("data", {}), record.get("files"))

    def as_record(self) -> dict[str, Any]:
        record = {"seed": self.seed, "parts": [list(part) for part in self.parts], "data": dict(self.data)}
        return record if self.files is None else {**record, "files": dict(self.files)}

    def differs(self, seed: int | None, data: Mapping[str, Any]) -> str:
        """Say what has a run with these settings read otherwise than this position counts; nothing where it reads so.

        A run without a seed goes on with the position's.
        """
        wanted = {**data, "seed": self.seed if seed is None else seed}
        counted = {**self.data, "seed": self.seed}
        found = [name for name in wanted if counted.get(name) != wanted[name]]
        return ", ".join(f"{name} is {wanted[name]!r} and was {counted.get(name)!r}" for name in found)

    def rewound(self, seed: int | None, data: Mapping[str, Any]) -> Position:
        """Return the beginning of the earliest pass that is under way, for a run with these settings."""
        number, _ = min(self.parts, default=FIRST)
        return Position(self.seed if seed is None else seed, ((number, 0),) * max(1, len(self.parts)), data)

    def among(self, parts: int) -> tuple[tuple[int, int], ...]:
        """Return where so many parts begin.

        If the number of parts has changed, all begin in the earliest pass, at the share of it that the slowest reached.
        """
        if parts == len(self.parts):
            return self.parts
        number, taken = min(self.parts)
        return ((number, taken * len(self.parts) // parts),) * parts
