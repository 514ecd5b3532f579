"""Run as a process of its own: workers and ps as servers in it, and what each part of the input comes to on them.

Prints one JSON object; the tests say what must be in it. Every worker has two CPU devices. ParameterServerStrategy
counts GPUs only, so for `two_replicas` it is told that these are a worker's two GPUs: that is a stand-in.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_ops
from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2Extended

from trainer.cluster.spec import free_addresses
from trainer.core.failures import UserError, explain
from trainer.core.settings.config import Config
from trainer.core.variables import variables_of
from trainer.training.data.input import batch_size, own_train_dataset, train_dataset_fn, worker_train_dataset
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.partitioners import make_partitioner
from trainer.training.placement import report_placement
from trainer.training.release_resources import Iterators
from trainer.training.steps.remote import UNROLLED_STEPS, RemoteStepRunner
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step
from trainer.training.tables.table_lookups import ONCE
from trainer.training.tf_internals.workers import stop_cluster, worker_threads

WORDS = ["a", "b", "c"]
ROWS = 100
SERVERS: list[Any] = []


class Program:
    """Trains a line; the parts that a check is about are overridden."""

    optimizer = staticmethod(lambda: tf.keras.optimizers.SGD(0.1))

    def build_model(self) -> Any:
        model = Line()
        model.compile(self.optimizer())
        return model

    def train_dataset(self, context: Any) -> Any:
        dataset = tf.data.Dataset.range(16).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(context.get_per_replica_batch_size(8))

    eval_dataset = train_dataset


class Line(tf.keras.Model):
    """w * x, without metrics, so that the only scalar of floating point could be the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.add_weight(name="w", shape=[1], initializer="ones")

    def train_step(self, numbers: Any) -> Any:
        x = tf.cast(numbers, tf.float32) / 16
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.w * x - 3 * x) ** 2) / tf.distribute.get_strategy().num_replicas_in_sync
        self.optimizer.minimize(loss, [self.w], tape)
        return {"loss": loss}


def generated() -> Any:
    return tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64))


def called_back(operation: Any, **options: Any) -> Any:
    """Python deep inside: in a function of a function of the pipeline."""

    def inner(number: Any) -> Any:
        return tf.data.Dataset.range(2).map(lambda other: operation(lambda x: x, [number + other], tf.int64, **options))

    return tf.data.Dataset.range(16).interleave(inner)


def looped(context: Any) -> Any:
    """Looks at its data in a loop, which is broken off where it would go on for ever."""
    for turn, _ in enumerate(tf.data.Dataset.range(2)):
        if turn == 9:
            break
    return tf.data.Dataset.range(2)


def adapted(context: Any) -> Any:
    layer = tf.keras.layers.Normalization()
    layer.adapt(tf.data.Dataset.range(16).batch(2))
    return tf.data.Dataset.range(16).map(layer)


def words() -> Any:
    return tf.keras.layers.StringLookup(vocabulary=WORDS)


def making(dataset: Any) -> Any:
    """Return a program whose `train_dataset` returns what the function makes."""
    return type("Making", (Program,), {"train_dataset": lambda self, context: dataset(context)})()


def refused(strategy: Any) -> dict[str, str]:
    """What is said to programs whose pipelines can't run on workers."""
    outside = tf.data.Dataset.range(16)
    with strategy.scope():
        numbers = tf.lookup.KeyValueTensorInitializer(WORDS, tf.range(len(WORDS), dtype=tf.int64))
        vocabulary = tf.lookup.StaticVocabularyTable(numbers, 1)
    programs = {
        "from_generator": making(lambda context: generated().batch(2)),
        "py_function": making(lambda context: called_back(tf.py_function).batch(2)),
        "numpy_function": making(lambda context: called_back(tf.numpy_function).batch(2)),
        "stateless": making(lambda context: called_back(tf.numpy_function, stateful=False).batch(2)),
        "outside": making(lambda context: outside.batch(2)),
        "outside_whole": making(lambda context: outside),
        "table": making(lambda context: tf.data.Dataset.from_tensors(WORDS).map(words())),
        "vocabulary": making(lambda context: tf.data.Dataset.from_tensors(WORDS).map(vocabulary.lookup)),
        "own_operations": making(lambda context: tf.data.Dataset.range(16).map(lambda x: x + 1).batch(2)),
        "loop": making(looped),
        "one_of_them": making(lambda context: tf.data.Dataset.from_tensors(next(iter(tf.data.Dataset.range(16))))),
        "slice": making(lambda context: tf.data.Dataset.from_tensor_slices([*"abcd"][context.input_pipeline_id :: 2])),
        "length": making(lambda context: tf.data.Dataset.range(len(tf.data.Dataset.range(16)))),
        "numpy": making(lambda context: tf.data.Dataset.range(tf.data.Dataset.range(16).cardinality().numpy())),
        "adapt": making(adapted),
    }
    functions = {name: train_dataset_fn(program, 2, strategy) for name, program in programs.items()}
    return {name: refusal(function.get_concrete_function) for name, function in functions.items()}


def refusal(does: Any) -> str:
    try:
        does()
    except UserError as error:
        return str(error)
    return ""


def tables(strategy: Any) -> list[list[int]]:
    """What a worker finds for a, b, c and an unknown word in a table made in the strategy's scope."""

    class Words(Program):
        def build_model(self) -> Any:
            self.lookup = words()
            return super().build_model()

        def train_dataset(self, context: Any) -> Any:
            return tf.data.Dataset.from_tensors([*WORDS, "z"]).map(self.lookup).repeat(2)

    program = Words()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        program.build_model()
    iterator = iter(coordinator.create_per_worker_dataset(train_dataset_fn(program, 2, strategy)))
    found = [coordinator.schedule(tf.function(lambda it: next(it)), args=(iterator,)) for _ in range(4)]
    coordinator.join()
    return [value.fetch().tolist() for value in found]


def placement(resolver: Any, **settings: Any) -> dict[str, Any]:
    """Where the shards of a table and its optimizer's slots lie."""
    config = Config(program="a:B", **settings)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=make_partitioner(config, 2))
    with strategy.scope():
        table = tf.keras.layers.Embedding(ROWS, 8, name="table")
        model = tf.keras.Sequential([tf.keras.layers.Input((1,)), table])
        model.compile(tf.keras.optimizers.Adagrad())
        model.optimizer.build(model.trainable_variables)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainer.training.placement")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    report_placement(config, model, 2)
    logger.removeHandler(handler)
    rows: dict[str, list[int]] = {}
    for variable in variables_of(model):
        if variable.shape.rank == 2:
            kind = "slots" if "accumulator" in variable.name else "shards"
            rows.setdefault(kind, []).append(int(variable.shape[0]))
    return {**rows, "report": records}


def asks_once(strategy: Any, optimizer: Any) -> dict[str, bool]:
    """Say of what a run traces whether a worker asks for each row of a table once, and whether it sends more numbers.

    tf_keras's own optimizer makes rows unique, and sends what it finds.
    """

    class Table(Program):
        def build_model(self) -> Any:
            model = tf.keras.Sequential([tf.keras.layers.Input((1,)), tf.keras.layers.Embedding(ROWS, 8)])
            model.compile(optimizer, "mse")
            return model

        def train_dataset(self, context: Any) -> Any:
            return tf.data.Dataset.range(16).map(lambda number: (number[tf.newaxis], 1.0)).batch(8)

    graph = RemoteStepRunner(Config(program="a:B"), Table(), strategy, 1)._call.graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return {
        "once": any(ONCE in node.name for node in nodes),
        "again": any(node.op == "Unique" and f"{type(optimizer).__name__}/" in node.name for node in nodes),
    }


def learning_rate(strategy: Any, optimizer: Any, change: float | None) -> dict[str, Any]:
    """Train 4 steps and some more, the rate changed between, and do the same in this process alone."""

    class Rated(Program):
        pass

    Rated.optimizer = staticmethod(optimizer)
    program = Rated()
    runner = RemoteStepRunner(Config(program="a:B"), program, strategy, 1)
    element = runner._data.iterator_spec
    plain = trace_call(strategy, trace_step(strategy, runner.model, element), runner.step, element)
    alone = program.build_model()
    whole = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    batches = iter(program.train_dataset(whole).repeat())
    # Less than a round of steps, one step, a round and what is left over.
    for steps in (3, 1, UNROLLED_STEPS + 2):
        if change and steps > 3:
            for model in (runner.model, alone):
                tf.keras.backend.set_value(model.optimizer.lr, change)
        runner.call(steps)
        runner.join()
        for _ in range(steps):
            alone.train_step(next(batches))
    return {
        "steps": int(runner.step.numpy()),
        "trained": runner.model.w.numpy().tolist(),
        "alone": alone.w.numpy().tolist(),
        "rate": float(tf.keras.backend.get_value(runner.model.optimizer.lr)),
        "rate_alone": float(tf.keras.backend.get_value(alone.optimizer.lr)),
        "used_by_keras_alone": len(used_each_step(plain) - used_each_step(runner._call)),
        "used_in_addition": len(used_each_step(runner._call) - used_each_step(plain)),
        "kept": sorted(tracked(runner.model.optimizer)),
        "kept_alone": sorted(tracked(alone.optimizer)),
    }


def used_each_step(call: Any) -> set[int]:
    """The variables and other resources that the loops over the steps use."""
    loops = [operation for operation in call.graph.get_operations() if operation.type in ("While", "StatelessWhile")]
    assert loops
    inputs = {tensor.ref() for loop in loops for tensor in loop.inputs}
    return {id(outside) for outside, inside in call.graph.captures if inside.ref() in inputs}


def tracked(optimizer: Any) -> list[str]:
    """The names under which a checkpoint keeps the optimizer's variables."""
    return [name for name, value in optimizer._trackable_children().items() if isinstance(value, tf.Variable)]


def assigned_by_train_step(strategy: Any) -> dict[str, str]:
    """What is said of a train_step that assigns the rate, or a part of a variable."""

    class Setting(Line):
        part = False

        def train_step(self, numbers: Any) -> Any:
            (self.w[:1] if self.part else self.optimizer.learning_rate).assign(0.5)
            return super().train_step(numbers)

    class Sets(Program):
        part = False

        def build_model(self) -> Any:
            model = Setting()
            model.part = self.part
            model.compile(self.optimizer())
            return model

    class SetsPart(Sets):
        part = True

    def error_of(program: Any) -> str:
        try:
            RemoteStepRunner(Config(program="a:B"), program, strategy, 2)
        except Exception as error:
            return str(error) if isinstance(error, UserError) else explain(error)
        return ""

    return {"rate": error_of(Sets()), "part": error_of(SetsPart())}


class Latest(tf.keras.metrics.Mean):
    """A metric whose states can't be added up."""

    def merge_state(self, metrics: Any) -> Any:
        raise NotImplementedError


def metrics(strategy: Any) -> dict[str, Any]:
    """What the metrics say when they are reset again and again with calls in flight: 60 calls of 10 steps, 8 a step."""

    class Measured(Line):
        def __init__(self) -> None:
            super().__init__()
            self.seen = tf.keras.metrics.Sum("seen")
            self.share = tf.keras.metrics.BinaryAccuracy("share")
            self.latest = Latest("latest")

        def train_step(self, numbers: Any) -> Any:
            outputs = super().train_step(numbers)
            ones = tf.ones_like(numbers, tf.float32)
            self.seen.update_state(ones)
            self.share.update_state(ones, ones)
            self.latest.update_state(ones)
            values = {metric.name: metric.result() for metric in (self.seen, self.share, self.latest)}
            return {**outputs, **values, "own": tf.reduce_max(numbers)}

    class Tells(Program):
        def build_model(self) -> Any:
            model = Measured()
            model.compile(tf.keras.optimizers.SGD(0.0))
            return model

        def train_dataset(self, context: Any) -> Any:
            return super().train_dataset(context).repeat()

    runner = RemoteStepRunner(Config(program="a:B"), Tells(), strategy, 2)
    waiting = [runner.call(10) for _ in range(60)]
    readings = []
    while waiting:
        ended = runner.returned()
        waiting = [call for call in waiting if call not in ended]
        if ended:
            readings.append(fetch_numbers(runner.aggregate_outputs(ended[-1].outputs)))
            runner.reset_metrics()
    state = [float(tf.reduce_sum(weight)) for weight in [*runner.model.seen.weights, *runner.model.share.weights]]
    return {"said": readings, "on_the_ps": state}


def two_replicas(resolver: Any) -> dict[str, Any]:
    """One step of a worker whose two devices each take a batch; then fit's dataset."""
    real = ParameterServerStrategyV2Extended._set_num_gpus, ParameterServerStrategyV2Extended.worker_devices
    ParameterServerStrategyV2Extended._set_num_gpus = lambda self: setattr(self, "_num_gpus_per_worker", 2)
    ParameterServerStrategyV2Extended.worker_devices = property(lambda self: ("/device:CPU:0", "/device:CPU:1"))
    try:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        program = Program()
        runner = RemoteStepRunner(Config(program="a:B"), program, strategy, 2)
        call = runner.call(1)
        runner.join()
        first = fetch_numbers(call.outputs)
        creator = tf.keras.utils.experimental.DatasetCreator(lambda _: worker_train_dataset(program, 2, strategy))
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        for_fit = coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(creator, options=creator.input_options)
        )
        own = coordinator.create_per_worker_dataset(train_dataset_fn(program, 2, strategy))
        batches = {name: pair(coordinator, strategy, iter(data)) for name, data in {"fit": for_fit, "own": own}.items()}
        return {
            "element": runner.element_spec.shape.as_list(),
            "steps": int(runner.step.numpy()),
            "iterations": int(runner.model.optimizer.iterations.numpy()),
            "w": float(runner.model.w.numpy()[0]),
            "loss": first["loss"],
            **batches,
        }
    finally:
        ParameterServerStrategyV2Extended._set_num_gpus, ParameterServerStrategyV2Extended.worker_devices = real


def pair(coordinator: Any, strategy: Any, iterator: Any) -> list[list[int]]:
    """The batches of both replicas in a worker's first step."""

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.experimental_local_results(strategy.run(lambda batch: batch, args=(next(iterator),)))

    value = coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    return [batch.tolist() for batch in value.fetch()]


class Member:
    """One of two processes in step, as far as dividing the data goes: TensorFlow's own operation does that."""

    def __init__(self, number: int) -> None:
        self.number = number

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return input_ops.auto_shard_dataset(dataset, 2, self.number, 2)


def divided() -> dict[str, Any]:
    """What each of two processes reads of 8 lines in 1 or 2 files, or of a range of 8, or why not."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        files = [str(Path(directory) / name) for name in ("first", "second")]
        for number, file in enumerate(files):
            Path(file).write_text("".join(f"{line}\n" for line in range(4 * number, 4 * number + 4)))
        sources = {
            "2 files": lambda: tf.data.TextLineDataset(files).map(tf.strings.to_number),
            "1 file": lambda: tf.data.TextLineDataset(files[:1]).map(tf.strings.to_number),
            "no file": lambda: tf.data.Dataset.range(8),
        }
        for sharding in ("auto", "file", "data", "off"):
            config = Config(program="a:B", strategy="multi_worker_mirrored", input_sharding=sharding)
            for name, source in sources.items():
                program = making(lambda context, source=source: source().shard(context.num_input_pipelines, 0).batch(2))
                found[f"{sharding}, {name}"] = [read_two(config, program, Member(number)) for number in (0, 1)]
    return found


def read_two(config: Config, program: Any, strategy: Any) -> Any:
    try:
        return [batch.tolist() for batch in own_train_dataset(config, program, strategy).take(2).as_numpy_iterator()]
    except UserError as error:
        return str(error)


def mirrored() -> dict[str, Any]:
    """What two replicas of this process get in two steps, when a program asks for a global batch of 4."""
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    program = making(lambda context: tf.data.Dataset.range(10).batch(context.get_per_replica_batch_size(4)))
    found = {}
    for sharding in ("program", "auto", "off"):
        config = Config(program="a:B", strategy="mirrored", input_sharding=sharding)
        batches = iter(own_train_dataset(config, program, strategy))
        found[sharding] = [[part.numpy().tolist() for part in next(batches).values] for _ in range(2)]
    return found


def batch_sizes() -> dict[str, int | None]:
    """What is known of the batches of pipelines that are traced."""
    pipelines = {
        "batch": lambda data: data.batch(4),
        "remainder dropped": lambda data: data.batch(4, drop_remainder=True),
        "padded": lambda data: data.padded_batch(4),
        "batches of batches": lambda data: data.batch(2).batch(3),
        "batches of one size twice": lambda data: data.batch(4).map(tf.identity).unbatch().batch(4),
        "none": lambda data: data,
    }
    found = {}
    for name, pipeline in pipelines.items():
        with tf.Graph().as_default() as graph:
            pipeline(tf.data.Dataset.range(16))
            found[name] = batch_size(graph)
    return found


def start_servers() -> tuple[list[str], list[str]]:
    """Start two workers and two ps; returns their addresses."""
    addresses = free_addresses(4)
    workers, servers = addresses[:2], addresses[2:]
    spec = tf.train.ClusterSpec({"worker": workers, "ps": servers})
    options = tf.compat.v1.ConfigProto(device_count={"CPU": 2}, inter_op_parallelism_threads=64)
    for job in ("worker", "ps"):
        for index in (0, 1):
            SERVERS.append(tf.distribute.Server(spec, job_name=job, task_index=index, config=options))
    return workers, servers


def resolve(workers: list[str], servers: list[str]) -> Any:
    spec = tf.train.ClusterSpec({"worker": workers, "ps": servers})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def check() -> dict[str, Any]:
    own = {"divided": divided(), "mirrored": mirrored(), "batch_sizes": batch_sizes()}
    workers, servers = start_servers()
    resolver = resolve(workers, servers)
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    placements = {
        "min_size": placement(resolver, partitioner="min_size", partitioner_min_bytes=1024),
        "min_size_larger": placement(resolver, partitioner="min_size"),
        "max_size": placement(resolver, partitioner="max_size", partitioner_max_bytes=1024),
        "fixed_shards": placement(resolver, partitioner="fixed_shards", partitioner_shards=3),
        "none": placement(resolver, partitioner="none"),
    }
    replicas = two_replicas(resolver)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with worker_threads() as threads:
        checked = {
            **own,
            "placement": placements,
            "two_replicas": replicas,
            "refused": refused(strategy),
            "tables": tables(strategy),
            "metrics": metrics(strategy),
            "assigned": assigned_by_train_step(strategy),
        }
    # A strategy for other members frees the devices on which the refused program's iterators are being made.
    stop_cluster(tf.distribute.coordinator.ClusterCoordinator(strategy))
    assert threads
    assert Iterators([], [], [], threads).are_unused(60)
    # With one worker the order of the steps is known.
    resolver = resolve(workers[:1], servers)
    splitting = make_partitioner(Config(program="a:B", partitioner_min_bytes=64), len(servers))
    split = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=splitting)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return {
        **checked,
        "asks_once": {
            "plain": asks_once(split, tf.keras.optimizers.SGD(0.1)),
            "clipped": asks_once(split, tf.keras.optimizers.SGD(0.1, clipnorm=1.0)),
            "whole": asks_once(strategy, tf.keras.optimizers.SGD(0.1)),
        },
        "rates": {
            "constant": learning_rate(strategy, lambda: tf.keras.optimizers.SGD(0.1), 0.02),
            "decayed_weights": learning_rate(strategy, lambda: tf.keras.optimizers.AdamW(0.1, weight_decay=0.1), 0.02),
            "schedule": learning_rate(strategy, lambda: tf.keras.optimizers.SGD(schedule), None),
        },
    }


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(check()))
    os._exit(0)
