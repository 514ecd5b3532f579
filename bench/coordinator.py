"""How many workers one coordinator can feed: its processor time for a call, and its memory, by number of workers.

The workers are real servers that have nothing to do: a call is one step that computes nothing. They share this machine
with the coordinator, so that its processor time says more than the calls of a second. `at 0.5 s` has the same workers
in calls that wait for half a second, as calls of a training last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.commands import run_command
from bench.options import parser_of
from bench.tables import print_row
from bench.tasks import ROOT, clean_environment
from trainer.tasks.local import local_cluster

if TYPE_CHECKING:
    from trainer.training.steps.remote import RemoteStepRunner

WORKERS = (8, 32, 64)
CALL_SECONDS = 0.5
WARM_CALLS = 2  # of each worker
WARM_SECONDS = 2.0  # after these
SECONDS = 10.0


def measure(workers: int) -> dict[str, dict[str, float]]:
    """Start so many workers and a coordinator; returns what it says of empty calls and of those of half a second."""
    jobs = local_cluster(workers, 1)
    servers = subprocess.Popen(
        [sys.executable, "-m", "bench.many_servers", json.dumps(jobs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environment(),
        cwd=ROOT,
        text=True,
    )
    try:
        assert servers.stdout is not None
        assert "all serve" in servers.stdout.readline(), "bench: the servers did not start"
        coordinate = [sys.executable, "-m", "bench.coordinator", "--coordinate", json.dumps(jobs)]
        found: dict[str, dict[str, float]] = json.loads(run_command(coordinate, clean_environment()).splitlines()[-1])
        return found
    finally:
        servers.kill()
        servers.wait()


def program_of(microseconds: int) -> Any:
    """Return a program whose steps wait for so long, and do nothing."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    class Nothing(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.add_weight(name="weight", shape=())

        def call(self, batch: tf.Tensor) -> tf.Tensor:
            return batch

        def train_step(self, data: Any) -> dict[str, tf.Tensor]:
            pause = data[0]
            waited = tf.data.Dataset.range(1).apply(sleep(pause)).take(1).get_single_element()
            with tf.control_dependencies([waited]):
                return {"loss": tf.constant(0.0)}

    class Program:
        def build_model(self) -> tf.keras.Model:
            model = Nothing()
            model.compile("sgd", "mse")
            return model

        def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
            pause = tf.constant(microseconds, tf.int64)
            return tf.data.Dataset.range(1).map(lambda number: (pause + 0 * number, 0.0))

        eval_dataset = train_dataset

    return Program()


def give_calls(runner: RemoteStepRunner, workers: int) -> dict[str, float]:
    """Give calls of one step for a while; returns calls and processor seconds a second, and memory (MiB)."""
    from trainer.training.loop.scheduler import AsyncSchedule
    from trainer.training.steps.runner import CALL_POLL_SECONDS

    schedule = AsyncSchedule(1, workers)
    schedule.begin(0, 10**9)
    returns = [0] * workers
    since = processor = calls = 0.0
    # A pause of the whole machine may last longer than what is measured.
    while not since or time.monotonic() - since < SECONDS or calls < workers:
        if not since and min(returns) >= WARM_CALLS:
            since, processor, calls = time.monotonic() + WARM_SECONDS, time.process_time(), 0
        if size := schedule.size(time.monotonic()):
            runner.call(size)
            schedule.given(size)
            continue
        returned = runner.returned()
        if time.monotonic() < since:
            processor = time.process_time()
        else:
            calls += len(returned)
        for call in returned:
            returns[call.worker] += 1
            schedule.returned(call.steps, call.began, call.worker, time.monotonic())
        if not returned:
            time.sleep(CALL_POLL_SECONDS)
    seconds = time.monotonic() - since
    return {
        "calls": calls / seconds,
        "processor": (time.process_time() - processor) / seconds,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def coordinate(jobs: dict[str, list[str]]) -> None:
    """Give calls as the trainer does, and print what they took."""
    from trainer.cluster.spec import ClusterConfig
    from trainer.core.settings.config import Config
    from trainer.training.steps.remote import RemoteStepRunner
    from trainer.training.strategies import make_strategy

    cluster = ClusterConfig(jobs, "chief", 0)
    strategy = make_strategy(Config(program="bench:Nothing"), cluster)
    found = {}
    for name, microseconds in {"empty": 0, "waiting": round(CALL_SECONDS * 1e6)}.items():
        program = program_of(microseconds)
        runner = RemoteStepRunner(Config(program="bench:Nothing"), program, strategy, cluster.workers)
        found[name] = give_calls(runner, cluster.workers)
        runner.join()
    print(json.dumps(found), flush=True)
    os._exit(0)


def main(arguments: list[str]) -> None:
    parser = parser_of("coordinator", __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--coordinate", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.coordinate:
        coordinate(json.loads(options.coordinate))
    print_row(
        "workers",
        "empty calls/s",
        "processor time of one, ms",
        "memory, MiB",
        f"calls/s at {CALL_SECONDS:g} s",
        "of ideal",
        "processors in use",
        head=True,
    )
    for workers in options.workers:
        found = measure(workers)
        empty, waiting = found["empty"], found["waiting"]
        print_row(
            str(workers),
            f"{empty['calls']:.0f}",
            f"{1000 * empty['processor'] / empty['calls']:.2f}",
            f"{empty['memory']:.0f}",
            f"{waiting['calls']:.1f}",
            f"{waiting['calls'] * CALL_SECONDS / workers:.3f}",
            f"{waiting['processor']:.2f}",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
