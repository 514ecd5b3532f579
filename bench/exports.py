"""What an export takes of memory and time: the model as a whole, and by shard. Each is in a process of its own.

The floor is a file of as many bytes, written and synced. Only ratios say something.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from bench.commands import run_command
from bench.options import parser_of, plain_seconds
from bench.tables import print_row

PROGRAM: Any = "trainer.examples.clicks:Clicks"
STEPS, GIB = 4, 2**30
WAYS = {"whole": "as a whole", "shards": "by shard"}


def train(directory: str, rows: int) -> None:
    """Leave the checkpoint of a table of as many rows of 16 numbers, on two ps."""
    from trainer import testing

    settings: dict[str, Any] = {"program_args": {"rows": rows}, "evaluation": "none", "export": False}
    testing.train(PROGRAM, STEPS, workers=2, ps=2, directory=directory, **settings)


def export(directory: str, rows: int, way: str) -> None:
    """Export the checkpoint; print the model's bytes, those that the process took for it, and the seconds."""
    import trainer.testing  # noqa: F401  # before TensorFlow: it chooses the Keras
    from trainer.core.program import load_program
    from trainer.run.directory import RunDirectory
    from trainer.training.exports import export as exports

    run = RunDirectory(Path(directory), "test")
    program, size = load_program(PROGRAM, {"rows": rows}), exports.bytes_of_checkpoint(run, STEPS)
    before, began = peak_bytes(), time.perf_counter()
    with mock.patch.object(exports, "room", return_value=exports.HELD * size - (way == "shards")):
        exports.export_model(program, run, STEPS, target=Path(directory, way))
    print("measured", size, peak_bytes() - before, time.perf_counter() - began)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


def measured(part: str, *arguments: str) -> list[float]:
    """Run a part of this bench in a process of its own; returns the numbers that it prints."""
    output = run_command([sys.executable, "-m", "bench.exports", "--part", part, *arguments])
    line = next((line for line in output.splitlines() if line.startswith("measured")), "")
    return [float(number) for number in line.split()[1:]]


def main(arguments: list[str]) -> None:
    """Print a row for each way."""
    parser = parser_of("export", __doc__)
    parser.add_argument("--rows", type=int, default=30_000_000)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part == "train":
        return train(options.directory, options.rows)
    if options.part:
        return export(options.directory, options.rows, options.part)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        given = ("--directory", directory, "--rows", str(options.rows))
        measured("train", *given)
        print_row("export", "model, GiB", "memory, GiB", "of the model", "s", "the disk alone, s", head=True)
        for way, name in WAYS.items():
            size, taken, seconds = measured(way, *given)
            floor = plain_seconds(Path(directory), int(size))
            row = (f"{number:.2f}" for number in (size / GIB, taken / GIB, taken / size))
            print_row(name, *row, f"{seconds:.1f}", f"{floor:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
