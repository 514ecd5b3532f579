"""Programs with a table that has no vocabulary: keys of a large range, of which each batch has new ones."""

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from trainer.training.tables.dynamic.hashing import owner_of

BATCH, IDS, KNOWN, STRIDE, NEW = 64, 8, 2_000, 1_000_003, 64
GROUPS, OF_A_GROUP, OF_A_BATCH = 8, 1024, 128  # batches, and keys


class Keys:
    """A label is whether most ids are even; every second id of a batch was perhaps never there."""

    keras = tf.keras

    def __init__(self, rate: float = 0.5, new: float = 0.0, pause_ms: int = 0) -> None:
        self.rate, self.new, self.pause_ms = rate, new, pause_ms

    def build_model(self):
        keras = self.keras
        ids = keras.Input([IDS], dtype="int64")
        mean = keras.layers.GlobalAveragePooling1D()(self.rows(ids))
        model = keras.Model(ids, self.answer(mean))
        model.compile(
            optimizer=keras.optimizers.Adagrad(self.rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def rows(self, ids):
        return self.keras.layers.Embedding(100, 8, name="items")(ids)

    def answer(self, mean):
        return self.keras.layers.Dense(2)(mean)

    def train_dataset(self, context):
        random = np.random.default_rng()
        orders = [random.permuted(np.tile(np.arange(KNOWN), (IDS, 1)), axis=1).T for _ in range(10)]
        ids = np.concatenate(orders)  # so the first steps have every key in every column
        labels = ((ids % 2).mean(1) > 0.5).astype(np.int32)

        def renewed(ids, label):
            drawn = tf.random.uniform([IDS], maxval=2**40, dtype=tf.int64) + KNOWN
            return tf.where(tf.random.uniform([IDS]) < self.new, drawn, ids) * STRIDE, label

        dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).repeat().map(renewed).batch(BATCH)
        return dataset.apply(testing.sleep(1000 * self.pause_ms)) if self.pause_ms else dataset

    def eval_dataset(self, context):
        dataset = self.train_dataset(context).take(8)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)


class Subclassed(Keys):
    """The same with a model that is built by its first call, and a train_step of its own."""

    def build_model(self):
        keras = self.keras

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.items = keras.layers.Embedding(100, 8, name="items")
                self.out = keras.layers.Dense(2)

            def call(self, ids):
                left, right = self.items(ids[:, : IDS // 2]), self.items(ids[:, IDS // 2 :])
                return self.out(tf.reduce_mean(left, 1) + tf.reduce_mean(right, 1))

            def train_step(self, data):
                ids, labels = data
                with tf.GradientTape() as tape:
                    found = self(ids, training=True)
                    loss = self.compute_loss(x=ids, y=labels, y_pred=found)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(list(zip(gradients, self.trainable_variables, strict=True)))
                return {"loss": loss}

        model = Model()
        model.compile(
            optimizer=keras.optimizers.Adam(self.rate / 20),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model


def of_keras3(kind: type) -> type:
    import keras

    return type(f"{kind.__name__}3", (kind,), {"keras": keras})


class Several(Keys):
    """Tables of two widths, one of texts; two optimizers in a step of the program's own, which clips by itself."""

    def build_model(self):
        keras = self.keras

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.items = keras.layers.Embedding(100, 8, name="items")
                self.users = keras.layers.Embedding(100, 8, name="users")
                self.wide = keras.layers.Embedding(100, 1, name="wide", embeddings_initializer="zeros")
                self.out = keras.layers.Dense(2)
                self.wide_optimizer = keras.optimizers.Ftrl(0.1)

            def call(self, ids):
                left, right = ids[:, : IDS // 2], tf.strings.as_string(ids[:, IDS // 2 :])
                deep = tf.reduce_mean(self.items(left), 1) + tf.reduce_mean(self.users(right), 1)
                return self.out(deep) + tf.reduce_sum(self.wide(ids), 1)

            def train_step(self, data):
                ids, labels = data
                with tf.GradientTape() as tape:
                    found = self(ids, training=True)
                    loss = self.compute_loss(x=ids, y=labels, y_pred=found)
                wide = self.wide.trainable_variables
                deep = [one for one in self.trainable_variables if all(one is not each for each in wide)]
                of_wide, of_deep = tape.gradient(loss, [wide, deep])
                of_deep, _ = tf.clip_by_global_norm(of_deep, 1.0)
                self.wide_optimizer.apply_gradients(list(zip(of_wide, wide, strict=True)))
                self.optimizer.apply_gradients(list(zip(of_deep, deep, strict=True)))
                return {"loss": loss}

        model = Model()
        model.compile(
            optimizer=keras.optimizers.Adagrad(self.rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model


class CountedSteps(Keys):
    """Each step adds -1/BATCH to the rows of BATCH * IDS keys that all differ, NEW of them new ones.

    So a row's value is its count of steps times that, to the bit.
    """

    def build_model(self):
        keras = self.keras
        ids = keras.Input([IDS], dtype="int64")
        rows = keras.layers.Embedding(100, 4, name="items", embeddings_initializer="zeros")(ids)
        model = keras.Model(ids, tf.reduce_sum(rows, [1, 2]))
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda _, found: found)
        return model

    def train_dataset(self, context):
        def batch(number):
            known = (number + tf.range(BATCH * IDS - NEW, dtype=tf.int64)) % KNOWN
            new = KNOWN + (number % 2**40) * NEW + tf.range(NEW, dtype=tf.int64)
            return tf.reshape(tf.concat([known, new], 0), [BATCH, IDS]), tf.zeros([BATCH])

        dataset = tf.data.Dataset.random().map(batch)
        return dataset.apply(testing.sleep(1000 * self.pause_ms)) if self.pause_ms else dataset


class Bags(CountedSteps):
    """Each step adds as much to the rows of ids that are sparse or ragged: results don't depend on workers' order."""

    def __init__(self, kind: str = "sparse", functional: bool = False) -> None:
        super().__init__()
        self.kind, self.functional = kind, functional

    def build_model(self):
        keras = self.keras

        class Sums(keras.Model):
            def __init__(self):
                super().__init__()
                self.items = keras.layers.Embedding(100, 4, name="items", embeddings_initializer="zeros")

            def call(self, ids):
                rows = self.items(ids)
                rows = rows.to_tensor() if isinstance(rows, tf.RaggedTensor) else rows
                return tf.reduce_sum(rows, [1, 2])

        model = Sums()
        if self.functional:
            ids = keras.Input([None], dtype="int64", **{self.kind: True})
            model = keras.Model(ids, model(ids))
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda _, found: found)
        return model

    def train_dataset(self, context):
        ids = tf.ragged.constant([[7, 7, 3], [], [5], [0, 7]], tf.int64)
        given = ids.to_sparse() if self.kind == "sparse" else ids
        return tf.data.Dataset.from_tensors((given, tf.zeros([4]))).repeat()


class Counted(CountedSteps):
    """The same, where a batch follows from its number, and has as many keys on each of two ps.

    NEW keys are the batch's own. All others come again with each of GROUPS batches.
    """

    def train_dataset(self, context):
        def chosen(begin, most):
            keys = begin + tf.range(4 * most, dtype=tf.int64)  # many more than are needed
            owners = owner_of(keys, 2)
            return [tf.boolean_mask(keys, owners == server)[:most] for server in range(2)]

        def batch(number):
            known = chosen(number % GROUPS * OF_A_GROUP, (BATCH * IDS - NEW) // 2)
            new = chosen(GROUPS * OF_A_GROUP + (2 * number + context.input_pipeline_id) * OF_A_BATCH, NEW // 2)
            return tf.reshape(tf.concat([*known, *new], 0), [BATCH, IDS]), tf.zeros([BATCH])

        dataset = tf.data.Dataset.range(2**40).map(batch)
        return dataset.apply(testing.sleep(1000 * self.pause_ms))
