"""What a checkpoint costs the training, and the ps: a table with a slot on two ps, saved while one worker trains.

The cost is the training time that a window with a save in it has lost against the windows before and after it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import LocalCluster

if TYPE_CHECKING:
    from trainer.run.saves.checkpoint_state import CheckpointState
    from trainer.run.saves.checkpoints import Checkpoints
    from trainer.training.steps.remote import RemoteStepRunner

WIDTH = 64
WINDOW_SECONDS = 6.0
BLOCK_SECONDS = 0.3
DEADLINE = 1800.0


class TableProgram:
    """A program whose variables are nearly all one table, of which a step changes a few rows."""

    def build_model(self) -> Any:
        import tensorflow as tf

        # Half of it for the table, half for Adagrad's slot.
        rows = int(os.environ["BENCH_MIB"]) * 2**20 // (2 * 4 * WIDTH)
        model = tf.keras.Sequential([tf.keras.layers.Embedding(rows, WIDTH), tf.keras.layers.Dense(1)])
        model.compile(optimizer=tf.keras.optimizers.Adagrad(0.01), loss="mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        import tensorflow as tf

        return tf.data.Dataset.range(32 * 64).map(lambda row: (row, 1.0)).repeat().batch(32)

    eval_dataset = train_dataset


def train_for(runner: RemoteStepRunner, block: int, seconds: float) -> float:
    """Train for a while in calls of so many steps; returns the speed (steps/s)."""
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        runner.call(block)
        runner.join()
        steps += block
    return steps / (time.monotonic() - began)


def cost(train: Callable[[float], float], checkpoints: Checkpoints, *, wait: bool) -> tuple[float, float]:
    """Return what a save takes of the training, and how long it holds it up (s)."""
    before = train(WINDOW_SECONDS)
    began = time.monotonic()
    checkpoints.save_and_wait() if wait else checkpoints.save()
    held = time.monotonic() - began
    during = train(WINDOW_SECONDS - held) * (WINDOW_SECONDS - held) / WINDOW_SECONDS
    checkpoints.settle()
    usual = statistics.mean([before, train(WINDOW_SECONDS)])
    return WINDOW_SECONDS * (1 - during / usual), held


def show_memory(
    train: Callable[[float], float], checkpoints: Checkpoints, saves: int, pids: list[int], seen: list[float]
) -> None:
    """Save again and again; print what a ps has taken before, after the first save, and later."""
    print()
    print_row(
        "RSS of a ps, MiB", "before", "after the first save", f"after {saves // 2} more", f"after {saves}", head=True
    )
    for number in range(saves // 2 * 2):
        if number == saves // 2:
            seen.append(resident(pids))
        checkpoints.save()
        train(BLOCK_SECONDS)
    checkpoints.settle()
    print_row("", *(f"{value:.0f}" for value in (*seen, resident(pids))))


def coordinate(rounds: int, saves: int, shared: str, pids: list[int]) -> None:
    """Train, save and measure, as the coordinator of the cluster in TF_CONFIG."""
    from trainer.cluster.spec import ClusterConfig
    from trainer.core.program import load_program
    from trainer.core.settings.config import Config
    from trainer.run.directory import RunDirectory
    from trainer.run.saves.checkpoints import Checkpoints
    from trainer.training.steps.remote import RemoteStepRunner
    from trainer.training.strategies import make_strategy

    cluster = ClusterConfig.from_tf_config(os.environ["TF_CONFIG"])
    config = Config(program="bench.saving:TableProgram", run="saving", shared_dir=shared, checkpoints_kept=3)
    program = load_program(config.program, config.program_args)
    runner = RemoteStepRunner(config, program, make_strategy(config, cluster), cluster.workers)
    written: list[float] = []
    checkpoints = Checkpoints(
        RunDirectory(shared, "saving"),
        CheckpointState(runner.model, runner.step),
        config,
        saved=lambda step, seconds, error: written.append(seconds),
    )
    block = calibrate(runner)

    train = partial(train_for, runner, block)
    train(WINDOW_SECONDS)
    start = resident(pids)
    checkpoints.save_and_wait()
    first = resident(pids)
    print_row("save", "holds the training up, s", "on disk after, s", "costs, s", "at one a minute, %", head=True)
    for name, wait in (("that is waited for", True), ("beside the training", False)):
        written.clear()
        costs, held = zip(*(cost(train, checkpoints, wait=wait) for _ in range(rounds)), strict=True)
        median = statistics.median(costs)
        cells = (statistics.median(held), statistics.median(written), median, 100 * median / 60)
        print_row(name, *(f"{cell:.2f}" for cell in cells))
    show_memory(train, checkpoints, saves, pids, [start, first])
    os._exit(0)


def calibrate(runner: Any) -> int:
    """Return how many steps a block takes."""
    for steps in (10, 50):
        began = time.monotonic()
        runner.call(steps)
        runner.join()
    return max(1, round(50 * BLOCK_SECONDS / (time.monotonic() - began)))


def resident(pids: list[int]) -> float:
    """Return the mean resident memory of the processes (MiB)."""
    return statistics.mean(
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 for pid in pids
    )


def main(arguments: list[str]) -> None:
    parser = parser_of("saving", __doc__)
    parser.add_argument("--mib", type=int, default=200, help="size of the checkpoint (default: 200)")
    parser.add_argument("--rounds", type=int, default=8, help="saves of each kind that are measured (default: 8)")
    parser.add_argument("--saves", type=int, default=100, help="saves over which memory is watched (default: 100)")
    parser.add_argument("--shared", help=argparse.SUPPRESS)
    parser.add_argument("--pids", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ["BENCH_MIB"] = str(options.mib)
    if options.pids:
        return coordinate(options.rounds, options.saves, options.shared, options.pids)
    print(f"{options.mib} MiB on 2 ps, 1 worker\n", flush=True)
    with (
        scratch_directory() as directory,
        LocalCluster(workers=1, servers=2, directory=directory).serving() as cluster,
    ):
        pids = [str(task.pid) for task in cluster.tasks if task.name.startswith("ps")]
        command = ("-m", "bench.saving", *arguments, "--shared", str(directory), "--pids", *pids)
        chief = cluster.start("chief", 0, command=command)
        ended: Callable[[], bool] = lambda: chief.process.poll() == 0  # noqa: E731
        chief.until(ended, "it had measured", deadline=DEADLINE)
        print("\n".join(line for line in chief.output().splitlines() if line.startswith("|") or not line))


if __name__ == "__main__":
    main(sys.argv[1:])
