"""How long a worker's steps wait for their batches, so that a slow input can be told from slow messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.core.contracts import Structure, Tensor
from trainer.training.data.places import tensors_in
from trainer.training.measures.metrics import SUM
from trainer.training.measures.staleness import SCOPE

INPUT = f"{SCOPE}/input"


class InputWait:
    """Counts it in what is traced, from where a step asks for its batch until that has come; make it in no scope."""

    def __init__(self) -> None:
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.states = [(self._steps, SUM), (self._seconds, SUM)]
        """What is kept where a call runs, with how the states of two calls are merged."""

    def found(self, states: Sequence[Tensor], steps: int) -> float:
        """Return how many seconds the steps of a call waited, of whose steps the first of each round was measured.

        `states` are those of `states` at its end. The other steps are taken for like the measured ones.
        """
        measured, seconds = states
        return float(seconds) * steps / max(int(measured), 1)

    def measured(self, read: Callable[[], Structure]) -> Structure:
        """Return the batch that `read` takes, and count how long that takes."""
        with tf.name_scope(INPUT):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            batch = read()
        with tf.name_scope(INPUT), tf.control_dependencies(tf.nest.flatten(tensors_in(batch), expand_composites=True)):
            self._steps.assign_add(1)
            self._seconds.assign_add(tf.timestamp() - began)
        return batch
