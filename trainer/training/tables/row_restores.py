"""Reads checkpoints that incremental saves have written (row_saves.py): older values, and the rows that came since.

`reading` is for tf.train.Checkpoint, `open_checkpoint` and `read_tensor` for single tensors. All other checkpoints
are read as TensorFlow does. TensorFlow alone finds no large variable in one of an incremental save, and says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.core.contracts import Tensor
from trainer.training.tf_internals.saving import restoring_by

# What stands where a dynamic table's name does in the names of files. No layer of such a table may begin like that.
BASE, ROWS = "_base", "_rows"
KEY = re.compile(r"rows/(?P<begin>\d+)/(?P<length>\d+)/(?P<name>.+)", re.DOTALL)


class RowRange(NamedTuple):
    """Rows of a tensor in a checkpoint."""

    name: str
    begin: int
    length: int

    @classmethod
    def from_slice(cls, name: str, spec: str, rows: int) -> RowRange:
        """Return that of a slice as SaveV2 names it; `rows` are those of the whole, if that is named."""
        first = spec.split()[-1].split(":")[0] if spec else "-"
        begin, length = map(int, first.split(",")) if first != "-" else (0, rows)
        return cls(name, begin, length)

    def meets(self, other: RowRange) -> bool:
        return self.begin < other.begin + other.length and other.begin < self.begin + self.length


def key_of(what: str, part: RowRange) -> str:
    """Return the key in a file of rows, of their numbers ("rows") or "values"."""
    return f"{what}/{part.begin}/{part.length}/{part.name}"


class Changes:
    """Where an incremental checkpoint has what."""

    def __init__(self, prefix: str, base: str, files: Sequence[str]) -> None:
        """`base` is the prefix of the older values, `files` are those of changed rows, the oldest first."""
        self.base = tf.train.load_checkpoint(base)
        """TensorFlow's reader of the older values."""
        self._rest, self._prefix = tf.train.load_checkpoint(prefix), base
        self._found: dict[str, list[tuple[str, RowRange]]] = {}
        for path in files:
            for key in tf.train.load_checkpoint(path).get_variable_to_shape_map():
                if match := KEY.fullmatch(key):
                    part = RowRange(match["name"], int(match["begin"]), int(match["length"]))
                    self._found.setdefault(part.name, []).append((path, part))

    @classmethod
    def from_checkpoint(cls, prefix: str) -> Changes | None:
        """Return those of a checkpoint, None of one that TensorFlow reads alone.

        Raises NotFoundError where files are gone, as while another process removes them.
        """
        base = base_files(prefix)
        if not base:
            return None
        [index] = [name for name in base.values() if name.endswith(".index")]
        paths = [str(Path(prefix).with_name(name)) for name in (index, *row_files(prefix).values())]
        first, *files = [path.removesuffix(".index") for path in paths if path.endswith(".index")]
        return cls(prefix, first, files)

    def restore(self, plain: Any, prefix: Any, names: Any, slices: Any, types: Any, name: Any = None) -> list[Any]:
        """Do as `plain` does, TensorFlow's RestoreV2, for the checkpoint of these changes."""
        found: dict[int, Any] = {}
        own = [number for number, key in enumerate(names) if self.is_whole(key)]
        if own:
            chosen = [[given[number] for number in own] for given in (names, slices, types)]
            found = dict(zip(own, plain(prefix, *chosen, name), strict=True))
        for number, (key, spec, dtype) in enumerate(zip(names, slices, types, strict=True)):
            if number not in found:
                found[number] = self.read(key, spec, dtype)
        return [found[number] for number in range(len(names))]

    def is_whole(self, key: str) -> bool:
        """Return whether the checkpoint itself has a tensor."""
        return bool(self._rest.has_tensor(key)) or not self.base.has_tensor(key)

    def read(self, key: str, spec: str, dtype: Any) -> Tensor:
        """Return a slice of a tensor that has changed by rows."""
        [value] = restore(self._prefix, [key], [spec], [dtype])
        rows = int(self.base.get_variable_to_shape_map()[key][0])
        wanted = RowRange.from_slice(key, spec, rows)
        for path, part in self._found.get(key, []):
            if part.meets(wanted):
                names = [key_of("rows", part), key_of("values", part)]
                numbers, values = restore(path, names, ["", ""], [tf.int64, dtype])
                numbers = tf.ensure_shape(numbers, [None]) - wanted.begin
                inside = (numbers >= 0) & (numbers < wanted.length)
                places = tf.boolean_mask(numbers, inside)[:, tf.newaxis]
                value = tf.tensor_scatter_nd_update(value, places, tf.boolean_mask(values, inside))
        return value

    def get_tensor(self, key: str) -> Any:
        """Return a tensor's value, as TensorFlow's reader does."""
        if self.is_whole(key):
            return self._rest.get_tensor(key)
        return self.read(key, "", self.base.get_variable_to_dtype_map()[key]).numpy()


class Reader:
    """Reads tensors of an incremental checkpoint, and says of all else what TensorFlow's reader of a whole one does."""

    def __init__(self, changes: Changes) -> None:
        self.get_tensor = changes.get_tensor
        self._base = changes.base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def restore(prefix: str, names: Sequence[str], slices: Sequence[str], types: Sequence[Any]) -> list[Tensor]:
    return list(tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, dtypes=types))


@contextlib.contextmanager
def reading(prefix: str) -> Iterator[None]:
    """Have tf.train.Checkpoint read the checkpoint of this name meanwhile, whatever kind of save has written it."""
    changes = Changes.from_checkpoint(prefix)
    with restoring_by(changes.restore) if changes else contextlib.nullcontext():
        yield


def open_checkpoint(prefix: str) -> Any:
    """Return what reads tensors of a checkpoint, as `tf.train.load_checkpoint` does."""
    changes = Changes.from_checkpoint(prefix)
    return Reader(changes) if changes else tf.train.load_checkpoint(prefix)


def reader_of_slices(prefix: str) -> Callable[[str, str, Any], Tensor]:
    """Return what reads a slice of a tensor of a checkpoint: by its key, the slice as RestoreV2 names it, its type."""
    changes = Changes.from_checkpoint(prefix)

    def read(key: str, spec: str, dtype: Any) -> Tensor:
        if changes and not changes.is_whole(key):
            return changes.read(key, spec, dtype)
        return restore(prefix, [key], [spec], [dtype])[0]

    return read


def base_files(prefix: str) -> dict[str, str]:
    """Return the files with older values beside a checkpoint, by what follows its name; none without any."""
    found = named(prefix, rf"\.table-{BASE}\.0-of-1\.0+\.(?:index|data-\d+-of-(?P<count>\d+))")
    counts = {int(match["count"]) for match in found.values() if match["count"]}
    check(not found or len(found) == 1 + max(counts, default=1), prefix)
    return {ending: match[0] for ending, match in found.items()}


def row_files(prefix: str) -> dict[str, str]:
    """Return the files with changed rows beside a checkpoint, the oldest first, by what follows its name."""
    found = named(prefix, rf"\.table-{ROWS}\.\d+-of-(?P<count>\d+)\.(?P<save>\d+)\.(?:index|data-00000-of-00001)")
    saves = {(int(match["save"]), int(match["count"])) for match in found.values()}
    check(len(found) == sum(2 * count for _, count in saves), prefix)
    check({save for save, _ in saves} == set(range(len(saves))), prefix)
    ordered = sorted(found.items(), key=lambda one: (int(one[1]["save"]), one[0]))
    return {ending: match[0] for ending, match in ordered}


def named(prefix: str, ending: str) -> Mapping[str, re.Match[str]]:
    """Return the files beside a checkpoint whose names end so, by that ending."""
    path = Path(prefix)
    if not path.parent.is_dir():
        return {}
    pattern = re.compile(re.escape(path.name) + ending)
    found = [match for one in path.parent.iterdir() if (match := pattern.fullmatch(one.name))]
    return {match[0].removeprefix(path.name): match for match in found}


def check(is_there: bool, prefix: str) -> None:
    if not is_there:
        raise tf.errors.NotFoundError(None, None, f"parts of the checkpoint {prefix} are gone")
