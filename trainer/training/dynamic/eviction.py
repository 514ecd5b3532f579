"""Takes rows away that no step has trained for long, in pieces, so that nobody waits long for a ps."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.training.dynamic.shard import FIRST, NEXT, SEEN
from trainer.training.dynamic.table import Table

PIECE_ROWS = 262_144
# Of a sketch's counters: when it has counted so many keys for each, it forgets half.
SIGHTINGS_A_CELL = 1


class Eviction:
    """Of one table. Everything is traced once."""

    def __init__(self, table: Table, mutexes: Sequence[str], after_steps: int) -> None:
        """`mutexes` are those of the shards' updates; rows leave `after_steps` steps, 0: they stay."""
        self._table, self._mutexes, self._after = table, mutexes, after_steps
        vector = tf.TensorSpec([len(table.shards)], tf.int64)
        self._read = tf.function(self._read_numbers, autograph=False).get_concrete_function()
        self._has_sketch = table.shards[0].sketch is not None
        if self._has_sketch:
            self._age = tf.function(self._age_sketches, autograph=False).get_concrete_function()
        self._evict = tf.function(self._evict_piece, autograph=False).get_concrete_function(vector, vector, vector)

    def make(self) -> int:
        """Take away what is too old by now; returns how many rows."""
        numbers, clocks = (one.numpy() for one in self._read())
        sketch = self._table.shards[0].sketch
        if sketch is not None and numbers[:, SEEN].max() >= SIGHTINGS_A_CELL * sketch.cells:
            self._age().numpy()
        if not self._after:
            return 0
        ends, before, gone = numbers[:, NEXT], clocks - self._after, 0
        for start in range(FIRST, int(ends.max()), PIECE_ROWS):
            starts = [min(start, end) for end in ends]
            stops = [min(start + PIECE_ROWS, end) for end in ends]
            gone += int(self._evict(*(tf.constant(each, tf.int64) for each in (starts, stops, before))))
        return gone

    def _read_numbers(self) -> tuple[Tensor, Tensor]:
        numbers, clocks = [], []
        for shard, device in zip(self._table.shards, self._table.devices, strict=True):
            with tf.device(device):
                numbers.append(shard.numbers.read())
                clocks.append(shard.clock.read()[0])
        return tf.stack(numbers), tf.stack(clocks)

    def _age_sketches(self) -> Tensor:
        aged = []
        for shard, device in zip(self._table.shards, self._table.devices, strict=True):
            with tf.device(device):
                aged.append(shard.age_sketch())
        return tf.add_n(aged)

    def _evict_piece(self, starts: Tensor, stops: Tensor, before: Tensor) -> Tensor:
        gone = []
        shards = zip(self._table.shards, self._table.devices, self._mutexes, strict=True)
        for number, (shard, device, mutex) in enumerate(shards):
            with tf.device(device):
                gone.append(shard.evict(starts[number], stops[number], before[number], mutex))
        return tf.add_n(gone)
