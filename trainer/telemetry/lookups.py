"""What steps ask of tables lately: the hot keys, and each ps's share of the rows. Knows no TensorFlow."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAMPLED = 32  # ids of a step
TAKE_SECONDS = 0.25  # steps that end sooner after the last one are passed over
STEPS = 128  # lately: so many steps
HOT = 0.01  # of the lookups, from which on a key is hot
MIN_SIGHTINGS = 5  # times among the samples: fewer may be chance
MAX_HOT_KEYS = 5
MAX_TABLES = 5  # that text names
Owners = Callable[[Sequence[int]], Sequence[int]]  # the ps that has each row


@dataclasses.dataclass(frozen=True)
class LookupSample:
    """Of a step: how many ids its lookups in a table had, how many rows it asked for, and some of both."""

    ids: int
    rows: int
    some_ids: Sequence[int]
    some_rows: Sequence[int]


class Lately:
    """The last samples of one table."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._samples: collections.deque[LookupSample] = collections.deque(maxlen=STEPS)

    def add(self, sample: LookupSample) -> None:
        if sample.ids:
            self._samples.append(sample)

    def summary(self) -> dict[str, Any] | None:
        """Return ids and rows of a step, each ps's share of the rows, and the hot keys: share of the ids, and ps.

        The ps are numbers.
        """
        if not self._samples:
            return None
        ids = collections.Counter(key for sample in self._samples for key in sample.some_ids)
        rows = collections.Counter(row for sample in self._samples for row in sample.some_rows)
        by_ps = collections.Counter[int]()
        for server, count in zip(self._owners(list(rows)), rows.values(), strict=True):
            by_ps[server] += count
        least, count = max(MIN_SIGHTINGS, HOT * ids.total()), len(self._samples)
        most = [(key, times) for key, times in ids.most_common(MAX_HOT_KEYS) if times >= least]
        return {
            "ids_per_step": round(sum(each.ids for each in self._samples) / count, 1),
            "rows_per_step": round(sum(each.rows for each in self._samples) / count, 1),
            "by_ps": {server: round(by_ps[server] / rows.total(), 4) for server in sorted(by_ps)},
            "hot": [
                [key, round(times / ids.total(), 4), server]
                for (key, times), server in zip(most, self._owners([key for key, _ in most]), strict=True)
            ],
        }


class Lookups:
    """Of all tables, by their names. It takes a sample now and then: each costs the coordinator a moment."""

    def __init__(self, owners: Mapping[str, Owners]) -> None:
        self._tables = {name: Lately(each) for name, each in owners.items()}
        self._taken = -TAKE_SECONDS

    def is_due(self, now: float) -> bool:
        return now - self._taken >= TAKE_SECONDS

    def add_samples(self, samples: Sequence[LookupSample], now: float) -> None:
        """Take a step's samples, a table each, at this time in seconds."""
        self._taken = now
        for table, sample in zip(self._tables.values(), samples, strict=True):
            table.add(sample)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return of each table what Lately.summary does; those that no step has looked up are left out."""
        found = {name: table.summary() for name, table in self._tables.items()}
        return {name: each for name, each in found.items() if each is not None}


def describe_lookups(lookups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say in a line each what steps ask of the tables, of many those of which they ask the most."""
    most = sorted(lookups.items(), key=lambda one: -one[1]["rows_per_step"])[:MAX_TABLES]
    return [f"{name}, {describe_asked(asked)}" for name, asked in most]


def describe_asked(asked: Mapping[str, Any]) -> str:
    """Say what steps ask of one table."""
    shares = ", ".join(f"{task} {share:.0%}" for task, share in asked["by_ps"].items())
    hot = ", ".join(f"{key} ({share:.0%})" for key, share, _ in asked["hot"])
    counts = f"{asked['ids_per_step']:,.0f} ids and {asked['rows_per_step']:,.0f} rows a step: {shares}"
    return f"{counts}; hot keys {hot}" if hot else counts
