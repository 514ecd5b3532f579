"""A split variable's shards, which Keras 3 trains as variables of their own, and tables, looked up where they lie."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Layer, Tensor, Variable
from trainer.training.tables.table_lookups import rows_of
from trainer.training.tables.whole_weights import adds_up, whole_variables
from trainer.training.tf_internals.saving import list_h5_weights
from trainer.training.tf_internals.variables import look_up_with
from trainer.training.updates.unequal_parts import listed

ShardedVariable = tf.__internal__.distribute.ShardedVariable
LOOKS_UP_ROWS = "_looks_up_rows"


def shards_of(variable: Variable) -> list[Variable]:
    """Return a split variable's shards as variables of Keras; one that is whole is its own."""
    value = variable._value
    if not isinstance(value, ShardedVariable):
        return [variable]
    if "_shards" not in vars(variable):
        import keras

        shards = []
        for number, part in enumerate(value.variables):
            shard = keras.Variable(part, dtype=variable._dtype, name=f"{variable.name}_part_{number}")
            shard._path = f"{variable.path}_part_{number}"
            shard._autocast = variable._autocast
            shard._regularizer = regularizer_of(number, variable)
            shard._overwrite_with_gradient = variable._overwrite_with_gradient
            shard._whole = variable
            shards.append(shard)
        variable._shards = shards
    found: list[Any] = variable._shards
    return found


def regularizer_of(number: int, variable: Variable) -> Any:
    """Return the regularizer of a shard: one that is no sum is the first shard's, and takes the whole variable."""
    regularizer = variable._regularizer
    if regularizer is None or adds_up(regularizer):
        return regularizer
    return None if number else lambda _: regularizer(tf.convert_to_tensor(variable._value))


def train_shards() -> None:
    """Have layers of Keras 3, if it is imported, name shards as what is trained: gradients and slots are of these.

    What reads a split variable as an array, to save it or to keep the best weights, gets it whole. Metrics' states stay
    whole: what is assigned to shards says no more how they are merged. Call it before build_model, which may build an
    optimizer.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return
    plain_array = keras.Variable.__array__
    if not hasattr(plain_array, "of_shards"):
        keras.Variable.__array__ = whole_array(plain_array)
        keras.Variable.numpy = lambda variable: np.array(variable)
        look_up_with(keras.Variable, look_up_beneath)
        keras.Variable.device = property(device_of)  # TensorFlow's lookups of sparse ids ask for it
    if not hasattr(keras.layers.Embedding.call, "__wrapped__"):
        keras.layers.Embedding.call = by_rows(keras.layers.Embedding.call)
    if not hasattr(keras.Metric.add_variable, "__wrapped__"):
        keras.Metric.add_variable = whole_variables()(keras.Metric.add_variable)
    list_h5_weights(whole_weights)
    for name in ("trainable_weights", "trainable_variables"):
        plain = vars(keras.Layer)[name]
        if not hasattr(plain, "of_shards"):
            setattr(keras.Layer, name, OfShards(plain.fget))


def whole_weights(layer: Layer) -> list[Variable]:
    """Return a layer's weights in the order of a file .h5, a split one as a whole."""
    weights = [vars(one).get("_whole", one) for one in layer.trainable_weights + layer.non_trainable_weights]
    return list({id(one): one for one in weights}.values())


def whole_array(plain: Callable[..., Any]) -> Callable[..., Any]:
    def array(variable: Variable, dtype: Any = None, copy: bool | None = None) -> Tensor:
        if isinstance(variable._value, ShardedVariable):
            return tf.convert_to_tensor(variable._value).numpy()
        return plain(variable, dtype)

    array.of_shards = True  # type: ignore[attr-defined]
    return array


def look_up_beneath(
    params: Any,
    ids: Tensor,
    partition_strategy: str = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: float | None = None,
) -> Tensor:
    """Look rows up in the split variable beneath one of Keras, which TensorFlow can't read as a whole there."""
    first, *more = params if isinstance(params, list) else [params]
    table = [one._value for one in (first, *more)] if more else first._value
    return tf.cast(tf.nn.embedding_lookup(table, ids, max_norm=max_norm, name=name), first.dtype)


def device_of(variable: Variable) -> str:
    """Return where a variable of Keras lies, or the first part of a split one."""
    first, *_ = getattr(variable._value, "variables", [variable._value])
    return str(first.device)


class OfShards(property):
    """A property of Keras's layers that lists variables, with shards in the place of split ones."""

    of_shards = True

    def __init__(self, whole: Callable[[Any], list[Any]]) -> None:
        super().__init__(lambda layer: listed([shard for one in whole(layer) for shard in shards_of(one)]))


def by_rows(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `call` that asks for rows where a layer is prepared: Keras would read the whole table onto the worker.

    Classes that derive from Embedding call it, too.
    """

    @functools.wraps(plain)
    def call(layer: Layer, inputs: Tensor) -> Any:
        import keras

        if LOOKS_UP_ROWS not in vars(layer) or isinstance(inputs, keras.KerasTensor):
            return plain(layer, inputs)
        table, ids = layer._embeddings._value, inputs
        if table is None:
            return plain(layer, inputs)  # it only looks at shapes
        if not hasattr(table, "look_up"):  # a dynamic table takes ids as they are
            ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
            ids = from_the_end(ids, layer.input_dim)
        return tf.cast(rows_of(table, ids), layer.compute_dtype)

    return call


def from_the_end(ids: Any, rows: int) -> Any:
    """Return dense, ragged or sparse ids with negative ones counted from the end of a table, as Keras 3 takes them."""
    if isinstance(ids, tf.SparseTensor):
        return ids.with_values(from_the_end(ids.values, rows))
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(from_the_end(ids.flat_values, rows))
    return tf.where(ids < 0, ids + tf.cast(rows, ids.dtype), ids)
