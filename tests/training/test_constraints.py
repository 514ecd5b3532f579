"""A constraint of tf_keras writes what it changes, and leaves what other workers have trained meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import tensorflow as tf

from trainer.failures import UserError
from trainer.training.constraints import constrain_by_elements, refuse_split_constraints

assert testing
OTHERS: list[Any] = []


class Floor(tf.keras.constraints.Constraint):
    """No weight below 0; another worker adds 10 to each while that is computed."""

    def __call__(self, weights: Any) -> Any:
        inside = tf.maximum(weights, 0.0)
        with tf.control_dependencies([inside]):
            OTHERS[0].assign_add(tf.fill(OTHERS[0].shape, 10.0))
        return inside


def model(optimizer: Any, **layer: Any) -> Any:
    line = tf.keras.layers.Dense(1, use_bias=False, kernel_constraint=Floor(), input_shape=(2,), **layer)
    made = tf.keras.Sequential([line])
    made.compile(optimizer, "mse")
    made.layers[0].kernel.assign([[-1.0], [2.0]])
    OTHERS[:] = [getattr(line.kernel, "_variable", line.kernel)]
    return made


@pytest.mark.parametrize("layer", [{}, {"dtype": "mixed_bfloat16"}])
@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD])
def test_a_constraint_writes_only_what_it_changes(make: Callable[[float], Any], layer: dict[str, str]) -> None:
    made = model(make(0.0), **layer)
    constrain_by_elements(made.optimizer)
    step = tf.function(lambda: made.train_step((tf.zeros([2, 2]), tf.zeros([2, 1]))))
    step()
    assert made.layers[0].kernel.numpy().tolist() == [[0.0], [12.0]]
    made.layers[0].kernel.assign([[3.0], [-2.0]])
    step()
    assert made.layers[0].kernel.numpy().tolist() == [[13.0], [0.0]]


def test_autograph_can_translate_what_a_step_calls_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    variable, optimizer = tf.Variable(1.0), tf.keras.optimizers.SGD(0.5)
    constrain_by_elements(optimizer)
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    try:
        tf.function(lambda: optimizer.apply_gradients([(tf.constant(1.0), variable)]))()
    finally:
        logger.removeHandler(caplog.handler)
    assert float(variable) == 0.5
    assert "AutoGraph" not in caplog.text


def test_a_constraint_of_a_number_is_kept() -> None:
    scale = tf.Variable(-1.0, constraint=lambda value: tf.maximum(value, 0.5))
    optimizer = tf.keras.optimizers.SGD(0.0)
    constrain_by_elements(optimizer)
    optimizer.apply_gradients([(tf.constant(0.0), scale)])
    assert float(scale) == 0.5


@pytest.mark.parametrize("traced", [False, True])
def test_a_constraint_of_a_split_weight_is_refused(traced: bool) -> None:
    optimizer = tf.keras.optimizers.SGD(0.0)
    constrain_by_elements(optimizer)
    parts = [tf.Variable([1.0], name=f"table/part_{number}", constraint=tf.nn.relu) for number in range(2)]
    whole = tf.__internal__.distribute.ShardedVariable(parts, name="table")
    if traced:
        optimizer.apply_gradients([(tf.constant([0.0]), part) for part in parts])

    class Model:
        trainable_variables = whole.variables

    with pytest.raises(UserError, match="table has a constraint and is split over the ps"):
        refuse_split_constraints(Model())


def test_a_model_whose_weights_come_with_its_first_call_is_not_refused() -> None:
    class Late(tf.keras.Model):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight("weight", [shape[-1], 1])

    with pytest.raises(ValueError, match="have not yet been created"):
        assert Late().trainable_variables
    refuse_split_constraints(Late())
