"""Lookups in tables on the ps: each row is asked for once a batch, and its gradient goes back once.

TensorFlow's own lookup asks for a row as often as a batch names it. Its gradient then names rows several times, and
tf_keras adds these up before an update, shard by shard, and sends the rows' numbers once more. Where it clips gradients
it does so before it adds them up, so that there TensorFlow's own lookup stays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor, Variable
from trainer.training.placement import name_of
from trainer.training.tables.precision import CastShards
from trainer.training.tf_internals import row_gradients
from trainer.training.tf_internals.graphs import register_dispatchable_type

ONCE = "rows_asked_for_once"  # in the names of operations that give rows' numbers, each of them once
# The operations that give them: each shard of a split table its own, and all of a table that is whole.
NUMBERING = ("DynamicPartition", "Unique")
GIVEN = "rows_of_keys"  # in the names of operations that give a dynamic table's rows
GIVING = "gives_rows"  # in the names of all that finds these, and has keys get rows
register_dispatchable_type(tf.Variable)
row_gradients.register(ONCE, GIVEN)
ShardedVariable = tf.__internal__.distribute.ShardedVariable
Asked = tuple[Tensor, Tensor]  # the ids of a lookup, and the rows or keys that it asks for
_deduplicates = [False]
_noted: list[tuple[Any, dict[str, list[Asked]]]] = []  # of each graph what was asked of each table


@contextlib.contextmanager
def deduplicated_lookups(wanted: bool) -> Iterator[None]:
    """Have what is traced within it ask for each row of a table once a batch, where that is `wanted`."""
    _deduplicates.append(wanted)
    try:
        yield
    finally:
        _deduplicates.pop()


@contextlib.contextmanager
def noting() -> Iterator[dict[str, list[Asked]]]:
    """Give what lookups ask for that are traced meanwhile in this graph, by the names of their tables."""
    noted = tf.compat.v1.get_default_graph(), dict[str, list[Asked]]()
    _noted.append(noted)
    try:
        yield noted[1]
    finally:
        _noted.remove(noted)


def note(table: str, ids: Tensor, rows: Tensor) -> None:
    """Note what is asked of a table."""
    if _noted and _noted[-1][0] is tf.compat.v1.get_default_graph():
        _noted[-1][1].setdefault(table, []).append((ids, rows))


@tf.experimental.dispatch_for_api(tf.nn.embedding_lookup, {"params": ShardedVariable}, {"params": tf.Variable})
def look_up(params: Variable, ids: Tensor, max_norm: float | None = None, name: str | None = None) -> Tensor:
    """Look up rows where they lie; those of `CastShards` are cast, as tf_keras does with a whole variable."""
    parts = parts_of(params)
    if _deduplicates[-1] and isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(look_up(params, ids.flat_values, max_norm, name))
    if not _deduplicates[-1]:
        rows = tf.nn.embedding_lookup(parts, ids, max_norm=max_norm, name=name)
        flat = tf.convert_to_tensor(ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids)
        note(name_of(parts[0]), flat, flat)
    else:
        ids = tf.convert_to_tensor(ids)
        once, places = tf.unique(tf.reshape(ids, [-1]), name=ONCE)
        note(name_of(parts[0]), ids, once)
        rows = rows_in_parts(parts, once, max_norm)
        rows = in_shape_of(ids, tf.gather(rows, places), name)
        rows.set_shape(ids.shape.concatenate(params.shape[1:]))
    return tf.cast(rows, params.dtype) if isinstance(params, CastShards) else rows


def in_shape_of(ids: Tensor, rows: Tensor, name: str | None = None) -> Tensor:
    """Return the rows of flat ids in the shape of the ids, which is computed only where the trace does not know it."""
    is_known = None not in (ids.shape.rank, rows.shape.rank)
    lengths = [*ids.shape, *rows.shape[1:]] if is_known else [None, None]
    if lengths.count(None) <= 1 and 0 not in lengths:
        return tf.reshape(rows, [-1 if length is None else length for length in lengths], name=name)
    return tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], axis=0), name=name)


def rows_in_parts(parts: Sequence[Variable], numbers: Tensor, max_norm: float | None) -> Tensor:
    """Return rows of a table that is whole, or in parts, by their numbers, of shape [n].

    TensorFlow's own lookup divides each number four times to find its part.
    """
    if len(parts) == 1 or max_norm is not None:
        return tf.nn.embedding_lookup(parts, numbers, max_norm=max_norm, name=ONCE)
    with tf.name_scope(ONCE):
        begins = list(itertools.accumulate([int(part.shape[0]) for part in parts[:-1]], initial=0))
        ends = tf.constant([begins[1:]], numbers.dtype)
        owners = tf.squeeze(tf.raw_ops.UpperBound(sorted_inputs=ends, values=numbers[tf.newaxis]), 0)
        own = tf.dynamic_partition(numbers - tf.gather(tf.constant(begins, numbers.dtype), owners), owners, len(parts))
        order = tf.dynamic_partition(tf.range(tf.size(numbers)), owners, len(parts))
        found = [tf.nn.embedding_lookup([part], each) for part, each in zip(parts, own, strict=True)]
        return tf.dynamic_stitch(order, found)


@tf.experimental.dispatch_for_api(
    tf.nn.safe_embedding_lookup_sparse, {"embedding_weights": ShardedVariable}, {"embedding_weights": tf.Variable}
)
def look_up_sparse(
    embedding_weights: Variable,
    sparse_ids: tf.SparseTensor,
    sparse_weights: tf.SparseTensor | None = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> Tensor:
    """Look up rows of sparse ids, as tf_keras's layer does: TensorFlow's way names them again for the update."""
    if not _deduplicates[-1] or sparse_weights is not None or combiner != "mean" or default_id != 0:
        parts = parts_of(embedding_weights)
        return tf.nn.safe_embedding_lookup_sparse(
            parts, sparse_ids, sparse_weights, combiner, default_id, max_norm, name, allow_fast_lookup
        )
    return means_of(without_negative(sparse_ids), lambda ids: look_up(embedding_weights, ids, max_norm))


def parts_of(table: Variable) -> list[Variable]:
    """Return a table as a list of variables: a lookup in such a list is TensorFlow's own."""
    return [table] if isinstance(table, tf.Variable) else list(table.variables)


def without_negative(ids: tf.SparseTensor) -> tf.SparseTensor:
    """Return sparse ids without those that tf_keras takes for missing ones."""
    return tf.sparse.retain(ids, ids.values >= 0) if ids.dtype.is_integer else ids


def rows_of(table: Any, ids: Any) -> Any:
    """Return the rows of dense, ragged or sparse ids; those of sparse ones are dense, as Keras has them."""
    if isinstance(ids, tf.SparseTensor):
        return means_of(tf.sparse.expand_dims(ids, -1), lambda present: tf.nn.embedding_lookup(table, present))
    return tf.nn.embedding_lookup(table, ids)


def means_of(ids: tf.SparseTensor, looked_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean row along the last dimension of sparse ids; where it has none, the row of 0, or of no text.

    Each row is looked up once, also where gradients are clipped: TensorFlow's own way does so, too.
    """
    shape = ids.dense_shape
    lists = tf.sparse.reshape(ids, tf.stack([tf.reduce_prod(shape[:-1]), shape[-1]]))
    filled, _ = tf.sparse.fill_empty_rows(lists, tf.zeros([], ids.dtype))
    once, places = tf.unique(filled.values)
    means = tf.sparse.segment_mean(looked_up(once), places, filled.indices[:, 0])
    found = tf.reshape(means, tf.concat([shape[:-1], tf.shape(means, tf.int64)[1:]], axis=0))
    found.set_shape(ids.shape[:-1].concatenate(means.shape[1:]))
    return found


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
    return rows if rows.op.type in NUMBERING and ONCE in rows.op.name else None


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
