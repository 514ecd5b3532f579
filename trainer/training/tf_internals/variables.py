"""Variables of both Keras: what lies beneath one, its averages, its names and its type."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.distribute import sharded_variable
from tensorflow.python.ops import embedding_ops, handle_data_util, resource_variable_ops
from tensorflow.python.util import dispatch
from tf_keras.src.initializers import initializers
from tf_keras.src.mixed_precision import autocast_variable

from trainer.core.contracts import Optimizer, Variable
from trainer.core.failures import UserError

OF_SOME_ROWS = "psfleet_some_rows"  # the scope of names of reads of a split variable that leave parts out
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def look_up_with(kind: type, look_up: Callable[..., Any]) -> None:
    """Have TensorFlow's lookups in what is of this kind, which they can't do themselves, be done with a function.

    Lookups of sparse ids and losses of sampled classes look rows up in a list, where no `dispatch_for_api` sees them.
    """
    dispatch.dispatch_for_types(embedding_ops.embedding_lookup, kind)(look_up)


def join_converted_parts() -> None:
    """Have TensorFlow return one tensor where it has made tensors of a split variable's parts.

    `tf.identity`, `tf.stop_gradient`, `tf.cond` and functions do so: they take it apart, and put it together again.
    """
    kind = sharded_variable.ShardedVariableSpec
    plain = kind._from_components

    def joined(spec: Any, parts: Any) -> Any:
        is_split = all(isinstance(one, tf.Variable) for one in parts)
        return plain(spec, parts) if is_split else tf.concat(parts, axis=0)

    kind._from_components = joined


def whole_of(variable: Variable) -> Variable:
    """Return the split variable that this one is a shard of, or None."""
    container = getattr(variable, "_sharded_container", None)
    return container() if container is not None else None


def divided(variable: Variable) -> Any:
    """Return what this variable is a part of: a split variable or a dynamic table; None of one that is whole."""
    whole = whole_of(variable)
    return getattr(getattr(variable, "_value", variable), "table", None) if whole is None else whole


def fans_of(shape: Any) -> tuple[int, int]:
    """Return of how many numbers one of a layer's outputs is made with a kernel of this shape, and the reverse."""
    fan_in, fan_out = initializers._compute_fans(shape)
    return fan_in, fan_out


@tf.autograph.experimental.do_not_convert  # it can't, and would warn where a train_step calls apply_gradients
def beneath(variable: Variable) -> Variable:
    """Return TensorFlow's own variable beneath what casts it, or stands for it on several replicas."""
    while (inner := vars(variable).get("_variable", vars(variable).get("_v"))) is not None:
        variable = inner
    return variable


def moving_average(optimizer: Optimizer, weight: Variable) -> Variable:
    """Return the average that an optimizer with use_ema keeps of a weight, None of one that it doesn't train."""
    number = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(weight))
    return None if number is None else optimizer._model_variables_moving_average[number]


def full_names(reader: Any) -> dict[str, str]:
    """Return the variables' names by their keys in a checkpoint, as the program had them that saved it."""
    if not reader.has_tensor(OBJECT_GRAPH):
        return {}
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(OBJECT_GRAPH))
    return {each.checkpoint_key: each.full_name for node in graph.nodes for each in node.attributes}


def autocast_dtype() -> Any:
    """Return the type that a layer of tf_keras computes in now, or None."""
    return getattr(autocast_variable._autocast_dtype, "dtype", None)


def wrap_autocast_variables(wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `wrap`, given tf_keras's own wrapper and a weight, wrap what layers with a mixed policy make."""
    plain = autocast_variable.create_autocast_variable
    if not hasattr(plain, "of_psfleet"):

        def wrapped(variable: Variable) -> Variable:
            return wrap(plain, variable)

        wrapped.of_psfleet = True  # type: ignore[attr-defined]
        autocast_variable.create_autocast_variable = wrapped


class Reserved(resource_variable_ops.BaseResourceVariable):
    """A variable whose handle has a name of our own, and which may not be read as a whole: its rows are reserved."""

    is_reserved = True

    def __init__(self, handle: Any, shape: list[int], dtype: Any, name: str, table: Any = None) -> None:
        """Take the table that it is a part of."""
        super().__init__(
            trainable=True,
            shape=shape,
            dtype=dtype,
            handle=handle,
            unique_id=f"{name}_{next(_numbers)}",
            handle_name=name,
            distribute_strategy=tf.distribute.get_strategy(),
        )
        self._whole_name, self.table = name, table

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        raise UserError(
            f"{self._whole_name} is a dynamic table, whose rows can't be read as a whole: look keys up by its layer. "
            "Callbacks and methods that take all weights, as get_weights, can't be used with it. If the program needs "
            "the whole table, leave it out of dynamic_tables"
        )

    def numpy(self) -> Any:
        return self._read_variable_op()


_numbers = itertools.count()


def handle_of(container: str, name: str, shape: list[int], dtype: Any) -> Any:
    """Return the handle of a variable with this container and name on the present device; it may not exist yet."""
    handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, container=container, shared_name=name)
    handle._handle_data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    return handle
