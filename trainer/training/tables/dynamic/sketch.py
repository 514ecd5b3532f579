"""Counts how often keys without a row were seen, in little memory: perhaps too often, never too seldom.

Each key has a cell in each of two rows of counters, and its count is the lesser one. Only that one is raised
(Estan and Varghese, New directions in traffic measurement and accounting, 2002: conservative update).
"""

from __future__ import annotations

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor
from trainer.training.tables.dynamic.arrays import Array
from trainer.training.tables.dynamic.hashing import mixed

MIN_CELLS, MAX_CELLS = 1 << 16, 1 << 22
SALTS = (0x14057B7EF767814F, 0x2545F4914F6CDD1D)


class Sketch:
    """The counters on one ps. Make it, and call its methods, with that ps as the device and its mutex held."""

    def __init__(self, name: str, capacity: int, sightings: int) -> None:
        """It lets a key have a row when it was seen in so many steps; its size follows from the rows there may be."""
        self._made = name, capacity, sightings
        self.sightings = sightings
        self.cells = min(MAX_CELLS, max(MIN_CELLS, 1 << (4 * capacity - 1).bit_length()))
        self.counts = Array(name, [len(SALTS) * self.cells], tf.int32)

    def with_own_handles(self) -> Sketch:
        """Return the same with a handle of its own, in what is traced."""
        return Sketch(*self._made)

    def begin(self) -> Operation:
        """Have seen nothing."""
        return self.counts.assign(tf.zeros(self.counts.shape, tf.int32))

    def seen_enough(self, keys: Tensor) -> Tensor:
        """Count these keys, each named once, and return which were seen often enough."""
        rows = [mixed(keys, salt) % self.cells + number * self.cells for number, salt in enumerate(SALTS)]
        times = tf.minimum(*(self.counts.rows(row) for row in rows)) + 1
        raised = tf.raw_ops.ResourceScatterMax(
            resource=self.counts.handle, indices=tf.stack(rows, 1), updates=tf.stack([times] * len(SALTS), 1)
        )
        with tf.control_dependencies([raised]):
            return tf.identity(times >= self.sightings)

    def halve(self) -> Operation:
        """Count half of what was counted."""
        return self.counts.assign(self.counts.read() // 2)
