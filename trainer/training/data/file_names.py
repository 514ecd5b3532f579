"""Which files a program's patterns name: listed by Python, since TensorFlow passes over a folder that can't be read."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from trainer.core.failures import Infrastructure, UserError

WILDCARD = re.compile(r"[*?\[]")
ESCAPED = re.compile(r"\\(.)")
ABSENT = (FileNotFoundError, NotADirectoryError, PermissionError)


def patterns_of(pattern: str | Sequence[str]) -> tuple[str, ...]:
    """Return what a program asks for as a list; raises UserError where it is none."""
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not all(isinstance(one, str) for one in patterns) or not patterns:
        raise UserError(f"context.files: expected a pattern of files, as '/data/train-*', not {pattern!r}")
    return patterns


def names_of(patterns: Sequence[str], *, elsewhere: bool, found: Callable[[Sequence[str]], object]) -> tf.data.Dataset:
    """Return the names of all files, which the workers divide among them; raises UserError where there is none.

    Where they are read `elsewhere`, and this host has none, the workers list them. Else `found` gets the names.
    Raises Infrastructure where a folder can't be read.
    """
    try:
        names = matching(patterns)
    except OSError as error:
        raise Infrastructure(f"context.files can't list {error.filename}; {error.strerror}") from error
    if names:
        found(names)
        return tf.data.Dataset.from_tensor_slices(names)
    if elsewhere:
        return tf.data.Dataset.list_files(list(patterns), shuffle=False)
    raise UserError(f"no file matches {', '.join(patterns)!r}: write the files first, or fix the pattern")


def matching(patterns: Sequence[str]) -> list[str]:
    """Return the names of files that match one of the patterns, also in a store that TensorFlow knows.

    Raises OSError where a folder can't be read.
    """
    names = {name for one in patterns for name in (tf.io.gfile.glob(one) if "://" in one else listed(one))}
    return sorted(names)


def listed(pattern: str) -> list[str]:
    """Return the names that match one pattern, as TensorFlow writes them; raises OSError where a folder can't be read.

    One that is gone, or that this user may not read, has no files, as TensorFlow has it.
    """
    if not WILDCARD.search(pattern):
        with contextlib.suppress(*ABSENT):
            Path(pattern).stat()
            return [pattern] if pattern else []
        return []
    folder, name = os.path.split(pattern)
    literal = ESCAPED.sub(lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], name)
    matches = re.compile(fnmatch.translate(literal.replace("[^", "[!"))).match
    names: list[str] = []
    for each in listed(folder) if WILDCARD.search(folder) else [folder or "."]:
        with contextlib.suppress(*ABSENT), os.scandir(each) as entries:
            names += [f"{each.rstrip('/')}/{entry.name}" for entry in entries if matches(entry.name)]
    return names
