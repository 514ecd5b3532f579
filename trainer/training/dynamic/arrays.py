"""What a ps keeps of a dynamic table: arrays by row and an index, under names of our own.

Arrays are reserved: a row takes memory when it is first written. A read of a whole one pays for all of it, so
that only rows are read here. Under its own name a resource outlives the coordinator that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor
from trainer.training.tf_internals.variables import handle_of

CONTAINER = "psfleet.tables"
ABSENT = -1  # what the index says of a key without a row


class Array:
    """A variable with one entry a row; make it, and trace its methods, on its ps's device."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, list(shape), dtype
        self.handle = handle_of(CONTAINER, name, self.shape, dtype)

    def apart(self) -> Array:
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

    def rows(self, rows: Tensor) -> Tensor:
        found = tf.raw_ops.ResourceGather(resource=self.handle, indices=rows, dtype=self.dtype)
        return tf.ensure_shape(found, [None, *self.shape[1:]])

    def set(self, rows: Tensor, values: Tensor) -> Operation:
        return tf.raw_ops.ResourceScatterUpdate(resource=self.handle, indices=rows, updates=values)

    def destroy(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)


class Index:
    """Where a key's row is; make it, and trace its methods, on its ps's device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, container=CONTAINER, shared_name=name
        )

    def apart(self) -> Index:
        """Return the same with a handle of its own, in what is traced."""
        return Index(self.name)

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows of keys, ABSENT for those without one."""
        absent = tf.constant(ABSENT, tf.int64)
        found = tf.raw_ops.LookupTableFindV2(table_handle=self.handle, keys=keys, default_value=absent)
        return tf.ensure_shape(found, [None])

    def insert(self, keys: Tensor, rows: Tensor) -> Operation:
        return tf.raw_ops.LookupTableInsertV2(table_handle=self.handle, keys=keys, values=rows)

    def remove(self, keys: Tensor) -> Operation:
        return tf.raw_ops.LookupTableRemoveV2(table_handle=self.handle, keys=keys)

    def clear(self) -> Operation:
        """Leave no key in it."""
        nothing = tf.zeros([0], tf.int64)
        return tf.raw_ops.LookupTableImportV2(table_handle=self.handle, keys=nothing, values=nothing)

    def size(self) -> Tensor:
        return tf.raw_ops.LookupTableSizeV2(table_handle=self.handle)

    def destroy(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.handle, ignore_lookup_error=True)
