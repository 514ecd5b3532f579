"""Workers that join a generation which trains: TensorFlow makes those of its ClusterCoordinator once, at its start.

Such a worker is first one of those that TensorFlow has lost, in a place behind the others. Once it is taken in as they
are (trainer/training/tf_internals/workers.py), it gets a thread that gives it calls, and what lies on each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator

from trainer.core.contracts import Coordinator, DataIterator, Dataset
from trainer.training.tf_internals.executors import default_executor, make_executor, on_executor
from trainer.training.tf_internals.workers import PartialHandler


class Newcomer(cluster_coordinator.Worker):
    """A worker whose thread waits until it has what calls need."""

    def __init__(self, index: int, cluster: Any) -> None:
        self._equipped = threading.Event()
        super().__init__(index, f"/job:worker/replica:0/task:{index}", cluster)

    def _process_queue(self) -> None:
        self._equipped.wait()
        super()._process_queue()

    def begin(self) -> None:
        """Take calls from now on."""
        self._equipped.set()


def announce(coordinator: Coordinator, task: str, address: str) -> None:
    """Have TensorFlow take in a worker that its cluster does not have yet."""
    handler = coordinator._cluster.failure_handler
    assert isinstance(handler, PartialHandler)
    handler.announce(task, address)


def known_workers(coordinator: Coordinator) -> int:
    """Return how many workers there are, with those that were announced."""
    return len(coordinator._cluster.failure_handler.tasks)


def taken_in(coordinator: Coordinator) -> list[str]:
    """Return the workers that were announced and are taken in by now, and have no thread yet, in their order.

    One that is lost meanwhile holds up those that were announced after it, until it is back or the generation ends.
    """
    cluster = coordinator._cluster
    found = []
    for task in cluster.failure_handler.tasks[len(cluster.workers) :]:
        if task in cluster.failure_handler.lost.since:
            break
        found.append(task)
    return found


def add_worker(coordinator: Coordinator, task: str) -> Newcomer:
    """Make the thread of a worker that is taken in; it waits for `begin`."""
    cluster = coordinator._cluster
    worker = Newcomer(len(cluster.workers), cluster)
    cluster.failure_handler.budget.watch(task, worker)
    cluster._num_workers += 1
    cluster.workers.append(worker)
    cluster.failure_handler.resources.give(worker)
    return worker


def divide_again(dataset: Dataset, other: Dataset, iterator: DataIterator, workers: list[Any]) -> None:
    """Have these workers read `other`, in the iterators of `dataset` that they have: each after the call that it runs.

    Each handle stays, and gets another dataset: to free an iterator may take its worker a minute
    (trainer/training/release_resources.py). A worker that makes its iterator again later makes one of `other`.
    """
    dataset._dataset_fn = other._dataset_fn
    for worker in workers:
        worker.create_resource(reading(dataset._dataset_fn, iterator._values[worker.worker_index]))


def reading(dataset_fn: Callable[[], Dataset], remote: Any) -> Callable[[], None]:
    """Return what has the iterator in a worker's RemoteValue read a dataset from its beginning; the worker runs it.

    The end of what it read before is not waited for, which may take a minute: the next call reads from the beginning.
    """

    def read() -> None:
        parts = tf.nest.flatten(remote._values, expand_composites=True)
        [handle] = [part for part in parts if part.dtype == tf.resource]
        variant = tf.data.experimental.to_variant(dataset_fn()._apply_debug_options())
        with on_executor(make_executor(), default_executor()):
            tf.raw_ops.MakeIterator(dataset=variant, iterator=handle)

    return read
