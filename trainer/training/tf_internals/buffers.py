"""What a dataset keeps in memory: the buffers of `shuffle`, and what `cache` without a file holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from trainer.core.contracts import Dataset

# Datasets with as many elements as their input has, and others with no more.
AS_MANY = (
    "_MapDataset",
    "_ParallelMapDataset",
    "_ShuffleDataset",
    "CacheDataset",
    "_PrefetchDataset",
    "_OptionsDataset",
)
NO_MORE = (*AS_MANY, "_FilterDataset", "_ShardDataset", "_TakeDataset", "_SkipDataset")
BATCHES = ("_BatchDataset", "_ParallelBatchDataset")


class Buffer(NamedTuple):
    """Elements of one size that lie in memory together."""

    method: str
    elements: int
    element_bytes: int

    @property
    def size(self) -> int:
        return self.elements * self.element_bytes


def buffers(dataset: Dataset) -> Iterator[Buffer]:
    """Yield what a dataset and its inputs will keep, where its number and shapes are known; also while tracing."""
    for before in dataset._inputs():
        yield from buffers(before)
        if not (size := bytes_of_element(before)):
            continue
        if type(dataset).__name__ == "_ShuffleDataset":
            wanted, most = tf.get_static_value(dataset._buffer_size), count(before, NO_MORE)
            if wanted is not None and wanted > 0:
                yield Buffer("shuffle", int(wanted) if most is None else min(int(wanted), most), size)
        elif type(dataset).__name__ == "CacheDataset" and tf.get_static_value(dataset._filename) == b"":
            yield Buffer("cache", count(before, AS_MANY) or 0, size)


def bytes_of_element(dataset: Dataset) -> int | None:
    """Return the bytes of an element's tensors; None where one has no fixed size, as a text."""
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(each, tf.TensorSpec) and each.shape.is_fully_defined() for each in specs):
        return None
    sizes = [each.shape.num_elements() * each.dtype.size for each in specs if each.dtype.size]
    return sum(sizes) if len(sizes) == len(specs) else None


def count(dataset: Dataset, kinds: tuple[str, ...]) -> int | None:
    """Return how many elements there are, through datasets of these kinds; None where that is not known."""
    number = int(dataset.cardinality()) if tf.executing_eagerly() else -1
    if number >= 0:
        return number
    if type(dataset).__name__ == "_TensorSliceDataset":
        return dataset._tensors[0].shape[0]
    if type(dataset).__name__ == "_AssertCardinalityDataset":
        known = tf.get_static_value(dataset._expected_cardinality)
        return None if known is None or known < 0 else int(known)
    if type(dataset).__name__ in BATCHES:
        examples, size = count(dataset._inputs()[0], kinds), tf.get_static_value(dataset._batch_size)
        return None if examples is None or size is None else examples // int(size)
    return count(dataset._inputs()[0], kinds) if type(dataset).__name__ in kinds else None
