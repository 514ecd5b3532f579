"""Train programs as people write them, on servers in this process; print what came of each of a part, as JSON.

Where a result is compared, one worker trains, so that nothing depends on who is faster.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from trainer import testing  # before TensorFlow: it chooses the Keras

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import distance, tried  # isort: skip
from trainer.__main__ import main as command  # isort: skip
from trainer.core.settings.config import Config  # isort: skip
from trainer.core.failures import UserError  # isort: skip
from trainer.telemetry.outlets.systemd import Notifier  # isort: skip
from trainer.telemetry.status import read_status  # isort: skip
from trainer.run.directory import RunDirectory  # isort: skip
from trainer.run.lease import Lease  # isort: skip
from trainer.run.records import read_record, write_record  # isort: skip
from trainer.tasks.coordinator import run_coordinator  # isort: skip
from trainer.tasks.in_process import start_cluster  # isort: skip

keras = tf.keras
STEPS, WORDS, WIDTH = 10, 64, 8
SPLIT = {"partitioner_min_bytes": 256}
PLACE = Path(tempfile.mkdtemp(prefix="psfleet-programs-"))


def train(program, steps=STEPS, workers=1, ps=2, directory=None, **settings):
    return testing.train(program, steps, workers, ps, directory, **{"evaluation": "none", "seed": 1, **settings})


class Program:
    """A table of words and a line; each part can be replaced."""

    optimizer = staticmethod(lambda: keras.optimizers.SGD(0.01))
    constraint = None
    model = None

    def build_model(self):
        table = keras.layers.Embedding(WORDS, WIDTH, input_length=2, embeddings_initializer="ones")
        line = keras.layers.Dense(1, kernel_initializer="ones", kernel_constraint=self.constraint)
        self.model = keras.Sequential([table, keras.layers.Flatten(), line])
        self.model.compile(self.optimizer(), "mse")
        return self.model

    def train_dataset(self, context):
        words = np.random.default_rng(1).integers(WORDS, size=(64, 2))
        target = words.sum(axis=1, keepdims=True).astype(np.float32) / WORDS
        return tf.data.Dataset.from_tensor_slices((words, target)).batch(8).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(4).shard(context.num_input_pipelines, context.input_pipeline_id)


def weights(program):
    """The weights of the model that was exported: the program made it last, and whole."""
    return [weight.numpy() for weight in program.model.weights]


def alone(program, steps=STEPS):
    """The weights that Keras trains to in one process, with whole tables."""
    program.build_model().fit(program.train_dataset(None).take(steps), verbose=0, shuffle=False)
    return weights(program)


# The end of a run


class BadExport(Program):
    """Its signature works when it is tried, and no more at the end."""

    fixed = True

    def serving_signature(self, model):
        works, BadExport.fixed = BadExport.fixed, False
        if not works:
            raise RuntimeError("the signature is broken")
        return tf.function(model, input_signature=[tf.TensorSpec([None, 2], tf.float32)])


class OnlyTrains(keras.Model):
    """A model without `call`, which trains another."""

    def __init__(self):
        super().__init__()
        self.line = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])

    def train_step(self, data):
        words, target = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.line(tf.cast(words, tf.float32)) - target))
        self.optimizer.minimize(loss, self.line.trainable_variables, tape=tape)
        return {"loss": loss}


class WithoutCall(Program):
    def build_model(self):
        model = OnlyTrains()
        model.compile(keras.optimizers.SGD(1e-6))
        return model


class WithSignature(WithoutCall):
    def serving_signature(self, model):
        return tf.function(model.line, input_signature=[tf.TensorSpec([None, 2], tf.float32)])


def end_of(program, **settings):
    result = train(program, **settings)
    status = read_status(RunDirectory(result.directory.parent.parent, "test"))
    return {
        "state": status.state,
        "step": result.step,
        "message": status.message,
        "export": status.export is not None and (result.directory / "export" / "saved_model.pb").is_file(),
    }


def exported_later():
    first = end_of("programs_check:BadExport", directory=PLACE / "later")
    again = end_of("programs_check:BadExport", directory=PLACE / "later")  # finished: nothing is tried again
    settings = PLACE / "run.json"
    settings.write_text(
        json.dumps({"program": "programs_check:BadExport", "run": "test", "shared_dir": str(PLACE / "later")})
    )
    asked = ["export", "--settings", str(settings), "--json", "--run"]
    BadExport.fixed = False
    broken = command([*asked, "test"], {})
    BadExport.fixed = True
    unknown = command([*asked, "nobody"], {})
    code = command([*asked, "test"], {})
    status = read_status(RunDirectory(PLACE / "later", "test"))
    return {
        "first": first,
        "again": again,
        "codes": [broken, unknown, code],
        "export": status.export,
        "message": status.message,
        "written": (PLACE / "later" / "runs" / "test" / "export" / "saved_model.pb").is_file(),
    }


def cut_off(tries, name="", **settings):
    """As a process leaves it that dies while it exports: the next one does so, but not for ever."""
    shared = PLACE / f"cut-{tries}{name}"
    shutil.copytree(PLACE / "off", shared, dirs_exist_ok=True)
    directory = RunDirectory(shared, "test")
    write_record(directory.export_record, {"step": STEPS, "tries": tries, "ended": False, "error": ""})
    named = {"program": "programs_check:Program", "run": "test", "shared_dir": str(shared)}
    config = Config(**named, steps=STEPS, **settings)
    codes = [run_coordinator(config, start_cluster("parameter_server", 1, 1), Notifier(), in_process=True)]
    exported = (directory.export / "saved_model.pb").is_file()
    status = read_status(directory)
    return {
        "codes": codes,
        "exported": exported,
        "message": status.message,
        "record": read_record(directory.export_record),
    }


def led_by_another():
    """The same, while another process has the run."""
    directory = RunDirectory(PLACE / "cut-1led", "test")
    lease = Lease.acquire(directory, 0.4, str)
    try:
        return cut_off(1, "led", lease_seconds=10.0)
    finally:
        lease.release()


def no_room():
    from trainer.core import memory_limit

    real, memory_limit.memory_limit = memory_limit.memory_limit, lambda: 1024
    try:
        train(Program())
    except UserError as error:
        return str(error)
    finally:
        memory_limit.memory_limit = real
    return "trained"


def no_room_left():
    from trainer.core import memory_limit

    real, memory_limit.memory_available = memory_limit.memory_available, lambda: 1024
    try:
        return end_of(Program())
    finally:
        memory_limit.memory_available = real


def ends():
    return {
        "off": end_of("programs_check:Program", export=False, directory=PLACE / "off"),
        "broken": exported_later(),
        "without_call": refused(WithoutCall()),
        "with_signature": end_of(WithSignature()),
        "cut_off_once": cut_off(1),
        "cut_off_again": cut_off(3),
        "cut_off_and_off": cut_off(1, "off", export=False),
        "cut_off_and_led": led_by_another(),
        "no_room": no_room(),
        "no_room_left": no_room_left(),
    }


# What a model may do


class Accumulating(keras.Sequential):
    """Adds up the gradients of four parts of a batch, and applies them at once."""

    def train_step(self, data):
        words, target = data
        total = [tf.zeros(weight.shape) for weight in self.trainable_variables]
        losses = []
        for part in range(4):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(words[part::4], target[part::4], self(words[part::4], training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            total = [one + tf.convert_to_tensor(more) / 4 for one, more in zip(total, gradients, strict=True)]
            losses.append(loss)
        self.optimizer.apply_gradients(zip(total, self.trainable_variables, strict=True))
        return {"loss": tf.add_n(losses) / 4}


class Accumulated(Program):
    def build_model(self):
        plain = super().build_model()
        self.model = Accumulating(plain.layers)
        self.model.compile(self.optimizer(), "mse")
        return self.model


def accumulation():
    program, expected = Accumulated(), alone(Program())
    train(program, **SPLIT)
    return {"distance": distance(weights(program), expected), "moved": distance(expected, starts())}


def starts():
    program = Program()
    program.build_model()
    return weights(program)


class BySecond(keras.Sequential):
    """Trains with an optimizer that is an attribute of its own."""

    def train_step(self, data):
        words, target = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(words, target, self(words, training=True))
        self.second.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class OfTheSecond(Program):
    def build_model(self):
        plain = super().build_model()
        self.model = BySecond(plain.layers)
        self.model.second = self.optimizer()
        self.model.compile(keras.optimizers.SGD(0.01), "mse")
        return self.model


def clipping(kind=Program, **clip):
    """The distance between a training with a split table and Keras's own with a whole one."""
    program, plain = kind(), kind()
    program.optimizer = plain.optimizer = lambda: keras.optimizers.SGD(1.0, **clip)
    train(program, 3, **SPLIT)
    return distance(weights(program), alone(plain, 3))


class Excluding(Program):
    """Leaves its table out of weight decay."""

    optimizer = staticmethod(lambda: keras.optimizers.AdamW(0.01, weight_decay=5.0))

    def build_model(self):
        model = super().build_model()
        model.optimizer.exclude_from_weight_decay(var_list=[model.layers[0].embeddings])
        return model


def excluding():
    """The distance between a training with a split table and Keras's own with a whole one."""
    program = Excluding()
    train(program, 3, **SPLIT)
    return distance(weights(program), alone(Excluding(), 3))


class Constrained(Program):
    constraint = staticmethod(keras.constraints.MaxNorm(0.3))


def constrained():
    """The same distance with a constraint, which no part of a split weight has; and how far its weights were."""
    program = Constrained()
    train(program)
    expected = alone(Constrained())
    unbound = np.linalg.norm(alone(Program())[1])
    bound = np.linalg.norm(weights(program)[1])
    return {"distance": distance(weights(program), expected), "norms": [float(bound), float(unbound)]}


def refused(program, **settings):
    try:
        train(program, **settings)
    except UserError as error:
        return str(error)
    return "trained"


def overwriting():
    """What is said of averages that overwrite weights; RMSprop has a frequency of 100, also without averages."""
    makers = {
        "SGD, every 4": lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=4),
        "RMSprop, EMA": lambda: keras.optimizers.RMSprop(0.01, use_ema=True),
        "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    }
    refusals = {}
    for name, make in makers.items():
        program = Program()
        program.optimizer = make
        refusals[name] = refused(program, export=False)
    return refusals


class Gan(keras.Model):
    """Two models, and two optimizers that take turns within a step."""

    def __init__(self):
        super().__init__()
        self.makes = keras.Sequential([keras.layers.Dense(4, input_shape=(2,)), keras.layers.Dense(2)])
        self.judges = keras.Sequential([keras.layers.Dense(4, input_shape=(2,)), keras.layers.Dense(1)])

    def compile(self, makes, judges):
        super().compile(makes)
        self.second_optimizer = judges

    def call(self, noise):
        return self.makes(noise)

    def train_step(self, data):
        real = tf.cast(data[0], tf.float32) / WORDS
        noise = tf.random.normal(tf.shape(real))
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean(tf.nn.relu(1 - self.judges(real))) + tf.reduce_mean(
                tf.nn.relu(1 + self.judges(self.makes(noise)))
            )
        self.second_optimizer.minimize(judged, self.judges.trainable_variables, tape=tape)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judges(self.makes(noise)))
        self.optimizer.minimize(made, self.makes.trainable_variables, tape=tape)
        return {"judges": judged, "makes": made}


class Adversaries(Program):
    def build_model(self):
        self.model = Gan()
        self.model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        return self.model

    def train_dataset(self, context):
        return super().train_dataset(context)

    def eval_dataset(self, context):
        return self.train_dataset(context).map(lambda words, _: (tf.cast(words, tf.float32), 0)).take(2)


def two_optimizers():
    shared = PLACE / "gan"
    first = train(Adversaries(), 4, workers=2, directory=shared, export=False)
    program = Adversaries()
    result = train(program, 8, workers=2, directory=shared)  # another process's: restored
    model = program.model  # the export's, restored
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / "ckpt-8"))
    return {
        "metrics": sorted(result.metrics),
        "steps": [first.step, int(model.optimizer.iterations.numpy()), int(model.second_optimizer.iterations.numpy())],
        "slots": len([name for name in reader.get_variable_to_shape_map() if "second_optimizer/_variables/" in name]),
        "export": (result.directory / "export" / "saved_model.pb").is_file(),
    }


class WideAndDeep(Program):
    """Keras's own model of two parts, whose optimizers are a list."""

    def build_model(self):
        ones = {"kernel_initializer": "ones"}
        deep = keras.Sequential([keras.layers.Dense(4, "relu", **ones), keras.layers.Dense(1, **ones)])
        self.model = keras.experimental.WideDeepModel(keras.experimental.LinearModel(), deep)
        self.model.compile([keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01)], "mse")
        return self.model

    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda words, target: (tf.cast(words, tf.float32) / WORDS, target))


def wide_and_deep():
    program, plain = WideAndDeep(), WideAndDeep()
    train(program)
    expected, deep = alone(plain), plain.model.dnn_model.layers[0].kernel.numpy()
    moved = min(np.abs(deep - 1).max(), np.abs(plain.model.linear_model.bias.numpy()).max())
    return {"distance": distance(weights(program), expected), "moved": float(moved)}


class FromNoise(Gan):
    """Its layers have no input shape, and its call takes noise, which is wider than the data."""

    def __init__(self):
        super().__init__()
        self.makes = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
        self.judges = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        self.seen = keras.metrics.Mean(name="judged")

    def train_step(self, data):
        real = tf.cast(data[0], tf.float32) / WORDS
        noise = tf.random.normal([tf.shape(real)[0], 5])
        with tf.GradientTape() as tape:
            judged = tf.reduce_mean(self.judges(self.makes(noise))) - tf.reduce_mean(self.judges(real))
        self.second_optimizer.minimize(judged, self.judges.trainable_variables, tape=tape)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judges(self.makes(noise, training=True)))
        self.optimizer.minimize(made, self.makes.trainable_variables, tape=tape)
        return {"judges": judged, "makes": made}

    def test_step(self, data):
        self.seen.update_state(self.judges(tf.cast(data[0], tf.float32) / WORDS))
        return {"judged": self.seen.result()}


class Labelling(keras.Model):
    """Its test_step returns what no evaluation averages."""

    def __init__(self):
        super().__init__()
        self.line = keras.layers.Dense(1)

    def call(self, words):
        return self.line(tf.cast(words, tf.float32))

    def test_step(self, data):
        return {"labels": data[1]}


class Labels(Program):
    def build_model(self):
        self.model = Labelling()
        self.model.compile("sgd", "mse")
        return self.model


def labels():
    """Refused by the coordinator, before the first step, though the evaluator evaluates."""
    why = refused(Labels(), workers=2, directory=PLACE / "labels", evaluation="sidecar", export=False)
    return {"why": why, "saved": [path.name for path in (PLACE / "labels").rglob("ckpt-*.index")]}


class Makers(Adversaries):
    def build_model(self):
        self.model = FromNoise()
        self.model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        return self.model

    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda words, _: (words, None))

    def serving_signature(self, model):
        noise = tf.TensorSpec([None, 5], tf.float32, name="noise")
        return tf.function(lambda noise: {"made": model.makes(noise)}, input_signature=[noise])


def from_noise():
    """Evaluated by the side-car, and exported: both build the model before they restore it."""
    result = train(Makers(), 10, evaluation="sidecar")
    served = tf.saved_model.load(str(result.directory / "export")).signatures["serving_default"]
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / "ckpt-10"))
    kernel = reader.get_tensor("model/makes/layer_with_weights-2/bias/.ATTRIBUTES/VARIABLE_VALUE")
    made = served(noise=tf.zeros([3, 5]))["made"]
    return {
        "evaluation": sorted(result.evaluation),
        "made": list(made.shape),
        "trained": bool(np.abs(kernel).max() > 0),
    }


class Weighted(Program):
    """Classes 0 and 1 at chance; only those of class 1 have a weight."""

    def build_model(self):
        line = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="zeros", input_shape=(2,))
        self.model = keras.Sequential([line])
        self.model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", weighted_metrics=["accuracy"])
        return self.model

    def train_dataset(self, context):
        random = np.random.default_rng(1)
        rows = random.normal(size=(64, 2)).astype(np.float32)
        classes = random.integers(2, size=(64, 1))
        class_weights = tf.constant([0.0, 1.0])
        plain = tf.data.Dataset.from_tensor_slices((rows, classes))
        return plain.map(lambda x, y: (x, y, tf.gather(class_weights, y))).batch(8).repeat()


def weighted():
    program = Weighted()
    result = train(program, 60, workers=2, evaluation="inline")
    return {"bias": float(weights(program)[1][0]), "evaluation": result.evaluation}


class Several(Program):
    """Two inputs by name, two outputs with a loss of their own, a custom metric, a normalised input."""

    def build_model(self):
        number, word = keras.Input((1,), name="number"), keras.Input((2,), name="word", dtype=tf.int64)
        normal = keras.layers.Normalization(axis=None)
        normal.adapt(np.array([[10.0], [14.0]], np.float32))
        self.normal = normal
        joined = keras.layers.Concatenate()(
            [normal(number), keras.layers.Flatten()(keras.layers.Embedding(WORDS, 4)(word))]
        )
        joined = keras.layers.BatchNormalization(momentum=0.9, name="batches")(keras.layers.Dense(8)(joined))
        size, kind = keras.layers.Dense(1, name="size")(joined), keras.layers.Dense(2, name="kind")(joined)
        self.model = keras.Model({"number": number, "word": word}, {"size": size, "kind": kind})
        self.model.compile(
            keras.optimizers.Adam(0.01),
            loss={"size": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"size": 1.0, "kind": 0.5},
            metrics={"size": [Examples()], "kind": ["accuracy"]},
        )
        return self.model

    def train_dataset(self, context):
        random = np.random.default_rng(1)
        inputs = {
            "number": random.normal(12, 2, (64, 1)).astype(np.float32),
            "word": random.integers(WORDS, size=(64, 2)),
        }
        outputs = {"size": inputs["number"] / 12, "kind": (inputs["number"] > 12).astype(np.int64)}
        return tf.data.Dataset.from_tensor_slices((inputs, outputs)).batch(8).repeat()


class Examples(keras.metrics.Metric):
    """Counts the examples that it has seen."""

    def __init__(self, name="examples", **more):
        super().__init__(name=name, **more)
        self.count = self.add_weight("count", initializer="zeros")

    def update_state(self, truth, predicted, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(truth)[0], tf.float32))

    def result(self):
        return self.count


class Adapted(Program):
    """Looks words up in a vocabulary and in buckets that layers have found in the data."""

    def build_model(self):
        words = next(iter(self.train_dataset(None).map(lambda words, _: words)))
        names = keras.layers.StringLookup()
        names.adapt(tf.strings.as_string(words))
        buckets = keras.layers.Discretization(num_bins=4)
        buckets.adapt(tf.cast(words, tf.float32))
        given = keras.Input((2,), dtype=tf.int64)
        name = keras.layers.Lambda(tf.strings.as_string)(given)
        found = keras.layers.Embedding(names.vocabulary_size(), 4)(names(name))
        bucket = keras.layers.Embedding(5, 4)(buckets(given))
        joined = keras.layers.Flatten()(keras.layers.Concatenate()([found, bucket]))
        self.model = keras.Model(given, keras.layers.Dense(1)(joined))
        self.model.compile(keras.optimizers.Adam(0.05), "mse")
        return self.model


def adapted():
    """Trained, restored on another number of ps, begun from its weights, and asked once it is exported."""
    shared = PLACE / "adapted"
    train(Adapted(), 40, workers=2, directory=shared, export=False)
    # One worker: a late step of another would move these few weights as far as a lookup that fails does.
    result = train(Adapted(), 80, workers=1, ps=1, directory=shared, evaluation="inline")
    weights_file = PLACE / "adapted.weights.h5"
    Adapted().build_model().save_weights(weights_file)
    begun = train(Adapted(), 5, workers=2, initial_weights=str(weights_file), export=False)
    served = tf.saved_model.load(str(result.directory / "export")).signatures["serving_default"]
    rows, target = next(iter(Adapted().train_dataset(None)))
    answer = next(iter(served(**dict.fromkeys(served.structured_input_signature[1], rows)).values()))
    return {
        "loss": result.evaluation["loss"],
        "served": float(tf.reduce_mean((answer - target) ** 2)),
        "begun": begun.step,
    }


class Sentences(Program):
    """A recurrent net that its first input builds, over sentences of any length: ragged, or padded and masked."""

    def __init__(self, kind):
        self.kind = kind

    def build_model(self):
        class Reader(keras.Model):
            def __init__(self, masks):
                super().__init__()
                self.table = keras.layers.Embedding(WORDS, 4, mask_zero=masks)
                self.reads = keras.layers.SimpleRNN(4)
                self.score = keras.layers.Dense(1)

            def call(self, words, training=False):
                return self.score(self.reads(self.table(words), training=training))

        self.model = Reader(masks=self.kind == "padded")
        self.model.compile(keras.optimizers.Adam(0.01), "mse")
        return self.model

    def train_dataset(self, context):
        lengths = np.random.default_rng(1).integers(1, 9, size=64)
        words = np.random.default_rng(2).integers(1, WORDS, size=lengths.sum())
        sentences = tf.RaggedTensor.from_row_lengths(words, lengths)
        target = (lengths[:, None] / 9).astype(np.float32)
        dataset = tf.data.Dataset.from_tensor_slices((sentences, target))
        if self.kind == "ragged":
            return dataset.batch(8).repeat()
        return dataset.map(lambda words, target: (words + 0, target)).padded_batch(8, ([None], [1])).repeat()


def sentences():
    found = {}
    for kind in ("ragged", "padded"):
        result = train(Sentences(kind), 6, workers=2, evaluation="inline")
        found[kind] = [result.evaluation["loss"], (result.directory / "export" / "saved_model.pb").is_file()]
    return found


class OwnLoss(Adversaries):
    """Its `train_step` calls a loss object, as Keras makes it, and one that has a loss for each example."""

    def build_model(self):
        by_default, for_each = (keras.losses.MeanSquaredError(reduction=way) for way in ("auto", "none"))

        class Model(keras.Sequential):
            def train_step(self, data):
                with tf.GradientTape() as tape:
                    predicted = self(data[0], training=True)
                    mean = by_default(data[1], predicted)
                self.optimizer.minimize(mean, self.trainable_variables, tape=tape)
                return {"loss": mean, "ratio": mean / tf.reduce_mean(for_each(data[1], predicted))}

        self.model = Model([keras.layers.Dense(1, input_shape=(2,))])
        self.model.compile(keras.optimizers.SGD(0.0001))
        return self.model


def own_loss():
    return train(OwnLoss(), 6, workers=2, export=False).metrics["ratio"]


def several():
    program = Several()
    result = train(program, 20, workers=2, evaluation="distributed", log_seconds=600.0)
    exported = tf.saved_model.load(str(result.directory / "export"))
    inputs, _ = exported.signatures["serving_default"].structured_input_signature[1], None
    batches = program.model.get_layer("batches")
    return {
        "metrics": result.metrics,
        "evaluation": result.evaluation,
        "inputs": sorted(inputs),
        "normal": [np.asarray(value).item() for value in (program.normal.mean, program.normal.variance)],
        "moving_variance": [float(value) for value in batches.moving_variance.numpy()],
        "moving_mean": [float(value) for value in batches.moving_mean.numpy()],
        "exported_mean": [
            variable.numpy().tolist() for variable in exported.variables if "moving_mean" in variable.name
        ],
    }


class Mixed(Program):
    """A table and a kernel that are split, of layers that compute in another type than they keep."""

    policy = "mixed_bfloat16"
    shards: ClassVar[list[list[int]]] = []

    def build_model(self):
        keras.mixed_precision.set_global_policy(self.policy)
        try:
            table, own, wide = keras.layers.Embedding(WORDS, WIDTH, input_length=2), OwnTable(), keras.layers.Dense(16)
            words = keras.Input((2,), dtype=tf.int64)
            both = keras.layers.Concatenate()([keras.layers.Flatten()(table(words)), own(words)])
            self.model = keras.Model(words, keras.layers.Dense(1, dtype="float32")(wide(both)))
            split = [getattr(one, "variables", [one]) for one in (table.embeddings, own.table, wide.kernel)]
            self.shards.append([len(parts) for parts in split])
            self.model.compile(keras.optimizers.Adam(0.01), "mse")
            return self.model
        finally:
            keras.mixed_precision.set_global_policy("float32")


class OwnTable(keras.layers.Layer):
    """Looks up rows of a weight that casts itself, and multiplies one by what the layer computes in."""

    def build(self, shape):
        self.table = self.add_weight(name="own", shape=(WORDS, WIDTH), initializer="uniform")

    def call(self, words):
        found = tf.nn.embedding_lookup(self.table, words[:, 0]) + tf.gather(self.table * 1.0, words[:, 1])
        assert self.table.dtype == found.dtype == self.compute_dtype
        return found * tf.ones((), self.compute_dtype)


class Taken(Program):
    """A layer of one's own that takes rows of its weights in each way that a whole weight has."""

    def build_model(self):
        class Rows(keras.layers.Layer):
            def build(self, shape):
                first = keras.initializers.Constant(np.random.default_rng(1).normal(size=(WORDS, WIDTH)) / 9)
                self.table = self.add_weight(name="table", shape=(WORDS, WIDTH), initializer=first)
                self.centers = tf.Variable(tf.zeros([WORDS, WIDTH]), trainable=False)

            def call(self, words, training=False):
                words = tf.cast(words, tf.int64)
                found = tf.gather(self.table, words[:, 0]) + tf.reduce_sum(tf.gather(self.table, words), 1)
                found += self.table[words[0, 1]] + tf.reduce_sum(self.table[words[0, 0] : words[0, 0] + 2], 0)
                if training:
                    change = tf.stop_gradient(tf.gather(self.centers, words[:, 1]) - found)
                    self.centers.scatter_sub(tf.IndexedSlices(0.1 * change, words[:, 1]))
                return found + tf.gather(self.centers, words[:, 1])

        line = keras.layers.Dense(1, kernel_initializer="ones")
        self.model = keras.Sequential([keras.layers.Input((2,), dtype=tf.int64), Rows(), line])
        self.model.compile(keras.optimizers.Adam(0.05), "mse")
        return self.model


def taken():
    """The distance between a training with split weights and Keras's own with whole ones."""
    program = Taken()
    train(program, **SPLIT)
    return distance(weights(program), alone(Taken()))


class Counted(Program):
    """A layer that counts words in a split weight, by what it reads and writes."""

    def build_model(self):
        class Counts(keras.layers.Layer):
            def build(self, shape):
                self.seen = self.add_weight(name="seen", shape=(WORDS,), initializer="zeros", trainable=False)

            def call(self, words, training=False):
                if training:
                    found = tf.math.bincount(tf.reshape(words, [-1]), minlength=WORDS, maxlength=WORDS)
                    self.seen.assign(self.seen + 0.5 * tf.cast(found, tf.float32))
                return tf.cast(words, tf.float32)

        self.model = keras.Sequential([keras.layers.Input((2,), dtype=tf.int64), Counts(), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.SGD(1e-6), "mse")
        return self.model


def counted():
    program = Counted()
    train(program, 100, workers=2, partitioner_min_bytes=64)
    return float(program.model.layers[0].seen.numpy().sum())


class Spectral(Program):
    def build_model(self):
        self.model = keras.Sequential([keras.layers.SpectralNormalization(keras.layers.Dense(1), input_shape=(2,))])
        self.model.compile("sgd", "mse")
        return self.model


def mixed():
    shared = PLACE / "mixed"
    before = train(Mixed(), 40, workers=2, directory=shared, evaluation="inline", **SPLIT)
    reader = tf.train.load_checkpoint(str(before.directory / "checkpoints" / "ckpt-40"))
    kept = {str(kind) for kind in reader.get_variable_to_dtype_map().values() if kind.is_floating}
    after = train(Mixed(), 150, ps=1, directory=shared, evaluation="inline", **SPLIT)
    return {
        "shards": Mixed.shards,
        "kept": sorted(kept),
        "losses": [before.evaluation["loss"], after.evaluation["loss"]],
        "export": (after.directory / "export" / "saved_model.pb").is_file(),
    }


def float16():
    program = Mixed()
    program.policy = "mixed_float16"
    return refused(program)


def optimizers():
    return {
        "accumulation": tried(accumulation),
        "global_clipnorm": tried(clipping, global_clipnorm=0.1),
        "second_clipnorm": tried(clipping, kind=OfTheSecond, clipnorm=0.1),
        "excluding": tried(excluding),
        "constrained": tried(constrained),
        "split_constraint": tried(refused, program=Constrained(), partitioner_min_bytes=8),
        "overwriting": tried(overwriting),
        "two_optimizers": tried(two_optimizers),
        "wide_and_deep": tried(wide_and_deep),
    }


def layers():
    return {
        "taken": tried(taken),
        "counted": tried(counted),
        "spectral": tried(refused, program=Spectral()),
        "mixed": tried(mixed),
        "float16": tried(float16),
        "adapted": tried(adapted),
        "sentences": tried(sentences),
    }


def outputs():
    return {
        "from_noise": tried(from_noise),
        "labels": tried(labels),
        "weighted": tried(weighted),
        "several": tried(several),
        "own_loss": tried(own_loss),
    }


def main():
    sys.modules["programs_check"] = sys.modules["__main__"]
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
