"""Traced graphs: the functions that they call, the resources that they use, and an order apart from tf.function's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.util.dispatch import register_dispatchable_type as register_dispatchable_type

from trainer.core.contracts import Graph, Operation, Tensor, Trackable

# Operations that call functions, choose one, and repeat one.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
CHOICES = ("If", "StatelessIf")
LOOPS = ("While", "StatelessWhile")
APART = "atomic_update"  # a scope of names
Make = Callable[..., Sequence[Tensor]]
RESOURCE_HANDLE = b"\x72"  # the tag of TensorProto.resource_handle_val, whose length and bytes the content is


def called_graphs(operation: Operation) -> list[tuple[Graph, list[Tensor]]]:
    """Return the graphs of the functions that an operation calls, or chooses from, each with what it is given.

    Of a loop it is the body, with what its first round is given; of what is not known there are none.
    """
    inputs = list(operation.inputs)
    if operation.type in CALLS:
        called, given = ["f"], inputs
    elif operation.type in CHOICES:
        called, given = ["then_branch", "else_branch"], inputs[1:]
    elif operation.type in LOOPS:
        called, given = ["body"], inputs
    else:
        return []
    found = [operation.graph._get_function(operation.get_attr(name).name) for name in called]
    if any(one is None or len(one.graph.inputs) != len(given) for one in found):
        return []
    return [(one.graph, given) for one in found]


def condition_of(loop: Operation) -> Graph:
    """Return the graph of what decides whether a loop goes on, which gets what its body gets."""
    return loop.graph._get_function(loop.get_attr("cond").name).graph


def inner_graphs(graph: Graph) -> Iterator[Graph]:
    """Yield a traced graph, and those of the functions in it, each once."""
    seen, left = set[int](), [graph]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [each.graph for each in one._functions.values() if getattr(each, "graph", None) is not None]


def is_read_since_writes(read: Any, handle: Tensor, reading: Collection[str]) -> bool:
    """Return whether what was read of a handle is still so: no operation came later, but for those of these types."""
    return not any(one._id > read._id and one.type not in reading for one in handle.consumers())


def resource_names(handles: Sequence[Tensor]) -> list[tuple[str, str]]:
    """Return container and name of each variable's handle, by which every client of its server finds it.

    Call it with the handles' server as the device. TensorFlow draws the name of an eager variable there, and keeps it
    from the coordinator; it is written in the serialized handle (ResourceHandleProto).
    """
    if not handles:
        return []
    serialized = tf.stack([tf.raw_ops.SerializeTensor(tensor=handle) for handle in handles]).numpy()
    proto = type(tf.make_tensor_proto(0))
    found = [proto.FromString(RESOURCE_HANDLE + proto.FromString(one).tensor_content) for one in serialized]
    return [(one.resource_handle_val[0].container, one.resource_handle_val[0].name) for one in found]


def outermost(tensor: Tensor) -> Tensor:
    """Return the tensor outside of all functions that one within a function stands for."""
    while tf.is_symbolic_tensor(tensor):
        outer = [outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor]
        if not outer:
            break
        tensor = outer[0]
    return tensor


def handle_shape(handle: Tensor) -> tf.TensorShape:
    """Return the shape of the variable with this handle."""
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return tf.TensorShape(data.shape_and_type[0].shape if known else None)


def read_only_inputs(operation: Operation) -> list[int]:
    """Return the numbers of the variables among its inputs that a call of a function leaves as they are."""
    try:
        return list(operation.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return []


def is_stateful(operation: Operation) -> bool:
    """Return whether tf.function keeps an operation's place among others that have an effect."""
    return bool(auto_control_deps.op_is_stateful(operation))


def take_instead(operation: Any, given: Tensor, other: Tensor) -> None:
    """Have an operation of a graph that is being traced take another tensor wherever it takes this one."""
    for number in [number for number, one in enumerate(operation.inputs) if one is given]:
        operation._update_input(number, other)


def place(devices: Mapping[Any, str | None]) -> None:
    """Have operations of a graph that is being traced run on these devices, within those that they have by now."""
    for operation, device in devices.items():
        if device and operation.device:
            outer = tf.DeviceSpec.from_string(operation.device)
            device = outer.make_merged_spec(tf.DeviceSpec.from_string(device)).to_string()
        if device:
            operation._set_device_from_string(device)


def operation_like(operation: Any, inputs: Sequence[Tensor]) -> Any:
    """Make an operation of the same kind that takes other inputs."""
    types, attributes = [one.dtype for one in operation.outputs], dict(operation.node_def.attr)
    attributes.pop("_class", None)
    return operation.graph._create_op_internal(operation.type, list(inputs), types, attrs=attributes)


def nodes_of(graph: Any, names: Collection[str]) -> Any:
    """Return a graph with copies of the nodes of these names alone."""
    part = tf.compat.v1.GraphDef()
    part.CopyFrom(graph)
    del part.node[:]
    part.node.extend(node for node in graph.node if node.name in names)
    return part


def mutex(name: str) -> Tensor:
    """Return the mutex of that name on the device where it is asked for (TensorFlow's MutexV2)."""
    return tf.raw_ops.MutexV2(shared_name=name)


def either(condition: Tensor, act: Make, other: Make, given: Sequence[Tensor]) -> list[Tensor]:
    """Return what one of two functions makes of what is given, by one operation on the device where it is asked for.

    They use nothing else of the graph around them. tf.cond's operations would all become that graph's own.
    """
    specs = [tf.TensorSpec(one.shape, one.dtype) for one in given]
    branches = [tf.function(one, autograph=False).get_concrete_function(*specs) for one in (act, other)]
    outputs = list(zip(*(one.outputs for one in branches), strict=True))
    return list(
        tf.raw_ops.If(
            cond=condition,
            input=given,
            Tout=[one.dtype for one, _ in outputs],
            then_branch=branches[0],
            else_branch=branches[1],
            output_shapes=[one.shape.most_specific_compatible_shape(other.shape) for one, other in outputs],
        )
    )


def arrival(tensors: Sequence[Tensor]) -> Operation:
    """Return an operation that ends when these tensors have arrived on the device where it is asked for.

    TensorFlow's optimizations leave this one in place, and would take a control dependency for an Identity.
    """
    return tf.raw_ops.Assert(condition=True, data=[*tensors, 0])


@register_acd_resource_resolver
def _order_apart(operation: Operation, reads: Any, writes: Any) -> bool:
    """Have tf.function order each operation that was made within `APART` by its own dependencies alone.

    Otherwise all that have a state would wait for each other: those on one ps for those on another.
    """
    del reads
    if writes or APART not in operation.name or not (operation.outputs or operation.inputs):
        return False
    writes.add((operation.outputs or operation.inputs)[0])
    return True


def owner_of(resource: Tensor) -> Trackable | None:
    """Return the object that a resource's handle belongs to, as a table or a variable; None where that is not known."""
    owner = getattr(resource, "_parent_trackable", None)
    return owner() if owner is not None else None


def track(root: Trackable, name: str, child: Trackable) -> None:
    """Have what saves `root` find the child by that name, without an attribute of the root."""
    root._track_trackable(child, name, overwrite=True)
