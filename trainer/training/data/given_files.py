"""Files that workers are given one by one: what a worker's pipeline does to get the next one.

A worker has a mailbox in the coordinator's process, from which its pipeline takes a ticket for each file. It never
waits there: what waits in another process might do so for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.failures import UserError
from trainer.run.saves.checkpoint_state import COORDINATOR
from trainer.training.data.file_names import patterns_of
from trainer.training.tf_internals.datasets import handle_for_each_worker, sleep

MAX_TICKETS = 1 << 20
TYPES = [tf.int64, tf.int64, tf.int64, tf.string]  # the ticket, the order's number, the examples taken, the name
IDLE_MICROSECONDS = 100_000  # the same where calls end meanwhile
WAIT_MICROSECONDS = 20_000  # before a worker without a file looks again


class TicketQueue:
    """A queue of tickets on the coordinator; make it outside a graph."""

    def __init__(self) -> None:
        with tf.device(COORDINATOR):
            self._queue = tf.queue.FIFOQueue(MAX_TICKETS, TYPES, shapes=[[]] * len(TYPES))

    @property
    def handle(self) -> tf.Tensor:
        return self._queue.queue_ref

    def put(self, ticket: int, order: int, taken: int, name: str) -> None:
        with tf.device(COORDINATOR):
            values = zip((ticket, order, taken, name), TYPES, strict=True)
            self._queue.enqueue([tf.constant(value, dtype) for value, dtype in values])

    def size(self) -> int:
        """Return how many tickets its worker has not taken yet."""
        with tf.device(COORDINATOR):
            return int(self._queue.size())


@dataclasses.dataclass
class GivenFile:
    """The file that a traced pipeline reads, and the number of its order."""

    name: tf.Tensor
    order: tf.Tensor
    pattern: tuple[str, ...] = ()
    """What the program has asked for; nothing where it has not."""

    def dataset(self, pattern: str | Sequence[str]) -> tf.data.Dataset:
        """Return the name alone; raises UserError where it can't be known whose name that is."""
        patterns = patterns_of(pattern)
        if self.pattern:
            raise UserError(
                "context.files is asked twice in one train_dataset, and with input_sharding: dynamic a worker has one "
                "file at a time: give it one list of patterns, or leave input_sharding out"
            )
        self.pattern = patterns
        return tf.data.Dataset.from_tensors(self.name)


@dataclasses.dataclass(frozen=True)
class GivenFiles:
    """Where workers get their files: `mailbox` begins a worker's reading, `named` takes the program's patterns."""

    mailbox: Callable[[int], TicketQueue]
    named: Callable[[tuple[str, ...]], object]
    waits: bool = False
    """Whether there may be no file for long; then tickets of -1 come between the others."""

    def tickets(self) -> tf.data.Dataset:
        """Return the tickets of the worker that runs what is traced, without end, each with the one before."""
        handle = handle_for_each_worker(lambda worker: self.mailbox(worker).handle)

        def take() -> Any:
            with tf.device(COORDINATOR):
                taken = tf.raw_ops.QueueDequeueV2(handle=handle, component_types=TYPES)
            return tuple(tf.ensure_shape(one, []) for one in taken)

        def nothing() -> Any:
            return (*(tf.constant(-1, tf.int64) for _ in TYPES[:-1]), tf.constant(""))

        @tf.autograph.experimental.do_not_convert
        def take_if_any(_: tf.Tensor) -> Any:
            with tf.device(COORDINATOR):
                size = tf.raw_ops.QueueSizeV2(handle=handle)
            return tf.cond(size > 0, take, nothing)

        @tf.autograph.experimental.do_not_convert
        def paced(*ticket: tf.Tensor) -> tf.data.Dataset:
            microseconds = IDLE_MICROSECONDS if self.waits else WAIT_MICROSECONDS
            wait = tf.where(ticket[0] < 0, tf.constant(microseconds, tf.int64), 0)
            return tf.data.Dataset.from_tensors(ticket).apply(sleep(wait))

        looked = tf.data.Dataset.counter().map(take_if_any).flat_map(paced)
        if not self.waits:
            looked = looked.filter(lambda number, *_: number >= 0)
        none = tf.zeros([], tf.int64)
        return looked.scan(none, lambda before, ticket: (tf.maximum(before, ticket[0]), (*ticket, before)))
