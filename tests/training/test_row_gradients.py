"""Gradients of lookups are TensorFlow's own to the bit, in whatever a program takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from trainer.training.tables.table_lookups import deduplicated_lookups
from trainer.training.tf_internals import row_gradients

# isort: split
import tensorflow as tf
from tensorflow.python.framework import ops

TABLE = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
IDS = tf.constant([3, 3, 9], tf.int64)
Looked = Callable[[Any, Any], Any]


@pytest.fixture(params=[True, False], ids=["rows-asked-for-once", "as-tensorflow-looks-up"])
def once(request: pytest.FixtureRequest) -> Iterator[bool]:
    with deduplicated_lookups(request.param):
        yield request.param


def with_each(monkeypatch: pytest.MonkeyPatch, gradients: Callable[[], Any]) -> list[Any]:
    """Return what TensorFlow's own gradients give, and what is registered gives."""
    found = []
    with monkeypatch.context() as patch:
        for name, own in row_gradients.OWN.items():
            patch.setitem(ops.gradient_registry._registry[name], row_gradients.GIVES, own)
        found.append(gradients())
    found.append(gradients())
    return found


def are_same(monkeypatch: pytest.MonkeyPatch, gradients: Callable[[], Any]) -> None:
    own, ours = with_each(monkeypatch, gradients)
    tf.nest.map_structure(np.testing.assert_array_equal, ours, own)
    assert any(np.any(one) for one in tf.nest.flatten(own))


def gradient(look_up: Looked, table: Any, ids: Any) -> Any:
    """Return the rows' gradient as TensorFlow has it, and as that of all rows."""
    with tf.GradientTape() as tape:
        found = look_up(table, ids)
        loss = tf.reduce_sum(tf.cast(getattr(found, "flat_values", found), tf.float32) ** 3)
    slices = tape.gradient(loss, table)
    parts = (slices.values, slices.indices, slices.dense_shape) if isinstance(slices, tf.IndexedSlices) else ()
    return parts, tf.cast(tf.convert_to_tensor(slices), tf.float32)


def rows(table: Any, ids: Any) -> Any:
    return tf.nn.embedding_lookup(table, ids)


def of_rows(table: Any, ids: Any) -> Any:
    return tf.gather(rows(table, ids), tf.unique(tf.cast(ids, tf.int32) % 2)[1])


def in_a_condition(table: Any, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 2, lambda: rows(table, ids), lambda: tf.zeros([1, 4]))


def in_a_loop(table: Any, ids: Any) -> Any:
    return tf.while_loop(lambda n, _: n < 3, lambda n, found: (n + 1, found + rows(table, ids)), [0, tf.zeros([3, 4])])[
        1
    ]


def with_a_gradient_of_its_own(shape: list[int] | None) -> Looked:
    """Return a lookup whose gradient has another shape, or one that only the step knows."""

    @tf.custom_gradient
    def changed(found: Any) -> Any:
        def gradient(given: Any) -> Any:
            return tf.compat.v1.placeholder_with_default(given, None) if shape is None else tf.reshape(given, shape)

        return tf.identity(found), gradient

    return lambda table, ids: changed(rows(table, ids))


@pytest.mark.parametrize(
    "look_up",
    [
        rows,
        of_rows,
        in_a_condition,
        in_a_loop,
        lambda table, ids: tf.function(rows)(table, ids),  # traced each time
        tf.recompute_grad(rows),
        with_a_gradient_of_its_own([12]),
        with_a_gradient_of_its_own(None),
        lambda table, ids: tf.gather(tf.convert_to_tensor(table) * 2, ids),
        lambda table, ids: tf.gather(tf.convert_to_tensor(table), ids % 4, axis=1),
        lambda table, ids: tf.gather(tf.convert_to_tensor(table)[:3], ids % 4, axis=-1, batch_dims=1),
    ],
    ids=[
        *("rows", "rows-of-rows", "condition", "loop", "function", "recomputed", "flat", "of-unknown-shape"),
        *("tensor", "columns", "batches"),
    ],
)
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "eager"])
def test_gradients_are_tensorflows_own(look_up: Looked, traced: bool, once: bool, monkeypatch: Any) -> None:
    def gradients() -> Any:
        table = tf.Variable(TABLE)
        return (tf.function(gradient) if traced else gradient)(look_up, table, IDS)

    are_same(monkeypatch, gradients)


@pytest.mark.parametrize(
    ("ids", "spec"),
    [
        (IDS, tf.TensorSpec([None], tf.int64)),
        ([[3, 9], [3, 1]], tf.TensorSpec([None, 2], tf.int32)),
        ([[3, 9], [3, 1]], tf.TensorSpec(None, tf.int64)),
        (tf.ragged.constant([[3, 3], [], [9]]), tf.RaggedTensorSpec([None, None], tf.int32)),
    ],
    ids=["list", "batch", "any-shape", "ragged"],
)
@pytest.mark.parametrize("kind", [tf.float32, tf.float16, tf.bfloat16])
def test_gradients_of_unknown_shapes_are_tensorflows_own(
    ids: Any, spec: Any, kind: Any, once: bool, monkeypatch: Any
) -> None:
    def gradients() -> Any:
        table = tf.Variable(tf.cast(TABLE, kind))
        traced = tf.function(lambda given: gradient(rows, table, given)[1], input_signature=[spec])
        return traced(ids if isinstance(ids, tf.RaggedTensor) else tf.constant(ids, spec.dtype))

    are_same(monkeypatch, gradients)


def test_no_id_has_a_gradient_of_no_row(once: bool) -> None:
    table = tf.Variable(TABLE)
    traced = tf.function(lambda ids: gradient(rows, table, ids), input_signature=[tf.TensorSpec([None], tf.int64)])
    (values, numbers, shape), of_all = traced(tf.zeros([0], tf.int64))
    assert (values.shape, numbers.shape, list(shape)) == ((0, 4), (0,), [10, 4])
    assert not np.any(of_all)


def test_a_gradient_of_a_gradient_is_tensorflows_own(once: bool, monkeypatch: Any) -> None:
    """As a penalty on gradients has it."""

    @tf.function
    def second(table: Any) -> Any:
        with tf.GradientTape() as tape:
            penalty = tf.reduce_sum(gradient(rows, table, IDS)[1] ** 2)
        return tf.convert_to_tensor(tape.gradient(penalty, table))

    are_same(monkeypatch, lambda: second(tf.Variable(TABLE)))


def test_gradients_that_xla_compiles_and_jacobians_are_tensorflows_own(monkeypatch: Any) -> None:
    def gradients() -> Any:
        table = tf.Variable(TABLE)
        with tf.GradientTape() as tape:
            sums = tf.reduce_sum(rows(table, IDS) ** 2, 1)
        compiled = tf.function(lambda: gradient(rows, table, IDS)[1], jit_compile=True)
        each = tf.vectorized_map(lambda ids: gradient(rows, table, ids)[1], tf.constant([[1, 2], [3, 3]]))
        return compiled(), tape.jacobian(sums, table), each

    are_same(monkeypatch, gradients)


def test_lookups_of_a_program_have_the_gradients_that_tensorflow_has(monkeypatch: Any) -> None:
    """TensorFlow's registry is one of the whole process; only rows that are asked for once have others."""
    asked: list[str] = []
    for name, own in row_gradients.OWN.items():
        own_of = lambda *given, name=name, own=own: [asked.append(name), own(*given)][1]  # noqa: E731
        monkeypatch.setitem(row_gradients.OWN, name, own_of)
    table = tf.Variable(TABLE)
    tf.function(gradient)(lambda table, ids: tf.gather(tf.gather(table, ids), tf.range(2)), table, IDS)
    assert sorted(asked) == ["GatherV2", "ResourceGather"]
    with deduplicated_lookups(True):
        tf.function(gradient)(rows, table, IDS)
    assert len(asked) == 2
