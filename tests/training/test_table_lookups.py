"""Lookups in tables give what TensorFlow's own give, and name each row once to the ps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.training.tables.row_updates import may_deduplicate_lookups, update_by_rows
from trainer.training.tables.table_lookups import ONCE, deduplicated_lookups
from trainer.training.updates.atomic_updates import AtomicUpdates
from trainer.training.updates.one_update import gather

# isort: split
import tensorflow as tf

ROWS, WIDTH = 10, 4
START = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
keras = tf.keras.optimizers


def split() -> Any:
    """Return a table of three parts, of 4, 3 and 3 rows."""
    parts = enumerate(np.array_split(START, 3))
    return tf.__internal__.distribute.ShardedVariable([tf.Variable(part, name=f"part_{n}") for n, part in parts])


def whole() -> Any:
    return tf.Variable(START)


@pytest.mark.parametrize(
    "ids",
    [
        tf.constant([[3, 3, 9], [0, 3, 0]]),
        tf.constant([9, 9, 9], tf.int64),
        tf.constant(5),
        tf.zeros([0, 2], tf.int64),
        tf.ragged.constant([[1, 1], [], [2]]),
    ],
    ids=["two-dimensions", "one-row", "scalar", "none", "ragged"],
)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("make", [split, whole])
def test_rows_and_their_gradients_are_those_of_tensorflow(make: Any, ids: Any, max_norm: float | None) -> None:
    table = make()
    parts = getattr(table, "variables", [table])

    @tf.function
    def both(ids: Any) -> Any:
        found = []
        for params in (table, parts):  # of a list of variables it is TensorFlow's own
            with tf.GradientTape() as tape:
                with deduplicated_lookups(True):
                    rows = tf.nn.embedding_lookup(params, ids, max_norm=max_norm)
                flat = rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
                loss = tf.reduce_sum(tf.reshape(flat, [-1]) * tf.range(1.0, 1 + tf.cast(tf.size(flat), tf.float32)))
            gradients = [tf.convert_to_tensor(one) for one in tape.gradient(loss, parts)]
            found.append((flat, gradients))
        return found

    ours, plain = both(ids)
    tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), ours, plain)
    assert ours[0].shape[1 if isinstance(ids, tf.RaggedTensor) else ids.shape.rank :] == [WIDTH]


@pytest.mark.parametrize("combiner", ["mean", "sum"])
@pytest.mark.parametrize("default_id", [None, 0, 2])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_sparse_ids_get_the_rows_and_gradients_of_tensorflow(
    combiner: str, default_id: int | None, max_norm: float | None
) -> None:
    table, ids = split(), tf.SparseTensor([[0, 0], [0, 1], [2, 0], [3, 1]], tf.constant([9, 9, 4, -1]), [4, 2])

    @tf.function
    def both() -> Any:
        found = []
        for params in (table, table.variables):
            with tf.GradientTape() as tape, deduplicated_lookups(True):
                rows = tf.nn.safe_embedding_lookup_sparse(
                    params, ids, combiner=combiner, default_id=default_id, max_norm=max_norm
                )
                loss = tf.reduce_sum(rows * tf.reshape(tf.range(4.0 * WIDTH), [4, WIDTH]))
            found.append((rows, [tf.convert_to_tensor(one) for one in tape.gradient(loss, table.variables)]))
        return found

    tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *both())


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_no_number_is_divided_to_find_the_part_that_has_its_row(dtype: Any) -> None:
    table = split()

    @tf.function
    def look_up(ids: Any) -> Any:
        with deduplicated_lookups(True):
            return tf.nn.embedding_lookup(table, ids)

    np.testing.assert_array_equal(look_up(tf.range(10, dtype=dtype)), START)
    for beyond in (-1, 10):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0"):
            look_up(tf.constant([beyond], dtype))
    kinds = {one.type for one in look_up.get_concrete_function(tf.range(10, dtype=dtype)).graph.get_operations()}
    assert not kinds & {"FloorDiv", "FloorMod"}


def test_the_shape_is_known_as_far_as_that_of_the_ids() -> None:
    table = split()
    looked_up = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids))
    for shape, expected in (([None, 3], [None, 3, WIDTH]), (None, None)):
        with deduplicated_lookups(True):
            traced = looked_up.get_concrete_function(tf.TensorSpec(shape, tf.int64))
        assert traced.structured_outputs.shape.rank == (len(expected) if expected else None)
        if expected:
            assert traced.structured_outputs.shape.as_list() == expected


class Model(tf.Module):
    def __init__(self, optimizer: Any, table: Any) -> None:
        super().__init__()
        self.optimizer, self.table = optimizer, table
        self.variables_of_it = getattr(table, "variables", [table])

    @tf.function
    def train(self, *looked_up: Any) -> Any:
        with tf.GradientTape() as tape:
            found = [self.look_up(ids) for ids in looked_up]
            flat = [one.flat_values if isinstance(one, tf.RaggedTensor) else one for one in found]
            rows = tf.concat([tf.reshape(one, [-1]) for one in flat], 0)
            loss = tf.reduce_sum((rows - 1) ** 2)
        self.optimizer.minimize(loss, self.variables_of_it, tape)
        return loss

    def look_up(self, ids: Any) -> Any:
        if isinstance(ids, tf.SparseTensor):
            return tf.nn.safe_embedding_lookup_sparse(self.table, tf.sparse.expand_dims(ids, -1), default_id=0)
        return tf.nn.embedding_lookup(self.table, ids)

    def value(self) -> np.ndarray:
        return np.concatenate([variable.numpy() for variable in self.variables_of_it])


@pytest.mark.parametrize("make", [lambda: keras.SGD(0.1), lambda: keras.Adagrad(0.1), lambda: keras.Adam(0.1)])
@pytest.mark.parametrize(
    "batches", [[[[3, 3, 9], [0, 3, 0]]], [[3, 3, 9], [9, 0]]], ids=["looked-up-once", "looked-up-twice"]
)
@pytest.mark.parametrize("table", [split, whole])
def test_a_row_gets_the_sum_of_its_gradients(make: Any, batches: list[Any], table: Any) -> None:
    plain, ours = Model(make(), whole()), Model(make(), table())
    lazy = isinstance(ours.optimizer, keras.Adam)
    for model in (plain, ours):
        update_by_rows(model, lazy=lazy)
        for _ in range(3):
            with deduplicated_lookups(model is ours):
                model.train(*map(tf.constant, batches))
    np.testing.assert_allclose(ours.value(), plain.value(), rtol=1e-5, atol=1e-6)
    assert not np.allclose(ours.value(), START)


@pytest.mark.parametrize("make", [split, whole])
@pytest.mark.parametrize(
    ("batches", "sent_again"),
    [
        ([[[3, 3, 9], [0, 3, 0]]], False),
        ([tf.ragged.constant([[3, 3, 9], [], [0]])], False),
        ([tf.sparse.from_dense([[3, 0, 9], [0, 3, 0]])], False),
        ([[3, 3, 9], [9, 0]], True),
    ],
    ids=["looked-up-once", "ragged", "sparse", "looked-up-twice"],
)
def test_the_numbers_of_rows_are_sent_once_where_no_row_has_two_gradients(
    make: Any, batches: list[Any], sent_again: bool
) -> None:
    """The update takes what the lookup has sent; tf_keras's own would send what it found by `Unique`, for each part."""
    model = Model(keras.Adagrad(0.1), make())
    update_by_rows(model)
    with deduplicated_lookups(True):
        given = [tf.constant(ids) if isinstance(ids, list) else ids for ids in batches]
        graph = model.train.get_concrete_function(*given).graph
    updates = [one for one in graph.get_operations() if one.type == "ResourceScatterUpdate"]
    taken = [one.inputs[1] for one in updates][::2]  # of each part the accumulator's, and the same for its rows
    parts = len(model.variables_of_it)
    assert [one.inputs[1] is mine for one, mine in zip(updates[1::2], taken, strict=True)] == [True] * parts
    assert sum(one.op.type == "Unique" and ONCE not in one.op.name for one in taken) == sent_again * parts
    if not sent_again:
        lookups = [one for one in graph.get_operations() if one.type == "ResourceGather" and ONCE in one.name]
        assert [one.inputs[1] is mine for one, mine in zip(lookups, taken, strict=True)] == [True] * parts


def test_no_part_of_a_table_waits_for_another() -> None:
    """They lie on other ps, which would tell each other when a lock is free."""
    model = Model(keras.Adagrad(0.1), split())
    gather(model.optimizer)
    update_by_rows(model)
    atomic = AtomicUpdates(tf.distribute.get_strategy())

    @tf.function
    def train(ids: Any) -> None:
        with atomic.active():
            model.train.python_function(ids)

    graph = train.get_concrete_function(tf.constant([3, 9])).graph
    of_mutexes = [one for one in graph.get_operations() if one.type in ("MutexV2", "MutexLock", "ConsumeMutexLock")]
    assert len(of_mutexes) == 18
    assert not [one.name for one in of_mutexes for each in one.control_inputs if each.type == "ConsumeMutexLock"]


def test_the_numbers_of_two_tables_in_one_scope_are_sent_once() -> None:
    tables = split(), split()
    parts = [*tables[0].variables, *tables[1].variables]
    model = tf.Module()
    model.optimizer = keras.SGD(0.1)
    update_by_rows(model)

    @tf.function
    def train(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(table, ids)) for table in tables])
        model.optimizer.minimize(loss, parts, tape)
        return loss

    with deduplicated_lookups(True):
        operations = train.get_concrete_function(tf.constant([1, 1, 2])).graph.get_operations()
    updates = [one for one in operations if one.type == "ResourceScatterUpdate"]
    assert len(updates) == 6
    assert all(one.inputs[1].op.type == "DynamicPartition" for one in updates)


def test_numbers_that_were_made_outside_of_the_step_are_taken() -> None:
    variable, rows = tf.Variable(START), tf.constant([1, 1])
    model = tf.Module()
    model.optimizer = keras.SGD(0.1)
    update_by_rows(model)
    gradient = tf.IndexedSlices(tf.ones([2, WIDTH]), rows, tf.constant([ROWS, WIDTH]))
    tf.function(lambda: model.optimizer.apply_gradients([(gradient, variable)]))()
    np.testing.assert_allclose(variable[1], START[1] - 0.2, rtol=1e-6)


class OwnLoss(tf.keras.Model):
    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(*arguments, **named)


class OwnStep(tf.keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    ("model", "make", "expected"),
    [
        (tf.keras.Sequential, lambda: keras.SGD(0.1), True),
        (tf.keras.Sequential, lambda: keras.Adagrad(0.1), True),
        (tf.keras.Sequential, lambda: keras.Adam(0.1), False),
        (tf.keras.Sequential, lambda: keras.SGD(0.1, momentum=0.9), False),
        (tf.keras.Sequential, lambda: keras.SGD(0.1, clipnorm=1.0), False),
        (tf.keras.Sequential, lambda: keras.Adagrad(0.1, clipvalue=1.0), False),
        (tf.keras.Sequential, lambda: keras.Adagrad(0.1, global_clipnorm=1.0), False),
        (tf.keras.Sequential, lambda: keras.legacy.SGD(0.1), False),
        (OwnStep, lambda: keras.SGD(0.1), False),
        (OwnLoss, lambda: keras.SGD(0.1), False),
    ],
)
def test_who_may_look_at_single_gradients_gets_them(model: Any, make: Any, expected: bool) -> None:
    """tf_keras clips the gradient of each lookup, before it adds up those of a row."""
    made = model()
    made.compile(make())
    update_by_rows(made)
    assert may_deduplicate_lookups(made) == expected


def test_a_step_that_an_object_was_given_is_its_own() -> None:
    model = tf.keras.Sequential()
    model.compile(keras.SGD(0.1))
    update_by_rows(model)
    model.train_step = lambda data: {"loss": 0.0}
    assert not may_deduplicate_lookups(model)


@pytest.mark.parametrize("make", [split, whole])
def test_a_gradient_of_rows_is_not_shaped_again(make: Any) -> None:
    """A list of rows' numbers and their gradient have their shapes: a step of many tables starts few operations."""
    model = Model(keras.Adagrad(0.1), make())
    update_by_rows(model)
    with deduplicated_lookups(True):
        graph = model.train.get_concrete_function(tf.constant([3, 3, 9])).graph
    lookups = [one for one in graph.get_operations() if one.type == "ResourceGather" and ONCE in one.name]
    users = [user for one in lookups for user in one.inputs[1].consumers()]
    assert {"ExpandDims", "Reshape"}.isdisjoint(user.type for user in users)


@pytest.mark.parametrize("make", [split, whole])
def test_a_step_does_not_compute_shapes_of_rows_that_it_knows(make: Any) -> None:
    table = make()

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
    def look_up(ids: Any) -> Any:
        with deduplicated_lookups(True):
            return tf.nn.embedding_lookup(table, ids)

    found = look_up.get_concrete_function()
    assert found.outputs[0].shape.as_list() == [None, 3, WIDTH]
    assert "Shape" not in {one.type for one in found.graph.get_operations()}
    for ids in ([[1, 1, 2], [0, 9, 1]], np.zeros([0, 3])):
        np.testing.assert_array_equal(found(tf.constant(ids, tf.int64)), START[np.array(ids, int)])


def test_a_table_of_which_no_shape_is_known_is_looked_up() -> None:
    table = tf.Variable(START, shape=tf.TensorShape(None))

    @tf.function
    def look_up(ids: Any) -> Any:
        with deduplicated_lookups(True):
            return tf.nn.embedding_lookup(table, ids)

    np.testing.assert_array_equal(look_up(tf.constant([[1, 1], [2, 0]])), START[[[1, 1], [2, 0]]])


@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ([1, 1, 3], {}),
        ([[1, 3], [1, 0]], {}),
        (2, {}),
        ([1, 1, 3], {"axis": 1}),
        ([[1], [0], [2], [2]], {"batch_dims": 1}),
    ],
    ids=["list", "two-dimensions", "scalar", "columns", "batches"],
)
def test_gradients_of_lookups_are_those_of_numbers_of_any_shape(numbers: Any, options: dict[str, int]) -> None:
    """Each number of a table is looked up as often as its gradient says."""
    table = np.arange(16.0).reshape(4, 4)

    @tf.function
    def gradient(given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            found = tf.gather(given, numbers, **options)
            loss = tf.reduce_sum(found * found) / 2
        return tf.convert_to_tensor(tape.gradient(loss, given))

    expected = np.zeros_like(table)
    taken = tf.gather(np.arange(16).reshape(4, 4), numbers, **options).numpy().ravel()
    np.add.at(expected.ravel(), taken, table.ravel()[taken])
    np.testing.assert_allclose(gradient(tf.constant(table)), expected)
    variable = tf.Variable(table)
    with tf.GradientTape() as tape:
        found = tf.gather(variable, numbers, **options)
        loss = tf.reduce_sum(found * found) / 2
    np.testing.assert_allclose(tf.convert_to_tensor(tape.gradient(loss, variable)), expected)
