"""What programs return for a dataset, as they give it to Keras's `fit`; each with what to return instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

ARRAYS = (
    "make one of arrays in memory with tf.data.Dataset.from_tensor_slices((features, labels)), and batch it "
    "(docs/input.md)"
)


def fix_of(data: Any) -> str:
    """Say what to return instead of this; nothing where that is not known."""
    if data is None:
        return "the method lacks a return"
    if isinstance(data, Iterator):
        return "return the dataset itself, without iter(), and leave yield out"
    if isinstance(data, tf.distribute.DistributedDataset) or type(data).__name__.startswith("PerWorker"):
        return "return the dataset itself: the trainer distributes it"
    if hasattr(data, "on_epoch_end") and hasattr(data, "__getitem__"):  # Keras's Sequence or PyDataset
        return (
            "Python reads its batches, which workers' servers don't run. Read files by TensorFlow's operations "
            f"(TFRecordDataset, TextLineDataset), or {ARRAYS}"
        )
    if isinstance(data, dict | list | tuple | np.ndarray) or tf.is_tensor(data) or hasattr(data, "to_numpy"):
        return ARRAYS
    if callable(data):  # TensorFlow's DatasetCreator, too
        return "call it here, and return the dataset: this method is the dataset_fn of TensorFlow's guide"
    return ""
