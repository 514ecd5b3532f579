"""A dynamic table over all ps, as a layer has it in the place of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.core.failures import UserError
from trainer.training.tables.dynamic.hashing import checked, keys_of, owner_of
from trainer.training.tables.dynamic.shard import Shard
from trainer.training.tables.dynamic.together import stand_in
from trainer.training.tables.table_lookups import GIVEN, ONCE, in_shape_of, lookups_of, note
from trainer.training.tf_internals.graphs import register_dispatchable_type, take_instead
from trainer.training.tf_internals.variables import Reserved

Change = Callable[[Tensor, Tensor | None, Reserved, Mapping[str, Any], Tensor], None]
_giving = [False]


@contextlib.contextmanager
def giving_rows() -> Iterator[None]:
    """Have what is traced within it give rows to keys that have none, as training does."""
    _giving.append(True)
    try:
        yield
    finally:
        _giving.pop()


@register_dispatchable_type
class Table:
    """A shard on each ps. Keys lie where their hash says."""

    def __init__(self, name: str, width: int, shards: Sequence[Shard], devices: Sequence[str]) -> None:
        self.name, self.width = name, width
        self.shards, self.devices = list(shards), list(devices)
        self._unique_id = name  # by which an optimizer knows what it is told to leave out of its decay
        self.masks = False
        """Whether its layer tells Keras which ids are 0."""
        self.asks_once = True
        """Whether a step asks for each row once; else the gradients of single ids can be looked at, as to clip them."""
        self.is_reserved = True
        """Whether there is a table on the ps yet: a program may call its model before that, to build it."""
        self.variables = [
            Reserved(shard.values.handle, shard.values.shape, tf.float32, f"{name}/part_{number}", self)
            for number, shard in enumerate(shards)
        ]
        """What gradients are of: the values, a part on each ps."""
        # By the id of the rows of a lookup that is traced: the rows themselves, and their keys.
        self._keys: dict[int, tuple[Tensor, Tensor]] = {}

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        """Refuse it, as each of its parts does."""
        return self.variables[0].numpy()

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids."""
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.look_up(ids.flat_values))
        ids = checked(ids, self.name, self.masks)
        if not self.is_reserved and tf.executing_eagerly():
            return tf.zeros([*ids.shape, self.width])
        all_keys = keys = keys_of(tf.reshape(ids, [-1]))
        places = None
        if self.asks_once or not _giving[-1]:
            keys, places = tf.unique(keys, name=ONCE)
        note(self.name, all_keys, keys)
        count = len(self.shards)
        owner = stand_in(lambda: tf.cast(keys, tf.int32), owners_of, (keys, count))
        parts = tf.dynamic_partition(keys, owner, count)
        order = tf.dynamic_partition(tf.range(tf.size(keys)), owner, count)
        values = []
        for shard, variable, device, part in zip(self.shards, self.variables, self.devices, parts, strict=True):
            with tf.device(device):
                values.append(tf.gather(variable, self._rows(shard, part)))
        found = tf.dynamic_stitch(order, values)
        found = found if places is None else tf.gather(found, places)
        found = in_shape_of(ids, found)
        found.set_shape(ids.shape.concatenate([self.width]))
        return found

    def _rows(self, shard: Shard, keys: Tensor) -> Tensor:
        if not _giving[-1]:
            return shard.known_rows(keys)
        if self.asks_once:
            rows = shard.given_rows(keys)
        else:
            once, places = tf.unique(keys)
            rows = tf.identity(tf.gather(shard.given_rows(once), places), name=GIVEN)
        self._keys[id(rows)] = (rows, keys)
        return rows

    def update(self, variable: Reserved, gradient: tf.IndexedSlices, change: Change) -> None:
        """Have a gradient change the rows of one shard; call it on that shard's ps.

        `change` takes gradients, the place of each among the rows (None where each row has one), the variable, the
        slots by their names, and the numbers of rows, each named once.
        """
        # Variables compare by their values.
        shard = next(shard for shard, one in zip(self.shards, self.variables, strict=True) if one is variable)
        if not isinstance(gradient, tf.IndexedSlices):
            raise UserError(
                f"dynamic_tables: {self.name}: its gradient is a Tensor of all rows, expected tf.IndexedSlices: have "
                "train_step change gradient.values alone, and use the layer for lookups alone"
            )
        lookups = [self._keys.get(id(rows)) for rows in lookups_of(gradient.indices)]
        if not lookups or None in lookups:
            raise UserError(
                f"dynamic_tables: {self.name}: its layer is called in a function of its own, as a tf.function within "
                "train_step is, so that its keys are not known where it is trained: call the layer in train_step or "
                "in the model's call itself"
            )
        if self.asks_once:
            for given, asked in filter(None, lookups):
                leave_at_ps(given, asked)
        rows, keys = (tf.concat(each, 0) for each in zip(*filter(None, lookups), strict=True))
        places = None
        if len(lookups) > 1 or not self.asks_once:  # a row may be named several times
            rows, places = tf.unique(rows)
            keys = tf.math.unsorted_segment_max(keys, places, tf.size(rows))
        with shard.changing(rows, keys) as numbers:
            change(gradient.values, places, variable, shard.slots, numbers)


def owners_of(asked: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Return the number of the ps that has each key's row, of the keys of each lookup and the number of ps."""
    keys, (count, *_) = zip(*asked, strict=True)
    return tf.split(owner_of(tf.concat(keys, 0), count), tf.stack([tf.size(one) for one in keys]), num=len(keys))


def leave_at_ps(rows: Tensor, keys: Tensor) -> None:
    """Have a worker look at keys, which it has, where its gradients name the rows' numbers.

    Nothing there needs these, where each row is asked for once.
    """
    for operation in rows.consumers():
        if operation.device != rows.device:
            take_instead(operation, rows, keys)


@tf.experimental.dispatch_for_api(tf.nn.embedding_lookup, {"params": Table})
def look_up_dynamic(params: Table, ids: Tensor, max_norm: float | None = None, name: str | None = None) -> Tensor:
    """Look keys up, where Keras's layers look up rows of weights."""
    del name
    if max_norm is not None:
        raise UserError(f"dynamic_tables: {params.name}: its lookup has max_norm {max_norm}, expected none")
    return params.look_up(ids)
