"""Read file caches on two workers of servers in this process; print what came of each case, as JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path

from trainer import testing  # before TensorFlow: it chooses the Keras

import tensorflow as tf  # isort: skip

from checks import tried  # isort: skip
from trainer.core.settings.config import Config  # isort: skip
from trainer.core.failures import UserError  # isort: skip
from trainer.training.data.data_service import DataService  # isort: skip
from trainer.training.data.input import ReadingPlan, element_spec_of, eval_dataset, own_train_dataset, train_dataset_fn  # isort: skip
from trainer.training.data.worker_files import WorkerFiles, number_of, reject_unwritable, tag_of  # isort: skip

PLACE = Path(tempfile.mkdtemp(prefix="psfleet-files-"))
SOURCE, CACHE = PLACE / "source.txt", PLACE / "cache" / "numbers"


class Cached:
    """Numbers of a file, through a cache of one name for all readers."""

    def numbers(self, context, cache=str(CACHE)):
        lines = tf.data.TextLineDataset(str(SOURCE)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return lines.map(lambda line: tf.strings.to_number(line, tf.int64)).cache(cache).batch(2)

    train_dataset = eval_dataset = numbers


class Twice(Cached):
    def train_dataset(self, context):
        both = tuple(self.numbers(context, f"{CACHE}.twice") for _ in range(2))
        return tf.data.Dataset.zip(both).map(lambda one, _: one)


class Saving(Cached):
    def train_dataset(self, context):
        self.numbers(context).save(str(PLACE / "saved"))
        return self.numbers(context)


class Snapshot(Cached):
    def train_dataset(self, context):
        return self.numbers(context, "").snapshot(str(PLACE / "snapshot"))


class Each(Cached):
    """A cache for each of several files, in a function."""

    def train_dataset(self, context):
        numbers = tf.data.Dataset.range(2).shard(context.num_input_pipelines, context.input_pipeline_id)

        def read(number):
            name = tf.strings.join([str(CACHE), ".each-", tf.strings.as_string(number)])
            return tf.data.Dataset.range(3).map(lambda one: one + 10 * number).cache(name)

        return numbers.interleave(read).batch(3)


def write(*numbers):
    SOURCE.write_text("".join(f"{number}\n" for number in numbers), encoding="utf-8")


def names():
    return sorted(path.name for path in CACHE.parent.iterdir() if path.stat().st_size)


def read(program, strategy, files, batches=4):
    """What each worker reads in its first batches."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    iterator = iter(
        coordinator.create_per_worker_dataset(train_dataset_fn(program, 2, strategy, ReadingPlan(files=files)))
    )

    @tf.function
    def some(iterator):
        where = tf.distribute.coordinator.experimental_get_current_worker_index()
        return where, tf.stack([next(iterator) for _ in range(batches)])

    found = {}
    while len(found) < 2:
        called = coordinator.schedule(some, args=(iterator,))
        coordinator.join()
        where, values = called.fetch()
        found.setdefault(int(where), values.tolist())
    return [found[0], found[1]]


def workers():
    strategy = testing.in_process_cluster(2, 1)
    processes = ["first", "second"]
    files = WorkerFiles("run", lambda worker: processes[worker])
    write(*range(8))
    CACHE.parent.mkdir()
    found = {"own": read(Cached(), strategy, files), "names": names()}
    write(*range(10, 18))
    found["same_process"] = read(Cached(), strategy, files)
    # As a process leaves it that was killed while it wrote.
    prefix = f"{CACHE}.psfleet-run-0-{number_of('killed', ())}-1_0"
    for ending in (".lockfile", ".data-00000-of-00001.tempstate1"):
        Path(prefix + ending).write_text("left behind", encoding="utf-8")
    Path(f"{CACHE}.psfleet-other-0-1-1.index").write_text("of another run", encoding="utf-8")
    processes[0] = "third"
    found["other_process"] = read(Cached(), strategy, files)
    found["names_then"] = names()
    write(*range(8))
    drained = WorkerFiles("run", lambda worker: processes[worker], (0,))
    found["divided"] = [(read(Cached(), strategy, one), len(names())) for one in (drained, files, drained)]
    found["each"] = read(Each(), strategy, files, 2)
    found["snapshot"] = read(Snapshot(), strategy, files)
    found["snapshots"] = sorted(path.name for path in PLACE.glob("snapshot*"))
    found["twice"] = refused(lambda: read(Twice(), strategy, files))
    found["saving"] = refused(lambda: element_spec_of(Saving(), strategy))
    exact = tf.function(train_dataset_fn(Cached(), 2, strategy, ReadingPlan(exact=True, files=files)))
    graph = exact.get_concrete_function().graph.as_graph_def()
    functions = [node.op for one in graph.library.function for node in one.node_def]
    found["service"] = refused(lambda: in_service(strategy))
    found["exact"] = sum(op.startswith("CacheDataset") for op in functions)
    return found


def in_service(strategy):
    service = DataService("localhost:1", "off", "job")
    train_dataset_fn(Cached(), 2, strategy, service=service).get_concrete_function()


def refused(part):
    try:
        try:
            part()
        except tf.errors.AlreadyExistsError as error:
            reject_unwritable(Twice(), error)
    except UserError as error:
        return str(error)
    return "read"


def alone():
    """Two runs in this process, and an evaluation, with one name; an earlier process of one left a whole cache."""
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    write(*range(4))
    found = []
    for run in ("a", "b"):
        config = Config(program="p:P", run=run, strategy="one_device")
        if run == "a":
            left = Path(f"{CACHE}.psfleet-{tag_of(config.shared_dir, run)}-0-{number_of('earlier', range(1))}-1.index")
            left.write_text("left behind", encoding="utf-8")
        batches = iter(own_train_dataset(config, Cached(), strategy))
        found.append([next(batches).numpy().tolist() for _ in range(4)])
    found.append([batch.tolist() for batch in eval_dataset(Cached()).as_numpy_iterator()])
    found.append(left.stat().st_size)
    return found


def main():
    sys.modules["files_check"] = sys.modules["__main__"]
    print(json.dumps({part.__name__: tried(part) for part in (workers, alone)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
