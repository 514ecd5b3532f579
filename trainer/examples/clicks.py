"""Will this be clicked? One table for the ids of all items, as large as you like: what parameter servers are for.

Ids are hashed into the table's rows, so that nobody keeps a vocabulary. A step looks up a few thousand rows; with the
run setting `lazy_optimizers` it changes only those. The data is made up here: who has looked at items of one kind
clicks at more of it.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

ITEMS, KINDS = 1_000, 4
SEEN = 9  # items before the one that is offered
EXAMPLES = {"train": 100_000, "test": 10_000}
BATCH = 512
EMBEDDING = 16


def load(part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return {"seen": ids, "offered": id} and the clicks (1 or 0) of "train" or "test", always the same."""
    kind = np.random.default_rng(seed=1).integers(KINDS, size=ITEMS)
    by_kind = [np.flatnonzero(kind == number) for number in range(KINDS)]
    random = np.random.default_rng(seed={"train": 2, "test": 3}[part])
    count = EXAMPLES[part]
    taste, offered = random.integers(KINDS, size=count), random.integers(ITEMS, size=count)
    liked = random.random(count) < 0.5
    seen = np.empty((count, SEEN), np.int64)
    for number, items in enumerate(by_kind):
        seen[taste == number] = random.choice(items, size=(np.sum(taste == number), SEEN))
        offered[liked & (taste == number)] = random.choice(items, size=np.sum(liked & (taste == number)))
    clicked = random.random(count) < np.where(kind[offered] == taste, 0.95, 0.05)
    return {"seen": seen, "offered": offered}, clicked.astype(np.int32)


class Clicks:
    """The dot product of what was seen and what is offered, both from one table."""

    def __init__(self, rows: int = 100_000) -> None:
        # 100,000 rows of 16 numbers are 6.1 MiB: two parameter servers hold half of the table each.
        self.rows = rows

    def build_model(self) -> tf.keras.Model:
        seen = tf.keras.Input((SEEN,), dtype=tf.int64, name="seen")
        offered = tf.keras.Input((), dtype=tf.int64, name="offered")
        row = tf.keras.layers.Hashing(self.rows)
        table = tf.keras.layers.Embedding(self.rows, EMBEDDING, name="items")
        history = tf.keras.layers.GlobalAveragePooling1D()(table(row(seen)))
        agreement = tf.keras.layers.Dot(axes=1)([history, table(row(offered))])
        # Above zero, for what agrees to be clicked: no table agrees with itself below zero.
        clicked = tf.keras.layers.Dense(1, kernel_initializer="ones")(agreement)
        model = tf.keras.Model({"seen": seen, "offered": offered}, clicked)
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
