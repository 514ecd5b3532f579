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
from typing import Any

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
    for stage, tensors in gathered(crossing(graph, places)).items():
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


def gathered(found: Mapping[TransferPath, list[Tensor]]) -> dict[TransferPath, list[Tensor]]:
    """Return what goes to the worker with what a ps sends one stage later: its weights wait for the rows of a step.

    No message waits for itself: what a ps sends at a stage can't wait for what the worker has got at the one before.
    """
    stages: dict[TransferPath, list[Tensor]] = {}
    joined: set[TransferPath] = set()
    for path in sorted(found):
        before = dataclasses.replace(path, crossings=path.crossings - 1)
        if path.target == WORKER and before in stages and before not in joined:
            joined.add(path)
            stages[path] = stages.pop(before) + found[path]
        else:
            stages[path] = found[path]
    return stages


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


@dataclasses.dataclass(frozen=True)
class Alike:
    """Tensors of one type whose rows have one shape, which lie one after the other; a row may be a number."""

    dtype: tf.DType
    row: tuple[int, ...]
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def lengths(self) -> list[int] | None:
        """How many rows each has; None where only the step knows it."""
        known = all(one.shape.is_fully_defined() for one in self.tensors)
        return [math.prod(one.shape) // math.prod(self.row) for one in self.tensors] if known else None

    @property
    def rows(self) -> list[Tensor]:
        return [one if one.shape.rank == 1 + len(self.row) else tf.reshape(one, [-1]) for one in self.tensors]


def alike(tensors: Sequence[Tensor]) -> list[Alike]:
    """Return tensors in groups; those of a known shape, or of none that has a list of rows, are lists of numbers."""
    found: dict[tuple[Any, ...], Alike] = {}
    for one in tensors:
        has_rows = one.shape.rank and one.shape[0] is None and one.shape[1:].is_fully_defined()
        row = tuple(one.shape[1:]) if has_rows else ()
        found.setdefault((one.dtype, row), Alike(one.dtype, row)).tensors.append(one)
    return list(found.values())


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors; before them, how many rows each has where only the step knows that."""
    groups = alike(tensors)
    rows = [(group, group.rows) for group in groups]
    counts = [tf.stack(tf.shape_n(each))[:, 0] for group, each in rows if group.lengths is None]
    parts = [as_bytes(tf.concat(each, axis=0)) for _, each in rows]
    return tf.concat([*([as_bytes(tf.concat(counts, axis=0))] if counts else []), *parts], axis=0)


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors like these from their bytes."""
    groups = alike(tensors)
    unknown = [len(group.tensors) for group in groups if group.lengths is None]
    begin = sum(unknown) * tf.int32.size
    counts = iter(tf.split(from_bytes(packed[:begin], tf.int32), unknown)) if unknown else iter(())
    lengths: list[Any] = [group.lengths or next(counts) for group in groups]
    row_bytes = [group.dtype.size * math.prod(group.row) for group in groups]
    sizes = [size * tf.reduce_sum(each) for size, each in zip(row_bytes, lengths, strict=True)]
    parts = tf.split(packed[begin:], sizes, num=len(groups))
    found: dict[int, Tensor] = {}
    for group, part, each in zip(groups, parts, lengths, strict=True):
        rows = tf.split(from_bytes(part, group.dtype, group.row), each, num=len(group.tensors))
        for one, own in zip(group.tensors, rows, strict=True):
            shape = [-1 if length is None else length for length in one.shape]
            found[id(one)] = own if len(shape) == own.shape.rank else tf.reshape(own, shape)
    return [found[id(one)] for one in tensors]


def as_bytes(tensor: Tensor) -> Tensor:
    return tf.reshape(tensor if tensor.dtype == tf.uint8 else tf.bitcast(tensor, tf.uint8), [-1])


def from_bytes(part: Tensor, dtype: tf.DType, row: Sequence[int] = ()) -> Tensor:
    """Return rows of this shape from their bytes."""
    part = tf.reshape(part, [-1, *row, dtype.size] if dtype.size > 1 else [-1, *row])
    return part if dtype == tf.uint8 else tf.bitcast(part, dtype)
