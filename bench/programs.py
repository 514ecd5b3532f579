"""The programs that the benches train: one tiny classifier, as it is and with slow steps."""

from __future__ import annotations

import importlib
import os
from operator import attrgetter
from typing import Any

import numpy as np
import tensorflow as tf

# tf.data's own sleep: it holds no CPU and no Python lock, like a step that waits for an accelerator.
from tensorflow.python.data.experimental.ops.testing import sleep

from trainer.examples import criteo

BATCH = 32
EXAMPLES = 32 * 256
FEATURES = 16
CLASSES = 4


class Tiny:
    """A model so small that a step is nothing but TensorFlow's own work for it."""

    step_seconds = 0.0

    def build_model(self) -> tf.keras.Model:
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((FEATURES,)),
                tf.keras.layers.Dense(16, activation="relu"),
                tf.keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.01),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        examples = self._examples().shard(context.num_input_pipelines, context.input_pipeline_id)
        batches = examples.repeat().batch(BATCH, drop_remainder=True)
        if not self.step_seconds:
            return batches.prefetch(2)
        # Not prefetched: the time belongs to the step, and no pause of the coordinator may hide behind it.
        return batches.apply(sleep(round(self.step_seconds * 1e6)))

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        return self._examples().batch(BATCH)

    def _examples(self) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self._arrays())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed=1)
        features = generator.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        labels = features[:, :CLASSES].argmax(axis=1).astype(np.int32)
        return features, labels


class Dense(Tiny):
    """A dense model of 4 MB, trained with Adam."""

    def build_model(self) -> tf.keras.Model:
        layers = [tf.keras.layers.Dense(FEATURES * 32, activation="relu") for _ in range(5)]
        model = tf.keras.Sequential([tf.keras.layers.Input((FEATURES,)), *layers, tf.keras.layers.Dense(CLASSES)])
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.0001),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model


class Even(Tiny):
    """A model of eight weights of 1 MB each, and hardly anything else: as many of them on each ps."""

    units: tuple[int, ...] = (512,) * 8

    def build_model(self) -> tf.keras.Model:
        layers = [tf.keras.layers.Dense(units, activation="relu", use_bias=False) for units in self.units]
        wide = tf.keras.layers.Lambda(lambda features: tf.tile(features, [1, 512 // FEATURES]))
        classes = tf.keras.layers.Lambda(lambda features: features[:, :CLASSES])
        model = tf.keras.Sequential([tf.keras.layers.Input((FEATURES,)), wide, *layers, classes])
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.0001),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model


class OneLarge(Even):
    """A model with one weight of 32 MB, and a small one."""

    units = (16384, CLASSES)


class Waiting(Tiny):
    """Bound by latency: a step waits 50 ms and computes next to nothing, so that workers can share a processor."""

    step_seconds = 0.05


class Reading(Tiny):
    """Bound by its input, files of 512 examples: to read a batch takes 50 ms, one after the other."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        features, labels = map(tf.constant, self._arrays())
        files = tf.data.Dataset.range(EXAMPLES // 512).shard(context.num_input_pipelines, context.input_pipeline_id)
        numbers = files.flat_map(lambda file: tf.data.Dataset.range(file * 512, (file + 1) * 512))
        examples = numbers.map(lambda number: (tf.gather(features, number), tf.gather(labels, number)))
        return examples.repeat().batch(BATCH, drop_remainder=True).apply(sleep(50_000)).prefetch(2)


class Writes:
    """Writes down each step that begins, in each process: a numbered file for each dataset that was made."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        made = tf.strings.as_string(tf.random.uniform([], maxval=tf.int64.max, dtype=tf.int64))
        path = tf.strings.join([os.environ["BENCH_STEPS"] + "/", made])

        def count(number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.control_dependencies([tf.io.write_file(path, tf.strings.as_string(number))]):
                return tf.nest.map_structure(tf.identity, batch)

        dataset: tf.data.Dataset = super().train_dataset(context)  # type: ignore[misc]
        return dataset.enumerate(start=1).map(count)


class Counted(Writes, Waiting):
    """Trained by bench/goodput."""


class Uneven(Tiny):
    """Steps that wait, and vary by 30 %, on one worker longer than on the others; it writes down each step that begins.

    BENCH_STEP_SECONDS says how long a step is, BENCH_SLOWER how many times longer it is on worker 0. The parts by which
    steps vary are those of the golden ratio's multiples, whose mean over a few steps is nearly that over many.
    """

    jitter = 0.3
    golden = 0.6180339887498949

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        microseconds = float(os.environ["BENCH_STEP_SECONDS"]) * 1e6
        slower = tf.where(tf.equal(context.input_pipeline_id, 0), float(os.environ["BENCH_SLOWER"]), 1.0)
        made = tf.random.uniform([], maxval=2**31, dtype=tf.int64)
        path = tf.strings.join([os.environ["BENCH_STEPS"] + "/", tf.strings.as_string(made)])

        def wait(number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            part = tf.math.floormod(tf.cast(number + made % 1000, tf.float64) * self.golden, 1.0)
            pause = microseconds * slower * (1 + self.jitter * (2 * tf.cast(part, tf.float32) - 1))
            with tf.control_dependencies([tf.io.write_file(path, tf.strings.as_string(number))]):
                slept = tf.data.Dataset.range(1).apply(sleep(tf.cast(pause, tf.int64)))
                waited = slept.take(1).get_single_element()  # else it would sleep once more, at the end
            with tf.control_dependencies([waited]):
                return tf.nest.map_structure(tf.identity, batch)

        return self._examples().repeat().batch(BATCH, drop_remainder=True).enumerate(start=1).map(wait)


class Slow(Tiny):
    """A step of one second, which no packing can make faster."""

    step_seconds = 1.0


class Table:
    """A recommender's step: ten rows of a large table for each example, and next to no computing besides.

    BENCH_ROWS says how many rows there are. The ids are drawn evenly, so that hardly any row is asked for twice.
    """

    keras = staticmethod(lambda: tf.keras)
    optimizer = staticmethod(lambda: tf.keras.optimizers.SGD(0.01))
    width, ids, batch, batches = 16, 10, 1024, 64

    def build_model(self) -> Any:
        keras = self.keras()
        model = keras.Sequential(
            [
                keras.layers.Input((self.ids,), dtype="int64"),
                keras.layers.Embedding(int(os.environ["BENCH_ROWS"]), self.width),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(
            optimizer=self.optimizer(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows, worker = int(os.environ["BENCH_ROWS"]), tf.cast(context.input_pipeline_id, tf.int64)

        def draw(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            ids = tf.random.stateless_uniform([self.batch, self.ids], [number, worker], 0, rows, tf.int64)
            return ids, ids[:, 0] % 2

        return tf.data.Dataset.range(self.batches).map(draw).cache().repeat().prefetch(2)

    eval_dataset = train_dataset


class TableAdam(Table):
    optimizer = staticmethod(lambda: tf.keras.optimizers.Adam(0.001))


class TableAdagrad(Table):
    optimizer = staticmethod(lambda: tf.keras.optimizers.Adagrad(0.01))


class TableNew(TableAdagrad):
    """The same, where one id of twenty is drawn from so many that it was hardly ever there before."""

    new, drawn_from = 0.05, 2**40

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        def renew(ids: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            drawn = tf.random.uniform(tf.shape(ids), 0, self.drawn_from, tf.int64)
            return tf.where(tf.random.uniform(tf.shape(ids)) < self.new, drawn, ids), labels

        return super().train_dataset(context).map(renew)

    eval_dataset = train_dataset


class TableFilled(TableAdagrad):
    """The same, where the first steps name each key once, and later ones some much more often than others (Zipf)."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        rows, workers = int(os.environ["BENCH_ROWS"]), context.num_input_pipelines
        worker = tf.cast(context.input_pipeline_id, tf.int64)

        def take(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            begin = number * self.batch * self.ids
            ids = tf.reshape(tf.range(begin, begin + self.batch * self.ids) % rows, [self.batch, self.ids])
            return ids, ids[:, 0] % 2

        def draw(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            drawn = tf.random.stateless_uniform([self.batch, self.ids], [number, worker], dtype=tf.float64)
            ids = tf.cast(tf.exp(drawn * np.log(rows + 1)), tf.int64) - 1
            return ids, ids[:, 0] % 2

        filling = tf.data.Dataset.range(worker, self.filling_steps(rows), workers).map(take)
        return filling.concatenate(tf.data.Dataset.range(self.batches).map(draw).cache().repeat()).prefetch(2)

    eval_dataset = train_dataset

    @classmethod
    def filling_steps(cls, rows: int) -> int:
        """Return how many steps name each key once, of all workers together."""
        return -(-rows // (cls.batch * cls.ids))


class TableHashed(TableNew):
    """The same with the ids that a hash makes of these, for a fixed table."""

    @property
    def drawn_from(self) -> int:  # type: ignore[override]
        return int(os.environ["BENCH_ROWS"])


class ManyTables(Table):
    """A recommender's step with 26 features of one id each, as Criteo's data has them: a table for each."""

    ids = 26

    def build_model(self) -> Any:
        keras, rows = self.keras(), int(os.environ["BENCH_ROWS"])
        ids = keras.layers.Input((self.ids,), dtype="int64")
        looked_up = [keras.layers.Embedding(rows, self.width)(ids[:, number]) for number in range(self.ids)]
        hidden = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()(looked_up))
        model = keras.Model(ids, keras.layers.Dense(2)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=self.optimizer(), loss=loss, metrics=["accuracy"])
        return model


class ManyTablesAdagrad(ManyTables):
    optimizer = staticmethod(lambda: tf.keras.optimizers.Adagrad(0.01))


class TableOf(Table):
    """The same with the optimizer of BENCH_OPTIMIZER, as bench/right names it; `SGD` has momentum."""

    def keras(self) -> Any:
        return importlib.import_module("keras") if "keras3." in os.environ["BENCH_OPTIMIZER"] else tf.keras

    def optimizer(self) -> Any:
        name = os.environ["BENCH_OPTIMIZER"].removeprefix("keras3.")
        more = {"momentum": 0.9} if name == "SGD" else {}
        return attrgetter(name)(self.keras().optimizers)(0.01, **more)


class TableAny(TableOf):
    """The same in small batches.

    The first batches name a small part of the rows each, so that most rows are looked up for the first time while
    others train.
    """

    batch, batches = 16, 125


class Apart:
    """Has workers read different parts where the guide tells each of them that it is the only one."""

    def part(self, context: tf.distribute.InputContext) -> tf.Tensor:
        if context.num_input_pipelines > 1:
            return tf.cast(context.input_pipeline_id, tf.int64)
        return tf.random.uniform([], maxval=2**20, dtype=tf.int64)


class Kept(criteo.Criteo):
    """Has each worker read the same 64 batches again and again, so that nothing is measured of making them."""

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        return super().train_dataset(context).take(64).cache().repeat().prefetch(2)


class WideAndDeep(Apart, criteo.WideAndDeep):
    """Trained by bench/recommender to see what it learns."""


class DLRM(Apart, criteo.DLRM):
    """The same."""


class WideAndDeepKept(Kept, WideAndDeep):
    """Trained by bench/recommender to see how fast."""


class DLRMKept(Kept, DLRM):
    """The same."""


class WideAndDeepCounted(Writes, WideAndDeepKept):
    """Trained by bench/goodput to see what a recommender keeps of its speed."""
