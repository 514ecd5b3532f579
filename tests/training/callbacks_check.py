"""Train with Keras's callbacks under both APIs, on servers in this process; print what they did, as JSON.

Scores are given to the callbacks by a script, epoch by epoch, so that what they should do is known.
"""

import contextlib
import csv
import http.server
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from trainer import testing  # before TensorFlow: it chooses the Keras

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

from checks import POSTS, Posts  # isort: skip
from trainer.core.failures import explain  # isort: skip
from trainer.training.loop import save_schedule  # isort: skip
from trainer.training.loop.callbacks import keras  # isort: skip

save_schedule.PATIENCE_SECONDS = 60.0  # on a busy disk too, each epoch has its save

EPOCH = 8
SCORES = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


class Line:
    """A line through points; its learning rate is so small that the weights differ at each step."""

    def __init__(self, callbacks=None, optimizer=lambda: tf.keras.optimizers.SGD(0.01)):
        self.optimizer = optimizer
        self.model = None
        if callbacks is not None:
            self.callbacks = callbacks

    def build_model(self):
        self.model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))])
        self.model.compile(self.optimizer(), "mse")
        return self.model

    def train_dataset(self, context):
        rows = np.random.default_rng(1).normal(size=(64, 2)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((rows, rows.sum(axis=1))).batch(8)

    def eval_dataset(self, context):
        return self.train_dataset(context).take(2)


class Divided(tf.keras.Sequential):
    """Each optimizer trains a layer of its own, and none the last."""

    def train_step(self, data):
        features, target = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(features, target, self(features, training=True))
        self.optimizer.minimize(loss, self.layers[0].trainable_variables, tape=tape)
        self.second.minimize(loss, self.layers[1].trainable_variables, tape=tape)
        return {"loss": loss}


class Averaged(Line):
    def build_model(self):
        half = tf.keras.initializers.Constant(0.5)
        own, second, third = (tf.keras.layers.Dense(1, kernel_initializer=half) for _ in range(3))
        self.model = Divided([tf.keras.Input((2,)), own, second, third])
        self.model.second = tf.keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)
        self.model.compile(self.optimizer(), "mse")
        return self.model


class NotANumber(Line):
    def train_dataset(self, context):
        return super().train_dataset(context).map(lambda x, y: (x, y / 0.0))


class Script(keras.Callback):
    """Gives the scores, writes down the weights at each epoch's end, and fails once when an epoch begins."""

    seen: dict
    fails_at = -1

    def __init__(self, api):
        super().__init__()
        self.epochs = []
        self.api = api
        self.seen = SEEN.setdefault(api, {})

    def wait_for(self, epoch):
        """Wait for the checkpoint of that epoch's begin: with a save in flight the next one might be left out."""
        saved = DIRECTORY / self.api / "runs" / "test" / "checkpoints" / f"ckpt-{epoch * EPOCH}.manifest.json"
        deadline = time.monotonic() + 60
        while not saved.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == Script.fails_at:
            self.wait_for(epoch)
            Script.fails_at = -1
            raise RuntimeError("the script's own fault")

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            self.wait_for(epoch)
        logs["score"] = SCORES[epoch]
        self.epochs.append(epoch)
        self.seen[epoch] = self.model.layers[0].kernel.numpy().tolist()


SEEN: dict = {}
DIRECTORY = Path(tempfile.mkdtemp(prefix="psfleet-callbacks-"))


def all_that_work(api, server):
    place = DIRECTORY / api
    place.mkdir()
    lambdas: list = []
    SEEN[f"{api} lambdas"] = lambdas
    made = {}

    def callbacks():
        made.update(
            script=Script(api),
            plateau=keras.ReduceLROnPlateau("score", factor=0.5, patience=2),
            stopping=keras.EarlyStopping("score", patience=3, restore_best_weights=True),
            history=keras.History(),
        )
        return [
            made["script"],
            made["plateau"],
            made["stopping"],
            made["history"],
            keras.ModelCheckpoint(
                str(place / "best-{epoch}.weights.h5"), "score", save_best_only=True, save_weights_only=True
            ),
            keras.ModelCheckpoint(str(place / "each-{epoch}.weights.h5"), save_weights_only=True),
            keras.ModelCheckpoint(str(place / "saved-{epoch}"), "score", save_best_only=True),
            keras.ModelCheckpoint(str(place / "whole-{epoch}.keras"), "score", save_best_only=True),
            keras.CSVLogger(str(place / "log.csv")),
            keras.TensorBoard(str(place / "board"), histogram_freq=1),
            keras.TerminateOnNaN(),
            keras.RemoteMonitor(root=server),
            keras.LambdaCallback(on_epoch_end=lambda epoch, logs: lambdas.append([epoch, sorted(logs)])),
        ]

    program = Line(callbacks)
    settings = {"api": api, "epoch_steps": EPOCH, "checkpoint_steps": EPOCH, "evaluation": "inline", "seed": 1}
    Script.fails_at = 3
    try:
        testing.train(program, 8 * EPOCH, 2, 1, place, **settings)
    except RuntimeError:
        assert Script.fails_at == -1
    result = testing.train(program, 8 * EPOCH, 2, 1, place, **settings)
    exported = tf.saved_model.load(str(result.directory / "export"))
    with (place / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "step": result.step,
        "epochs": made["script"].epochs,
        "rate": float(program.model.optimizer.learning_rate.numpy()),
        "best": SEEN[api][1],
        "exported": next(one.numpy().tolist() for one in exported.variables if one.shape == [2, 1]),
        "files": sorted(path.name for path in place.iterdir() if "-" in path.name),
        "rows": [[row["epoch"], float(row["val_loss"]) > 0] for row in rows],
        "history": made["history"].history["score"],
        "board": sorted({path.parent.name for path in (place / "board").glob("*/events*")}),
        "lambdas": lambdas,
        "records": sorted(int(path.stem) for path in (result.directory / "callbacks").glob("[0-9]*.json")),
        "checkpoints": sorted(
            int(path.name.split(".")[0][5:]) for path in (result.directory / "checkpoints").glob("ckpt-*.index")
        ),
    }


def scheduled(api):
    rates = []

    def callbacks():
        write = keras.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(float(program.model.optimizer.learning_rate.numpy()))
        )
        return [keras.LearningRateScheduler(lambda epoch: 0.01 / 2**epoch), write]

    program = Line(callbacks)
    testing.train(program, 2 * EPOCH, 1, 1, api=api, epoch_steps=EPOCH, evaluation="none", export=False)
    return rates


def predicting(api):
    """Call the model at each epoch's end, and predict, of which the first error is caught; returns shapes and error.

    With the custom loop `predict` works, so that this evaluates.
    """
    shapes, rows = [], np.zeros([3, 2], np.float32)

    class Predicts(keras.Callback):
        def on_epoch_end(self, epoch, logs=None):
            shapes.extend(self.model(rows).shape)
            with contextlib.suppress(*[] if epoch else [Exception]):
                self.model.predict(rows) if api == "fit" else self.model.evaluate(rows, rows[:, :1])

    try:
        settings = {"api": api, "epoch_steps": EPOCH, "evaluation": "none", "export": False}
        testing.train(Line(lambda: [Predicts()]), 2 * EPOCH, 1, 1, **settings)
    except Exception as error:
        return [shapes, explain(error)]


def not_a_number(api):
    settings = {"steps_per_execution": 5, "evaluation": "none", "export": False}
    return testing.train(NotANumber(lambda: [keras.TerminateOnNaN()]), 50_000, 2, 1, api=api, **settings).step


def averaged(api):
    """The same program and data with either API; returns the last weights and what is exported and saved.

    Of the second optimizer's layer it is whether the weight is the average, of the third layer the weight.
    """
    last = []

    class Average(tf.keras.optimizers.SGD):
        def finalize_variable_values(self, var_list):
            last.append(var_list[0].numpy().tolist())
            super().finalize_variable_values(var_list)

    program = Averaged(optimizer=lambda: Average(0.01, momentum=0.9, use_ema=True))
    result = testing.train(program, 30, 1, 1, api=api, evaluation="inline", seed=1)
    exported = tf.saved_model.load(str(result.directory / "export"))
    whole = next(one.numpy() for one in exported.variables if one.shape == [2, 1])
    reader = tf.train.load_checkpoint(str(result.directory / "checkpoints" / "ckpt-30"))
    names = sorted(reader.get_variable_to_shape_map())
    kernel, second, third = (
        reader.get_tensor(f"model/layer_with_weights-{number}/kernel/.ATTRIBUTES/VARIABLE_VALUE") for number in range(3)
    )
    averages = [reader.get_tensor(name) for name in names if name.startswith("model/second/_variables/")]
    return {
        "last": last,
        "exported": whole.tolist(),
        "saved": kernel.tolist(),
        "second": [np.array_equal(second, one) for one in averages],
        "third": third.tolist(),
        "evaluation": result.evaluation,
    }


def main():
    posts = http.server.HTTPServer(("127.0.0.1", 0), Posts)
    threading.Thread(target=posts.serve_forever, daemon=True).start()
    found = {}
    for api in ("custom_loop", "fit"):
        POSTS.clear()
        found[api] = {
            **all_that_work(api, f"http://127.0.0.1:{posts.server_port}"),
            "posts": len(POSTS),
            "rates": scheduled(api),
            "predicting": predicting(api),
            "not_a_number": not_a_number(api),
            "averaged": averaged(api),
        }
    print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


main()
