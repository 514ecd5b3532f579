"""Wide and deep and DLRM on made-up data of Criteo's shape: psfleet against TensorFlow's guide written plainly.

First how fast: samples a second, of all tasks of a side together and for each processor of the machine, and processor
time. The sides stay beside each other and work in turns, and each worker reads the same batches again and again. One
process that trains alone, with nothing to send, is the floor: on a machine that they share no side can be faster. Then
what is learnt: the AUC of examples that no worker reads, after so many samples, of a training of each side. It stands
beside the AUC of the odds by which clicks were drawn, which no model can exceed but by chance, and the seconds from the
coordinator's start to the checkpoint. Two ps; for the AUC two workers.

The memory of the ps is what both had at the end of the turns, and what went over the wire is what they sent and got.
With faults: `bench/goodput --program recommender`, and with `--dynamic` for dynamic tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.interleaved import against_guide
from bench.options import add_names, parser_of, scratch_directory
from bench.tables import print_row
from bench.tasks import PLAIN_SERVER, TaskProcess, write_settings
from bench.throughput import Bench, Effort
from bench.timeline import read_point

MODELS = ("WideAndDeep", "DLRM")
BATCH = 1024  # of the programs
DEADLINE = 3600.0  # for one training


@dataclasses.dataclass(frozen=True)
class Size:
    """How long is measured: turns of each side, seconds a turn, and steps of each side for the AUC, in three parts."""

    turns: int
    seconds: float
    steps: int


FULL, QUICK = Size(12, 3.0, 6000), Size(3, 3.0, 600)


def settings_of_tables() -> dict[str, dict[str, Any]]:
    """Return the run settings of psfleet's sides: with fixed tables, and with dynamic ones for twice as many rows."""
    from trainer.examples.criteo import KINDS, Criteo

    rows = [min(kind, Criteo().rows) for kind in KINDS]
    return {
        "fixed": {},
        "dynamic": {"dynamic_tables": {f"kind_{n:02}": {"capacity": 2 * count} for n, count in enumerate(rows)}},
    }


def compare_speed(bench: Bench, model: str, size: Size, workers: int) -> None:
    """Print the speed of each side."""
    program, kinds = f"bench.programs:{model}Kept", settings_of_tables()
    names = "guide", *(f"psfleet, {kind}" for kind in kinds), "one process"
    more: Any = {"workers": workers, "floor": True, "traffic": True}
    with against_guide(bench, program, 20, size.turns, size.seconds, *kinds.values(), **more) as sides:
        guide = sides[0].speed()
        for name, side in zip(names, sides, strict=True):
            samples = BATCH * side.speed()
            cells = f"{samples:,.0f}", f"{side.speed() / guide:.2f}", f"{samples / (os.cpu_count() or 1):,.0f}"
            kept = f"{side.resident('ps'):.0f}", side.step_kilobytes()
            print_row(model, str(workers), name, *cells, side.milliseconds(), *kept)


def compare_auc(bench: Bench, model: str, size: Size) -> None:
    """Print a row with the AUC of each side after each third of its samples."""
    program, part = f"bench.programs:{model}", size.steps // 3
    sides = {"guide": train_plainly(bench, program, part)}
    judges = {"guide": Judge(model)}
    for kind, settings in settings_of_tables().items():
        name = f"psfleet, {kind}"
        sides[name] = train_with_psfleet(bench, program, part, kind, settings)
        judges[name] = Judge(model, settings["dynamic_tables"]) if settings else judges["guide"]
    for name, train in sides.items():
        with train as found:
            saved = [found(number * part) for number in (1, 2, 3)]
            aucs = [f"{judges[name].auc(one.prefix):.4f} ({one.seconds:.0f} s)" for one in saved]
        print_row(model, name, *aucs, f"{judges[name].best:.4f}")


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, and how many seconds after the coordinator's start it was there."""

    prefix: str
    seconds: float

    @classmethod
    def at(cls, prefix: Path, began: float) -> SavedCheckpoint:
        return cls(str(prefix), prefix.with_name(f"{prefix.name}.index").stat().st_mtime - began)


Found = Callable[[int], SavedCheckpoint]


@contextlib.contextmanager
def train_plainly(bench: Bench, program: str, part: int) -> Iterator[Found]:
    """Train as the guide does, three epochs; gives what finds the checkpoint of a step."""
    directory = bench.directory / f"guide-{program.rpartition(':')[2]}"
    with bench.cluster(workers=2, servers=2).serving(command=PLAIN_SERVER) as cluster:
        began = time.time()
        task = cluster.start("chief", 0, ("-m", "bench.plain_loop", program, str(part), str(directory)))
        until_step(task, 3 * part)
        task.end()  # it would go on, and delete what it saved
    yield lambda step: SavedCheckpoint.at(directory / f"ckpt-{step // part}", began)


@contextlib.contextmanager
def train_with_psfleet(
    bench: Bench, program: str, part: int, kind: str, settings: Mapping[str, Any]
) -> Iterator[Found]:
    """Train with psfleet's coordinator, three epochs; gives what finds the checkpoint of a step."""
    run = f"auc-{program.rpartition(':')[2]}-{kind}"
    # An epoch whose end is evaluated ends with exact steps; one batch is enough for that.
    wanted: dict[str, Any] = {"epoch_steps": part, "checkpoint_steps": part, "checkpoint_seconds": 0, **settings}
    wanted |= {"evaluation": "inline", "export": False}
    written = write_settings(bench.directory, run, program, steps=3 * part, **wanted)
    with bench.cluster(workers=2, servers=2).serving() as cluster:
        began = time.time()
        task = cluster.start("chief", 0, settings=written)
        task.until(lambda: task.process.poll() == 0, "it had trained", deadline=DEADLINE)
    checkpoints = bench.directory / "runs" / run / "checkpoints"
    yield lambda step: SavedCheckpoint.at(checkpoints / f"ckpt-{step}", began)


def until_step(task: TaskProcess, step: int) -> None:
    def has_come() -> bool:
        points = filter(None, map(read_point, task.output().splitlines()))
        return any(point.step >= step for point in points)

    task.until(has_come, "it had trained", deadline=DEADLINE)


class Judge:
    """Has a model of its own, into which it reads the weights of a checkpoint, and examples that no worker reads."""

    def __init__(self, model: str, tables: Collection[str] = ()) -> None:
        """`tables` are the layers that had dynamic tables."""
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported
        import tensorflow as tf

        from bench import programs
        from trainer.examples.criteo import SCATTERED, true_logit
        from trainer.training.tables.dynamic.served import ServedTables

        program, self._tables = getattr(programs, model)(), ServedTables(tables)
        with self._tables.of_layers():
            self._model = program.build_model()
        self._batches = list(program.eval_dataset(tf.distribute.InputContext()))
        self.best = self._measure(lambda given: true_logit(given["numbers"], given["ids"] // SCATTERED))

    def auc(self, checkpoint: str) -> float:
        """Return the AUC of the weights in a checkpoint of either side."""
        import tensorflow as tf

        read = tf.train.Checkpoint(model=self._model).read(checkpoint)
        read.assert_existing_objects_matched().expect_partial()
        self._tables.restore(checkpoint)
        return self._measure(tf.function(lambda given: self._model(given, training=False)))

    def _measure(self, logit: Callable[[Any], Any]) -> float:
        import tensorflow as tf

        auc = tf.keras.metrics.AUC(num_thresholds=2000, from_logits=True)
        for given, clicked in self._batches:
            auc.update_state(clicked, logit(given))
        return float(auc.result())


def main(arguments: list[str]) -> None:
    parser = parser_of("recommender", __doc__)
    add_names(parser, "model", MODELS, default="both, with --quick the first")
    parser.add_argument("--quick", action="store_true", help="measure and train for a shorter time")
    parser.add_argument("--only", choices=("speed", "auc"), help="one of the two parts")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="whose speed is measured (default: 2)")
    options = parser.parse_args(arguments)
    size, models = (QUICK, MODELS[:1]) if options.quick else (FULL, MODELS)
    models = options.model or models
    print(f"13 numbers and 26 ids an example, batches of {BATCH:,}, 2 ps, {os.cpu_count()} processors\n")
    with scratch_directory() as directory:
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), directory)
        if options.only != "auc":
            heads = ["samples/s", "of the guide's", "samples/s a processor", "ms of processor time a step"]
            heads += ["MiB of both ps", "KB a step, from and to the ps"]
            print_row("model", "workers", "side", *heads, head=True)
            for model in models:
                for workers in options.workers:
                    compare_speed(bench, model, size, workers)
        if options.only != "speed":
            print()
            counts = [f"AUC after {BATCH * number * (size.steps // 3):,} samples" for number in (1, 2, 3)]
            print_row("model", "side", *counts, "of the true odds", head=True)
            for model in models:
                compare_auc(bench, model, size)


if __name__ == "__main__":
    main(sys.argv[1:])
