"""Weights from elsewhere mean the same for a model that is split over the ps as for a whole one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from processes import run_check

from trainer import testing  # before TensorFlow: it chooses its Keras
from trainer.training.tables.whole_weights import ShardedVariable, see_whole_weights
from trainer.training.updates.one_update import gather

# isort: split
import tensorflow as tf

pytestmark = pytest.mark.timeout(650)
WAYS = ("plain.h5", "new.weights.h5", "checkpoint", "model.keras", "set_weights", "of_layers", "assigned", "directory")
MATRIX = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What weights_check.py found on servers in its process."""
    checked: dict[str, Any] = run_check("weights_check.py", deadline=600)
    return checked


@pytest.mark.parametrize("way", WAYS)
def test_split_weights_are_those_that_were_read(found: dict[str, Any], way: str) -> None:
    assert found["read"][way] == 0.0


def test_an_array_as_a_layers_argument_is_its_table(found: dict[str, Any]) -> None:
    assert found["argument"] == 0.0


def test_a_split_model_writes_files_that_a_whole_one_reads(found: dict[str, Any]) -> None:
    assert found["written"] == 0.0


def test_a_model_with_its_optimizer_goes_on_as_it_does_alone(found: dict[str, Any]) -> None:
    assert found["goes_on"] == {"distance": 0.0, "steps": 6}


@pytest.mark.matrix
def test_so_does_one_of_a_file_h5_and_a_legacy_optimizer() -> None:
    expected = {"distance": 0.0, "steps": 6}
    assert run_check("weights_check.py", "matrix", deadline=400) == {"model.h5": expected, "legacy.h5": expected}


def test_functions_of_a_saved_model_run_on_two_workers_with_its_weights(found: dict[str, Any]) -> None:
    assert found["saved_model"] == 0.0


def test_a_frozen_table_of_another_model_stays_as_it_is(found: dict[str, Any]) -> None:
    assert found["frozen"] == 0.0


def test_recurrent_layers_with_split_kernels_give_what_whole_ones_do(found: dict[str, Any]) -> None:
    assert found["recurrent"] == 0.0


def test_a_whole_value_for_a_part_is_refused_with_what_to_assign_instead(found: dict[str, Any]) -> None:
    assert found["parts"].startswith("UserError: Cannot assign value to variable ' table/embeddings/part_0:0'")
    assert found["parts"].endswith(
        "Assign the layer's attribute, such as layer.embeddings, or call layer.set_weights; or set partitioner to "
        "none, so that tables stay whole"
    )


def test_a_value_with_more_rows_than_a_split_table_is_refused(found: dict[str, Any]) -> None:
    assert found["too_large"].startswith("ValueError: Cannot assign value to variable 'table/embeddings': Shape")
    assert "(64, 8), and the assigned value shape (65, 8)" in found["too_large"]


def test_a_split_weight_has_the_old_name_of_its_shape() -> None:
    see_whole_weights()
    assert ShardedVariable([tf.Variable(tf.ones([2, 3])) for _ in range(2)]).get_shape().as_list() == [4, 3]


@pytest.mark.parametrize("shape", [(64, 8), (64,), (16, 3, 4, 5)])
@pytest.mark.parametrize("kind", ["GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "LecunNormal"])
def test_first_values_of_parts_are_scaled_as_those_of_the_whole(kind: str, shape: tuple[int, ...]) -> None:
    see_whole_weights()
    initializer = getattr(tf.keras.initializers, kind)(seed=1)
    whole, rows = initializer(shape), shape[0] // 4
    parts = [
        initializer(shape, partition_shape=(rows, *shape[1:]), partition_offset=(begin, *[0] * (len(shape) - 1)))
        for begin in range(0, shape[0], rows)
    ]
    ratio = float(tf.math.reduce_std(tf.concat(parts, 0)) / tf.math.reduce_std(whole))
    assert 0.8 < ratio < 1.25  # by the shape of a part it is 1.4 to 2
    assert initializer.get_config() == getattr(tf.keras.initializers, kind)(seed=1).get_config()


def test_first_values_of_a_split_kernel_have_the_range_of_a_whole_one() -> None:
    see_whole_weights()
    split = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    layer = tf.keras.layers.Dense(8, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=1))
    with testing.in_process_cluster(workers=2, ps=2, partitioner=split).scope():
        layer.build((None, 64))
    largest = [float(tf.reduce_max(tf.abs(part))) for part in layer.kernel.variables]
    assert len(largest) == 2
    assert max(largest) <= (6 / (64 + 8)) ** 0.5


def test_first_values_of_an_lstms_split_bias_are_those_of_the_whole() -> None:
    see_whole_weights()
    split = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    with testing.in_process_cluster(workers=2, ps=2, partitioner=split).scope():
        cell, layer = tf.keras.layers.LSTMCell(4), tf.keras.layers.Dense(4, kernel_initializer=orthogonal)
        cell.build((None, 3))
        layer.build((None, 4))
    assert len(cell.bias.variables) == len(layer.kernel.variables) == 2
    np.testing.assert_array_equal(cell.bias.numpy(), np.repeat([0.0, 1.0, 0.0, 0.0], 4))
    kernel = layer.kernel.numpy()
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(4), atol=1e-5)  # not of two that were drawn


def test_an_initializer_of_tensorflow_draws_a_split_weight_by_parts_unless_its_seed_would_repeat_them() -> None:
    see_whole_weights()
    drawn: list[Any] = []

    class Uniform(tf.random_uniform_initializer):
        def __call__(self, *given: Any, **named: Any) -> Any:
            drawn.append(super().__call__(*given, **named))
            return drawn[-1]

    split = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    with testing.in_process_cluster(workers=2, ps=2, partitioner=split).scope():
        for seed in (None, 3):
            layer = tf.keras.layers.Dense(3, kernel_initializer=Uniform(seed=seed))
            layer.build((None, 4))
            first, second = (part.numpy() for part in layer.kernel.variables)
            assert not np.array_equal(first, second)
    assert [value.shape.as_list() for value in drawn] == [[2, 3], [2, 3], [4, 3]]


def orthogonal(shape: Any, dtype: Any = None) -> Any:
    return tf.linalg.qr(tf.random.normal(shape))[0]


def split_matrix() -> Any:
    see_whole_weights()
    return ShardedVariable([tf.Variable(one, name=f"table/part_{n}") for n, one in enumerate((MATRIX[:3], MATRIX[3:]))])


@tf.custom_gradient
def straight_through(weight: Any) -> Any:
    return tf.sign(weight), lambda gradient: gradient


@pytest.mark.parametrize(
    "taking",
    [
        *(tf.identity, tf.stop_gradient, tf.function(lambda one: one), straight_through, np.asarray),
        tf.function(lambda one: tf.cond(one[0, 0] > 0.0, lambda: one, lambda: 2.0 * one)),
        *(tf.function(lambda one, way=way: way([one, one])) for way in (tf.stack, tf.add_n)),
        *(functools.partial(way, lambda row: 2.0 * row) for way in (tf.map_fn, tf.vectorized_map)),
    ],
)
def test_what_takes_a_whole_variable_takes_a_split_one(taking: Any) -> None:
    np.testing.assert_array_equal(taking(split_matrix()), taking(tf.Variable(MATRIX)))


LOSSES: dict[str, Any] = {
    "of rows": lambda table: tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 3, 3]) ** 2),
    "of a part's rows": lambda table: tf.reduce_sum(tf.nn.embedding_lookup(table, [4]) ** 2),
    "of the first row": lambda table: tf.reduce_sum(table[:1] ** 2),
    "of all": lambda table: tf.reduce_sum(tf.matmul(table, table, transpose_b=True)),
    "of each row": lambda table: tf.reduce_sum(tf.map_fn(tf.norm, table)),
    "of others": lambda table: tf.constant(1.0),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("make", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adagrad])
def test_a_split_weight_gets_the_gradient_and_the_update_of_a_whole_one(make: Any, loss: str) -> None:
    for split, whole in zip(*(updated(table, make(0.1), LOSSES[loss]) for table in tables()), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_tf_gradients_gives_that_of_a_split_weight_as_of_a_whole_one(loss: Any) -> None:
    @tf.function
    def found(table: Any) -> Any:
        of_two, [of_one] = tf.gradients(loss(table), [table, tf.constant(1.0)]), tf.gradients(loss(table), table)
        return [tf.zeros_like(table) if one is None else tf.convert_to_tensor(one) for one in (of_two[0], of_one)]

    for split, whole in zip(*(found(table) for table in tables()), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-5)


# TensorFlow's own fails with lookups and map_fn in a function.
@pytest.mark.parametrize("loss", ["of the first row", "of all", "of others"])
def test_a_forward_accumulator_takes_a_split_weight_as_a_whole_one(loss: str) -> None:
    @tf.function
    def found(table: Any) -> Any:
        with tf.autodiff.ForwardAccumulator([table], [tf.constant(MATRIX + 1.0)]) as forward:
            result = LOSSES[loss](table)
        return forward.jvp(result, tf.UnconnectedGradients.ZERO)

    split, whole = (found(table) for table in tables())
    np.testing.assert_allclose(split, whole, rtol=1e-5)


def tables() -> list[Any]:
    return [split_matrix(), tf.Variable(MATRIX)]


def updated(table: Any, optimizer: Any, loss: Any) -> list[Any]:
    """Return a table's gradient, and what a step makes of it and of another weight."""
    other = tf.Variable(2.0)
    weights = [*getattr(table, "variables", [table]), other]
    (optimizer._create_all_weights if hasattr(optimizer, "get_slot") else optimizer.build)(weights)
    gather(optimizer)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            result = loss(table) + other**2
        gradients = tape.gradient(result, {"table": table, "other": [other]})
        optimizer.apply_gradients([(gradients["other"][0], other), (gradients["table"], table)])
        return tf.zeros([]) if gradients["table"] is None else tf.convert_to_tensor(gradients["table"])

    return [step().numpy(), table.numpy(), other.numpy()]
