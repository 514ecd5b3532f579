"""Run as a coordinator on servers that run already: take over what is there, or not, and train until killed.

    handover_check.py PAUSE [--option value]...

Prints a JSON line when it begins to train, one at each step that it reaches, and one with a digest of all values while
the file PAUSE is there: then it makes no calls.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

from trainer.core.runtime import prepare_tensorflow

prepare_tensorflow()

import tensorflow as tf  # noqa: E402

from trainer.cluster.spec import ClusterConfig  # noqa: E402
from trainer.core.failures import is_infrastructure  # noqa: E402
from trainer.core.settings.config import Config  # noqa: E402
from trainer.training.handover import Handover, carry  # noqa: E402
from trainer.training.steps.remote import RemoteStepRunner  # noqa: E402
from trainer.training.strategies import make_strategy  # noqa: E402

WORDS = [f"word{number}" for number in range(64)]
OPTIMIZERS = {
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
    "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    "sgd": lambda: tf.keras.optimizers.SGD(0.01),
}


class Program:
    """A model with something of all that lies on ps: shards, slots, metrics, averages, a generator, a table."""

    def __init__(self, options):
        self._options = options

    def build_model(self):
        word = tf.keras.Input((), dtype=tf.string)
        numbers = tf.keras.layers.StringLookup(vocabulary=WORDS)(word)
        vectors = tf.keras.layers.Embedding(self._options.rows, 16, name="table")(numbers)
        hidden = tf.keras.layers.Dense(self._options.units, activation="relu")(vectors)
        hidden = tf.keras.layers.BatchNormalization()(tf.keras.layers.Dropout(0.1, seed=1)(hidden))
        model = tf.keras.Model(word, tf.keras.layers.Dense(1)(hidden))
        model.compile(optimizer=OPTIMIZERS[self._options.optimizer](), loss="mse", metrics=["mae"])
        model.generator = tf.random.Generator.from_seed(1)
        if self._options.mutable:
            model.mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
        return model

    def train_dataset(self, context):
        def example(number):
            word = tf.gather(WORDS, tf.cast(number % len(WORDS), tf.int32))
            return tf.repeat(word, 8), tf.fill([8, 1], tf.cast(number % 7, tf.float32))

        return tf.data.Dataset.range(1 << 30).map(example)


def say(**what):
    print(json.dumps(what), flush=True)


def digest(model, step):
    total = hashlib.sha256()
    for key, variable in carry(model, step).items():
        total.update(key.encode() + variable.numpy().tobytes())
    return total.hexdigest()


def state(runner):
    return {"step": int(runner.step.numpy()), "digest": digest(runner.model, runner.step)}


def make(options, cluster, servers):
    """Return what trains, taken over if that is possible, and the handover."""
    config = Config(program="p:P", strategy="parameter_server", partitioner_min_bytes=1024)
    strategy = make_strategy(config, cluster)
    handover = Handover(options.run, options.program, len(cluster.jobs["ps"]), servers)
    runner = RemoteStepRunner(config, Program(options), strategy, cluster.workers)
    began = time.monotonic()
    taken = handover.take_over(runner.model, runner.step, options.at_least)
    seconds = time.monotonic() - began
    return runner, handover, {"taken": taken, "take_seconds": seconds}


def survey(options, cluster, servers):
    """Return what could be taken for which model, all with the same strategy."""
    config = Config(program="p:P", strategy="parameter_server", partitioner_min_bytes=1024)
    strategy = make_strategy(config, cluster)
    cases = {
        "other shapes": {"units": 16},
        "another partition": {"rows": 70},
        "another optimizer": {"optimizer": "sgd"},
        "a table that training changes": {"mutable": True},
        "an older step than the newest checkpoint's": {"at_least": 1_000_000},
        "the same": {},
        "another run": {"run": "another"},  # the last, since its handover forgets what is there
    }
    found = {}
    for name, changes in cases.items():
        changed = argparse.Namespace(**{**vars(options), **changes})
        handover = Handover(changed.run, changed.program, len(cluster.jobs["ps"]), servers)
        runner = RemoteStepRunner(config, Program(changed), strategy, cluster.workers)
        found[name] = handover.take_over(runner.model, runner.step, changed.at_least)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pause", type=Path)
    parser.add_argument("--run", default="a")
    parser.add_argument("--program", default="p:P")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--units", type=int, default=32)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--at-least", type=int, default=0)
    parser.add_argument("--rate", type=float)
    parser.set_defaults(mutable=False)
    parser.add_argument("--no-offer", action="store_true", help="die before anything is left to the next one")
    parser.add_argument("--survey", action="store_true", help="only say what could be taken")
    parser.add_argument("--set-aside", action="store_true", help="go on with fewer workers in this process")
    options = parser.parse_args()
    cluster = ClusterConfig.from_tf_config(os.environ["TF_CONFIG"])
    servers = list(cluster.servers.values())
    if options.survey:
        say(survey=survey(options, cluster, servers))
        os._exit(0)
    runner, handover, facts = make(options, cluster, servers)
    say(**facts, **state(runner))
    if options.no_offer:
        os._exit(0)
    began = time.monotonic()
    handover.offer(runner.model, runner.step)
    say(offer_seconds=time.monotonic() - began)
    if options.rate:
        runner.model.optimizer.learning_rate = options.rate
        handover.refresh()
    if options.set_aside:
        runner.call(5)
        runner.join()
        say(before=state(runner))
        handover.set_aside(runner.copy)
        iterators = runner.close()
        handover.release()
        del runner, iterators
        jobs = {**cluster.jobs, "worker": cluster.jobs["worker"][:1]}
        runner, handover, facts = make(options, ClusterConfig(jobs, "chief", 0), servers)
        say(**facts, after=state(runner))
        handover.offer(runner.model, runner.step)
    try:
        while True:
            if options.pause.exists():
                say(paused=state(runner))
                time.sleep(0.3)
                continue
            runner.call(5)
            runner.call(5)
            runner.join()
            say(trained=int(runner.step.numpy()))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:300], infrastructure=is_infrastructure(error))
        os._exit(1)


main()
