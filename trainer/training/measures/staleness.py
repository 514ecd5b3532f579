"""How many updates of other workers lie between a worker's read of the weights and its own update of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Optimizer, Structure, Tensor
from trainer.training.data.places import tensors_in
from trainer.training.measures.metrics import MAXIMUM, SUM

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "MutexLock")
SCOPE = "psfleet_staleness"  # of all operations that count: a step does its work without them too
BEGAN = f"{SCOPE}/began"  # of those that read the optimizer's count first
ENDED = f"{SCOPE}/ended"
WEIGHT = "steps_counted"  # the constant that says for how many steps one counts


class Staleness:
    """Counts it in what is traced, by the steps that an optimizer has counted meanwhile; make it in no scope."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Take the model's optimizer; without one nothing is counted."""
        count = getattr(optimizer, "iterations", None)
        self._iterations: Any = getattr(count, "_value", count)  # Keras 3 has a variable of its own around it
        self._steps, self._sum, self._highest = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3))
        self.states = [] if count is None else [(self._steps, SUM), (self._sum, SUM), (self._highest, MAXIMUM)]
        """What is kept where a call runs, with how the states of two calls are merged."""

    def found(self, states: Sequence[Tensor], steps: int) -> tuple[int, int] | None:
        """Return of a call of so many steps how many updates of others its own were stale by: in all, and at most.

        `states` are those of `states` at its end. The steps that were not counted are taken for like the others.
        """
        if not self.states:
            return None
        counted, found, highest = map(int, states)
        return round(found * steps / max(counted, 1)), highest

    def _updates(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return those that change what is read: the optimizer's count is raised at once, and waits for no gradient.

        Where some are on the count's ps, these alone are waited for, so that no ps waits for another.
        """
        changes = [
            one for one in operations if one.type not in READS and any(each.dtype == tf.resource for each in one.inputs)
        ]
        beside = [one for one in changes if one.device == self._iterations.device]
        return beside or changes

    @contextlib.contextmanager
    def measured(self, batch: Structure) -> Iterator[None]:
        """Count that of the step that is traced meanwhile, which begins when its batch is there."""
        if not self.states:
            yield
            return
        given, device = tf.nest.flatten(tensors_in(batch), expand_composites=True), self._iterations.device
        with tf.name_scope(BEGAN), tf.device(device), tf.control_dependencies(given):
            began = self._iterations.read_value()
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        # Only the difference is sent, and nothing but the read waits: each costs a message.
        with tf.name_scope(ENDED):
            with tf.device(device):
                with tf.control_dependencies(self._updates(graph.get_operations()[before:])):
                    ended = self._iterations.read_value()
                others = tf.cast(tf.maximum(ended - began - 1, 0), tf.int64)
            steps = tf.constant(1, tf.int64, name=WEIGHT)
            self._steps.assign_add(steps)
            self._sum.assign_add(others * steps)
            self._highest.assign(tf.maximum(self._highest, others))
