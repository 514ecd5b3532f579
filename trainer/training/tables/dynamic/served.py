"""Dynamic tables as a checkpoint has them, for a model outside the cluster: the side-car's evaluation and the export.

Keys lie sorted in one plain variable, and their rows in another, so that anything that loads a SavedModel can look
them up. The first row is that of an unknown key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Layer, Tensor, Variable
from trainer.run.directory import RunDirectory
from trainer.training.export_changes import VARIABLES
from trainer.training.tables.dynamic.hashing import checked, keys_of
from trainer.training.tables.dynamic.layers import attach, take_over_layers
from trainer.training.tables.dynamic.pieces import all_pieces_of, pieces_of
from trainer.training.tables.dynamic.shard import NO_KEY
from trainer.training.tf_internals.graphs import register_dispatchable_type, track
from trainer.training.tf_internals.variables import full_names

KEYS, ROWS = "/keys", "/rows"
ORDER_BYTES = 48  # of a key: itself, twice, its number as found, as sorted and as chosen, and as TensorFlow has it
PutRows = Callable[[Variable, tuple[int, int], Iterable[tuple[Any, Any]]], None]


@register_dispatchable_type
class ServedTable:
    """A layer's keys and rows in this process."""

    variables = ()
    """What is trained: nothing."""
    masks = False
    """Whether its layer tells Keras which ids are 0."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width
        self.keys = tf.Variable([NO_KEY], shape=[None], dtype=tf.int64, trainable=False, name=f"{name}{KEYS}")
        self.rows = tf.Variable(tf.zeros([1, width]), shape=[None, width], trainable=False, name=f"{name}{ROWS}")

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, zeros for unknown ones."""
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.look_up(ids.flat_values))
        ids, keys = checked(ids, self.name, self.masks), self.keys.read_value()
        asked = keys_of(tf.reshape(ids, [-1]))
        places = tf.minimum(tf.searchsorted(keys, asked, out_type=tf.int64), tf.size(keys, tf.int64) - 1)
        found = tf.gather(self.rows, tf.where(tf.gather(keys, places) == asked, places, 0))
        found = tf.reshape(found, tf.concat([tf.shape(ids), [self.width]], axis=0))
        found.set_shape(ids.shape.concatenate([self.width]))
        return found

    def restore(self, prefix: str, put_rows: PutRows | None = None) -> None:
        """Take the rows beside the checkpoint of this name, or have them put elsewhere; raises as `all_pieces_of`."""
        readers = [tf.train.load_checkpoint(path) for *_, path in all_pieces_of(prefix, self.name)]
        parts = [reader.get_tensor("keys") for reader in readers]
        # Of a key that is there again, the newest row counts.
        keys, found = np.unique(np.concatenate([[NO_KEY], *parts]), return_index=True)
        order, begins = np.argsort(found), np.cumsum([1, *map(len, parts)])
        chosen = np.split(order, np.searchsorted(found[order], begins))[1:-1]
        self.keys.assign(keys)
        rows = (
            (places, reader.get_tensor("values")[found[places] - begin])
            for reader, places, begin in zip(readers, chosen, begins[:-1], strict=True)  # no second copy of all rows
        )
        if put_rows is not None:
            put_rows(self.rows, (len(keys), self.width), rows)
            return
        for count in (0, len(keys)):  # what was there goes first
            self.rows.assign(tf.zeros([count, self.width]))
        for places, values in rows:
            self.rows.scatter_update(tf.IndexedSlices(values, places))


@tf.experimental.dispatch_for_api(tf.nn.embedding_lookup, {"params": ServedTable})
def look_up_served(params: ServedTable, ids: Tensor, max_norm: float | None = None, name: str | None = None) -> Tensor:
    """Look keys up, where Keras's layers look up rows of weights."""
    del max_norm, name
    return params.look_up(ids)


class ServedTables:
    """Those of a model that is built meanwhile."""

    def __init__(self, names: Iterable[str]) -> None:
        self.put_rows: PutRows | None = None
        """Puts a table's rows elsewhere, given their variable, their shape, and parts: places, and the rows there."""
        self._names = set(names)
        self._tables: list[tuple[Layer, ServedTable]] = []

    @classmethod
    def from_directory(cls, directory: RunDirectory) -> ServedTables:
        """Return those of a run's settings."""
        return cls(directory.dynamic_tables)

    @contextlib.contextmanager
    def of_layers(self) -> Iterator[None]:
        """Have the layers that are built meanwhile get their tables, without a key."""
        with take_over_layers(lambda layer: self._build(layer) if layer.name in self._names else None):
            yield

    def _build(self, layer: Layer) -> ServedTable:
        with tf.init_scope():
            table = ServedTable(layer.name, int(layer.output_dim))
        attach(layer, table)
        if isinstance(layer, tf.keras.layers.Layer):
            # By its number among the layers with weights a checkpoint knows each layer behind it.
            layer._non_trainable_weights.append(table.keys)
        self._tables.append((layer, table))
        return table

    def saved_in(self, export: Path) -> dict[str, str]:
        """Return the names that keys and rows have in the checkpoint of a SavedModel."""
        of_names = {full: key for key, full in full_names(tf.train.load_checkpoint(str(export / VARIABLES))).items()}
        return {
            key: of_names[full.removesuffix(KEYS) + ROWS]
            for full, key in of_names.items()
            if full.endswith(KEYS) and full.removesuffix(KEYS).rpartition("/")[2] in self._names
        }

    def restore(self, prefix: str) -> None:
        """Take the rows beside the checkpoint of this name; raises as each table does."""
        for _, table in self._tables:
            table.restore(prefix, self.put_rows)

    def track(self) -> None:
        """Have a SavedModel take them along; a checkpoint that is read before knows nothing of them."""
        for layer, table in self._tables:
            track(layer, "dynamic_keys", table.keys)
            track(layer, "dynamic_rows", table.rows)


def piece_bytes(prefix: str, names: Iterable[str]) -> int:
    """Return what the keys and values of these tables take that lie beside a checkpoint."""
    return sum(rows * (4 * width + 8) for rows, width in shapes_of(prefix, names))


def key_bytes(prefix: str, names: Iterable[str]) -> int:
    """Return what is held while their keys are put in order, where their rows are not."""
    return sum(rows * ORDER_BYTES for rows, _ in shapes_of(prefix, names))


def shapes_of(prefix: str, names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Give the rows and the width of each piece of these tables."""
    for name in names:
        for *_, path in pieces_of(prefix, name):
            rows, width = tf.train.load_checkpoint(path).get_variable_to_shape_map()["values"]
            yield rows, width
