"""What a ps keeps of a dynamic table: arrays by row and an index, under names of our own.

Arrays are reserved: a row takes memory when it is first written. A read of a whole one pays for all of it, so
that only rows are read here. Under its own name a resource outlives the coordinator that made it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor
from trainer.training.tables.dynamic.hashing import GOLDEN
from trainer.training.tf_internals.variables import handle_of

CONTAINER = "psfleet.tables"
ABSENT = -1  # what the index says of a key without a row
# How many keys a hash table of an index has on average, when the table of rows is full, and how many of them there are.
PART_KEYS, MAX_PARTS = 1 << 21, 16
SPREAD = GOLDEN - 2**64  # a key's hash table follows from their product


class Array:
    """A variable with one entry a row; make it, and trace its methods, on its ps's device."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, list(shape), dtype
        self.handle = handle_of(CONTAINER, name, self.shape, dtype)

    def with_own_handles(self) -> Array:
        """Return the same with a handle of its own, in what is traced.

        tf.function orders all that uses one handle. What holds a mutex would wait for what the step does before.
        """
        return Array(self.name, self.shape, self.dtype)

    def reserve(self) -> Operation:
        """Give it memory that is taken as it is written."""
        empty = tf.raw_ops.Empty(shape=self.shape, dtype=self.dtype, init=False)
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=empty)

    def read(self) -> Tensor:
        """Return all of a small one."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Tensor) -> Operation:
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def add(self, value: Tensor) -> Operation:
        return tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=value)

    def rows(self, rows: Tensor) -> Tensor:
        found = tf.raw_ops.ResourceGather(resource=self.handle, indices=rows, dtype=self.dtype)
        found.set_shape([None, *self.shape[1:]])
        return found

    def set(self, rows: Tensor, values: Tensor) -> Operation:
        return tf.raw_ops.ResourceScatterUpdate(resource=self.handle, indices=rows, updates=values)

    def destroy(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)


class Index:
    """Where a key's row is; make it, and trace its methods, on its ps's device.

    A hash table that grows puts all its keys in new places, and everybody waits. So a large index has several. Their
    shares of the keys differ, so that no two grow at the same time (docs/decisions/0249).
    """

    def __init__(self, name: str, parts: int = 1) -> None:
        self.name = name
        self.handles = [
            tf.raw_ops.MutableHashTableV2(
                key_dtype=tf.int64, value_dtype=tf.int64, container=CONTAINER, shared_name=part_name(name, number)
            )
            for number in range(parts)
        ]

    def with_own_handles(self) -> Index:
        """Return the same with handles of its own, in what is traced."""
        return Index(self.name, len(self.handles))

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows of keys, ABSENT for those without one."""
        absent, owners = tf.constant(ABSENT, tf.int64), self._owners(keys)
        found = self._in_turn(
            lambda handle, part: tf.raw_ops.LookupTableFindV2(table_handle=handle, keys=part, default_value=absent),
            self._parted(keys, owners),
        )
        if len(found) > 1:
            found = [tf.dynamic_stitch(self._parted(tf.range(tf.size(keys)), owners), found)]
        found[0].set_shape([None])
        return found[0]

    def insert(self, keys: Tensor, rows: Tensor) -> Operation:
        owners = self._owners(keys)
        done = self._in_turn(
            lambda handle, part, own: tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=part, values=own),
            self._parted(keys, owners),
            self._parted(rows, owners),
        )
        return done[-1]

    def remove(self, keys: Tensor) -> Operation:
        done = self._in_turn(
            lambda handle, part: tf.raw_ops.LookupTableRemoveV2(table_handle=handle, keys=part),
            self._parted(keys, self._owners(keys)),
        )
        return done[-1]

    def clear(self) -> Operation:
        """Leave no key in it."""
        nothing = tf.zeros([0], tf.int64)
        done = self._in_turn(
            lambda handle: tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=nothing, values=nothing)
        )
        return done[-1]

    def size(self) -> Tensor:
        return tf.add_n([tf.raw_ops.LookupTableSizeV2(table_handle=handle) for handle in self.handles])

    def destroy(self) -> None:
        for handle in self.handles:
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def _in_turn(self, act: Callable[..., Any], *parts: Sequence[Tensor]) -> list[Any]:
        """Do something with each hash table, in one thread: to wake another one takes longer."""
        done: list[Any] = []
        for handle, *own in zip(self.handles, *parts, strict=True):
            with tf.control_dependencies(done[-1:]):
                done.append(act(handle, *own))
        return done

    def _owners(self, keys: Tensor) -> Tensor | None:
        """Return the number of the hash table that has each key (int32), None where there is one."""
        count = len(self.handles)
        return tf.raw_ops.Bucketize(input=keys * SPREAD, boundaries=boundaries_of(count)) if count > 1 else None

    def _parted(self, values: Tensor, owners: Tensor | None) -> list[Tensor]:
        """Return what belongs to each hash table."""
        return [values] if owners is None else tf.dynamic_partition(values, owners, len(self.handles))


def parts_of(capacity: int) -> int:
    """Return how many hash tables the index of so many rows has."""
    return min(MAX_PARTS, math.ceil(capacity / PART_KEYS))


def part_name(name: str, number: int) -> str:
    return f"{name}{number or ''}"


def boundaries_of(parts: int) -> list[float]:
    """Return where the share of each hash table ends, of all numbers of 64 bits.

    A share is 2 ** (1 / parts) of the one before. So the last is not quite twice the first, and hash tables that double
    grow one after the other.
    """
    shares = [2 ** (number / parts) for number in range(parts)]
    return [2.0**64 * (end / sum(shares) - 0.5) for end in itertools.accumulate(shares[:-1])]
