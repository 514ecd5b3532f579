"""Train programs that begin with weights from elsewhere, on split tables; print what came of each, as JSON."""

import json
import os
import sys
import tempfile

from trainer import testing  # before TensorFlow: it chooses the Keras

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import distance, tried  # isort: skip
from trainer.training.steps.model import make_model  # isort: skip

keras = tf.keras
PLACE = tempfile.mkdtemp(prefix="psfleet-weights-") + "/"
WORDS, WIDTH, STEPS = 64, 8, 6
MATRIX = np.random.default_rng(1).normal(size=(WORDS, WIDTH)).astype(np.float32)
SPLIT = {"partitioner_min_bytes": 256, "evaluation": "none", "seed": 1}


def fresh(optimizer=None):
    table = keras.layers.Embedding(WORDS, WIDTH, input_length=2, name="table")
    model = keras.Sequential([table, keras.layers.Flatten(), keras.layers.Dense(1, name="line")])
    model.compile(keras.optimizers.SGD(0.0) if optimizer is None else optimizer, "mse")
    return model


def data():
    words = np.random.default_rng(2).integers(WORDS, size=(64, 2))
    return tf.data.Dataset.from_tensor_slices((words, words.sum(axis=1, keepdims=True) / WORDS)).batch(8).repeat()


class Program:
    """Builds a model by a function; keeps the last one, which is the whole one that was exported."""

    def __init__(self, build):
        self._build = build

    def build_model(self):
        self.model = self._build()
        return self.model

    def train_dataset(self, context):
        return data()

    def eval_dataset(self, context):
        return data().take(4)


def trained(build, workers=2, ps=2, steps=STEPS, **settings):
    program = Program(build)
    testing.train(program, steps, workers, ps, **{**SPLIT, **settings})
    return program.model


def write():
    """Write what is loaded later: a model that was trained, in each format."""
    keras.utils.set_random_seed(3)
    model = fresh(keras.optimizers.Adam(0.05))
    model.fit(data().take(5), verbose=0)
    model.save(f"{PLACE}model.keras")
    model.save(f"{PLACE}model.h5")
    model.save(f"{PLACE}model")
    model.save_weights(f"{PLACE}plain.h5")
    model.save_weights(f"{PLACE}new.weights.h5")
    model.save_weights(f"{PLACE}checkpoint")
    words = keras.Input((2,), dtype=tf.int64)
    tf.saved_model.save(keras.Model(words, model.layers[0](words)), f"{PLACE}features")
    legacy = fresh(keras.optimizers.legacy.Adam(0.05))
    legacy.fit(data().take(5), verbose=0)
    legacy.save(f"{PLACE}legacy.h5")
    return model.get_weights()


def loads(name):
    def build():
        model = fresh()
        model.load_weights(f"{PLACE}{name}")
        return model

    return build


def assigns(way):
    def build():
        model = fresh()
        way(model)
        return model

    return build


def with_argument():
    table = keras.layers.Embedding(WORDS, WIDTH, input_length=2, weights=[MATRIX])
    model = keras.Sequential([table, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    table.trainable = False
    return model


def read(saved):
    """How far weights that are read in each way are from the saved ones, where all are split over two ps."""
    ways = {name: loads(name) for name in ("plain.h5", "new.weights.h5", "checkpoint", "model.keras")}
    ways["set_weights"] = assigns(lambda model: model.set_weights(saved))
    ways["of_layers"] = assigns(
        lambda model: [model.layers[0].set_weights(saved[:1]), model.layers[2].set_weights(saved[1:])]
    )
    ways["assigned"] = assigns(
        lambda model: [one.assign(value) for one, value in zip(model.weights, saved, strict=True)]
    )
    ways["directory"] = lambda: keras.models.load_model(f"{PLACE}model")
    return {
        name: tried(lambda build=build: distance(split(build).get_weights(), saved)) for name, build in ways.items()
    }


def split(build):
    """Build a model as the coordinator does, with every weight split."""
    strategy = testing.in_process_cluster(1, 2, tf.distribute.experimental.partitioners.FixedShardsPartitioner(2))
    model, _ = make_model(Program(build), strategy)
    assert len(model.weights) > len(model.get_weights())
    return model


def written(saved):
    """How far weights are that a split model has written itself."""

    def build():
        model = fresh()
        model.set_weights(saved)
        model.save_weights(f"{PLACE}again.h5")
        model.save_weights(f"{PLACE}again.weights.h5")
        return model

    split(build)
    again = fresh()
    found = []
    for name in ("again.h5", "again.weights.h5"):
        again.load_weights(f"{PLACE}{name}")
        found.append(distance(again.get_weights(), saved))
    return max(found)


def goes_on(name):
    """A model that comes with its optimizer is trained as Keras does it alone, which goes on at the same step."""

    def build():
        return keras.models.load_model(f"{PLACE}{name}")

    plain = build()
    plain.fit(data().take(STEPS), verbose=0, shuffle=False)
    expected = plain.get_weights()  # before this process is part of a cluster
    begun = int(build().optimizer.iterations)
    steps = []

    class Watched(Program):
        def callbacks(self):
            end = keras.callbacks.LambdaCallback(
                on_train_end=lambda logs: steps.append(int(self.strategys.optimizer.iterations))
            )
            return [end]

        def build_model(self):
            model = super().build_model()
            if tf.distribute.has_strategy():
                self.strategys = model
            return model

    ours = Watched(build)
    testing.train(ours, STEPS, 1, 2, **SPLIT)
    return {"distance": distance(ours.model.get_weights(), expected), "steps": steps[0] - begun}


class OnFeatures(keras.Model):
    """A line on the features of a SavedModel, whose functions know whole variables."""

    def __init__(self):
        super().__init__()
        self.features = tf.saved_model.load(f"{PLACE}features")
        self.line = keras.layers.Dense(1)

    def call(self, words):
        return self.line(tf.reshape(self.features(words), [-1, 2 * WIDTH]))


def on_features():
    model = OnFeatures()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def saved_model(saved):
    result = trained(on_features)
    return distance([result.features.variables[0].numpy()], saved[:1])


def frozen(saved):
    """A table of another model, frozen, below a line that is trained."""

    def build():
        base = keras.models.load_model(f"{PLACE}model.keras")
        base.trainable = False
        words = keras.Input((2,), dtype=tf.int64)
        flat = keras.layers.Flatten()(base.get_layer("table")(words))
        model = keras.Model(words, keras.layers.Dense(1)(flat))
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    return distance(trained(build).get_weights()[:1], saved[:1])


def refused(way):
    try:
        split(assigns(way))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def recurrent():
    """How far a recurrent net with split kernels is from a whole one with the same weights."""

    def build():
        table = keras.layers.Embedding(WORDS, WIDTH, input_length=2)
        lstm = keras.layers.LSTM(16, return_sequences=True)
        model = keras.Sequential([table, lstm, keras.layers.Bidirectional(keras.layers.GRU(4))])
        model.compile("sgd", "mse")
        return model

    plain, words = build(), np.arange(8).reshape(4, 2)
    expected = plain(words).numpy()
    ours = split(build)
    ours.set_weights(plain.get_weights())
    return distance([ours(words).numpy()], [expected])


def main():
    sys.modules["weights_check"] = sys.modules["__main__"]
    saved = write()
    if sys.argv[1:] == ["matrix"]:
        print(json.dumps({name: tried(goes_on, name) for name in ("model.h5", "legacy.h5")}), flush=True)
        os._exit(0)
    found = {
        "read": read(saved),
        "written": tried(written, saved),
        "argument": tried(lambda: distance(split(with_argument).get_weights()[:1], [MATRIX])),
        "goes_on": tried(goes_on, "model.keras"),
        "saved_model": tried(saved_model, saved),
        "frozen": tried(frozen, saved),
        "recurrent": tried(recurrent),
        "parts": refused(lambda model: model.trainable_variables[0].assign(saved[0])),
        "too_large": refused(lambda model: model.layers[0].embeddings.assign(np.zeros([WORDS + 1, WIDTH]))),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
