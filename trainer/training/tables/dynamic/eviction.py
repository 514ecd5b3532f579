"""Takes rows away, in pieces, so that no step waits long for a ps: old ones, and near capacity those least used."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.core.settings.dynamic_tables import TableSettings
from trainer.training.tables.dynamic.shard import COUNTS, FIRST, NEXT, ROWS, SEEN
from trainer.training.tables.dynamic.table import Table

PIECE_ROWS = 262_144
# Of a sketch's counters: when it has counted so many keys for each, it forgets half.
SIGHTINGS_A_CELL = 1
# Of the rows that a ps has room for: where more are in use, the least used go, until so many are left.
FULL, LEFT = 0.9, 0.8
ANY = np.int64(2**62)
Numbers = Any  # one of each shard


class Eviction:
    """Of one table. Everything is traced once."""

    def __init__(
        self, table: Table, mutexes: Sequence[str], settings: TableSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`mutexes` are those of the shards' updates, and `clock` tells seconds."""
        self._table, self._mutexes, self._settings, self._seconds = table, mutexes, settings, clock
        vector = tf.TensorSpec([len(table.shards)], tf.int64)
        self._read = self._traced(lambda shard, _: (shard.numbers.read(), shard.clock.read()[0]))
        self._has_sketch = table.shards[0].sketch is not None
        if self._has_sketch:
            self._age = self._traced(lambda shard, _: shard.age_sketch())
        self._evict = self._traced(lambda shard, mutex, *given: shard.evict(*given, mutex), *[vector] * 5)
        self._counts = self._traced(lambda shard, _, *given: shard.counts(*given), *[vector] * 3)
        self._looks: list[tuple[float, Numbers]] = []  # when it was looked, and the clocks then

    def forget(self) -> None:
        """Know of no time before this: clocks are those of a checkpoint."""
        self._looks.clear()

    def make(self) -> int:
        """Take away what is too old by now, or too much; returns how many rows."""
        numbers, clocks = (one.numpy() for one in self._read())
        sketch = self._table.shards[0].sketch
        if sketch is not None and numbers[:, SEEN].max() >= SIGHTINGS_A_CELL * sketch.cells:
            self._age()
        before = self._find_limits(clocks)
        gone = self._sweep(numbers[:, NEXT], before, ANY, ANY) if before.max() > 0 else 0 * clocks
        room = np.array([shard.capacity for shard in self._table.shards])
        used = numbers[:, ROWS] - gone
        if (used > FULL * room).any():
            wanted = np.where(used > FULL * room, used - np.int64(LEFT * room), 0)
            gone = gone + self._drop_least_used(numbers[:, NEXT], wanted)
        return int(gone.sum())

    def _find_limits(self, clocks: Numbers) -> Numbers:
        """Return the clocks before which rows are too old."""
        now, settings = self._seconds(), self._settings
        steps, seconds = settings.evict_after_steps, settings.evict_after_seconds
        before = clocks - steps if steps else 0 * clocks
        early = [then for at, then in self._looks if now - at >= seconds]
        if seconds and early:
            before = np.maximum(before, early[-1] + 1)
        kept = len(early if seconds else self._looks) - 1  # the last one says what is idle
        self._looks = [*self._looks[max(kept, 0) :], (now, clocks)]
        return before

    def _drop_least_used(self, ends: Numbers, wanted: Numbers) -> Numbers:
        """Take so many rows away that were trained in the fewest steps, and in none since the last look."""
        idle = self._looks[-2][1] + 1 if len(self._looks) > 1 else 0 * ends
        counts = sum(self._counts(*span, idle).numpy() for span in self._spans(ends))
        # All that were trained less often than this go, and of those that were trained so often as many as are lacking.
        last = [int(np.searchsorted(np.cumsum(each), one)) for each, one in zip(counts, wanted, strict=True)]
        gone = self._sweep(ends, idle, np.where(wanted > 0, last, 0), wanted)
        above = np.where(np.array(last) >= COUNTS - 1, ANY, np.array(last) + 1)
        return gone + self._sweep(ends, idle, above, wanted - gone)

    def _sweep(self, ends: Numbers, before: Numbers, below: Numbers, most: Numbers) -> Numbers:
        """Take rows away as Shard.evict says it; returns how many."""
        gone = 0 * ends
        for span in self._spans(ends):
            below, most = np.broadcast_to(below, ends.shape), np.broadcast_to(most, ends.shape)
            gone = gone + self._evict(*span, before, below, most - gone).numpy()
        return gone

    def _spans(self, ends: Numbers) -> list[tuple[Numbers, Numbers]]:
        starts = range(FIRST, int(ends.max()), PIECE_ROWS)
        return [(np.minimum(start, ends), np.minimum(start + PIECE_ROWS, ends)) for start in starts]

    def _traced(self, make: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
        """Trace what each shard does, with its mutex and its numbers of each vector that is given; returns stacks."""

        def on_all(*given: Tensor) -> Any:
            found = []
            shards = zip(self._table.shards, self._table.devices, self._mutexes, strict=True)
            for number, (shard, device, mutex) in enumerate(shards):
                with tf.device(device):
                    found.append(make(shard, mutex, *(one[number] for one in given)))
            return tf.nest.map_structure(lambda *each: tf.stack(each), *found)

        traced = tf.function(on_all, autograph=False).get_concrete_function(*specs)
        return lambda *given: traced(*(tf.constant(one, tf.int64) for one in given))
