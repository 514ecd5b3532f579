"""The dynamic tables of a run: the layers that have them, their optimizer, and their resources on the ps."""

from __future__ import annotations

import contextlib
import logging
import math
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Layer, Optimizer, Strategy
from trainer.core.failures import UserError, first_line
from trainer.core.settings.config import Config
from trainer.core.settings.dynamic_tables import TableSettings, tables_of
from trainer.training.tables.dynamic.arrays import CONTAINER, Index, parts_of
from trainer.training.tables.dynamic.eviction import Eviction
from trainer.training.tables.dynamic.layers import attach, check_layer, first_values_of, take_over_layers
from trainer.training.tables.dynamic.optimizers import (
    Slots,
    clips,
    leave_out,
    row_slots,
    table_error,
    takes_one_by_one,
    train_rows,
)
from trainer.training.tables.dynamic.pieces import Pieces
from trainer.training.tables.dynamic.shard import EVICTED, GIVEN_ROWS, REFUSED, ROWS, Shard
from trainer.training.tables.dynamic.table import Change, Table
from trainer.training.tf_internals.graphs import APART
from trainer.training.tf_internals.variables import Reserved
from trainer.training.tf_internals.workers import ps_of

log = logging.getLogger(__name__)
# What the names of a shard's resources end with, but for the index, which is no variable.
PARTS = ("values", "slot0", "slot1", "slot2", "keys", "told", "free", "numbers", "clock", "sketch")
DEVIATIONS = 6  # of the number of keys that fall to one ps, above the mean
MAX_PS = 100  # whose rows, when all of these are full, any other number of ps has room for
LEFT: list[tuple[Mapping[str, Any], Sequence[str]]] = []
"""Records and devices of tables that this process let go of. Python may collect those while a graph is made, to which
the operations that free them would belong: the next tables free them."""


class TablesLeft(Protocol):
    """Knows what an earlier coordinator has left on the ps, and tells the next one."""

    @property
    def tables_left(self) -> Any: ...

    @property
    def lacking(self) -> Collection[int]: ...

    def announce(self, tables: DynamicTables) -> None: ...


class DynamicTables:
    """Makes the tables when their layers are built, and has them trained, saved, restored and handed over."""

    def __init__(
        self,
        settings: Mapping[str, TableSettings],
        devices: Sequence[str],
        *,
        lazy: bool,
        left: Any = None,
        lacking: Collection[int] = (),
    ) -> None:
        """`devices` are those of the ps, and `left` is the record of what an earlier coordinator left there.

        Nothing of that is on the ps that are `lacking`.
        """
        while LEFT:
            destroy(*LEFT.pop())
        self._settings, self._devices, self._lazy = settings, list(devices), lazy
        self._look = {
            name: [each.capacity, len(devices), parts_of(share_of(each.capacity, len(devices)))]
            for name, each in settings.items()
        }
        self._left = left if left is not None and left.get("look") == self._look else None
        self._lacking = sorted(lacking)
        self.id: str = self._left["id"] if self._left else uuid.uuid4().hex
        """By which the resources on the ps are found."""
        self.tables: dict[str, Table] = {}
        self._layers: dict[str, Any] = {}
        self._optimizers: list[Any] = []
        self._asks_once = True
        # By the tables' names: what trains each, and the slots of that.
        self._trainers: dict[str, tuple[Any, Slots]] = {}
        self._has_found_more = False
        self._pieces: dict[str, Pieces] = {}
        self._evictions: dict[str, Eviction] = {}
        self.mutex_of: Callable[[Any], str] = lambda handle: ""
        """Names the mutex with which the variable of a handle is updated."""
        self.counts: dict[str, dict[str, int]] = {}
        """The numbers of each table, as the last call has told them: rows, new, evicted and refused ones, and bytes."""
        self._end = weakref.finalize(self, LEFT.append, (self.record, self._devices))
        self._end.atexit = False  # a process that ends leaves them to the next one

    @classmethod
    def from_config(
        cls, config: Config, strategy: Strategy, handover: TablesLeft | None = None
    ) -> DynamicTables | None:
        """Return those of the settings, on the strategy's ps; None without any. `handover` hears of them."""
        if not config.dynamic_tables:
            return None
        devices = [f"/job:ps/replica:0/task:{server}/device:CPU:0" for server in range(ps_of(strategy))]
        left, lacking = (handover.tables_left, handover.lacking) if handover is not None else (None, ())
        settings = tables_of(config.dynamic_tables)
        tables = cls(settings, devices, lazy=config.lazy_optimizers, left=left, lacking=lacking)
        if handover is not None:
            handover.announce(tables)
            tables.keep()
        return tables

    @property
    def record(self) -> dict[str, Any]:
        """What the next coordinator must know to find them, as JSON can say it."""
        return {"id": self.id, "look": self._look, "rows": {name: self._row(one) for name, one in self.tables.items()}}

    def _row(self, table: Table) -> list[Any]:
        """Return how a row of a table looks: its width, its slots, and how it is given."""
        _, slots = self._trainers.get(table.name, (None, {}))
        return [table.width, list(map(list, slots.items())), self._settings[table.name].sightings]

    @property
    def names(self) -> Collection[str]:
        """Those that the settings name, also of layers that are not built."""
        return self._settings.keys()

    @property
    def are_left(self) -> bool:
        """Whether all of them are those that an earlier coordinator has left, but for what is `lacking`."""
        return self._left is not None

    @contextlib.contextmanager
    def of_layers(self) -> Iterator[None]:
        """Have the layers that are built meanwhile get their tables."""
        try:
            with take_over_layers(lambda layer: self.build(layer) if layer.name in self._settings else None):
                yield
        except tf.errors.NotFoundError as error:
            if CONTAINER not in str(error):
                raise
            raise UserError(
                "dynamic_tables: a tf.function calls the model in build_model, where no table is on the ps yet: call "
                "the model itself there, which reads zeros, and the tf.function in a step"
            ) from error

    def build(self, layer: Layer) -> Table:
        """Make the table of a layer that is built now."""
        name, count = layer.name, len(self._devices)
        if self._layers.get(name) is layer:
            return self.tables[name]
        if name in self._layers:
            raise UserError(
                f"dynamic_tables: {name}: two layers of the model have this name, expected one: give one of them "
                "another name"
            )
        check_layer(layer)
        wanted = self._settings[name].capacity
        most = MAX_PS * share_of(wanted, MAX_PS)
        shards = []
        with tf.init_scope():
            for number, device in enumerate(self._devices):
                with tf.device(device):
                    shards.append(
                        Shard(
                            f"{self.id}/{name}/{number}",
                            f"table/{name}/{number}",
                            int(layer.output_dim),
                            share_of(wanted, count),
                            first_values_of(layer),
                            self._settings[name].sightings,
                            share_of(most, count),
                        )
                    )
            table = Table(name, int(layer.output_dim), shards, self._devices)
            table.is_reserved = False
            attach(layer, table)  # Keras 3 refuses it where it only looks at shapes, and builds again
            self.tables[name], self._layers[name] = table, layer
            if self._optimizers:
                self._begin(table)
        return table

    def bind(self, optimizers: Iterable[Optimizer], *, own_step: bool) -> None:
        """Have the model's optimizers train the rows; call it when the model is made, before they are built.

        `own_step` says that a program's own step may look at gradients. Raises UserError where one optimizer can't
        train rows. Which one of several trains a table is known when the first step is traced.
        """
        self._optimizers = list(optimizers)
        looks = any(clips(one) or takes_one_by_one(one) for one in self._optimizers)
        self._asks_once = not own_step and not looks
        for optimizer in self._optimizers:
            leave_out(optimizer)
        for table in self.tables.values():
            self._begin(table)

    def train(self) -> None:
        """Have the optimizers train rows; call it when their update of other variables is final, before the trace."""
        for optimizer in self._optimizers:
            train_rows(optimizer, self)

    def found_more(self) -> bool:
        """Return whether the trace since the last call has shown what trains a table, so that it must be repeated."""
        found, self._has_found_more = self._has_found_more, False
        return found

    def check(self, known: Iterable[str]) -> None:
        """Raise UserError unless each table has its layer, now that all layers are built; `known` are their names."""
        for name in self._settings:
            if name not in self.tables:
                raise UserError(
                    f"dynamic_tables: the model has no Embedding layer named {name!r}; its layers are "
                    f"{', '.join(sorted(known)) or 'none'}: name a layer of the program, or give one that name"
                )
            if name not in self._trainers:
                raise table_error(f"{name} is trained by no optimizer of the model", "train it")

    def update(self, optimizer: Optimizer, variable: Reserved, gradient: Any, change: Change) -> None:
        """Have a gradient change rows of a table, as an optimizer does; raises UserError where it can't."""
        table = variable.table
        trainer, _ = self._trainers.get(table.name, (None, None))
        if trainer is None:
            with tf.init_scope():
                self._prepare(table, optimizer)
            self._has_found_more = True
        elif trainer is not optimizer:
            kinds = " and ".join(type(one).__name__ for one in (trainer, optimizer))
            raise table_error(f"{table.name} is trained by two optimizers ({kinds})", "give it to one of them")
        table.update(variable, gradient, change)

    def _begin(self, table: Table) -> None:
        table.asks_once = self._asks_once
        if len(self._optimizers) == 1:
            self._prepare(table, self._optimizers[0])

    def _prepare(self, table: Table, optimizer: Optimizer) -> None:
        """Reserve a table's memory, now that its slots are known, where no earlier coordinator has left it."""
        slots = row_slots(optimizer, lazy=self._lazy)
        self._trainers[table.name] = optimizer, slots
        for number, (shard, device) in enumerate(zip(table.shards, table.devices, strict=True)):
            with tf.device(device):
                shard.add_slots(slots)
                arrays = [*shard.kept.values(), shard.free, shard.numbers]
                there = all(bool(tf.raw_ops.VarIsInitializedOp(resource=one.handle)) for one in arrays)
                is_known = self._left is not None and self._left["rows"].get(table.name) == self._row(table)
                is_lacking = number in self._lacking
                if there and is_known and not is_lacking:
                    continue
                if not (is_known and is_lacking):
                    self._left = None
                if shard.values.shape[0] > tf.int32.max:
                    raise self._too_large(table, f"the {tf.int32.max:,} rows that a ps can have at most")
                try:
                    run_once(shard.reserve)
                except tf.errors.ResourceExhaustedError as error:
                    what = f"the memory of {device} can be reserved for ({first_line(error)})"
                    raise self._too_large(table, what) from error
        table.is_reserved = True

    def _too_large(self, table: Table, what: str) -> UserError:
        capacity = self._settings[table.name].capacity
        return UserError(
            f"dynamic_tables: {table.name}: capacity {capacity:,} is more than {what}: set a smaller one, or take more "
            "ps"
        )

    def begin(self) -> None:
        """Have no row in any table: what an earlier coordinator has left can't be used."""
        self._lacking.clear()
        self._begin_on(range(len(self._devices)))

    def _begin_on(self, servers: Iterable[int]) -> None:
        for table in self.tables.values():
            for server in servers:
                with tf.device(self._devices[server]):
                    run_once(table.shards[server].begin)

    def numbers(self) -> list[Any]:
        """Return the numbers of all shards, in what is traced, table by table."""
        found = []
        for table in self.tables.values():
            for shard, device in zip(table.shards, table.devices, strict=True):
                with tf.device(device), tf.name_scope(APART):
                    found.append(shard.numbers.with_own_handles().read())
        return found

    def update_counts(self, numbers: Sequence[Any]) -> None:
        """Take what `numbers` has given; `counts` has it from then on."""
        count = len(self._devices)
        for place, (name, table) in enumerate(self.tables.items()):
            added = np.sum([np.asarray(one) for one in numbers[place * count : (place + 1) * count]], 0)
            self.counts[name] = {
                "rows": int(added[ROWS]),
                "new": int(added[GIVEN_ROWS]),
                "evicted": int(added[EVICTED]),
                "refused": int(added[REFUSED]),
                "bytes": int(added[ROWS]) * table.shards[0].row_bytes,
            }

    def prepare_saves(self, io_device: str | None) -> None:
        """Trace what saves and restores them, once, when their updates are traced."""
        for name, table in self.tables.items():
            if name not in self._pieces:
                mutexes = [self.mutex_of(shard.values.handle) for shard in table.shards]
                self._pieces[name] = Pieces(table, mutexes, io_device, self._settings[name].incremental_saves)
                self._evictions[name] = Eviction(table, mutexes, self._settings[name])

    def save(self, prefix: str) -> None:
        """Write all rows beside the checkpoint of this name, and then take away those that are too old, or too many."""
        for name, pieces in self._pieces.items():
            pieces.save(prefix)
            self._evictions[name].make()

    def restore(self, prefix: str) -> None:
        """Read the rows beside the checkpoint of this name, and forget all others; raises ValueError for a misfit.

        Where what an earlier coordinator has left is used, this is done on the ps that are `lacking` alone.
        """
        servers = self._lacking or range(len(self._devices))
        self._begin_on(servers)
        for name, pieces in self._pieces.items():
            pieces.restore(prefix, servers)
            self._evictions[name].forget()

    def keep(self) -> None:
        """Leave what is on the ps to the next coordinator."""
        self._end.detach()


def run_once(function: Callable[[], None]) -> None:
    """Trace and run a function. TensorFlow would warn of one that is traced again and again, as for each shard."""
    tf.function(function, autograph=False).get_concrete_function()()


def share_of(rows: int, servers: int) -> int:
    """Return how many of so many rows one of the ps must have room for: their keys don't fall to all alike."""
    mean = math.ceil(rows / servers)
    return mean + (math.ceil(DEVIATIONS * math.sqrt(mean)) if servers > 1 else 0)


def destroy(record: Mapping[str, Any], devices: Sequence[str]) -> None:
    """Free the resources on the ps that a record names."""
    shards = [
        (f"{record['id']}/{name}/{n}", parts[0] if parts else 1)  # a version before this had one hash table
        for name, (_, count, *parts) in record["look"].items()
        for n in range(count)
    ]
    for device in devices:
        with contextlib.suppress(tf.errors.OpError), tf.device(device):
            for prefix, parts in shards:
                for part in PARTS:
                    handle = tf.raw_ops.VarHandleOp(
                        dtype=tf.int8, shape=[], container=CONTAINER, shared_name=f"{prefix}/{part}"
                    )
                    tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
                Index(f"{prefix}/index", parts).destroy()
