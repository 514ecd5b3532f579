"""Small JSON files that other processes read while they are written, and what outlasts a power failure."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace the record in one step: a reader sees the old one or the new one, never half of one."""
    write_text(path, to_json(record, indent=1) + "\n")


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON. What it has no word for is a text, as in Protocol Buffers' JSON: NaN, Infinity and -Infinity.

    `float` reads these as well.
    """
    return json.dumps(in_words(value), indent=indent, allow_nan=False)


def in_words(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: in_words(one) for key, one in value.items()}
    return [in_words(one) for one in value] if isinstance(value, list | tuple) else value


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, which may be texts there."""
    return {name: float(value) for name, value in record.items()}


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, through a temporary name beside it; it is on disk when this returns."""
    make_directory(path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)  # noqa: PTH105
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record, or None when there is none; raises ValueError, naming the file, when it is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # also where the bytes are no text
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object")
    return record


def readable(path: Path) -> dict[str, Any]:
    """Return the record; an empty one when there is none, or it is damaged."""
    try:
        return read_record(path) or {}
    except ValueError:
        return {}


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none when it is missing."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except FileNotFoundError:
        return []


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing; they are on disk when this returns."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on disk; raises OSError when they can't be written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # A file system that knows no such thing for directories says so.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Wait until a directory is on disk, with all that lies in it."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in files:
            sync(Path(directory, name))
        sync(Path(directory))
