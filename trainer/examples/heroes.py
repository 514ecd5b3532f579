"""Heroes: who was here? Five clues in, all of them strings, and a hero's name out.

The data is made up here. What it shows: string lookups inside the model, and an embedding table that is large enough
to be shared out over the parameter servers.
"""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

HEROES = np.array(["Comet", "Granite", "Nightjar", "Quill", "Tidewater", "Zephyr"])
MATERIALS = ("amber", "brass", "chalk", "copper", "glass", "jade", "oak", "silk")
THINGS = ("arrow", "bell", "cloak", "coin", "feather", "key", "lamp", "mask")
# 8,192 of them: "glass-feather-17".
CLUES = np.array([f"{what}-{thing}-{n}" for what, thing, n in itertools.product(MATERIALS, THINGS, range(128))])

CLUES_A_REPORT = 5
REPORTS = {"train": 20_000, "test": 2_000}
BATCH = 64
# 8,193 rows of 32 numbers are 1 MiB: two parameter servers hold half of it each.
EMBEDDING = 32


def load(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the reports (strings, five in a row) and heroes (strings) of "train" or "test", the same every time.

    A clue points to one hero, whatever its words. Seven clues of ten are the hero's own, the others are anybody's.
    """
    owner = np.random.default_rng(seed=1).integers(len(HEROES), size=len(CLUES))
    random = np.random.default_rng(seed={"train": 2, "test": 3}[part])
    hero = random.integers(len(HEROES), size=REPORTS[part])
    clue = random.integers(len(CLUES), size=(REPORTS[part], CLUES_A_REPORT))
    is_own = random.random(clue.shape) < 0.7
    for number in range(len(HEROES)):
        own = is_own & (hero == number)[:, np.newaxis]
        clue[own] = random.choice(np.flatnonzero(owner == number), size=own.sum())
    return CLUES[clue], HEROES[hero]


class HeroModel(tf.keras.Model):
    """A model whose labels are strings as well: it looks up their numbers before Keras's own steps see them."""

    hero_number: tf.keras.layers.StringLookup

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        clues, heroes = data
        return super().train_step((clues, self.hero_number(heroes)))

    def test_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        clues, heroes = data
        return super().test_step((clues, self.hero_number(heroes)))


class Heroes:
    """Names the hero that five clues point to."""

    def build_model(self) -> tf.keras.Model:
        # The lookup tables are made here, because this is called in the strategy's scope: each worker gets a copy.
        clue_number = tf.keras.layers.StringLookup(vocabulary=CLUES)  # row 0 is for clues that nobody knows
        clues = tf.keras.Input((CLUES_A_REPORT,), dtype=tf.string, name="clues")
        rows = tf.keras.layers.Embedding(clue_number.vocabulary_size(), EMBEDDING)(clue_number(clues))
        scores = tf.keras.layers.Dense(len(HEROES))(tf.keras.layers.GlobalAveragePooling1D()(rows))
        model = HeroModel(clues, scores)
        model.hero_number = tf.keras.layers.StringLookup(vocabulary=HEROES, num_oov_indices=0)
        model.hero_number.build([None])  # a call would do so, but the exported model has no labels to look up
        model.compile(
            optimizer=tf.keras.optimizers.Adam(1e-2),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each worker reads its own part, in an order of its own.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(20_000).repeat().batch(BATCH).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test"))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(BATCH)

    def serving_signature(self, model: tf.keras.Model) -> tf.types.experimental.PolymorphicFunction:
        """Let the exported model take the clues as they are and answer with a name."""

        @tf.function(input_signature=[tf.TensorSpec([None, CLUES_A_REPORT], tf.string, name="clues")])
        def name_hero(clues: tf.Tensor) -> dict[str, tf.Tensor]:
            chances = tf.nn.softmax(model(clues))
            return {"hero": tf.gather(HEROES, tf.argmax(chances, 1)), "chance": tf.reduce_max(chances, 1)}

        return name_hero
