"""What a program may return that is no dataset is refused with what to return instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.core.failures import UserError, explain
from trainer.training.data.input import call_program, check_dataset

ARRAY = np.zeros([4, 2])


class OfKeras2(tf.keras.utils.Sequence):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return ARRAY, ARRAY


class OfKeras3(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return ARRAY, ARRAY


DATASET = tf.data.Dataset.from_tensors(ARRAY)
OTHERS = {
    "arrays": ((ARRAY, ARRAY), r"tuple, not .*from_tensor_slices\(\(features, labels\)\)"),
    "by name": ({"x": ARRAY}, r"dict, not .*from_tensor_slices"),
    "a tensor": (tf.constant(ARRAY), "from_tensor_slices"),
    "a frame": (SimpleNamespace(to_numpy=lambda: ARRAY), "from_tensor_slices"),
    "Sequence": (OfKeras2(), "Python reads its batches.*TFRecordDataset.*from_tensor_slices"),
    "PyDataset": (OfKeras3(), "Python reads its batches.*TFRecordDataset.*from_tensor_slices"),
    "a generator": ((one for one in [ARRAY]), "generator, .* leave yield out"),
    "an iterator": (iter(DATASET), r"without iter\(\)"),
    "nothing": (None, "NoneType, .*: the method lacks a return"),
    "a method": (DATASET.batch, "method, not a tf.data.Dataset of batches: call it here, and return the dataset"),
    "a creator": (
        tf.keras.utils.experimental.DatasetCreator(lambda context: DATASET),
        "DatasetCreator, .*call it here",
    ),
    "of a coordinator": (type("PerWorkerDatasetFromDataset", (), {})(), "the trainer distributes it"),
    "a name": ("data", "str, not a tf.data.Dataset of batches$"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_dataset_is_refused_with_its_fix(name: str) -> None:
    returned, expected = OTHERS[name]
    with pytest.raises(UserError, match=rf"^Mine.train_dataset returned .*{expected}"):
        check_dataset(type("Mine", (), {})(), "train_dataset", returned)


class OfSciPy:
    """Prints what SciPy 1.17 prints of a sparse matrix; the hosts' environment, and so this one, lacks SciPy."""

    def __repr__(self) -> str:
        return "<Compressed Sparse Row sparse matrix of dtype 'float64'\n\twith 0 stored elements and shape (4, 2)>"


def test_a_matrix_of_scipy_is_not_taken_for_what_has_no_number_in_a_trace() -> None:
    class Mine:
        def train_dataset(self, context: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(OfSciPy())

    with pytest.raises((TypeError, ValueError)) as caught, tf.Graph().as_default():
        call_program(Mine(), "train_dataset", None)
    assert "give it matrix.toarray()" in explain(caught.value)


def test_a_distributed_dataset_is_the_trainers_to_make() -> None:
    # Made here: other tests connect this process to servers, and its processor has another name since.
    dataset = tf.data.Dataset.range(4)
    distributed = tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(dataset)
    with pytest.raises(UserError, match="the trainer distributes it"):
        check_dataset(type("Mine", (), {})(), "train_dataset", distributed)
