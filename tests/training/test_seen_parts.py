"""What a program's rules see of the parts of a split weight, trained on two ps by two workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from processes import run_check

from trainer import testing  # noqa: F401 - before TensorFlow: it chooses its Keras
from trainer.core.failures import UserError
from trainer.training.keras.keras3.shards import shards_of, train_shards
from trainer.training.tables.whole_weights import see_whole_weights

# isort: split
import keras
import tensorflow as tf

pytestmark = pytest.mark.timeout(300)
ShardedVariable = tf.__internal__.distribute.ShardedVariable
RULES: list[Callable[[Any], bool]] = [
    lambda v: v.shape[0] > 60,
    lambda v: v.shape[0] >= 60,
    lambda v: v.shape[0] < 60.5,
    lambda v: v.shape[-2] == 100,
    lambda v: v.shape[0] * v.shape[1] > np.int64(300),
    lambda v: v.shape == (100, 4),
    lambda v: v.shape != (100, 4),
    lambda v: tuple(v.shape) == (100, 4),
    lambda v: v.shape.as_list() == [100, 4],
    lambda v: v.shape.num_elements() >= 300,
    lambda v: np.prod(v.shape) > 300,
    lambda v: math.prod(v.shape) > 300,
    lambda v: max(v.shape) > 60,
]
SAME: list[Callable[[Any], Any]] = [
    lambda v: v.shape[0] > 10 and v.shape[0] < 1000 and v.shape[0] > v.shape[1] > 3,
    lambda v: len(v.shape) > 1 and v.shape.rank == 2 and v.shape[-1] == 4 and v.shape[1:] == (4,),
    lambda v: v.shape == tf.zeros_like(v).shape and v.shape[0] == tf.zeros_like(v).shape[0],
    lambda v: tf.zeros(v.shape) + tf.fill(list(v.shape), 1.0) + tf.zeros(np.array(v.shape)),
    lambda v: tf.reshape(tf.random.normal(tuple(v.shape)), v.shape.as_list()) + tf.broadcast_to(1.0, v.shape),
    lambda v: tf.reshape(tf.range(v.shape[0] * v.shape[1]), v.shape),
    lambda v: tf.constant(np.zeros(v.shape)) + np.random.normal(size=v.shape),
    lambda v: tf.one_hot([1], v.shape[0]) + tf.cast(v.shape[0], tf.float32) + float(v.shape[0]) / min(v.shape),
    lambda v: keras.ops.zeros(v.shape) + keras.initializers.GlorotUniform()(v.shape) + keras.random.normal(v.shape),
    lambda v: tf.keras.initializers.GlorotUniform()(v.shape) + tf.ensure_shape(v, v.shape),
]


def parts_of(kind: Any) -> list[Any]:
    """Return a weight of 100 rows in two parts, as one of these variables lists it."""
    parts = [tf.Variable(tf.ones([50, 4]), name=f"dense/kernel/part_{number}") for number in range(2)]
    whole = ShardedVariable(parts)
    if kind is tf.Variable:
        see_whole_weights()
        parts[0].whole = whole  # a part alone doesn't keep it
        return parts
    train_shards()
    split = keras.Variable(tf.zeros([100, 4]), dtype="float32", name="kernel")
    split._path, split._value = "dense/kernel", whole
    return shards_of(split)


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_shape_that_is_another_one_of_the_whole_is_refused(rule: Any, kind: Any) -> None:
    first, second = parts_of(kind)
    for ask in (rule, tf.autograph.to_graph(rule)):
        with pytest.raises(UserError, match="compares a part of dense/kernel, which is split over the ps, with"):
            ask(second)
    assert isinstance(rule(tf.Variable(tf.ones([100, 4]))), bool | np.bool_)
    del first


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
@pytest.mark.parametrize("rule", SAME)
def test_a_shape_is_a_parts_own_where_something_is_made_of_it(rule: Any, kind: Any) -> None:
    parts = parts_of(kind)
    found = tf.function(lambda: rule(parts[0]))()
    assert np.all(found) or found.shape in ([50, 4], [1, 50])


def test_a_part_has_the_wholes_name() -> None:
    for kind, name in ((tf.Variable, "dense/kernel:0"), (keras.Variable, "kernel")):
        first, second = parts_of(kind)
        assert [str(first.name), str(second.name)] == [name, name]
        assert {name: 1}[first.name] == 1
        assert len({first.name: 1, second.name: 2}) == 2
        assert (first.name == second.name, first.name != second.name) == (False, True)
    assert first.path == "dense/kernel"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_check("parts_check.py", deadline=280)


@pytest.mark.parametrize("kind", ["tf_keras", "keras3"])
def test_a_rule_by_name_is_that_of_the_whole(found: dict[str, Any], kind: str) -> None:
    assert found[kind]["by_name"] == found[kind]["by_name_of_wholes"]
    kernel, bias = found[kind]["by_name"]
    assert 1 - kernel == 2 * (1 - bias) > 0


@pytest.mark.parametrize("kind", ["tf_keras", "keras3"])
def test_what_is_left_out_of_weight_decay_by_name_is(found: dict[str, Any], kind: str) -> None:
    assert found[kind]["decayed"] == found[kind]["decayed_wholes"]


@pytest.mark.parametrize("kind", ["tf_keras", "keras3"])
def test_a_step_with_a_rule_by_shape_is_refused(found: dict[str, Any], kind: str) -> None:
    assert "UserError" in found[kind]["by_shape"]
    assert "dense/kernel, which is split over the ps, with 6: it has 4 of 8 rows" in found[kind]["by_shape"]
    assert "UserError" not in found[kind]["by_shape_of_wholes"]
