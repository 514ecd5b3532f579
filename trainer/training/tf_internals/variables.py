"""Variables of both Keras: what lies beneath one, its averages, its names and its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.data.experimental.ops.testing import sleep as sleep
from tf_keras.src.mixed_precision import autocast_variable

from trainer.core.contracts import Optimizer, Variable

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def whole_of(variable: Variable) -> Variable:
    """Return the split variable that this one is a shard of, or None."""
    container = getattr(variable, "_sharded_container", None)
    return container() if container is not None else None


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
    """Return the type that a layer of tf_keras computes in just now, or None."""
    return getattr(autocast_variable._autocast_dtype, "dtype", None)


def wrap_autocast_variables(wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `wrap`, given tf_keras's own wrapper and a weight, wrap what layers with a mixed policy make."""
    plain = autocast_variable.create_autocast_variable
    if not hasattr(plain, "of_psfleet"):

        def wrapped(variable: Variable) -> Variable:
            return wrap(plain, variable)

        wrapped.of_psfleet = True  # type: ignore[attr-defined]
        autocast_variable.create_autocast_variable = wrapped
