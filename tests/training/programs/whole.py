"""A table, all of whose slots get 1 more with each update: after whole updates all are equal in all numbers.

An update takes long, so that a fault at any moment falls into some.
"""

import tensorflow as tf

ROWS, WIDTH = 4096, 128
SLOTS = 12


class OneMore(tf.keras.optimizers.Optimizer):
    """Reads and writes each slot by itself, one after the other, as Keras's optimizers do."""

    def __init__(self):
        super().__init__(name="one_more")
        self._learning_rate = self._build_learning_rate(1.0)
        self._slots = {}
        self._built = False

    def build(self, variables):
        super().build(variables)
        if self._built:
            return
        for variable in variables:
            slots = [self.add_variable_from_reference(variable, f"slot{number}") for number in range(SLOTS)]
            self._slots[variable.name] = slots
        self._built = True

    def update_step(self, gradient, variable):
        one = tf.reduce_max(gradient, axis=1, keepdims=True)  # of each row: a part of a split table has no other's
        for slot in (*self._slots[variable.name], variable):
            slot.assign(slot + one)

    def get_config(self):
        return super().get_config()


class Whole(tf.keras.Model):
    def __init__(self):
        super().__init__()
        for name in ("first", "second"):
            setattr(self, name, self.add_weight(name=name, shape=(ROWS, WIDTH), initializer="zeros"))

    def call(self, numbers):
        return numbers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one) for one in map(tf.convert_to_tensor, self.trainable_variables)])
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class Updates:
    def build_model(self):
        model = Whole()
        model.compile(optimizer=OneMore(), loss="mse")
        return model

    def train_dataset(self, context):
        return tf.data.Dataset.from_tensors((tf.zeros([1, 1]), tf.zeros([1, 1]))).repeat()

    def eval_dataset(self, context):
        return self.train_dataset(context).take(1)
