"""A constraint of tf_keras is applied within the update of its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.training.updates.atomic_updates import AtomicUpdates
from trainer.training.updates.constraints import reject_split_constraints
from trainer.training.updates.one_update import gather


@pytest.mark.parametrize("layer", [{}, {"dtype": "mixed_bfloat16"}])
@pytest.mark.parametrize("make", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD])
def test_a_constraint_is_applied_in_the_update(make: Callable[[float], Any], layer: dict[str, str]) -> None:
    line = tf.keras.layers.Dense(1, use_bias=False, kernel_constraint="non_neg", input_shape=(2,), **layer)
    made = tf.keras.Sequential([line])
    made.compile(make(0.0), "mse")
    gather(made.optimizer)
    line.kernel.assign([[-1.0], [2.0]])
    updates = AtomicUpdates(tf.distribute.get_strategy())

    @tf.function
    def step() -> None:
        with updates.active():
            made.train_step((tf.zeros([2, 2]), tf.zeros([2, 1])))

    graph = step.get_concrete_function().graph
    step()
    assert line.kernel.numpy().tolist() == [[0.0], [2.0]]
    kernel = getattr(line.kernel, "_variable", line.kernel).handle
    written = [one for one in graph.capture(kernel).consumers() if one.type == "AssignVariableOp"]
    assert [any(each.type == "MutexLock" for each in one.control_inputs) for one in written] == [True]


def test_autograph_can_translate_what_a_step_calls_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    variable, optimizer = tf.Variable(1.0), tf.keras.optimizers.SGD(0.5)
    gather(optimizer)
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
    gather(optimizer)
    optimizer.apply_gradients([(tf.constant(0.0), scale)])
    assert float(scale) == 0.5


@pytest.mark.parametrize("traced", [False, True])
def test_a_constraint_of_a_split_weight_is_refused(traced: bool) -> None:
    optimizer = tf.keras.optimizers.SGD(0.0)
    gather(optimizer)
    parts = [tf.Variable([1.0], name=f"table/part_{number}", constraint=tf.nn.relu) for number in range(2)]
    whole = tf.__internal__.distribute.ShardedVariable(parts, name="table")
    if traced:
        optimizer.apply_gradients([(tf.constant([0.0]), part) for part in parts])

    class Model:
        trainable_variables = whole.variables

    with pytest.raises(UserError, match="table has a constraint and is split over the ps"):
        reject_split_constraints(Model())


def test_a_model_whose_weights_come_with_its_first_call_is_not_refused() -> None:
    class Late(tf.keras.Model):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight("weight", [shape[-1], 1])

    with pytest.raises(ValueError, match="have not yet been created"):
        assert Late().trainable_variables
    reject_split_constraints(Late())
