"""Which items will this user want? Two towers for retrieval, trained by what was taken alone, with no rejections.

The other items of a batch are a user's negatives. Popular items are more often among them, so each score is lowered by
the logarithm of how often its item is drawn. The export has a signature for each tower: one gives an index of nearest
neighbours its items, the other asks it. The data is made up here: a user mostly takes items of one kind.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

USERS, ITEMS, KINDS = 10_000, 6_000, 20
TAKEN = {"train": 200_000, "test": 10_240}
BATCH = 512
EMBEDDING, WIDTH = 32, 16
TEMPERATURE = 0.1


def load(part: str) -> dict[str, np.ndarray]:
    """Return {"user": ids, "item": ids} of what was taken in "train" or "test", always the same."""
    world = np.random.default_rng(seed=1)
    taste, kind = world.integers(KINDS, size=USERS), world.permutation(np.arange(ITEMS) % KINDS)
    by_kind = np.stack([np.flatnonzero(kind == number) for number in range(KINDS)])
    random = np.random.default_rng(seed={"train": 2, "test": 3}[part])
    user = random.integers(USERS, size=TAKEN[part])
    mostly = np.where(random.random(TAKEN[part]) < 0.9, taste[user], random.integers(KINDS, size=TAKEN[part]))
    place = np.floor(by_kind.shape[1] ** random.random(TAKEN[part])).astype(np.int64) - 1  # Zipf, within a kind
    return {"user": user, "item": by_kind[mostly, place]}


def tower(count: int, name: str) -> tf.keras.Sequential:
    """Return a table of the ids and what makes directions of its rows, which dot products then compare."""
    return tf.keras.Sequential(
        [
            tf.keras.Input((), dtype=tf.int64, name=name),
            tf.keras.layers.Embedding(count, EMBEDDING),
            tf.keras.layers.Dense(WIDTH),
            tf.keras.layers.UnitNormalization(),
        ],
        name=f"{name}_tower",
    )


class Towers(tf.keras.Model):
    """Scores each user of a batch with each item of it."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = tower(USERS, "user"), tower(ITEMS, "item")
        counts = np.bincount(load("train")["item"], minlength=ITEMS)
        self.log_frequency = tf.constant(np.log(np.maximum(counts, 1) / counts.sum()), tf.float32)
        self.loss_mean = tf.keras.metrics.Mean(name="loss")
        self.found = tf.keras.metrics.SparseTopKCategoricalAccuracy(k=10, name="top_10")

    def call(self, taken: dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.matmul(self.users(taken["user"]), self.items(taken["item"]), transpose_b=True) / TEMPERATURE

    def losses_and_scores(self, taken: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return a loss for each example, the place of its item in the batch, and its scores with all items."""
        item = taken["item"]
        place = tf.range(tf.size(item))
        scores = self(taken) - tf.gather(self.log_frequency, item)
        # An item that is twice in the batch is no negative of itself.
        again = tf.logical_and(item[:, None] == item, place[:, None] != place)
        scores = tf.where(again, scores.dtype.min, scores)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(place, scores), place, scores

    def train_step(self, taken: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            losses, _, _ = self.losses_and_scores(taken)
            loss = tf.reduce_mean(losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}

    def test_step(self, taken: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        losses, place, scores = self.losses_and_scores(taken)
        self.loss_mean.update_state(losses)
        self.found.update_state(place, scores)
        return {metric.name: metric.result() for metric in self.metrics}


class TwoTowers:
    """Learns from pairs of a user and an item that the user took."""

    def build_model(self) -> tf.keras.Model:
        model = Towers()
        model.compile(tf.keras.optimizers.Adam(0.01))
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each worker reads its own part, in an order of its own.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(100_000).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test")).batch(BATCH)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    def serving_signature(self, model: tf.keras.Model) -> dict[str, Callable[..., dict[str, tf.Tensor]]]:
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="user")])
        def user(user: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"direction": model.users(user)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="item")])
        def item(item: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"direction": model.items(item)}

        return {"user": user, "item": item}
