"""Will this advertisement be clicked? Data of Criteo's shape, by wide and deep or by DLRM: for a team to start from.

An example has 13 numbers and 26 ids. There are as many different ids as in Criteo's data, some ten million of one
kind, and few of them are seen often. Ids are raw, any number of 64 bits: each kind has a table, and an id the row that
is its remainder, so that nobody keeps a vocabulary. Without files the data is made up here, without an end: each id is
worth something, and so are pairs, which a model must find out. docs/recommenders.md goes on from here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from trainer.examples.dynamic_embedding import DynamicEmbedding

NUMBERS = 13
# How many different ids there are of each kind in Criteo's data of the challenge on Kaggle.
KINDS = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
EVALUATED = 64  # batches
SCATTERED = 98_764_321_261  # an odd number by which ids are multiplied, so that popular ones lie anywhere


class Criteo:
    """The data, and what both models have in common."""

    width = 16

    def __init__(
        self,
        rows: int = 100_000,
        batch: int = 1024,
        hidden: tuple[int, ...] = (128, 64),
        files: str = "",
        eval_files: str = "",
        capacity: int = 0,
    ) -> None:
        """Take the rows of a table at most: a kind with fewer ids has as many rows as ids.

        With a `capacity` each id has a row of its own on parameter servers, up to so many of a kind, and to twice as
        many as Criteo's data have.
        `files` and `eval_files` are patterns of files like Criteo's, which all workers see: a click, 13 numbers and 26
        texts a line, with tabs between. Without them the data is made up.
        """
        if bool(files) != bool(eval_files):
            raise ValueError(f"files is {files!r} and eval_files is {eval_files!r}: give both, or none of them")
        self.rows, self.batch, self.hidden = rows, batch, hidden
        self.files, self.eval_files, self.capacity = files, eval_files, capacity

    def tables(self, ids: Any, width: int) -> list[Any]:
        """Return the rows of each kind's table, each of shape [batch, width]."""
        rows = [min(kind, self.rows) for kind in KINDS]
        places = ids if self.capacity else ids % tf.constant(rows, tf.int64)
        return [self.table(number, count, width)(places[:, number]) for number, count in enumerate(rows)]

    def table(self, number: int, rows: int, width: int) -> Any:
        """Return the layer of a kind."""
        name = f"kind_{number:02}"
        if not self.capacity:
            return tf.keras.layers.Embedding(rows, width, name=name)
        return DynamicEmbedding(width, {"capacity": min(2 * KINDS[number], self.capacity)}, rows, name=name)

    def deep(self, features: Any) -> Any:
        for units in self.hidden:
            features = tf.keras.layers.Dense(units, "relu")(features)
        return tf.keras.layers.Dense(1)(features)

    def logit(self, numbers: Any, ids: Any) -> Any:
        """Return the logarithm of the odds of a click, of shape [batch, 1]."""
        raise NotImplementedError

    def build_model(self) -> tf.keras.Model:
        numbers = tf.keras.Input((NUMBERS,), name="numbers")
        ids = tf.keras.Input((len(KINDS),), dtype=tf.int64, name="ids")
        model = tf.keras.Model({"numbers": numbers, "ids": ids}, self.logit(tf.math.log1p(numbers), ids))
        model.compile(
            optimizer=tf.keras.optimizers.Adagrad(0.05),
            loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[tf.keras.metrics.AUC(from_logits=True, name="auc")],
        )
        return model

    def part(self, context: tf.distribute.InputContext) -> Any:
        """Return the number of the part of the data that a worker reads."""
        return tf.cast(context.input_pipeline_id, tf.int64)

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        if self.files:
            paths = context.files(self.files)
            lines = paths.interleave(tf.data.TextLineDataset, num_parallel_calls=tf.data.AUTOTUNE)
            return lines.shuffle(50_000).batch(self.batch).map(parsed).prefetch(tf.data.AUTOTUNE)
        part = self.part(context)
        batches = tf.data.Dataset.range(2**40).map(lambda number: examples(self.batch, number, part + 1))
        return batches.prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        if self.eval_files:
            lines = tf.data.TextLineDataset(tf.data.Dataset.list_files(self.eval_files, shuffle=False))
            batches = lines.batch(self.batch).map(parsed)
        else:
            batches = tf.data.Dataset.range(EVALUATED).map(lambda number: examples(self.batch, number, 0))
        return batches.shard(context.num_input_pipelines, context.input_pipeline_id)

    def serving_signature(self, model: tf.keras.Model) -> tf.types.experimental.PolymorphicFunction:
        """Let the exported model take ids as the data has them, and answer with the chance of a click."""
        kind = tf.string if self.files else tf.int64
        specs = tf.TensorSpec([None, NUMBERS], name="numbers"), tf.TensorSpec([None, len(KINDS)], kind, name="ids")

        @tf.function(input_signature=specs)
        def click(numbers: tf.Tensor, ids: tf.Tensor) -> dict[str, tf.Tensor]:
            given = raw_ids(ids) if self.files else ids
            return {"chance": tf.sigmoid(model({"numbers": numbers, "ids": given}))[:, 0]}

        return click


class WideAndDeep(Criteo):
    """A sum over all ids beside a deep network; the sum's weights are the first number of each row."""

    def logit(self, numbers: Any, ids: Any) -> Any:
        rows = tf.concat(self.tables(ids, 1 + self.width), axis=1)
        wide, vectors = tf.split(tf.reshape(rows, [-1, len(KINDS), 1 + self.width]), [1, self.width], axis=2)
        wide = tf.reduce_sum(wide, axis=1)
        vectors = tf.reshape(vectors, [-1, len(KINDS) * self.width])
        deep = self.deep(tf.keras.layers.Concatenate()([numbers, vectors]))
        return tf.keras.layers.Add()([wide, tf.keras.layers.Dense(1)(numbers), deep])


class DLRM(Criteo):
    """The products of all pairs of vectors, of ids and of the numbers (Naumov and others, arXiv:1906.00091)."""

    def logit(self, numbers: Any, ids: Any) -> Any:
        for units in (*self.hidden[-1:], self.width):
            numbers = tf.keras.layers.Dense(units, "relu")(numbers)
        vectors = tf.stack([numbers, *self.tables(ids, self.width)], axis=1)
        products = tf.linalg.matmul(vectors, vectors, transpose_b=True)
        count = 1 + len(KINDS)
        pairs = [count * first + second for first in range(count) for second in range(first)]
        products = tf.gather(tf.reshape(products, [-1, count * count]), pairs, axis=1)
        return self.deep(tf.keras.layers.Concatenate()([numbers, products]))


def parsed(lines: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Return what lines of Criteo's files say, as `examples` does; a number that is missing or below 0 is 0."""
    missing = [["0"]] * (1 + NUMBERS) + [[""]] * len(KINDS)
    fields = tf.io.decode_csv(lines, missing, field_delim="\t", use_quote_delim=False)
    clicked, *numbers = (tf.strings.to_number(field) for field in fields[: 1 + NUMBERS])
    given = {"numbers": tf.maximum(tf.stack(numbers, 1), 0), "ids": raw_ids(tf.stack(fields[1 + NUMBERS :], 1))}
    return given, clicked[:, tf.newaxis]


def raw_ids(texts: tf.Tensor) -> tf.Tensor:
    """Return a number for each text, the same in training and where the model is served."""
    return tf.strings.to_hash_bucket_fast(texts, 2**62)


def examples(batch: int, number: Any, part: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Return a batch by its number in a part of the data: {"numbers": [batch, 13], "ids": [batch, 26]}, and clicks."""
    seeds = [tf.stack([number, tf.cast(3 * part + each, tf.int64)]) for each in range(3)]
    # The n-th most popular id of a kind is seen 1/n times as often as the first one (Zipf).
    drawn = tf.random.stateless_uniform([batch, len(KINDS)], seeds[0])
    ranks = tf.cast(tf.exp(drawn * np.log(np.array(KINDS, np.float32) + 1)), tf.int64) - 1
    counts = tf.floor(tf.exp(1.5 * tf.random.stateless_normal([batch, NUMBERS], seeds[1])))
    chance = tf.sigmoid(true_logit(counts, ranks))
    clicked = tf.cast(tf.random.stateless_uniform([batch, 1], seeds[2]) < chance, tf.float32)
    return {"numbers": counts, "ids": ranks * SCATTERED}, clicked


def true_logit(counts: tf.Tensor, ranks: tf.Tensor) -> tf.Tensor:
    """Return the logarithm of the odds of a click, of shape [batch, 1], from what ids and pairs of ids are worth."""
    ids = tf.reduce_sum(worth(ranks, 1_103_515_245), axis=1, keepdims=True)
    pairs = worth(ranks[:, ::2], 22_695_477) * worth(ranks[:, 1::2], 1_664_525)
    numbers = tf.reduce_sum(tf.math.log1p(counts) * np.linspace(-0.3, 0.3, NUMBERS, dtype=np.float32), 1, keepdims=True)
    return 0.4 * ids + tf.reduce_sum(pairs, axis=1, keepdims=True) + numbers - 1.5


def worth(ranks: tf.Tensor, factor: int) -> tf.Tensor:
    """Return a number between -1 and 1 for each id, which no other id of its kind tells."""
    kinds = tf.range(1, 1 + tf.cast(tf.shape(ranks)[1], tf.int64), dtype=tf.int64)
    return tf.cast((ranks + 7 * kinds) * factor % 2**31, tf.float32) / 2**30 - 1
