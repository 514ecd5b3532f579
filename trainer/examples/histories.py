"""Will this be clicked, after what was seen? Attention over a history, as of a deep interest network; weighted tags.

Histories differ in length, and 0 fills them up: the table masks it. Each item that was seen counts by how much it has
to do with the one that is offered. Tags are several ids with weights, whose rows are averaged. The data is made up
here: a user has two interests among many, and clicks at what fits either.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

ITEMS, KINDS, TAGS = 1_000, 10, 50
SEEN, LABELS = 12, 3  # at most
EXAMPLES = {"train": 100_000, "test": 10_000}
BATCH = 512
EMBEDDING = 16


def load(part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the features by name and the clicks (1 or 0) of "train" or "test", always the same.

    "seen" has ids of items and "tags" has ids of tags, filled up with 0; "tag_weights" has one for each tag.
    """
    random = np.random.default_rng(seed={"train": 2, "test": 3}[part])
    count = EXAMPLES[part]
    interests = random.integers(KINDS, size=(count, 2))
    kind = np.take_along_axis(interests, random.integers(2, size=(count, SEEN)), axis=1)
    seen = of_kind(random, kind)
    seen[np.arange(SEEN) >= random.integers(1, SEEN + 1, size=(count, 1))] = 0
    offered_kind = np.where(random.random(count) < 0.5, interests[:, 0], random.integers(KINDS, size=count))
    tags = random.integers(1, TAGS, size=(count, LABELS))
    tags[np.arange(LABELS) >= random.integers(1, LABELS + 1, size=(count, 1))] = 0
    fits = np.any((kind == offered_kind[:, None]) & (seen > 0), axis=1)
    clicked = random.random(count) < np.where(fits, 0.9, 0.1)
    weights = random.uniform(0.5, 1.5, size=tags.shape).astype(np.float32)
    return {"seen": seen, "offered": of_kind(random, offered_kind), "tags": tags, "tag_weights": weights}, clicked * 1


def of_kind(random: np.random.Generator, kind: np.ndarray) -> np.ndarray:
    """Return an item of each kind: those of a kind are `KINDS` apart, from 1 on."""
    return 1 + kind + KINDS * random.integers(ITEMS // KINDS, size=kind.shape)


class Attention(tf.keras.layers.Layer):
    """The mean of the rows of what was seen, by weights that a small network finds for the row that is offered."""

    def __init__(self, width: int = 16, **more: object) -> None:
        super().__init__(**more)
        self.hidden = tf.keras.layers.Dense(width, activation="relu")
        self.score = tf.keras.layers.Dense(1)

    def call(self, rows: tuple[tf.Tensor, tf.Tensor], mask: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        seen, offered = rows
        offered = tf.broadcast_to(offered[:, None], tf.shape(seen))
        scores = self.score(self.hidden(tf.concat([seen, offered, seen * offered], axis=-1)))
        scores = tf.where(mask[0][..., None], scores, scores.dtype.min)
        return tf.reduce_sum(tf.nn.softmax(scores, axis=1) * seen, axis=1)


class WeightedMean(tf.keras.layers.Layer):
    """The mean of rows by weights; rows that the table masks count nothing."""

    def call(self, rows: tuple[tf.Tensor, tf.Tensor], mask: tuple[tf.Tensor, tf.Tensor | None]) -> tf.Tensor:
        table_rows, weights = rows
        weights = tf.where(mask[0], weights, 0)[..., None]
        return tf.math.divide_no_nan(tf.reduce_sum(table_rows * weights, axis=1), tf.reduce_sum(weights, axis=1))


class Histories:
    """A table of items for what was seen and what is offered, and a table of tags."""

    def build_model(self) -> tf.keras.Model:
        seen = tf.keras.Input((SEEN,), dtype=tf.int64, name="seen")
        offered = tf.keras.Input((), dtype=tf.int64, name="offered")
        tags = tf.keras.Input((LABELS,), dtype=tf.int64, name="tags")
        weights = tf.keras.Input((LABELS,), name="tag_weights")
        items = tf.keras.layers.Embedding(ITEMS + 1, EMBEDDING, mask_zero=True, name="items")
        labels = tf.keras.layers.Embedding(TAGS, EMBEDDING, mask_zero=True, name="tags_table")
        history = Attention(name="attention")((items(seen), items(offered)))
        tagged = WeightedMean(name="tagged")((labels(tags), weights))
        row = items(offered)
        hidden = tf.keras.layers.Concatenate()([history, row, history * row, tagged])
        hidden = tf.keras.layers.Dense(32, activation="relu")(hidden)
        inputs = {"seen": seen, "offered": offered, "tags": tags, "tag_weights": weights}
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
        model.compile(
            optimizer=tf.keras.optimizers.Adam(0.01),
            loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[tf.keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each worker reads its own part, in an order of its own.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(50_000).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test"))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
