"""Updates of variables that several workers train: each is one act, or a part of one, on the variable's ps.

An optimizer reads and writes a variable and its slots one after the other. Another worker's update in between would see
one slot new and the other old. So the operations of an update run while they hold a mutex of the variable, on its ps.
They take it when all that they need from elsewhere has arrived there. So no update waits for a worker with the mutex
held, and none stops half-way because a worker dies (docs/decisions/0198).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Strategy, Tensor, Variable
from trainer.run.saves.snapshot import Copies, Take, take_value
from trainer.training.measures.metrics import READING
from trainer.training.tf_internals.graphs import APART, arrival, handle_shape, mutex, outermost, read_only_inputs
from trainer.training.updates.first_trace import is_dropped
from trainer.training.updates.joined import joined
from trainer.training.updates.orders import sources, waits_for
from trainer.training.updates.terms import is_light, path_from_reads, terms_of

log = logging.getLogger(__name__)
WAITED = "psfleet/seconds_waited_for_updates"  # a variable on each ps
# Each is one act by itself: TensorFlow's kernel holds the variable's lock from its read to its write.
WHOLE_BY_THEMSELVES = ("AssignAddVariableOp", "AssignSubVariableOp")
GATE = "/gate"  # what the name of a gate's mutex ends with
MUTEX_OPERATIONS = ("MutexV2", "MutexLock")
# How the names of operations begin that write the variable which is their first input.
WRITING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")


@dataclasses.dataclass
class Update:
    """Operations of one update that belong together: they use the same variables, or lie between two that do."""

    handles: dict[str, Tensor]
    """The variables that it writes, by the names of their handles in the graph."""
    operations: list[Operation]

    @property
    def names(self) -> set[str]:
        return {operation.name for operation in self.operations}

    @property
    def device(self) -> str:
        return str(outermost(next(iter(self.handles.values()))).device)

    @property
    def is_whole(self) -> bool:
        """Whether TensorFlow's kernel makes one act of it, without a mutex."""
        return len(self.operations) == 1 and self.operations[0].type in WHOLE_BY_THEMSELVES

    @property
    def needs(self) -> list[Tensor]:
        """The tensors that come from outside of it, but for constants of its own device."""
        own, device = self.names, self.device
        inputs = {one.name: one for operation in self.operations for one in operation.inputs}
        return [
            one
            for one in inputs.values()
            if one.dtype != tf.resource
            and one.op.name not in own
            and not (one.op.type == "Const" and one.device == device)
        ]

    @property
    def earlier(self) -> list[Operation]:
        """The operations before it that it waits for, and those that have used its variables in the same step."""
        first = self.operations[0]._id
        used = [one for handle in self.handles.values() for one in handle.consumers()]
        used += [one for operation in self.operations for one in operation.control_inputs]
        return list({one.name: one for one in used if one._id < first}.values())


@dataclasses.dataclass(frozen=True)
class Updated:
    """A variable that is updated: a name that it shares with its slots alone, and the mutex of its acts."""

    handle: Tensor  # so that no other has the same id
    act: str
    mutex: str


Record = Callable[[Update, Sequence[Tensor]], Sequence[Operation]]


class AtomicUpdates:
    """Has what a strategy's steps write be updated in one act each, in what is traced while it is `active`."""

    def __init__(self, strategy: Strategy, record: Record | None = None) -> None:
        """Take a ParameterServerStrategy.

        `record` is for tests. It is called with an update and what it needs, and returns operations that run while
        the mutex is held.
        """
        self._extended = strategy.extended
        self._has_replicas = strategy.num_replicas_in_sync > 1
        self._record = record
        self._is_in_act = False
        self._updated: dict[int, Updated] = {}  # by the ids of the variables' handles
        self._devices: list[str] = []
        self._found: list[Update] = []
        self.seconds_waited = 0.0
        """How long updates have waited for others' updates of the same variable, on all ps together."""
        self.traced: Callable[[Sequence[Operation]], object] = lambda made: None
        """Takes the operations of a step when each has its mutex."""

    @contextlib.contextmanager
    def active(self, left_alone: Callable[[], Collection[Variable]] = tuple) -> Iterator[None]:
        """Have the updates that are traced meanwhile be one act each.

        `left_alone` returns variables that are no business of other workers; it is called at the end.
        """
        plain = self._extended._update

        def update(variable: Variable, function: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
            # With several replicas each assignment comes here, a metric's as well.
            alone = self._has_replicas and any(one.handle is variable.handle for one in left_alone())
            with contextlib.nullcontext() if alone else self._one_act():
                return plain(variable, function, args, kwargs, group)

        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._extended._update = update
        try:
            yield
        finally:
            del self._extended._update
            found, self._found = self._found, []
        if is_dropped():
            return
        for group in joined([one for one in found if not self._is_whole(one)]):
            self._lock(*group)
        for one in filter(self._is_whole, found):
            # Beside others that take several operations, of this variable, it has its turn as they have.
            if self._has_mutex(one):
                self._lock(one)
        self._lock_others(graph.get_operations()[before:], {id(one.handle) for one in left_alone()})
        self.traced(graph.get_operations()[before:])

    @contextlib.contextmanager
    def _one_act(self) -> Iterator[None]:
        """Have what is traced meanwhile be one act; what lies within another is of that one."""
        if self._is_in_act:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._is_in_act = True
        try:
            yield
        finally:
            self._is_in_act = False
        self._found += updates(graph.get_operations()[before:])

    def _lock_others(self, made: Sequence[Operation], left_alone: Collection[int]) -> None:
        """Lock what else a step writes: what it computes of its value, and variables that have a mutex already."""
        locked = {one.name for one in made if any(each.type == "MutexLock" for each in one.control_inputs)}
        writes: dict[int, list[Operation]] = {}
        for operation in made:
            if operation.name not in locked and APART not in operation.name and operation.type.startswith(WRITING):
                writes.setdefault(id(outermost(operation.inputs[0])), []).append(operation)
        for number, operations in writes.items():
            if number in left_alone:
                continue
            handle, change = operations[0].inputs[0], change_by(operations)
            if change is not None:
                for operation in change.operations:
                    operation._set_device(change.device)
                self._lock(change)
            elif number in self._updated:
                for operation in operations:
                    self._lock(Update({handle.name: handle}, [operation]))

    def _lock(self, *joint: Update) -> None:
        """Add the operations that take and give back the mutexes of updates, which are one act."""
        update = in_one(joint)
        graph, needs = update.operations[0].graph, update.needs
        earlier = {one.name: one for each in joint for one in each.earlier}
        with graph.as_default(), tf.control_dependencies(None), tf.device(update.device), tf.name_scope(APART):
            with tf.control_dependencies([one for name, one in earlier.items() if name not in update.names]):
                arrived: Tensor = arrival(needs)
            locks = locks_of(self._mutexes_of(joint), arrived)
            self._add_wait(update.device, arrived, locks[-1])
            for operation in update.operations:
                operation._add_control_input(locks[-1].op)
            written = list(update.operations)
            if self._record:
                with tf.control_dependencies(written):
                    written += self._record(update, needs)
            give_back(locks, written)

    def _add_wait(self, device: str, arrived: Tensor, lock: Tensor) -> None:
        """Add up the time from all that an update needs to its mutex, on the ps."""
        if device not in self._devices:
            self._devices.append(device)
            with tf.init_scope():
                tf.raw_ops.AssignVariableOp(resource=seconds_waited(), value=tf.constant(0.0, tf.float64))
        with tf.control_dependencies([arrived]):
            since = tf.timestamp()
        with tf.control_dependencies([lock]):
            tf.raw_ops.AssignAddVariableOp(resource=seconds_waited(), value=tf.timestamp() - since)

    def waited(self) -> list[Tensor]:
        """Return, in what is traced, how many seconds updates have waited for mutexes on each ps until now."""
        found = []
        for device in self._devices:
            with tf.device(device), tf.name_scope(APART):
                found.append(tf.raw_ops.ReadVariableOp(resource=seconds_waited(), dtype=tf.float64))
        return found

    def copy(self, copies: Copies, take: Take = take_value) -> None:
        """Copy variables, in what is traced: each with its slots while no update of them is under way."""
        groups: dict[tuple[str, str], list[tuple[Variable, Tensor, Tensor]]] = {}
        for one in copies:
            groups.setdefault((one[0].device, self.mutex_of(one[0].handle)), []).append(one)
        for (device, name), group in groups.items():
            with tf.device(device), tf.name_scope(APART):
                locks = locks_of([name] if name else [])
                with tf.control_dependencies(locks):
                    copied = [take(*one) for one in group]
                give_back(locks, copied)

    def mutex_of(self, handle: Tensor) -> str:
        """Return the name of the mutex with which the variable of this handle is updated; nothing if it never is."""
        return self._updated[id(handle)].mutex if id(handle) in self._updated else ""

    def act_name_of(self, handle: Tensor) -> str:
        """Return a name that the variable of this handle has in common with its slots; nothing if it is not updated."""
        return self._updated[id(handle)].act if id(handle) in self._updated else ""

    def _is_whole(self, update: Update) -> bool:
        return update.is_whole and not self._record

    def _has_mutex(self, update: Update) -> bool:
        return any(id(outermost(handle)) in self._updated for handle in update.handles.values())

    def _mutexes_of(self, joint: Sequence[Update]) -> list[str]:
        """Return the names of the mutexes of one act, in the order in which every act takes them.

        A variable has the mutex of the act that was the first to write it: it has the same as its slots.
        """
        handles = [[outermost(handle) for handle in one.handles.values()] for one in joint]
        known = {name for each in handles for one in each if (name := self.mutex_of(one))}
        mutex = min(known, default=f"update/{len(self._updated):06}")
        for each in handles:
            act = min(filter(None, map(self.act_name_of, each)), default=f"update/{len(self._updated):06}")
            for one in each:
                self._updated.setdefault(id(one), Updated(one, act, mutex))
        return sorted({self.mutex_of(one) for each in handles for one in each})


def in_one(joint: Sequence[Update]) -> Update:
    """Return the operations of updates as those of one."""
    operations = sorted((each for one in joint for each in one.operations), key=lambda one: int(one._id))
    return Update({name: handle for one in joint for name, handle in one.handles.items()}, operations)


def locks_of(names: Sequence[str], after: Tensor | None = None) -> list[Tensor]:
    """Return the locks of these mutexes, each with the one of its gate before it; the first is taken `after` that.

    TensorFlow's mutex lets another in when one that waits for it is cancelled, as when its worker dies. So all wait
    before a gate, and only those that have passed it for the mutex itself.
    """
    locks: list[Tensor] = []
    for each in [each for name in names for each in (name + GATE, name)]:
        with tf.control_dependencies([one for one in (after, *locks[-1:]) if one is not None]):
            locks.append(tf.raw_ops.MutexLock(mutex=mutex(each)))
    return locks


def give_back(locks: Sequence[Tensor], after: Sequence[Operation]) -> None:
    """Give locks back, the last one first."""
    with tf.control_dependencies(after):
        for lock in reversed(locks):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def seconds_waited() -> Tensor:
    """Return the handle of a ps's variable, another one each time: what uses one is ordered by tf.function."""
    return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name=WAITED)


def updates(made: Sequence[Operation]) -> list[Update]:
    """Return the updates among new operations of one graph.

    A scalar that is written beside a variable is of all variables, as `Nadam` keeps one. It is an update of its own,
    unless something that happens to it lies between what happens to the variable.
    """
    written = written_handles(made)
    scalars = [name for name, handle in written.items() if handle_shape(handle).rank == 0]
    rest = [name for name in written if name not in scalars]
    groups = [*([name] for name in scalars), rest] if rest else [scalars]
    found: list[Update] = []
    for group in filter(None, groups):
        one = update_of(group, written, made)
        for other in [other for other in found if other.names & one.names]:
            found.remove(other)
            one = update_of([*one.handles, *other.handles], written, made)
        found.append(one)
    return found


def written_handles(made: Sequence[Operation]) -> dict[str, Tensor]:
    """Return the variables that operations write, by the names of their handles."""
    found: dict[str, Tensor] = {}
    for operation in made:
        if operation.type not in (*READING, *MUTEX_OPERATIONS):
            only_read = read_only_inputs(operation)
            found |= {
                one.name: one
                for number, one in enumerate(operation.inputs)
                if one.dtype == tf.resource and number not in only_read
            }
    return found


def update_of(group: Sequence[str], written: dict[str, Tensor], made: Sequence[Operation]) -> Update:
    """Return the operations that use these variables, and those that lie between two such."""
    after = {one.name for one in made if any(given.name in group for given in one.inputs)}
    before = set(after)
    for operation in made:
        if any(one.name in after for one in sources(operation)):
            after.add(operation.name)
    for operation in reversed(made):
        if operation.name in before:
            before |= {one.name for one in sources(operation)}
    chosen = after & before
    return Update({name: written[name] for name in group}, [one for one in made if one.name in chosen])


def change_by(writes: Sequence[Operation]) -> Update | None:
    """Return the update by which a step writes what it computes of a variable's value, where a ps can do it.

    Returns None where it doesn't write such a thing, or more than a ps should compute.
    """
    handle = writes[0].inputs[0]
    path = path_from_reads(handle, writes)
    if not all(map(is_light, path)):
        path = terms_of(writes[0].inputs[1], path) if len(writes) == 1 else []
    chosen = sorted([*path, *writes], key=lambda one: int(one._id))
    names = {one.name for one in chosen}
    between = [one for one in handle.consumers() if chosen[0]._id < one._id < chosen[-1]._id and one.name not in names]
    if not path or any(one.type != "ReadVariableOp" for one in between):
        return None
    change = Update({handle.name: handle}, chosen)
    # What else uses a value that was read may be what the update needs, which would wait for itself. So may what is
    # read after a write of its own.
    read = path if len(writes) == 1 else [*path, *between]
    used = [one for each in read for given in each.outputs for one in given.consumers()]
    others = [one for one in used if one.name not in names]
    return None if others and waits_for([one.op for one in change.needs], others) else change


def in_turn(made: Sequence[Operation], given_back: Mapping[str, list[Operation]]) -> dict[str, list[Operation]]:
    """Have a step's copy take each mutex when the copy before has given it back; returns what gives this one's back.

    With the mutex a later copy would wait for the earlier one's writes, which wait for the mutex.
    """
    found: dict[str, list[Operation]] = {}
    for operation in made:
        if operation.type == "MutexLock":
            operation._add_control_inputs(given_back.get(mutex_name(operation), []))
        elif operation.type == "ConsumeMutexLock":
            found.setdefault(mutex_name(operation.inputs[0].op), []).append(operation)
    return {**given_back, **found}


def mutex_name(lock: Operation) -> str:
    """Return the name of the mutex that an operation takes."""
    return str(lock.inputs[0].op.get_attr("shared_name").decode())
