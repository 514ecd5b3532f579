"""Datasets: where workers make them, what is drawn in them, and their iterators."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.experimental.ops.testing import sleep as sleep
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.data.util import random_seed, structure
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute.coordinator import coordinator_context

from trainer.core.contracts import DataIterator, Dataset, ElementSpec, Strategy, Tensor

GRAPH_SEED = 87654321  # TensorFlow's own, beside a seed that a program gives


def iterator_type_spec(strategy: Strategy, per_worker_dataset: Dataset) -> ElementSpec:
    """Return the type of one worker's iterator of a per-worker dataset, before there is one."""
    return input_lib.get_iterator_spec_from_dataset(strategy, per_worker_dataset._dataset_fn.structured_outputs)


def for_each_worker(numbers: Callable[[int], Sequence[int]], size: int) -> tf.Tensor:
    """Return, in what is traced, numbers of the worker that runs it: asked of this process each time that it runs."""

    def of_this_worker() -> tf.Tensor:
        return tf.constant(numbers(int(coordinator_context.get_current_dispatch_context().worker_index)), tf.int64)

    graph = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(of_this_worker, tf.TensorSpec([size], tf.int64))


def type_in(optional: ElementSpec) -> ElementSpec:
    """Return the type of what is in an Optional of this type."""
    return optional._element_spec


def handle_for_each_worker(handle: Callable[[int], Tensor]) -> tf.Tensor:
    """Return, in what is traced, a resource for the worker that runs it: asked of this process each time that it runs.

    The resource may be in this process; operations on it run where it is.
    """

    def of_this_worker() -> Tensor:
        return handle(int(coordinator_context.get_current_dispatch_context().worker_index))

    graph = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(of_this_worker, tf.TensorSpec([], tf.resource))


@contextlib.contextmanager
def drawing_from(seed: tf.Tensor | None, reading: tf.Tensor) -> Iterator[list[Any]]:
    """Have the pipelines that are made meanwhile draw from `seed`, each of their operations numbers of its own.

    Without one each iterator draws its own: also one that `interleave` makes, which else repeats those before it. A
    `shuffle` with a seed of the program's own keeps it, with `reading` added where it shuffles again each time. Gives
    a list that has an entry for each operation that draws otherwise in another reading.
    """
    get_seed, shuffle = random_seed.get_seed, tf.data.Dataset.shuffle
    numbers, draws = itertools.count(1), list[Any]()

    def drawn(given: object) -> Any:
        if given is None:
            draws.append(given)
        if given is None and seed is None:
            return tf.constant(0, tf.int64), tf.constant(0, tf.int64)  # tf.data's way to ask for that
        if given is None:
            return seed, tf.constant(next(numbers), tf.int64)
        # Not the run's seed, as TensorFlow would: an order that is always the same is so in the evaluator, too.
        return tf.constant(GRAPH_SEED, tf.int64), tf.cast(given, tf.int64)

    def shuffled(
        self: Any, buffer_size: Any, seed: Any = None, reshuffle_each_iteration: bool = True, name: str | None = None
    ) -> Dataset:
        if seed is not None and reshuffle_each_iteration is not False:
            draws.append(seed)
            seed = tf.cast(seed, tf.int64) + reading
        return shuffle(self, buffer_size, seed, reshuffle_each_iteration, name)

    random_seed.get_seed, tf.data.Dataset.shuffle = drawn, shuffled
    try:
        yield draws
    finally:
        random_seed.get_seed, tf.data.Dataset.shuffle = get_seed, shuffle


@contextlib.contextmanager
def refusing_loops() -> Iterator[None]:
    """Raise TypeError where a loop in Python asks for a second element of a dataset that is traced: it has no end."""
    plain = iterator_ops.OwnedIterator.__next__

    def once(self: Any) -> Any:
        if not tf.executing_eagerly():
            if vars(self).setdefault("psfleet_asked", False):
                raise TypeError("in Python a loop over a dataset never ends here, as each element is one Tensor")
            self.psfleet_asked = True
        return plain(self)

    iterator_ops.OwnedIterator.__next__ = once
    try:
        yield
    finally:
        iterator_ops.OwnedIterator.__next__ = plain


def iterator_handles(per_worker: DataIterator) -> list[Tensor]:
    """Return the handle of each worker's iterator that exists, on its worker."""
    parts = [remote._values for remote in per_worker._values if remote._values is not None]
    return [part for part in tf.nest.flatten(parts, expand_composites=True) if part.dtype == tf.resource]


def elements_of(iterator_spec: ElementSpec) -> tuple[list[tf.DType], list[tf.TensorShape]]:
    """Return types and shapes of the tensors that an iterator of this type gives."""
    element = iterator_spec._element_spec
    return structure.get_flat_tensor_types(element), structure.get_flat_tensor_shapes(element)


def forget_uncompressing() -> None:
    """Have TensorFlow make again what uncompresses a data service's elements.

    It keeps that function for all datasets with such elements. After this process has joined a cluster again, the
    workers lack it: "Could not find required function definition".
    """
    data_service_ops._get_uncompress_func.cache_clear()


def converting_as_ever() -> contextlib.AbstractContextManager[Any]:
    """Have AutoGraph translate neither a whole method of the program's nor nothing, but what `map` is given."""
    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED)
