"""Data that no number of batches or workers divides, a metric that shows any example counted twice, and variations."""

import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

EXAMPLES = 105
BATCH = 4
WORDS = ("ash", "beech", "elm", "fir", "oak", "yew", "box")
LABELS = 3


class LabelSum(tf.keras.metrics.Metric):
    def __init__(self, name="label_sum", **options):
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, labels, outputs, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(labels, self.dtype)))

    def result(self):
        return self.total + 0


class Uneven:
    """Looks its words up in the model, as they would be served."""

    known = WORDS
    regularizer = None
    loss_weights = None
    model = tf.keras.Model

    def metrics(self):
        return ["accuracy", LabelSum()]

    def inputs(self):
        word = tf.keras.Input((), dtype=tf.string)
        return word, tf.keras.layers.StringLookup(vocabulary=WORDS)(word)

    def build_model(self):
        word, number = self.inputs()
        vector = tf.keras.layers.Embedding(len(WORDS) + 1, 4, embeddings_regularizer=self.regularizer)(number)
        model = self.model(word, tf.keras.layers.Dense(LABELS)(vector))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.1), loss=loss, loss_weights=self.loss_weights, metrics=self.metrics()
        )
        return model

    def examples(self):
        return tf.data.Dataset.range(EXAMPLES).map(
            lambda example: (tf.gather(tf.constant(self.known), example % 7), (example * example) % LABELS)
        )

    def train_dataset(self, context):
        return self.examples().shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)

    def eval_dataset(self, context):
        return self.train_dataset(context)


class Numbered(Uneven):
    """Has its words as numbers already."""

    known = tuple(range(1, 1 + len(WORDS)))

    def inputs(self):
        number = tf.keras.Input((), dtype=tf.int32)
        return number, number


class OneBatch(Numbered):
    """Has fewer batches than workers."""

    def eval_dataset(self, context):
        return super().eval_dataset(context).take(1)


class Slow(Numbered):
    """Says on the machine that reads it which example is read; takes 80 ms a batch."""

    def eval_dataset(self, context):
        def say(number, label):
            tf.print("reads an example to evaluate")
            return number, label

        examples = self.examples().shard(context.num_input_pipelines, context.input_pipeline_id)
        return examples.map(say).batch(BATCH).apply(testing.sleep(80_000))  # microseconds


class Regularized(Numbered):
    regularizer = "l2"


class Weighted(Numbered):
    loss_weights = 2.0


class TwoOutputs(Numbered):
    def build_model(self):
        number = tf.keras.Input((), dtype=tf.int32)
        vector = tf.keras.layers.Embedding(len(WORDS) + 1, 4)(number)
        outputs = {name: tf.keras.layers.Dense(LABELS, name=name)(vector) for name in ("left", "right")}
        model = tf.keras.Model(number, outputs)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss={"left": loss, "right": loss}, metrics={"left": LabelSum(), "right": "accuracy"})
        return model

    def eval_dataset(self, context):
        both = super().eval_dataset(context)
        return both.map(lambda number, label: (number, {"left": label, "right": label}))


class HalvingModel(tf.keras.Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.half = tf.keras.metrics.Mean(name="half")
        self.trained = tf.keras.metrics.Mean(name="trained")  # which test_step neither updates nor returns

    def test_step(self, data):
        words, labels = data
        self.half.update_state(tf.cast(labels, tf.float32) / 2)
        self.compiled_metrics.update_state(labels, self(words, training=False))
        results = {metric.name: metric.result() for metric in self.metrics if metric is not self.trained}
        return {**results, "squared": self.half.result() ** 2}  # of all examples it is no mean of the batches'


class OwnTestStep(Numbered):
    model = HalvingModel


class OwnTestFunctionModel(tf.keras.Model):
    def make_test_function(self, force=False):
        return super().make_test_function(force)


class OwnTestFunction(Numbered):
    model = OwnTestFunctionModel


class StrayModel(tf.keras.Model):
    def test_step(self, data):
        return {**super().test_step(data), "mean_label": tf.reduce_mean(tf.cast(data[1], tf.float32))}


class Stray(Uneven):
    model = StrayModel


class LabelsModel(tf.keras.Model):
    def test_step(self, data):
        return {**super().test_step(data), "labels": data[1]}


class Labels(Uneven):
    model = LabelsModel


class OwnLossModel(tf.keras.Model):
    def test_step(self, data):
        return {**super().test_step(data), "loss": tf.reduce_mean(tf.cast(data[1], tf.float32))}


class OwnLoss(Uneven):
    model = OwnLossModel


class Greatest(LabelSum):
    def __init__(self, name="greatest", **options):
        super(LabelSum, self).__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer=tf.keras.initializers.Constant(-1))

    def update_state(self, labels, outputs, sample_weight=None):
        self.total.assign(tf.maximum(self.total, tf.cast(tf.reduce_max(labels), self.dtype)))

    def reset_state(self):
        self.total.assign(-1)


class NotAdding(Uneven):
    def metrics(self):
        return [Greatest()]


class Fading(tf.keras.metrics.Metric):
    """A moving average, whose states for parts of the data tell nothing about that of all."""

    def __init__(self, name="fading"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, label, predicted, sample_weight=None):
        self.total.assign(0.9 * self.total + 0.1 * tf.reduce_mean(tf.cast(label, tf.float32)))

    def result(self):
        return self.total


class Newest(Fading):
    """A last value, which workers that evaluate beside one another don't have."""

    def __init__(self):
        super().__init__("newest")

    def update_state(self, label, predicted, sample_weight=None):
        self.total.assign(tf.reduce_mean(tf.cast(label, tf.float32)))


class KeepingTheLast(Uneven):
    def metrics(self):
        return [Newest()]


class NotMerging(Uneven):
    def metrics(self):
        return [Fading()]


class Endless(Uneven):
    def eval_dataset(self, context):
        return self.train_dataset(context).repeat()


class WholeData(Uneven):
    def eval_dataset(self, context):
        return self.examples().batch(BATCH)


class Nothing(Uneven):
    def eval_dataset(self, context):
        return self.train_dataset(context).take(0)


class Generated(Uneven):
    def eval_dataset(self, context):
        signature = (tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int64))
        examples = tf.data.Dataset.from_generator(lambda: iter([("oak", 1)] * 9), output_signature=signature)
        return examples.shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)


class Files(Numbered):
    """The first twelve batches of what lies in three files, as a program gives it that takes a part of much."""

    def eval_dataset(self, context):
        files = tf.data.Dataset.list_files("uneven-*.txt", shuffle=False)
        rows = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(tf.strings.split(line), tf.int32))
        examples = rows.map(lambda row: (row[0], row[1]))
        return examples.take(47).shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)
