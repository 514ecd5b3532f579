"""The export of a model that this host has no memory for: its large variables go from file to file, shard by shard.

The model is built and traced as ever, but for the values of large variables. In the SavedModel that is written then,
each of these is a mark. Then its checkpoint is written again, with rows in the marks' places: one shard after another,
as the run's checkpoint has them. Those of a dynamic table come from a file, where they are put in the keys' order.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Variable
from trainer.core.failures import UserError
from trainer.training.export_changes import VARIABLES, save_tensors
from trainer.training.exports.reserved import reserving
from trainer.training.tables.row_restores import open_checkpoint, reader_of_slices

MARK = 1931  # a mark holds nothing, and its shape is that of no variable: [0, MARK, the variable's number]
READS = ("_read_variable_op", "sparse_read", "gather_nd")
PIECE_BYTES = 64 * 1024 * 1024
# How a reader shows a slice of a tensor, in the order of the slices.
SLICE = re.compile(rb"(?m)^\x00(?P<name>[^\x00]+)\x00\x01.*? \(DT_\w+\) \[(?P<rows>\d+)", re.DOTALL)

Pieces = Callable[[], Iterable[tuple[int, Any]]]
"""Gives a variable's rows in pieces, each with the number of its first row."""
Shape = Sequence[int]


class ReadsLarge(UserError):
    """What is exported reads the values of a large variable."""


class LargeVariables:
    """Those of a model that is built and exported meanwhile."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for files that are removed at the end."""
        self._folder = folder
        self._variables: list[Variable] = []
        self._values: dict[int, tuple[Shape, Pieces]] = {}
        self._writing = False

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Have large variables that are made meanwhile get no value; UserError is raised where something reads one."""
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            with tf.variable_creator_scope(reserving(self.leave_out)):
                yield
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def leave_out(self, variable: Variable) -> None:
        """Have a variable be no part of what is read, and a mark in what is written."""
        tf.raw_ops.AssignVariableOp(
            resource=variable.handle, value=tf.zeros([0, *variable.shape[1:]], variable.dtype), validate_shape=False
        )
        for name in READS:
            setattr(variable, name, refusing(variable.name, getattr(variable, name)))
        mark = (0, MARK, len(self._variables))
        self._variables.append(variable)
        variable._serialize_to_tensors = lambda: (
            {"VARIABLE_VALUE": tf.zeros(mark, variable.dtype)} if self._writing else {}
        )

    def read(self, prefix: str, keys: Mapping[int, str]) -> None:
        """Note where a checkpoint has the values: their keys, by identity. Raises ValueError where a shape differs."""
        reader, read = open_checkpoint(prefix), reader_of_slices(prefix)
        shapes, slices = reader.get_variable_to_shape_map(), slices_of(reader)
        for number, variable in enumerate(self._variables):
            if id(variable) not in keys:  # an optimizer's slot, or of no part of the model
                continue
            key, shape = keys[id(variable)], variable.shape.as_list()
            if shapes[key] != shape:
                raise ValueError(f"{key} has the shape {shapes[key]} there, and {shape} in the model")
            stored = partial(read_pieces, read, key, shape, variable.dtype, slices.get(key, shape[:1]))
            self._values[number] = (shape, stored)
        self._writing = True

    def put_rows(self, variable: Variable, shape: tuple[int, int], parts: Iterable[tuple[Any, Any]]) -> None:
        """Leave a dynamic table's rows out; `parts` have them, each with the places of its rows."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{len(self._variables)}"
        with path.open("wb") as file:  # a page that found no room later would end this process
            os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        rows = np.memmap(path, np.float32, "r+", shape=shape)
        for places, values in parts:
            rows[places] = values
        length = max(1, PIECE_BYTES // (4 * shape[1]))
        places = range(0, shape[0], length)
        self._values[len(self._variables)] = (shape, lambda: ((at, rows[at : at + length]) for at in places))
        self.leave_out(variable)

    def write(self, export: Path) -> None:
        """Write the values into the checkpoint of a SavedModel that has marks."""
        reader = tf.train.load_checkpoint(str(export / VARIABLES))
        shapes = reader.get_variable_to_shape_map()
        numbers = {name: shape[2] for name, shape in shapes.items() if shape[:2] == [0, MARK]}
        parts = [str(export / "parts" / "0")]
        save_tensors(parts[0], {name: reader.get_tensor(name) for name in shapes.keys() - numbers})
        for name, number in numbers.items():
            shape, pieces = self._values.get(number) or zeros_like(self._variables[number])
            for begin, rows in pieces():
                parts.append(str(export / "parts" / str(len(parts))))
                save_tensors(parts[-1], {name: rows}, part_of(shape, begin, len(rows)))
                del rows  # before the next one is read
        for path in (export / VARIABLES.parent).iterdir():
            path.unlink()
        (export / "fingerprint.pb").unlink(missing_ok=True)  # which is of the numbers, too
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=str(export / VARIABLES), delete_old_dirs=False
        )
        shutil.rmtree(export / "parts")


def zeros_like(variable: Variable) -> tuple[Shape, Pieces]:
    """Return the shape of a variable that nothing served reads, as an optimizer's slot, and zeros for its rows."""
    shape = variable.shape.as_list()
    length = max(1, PIECE_BYTES // (variable.dtype.size * math.prod(shape[1:])))
    places = range(0, shape[0], length)
    return shape, lambda: ((at, tf.zeros([min(length, shape[0] - at), *shape[1:]], variable.dtype)) for at in places)


def refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that reads a variable in functions that are traced alone."""

    def read(*given: Any, **named: Any) -> Any:
        if tf.executing_eagerly():
            raise ReadsLarge(
                f"the export reads the values of {name}, and this host has no memory for the whole model: read it "
                "within a tf.function, or export on a larger host with fab export --run NAME"
            )
        return plain(*given, **named)

    return read


def read_pieces(
    read: Callable[[str, str, Any], Any], key: str, shape: Shape, dtype: Any, lengths: Shape
) -> Iterator[tuple[int, Any]]:
    """Read a tensor of a checkpoint in pieces of these lengths."""
    begin = 0
    for length in lengths:
        yield begin, read(key, part_of(shape, begin, length), dtype)
        begin += length


def part_of(shape: Shape, begin: int, length: int) -> str:
    """Name these rows of a tensor as SaveV2 and RestoreV2 do; nothing for all."""
    if length == shape[0]:
        return ""
    return " ".join([*map(str, shape), ":".join([f"{begin},{length}", *["-"] * (len(shape) - 1)])])


def slices_of(reader: Any) -> dict[str, list[int]]:
    """Return how many rows each slice of a tensor has that a checkpoint holds in several, in their order."""
    found: dict[str, list[int]] = {}
    for entry in SLICE.finditer(reader.debug_string()):
        found.setdefault(entry["name"].decode(), []).append(int(entry["rows"]))
    shapes = reader.get_variable_to_shape_map()
    return {name: rows for name, rows in found.items() if sum(rows) == shapes[name][0]}
