"""Train models of Keras 3 on servers in this process; print what came of each, as JSON.

What is counted is counted by two workers at once, on two ps: what one of them overwrites would be missing.
"""

import functools
import http.server
import json
import math
import os
import sys
import tempfile
import threading
from pathlib import Path

from trainer import testing  # before TensorFlow: tf.keras is tf_keras

import keras  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import POSTS, Posts, distance, tried  # isort: skip
from trainer.core.failures import UserError  # isort: skip
from trainer.core.settings.config import Config  # isort: skip
from trainer.run.directory import RunDirectory  # isort: skip
from trainer.training.keras.keras3.checkpoint import raw  # isort: skip
from trainer.training.keras.keras3.model import Keras3Model  # isort: skip
from trainer.training.keras.keras3.shards import shards_of  # isort: skip
from trainer.training.keras.keras3.steps import Step  # isort: skip
from trainer.training.loop.callbacks import callbacks_of  # isort: skip
from trainer.training.exports.export import bytes_of_checkpoint  # isort: skip
from trainer.training.steps.model import make_model  # isort: skip

WORDS, WIDTH, BATCH, EPOCH = 64, 8, 8, 20
MOMENTUM = 1 - 1e-4
PLACE = Path(tempfile.mkdtemp(prefix="psfleet-keras3-"))
SPLIT = {"partitioner_min_bytes": 256}


def train(program, steps=20, workers=1, ps=2, directory=None, **settings):
    given = {"evaluation": "none", "seed": 1, "log_seconds": 600.0, **SPLIT, **settings}
    return testing.train(program, steps, workers, ps, directory, **given)


class Counted(keras.layers.Layer):
    """Counts its calls, as people write it: by reading, adding and writing."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign(self.calls + 1.0)
        return inputs


class Queue(keras.layers.Layer):
    """Keeps the last signs that were drawn, as a memory bank keeps examples, and a place in a ring."""

    def build(self, shape):
        self.queue = self.add_weight(name="queue", shape=(8,), initializer="ones", trainable=False)
        self.place = self.add_weight(name="place", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            ones = keras.ops.sign(keras.random.normal((1,)))
            self.queue.assign(keras.ops.concatenate([ones, self.queue[:-1]]))
            self.place.assign((self.place + 1) % 3)
        return inputs


class Examples(keras.metrics.Metric):
    """Counts the examples that it has seen."""

    def __init__(self, name="examples", **more):
        super().__init__(name=name, **more)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, truth, predicted, sample_weight=None):
        self.count.assign(self.count + keras.ops.cast(keras.ops.shape(truth)[0], "float32"))

    def result(self):
        return self.count


class Program:
    """A table of words and a line; each part can be replaced."""

    optimizer = staticmethod(lambda: keras.optimizers.SGD(0.01))
    initializer = "ones"
    found = ()
    model = None

    def layers(self):
        table = keras.layers.Embedding(WORDS, WIDTH, embeddings_initializer=self.initializer, name="table")
        line = keras.layers.Dense(1, kernel_initializer="ones", name="line")
        return [keras.Input((2,), dtype="int64"), table, keras.layers.Flatten(), line]

    def build_model(self):
        self.model = keras.Sequential(self.layers())
        self.model.compile(self.optimizer(), "mse", metrics=["mae"])
        return self.model

    def train_dataset(self, context):
        words = np.random.default_rng(1).integers(WORDS, size=(64, 2))
        target = words.sum(axis=1, keepdims=True).astype(np.float32) / WORDS
        return tf.data.Dataset.from_tensor_slices((words, target)).batch(BATCH).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(4).shard(context.num_input_pipelines, context.input_pipeline_id)

    def callbacks(self):
        return list(self.found)


def weights(model):
    return [np.array(one) for one in model.weights]


def alone(program, steps):
    """The weights that Keras trains to in one process, with whole tables."""
    program.build_model().fit(program.train_dataset(None).take(steps), verbose=0, shuffle=False)
    return weights(program.model)


# Lost updates


class Counting(Program):
    optimizer = staticmethod(lambda: keras.optimizers.Adam(1e-3, use_ema=True))

    def build_model(self):
        words = keras.Input((2,), dtype="int64")
        looked_up = keras.layers.Embedding(WORDS, WIDTH, embeddings_initializer="ones", name="table")(words)
        batches = keras.layers.BatchNormalization(momentum=MOMENTUM, name="batches", center=False, scale=False)
        ones = keras.layers.Lambda(lambda value: keras.ops.ones_like(value))(looked_up)
        line = keras.layers.Flatten()(looked_up + batches(ones))
        line = keras.layers.Dropout(0.1, name="dropout")(Queue(name="queue")(Counted(name="counted")(line)))
        self.model = keras.Model(words, keras.layers.Dense(1, name="line")(line))
        self.model.compile(self.optimizer(), "mse", metrics=[Examples()])
        return self.model


def counts():
    steps = 240
    program = Counting()
    result = train(program, steps, workers=2, steps_per_execution=10)
    model = program.model  # the export's, restored
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / f"ckpt-{steps}"))
    stored = {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"): name for name in reader.get_variable_to_shape_map()}
    moved = float(np.mean(np.array(model.get_layer("batches").moving_mean)))
    return {
        "steps": steps,
        "iterations": int(reader.get_tensor(stored["model/optimizer/optimizer/_iterations"])),
        "layer": float(np.array(model.get_layer("counted").calls)),
        "seeds": int(np.array(model.get_layer("dropout").seed_generator.state)[1]),
        "batches": math.log(1 - moved) / math.log(MOMENTUM),
        "examples": result.metrics["examples"],
        "queue": np.unique(np.abs(model.get_layer("queue").queue)).tolist(),
        "place": int(np.array(model.get_layer("queue").place)),
    }


def rows(program=None, **settings):
    """Return how often a step reads a whole shard of the table or its slots, and by which operations it uses them."""
    split = tf.distribute.experimental.partitioners.MinSizePartitioner(256, 2)
    strategy = testing.in_process_cluster(workers=1, ps=2, partitioner=split)
    program = program or Program()
    model, _ = make_model(program, strategy)
    spec = program.train_dataset(None).element_spec
    as_trained = Keras3Model(model)
    as_trained.gather_updates(Config(program="keras3_check:Program", **settings))
    with strategy.scope():
        as_trained.build(spec)
        step = tf.function(lambda *batch: strategy.run(Step(model), args=(batch,)))
        operations = step.get_concrete_function(*spec).graph.get_operations()
    table = raw(shards_of(model.get_layer("table").embeddings))
    shapes = {tuple(shard.shape) for shard in table}
    read = [one for one in operations if one.type == "ReadVariableOp" and tuple(one.outputs[0].shape) in shapes]
    kinds = [one.type for one in operations]
    return {
        "shards": len(table),
        "read": len(read),
        **{k: kinds.count(k) for k in ("ResourceGather", "ResourceScatterSub", "ResourceScatterUpdate")},
    }


def lazy_rows():
    """Return the same of a lazy Adam."""
    return rows(compiled(lambda: keras.optimizers.Adam(0.01)), lazy_optimizers=True)


# What a model may be


class Own(keras.Model):
    """Built by its first input, with a train_step of its own and outputs of its own."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, WIDTH)
        self.line = keras.layers.Dense(1)

    def call(self, words):
        return self.line(keras.ops.mean(self.table(words), axis=1))

    def train_step(self, data):
        words, target = data
        with tf.GradientTape() as tape:
            predicted = self(words, training=True)
            loss = self.compute_loss(words, target, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "highest": keras.ops.max(predicted)}


class OwnStep(Program):
    def build_model(self):
        self.model = Own()
        self.model.compile(keras.optimizers.Adam(0.05), "mse")
        return self.model


class Gan(keras.Model):
    """Two models, and two optimizers that take turns within a step; the first one may train both models."""

    def __init__(self, makes_all=False):
        super().__init__()
        self.makes_all = makes_all
        self.makes = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64), keras.layers.Dense(2)])
        self.judges = keras.Sequential([keras.Input((2,)), keras.layers.Dense(64), keras.layers.Dense(1)])

    def compile(self, makes, judges):
        super().compile(makes)
        self.second_optimizer = judges

    def call(self, noise):
        return self.makes(noise)

    def train_step(self, data):
        real = tf.cast(data[0], tf.float32) / WORDS
        noise = keras.random.normal(keras.ops.shape(real))  # without a seed, which Keras would keep in a variable
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean(tf.nn.relu(1 - self.judges(real)) + tf.nn.relu(1 + self.judges(self.makes(noise))))
        variables = self.judges.trainable_variables
        self.second_optimizer.apply(tape.gradient(judged, variables), variables)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judges(self.makes(noise)))
        variables = (self if self.makes_all else self.makes).trainable_variables
        self.optimizer.apply(tape.gradient(made, variables), variables)
        return {"judges": judged, "makes": made}


class Adversaries(Program):
    def __init__(self, keeps=""):
        self.keeps = keeps

    def build_model(self):
        self.model = Gan(self.keeps == "all")  # as psfleet had it before
        optimizers = [keras.optimizers.Adam(rate, use_ema=True) for rate in (0.01, 0.02)]
        self.model.compile(*optimizers)
        return self.model

    def eval_dataset(self, context):
        return self.train_dataset(context).map(lambda words, _: (tf.cast(words, tf.float32), 0)).take(2)


class Diffusion(keras.Model):
    """Has a clone, which stays trainable, follow its network; the clone's weights tell how many steps it has seen."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(WORDS, kernel_initializer="ones")])
        self.follows = keras.models.clone_model(self.network)
        for weight in self.follows.weights:
            weight.assign(keras.ops.zeros_like(weight))

    def call(self, words):
        return self.follows(words)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.network(data[0]))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for weight, follows in zip(self.network.weights, self.follows.weights, strict=True):
            follows.assign(MOMENTUM * follows + (1 - MOMENTUM) * weight)
        return {"loss": loss}


class Diffuses(Program):
    def build_model(self):
        self.model = Diffusion()
        self.model.compile(keras.optimizers.SGD(0.0), "mse")
        return self.model

    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda words, target: (tf.cast(words, tf.float32), target))


class Several(Program):
    """Two inputs by name, two outputs with a loss of their own, weights of examples."""

    def build_model(self):
        number, word = keras.Input((1,), name="number"), keras.Input((2,), name="word", dtype="int64")
        looked_up = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 4)(word))
        joined = keras.layers.Dense(8)(keras.layers.Concatenate()([number, looked_up]))
        size, kind = keras.layers.Dense(1, name="size")(joined), keras.layers.Dense(2, name="kind")(joined)
        self.model = keras.Model({"number": number, "word": word}, {"size": size, "kind": kind})
        self.model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.9)),
            loss={"size": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"size": 1.0, "kind": 0.5},
            metrics={"size": [Examples()], "kind": ["accuracy"]},
        )
        return self.model

    def train_dataset(self, context):
        random = np.random.default_rng(1)
        words = random.integers(WORDS, size=(64, 2))
        inputs = {"number": random.normal(12, 2, (64, 1)).astype(np.float32), "word": words}
        outputs = {"size": inputs["number"] / 12, "kind": (inputs["number"] > 12).astype(np.int64)}
        return tf.data.Dataset.from_tensor_slices((inputs, outputs)).batch(BATCH).repeat()


class Signed(Program):
    def serving_signature(self, model):
        return tf.function(lambda words: {"score": model(words)}, input_signature=[tf.TensorSpec([None, 2], tf.int64)])


def exported(result, **inputs):
    signature = tf.saved_model.load(str(result.directory / "export")).signatures["serving_default"]
    ((name, spec),) = signature.structured_input_signature[1].items()
    answer = signature(**(inputs or {name: tf.constant([[1, 2]], spec.dtype)}))
    return {name: value.numpy() for name, value in answer.items()}


def own_step():
    program = OwnStep()
    result = train(program, 100, workers=2, evaluation="distributed")
    (score,) = exported(result).values()
    again = float(np.array(program.model(tf.constant([[1, 2]]))).item())
    return {"metrics": sorted(result.metrics), "loss": result.evaluation["loss"], "same": abs(again - score.item())}


def two_optimizers():
    shared = PLACE / "gan"
    train(Adversaries("all"), 4, workers=2, directory=shared, export=False)
    result = train(Adversaries(), 8, workers=2, directory=shared, export=False)
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / "ckpt-8"))
    values = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map() if name[:6] == "model/"}
    averages = [value for name, value in values.items() if "/_model_variables_moving_average" in name]
    weights = [value for name, value in values.items() if name.startswith("model/weights/")]
    return {
        "metrics": sorted(result.metrics),
        "counted": [int(value) for name, value in values.items() if "/_iterations/" in name],
        "averages": len(averages),
        "averaged": [any(np.array_equal(weight, average) for average in averages) for weight in weights],
        "bytes": [bytes_of_checkpoint(RunDirectory(shared, "test"), 8), sum(weight.nbytes for weight in weights)],
    }


def follows():
    program = Diffuses()
    result = train(program, 100, workers=2, steps_per_execution=10)
    kernel = np.array(program.model.follows.weights[0], np.float64)
    moved = np.log(1 - kernel) / math.log(MOMENTUM)
    return {"step": result.step, "seen": [float(moved.min()), float(moved.max())]}


def several():
    result = train(Several(), 20, workers=2, evaluation="distributed", export=False)
    return {"metrics": result.metrics, "evaluation": result.evaluation}


def signature():
    return sorted(exported(train(Signed()), words=tf.constant([[1, 2]], tf.int64)))


def precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        program = Program()
        result = train(program, export=False)
        computed = program.model.get_layer("line").compute_dtype
        return {"step": result.step, "computed": computed, "kept": sorted({one.dtype for one in program.model.weights})}
    finally:
        keras.config.set_dtype_policy("float32")


def models():
    parts = (own_step, two_optimizers, follows, several, precision)
    return {part.__name__: tried(part) for part in parts}


# A split table against a whole one


class Varied(Program):
    @staticmethod
    def initializer(shape, dtype=None):
        return tf.cast(tf.reshape(tf.range(math.prod(shape)) % 7, shape), dtype) / 7

    def layers(self):
        found = super().layers()
        found[1].embeddings_regularizer = keras.regularizers.L2(0.01)
        return found


def splits():
    found = {}
    for name, way, more in (("plain", "sidecar", {}), ("global_clipnorm", "inline", {"global_clipnorm": 0.1})):
        program, plain = Varied(), Varied()
        program.optimizer = plain.optimizer = lambda more=more: keras.optimizers.Adam(0.01, **more)
        result = train(program, 10, evaluation=way)
        found[name] = distance(weights(program.model), alone(plain, 10))
        found[way] = evaluated_otherwise(program, result)
    return found


def evaluated_otherwise(program, result):
    """How far the run's evaluation is from what Keras says of the exported model."""
    data = program.eval_dataset(tf.distribute.InputContext())
    expected = program.model.evaluate(data, verbose=0, return_dict=True)
    assert result.evaluation.keys() == expected.keys()
    return max(abs(result.evaluation[name] - expected[name]) for name in expected)


# Averages, the end


def averages():
    """The exported weights against those that Keras takes at the end."""
    program, plain = Varied(), Varied()
    program.optimizer = plain.optimizer = lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    result = train(program, 10, evaluation="distributed")
    kept = alone(plain, 10)
    final = json.loads((result.directory / "checkpoints" / "ckpt-10.manifest.json").read_text())["final"]
    found = {"distance": distance(weights(program.model), kept), "final": final}
    return {**found, "distributed": evaluated_otherwise(program, result)}


# Callbacks


class Script(keras.callbacks.Callback):
    """Gives scores, epoch by epoch, and writes down what it is told."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.heard = scores, []

    def on_train_begin(self, logs=None):
        self.heard.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]
        self.heard.append([epoch, sorted(logs)])

    def on_train_end(self, logs=None):
        self.heard.append("end")


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates, self.seen = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(round(float(np.array(self.model.optimizer.learning_rate)), 6))
        self.seen.append(self.model.get_weights())


def call(*callbacks, scores=(3.0, 1.0, 2.0, 2.0, 2.0), directory=None, epochs=5, program=Program, **settings):
    script, watch = Script(scores), Watch()
    made = program()
    made.found = [script, *callbacks, watch]
    given = {"evaluation": "distributed", "epoch_steps": EPOCH, **settings}
    result = train(made, EPOCH * epochs, directory=directory, **given)
    return made, script, watch, result


def callbacks():
    library, where, found = keras.callbacks, PLACE / "callbacks", {}
    where.mkdir()
    stopping = library.EarlyStopping("score", mode="min", patience=2, restore_best_weights=True)
    made, script, watch, result = call(stopping)
    best = distance(weights(made.model), watch.seen[1])
    hooks = [one if isinstance(one, str) else one[0] for one in script.heard]
    found["EarlyStopping"] = {"step": result.step, "best": best, "heard": hooks, "logs": script.heard[1][1]}
    _, _, watch, _ = call(library.ReduceLROnPlateau("score", mode="min", factor=0.5, patience=1))
    found["ReduceLROnPlateau"] = watch.rates
    _, _, watch, _ = call(library.LearningRateScheduler(lambda epoch, rate: 0.01 / (epoch + 1)), epochs=2)
    found["LearningRateScheduler"] = watch.rates
    found.update(of_one_training(where))
    found["TerminateOnNaN"] = call(library.TerminateOnNaN(), program=NotANumber)[-1].step
    return found


def named():
    """The names of the library's callbacks."""
    kinds = [value for value in vars(keras.callbacks).values() if isinstance(value, type)]
    return sorted(kind.__name__ for kind in kinds if issubclass(kind, keras.callbacks.Callback))


def of_one_training(where):
    """What the callbacks do that only look on, beside each other."""
    library, posts, heard = keras.callbacks, http.server.HTTPServer(("127.0.0.1", 0), Posts), []
    threading.Thread(target=posts.serve_forever, daemon=True).start()
    best, history = {"monitor": "score", "mode": "min", "save_best_only": True}, library.History()
    _, _, watch, _ = call(
        library.ModelCheckpoint(str(where / "{epoch}.weights.h5"), save_weights_only=True, **best),
        library.ModelCheckpoint(str(where / "whole.keras"), **best),
        library.CSVLogger(str(where / "log.csv")),
        library.TensorBoard(str(where / "board")),
        library.LambdaCallback(on_epoch_end=lambda epoch, logs: heard.append(epoch)),
        library.RemoteMonitor(root=f"http://127.0.0.1:{posts.server_port}"),
        history,
        epochs=3,
    )
    loaded = Program().build_model()
    loaded.load_weights(where / "2.weights.h5")
    whole = keras.models.load_model(where / "whole.keras")
    return {
        "ModelCheckpoint": {
            "kept": sorted(path.name for path in where.glob("*.h5")),
            "distance": distance(weights(loaded), watch.seen[1]),
        },
        "ModelCheckpoint, .keras": distance(weights(whole), watch.seen[1]),
        "CSVLogger": len((where / "log.csv").read_text().splitlines()),
        "TensorBoard": sorted(path.name for path in (where / "board").iterdir()),
        "LambdaCallback": heard,
        "RemoteMonitor": len(POSTS),
        "History": sorted(history.history),
    }


class NotANumber(Program):
    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda words, target: (words, target / 0.0))


def remembered():
    """Best weights and patience go on in another process's training."""
    shared, heard = PLACE / "remembered", []
    for epochs in (2, 5):
        stopping = keras.callbacks.EarlyStopping("score", mode="min", patience=2)
        *_, result = call(stopping, directory=shared, epochs=epochs)
        heard.append([result.step, stopping.wait, float(stopping.best)])
    return heard


# Refusals


def compiled(optimizer=None, **more):
    class Compiled(Program):
        def build_model(self):
            model = keras.Sequential(self.layers())
            model.compile((optimizer or self.optimizer)(), **{"loss": "mse", **more})
            return model

    return Compiled()


class Stateful(Program):
    def build_model(self):
        rows = keras.layers.LSTM(4, stateful=True)
        model = keras.Sequential([keras.Input(batch_shape=(BATCH, 2, 1)), rows, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model


class Constrained(Program):
    def layers(self):
        found = super().layers()
        found[1].embeddings_constraint = keras.constraints.NonNeg()
        return found


class TheOther(Program):
    def build_model(self):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile("sgd", keras.losses.MeanSquaredError())
        return model


def given(callback):
    program = Program()
    program.found = [callback]
    return program


def refused(program, cluster, **settings):
    """Say why a program is refused: built as the coordinator does, without its threads, which would outlive it."""
    config = Config(program="keras3_check:Program", **{**SPLIT, **settings})
    try:
        model, _ = make_model(program, cluster)
        as_trained = Keras3Model(model)
        as_trained.check_settings(config)
        as_trained.gather_updates(config)
        with cluster.scope():
            as_trained.build(program.train_dataset(None).element_spec)
            callbacks_of(config, program, model)
    except UserError as error:
        return str(error)
    return "trained"


def refusals():
    optimizers, library = keras.optimizers, keras.callbacks
    split = tf.distribute.experimental.partitioners.MinSizePartitioner(256, 2)
    no = functools.partial(refused, cluster=testing.in_process_cluster(workers=1, ps=2, partitioner=split))
    other, made = tf.keras.metrics.MeanAbsoluteError(), optimizers.SGD(0.1)
    found = {
        "strategy": no(Program(), strategy="one_device", partitioner_min_bytes=1),
        "api": no(Program(), api="fit"),
        "lazy_optimizers": no(compiled(type("Mine", (optimizers.SGD,), {})), lazy_optimizers=True),
        "exact": no(Program(), evaluation="exact"),
        "initial_weights": no(Program(), initial_weights="/nowhere/x.weights.h5"),
        "run_eagerly": no(compiled(run_eagerly=True)),
        "gradient_accumulation_steps": no(compiled(lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2))),
        "ema_overwrite_frequency": no(compiled(lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))),
        "LossScaleOptimizer": no(compiled(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)))),
        "MultiOptimizer": no(compiled(lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1))))),
        "ScheduleFreeAdamW": no(compiled(optimizers.ScheduleFreeAdamW)),
        "clipnorm": no(compiled(lambda: optimizers.SGD(0.1, clipnorm=1.0))),
        "Adafactor": no(compiled(lambda: optimizers.Adafactor(0.1))),
        "made before": no(compiled(lambda: made)),
        "constraint": no(Constrained()),
        "stateful": no(Stateful()),
        "the other's metric": no(compiled(metrics=[other])),
        "the other's loss": no(compiled(loss=tf.keras.losses.MeanSquaredError())),
        "the other's loss, of tf_keras": no(TheOther()),
        "the other's callback": no(given(tf.keras.callbacks.History())),
        "ProgbarLogger": no(given(library.ProgbarLogger())),
        "BackupAndRestore": no(given(library.BackupAndRestore(str(PLACE / "backup")))),
        "SwapEMAWeights": no(given(library.SwapEMAWeights())),
        "on_batch_end": no(given(library.LambdaCallback(on_train_batch_end=lambda batch, logs: None))),
        "save_freq": no(given(library.ModelCheckpoint(str(PLACE / "x.keras"), save_freq=10))),
    }
    whole = testing.in_process_cluster(workers=1, ps=2)
    found["clipnorm, whole"] = refused(compiled(lambda: optimizers.SGD(0.1, clipnorm=1.0)), whole)
    return found


def main():
    parts = (counts, rows, lazy_rows, models, signature, splits, averages, callbacks, named, remembered)
    parts += (refusals,)
    chosen = [part for part in parts if part.__name__ in sys.argv[1:]] or parts
    found = {part.__name__: tried(part) for part in chosen}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
