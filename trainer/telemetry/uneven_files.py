"""How the files of the training data are divided, in bytes. Knows no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Files = Sequence[tuple[str, int]]  # names and bytes


def sizes_of_data(groups: Sequence[Files], parts: int) -> dict[str, Any]:
    """Return how many files there are and their bytes, and the largest one; nothing where there are no files.

    Of each group the files go to so many parts in turn: `parts` has each one's bytes, where they are divided.
    """
    files = [one for group in groups for one in group]
    if not files:
        return {}
    largest, most = max(files, key=lambda one: one[1])
    sizes = {"files": len(files), "bytes": sum(size for _, size in files), "largest": largest, "largest_bytes": most}
    divided = [sum(size for group in groups for _, size in group[part::parts]) for part in range(parts)]
    return {**sizes, "parts": divided}
