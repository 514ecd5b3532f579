"""How long steps wait for their batches: in one step, and in a round of which the first one is measured."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from trainer.training.measures.input_wait import InputWait
from trainer.training.steps.step_copy import StepCopy

SECONDS = 0.2


def step_of(wait: InputWait, iterator: Any) -> Any:
    """Trace a step that does nothing but take its batch."""

    @tf.function(autograph=False)
    def step(given: Any) -> Any:
        return wait.measured(lambda: next(given))

    return step.get_concrete_function(iterator)


def counted(wait: InputWait, steps: int) -> float:
    return wait.found([one for one, _ in wait.states], steps)


@pytest.mark.parametrize("slow", [False, True])
def test_the_time_until_a_batch_has_come_is_counted(slow: bool) -> None:
    dataset = tf.data.Dataset.range(10).apply(testing.sleep(int(SECONDS * 1e6 * slow)))
    wait, iterator = InputWait(), iter(dataset)
    step = step_of(wait, iterator)
    assert [int(step(iterator)) for _ in range(3)] == [0, 1, 2]
    assert 2.9 * SECONDS * slow <= counted(wait, 3) < 3 * SECONDS * slow + 3 * SECONDS


def test_the_first_step_of_a_round_counts_for_all() -> None:
    wait = InputWait()
    iterator = iter(tf.data.Dataset.range(10).apply(testing.sleep(int(SECONDS * 1e6))))
    copy = StepCopy(step_of(wait, iterator))

    @tf.function(autograph=False)
    def call(given: Any) -> Any:
        return [copy.make([given], counts=number == 0)[0] for number in range(4)]

    assert [int(one) for one in call(iterator)] == [0, 1, 2, 3]
    assert int(wait.states[0][0]) == 1
    assert 3.9 * SECONDS <= counted(wait, 4) < 8 * SECONDS
