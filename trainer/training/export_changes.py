"""What has changed between two exports of one model, and the newer one made of the older one and that.

`python -m trainer.training.export_changes BASE CHANGES TARGET` makes the SavedModel TARGET. It is for where a model is
served: it needs this file, TensorFlow and numpy alone. Of a large table the rows that have changed are shipped, of a
dynamic one the keys that are new, changed or gone.

    <step>.changes/changes.json    {"base", "step", "digest", "tensors": [{"name", "kind"}]}, and for keys their "rows"
    <step>.changes/values.*        a TensorFlow checkpoint: NAME#whole, NAME#places and NAME#rows, or for the keys of a
                                   dynamic table NAME#keys and NAME#gone, and NAME#rows of these keys
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

VARIABLES = Path("variables", "variables")
RECORD, VALUES = "changes.json", "values"
FEW = 0.5  # of a tensor's rows; where more have changed, it is written whole


def write_changes(base: Path, new: Path, target: Path, steps: tuple[int, int], tables: Mapping[str, str]) -> None:
    """Write what a SavedModel `new` has otherwise than `base` to the directory `target`; `steps` are theirs.

    `tables` are the dynamic ones: the name of the keys' tensor in the checkpoint, and that of the rows'.
    """
    before, after = (tf.train.load_checkpoint(str(path / VARIABLES)) for path in (base, new))
    target.mkdir()
    tensors, values = list[dict[str, str]](), dict[str, Any]()
    for name in sorted(set(after.get_variable_to_shape_map()) - set(tables.values())):
        kind, parts = _compare(before, after, name, tables.get(name, ""))
        if kind:
            tensors.append({"name": name, "kind": kind} | ({"rows": tables[name]} if kind == "keys" else {}))
            values |= {f"{name}#{part}": value for part, value in parts.items()}
    save_tensors(str(target / VALUES), values or {"nothing": np.zeros(0)})  # a checkpoint needs a tensor
    record = {"base": steps[0], "step": steps[1], "digest": digest(base), "tensors": tensors}
    (target / RECORD).write_text(json.dumps(record, indent=1))


def _compare(before: Any, after: Any, name: str, rows: str) -> tuple[str, dict[str, Any]]:
    """Return how a tensor has changed, nothing where it has not, and what is to be written of it."""
    new = after.get_tensor(name)
    if not before.has_tensor(name):
        return "whole", {"whole": new}
    old = before.get_tensor(name)
    if rows:
        return _compare_keys(old, before.get_tensor(rows), new, after.get_tensor(rows))
    if not isinstance(new, np.ndarray) or new.ndim < 2 or new.shape != old.shape or new.dtype != old.dtype:
        is_same = np.shape(new) == np.shape(old) and np.array_equal(_bytes(new), _bytes(old))
        return ("", {}) if is_same else ("whole", {"whole": new})
    places = np.flatnonzero((_bytes(new) != _bytes(old)).any(axis=1))
    if len(places) > FEW * len(new):
        return "whole", {"whole": new}
    return ("rows" if len(places) else ""), {"places": places, "rows": new[places]}


def _compare_keys(old: Any, old_rows: Any, new: Any, new_rows: Any) -> tuple[str, dict[str, Any]]:
    places = np.minimum(np.searchsorted(old, new), len(old) - 1)  # keys lie sorted
    same = (old[places] == new) & ~(_bytes(old_rows)[places] != _bytes(new_rows)).any(axis=1)
    gone = old[~np.isin(old, new, assume_unique=True)]
    parts = {"keys": new[~same], "rows": new_rows[~same], "gone": gone}
    return ("keys" if len(gone) or not same.all() else ""), parts


def apply_changes(base: Path, changes: Path, target: Path) -> None:
    """Make the SavedModel `target` of `base` and what has changed since.

    Raises ValueError where they do not belong together.
    """
    record = json.loads((changes / RECORD).read_text())
    if digest(base) != record["digest"]:
        raise ValueError(f"{changes} are the changes since step {record['base']}, and {base} is another export")
    if target.exists():
        raise ValueError(f"{target} exists already")
    coming = target.with_name(f".{target.name}.coming")
    shutil.rmtree(coming, ignore_errors=True)
    leave = shutil.ignore_patterns(VARIABLES.name + ".*", "fingerprint.pb")  # which is of the numbers, too
    shutil.copytree(base, coming, ignore=leave)
    tensors = {one["name"]: one for one in record["tensors"]}
    before, new = (tf.train.load_checkpoint(str(path)) for path in (base / VARIABLES, changes / VALUES))
    parts = []
    for number, named in enumerate(_changed(before, new, tensors)):
        parts.append(str(coming / "parts" / str(number)))
        save_tensors(parts[-1], named)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=str(coming / VARIABLES), delete_old_dirs=False
    )
    shutil.rmtree(coming / "parts")
    coming.rename(target)


def _changed(before: Any, new: Any, tensors: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Give the tensors one after the other, keys with their rows, so that no two tables are in memory."""
    merged = {one["rows"] for one in tensors.values() if one["kind"] == "keys"}
    for name in sorted({*before.get_variable_to_shape_map(), *tensors} - merged):
        kind = tensors[name]["kind"] if name in tensors else ""
        if kind == "whole":
            yield {name: new.get_tensor(f"{name}#whole")}
        elif kind == "rows":
            value = before.get_tensor(name)
            value[new.get_tensor(f"{name}#places")] = new.get_tensor(f"{name}#rows")
            yield {name: value}
        elif kind == "keys":
            rows = tensors[name]["rows"]
            yield dict(zip((name, rows), _merge(before, new, name, rows), strict=True))
        else:
            yield {name: before.get_tensor(name)}


def _merge(before: Any, new: Any, name: str, rows: str) -> tuple[Any, Any]:
    changed, gone = new.get_tensor(f"{name}#keys"), new.get_tensor(f"{name}#gone")
    old = before.get_tensor(name)
    kept = ~np.isin(old, np.concatenate([changed, gone]))
    keys = np.concatenate([old[kept], changed])
    order = np.argsort(keys)
    values = np.concatenate([before.get_tensor(rows)[kept], new.get_tensor(f"{name}#rows")])
    return keys[order], values[order]


def digest(export: Path) -> str:
    """Name an export by its numbers: their index has a checksum of each."""
    return hashlib.sha256((export / VARIABLES.with_suffix(".index")).read_bytes()).hexdigest()


def _bytes(value: Any) -> Any:
    """Return each row's bytes, which say of two numbers that are none whether they are the same."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.dtype.kind in "SU":
        return np.asarray(value)
    flat = np.ascontiguousarray(value).reshape(len(value) if value.ndim else 1, -1)
    return flat.view(np.uint8)


def save_tensors(prefix: str, named: Mapping[str, Any], part: str = "") -> None:
    """Write tensors to a checkpoint of TensorFlow; `part` says which part of a larger one each is, as SaveV2 has it."""
    names, values = zip(*named.items(), strict=True)
    Path(prefix).parent.mkdir(exist_ok=True)
    tensors = [tf.convert_to_tensor(value) for value in values]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[part] * len(names), tensors=tensors)


def main(words: Sequence[str]) -> int:
    """Make TARGET of BASE and CHANGES; returns the exit code."""
    if len(words) != 3:
        print("usage: python -m trainer.training.export_changes BASE CHANGES TARGET", file=sys.stderr)
        return 2
    base, changes, target = map(Path, words)
    try:
        apply_changes(base, changes, target)
    except (OSError, ValueError, tf.errors.OpError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
