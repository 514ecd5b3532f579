"""The largest absolute number in a table after some steps: TensorFlow's guide written plainly, and psfleet.

The table has 20,000 rows of 16 numbers, and lies on two ps. An update that another worker's update cuts in two makes
numbers that no order of whole updates makes. One worker's figure stands beside that of several.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import PLAIN_SERVER, TRAINER, LocalCluster, TaskProcess, clean_environment, write_settings
from bench.timeline import read_point

PROGRAM = "bench.programs:TableAny"
ROWS, WIDTH, SERVERS = 20_000, 16, 2
KERAS_3 = "keras3."  # begins the names of its optimizers, which the guide can't use
OPTIMIZERS = ("Adam", "Nadam", "legacy.Adam", "RMSprop", "Ftrl", "Adagrad", "SGD", f"{KERAS_3}Adam")
DEADLINE = 1800.0  # for one training


class Sides:
    """The servers of both sides, and trainings on them."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, workers: int) -> None:
        """Start the servers, which end with the stack."""
        self._directory = directory
        self._runs = itertools.count()
        self._clusters = {
            side: stack.enter_context(self._cluster(side, workers).serving(command=command))
            for side, command in (("guide", PLAIN_SERVER), ("psfleet", TRAINER))
        }

    def _cluster(self, side: str, workers: int) -> LocalCluster:
        (self._directory / side).mkdir()
        return LocalCluster(workers=workers, servers=SERVERS, directory=self._directory / side)

    def guide(self, optimizer: str, workers: int, steps: int) -> float:
        """Train as the guide does, and return the largest number."""
        saved = self._directory / f"guide-{next(self._runs)}"
        command = ("-m", "bench.plain_loop", PROGRAM, str(steps), str(saved))
        task = self._clusters["guide"].start("chief", 0, command, "", workers, **environment(optimizer))
        return self._largest(task, lambda: any(map(read_point, task.output().splitlines())), f"{saved}/ckpt-1")

    def psfleet(self, optimizer: str, workers: int, steps: int) -> float:
        """Train with psfleet's coordinator, and return the largest number."""
        run = f"run-{next(self._runs)}"
        settings = write_settings(self._directory, run, PROGRAM, api="custom_loop", steps=steps)
        more = environment(optimizer)
        task = self._clusters["psfleet"].start("chief", 0, TRAINER, settings, workers, **more)
        saved = self._directory / "runs" / run / "checkpoints" / f"ckpt-{steps}"
        return self._largest(task, lambda: task.process.poll() == 0, str(saved))

    def _largest(self, task: TaskProcess, is_done: Callable[[], bool], saved: str) -> float:
        try:
            task.until(is_done, "it had trained", deadline=DEADLINE)
        finally:
            task.end()  # the guide's would go on, and delete what it saved
        return largest(saved)


def environment(optimizer: str) -> dict[str, str]:
    return {"BENCH_ROWS": str(ROWS), "BENCH_OPTIMIZER": optimizer}


def largest(checkpoint: str) -> float:
    """Return the largest absolute number of the table in a checkpoint."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(checkpoint)
    shapes = reader.get_variable_to_shape_map()
    tables = [key for key, shape in shapes.items() if shape == [ROWS, WIDTH] and "optimizer" not in key.lower()]
    if len(tables) != 1:
        raise SystemExit(f"bench: one table of {ROWS} x {WIDTH} was expected in {checkpoint}, which has {shapes}")
    return float(abs(reader.get_tensor(tables[0])).max())


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("right", __doc__)
    add_names(parser, "optimizer", OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=400, help="of all workers together (default: 400)")
    parser.add_argument("--workers", type=int, default=2, help="beside the figure of one (default: 2)")
    options = parser.parse_args(arguments)
    if options.workers < 2 or options.steps < 1:
        parser.error(f"--workers {options.workers} --steps {options.steps}: give 2 workers or more, and 1 step or more")
    os.environ.update(clean_environment())  # to read checkpoints
    numbers = (1, options.workers)
    print(f"Largest number of a table of {ROWS:,} x {WIDTH} after {options.steps} steps, {SERVERS} ps\n")
    sides = [f"{side}, {count} worker{'s' * (count > 1)}" for side in ("guide", "psfleet") for count in numbers]
    print_row("optimizer", *sides, head=True)
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        both = Sides(stack, directory, options.workers)
        for name in options.optimizer or OPTIMIZERS:
            plain = [f"{both.guide(name, count, options.steps):.4g}" for count in numbers if KERAS_3 not in name]
            ours = [f"{both.psfleet(name, count, options.steps):.4g}" for count in numbers]
            print_row(name, *(plain or [""] * len(numbers)), *ours)


if __name__ == "__main__":
    main(sys.argv[1:])
