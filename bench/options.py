"""The command line of a bench, the directory that it measures in, and the floor of a disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path


def parser_of(bench: str, text: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"bench/{bench}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_names(parser: argparse.ArgumentParser, what: str, names: Collection[str], default: str = "all") -> None:
    """Add an argument that names some of these. argparse's own `choices` permits no empty list."""
    listed = ", ".join(map(shlex.quote, names))

    def known(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"there is no {what} {word}; they are {listed}")
        return word

    parser.add_argument(what, nargs="*", metavar=what.upper(), type=known, help=f"of {listed} (default: {default})")


@contextlib.contextmanager
def scratch_directory(keep: Path | None = None) -> Iterator[Path]:
    """Give a directory of its own, which goes at the end, or the one to `keep`."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as name:
        yield Path(name)


def plain_seconds(directory: Path, size: int) -> float:
    """Return how long a plain file of so many bytes takes, written and synced: the floor of what is saved."""
    began = time.perf_counter()
    (directory / "plain").write_bytes(bytes(size))
    os.sync()
    return time.perf_counter() - began
