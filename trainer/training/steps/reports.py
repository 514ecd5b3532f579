"""How calls on workers tell the coordinator that they have ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from trainer.run.saves.checkpoint_state import COORDINATOR

MAX_REPORTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Report:
    """What a call tells at its end: its number, its worker's, the step as it was then, and what it has to say."""

    number: int
    worker: int
    step: int
    result: Any
    done: int | None = None
    """The steps that the call has done, where that is known."""


class Reports:
    """Where calls on workers tell that they have ended: a queue on the coordinator, which the call itself fills.

    `schedule` returns a RemoteValue that could be waited for. As long as anybody holds it, TensorFlow fetches what lies
    on the worker, by a function for each value, in many threads at once, and in these requests have been garbled.
    """

    def __init__(self) -> None:
        self._queue: Any = None
        self._structure: Any = None

    @tf.autograph.experimental.do_not_convert
    def put(self, number: tf.Tensor, step: tf.Tensor, done: tf.Tensor, result: Any) -> None:
        """Tell of a call, in what is traced."""
        flat = tf.nest.flatten(result, expand_composites=True)
        self._structure = result
        with tf.init_scope(), tf.device(COORDINATOR):
            self._queue = tf.queue.FIFOQueue(MAX_REPORTS, [tf.int64, *(value.dtype for value in flat)])
        with tf.device(COORDINATOR):
            worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
            self._queue.enqueue([tf.stack([number, worker, step, tf.cast(done, tf.int64)]), *flat])

    def pop_oldest(self) -> Report | None:
        """Return the oldest report, or None when there is none."""
        with tf.device(COORDINATOR):
            if not int(self._queue.size()):
                return None
            taken = self._queue.dequeue()
        about, *flat = taken if isinstance(taken, list) else [taken]
        number, worker, step, done = (int(value) for value in about.numpy())
        result = tf.nest.pack_sequence_as(self._structure, flat, expand_composites=True)
        return Report(number, worker, step, result, done)
