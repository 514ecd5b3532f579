"""What a step may return, and what the packed call makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from trainer.core.failures import UserError
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.steps.step_copy import StepCopy
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step
from trainer.training.tf_internals.graphs import CALLS


class Traced(NamedTuple):
    """A step and the packed call of it, which train on 1.0, 2.0, …"""

    step: Any
    call: Any
    iterator: Any
    counter: tf.Variable


def trace(own_step: Callable[[tf.Tensor], Any], unrolled: int = 1) -> Traced:
    class Model:
        jit_compile = False
        train_step = staticmethod(own_step)

    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    dataset = tf.data.Dataset.range(1, 100).map(lambda number: tf.cast(number, tf.float32))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    counter = tf.Variable(0, dtype=tf.int64)
    step = trace_step(strategy, Model(), iterator)
    return Traced(step, trace_call(strategy, step, counter, iterator, unrolled=unrolled), iterator, counter)


def call(train_step: Callable[[tf.Tensor], Any], steps: int, unrolled: int) -> tuple[Any, int]:
    """Return the call's outputs and the steps that it counted."""
    traced = trace(train_step, unrolled)
    return traced.call(traced.iterator, tf.constant([steps], tf.int64)), int(traced.counter.numpy())


@pytest.mark.parametrize("unrolled", [1, 4])
@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_a_call_does_its_steps_and_returns_the_last_ones_outputs(steps: int, unrolled: int) -> None:
    outputs, counted = call(lambda batch: {"loss": batch}, steps, unrolled)
    assert (float(outputs["loss"]), counted) == (steps, steps)


def test_outputs_may_be_of_any_kind_and_length() -> None:
    def train_step(batch: tf.Tensor) -> Any:
        length = tf.cast(batch, tf.int64)
        rows = tf.RaggedTensor.from_row_lengths(tf.range(length + 1), [1, length])
        read = tf.io.parse_tensor(tf.io.serialize_tensor([batch]), tf.float32)  # of whatever rank
        text = tf.strings.as_string(length)
        return {"text": text, "number": 1.5, "range": tf.range(length), "rows": rows, "read": read}

    outputs, _ = call(train_step, 3, unrolled=1)
    assert (outputs["text"].numpy(), float(outputs["number"])) == (b"3", 1.5)
    assert outputs["range"].numpy().tolist() == [0, 1, 2]
    assert outputs["rows"].to_list() == [[0], [1, 2, 3]]
    assert outputs["read"].numpy().tolist() == [3.0]


def test_a_step_may_return_nothing() -> None:
    assert call(lambda batch: {}, 3, unrolled=1) == ({}, 3)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (None, "returned None; expected"),
        ({"loss": 1.0, "note": None}, "returned None for 'note'; "),
        ({"loss": {"left": 1.0}, "note": None}, "returned a dict for 'loss', None for 'note'; "),
        ((1.0, 2.0), "returned a tuple, whose numbers have no names; "),
    ],
)
def test_outputs_of_nothing_are_refused_by_name(outputs: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"Model.train_step {message}"):
        call(lambda batch: outputs, 1, unrolled=1)


def test_what_is_no_number_is_not_logged() -> None:
    rows = tf.ragged.constant([[1.0], [2.0, 3.0]])
    numbers = {"loss": tf.constant(2.0), "each": tf.constant([1.0, 3.0]), "ok": tf.constant(True)}
    assert fetch_numbers({**numbers, "text": b"warm", "words": np.array([b"a"]), "rows": rows}) == {
        "loss": 2.0,
        "each": 2.0,
        "ok": 1.0,
    }


@pytest.mark.parametrize("unrolled", [1, 4])
def test_each_step_of_a_call_draws_other_random_numbers(unrolled: int) -> None:
    drawn, count = tf.Variable(tf.zeros([9, 2])), tf.Variable(0)

    def train_step(batch: tf.Tensor) -> Any:
        drawn.scatter_nd_update([[count]], [[draw(3), draw(4)]])
        count.assign_add(1)
        return {}

    call(train_step, 9, unrolled)
    assert len(set(drawn.numpy().flat)) == 18, drawn.numpy()


@pytest.mark.parametrize(("unrolled", "is_call"), [(1, True), (4, False)])
def test_steps_of_a_round_do_not_wait_for_one_another_as_calls_do(unrolled: int, is_call: bool) -> None:
    functions = trace(lambda batch: {"loss": batch}, unrolled).call.graph.as_graph_def().library.function
    assert any(node.op in CALLS for one in functions for node in one.node_def) == is_call


def test_a_step_with_a_condition_is_called_and_says_whether_it_repeats_random_numbers() -> None:
    assert StepCopy(trace(lambda batch: {"loss": batch}).step).is_possible
    drawn = {}
    tf.random.set_seed(None)
    for seed in (None, 5):
        traced = trace(lambda batch, seed=seed: {"loss": tf.cond(batch > 1, lambda: draw(seed), lambda: 2.0)})
        copy = StepCopy(traced.step)
        assert not copy.is_possible
        drawn[seed] = copy.has_seeds
    assert drawn == {None: False, 5: True}


def test_a_step_of_workers_draws_from_no_seed_of_the_run() -> None:
    """Else all workers would draw the same, and once more after each fault: the operations have their seeds by then."""

    class Model:
        jit_compile = False
        train_step = staticmethod(
            lambda batch: {"loss": tf.cond(batch > 1, lambda: draw(None), lambda: 2.0) + draw(None)}
        )

    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(9)))
    tf.random.set_seed(5)
    try:
        seeds = {
            seeded: StepCopy(trace_step(strategy, Model(), iterator, seeded=seeded)).has_seeds for seeded in (0, 1)
        }
    finally:
        tf.random.set_seed(None)
    assert seeds == {0: False, 1: True}


@pytest.mark.parametrize("unrolled", [1, 4])
def test_a_condition_in_each_step_draws_other_random_numbers(unrolled: int) -> None:
    drawn, count = tf.Variable(tf.zeros([9])), tf.Variable(0)

    def train_step(batch: tf.Tensor) -> Any:
        drawn.scatter_nd_update([[count]], [tf.cond(batch > 0, lambda: draw(3), lambda: 2.0)])
        count.assign_add(1)
        return {}

    call(train_step, 9, unrolled)
    assert len(set(drawn.numpy())) == 9, drawn.numpy()


def draw(seed: int | None) -> tf.Tensor:
    return tf.random.uniform([], seed=seed)


def test_a_copy_has_the_shapes_that_python_has_told() -> None:
    table = tf.keras.layers.StringLookup(vocabulary=["a", "b"])

    def train_step(batch: tf.Tensor) -> Any:
        loss = tf.numpy_function(lambda one: one, [batch], tf.float32)
        loss.set_shape([])
        return {"loss": loss, "found": table(tf.constant("b"))}

    outputs, _ = call(train_step, 9, unrolled=4)
    assert (float(outputs["loss"]), int(outputs["found"])) == (9.0, 2)


def test_a_copy_waits_for_an_argument_as_the_step_does() -> None:
    def train_step(batch: tf.Tensor) -> Any:
        with tf.control_dependencies([batch]):
            return {"loss": tf.constant(1.0)}

    outputs, _ = call(train_step, 9, unrolled=4)
    assert float(outputs["loss"]) == 1.0
