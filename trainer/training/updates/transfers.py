"""What a step sends between a worker and the ps goes together: one message a way, where TensorFlow sends one a tensor.

A message costs a worker and a ps some 0.1 ms of processor time each, whatever it holds. A step that looks up rows in
26 tables sends more than a hundred. So the graph of a step is changed after it is traced: small tensors that go from
one member to another at the same stage of the step are packed into one tensor of bytes, and unpacked where they arrive.
What is computed stays as it is (docs/decisions/0205).
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import tensorflow as tf

from trainer.core.contracts import Graph, Operation, Tensor, Variable
from trainer.training.measures.staleness import SCOPE
from trainer.training.tf_internals.graphs import APART, CALLS, CHOICES, LOOPS, take_instead
from trainer.training.updates.first_trace import is_dropped
from trainer.training.updates.orders import added_orders, handles_of, is_small, sources

WORKER = ""
SENT = "psfleet_together"
"""The scope of what packs and unpacks, and a graph's collection of pairs: a tensor that was packed, and its copy."""
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
TYPES = frozenset((*FLOATS, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16))
# They may run on several members, and are the worker's as a whole.
ACROSS = (*CALLS, *CHOICES, *LOOPS, "Case")


@dataclasses.dataclass(frozen=True, order=True)
class TransferPath:
    """A way between two members, and how often what goes there has crossed between members before."""

    source: str
    target: str
    crossings: int


@contextlib.contextmanager
def sending_together(local: Callable[[], Collection[Variable]] = tuple) -> Iterator[None]:
    """Have what is traced meanwhile send small tensors together.

    `local` returns variables that a call keeps on its worker; it is called at the end.
    """
    graph = tf.compat.v1.get_default_graph()
    yield
    if is_dropped():
        return
    places = places_of(graph, local())
    for stage, tensors in crossing(graph, places).items():
        chosen = [tensor for tensor in tensors if can_be_packed(tensor)]
        if len(chosen) > 1:
            send_together(graph, stage, chosen, places)


def crossing(graph: Graph, places: Mapping[str, str]) -> dict[TransferPath, list[Tensor]]:
    """Return the tensors that go from one member to another, by their ways and stages."""
    crossings, operations = count_crossings(graph, places), graph.get_operations()
    found: dict[TransferPath, list[Tensor]] = {}
    for operation in operations:
        place = places[operation.name]
        for tensor in operation.outputs:
            for target in sorted({places[one.name] for one in tensor.consumers() if SCOPE not in one.name} - {place}):
                found.setdefault(TransferPath(place, target, crossings[operation.name]), []).append(tensor)
    return found


def places_of(graph: Graph, local: Collection[Variable]) -> dict[str, str]:
    """Return the devices of the ps on which operations run; WORKER for those of the worker, by their names."""
    operations, handles = graph.get_operations(), handles_of(graph)
    on_worker = {id(variable.handle) for variable in local}
    places: dict[str, str] = {}
    named = {operation.name: operation for operation in operations}

    def place_of(operation: Operation) -> str:
        if operation.name not in places:
            places[operation.name] = WORKER  # where a colocation leads back to itself
            places[operation.name] = find(operation)
        return places[operation.name]

    def find(operation: Operation) -> str:
        if operation.type in ACROSS and APART not in operation.name:
            return WORKER
        if tf.DeviceSpec.from_string(operation.device).job:
            return of_ps(operation.device)
        # TensorFlow's placement puts what uses a variable beside it.
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.dtype == tf.resource:
                handle = handles.get(id(tensor), tensor)
                return WORKER if id(handle) in on_worker else of_ps(handle.device)
        for group in operation.colocation_groups():
            other = named.get(group.decode().removeprefix("loc:@"))
            if other is not None and other is not operation:
                return place_of(other)
        return WORKER

    for operation in operations:
        place_of(operation)
    return places


def of_ps(device: str) -> str:
    """Return a ps's device in full, or WORKER."""
    return device if tf.DeviceSpec.from_string(device or "").job == "ps" else WORKER


def count_crossings(graph: Graph, places: Mapping[str, str]) -> dict[str, int]:
    """Return how often something has crossed between members at most, before each operation can run."""
    waits = {one.name: {given.name: given for given in sources(one)} for one in graph.get_operations()}
    for before, after in added_orders(graph):
        waits[after.name][before.name] = before
    counts: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(waits).static_order():
        crossed = (counts[one] + (places[one] != places[name]) for one in waits[name])
        counts[name] = max(crossed, default=0)
    return counts


def can_be_packed(tensor: Tensor) -> bool:
    """Return whether a tensor is small, of a type that has bytes, and free to wait for others.

    What is read while a mutex is held is not: two workers could wait for each other's.
    """
    if tensor.dtype not in TYPES or tensor.op.type == "Const" or SCOPE in tensor.op.name:
        return False
    if any(one.type == "MutexLock" for one in tensor.op.control_inputs):
        return False
    return is_small(tensor)


def send_together(graph: Graph, stage: TransferPath, tensors: Sequence[Tensor], places: Mapping[str, str]) -> None:
    """Pack tensors on one member, and give what uses them on the other one what is unpacked there."""

    def is_at(user: Operation) -> bool:
        return places.get(user.name) == stage.target and SCOPE not in user.name

    users = [{one.name: one for one in tensor.consumers() if is_at(one)} for tensor in tensors]
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(SENT):
        with tf.device(stage.source or None):
            packed = pack(tensors)
        with tf.device(stage.target or None):
            arrived = unpack(packed, tensors)
    for tensor, other, mine in zip(tensors, arrived, users, strict=True):
        graph.add_to_collection(SENT, (tensor, other))
        for user in mine.values():
            take_instead(user, tensor, other)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other; their numbers of bytes come first where they are not known."""
    parts = [tf.reshape(one if one.dtype == tf.uint8 else tf.bitcast(one, tf.uint8), [-1]) for one in tensors]
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        return tf.concat(parts, axis=0)
    lengths = tf.stack([tf.size(part) for part in parts])
    return tf.concat([tf.reshape(tf.bitcast(lengths, tf.uint8), [-1]), *parts], axis=0)


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors like these from their bytes."""
    if all(tensor.shape.is_fully_defined() for tensor in tensors):
        lengths: Tensor | list[int] = [math.prod(tensor.shape) * tensor.dtype.size for tensor in tensors]
        parts = tf.split(packed, lengths)
    else:
        begin = len(tensors) * tf.int32.size
        lengths = tf.bitcast(tf.reshape(packed[:begin], [-1, tf.int32.size]), tf.int32)
        parts = tf.split(packed[begin:], lengths, num=len(tensors))
    return [from_bytes(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def from_bytes(part: Tensor, like: Tensor) -> Tensor:
    shape = [-1 if length is None else length for length in like.shape]
    if like.dtype.size > 1:
        part = tf.reshape(part, [-1, like.dtype.size])
    return tf.reshape(part if like.dtype == tf.uint8 else tf.bitcast(part, like.dtype), shape)
