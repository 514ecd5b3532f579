"""Optimizers to train a table with that is split over the ps: each of tf_keras's, and what they can be told to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

NEW, LEGACY = tf.keras.optimizers, tf.keras.optimizers.legacy
ROWS, WIDTH = 64, 16
PLAIN: dict[str, Any] = {
    "SGD": partial(NEW.SGD, 0.1),
    "SGD, momentum": partial(NEW.SGD, 0.1, momentum=0.9, nesterov=True),
    "RMSprop": partial(NEW.RMSprop, 0.01),
    "RMSprop, centered, momentum": partial(NEW.RMSprop, 0.01, centered=True, momentum=0.5),
    "Adam": partial(NEW.Adam, 0.01),
    "Adam, amsgrad": partial(NEW.Adam, 0.01, amsgrad=True),
    "AdamW": partial(NEW.AdamW, 0.01),
    "Adamax": partial(NEW.Adamax, 0.01),
    "Nadam": partial(NEW.Nadam, 0.01),
    "Adagrad": partial(NEW.Adagrad, 0.1),
    "Adadelta": partial(NEW.Adadelta, 0.1),
    "Ftrl": partial(NEW.Ftrl, 0.1),
    "Lion": partial(NEW.Lion, 0.01),
    "Adafactor": partial(NEW.Adafactor, 0.01),
}
OLD: dict[str, Any] = {
    "legacy.SGD": partial(LEGACY.SGD, 0.1),
    "legacy.SGD, momentum": partial(LEGACY.SGD, 0.1, momentum=0.9, nesterov=True),
    "legacy.RMSprop": partial(LEGACY.RMSprop, 0.01),
    "legacy.RMSprop, centered, momentum": partial(LEGACY.RMSprop, 0.01, centered=True, momentum=0.5),
    "legacy.Adam": partial(LEGACY.Adam, 0.01),
    "legacy.Adam, amsgrad": partial(LEGACY.Adam, 0.01, amsgrad=True),
    "legacy.Adamax": partial(LEGACY.Adamax, 0.01),
    "legacy.Nadam": partial(LEGACY.Nadam, 0.01),
    "legacy.Adagrad": partial(LEGACY.Adagrad, 0.1),
    "legacy.Adadelta": partial(LEGACY.Adadelta, 0.1),
    "legacy.Ftrl": partial(LEGACY.Ftrl, 0.1),
}
CLIPPED = {"clipnorm": 0.01, "clipvalue": 0.001, "global_clipnorm": 0.01}
# RMSprop's own ema_overwrite_frequency is 100, which is refused.
AVERAGED = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": None}
CASES: dict[str, Any] = {
    **PLAIN,
    **{f"{name}, EMA": partial(make, **AVERAGED) for name, make in PLAIN.items()},
    **{f"{name}, weight decay": partial(make, weight_decay=0.1) for name, make in PLAIN.items() if name != "AdamW"},
    **{
        f"{name}, {what}": partial(PLAIN[name], **{what: limit})
        for name in ("SGD", "SGD, momentum", "Adam", "AdamW")
        for what, limit in CLIPPED.items()
    },
    "SGD, a schedule": partial(NEW.SGD, NEW.schedules.ExponentialDecay(0.1, 2, 0.9)),
    "Adam, a schedule": partial(NEW.Adam, NEW.schedules.ExponentialDecay(0.1, 2, 0.9)),
    **OLD,
    **{
        f"{name}, {what}": partial(OLD[name], **{what: limit})
        for name in ("legacy.SGD", "legacy.Adam")
        for what, limit in CLIPPED.items()
    },
    "legacy.SGD, decay": partial(LEGACY.SGD, 0.1, decay=0.1),
    "legacy.Adam, a schedule": partial(LEGACY.Adam, NEW.schedules.ExponentialDecay(0.1, 2, 0.9)),
}


class Matrix:
    """A table and a score of the mean of its rows; each batch is the same, so that no reader's place matters."""

    def __init__(self, case: str) -> None:
        self._make = CASES[case]

    def build_model(self) -> Any:
        tf.keras.utils.set_random_seed(1)
        words = tf.keras.Input((4,), dtype=tf.int64)
        vectors = tf.keras.layers.Embedding(ROWS, WIDTH, name="table")(words)
        score = tf.keras.layers.Dense(1, name="score")(tf.reduce_mean(vectors, axis=1))
        model = tf.keras.Model(words, score)
        model.compile(optimizer=self._make(), loss="mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        # Some rows twice, some never: what an optimizer does with those differs.
        words = np.random.default_rng(1).integers(ROWS, size=(8, 4))
        return tf.data.Dataset.from_tensors((words, words[:, :1].astype(np.float32) / ROWS)).repeat()

    def eval_dataset(self, context: Any) -> Any:
        return self.train_dataset(context).take(1)
