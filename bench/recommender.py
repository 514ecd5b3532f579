"""Wide and deep and DLRM on made-up data of Criteo's shape: psfleet against TensorFlow's guide written plainly.

First how fast: samples a second, of all tasks of a side together and for each processor of the machine, and processor
time. Both sides stay beside each other and work in turns, and each worker reads the same batches again and again. Then
what is learnt: the AUC of examples that no worker reads, after so many samples, of a training of each side. It stands
beside the AUC of the odds by which clicks were drawn, which no model can exceed but by chance. Two workers, two ps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.large_tables import NO_SAVES, milliseconds
from bench.points import read_point
from bench.tables import print_row
from bench.tasks import PLAIN_SERVER, Task
from bench.throughput import Bench, Effort
from bench.turns import Side

MODELS = ("WideAndDeep", "DLRM")
BATCH = 1024  # of the programs
DEADLINE = 3600.0  # for one training


@dataclasses.dataclass(frozen=True)
class Size:
    """How long is measured: turns of each side, seconds a turn, and steps of each side for the AUC, in three parts."""

    turns: int
    seconds: float
    steps: int


FULL, QUICK = Size(12, 3.0, 6000), Size(4, 3.0, 900)


def compare_speed(bench: Bench, model: str, size: Size) -> None:
    """Print a row with the speed of both sides."""
    program = f"bench.programs:{model}Kept"
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(bench.cluster(workers=2, servers=2).serving(command=PLAIN_SERVER))
        guide = Side(cluster, *bench.start_plain(cluster, program, "custom_loop", 20))
        guide.warm_up(bench.effort.warm_up)
        cluster = stack.enter_context(bench.cluster(workers=2, servers=2).serving())
        psfleet = Side(cluster, *bench.start_psfleet(cluster, program, "custom_loop", **NO_SAVES))
        psfleet.warm_up(bench.effort.warm_up)
        for _ in range(size.turns):
            guide.work(size.seconds)
            psfleet.work(size.seconds)
        samples = [BATCH * side.speed() for side in (guide, psfleet)]
        each = [f"{one / (os.cpu_count() or 1):,.0f}" for one in samples]
        ratio = f"{samples[1] / samples[0]:.2f}"
        times = [milliseconds(side) for side in (guide, psfleet)]
        print_row(model, *(f"{one:,.0f}" for one in samples), ratio, *each, *times)


def compare_auc(bench: Bench, model: str, size: Size) -> None:
    """Print a row with the AUC of each side after each third of its samples."""
    program, part = f"bench.programs:{model}", size.steps // 3
    judge = Judge(model)
    for side, train in (("guide", train_plainly), ("psfleet", train_with_psfleet)):
        with train(bench, program, part) as found:
            aucs = [judge.auc(found(number * part)) for number in (1, 2, 3)]
        print_row(model, side, *(f"{auc:.4f}" for auc in aucs), f"{judge.best:.4f}")


Found = Callable[[int], str]


@contextlib.contextmanager
def train_plainly(bench: Bench, program: str, part: int) -> Iterator[Found]:
    """Train as the guide does, three epochs; gives what finds the checkpoint of a step."""
    directory = bench.directory / f"guide-{program.rpartition(':')[2]}"
    with bench.cluster(workers=2, servers=2).serving(command=PLAIN_SERVER) as cluster:
        task = cluster.start("chief", 0, ("-m", "bench.plain_loop", program, str(part), str(directory)))
        until_step(task, 3 * part)
        task.end()  # it would go on, and delete what it saved
    yield lambda step: str(directory / f"ckpt-{step // part}")


@contextlib.contextmanager
def train_with_psfleet(bench: Bench, program: str, part: int) -> Iterator[Found]:
    """Train with psfleet's coordinator, three epochs; gives what finds the checkpoint of a step."""
    run = f"auc-{program.rpartition(':')[2]}"
    settings = bench.directory / f"{run}.json"
    wanted: dict[str, Any] = {"program": program, "run": run, "shared_dir": str(bench.directory), "steps": 3 * part}
    # An epoch whose end is evaluated ends with exact steps; one batch is enough for that.
    wanted |= {"epoch_steps": part, "checkpoint_steps": part, "checkpoint_seconds": 0, "evaluation": "inline"}
    settings.write_text(json.dumps(wanted | {"export": False}), encoding="utf-8")
    with bench.cluster(workers=2, servers=2).serving() as cluster:
        task = cluster.start("chief", 0, settings=str(settings))
        task.until(lambda: task.process.poll() == 0, "it had trained", deadline=DEADLINE)
    yield lambda step: str(bench.directory / "runs" / run / "checkpoints" / f"ckpt-{step}")


def until_step(task: Task, step: int) -> None:
    def has_come() -> bool:
        points = filter(None, map(read_point, task.output().splitlines()))
        return any(point.step >= step for point in points)

    task.until(has_come, "it had trained", deadline=DEADLINE)


class Judge:
    """Has a model of its own, into which it reads the weights of a checkpoint, and examples that no worker reads."""

    def __init__(self, model: str) -> None:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported
        import tensorflow as tf

        from bench import programs
        from trainer.examples.criteo import SCATTERED, true_logit

        program = getattr(programs, model)()
        self._model = program.build_model()
        self._batches = list(program.eval_dataset(tf.distribute.InputContext()))
        self.best = self._measure(lambda given: true_logit(given["numbers"], given["ids"] // SCATTERED))

    def auc(self, checkpoint: str) -> float:
        """Return the AUC of the weights in a checkpoint of either side."""
        import tensorflow as tf

        read = tf.train.Checkpoint(model=self._model).restore(checkpoint)
        read.assert_existing_objects_matched().expect_partial()
        return self._measure(tf.function(lambda given: self._model(given, training=False)))

    def _measure(self, logit: Callable[[Any], Any]) -> float:
        import tensorflow as tf

        auc = tf.keras.metrics.AUC(num_thresholds=2000, from_logits=True)
        for given, clicked in self._batches:
            auc.update_state(clicked, logit(given))
        return float(auc.result())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench/recommender", description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(MODELS)} (default: both)")
    parser.add_argument("--quick", action="store_true", help="measure and train for a shorter time")
    parser.add_argument("--only", choices=("speed", "auc"), help="one of the two parts")
    options = parser.parse_args(arguments)
    if unknown := set(options.model) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}; they are {', '.join(MODELS)}")
    size, models = QUICK if options.quick else FULL, options.model or MODELS
    print(f"13 numbers and 26 ids an example, batches of {BATCH:,}, 2 workers, 2 ps, {os.cpu_count()} processors\n")
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as directory:
        bench = Bench(Effort(repetitions=1, warm_up=6, seconds=0), Path(directory))
        if options.only != "auc":
            heads = [f"{side}, samples/s{a}" for a in ("", " a processor") for side in ("guide", "psfleet")]
            times = [f"{side}, ms of processor time a step" for side in ("guide", "psfleet")]
            print_row("model", *heads[:2], "ratio", *heads[2:], *times, head=True)
            for model in models:
                compare_speed(bench, model, size)
        if options.only != "speed":
            print()
            counts = [f"AUC after {BATCH * number * (size.steps // 3):,} samples" for number in (1, 2, 3)]
            print_row("model", "side", *counts, "of the true odds", head=True)
            for model in models:
                compare_auc(bench, model, size)


if __name__ == "__main__":
    main(sys.argv[1:])
