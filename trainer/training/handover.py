"""Hands the variables of one coordinator to the next, which goes on at the same step: no checkpoint is read.

A coordinator's variables on a ps outlive it, in its context there. A record on each ps, a variable of a name of our
own, says how they are found. The next coordinator makes variables of its own and takes the values, each on its ps.
Then it closes the context of the one before. That frees all that was left, and whatever an old coordinator that thaws
still does can only fail (docs/decisions/0085).
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Tensor, Trackable, Variable
from trainer.core.failures import first_line
from trainer.core.variables import bytes_of, flatten
from trainer.run.data_position import Position
from trainer.run.saves.checkpoint_reader import slot_in
from trainer.run.saves.snapshot import Copies, copy_each
from trainer.training.handover_records import OWN, HandoverRecords, device
from trainer.training.placement import server_of
from trainer.training.tables.dynamic.tables import DynamicTables, destroy
from trainer.training.tf_internals.graphs import resource_names

log = logging.getLogger(__name__)
POSITION_SECONDS = 1.0  # the record has the names of all variables of a ps, and takes milliseconds to write
LOCAL_BYTES = 1024 * 1024  # the coordinator's own variables lie in the record, which is rewritten when one changes
# What is offered, to the end of the process: variables that a dying coordinator lets go of are gone for the next one.
KEPT: list[dict[str, Any]] = []
# Their values are in a checkpoint, and in no variable.
NO_VARIABLES = (
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
    tf.train.experimental.PythonState,
)


class NotCarried(Exception):
    """The variables can't go from one coordinator to the next; the message says why."""


class Handover:
    """What one coordinator finds on the ps, and what it leaves there for the next."""

    def __init__(
        self,
        run: str,
        program: str,
        servers: int,
        addresses: Collection[str],
        check: Callable[[], None] = lambda: None,
        *,
        in_part: bool = False,
    ) -> None:
        """Look at what is there, free what can't be used, and say that this coordinator is here.

        Make it after the strategy and before the model. `servers` is the number of ps, `addresses` (host:port) are
        those of all members. `check` raises when this coordinator has lost the run to another one. `in_part` takes
        also what is left where some ps are other processes since (`ps_recovery: lost`).
        """
        check()
        self._check = check
        self._records = HandoverRecords(run, program, servers, addresses)
        self._carried: dict[str, Any] = {}
        self._own: dict[str, Any] = {}  # the coordinator's among them
        self._refreshed_at = -math.inf
        self._offers: list[dict[str, Any]] = []
        records = self._records.read()
        self._tables: list[dict[str, Any]] = distinct(one for record in records for one in record.get("tables", []))
        self._found = [record.get("offer") or {} for record in records]
        listed = {number for record in records for number in record.get("contexts", [])}
        if not (self._records.are_whole(records) or (in_part and self._records.lacking(records))):
            self._forget()
            self._free_tables(self._tables)
            self._tables = []
        position = self._first.get("input")
        self.position = Position.from_record(position) if position else None
        """How far the data were read: as the earlier coordinator has recorded it, and later as this one learns."""
        kept = {offer["context"] for offer in self._found if offer}
        self._records.close(listed - kept)
        for server in range(servers):
            self._write(server, {*kept, self._records.context}, self._found[server])

    @property
    def left(self) -> bool:
        """Whether an earlier coordinator of this run has left its variables on all ps that are not `lacking`."""
        return any(self._found)

    @property
    def lacking(self) -> set[int]:
        """The ps that have nothing of what an earlier coordinator has left on the others."""
        return {server for server, offer in enumerate(self._found) if not offer} if self.left else set()

    @property
    def _first(self) -> dict[str, Any]:
        """What was left on the first ps that has any: it has the coordinator's own values too."""
        return next((offer for offer in self._found if offer), {})

    @property
    def tables_left(self) -> Any:
        """The record of the dynamic tables that the earlier coordinator has left, if any."""
        return self._tables[-1] if self.left and self._tables else None

    def announce(self, tables: DynamicTables) -> None:
        """Note that these dynamic tables are being made, so that they are freed if they are not offered."""
        self._tables = distinct([*self._tables, tables.record])
        for server, offer in enumerate(self._found):
            kept = {one["context"] for one in self._found if one}
            self._write(server, {*kept, self._records.context}, offer)

    def take_over(
        self,
        model: Model,
        step: Variable,
        at_least: int,
        copy: Callable[[Copies], None] = copy_each,
        tables: DynamicTables | None = None,
    ) -> bool:
        """Give the variables the values that the earlier coordinator left; returns whether it has.

        If not, they may have any value. Values of an earlier step than `at_least`, the newest checkpoint's, are not
        taken. Call it when the model and its optimizer have all their variables. Raises tf.errors.OpError when a ps
        is gone. `copy` copies in what is traced, between two updates: calls of the earlier coordinator may still make
        some, with the mutexes of the same names. Variables on ps that are `lacking` stay as they are.
        """
        if not self.left:
            return False
        try:
            if tables is not None and not tables.are_left:
                raise NotCarried("the dynamic tables are others")
            self._take(carry(model, step), at_least, copy)
        except NotCarried as why:
            log.info("the variables on the ps are not those to go on with: %s", why)
            return False
        except tf.errors.FailedPreconditionError as error:  # a variable has gone meanwhile
            log.warning("the variables on the ps can't be used: %s", first_line(error))
            return False
        return True

    def offer(
        self, model: Model, step: Variable, position: Position | None = None, tables: DynamicTables | None = None
    ) -> None:
        """Leave these variables, and dynamic tables, to the next coordinator; free what the one before has left.

        Call it when they have the values to go on with; `position` is how far the data are read that they have seen.
        """
        self._check()
        self.position = position
        gone = [one for one in self._tables if tables is None or one["id"] != tables.id]
        self._tables = [] if tables is None else [tables.record]
        try:
            self._carried = carry(model, step)
        except NotCarried as why:
            log.info("a coordinator after this one will go back to a checkpoint: %s", why)
        self._own = on(None, self._carried)
        KEPT[:] = [self._carried]
        names: dict[str, tuple[str, str]] = {}
        for server in range(len(self._found)):
            here = on(server, self._carried)
            with tf.device(device(server)):
                names.update(zip(here, resource_names([variable.handle for variable in here.values()]), strict=True))
        self._publish(names)
        self._records.close({offer["context"] for offer in self._found if offer} - {self._records.context})
        self._free_tables(gone)
        if tables is not None:
            tables.keep()
        self._forget()

    def refresh(self, position: Position | None = None) -> None:
        """Leave the values of the coordinator's own variables too, as the learning rate, where they have changed.

        `position` is how far the data are read, which is left with them, once a second at most.
        """
        self.position = position
        if not self._offers:
            return
        offer, now = self._offers[0], time.monotonic()
        values, place = local_values(self._own), position.as_record() if position else None
        has_moved = place != offer["input"] and now - self._refreshed_at >= POSITION_SECONDS
        if values != offer["local"] or has_moved:
            self._refreshed_at = now
            offer.update(local=values, input=place)
            self._write(offer["place"][0], {self._records.context}, offer)

    def release(self) -> None:
        """Let go of the variables, so that the servers can free them."""
        KEPT.clear()
        self._carried = self._own = {}

    def set_aside(self, copy: Callable[[Copies], None], lost: Collection[int] = (), step: int = 0) -> None:
        """Leave copies of the variables that outlive this process's context, for its next strategy.

        `copy` copies variables between two updates, in what is traced (StepRunner.copy). Nothing is left on the ps
        that are `lost`. `step` was read last: the counter may lie there. Raises tf.errors.OpError when another one is
        gone.
        """
        if not self._carried:
            return
        self._check()
        batch = uuid.uuid4().hex
        names = {key: (OWN, f"{batch}/{number}") for number, key in enumerate(self._carried)}
        try:
            self._copy_aside(copy, names, lost)
            self._publish(names, lost, step)
        except tf.errors.OpError:
            for server in set(range(len(self._found))).difference(lost):
                with contextlib.suppress(tf.errors.OpError):
                    destroy_variables(server, [names[key] for key in on(server, self._carried)])
            raise

    def _copy_aside(
        self, copy: Callable[[Copies], None], names: Mapping[str, tuple[str, str]], lost: Collection[int]
    ) -> None:
        copies = []
        for key, variable in self._carried.items():
            if (server := server_of(variable)) is not None and server not in lost:
                with tf.device(device(server)):
                    target = found(variable, names[key])
                    if key == "step":  # first, as when they are taken
                        assign(target, variable.handle, variable.dtype)
                    else:
                        copies.append((variable, variable.handle, target))
        tf.function(lambda: copy(copies), autograph=False)()

    def _take(self, carried: dict[str, Any], at_least: int, copy: Callable[[Copies], None]) -> None:
        sources = {}
        for server, offer in enumerate(self._found):
            if server in self.lacking:
                continue
            here = on(server, carried)
            compare(f"on ps-{server}", {key: look for key, (look, _) in offer["variables"].items()}, looks(here))
            with tf.device(device(server)):
                handles = {key: found(variable, offer["variables"][key][1]) for key, variable in here.items()}
                there = [tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles.values()]
                if there and not tf.reduce_all(tf.stack(there)):
                    raise NotCarried(f"ps-{server} has freed them")
            sources.update(handles)
        own = on(None, carried)
        values = self._first["local"]
        compare("on the coordinator", {key: look for key, (look, _) in values.items()}, looks(own))
        # The step first: a call of the earlier coordinator that ends meanwhile may then be done and not counted, as
        # after a worker's death, but never counted and not done.
        counter = carried["step"]
        if "step" in sources:
            with tf.device(counter.device):
                assign(counter.handle, sources["step"], counter.dtype)
        else:
            counter.assign(max(at_least, self._first.get("step", 0)))
        if (step := int(counter.numpy())) < at_least:
            raise NotCarried(f"they are of step {step}, and the newest checkpoint of step {at_least}")
        others = [(carried[key], sources[key], carried[key].handle) for key in sources if key != "step"]
        tf.function(lambda: copy(others), autograph=False)()
        for key, variable in own.items():
            variable.assign(tf.io.parse_tensor(base64.b64decode(values[key][1]), variable.dtype))

    def _publish(self, names: Mapping[str, tuple[str, str]], lost: Collection[int] = (), step: int = 0) -> None:
        batch = uuid.uuid4().hex
        self._offers = []
        servers = [server for server in range(len(self._found)) if server not in lost]
        if self._carried:
            for server in servers:
                here = on(server, self._carried)
                variables = {key: (look, names[key]) for key, look in looks(here).items()}
                base = {"context": self._records.context, "batch": batch, "place": [server, len(self._found)]}
                self._offers.append({**base, "variables": variables, "local": {}})
            record = self.position.as_record() if self.position else None
            self._offers[0].update(local=local_values(self._own), input=record, step=step)
        for number, server in enumerate(servers):
            # The earlier one's context is still named: the next coordinator closes it if this process dies first.
            contexts = {self._records.context, *(offer["context"] for offer in self._found if offer)}
            self._write(server, contexts, self._offers[number] if self._offers else {})

    def _forget(self) -> None:
        """Destroy what was set aside; the rest goes with its context."""
        for server, offer in enumerate(self._found):
            destroy_variables(server, [found for _, found in offer.get("variables", {}).values() if found[0] == OWN])
        self._found = [{} for _ in self._found]

    def _free_tables(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            destroy(record, [device(server) for server in range(len(self._found))])

    def _write(self, server: int, contexts: Iterable[int], offer: Mapping[str, Any]) -> None:
        self._records.write(server, contexts, offer, self._tables)


def destroy_variables(server: int, names: Iterable[tuple[str, str]]) -> None:
    """Free variables of a ps, by container and name; those that are not there are passed over."""
    with tf.device(device(server)):
        for container, name in names:
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int8, shape=[], container=container, shared_name=name)
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


def distinct(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records of dynamic tables, each once."""
    return list({one["id"]: one for one in records}.values())


def carry(model: Model, step: Variable) -> dict[str, Any]:
    """Return all that a checkpoint of model and step holds, by a name that depends on no counter.

    The step is first, a sharded variable is its shards. Raises NotCarried when something is in no variable of a ps or
    of the coordinator.
    """
    carried = {"step": step}
    known = {id(step)}
    for path, value in walk(model):
        if isinstance(value, NO_VARIABLES):
            raise NotCarried(f"{path} is a {type(value).__name__}, which only a checkpoint holds")
        shards = list(flatten([value])) if hasattr(value, "shape") else []
        for number, variable in enumerate(shards):
            if isinstance(variable, tf.Variable) and id(variable) not in known:
                known.add(id(variable))
                carried[f"{path}/{number}"] = variable
    slots = getattr(getattr(model, "optimizer", None), "variables", ())
    # A checkpoint finds the slots of the optimizers called legacy in another way.
    more = [variable for variable in flatten(slots() if callable(slots) else slots) if id(variable) not in known]
    carried.update({f"slots/{number}": variable for number, variable in enumerate(more)})
    for key, variable in carried.items():
        if server_of(variable) is None and "/job:worker/" in variable.device:
            raise NotCarried(f"{key} lies on a worker")
    own = on(None, carried).values()
    if not all(variable.shape.is_fully_defined() for variable in own) or sum(map(bytes_of, own)) > LOCAL_BYTES:
        raise NotCarried(f"the coordinator has more than {LOCAL_BYTES} bytes of variables itself")
    return carried


def walk(root: Trackable) -> Iterator[tuple[str, Trackable]]:
    """Yield all that a checkpoint finds below an object, each once, with the way to it."""
    todo, seen = [("", root)], {id(root)}
    while todo:
        path, value = todo.pop(0)
        yield path, value
        for name, child in tf.train.TrackableView.children(value).items():
            if id(child) not in seen:
                seen.add(id(child))
                todo.append((f"{path}/{name}", child))


def on(server: int | None, variables: Mapping[str, Variable]) -> dict[str, Any]:
    """Return the variables that lie on a ps, or None for those of the coordinator itself."""
    return {key: variable for key, variable in variables.items() if server_of(variable) == server}


def looks(variables: Mapping[str, Variable]) -> dict[str, str]:
    return {
        key: f"{variable.dtype.name} {variable.shape} {slot_in(key, variable.name)}".rstrip()
        for key, variable in variables.items()
    }


def local_values(own: Mapping[str, Variable]) -> dict[str, list[Any]]:
    """Return how the coordinator's own variables look and what they hold, as JSON can say it."""
    return {
        key: [look, base64.b64encode(tf.io.serialize_tensor(own[key]).numpy()).decode()]
        for key, look in looks(own).items()
    }


def compare(where: str, left: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise NotCarried, and say what differs, unless the variables that were left are the model's."""
    if left == here:
        return
    for key in sorted(left.keys() | here.keys()):
        if left.get(key) != here.get(key):
            raise NotCarried(f"{where}, {key} was {left.get(key, 'not there')} and is {here.get(key, 'not there')}")


def assign(target: Any, source: Any, dtype: Any) -> None:
    """Assign one handle's value to another's, both on the present device: they share the memory until one changes."""
    tf.raw_ops.AssignVariableOp(resource=target, value=tf.raw_ops.ReadVariableOp(resource=source, dtype=dtype))


def found(variable: Variable, place: Any) -> Tensor:
    """Return the handle of what looks like the variable and has this container and name, on the present device."""
    container, name = place
    return tf.raw_ops.VarHandleOp(dtype=variable.dtype, shape=variable.shape, container=container, shared_name=name)
