"""Lookups in split tables: each row is asked for once a batch, and its gradient goes back once.

TensorFlow's own lookup asks for a row as often as a batch names it. Its gradient then names rows several times, and
tf_keras adds these up before an update, shard by shard, and sends the rows' numbers once more. Where it clips gradients
it does so before it adds them up, so that there TensorFlow's own lookup stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from trainer.core.contracts import Tensor, Variable
from trainer.training.precision import CastShards

ONCE = "rows_asked_for_once"  # in the names of operations that give rows' numbers, each of them once
SPLITS = "DynamicPartition"  # the operation that gives each shard its rows' numbers
GIVEN = "rows_of_keys"  # in the names of operations that give a dynamic table's rows
_asking_once = [False]


@contextlib.contextmanager
def asking_once(wanted: bool) -> Iterator[None]:
    """Have what is traced within it ask for each row of a split table once a batch, where that is `wanted`."""
    _asking_once.append(wanted)
    try:
        yield
    finally:
        _asking_once.pop()


@tf.experimental.dispatch_for_api(tf.nn.embedding_lookup, {"params": tf.__internal__.distribute.ShardedVariable})
def look_up(params: Variable, ids: Tensor, max_norm: float | None = None, name: str | None = None) -> Tensor:
    """Look up rows where they lie; those of `CastShards` are cast, as tf_keras does with a whole variable."""
    if not _asking_once[-1] or isinstance(ids, tf.RaggedTensor):
        rows = tf.nn.embedding_lookup(params.variables, ids, max_norm=max_norm, name=name)
    else:
        ids = tf.convert_to_tensor(ids)
        once, places = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.nn.embedding_lookup(params.variables, once, max_norm=max_norm, name=ONCE)
        rows = tf.reshape(tf.gather(rows, places), tf.concat([tf.shape(ids), tf.shape(rows)[1:]], axis=0), name=name)
        rows.set_shape(ids.shape.concatenate(params.shape[1:]))
    return tf.cast(rows, params.dtype) if isinstance(params, CastShards) else rows


def asked_for_once(rows: tf.Tensor) -> tf.Tensor | None:
    """Return the rows' numbers as they were sent for a lookup, where a gradient's are the same, each of them once.

    Those of a dynamic table are returned as they are: its update looks at them itself.
    """
    if not tf.is_symbolic_tensor(rows):
        return None
    if lookups_of(rows):
        return rows
    while rows.op.type in ("Reshape", "Identity"):
        rows = rows.op.inputs[0]
    return rows if rows.op.type == SPLITS and ONCE in rows.op.name else None


def lookups_of(rows: tf.Tensor) -> list[tf.Tensor]:
    """Return the rows of each lookup in a dynamic table that a gradient names one after the other; none of others."""
    if not tf.is_symbolic_tensor(rows):
        return []
    while rows.op.type in ("Reshape", "Identity") and GIVEN not in rows.op.name:
        rows = rows.op.inputs[0]
    if GIVEN in rows.op.name and rows.op.type == "Identity":
        return [rows]
    parts = list(rows.op.inputs)[:-1] if rows.op.type == "ConcatV2" else []
    found = [lookups_of(part) for part in parts]
    return [one for each in found for one in each] if all(found) else []
