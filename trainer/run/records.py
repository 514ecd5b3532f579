"""Small JSON files that other processes read while they are written."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replace the record in one step: a reader sees the old one or the new one, never half of one."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, through a temporary name beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record, or None when there is none; raises ValueError, naming the file, when it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object")
    return record


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none when it is not there."""
    try:
        return os.listdir(directory)  # noqa: PTH208
    except FileNotFoundError:
        return []
