"""What a worker reads pass after pass, or file after file, each batch with its place: how far it is by then."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from trainer.core.contracts import Structure, Tensor
from trainer.training.data.given_files import GivenFile
from trainer.training.tf_internals.datasets import type_in

ENDLESS = (
    "train_dataset gives data without end. With input_position: exact it returns one pass over its part, and with "
    "input_sharding: dynamic what is in its file. The trainer must see the end: leave repeat() out, the trainer "
    "repeats, and take() a pass of Dataset.random or counter"
)


def pass_after_pass(
    read: Callable[[tf.Tensor], tf.data.Dataset], first: tf.Tensor, taken: tf.Tensor
) -> tf.data.Dataset:
    """Return what is read in the pass `first` after so many examples, and in all passes after it.

    An element is a pair: the pass and the examples taken of it, those of this batch included; and the batch. A batch
    is left out when all its examples were taken, so that it may have another size than before. It ends at a pass
    without any.
    """
    # What `map` draws begins again with each pass: a seed would have it draw the same.
    tf.compat.v1.get_default_graph().seed = None

    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        dataset, left_out = read(number), tf.where(number == first, taken, 0)
        there = counting(dataset, number, left_out)
        end = tf.experimental.Optional.empty(dataset.element_spec)
        return there.concatenate(tf.data.Dataset.from_tensors((tf.stack([number, left_out]), end))).enumerate()

    passes = tf.data.Dataset.counter(first).flat_map(one_pass)
    passes = passes.take_while(
        lambda turn, placed: tf.logical_or(placed[1].has_value(), tf.logical_or(turn > 0, placed[0][1] > 0))
    )
    passes = passes.filter(lambda turn, placed: placed[1].has_value())
    return passes.map(lambda turn, placed: (placed[0], placed[1].get_value()))


def file_after_file(
    read: Callable[[GivenFile], tf.data.Dataset], tickets: tf.data.Dataset, *, waits: bool
) -> tf.data.Dataset:
    """Return what is read of the file of each ticket after the examples that were taken of it.

    An element is a pair: the ticket and the examples taken of its file, those of this batch included; and the batch.
    With `waits` the batch is an Optional. It is empty where there is no file, and the place says -1: all is taken.
    """
    tf.compat.v1.get_default_graph().seed = None  # as `pass_after_pass` has it

    def counted(ticket: tf.Tensor, order: tf.Tensor, taken: tf.Tensor, name: tf.Tensor) -> tf.data.Dataset:
        return counting(read(GivenFile(name, order)), ticket, taken)

    def one_file(*ticket: tf.Tensor) -> tf.data.Dataset:
        *file, before = ticket
        if not waits:
            return counted(*file).map(lambda place, batch: (place, batch.get_value()))
        lacks = tf.cast(file[0] < 0, tf.int64)
        batches = tf.data.Dataset.range(1 - lacks).flat_map(lambda _: counted(*file))
        what = type_in(batches.element_spec[1])

        def marker(_: tf.Tensor) -> Structure:
            return tf.stack([before, tf.constant(-1, tf.int64)]), tf.experimental.Optional.empty(what)

        return batches.concatenate(tf.data.Dataset.range(lacks).map(marker))

    return tickets.flat_map(one_file)


def counting(dataset: tf.data.Dataset, number: tf.Tensor, taken: tf.Tensor) -> tf.data.Dataset:
    """Return pairs of a place, which is this number and how many examples are taken by then, and a batch as Optional.

    Batches whose examples were all `taken` before are left out.
    """

    def placed(before: tf.Tensor, batch: Structure) -> Structure:
        until = before + examples_in(batch)
        return until, (tf.stack([number, until]), tf.experimental.Optional.from_value(batch))

    # A worker counts them: what is traced does not know.
    has_end = dataset.cardinality() != tf.data.INFINITE_CARDINALITY
    with tf.control_dependencies([tf.debugging.Assert(has_end, [ENDLESS])]):
        begin = tf.zeros([], tf.int64)
    return dataset.scan(begin, placed).filter(lambda place, element: place[1] > taken)


def examples_in(batch: Structure) -> tf.Tensor:
    """Return how many examples a batch has: the greatest first dimension of its tensors, at least 1."""

    def length(tensor: Tensor) -> tf.Tensor:
        if isinstance(tensor, tf.RaggedTensor):
            return tensor.nrows(tf.int64)
        return tf.reduce_prod(tf.shape(tensor, tf.int64)[:1])  # 1 of a scalar

    return tf.maximum(tf.reduce_max([length(tensor) for tensor in tensors_in(batch)]), 1)


def tensors_in(batch: Structure) -> list[Tensor]:
    """Return a batch's tensors; `(features, None)`, as Keras allows, has None beside them."""
    return [one for one in tf.nest.flatten(batch) if one is not None]
