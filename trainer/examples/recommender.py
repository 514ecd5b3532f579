"""A recommender: will this user like that item? Two tables, each large enough to be shared out over the ps.

The data is made up here: users and items have hidden tastes, and a few items are asked about far more often than most.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

USERS = 10_000
ITEMS = 20_000
# Ids as a shop gives them, the most popular item first.
USER_IDS = 500_000 + np.arange(USERS)
ITEM_IDS = 900_000 + np.arange(ITEMS)

OPINIONS = {"train": 400_000, "test": 20_000}
BATCH = 256
# 10,001 rows of 16 numbers are 625 KiB, 20,001 are 1.2 MiB: two parameter servers hold half of each table.
EMBEDDING = 16


def load(part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return {"user": ids, "item": ids} and the opinions (1 liked, 0 not) of "train" or "test", always the same."""
    world = np.random.default_rng(seed=1)
    user_taste, item_taste = world.normal(size=(USERS, 3)), world.normal(size=(ITEMS, 3))
    random = np.random.default_rng(seed={"train": 2, "test": 3}[part])
    user = random.integers(USERS, size=OPINIONS[part])
    item = np.floor(ITEMS ** random.random(OPINIONS[part])).astype(np.int64) - 1  # Zipf: the n-th in 1/n of all cases
    agreement = np.sum(user_taste[user] * item_taste[item], axis=1)
    liked = random.random(len(agreement)) < 1 / (1 + np.exp(-3 * agreement))
    return {"user": USER_IDS[user], "item": ITEM_IDS[item]}, liked.astype(np.int32)


def in_random_order(ids: np.ndarray) -> np.ndarray:
    """Return the ids in an order that has nothing to do with how popular they are.

    A shard of a table is a run of consecutive rows. In the order of popularity, one parameter server would hold all
    the rows that everybody asks for, and do all the work. The order is always the same, because a checkpoint knows
    rows and not ids.
    """
    return np.random.default_rng(seed=1).permutation(ids)


class Recommender:
    """The dot product of what is learnt about the user and about the item."""

    def build_model(self) -> tf.keras.Model:
        inputs, tastes = {}, []
        for name, ids in (("user", USER_IDS), ("item", ITEM_IDS)):
            row = tf.keras.layers.IntegerLookup(vocabulary=in_random_order(ids))  # row 0 is for ids that nobody knows
            inputs[name] = tf.keras.Input((), dtype=tf.int64, name=name)
            table = tf.keras.layers.Embedding(row.vocabulary_size(), EMBEDDING, name=f"{name}_taste")
            tastes.append(table(row(inputs[name])))
        model = tf.keras.Model(inputs, tf.keras.layers.Dot(axes=1)(tastes))
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-2),
            loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[tf.keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each worker reads its own part, in an order of its own.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(100_000).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test"))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(BATCH)
