"""How stale a worker's updates are: by the steps that the optimizer has counted meanwhile."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from processes import until
from tensorflow.python.data.experimental.ops import testing

from trainer.training.measures.staleness import SCOPE, Staleness
from trainer.training.steps.step_copy import StepCopy


@pytest.fixture
def iterations() -> tf.Variable:
    return tf.Variable(5, dtype=tf.int64)


def step_of(stale: Staleness, iterations: tf.Variable, others: tf.Variable) -> Any:
    """Trace a step meanwhile so many others end; it returns the number of steps that it read first."""

    @tf.function(autograph=False)
    def step() -> Any:
        first = iterations.read_value()
        with stale.measured([first]):
            iterations.assign_add(1 + others)
        return first

    return step.get_concrete_function()


def test_an_update_is_stale_by_the_updates_of_others_since_its_batch_was_there(iterations: tf.Variable) -> None:
    stale, others = Staleness(SimpleNamespace(iterations=iterations)), tf.Variable(2, dtype=tf.int64)
    step = step_of(stale, iterations, others)
    step()
    others.assign(6)
    step()
    counts = [one for one, _ in stale.states]
    assert [int(one) for one in counts] == [2, 8, 6]
    assert stale.found(counts, steps=2) == (8, 6)


def test_updates_of_others_count_while_a_gradient_is_computed(iterations: tf.Variable) -> None:
    """The optimizer's count waits for no gradient."""
    stale, weight = Staleness(SimpleNamespace(iterations=iterations)), tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False)
    def step() -> None:
        with stale.measured([]):
            gradient = tf.data.Dataset.range(1).apply(testing.sleep(1_000_000)).get_single_element()
            weight.assign_add(gradient)
            iterations.assign_add(1)

    step.get_concrete_function()
    one = threading.Thread(target=step)
    one.start()
    until(lambda: int(iterations) == 6, "the step's count")
    iterations.assign_add(3)
    one.join()
    assert [int(each) for each, _ in stale.states] == [1, 3, 3]


def test_steps_that_are_not_counted_are_taken_for_like_the_others(iterations: tf.Variable) -> None:
    stale, others = Staleness(SimpleNamespace(iterations=iterations)), tf.Variable(2, dtype=tf.int64)
    copy = StepCopy(step_of(stale, iterations, others))

    @tf.function(autograph=False)
    def call() -> Any:
        return [copy.make([], counts=number == 0)[0] for number in range(8)]

    assert [int(one) for one in call()] == [5, 8, 11, 14, 17, 20, 23, 26]
    counts = [one for one, _ in stale.states]
    assert [int(one) for one in counts] == [1, 2, 2]
    assert stale.found(counts, steps=8) == (16, 2)
    names = [one.name for one in call.get_concrete_function().graph.get_operations() if one.type != "Placeholder"]
    assert len({name.partition(SCOPE)[0] for name in names if SCOPE in name}) == 1


def test_without_an_optimizer_nothing_is_counted() -> None:
    stale = Staleness(None)
    with stale.measured([]):
        pass
    assert (stale.states, stale.found([], 3)) == ([], None)
