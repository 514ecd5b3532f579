"""Try exports before the first step, and at the end, on servers in this process; print what came of each, as JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

from trainer import testing  # before TensorFlow: it chooses the Keras

import keras as keras3  # isort: skip
import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import tried  # isort: skip
from trainer.core.failures import UserError  # isort: skip
from trainer.run.directory import RunDirectory  # isort: skip
from trainer.telemetry import resources  # isort: skip
from trainer.training.exports import export as exports  # isort: skip
from trainer.training.exports.export_shards import slices_of  # isort: skip
from trainer.training.exports.trial import try_new_run  # isort: skip
from trainer.training.tf_internals.variables import full_names  # isort: skip

keras = tf.keras
COLOURS = ["red", "green", "blue", "black", "white"]
GIBIBYTE = 1 << 30
ROWS = 60_000


class Colours:
    """A table of colours that the program keeps: the datasets and the signature use it."""

    keras, width = keras, 4

    def table(self):
        return self.keras.layers.StringLookup(vocabulary=COLOURS)

    def build_model(self):
        self.row_of = self.table()
        embedding = self.keras.layers.Embedding(10, self.width)
        self.model = self.keras.Sequential([embedding, self.keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
        return self.model

    def train_dataset(self, context):
        words = tf.constant(COLOURS * 20)
        data = tf.data.Dataset.from_tensor_slices((words, tf.cast(tf.strings.length(words), tf.float32)[:, None]))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id).repeat()
        return data.batch(10).map(lambda word, length: (self.row_of(word), length))

    def eval_dataset(self, context):
        return self.train_dataset(context).take(2)

    def serving_signature(self, model):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def score(words):
            return {"score": model(self.row_of(words))}

        return score


class StaticColours(Colours):
    def table(self):
        rows = tf.lookup.KeyValueTensorInitializer(COLOURS, list(range(1, 6)), value_dtype=tf.int64)
        return tf.lookup.StaticHashTable(rows, 0).lookup


class Colours3(Colours):
    keras = keras3

    def build_model(self):
        self.row_of = keras.layers.StringLookup(vocabulary=COLOURS)
        words = keras3.Input((), dtype="int64")
        line = keras3.layers.Dense(1)(keras3.layers.Embedding(10, self.width)(words))
        self.model = keras3.Model(words, line)
        self.model.compile("sgd", "mse")
        return self.model


class Shifted(Colours):
    """Its signature adds a variable that is no part of the model."""

    def build_model(self):
        self.shift = tf.Variable(1.0)
        return super().build_model()

    def serving_signature(self, model):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def score(rows):
            return {"score": model(rows) + self.shift}

        return score


class Summing(Colours):
    """Its signature writes a summary."""

    def build_model(self):
        self.writer = tf.summary.create_file_writer(tempfile.mkdtemp())
        return super().build_model()

    def serving_signature(self, model):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def score(rows):
            with self.writer.as_default(step=0):
                tf.summary.scalar("rows", tf.size(rows))
            return {"score": model(rows)}

        return score


class Broken(Colours):
    def serving_signature(self, model):
        raise RuntimeError("the signature is broken")


class Broken3(Colours3):
    def serving_signature(self, model):
        raise RuntimeError("the signature is broken")


class Missing(Colours):
    """Its signature needs a file that is written while the run trains."""

    def serving_signature(self, model):
        Path("/nowhere/words.txt").read_text(encoding="utf-8")


class Closed(Colours):
    """Its model looks rows up in a table that the model does not have."""

    serving_signature = None

    def build_model(self):
        rows = tf.lookup.KeyValueTensorInitializer(COLOURS, list(range(1, 6)), value_dtype=tf.int64)
        self.kept = kept = tf.lookup.StaticHashTable(rows, 0)

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.line = keras.layers.Dense(1)

            def call(self, words):
                return self.line(tf.cast(kept.lookup(words), tf.float32)[:, None])

        self.model = Model()
        self.model.compile("sgd", "mse")
        return self.model

    def train_dataset(self, context):
        words = tf.constant(COLOURS * 20)
        return tf.data.Dataset.from_tensor_slices((words, tf.ones([100, 1]))).batch(10)


class Both(keras.layers.Layer):
    def call(self, inputs):
        return tf.stack([inputs["left"], inputs["right"]], axis=1)


class Named:
    """A Sequential without an input shape, which is fed a dict."""

    def build_model(self):
        self.model = keras.Sequential([Both(), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse")
        return self.model

    def train_dataset(self, context):
        numbers = np.random.default_rng(1).normal(size=(64, 2)).astype(np.float32)
        features = {"left": numbers[:, 0], "right": numbers[:, 1]}
        return tf.data.Dataset.from_tensor_slices((features, numbers.sum(axis=1, keepdims=True))).batch(8)

    def eval_dataset(self, context):
        return self.train_dataset(context)


class Dropping(Named):
    """Draws its weights, in its pipeline and in Python."""

    def build_model(self):
        layers = [Both(), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        self.model = keras.Sequential(layers)
        self.model.compile("adam", "mse")
        return self.model

    def train_dataset(self, context):
        data = super().train_dataset(context).shuffle(64)
        return data.map(lambda features, target: (features, target + tf.random.uniform([])))

    def callbacks(self):
        return [keras.callbacks.LambdaCallback(on_train_begin=lambda logs: DRAWN.append(drawn()))]


DRAWN = []


def drawn():
    return [float(np.random.rand()), float(tf.random.uniform([])), float(keras.backend.random_uniform([]))]


def trained(program, steps=10, workers=2, **settings):
    result = testing.train(program, steps, workers, 2, **{"evaluation": "none", "seed": 1, **settings})
    path = result.directory / "export"
    return tf.saved_model.load(str(path)) if (path / "saved_model.pb").is_file() else None


def scores(kind):
    """The largest difference between what the export says of colours, and the model of their rows."""
    program = kind()
    exported = trained(program)
    served = exported.signatures["serving_default"](tf.constant([*COLOURS, "pink"]))["score"]
    return float(np.abs(served - program.model(tf.constant([1, 2, 3, 4, 5, 0], tf.int64))).max())


def closed():
    program = Closed()
    exported = trained(program)
    return float(np.abs(exported.serve(tf.constant(COLOURS)) - program.model(tf.constant(COLOURS))).max())


def named():
    program = Named()
    exported = trained(program)
    fed = {"left": tf.constant([1.0, 2.0]), "right": tf.constant([3.0, 5.0])}
    return float(np.abs(exported.serve(fed) - program.model(fed)).max())


def refused(program):
    with tempfile.TemporaryDirectory() as place:
        try:
            testing.train(program, 10, 2, 2, place, evaluation="none")
        except UserError as error:
            return [str(error), RunDirectory(place, "test").catalogue.steps()]
    return "trained"


def missing():
    """Whether a run trains whose export may work at its end."""
    return trained(Missing()) is None


def same_numbers():
    """How far two runs with the same seed are from each other, where one of them tried its export."""
    found = []
    for export in (True, False):
        keras.backend.clear_session()
        program = Dropping()
        result = testing.train(program, 8, 1, 2, evaluation="none", seed=5, export=export)
        reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / "ckpt-8"))
        names = [name for name in reader.get_variable_to_shape_map() if name.endswith("/VARIABLE_VALUE")]
        found.append([reader.get_tensor(name) for name in sorted(names)])
    weights = max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True) if a.dtype == np.float32)
    return {"weights": weights, "drawn": DRAWN[0] == DRAWN[1]}


class Helper:
    """Keeps what a program's build_model makes."""


def memory():
    """What a trial with 3 GiB of variables takes, in GiB; and whether the program keeps what it has made in it."""

    before, during = resources.memory(), []

    class Large(Colours):
        width = (3 * GIBIBYTE) // (4 * 10)

        def __init__(self):
            self.tables, self.helper = {"rows": []}, Helper()

        def build_model(self):
            made = super().build_model()
            self.tables["rows"].append(self.row_of)
            self.helper.row_of = self.row_of
            return made

        def serving_signature(self, model):
            during.append(sum(weight.shape.num_elements() * 4 for weight in model.weights) / GIBIBYTE)
            during.append((resources.memory() - before) / GIBIBYTE)
            return super().serving_signature(model)

    program = Large()
    spec = (tf.TensorSpec([None], tf.int64), None)
    try_new_run(program, RunDirectory(Path("/nowhere"), "test"), spec, exports=True, evaluates=False)
    kept = hasattr(program, "row_of") or bool(program.tables["rows"]) or hasattr(program.helper, "row_of")
    return {"variables": during[0], "grown": during[1], "kept": kept}


class Wide:
    """Tables that lie in shards on two ps, and one with rows by key."""

    keras, policy = keras, "float32"

    def build_model(self):
        layers = self.keras.layers
        ids, keys = self.keras.Input((), dtype="int64", name="ids"), self.keras.Input((), dtype="int64", name="keys")
        rows = layers.Embedding(ROWS, 16, name="table", dtype=self.policy)(ids)
        more = layers.Embedding(ROWS, 16, name="items", embeddings_initializer="uniform")(keys)
        model = self.keras.Model([ids, keys], layers.Dense(1, name="line")(layers.Concatenate()([rows, more])))
        model.compile(self.keras.optimizers.Adagrad(0.1), "mse")
        return model

    def train_dataset(self, context):
        ids = np.random.default_rng(1).integers(0, ROWS, (400, 32))
        data = tf.data.Dataset.from_tensor_slices(({"ids": ids, "keys": ids // 2}, np.ones((400, 32, 1), np.float32)))
        return data.repeat()


class Wide3(Wide):
    keras = keras3


class Rounded(Wide):
    """Its optimizer has slots before there is a checkpoint, and it keeps what is no part of the model."""

    policy = "mixed_bfloat16"

    def build_model(self):
        model = super().build_model()
        model.optimizer.build(model.trainable_variables)
        self.kept = tf.Variable(tf.zeros([ROWS, 16]))
        return model


class Signed(Wide):
    """Its signature looks rows up by itself."""

    def serving_signature(self, model):
        table = model.get_layer("table").embeddings

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)])
        def score(ids, keys):
            return {"score": model([ids, keys]), "rows": tf.gather(table, ids)}

        return score


class Reading(Wide):
    """Its signature keeps what it computes of all rows when it is traced."""

    def serving_signature(self, model):
        sums = tf.reduce_sum(tf.convert_to_tensor(model.get_layer("table").embeddings), 1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def score(ids):
            return {"score": tf.gather(sums, ids)}

        return score


def by_shard(kind, reading=None, **settings):
    """What differs between exports of one checkpoint as a whole and by shard; and how the latter is stored."""
    keras.backend.clear_session()
    result = testing.train(kind(), 12, 2, 2, evaluation="none", seed=1, **settings)
    directory, whole = RunDirectory(result.directory.parents[1], "test"), result.directory / "export"
    least, other = exports.least_bytes_of_checkpoint(directory, 12), result.directory / "other"
    needed = exports.bytes_of_checkpoint(directory, 12)
    with mock.patch("trainer.training.exports.export.room", return_value=exports.HELD * needed - 1):
        exports.export_model(kind(), directory, 12, target=other)
    refused = ""
    if reading:
        with mock.patch("trainer.training.exports.export.room", return_value=exports.MIN_HELD_TABLES * needed - 1):
            refused = raised(exports.export_model, reading(), directory, 12)
        with mock.patch("trainer.training.exports.export.room", return_value=exports.MIN_HELD_TABLES * needed):
            exports.export_model(reading(), directory, 12, target=result.directory / "read")
    readers = [tf.train.load_checkpoint(str(path / "variables" / "variables")) for path in (whole, other)]
    shapes = [reader.get_variable_to_shape_map() for reader in readers]
    values = [  # Keras numbers them otherwise each time
        {name: reader.get_tensor(key) for key, name in full_names(reader).items()} for reader in readers
    ]
    differing = [
        name for name in values[0].keys() & values[1].keys() if not np.array_equal(values[0][name], values[1][name])
    ]
    asked = [tf.constant([0, 5, ROWS - 1, ROWS // 2], tf.int64)] * 2
    served = []
    for path in (whole, other):
        loaded = tf.saved_model.load(str(path))
        call = loaded.signatures["serving_default"]
        served.append(call(**dict(zip(sorted(call.structured_input_signature[1]), asked, strict=True))))
    return {
        "differing": differing,
        "same_names": values[0].keys() == values[1].keys(),
        "tables": sorted(max(shape) for shape in shapes[0].values() if len(shape) == 2 and shape[1] == 16),
        "slices": sorted(slices_of(readers[1]).values()),
        "served": {name: float(np.abs(value - served[1][name]).max()) for name, value in served[0].items()},
        "least": least / (exports.HELD * needed),
        "left": sorted(path.name for path in result.directory.glob(".*")),
        "refused": refused,
    }


def raised(part, *arguments):
    try:
        part(*arguments)
    except UserError as error:
        return str(error)


def main():
    sys.modules["export_check"] = sys.modules["__main__"]
    found = {
        "scores": {kind.__name__: tried(scores, kind) for kind in (Colours, StaticColours, Colours3)},
        "named": tried(named),
        "closed": tried(closed),
        "refused": {kind.__name__: tried(refused, kind()) for kind in (Broken, Broken3, Shifted, Summing)},
        "missing": tried(missing),
        "same_numbers": tried(same_numbers),
        "memory": tried(memory),
        "by_shard": {kind.__name__: tried(by_shard, kind) for kind in (Wide3, Rounded)}
        | {"dynamic": tried(by_shard, Signed, Reading, dynamic_tables={"items": {"capacity": ROWS}})},
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
