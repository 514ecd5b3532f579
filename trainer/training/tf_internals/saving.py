"""Models in files: of tf_keras, and as SavedModels; and the default graph while a model is built."""

from __future__ import annotations

import contextlib
import keyword
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.checkpoint import util as checkpoint_util
from tensorflow.python.framework import ops
from tensorflow.python.ops import io_ops
from tensorflow.python.saved_model import load as saved_model_load
from tensorflow.python.saved_model import save as saved_model_save
from tensorflow.python.saved_model import signature_serialization
from tf_keras.src.layers.rnn import gru_lstm_utils
from tf_keras.src.saving.legacy import hdf5_format

from trainer.core.contracts import Tensor, Variable
from trainer.core.failures import UserError

HDF5_FUNCTIONS = ("load_weights_from_hdf5_group", "load_weights_from_hdf5_group_by_name", "save_weights_to_hdf5_group")
# Of operations.
NOT_IN_NAMES, NOT_AT_FIRST = re.compile(r"[^\w.\\/>-]", re.ASCII), re.compile(r"^(?![A-Za-z0-9.])")


def patch_hdf5_format(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], listed: Callable[[Any], list[Any]]
) -> None:
    """Have `wrap` wrap what reads and writes a model's weights in a file .h5, and `listed` list a layer's."""
    for name in HDF5_FUNCTIONS:
        setattr(hdf5_format, name, wrap(getattr(hdf5_format, name)))
    hdf5_format._legacy_weights = listed


def list_h5_weights(listed: Callable[[Any], list[Any]]) -> None:
    """Have `listed` list the weights of a layer of Keras 3 in the order of a file .h5."""
    from keras.src.legacy.saving import legacy_h5_format

    legacy_h5_format._legacy_weights = listed


def load_saved_model_within(scope: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have `tf.saved_model.load` make its variables within `scope`; tf_keras loads its models without that."""
    plain = saved_model_load.load_partial

    def load_partial(*given: object, **named: object) -> Any:
        with scope():
            return plain(*given, **named)

    saved_model_load.load_partial = load_partial


def read_split_kernels(read: Callable[[Any], Any]) -> None:
    """Have recurrent layers of tf_keras read a split weight by `read`: they give what they have read to a function."""
    plain = gru_lstm_utils.read_variable_value

    def read_variable_value(weight: Variable) -> Tensor:
        return read(weight) if hasattr(weight, "variables") else plain(weight)

    gru_lstm_utils.read_variable_value = read_variable_value


def name_in_checkpoints(kind: type, name: Callable[[Any], str]) -> None:
    """Have checkpoints note the names of variables of a kind for which TensorFlow notes none."""
    plain = checkpoint_util.get_full_name
    checkpoint_util.get_full_name = lambda one: name(one) if isinstance(one, kind) else plain(one)


@contextlib.contextmanager
def saving_by(save: Callable[..., Any]) -> Iterator[None]:
    """Have checkpoints that are written, or traced, meanwhile write their tensors by `save`.

    It is given what TensorFlow writes them by, and what that is given: prefix, names, slices and tensors.
    """
    with replaced(io_ops, "save_v2", save):
        yield


@contextlib.contextmanager
def restoring_by(restore: Callable[..., Any]) -> Iterator[None]:
    """Have checkpoints that are read meanwhile read their tensors by `restore`.

    It is given what TensorFlow reads them by, and what that is given: prefix, names, slices and types.
    """
    with replaced(io_ops, "restore_v2", restore):
        yield


@contextlib.contextmanager
def replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    plain = getattr(module, name)
    setattr(module, name, partial(function, plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


@contextlib.contextmanager
def keeping_default_graph() -> Iterator[None]:
    """Have `clear_session` of either Keras and `reset_default_graph` keep the default graph meanwhile.

    The graph holds the strategy whose scope this is: in another one, variables would be made on the coordinator.
    """
    stack = ops._default_graph_stack
    stack.reset = lambda: None
    try:
        yield
    finally:
        del stack.reset


@contextlib.contextmanager
def tracing_saves() -> Iterator[None]:
    """Have what saves a SavedModel meanwhile trace all of it, and write nothing."""
    plain = saved_model_save.save_and_return_nodes

    def trace(obj: Any, export_dir: str, signatures: Any = None, options: Any = None, **_: object) -> None:
        options = options or tf.saved_model.SaveOptions()
        saved_model_save._build_meta_graph(obj, signatures, options, meta_graph_pb2.MetaGraphDef())

    saved_model_save.save_and_return_nodes = trace
    try:
        yield
    finally:
        saved_model_save.save_and_return_nodes = plain


def naming_arguments() -> contextlib.AbstractContextManager[None]:
    """Have what saves a SavedModel meanwhile take any name of an input, such as "class", "fixed acidity" or "_id".

    TensorFlow fails where it can't name an argument or an operation so; of "1st" it makes a name itself. Raises
    UserError where two become one.
    """

    def named(plain: Callable[..., Any], function: Any) -> Any:
        found = plain(function)
        if found is not None:
            given = [str(one) for one in found._arg_keywords]
            names = [NOT_AT_FIRST.sub("arg", NOT_IN_NAMES.sub("_", one)) for one in given]
            if twice := [one for one, name in zip(given, names, strict=True) if names.count(name) > 1]:
                raise UserError(
                    f"the export would have one name for the inputs {', '.join(map(repr, twice))}: rename one of them"
                )
            found._arg_keywords = [f"{one}_" if keyword.iskeyword(one) else one for one in names]
        return found

    return replaced(signature_serialization, "_get_signature", named)
