"""Programs that use what was made before the strategy, and one whose every call fails in the same words."""

import keras as keras3
import numpy as np
import tensorflow as tf

keras = tf.keras
ARRAY = np.ones([1000, 4], np.float32)


class Extra(keras.Model):
    """A line; each step also does what its program adds to it."""

    def __init__(self, extra):
        super().__init__()
        self.line = keras.layers.Dense(1)
        self.extra = extra

    def call(self, features):
        return self.line(features)

    def train_step(self, data):
        return {**super().train_step(data), **self.extra()}


class Plain:
    def extra(self):
        return {}

    def build_model(self):
        model = Extra(self.extra)
        model.compile("sgd", "mse")
        return model

    def train_dataset(self, context):
        dataset = tf.data.Dataset.from_tensor_slices((tf.ones([64, 4]), tf.ones([64, 1])))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).repeat().batch(8)

    def eval_dataset(self, context):
        return self.train_dataset(context).take(2)


class InClass(Plain):
    temperature = tf.Variable(1.0)

    def extra(self):
        return {"t": self.temperature.assign_add(0.5)}


COUNT = tf.Variable(0.0)


class AtImport(Plain):
    def extra(self):
        return {"t": COUNT.assign_add(1.0)}


class InConstructor(Plain):
    def __init__(self):
        self.generator = tf.random.Generator.from_seed(1)

    def extra(self):
        return {"t": self.generator.uniform([])}


class Table(Plain):
    def __init__(self):
        keys, values = tf.constant([1, 2], tf.int64), tf.constant([1.0, 2.0])
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)

    def extra(self):
        return {"t": self.table.lookup(tf.constant(1, tf.int64))}


class Metric(Plain):
    def __init__(self):
        self.mean = keras.metrics.Mean()

    def extra(self):
        self.mean.update_state(1.0)
        return {"t": self.mean.result()}


class Layer(Plain):
    def __init__(self):
        self.layer = keras.layers.Dense(1)
        self.layer.build([None, 4])

    def extra(self):
        return {"t": tf.reduce_sum(self.layer(tf.ones([1, 4])))}


class Optimizer(Plain):
    def __init__(self):
        self.optimizer = keras.optimizers.Adam()

    def build_model(self):
        model = Extra(self.extra)
        model.compile(self.optimizer, "mse")
        return model


class WholeModel(Plain):
    def __init__(self):
        self.model = keras.Sequential([keras.layers.Dense(1, input_shape=(4,))])
        self.model.compile("sgd", "mse")

    def build_model(self):
        return self.model


class OfKeras3(Plain):
    def __init__(self):
        self.scale = keras3.Variable(1.0)

    def build_model(self):
        scale = self.scale

        class Scaled(keras3.Model):
            def __init__(self):
                super().__init__()
                self.line = keras3.layers.Dense(1)

            def call(self, features):
                return self.line(features) * scale

        model = Scaled()
        model.compile(keras3.optimizers.SGD(0.01), "mse")
        return model


class BuildsAgain(tf.keras.optimizers.Optimizer):
    """An optimizer that makes its variables at each trace."""

    def __init__(self):
        super().__init__("again")
        self._learning_rate = self._build_learning_rate(0.01)

    def build(self, var_list):
        super().build(var_list)
        self.momentums = [self.add_variable_from_reference(variable, "momentum") for variable in var_list]

    def update_step(self, gradient, variable):
        variable.assign_sub(0.01 * gradient)

    def get_config(self):
        return super().get_config()


class MadeTwice(Plain):
    def build_model(self):
        model = super().build_model()
        model.compile(BuildsAgain(), "mse")
        return model


class LargeStep(Plain):
    def extra(self):
        return {"t": tf.reduce_sum(ARRAY)}


class LargeData(Plain):
    def train_dataset(self, context):
        numbers = tf.data.Dataset.range(64).map(lambda number: (tf.gather(ARRAY, number), tf.ones([1])))
        return numbers.repeat().batch(8)


class CopiedStep(LargeStep):
    pass


class CopiedData(LargeData):
    pass


class CopiedNot(Plain):
    def build_model(self):
        self.array = tf.constant(ARRAY)
        return super().build_model()

    def extra(self):
        return {"t": tf.reduce_sum(self.array)}

    def train_dataset(self, context):
        array = tf.constant(ARRAY)
        return tf.data.Dataset.range(64).map(lambda number: (tf.gather(array, number), tf.ones([1]))).repeat().batch(8)


def by_python(truth, predicted):
    return tf.numpy_function(
        lambda one, other: np.abs(one - other).mean(dtype=np.float32) * 0 + 7, [truth, predicted], tf.float32
    )


class PythonMetric(Plain):
    """A metric that a library computes, as scikit-learn does."""

    def build_model(self):
        model = Extra(self.extra)
        model.compile("sgd", "mse", metrics=[by_python])
        return model


class PythonLoss(Plain):
    def build_model(self):
        model = Extra(self.extra)
        model.compile("sgd", lambda truth, predicted: tf.py_function(tf.subtract, [truth, predicted], tf.float32))
        return model


class Eager(Plain):
    def build_model(self):
        tf.config.run_functions_eagerly(True)
        try:
            return super().build_model()
        finally:
            self.undo = tf.config.run_functions_eagerly


class OwnTrainFunction(Plain):
    def build_model(self):
        class Accumulating(Extra):
            def make_train_function(self, force=False):
                return super().make_train_function(force)

        model = Accumulating(self.extra)
        model.compile("sgd", "mse")
        return model


class SetTrainFunction(Plain):
    def build_model(self):
        model = super().build_model()
        model.make_train_function = lambda force=False: None
        return model


class OwnFunctionOfKeras3(Plain):
    def build_model(self):
        class Own(keras3.Sequential):
            def make_train_function(self, force=False):
                return super().make_train_function(force)

        model = Own([keras3.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model


class Slow:
    """Each weight has a slow one beside it, which it goes back to at each third step: half of the way is kept."""

    def build(self, var_list):
        super().build(var_list)
        if not hasattr(self, "slow"):
            self.slow = [self.add_variable_from_reference(one, "slow", initial_value=one) for one in var_list]
            self.counts = [self.add_variable_from_reference(one, "count", shape=[]) for one in var_list]

    def go_back(self, weight, slow, count):
        there, is_third = slow + 0.5 * (weight - slow), tf.equal(count % 3, 0)
        slow.assign(tf.where(is_third, there, slow))
        weight.assign(tf.where(is_third, slow, weight))

    def places(self, variable):
        number = self._index_dict[self._var_key(variable)]
        return self.slow[number], self.counts[number]


class InApply(Slow, keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars, **named):
        pairs = list(grads_and_vars)
        done = super().apply_gradients(pairs, **named)
        for _, weight in pairs:
            self.go_back(weight, self.places(weight)[0], self.iterations)
        return done


class ByIterations(Slow, keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(gradient, variable)
        self.go_back(variable, self.places(variable)[0], self.iterations + 1)


class ByItsCount(Slow, keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars, **named):
        return super().apply_gradients([(2 * gradient, weight) for gradient, weight in grads_and_vars], **named)

    def update_step(self, gradient, variable):
        super().update_step(gradient, variable)
        slow, count = self.places(variable)
        count.assign_add(1.0)
        self.go_back(variable, slow, count)


class LegacyByIterations(keras.optimizers.legacy.SGD):
    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        for variable in var_list:
            self.add_slot(variable, "slow", initializer=variable)

    def apply_gradients(self, *given, **named):
        return super().apply_gradients(*given, **named)

    def _resource_apply_dense(self, gradient, variable, apply_state=None):
        done, slow = super()._resource_apply_dense(gradient, variable, apply_state), self.get_slot(variable, "slow")
        with tf.control_dependencies([done]):
            is_third = tf.equal(tf.math.floordiv(self.iterations + 1, 3) * 3, self.iterations + 1)
            there = tf.where(is_third, slow + 0.5 * (variable - slow), variable)
            return tf.group(variable.assign(there), slow.assign(tf.where(is_third, there, slow)))


class OfKeras3ByIterations(keras3.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        third = keras3.ops.equal((self.iterations + 1) % 3, 0)
        super().update_step(keras3.ops.where(third, gradient, 0.0), variable, learning_rate)


class ByRest(Slow, keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(tf.where(self.iterations % 3 < 1, gradient, 2 * gradient), variable)


class ByCast(Slow, keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(tf.where(tf.cast(self.iterations % 3, tf.bool), gradient, 2 * gradient), variable)


class Warming(keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(tf.where(tf.equal(self.iterations // 1000, 0), 0.5 * gradient, gradient), variable)


class CountingGood(keras.optimizers.SGD):
    def __init__(self, rate):
        super().__init__(rate)
        self.good = tf.Variable(0, trainable=False, dtype=tf.int64)

    def apply_gradients(self, grads_and_vars, **named):
        pairs = list(grads_and_vars)
        self.good.assign_add(tf.cast(tf.reduce_all(tf.math.is_finite(pairs[0][0])), tf.int64))
        return super().apply_gradients(pairs, **named)


class OwnOptimizer(Plain):
    """A line whose gradients are ones, at a rate whose multiples have no rounding."""

    make, keras = None, keras

    def build_model(self):
        line = self.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.model = self.keras.Sequential([self.keras.layers.Input((4,)), line])
        self.model.compile(self.make(0.0625), lambda truth, predicted: predicted)
        return self.model


class AppliesBeside(OwnOptimizer):
    make = InApply


class CountsIterations(OwnOptimizer):
    make = ByIterations


class CountsOfLegacy(OwnOptimizer):
    make = LegacyByIterations


class CountsOfKeras3(OwnOptimizer):
    make, keras = OfKeras3ByIterations, keras3


class CountsItself(OwnOptimizer):
    make = ByItsCount


class Clipping(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars, **named):
        pairs = [(tf.clip_by_norm(gradient, 1.0), weight) for gradient, weight in grads_and_vars]
        return super().apply_gradients(pairs, **named)


class SecondWithSchedule(Plain):
    """What works: Keras writes the rate of an optimizer beside the model's own at each of its steps."""

    def build_model(self):
        self.model = model = super().build_model()
        model.scale = tf.Variable(1.0)
        model.second = Clipping(keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.0625, 0.0]))

        def extra():
            model.second.apply_gradients([(tf.constant(2.0), model.scale)])
            return {}

        model.extra = extra
        return model

    def counted(self):
        return self.model.scale


class CountsRest(OwnOptimizer):
    make = ByRest


class CountsByCast(OwnOptimizer):
    make = ByCast


class WarmsUp(OwnOptimizer):
    make = Warming


class CountsGood(OwnOptimizer):
    make = CountingGood

    def counted(self):
        return self.model.optimizer.good


class Jitted(Plain):
    def build_model(self):
        model = Extra(self.extra)
        model.compile("sgd", "mse", jit_compile=True)
        return model


class JittedOfKeras3(Plain):
    def build_model(self):
        model = keras3.Sequential([keras3.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
        return model


class OfV1(Plain):
    def build_model(self):
        model = super().build_model()
        model.compile(tf.compat.v1.train.AdamOptimizer(0.1), "mse")
        return model


class FitWhileBuilt(Plain):
    def build_model(self):
        model = super().build_model()
        model.fit(tf.ones([8, 4]), tf.ones([8, 1]), verbose=0)
        return model


class PredictWhileBuilt(Plain):
    def build_model(self):
        model = super().build_model()
        model.predict(tf.ones([8, 4]), verbose=0)
        return model


class OwnStrategy(Plain):
    def build_model(self):
        with tf.distribute.MirroredStrategy().scope():
            return super().build_model()


class Cleared(Plain):
    """Programs begin a model so, to have the names of its layers count from zero."""

    def build_model(self):
        keras.backend.clear_session()
        model = super().build_model()
        self.extra = lambda: {"t": tf.cast(tf.size(model.line.kernel), tf.float32)}
        model.extra = self.extra
        model(tf.ones([1, 4]))
        self.places = [weight.device for weight in model.weights]
        return model


class ClearedOfKeras3(Plain):
    def build_model(self):
        keras3.utils.clear_session()
        model = keras3.Sequential([keras3.layers.Input((4,)), keras3.layers.Dense(1)])
        model.compile(keras3.optimizers.SGD(0.01), "mse")
        self.places = [weight.value.device for weight in model.weights]
        return model


@tf.function
def doubled(number):
    return number * 2.0


class Called(Plain):
    """What works: tensors from outside, small and large, and a function that was called before."""

    small, large = tf.constant(3.0), tf.ones([400])

    def __init__(self):
        self.six = doubled(self.small)

    def extra(self):
        return {"t": doubled(self.small) + tf.reduce_sum(self.large), "each": tf.stack([1.0, 2.0, 6.0])}


class HiddenVariable(Plain):
    """A step changes what belongs to the program, and what checkpoints don't have."""

    def build_model(self):
        self.count = tf.Variable(0.0, trainable=False)
        return super().build_model()

    def extra(self):
        return {"t": tf.function(lambda: self.count.assign_add(1.0))()}


class Changing(Plain):
    """A variable without a fixed shape, as of the last batch's examples."""

    def build_model(self):
        model = super().build_model()
        model.rest = tf.Variable(tf.zeros([0]), shape=[None], trainable=False, name="rest")
        model.extra = lambda: {"t": tf.reduce_sum(model.rest.assign(tf.ones([2])))}
        return model


class HiddenOptimizer(Plain):
    def build_model(self):
        model, second = super().build_model(), keras.optimizers.Adam()
        model.scale = tf.Variable(1.0)

        def extra():
            second.apply_gradients([(tf.constant(1.0), model.scale)])
            return {}

        model.extra = extra
        return model


class HiddenAverage(Plain):
    def build_model(self):
        model, average = super().build_model(), tf.train.ExponentialMovingAverage(0.9)

        def extra():
            average.apply([model.line.kernel])
            return {}

        model.extra = extra
        return model


class HiddenTable(Plain):
    def build_model(self):
        self.seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
        return super().build_model()

    def extra(self):
        one = tf.constant([1], tf.int64)
        self.seen.insert(one, one)
        return {}


class HiddenOfKeras3(OfKeras3):
    def __init__(self):
        pass

    def build_model(self):
        count = tf.Variable(0.0, trainable=False)
        self.scale = keras3.Variable(1.0)
        model = super().build_model()
        step = model.train_step
        model.train_step = lambda data: {**step(data), "t": count.assign_add(1.0)}
        return model


class Kept(Plain):
    """What works: the model has what a step changes. The program's own is read, or draws."""

    def build_model(self):
        model = super().build_model()
        self.generator, two = tf.random.Generator.from_seed(1), tf.Variable(2.0)
        model.kept = {"counts": [tf.Variable(0.0, trainable=False)], "second": keras.optimizers.Adam()}
        model.scale = tf.Variable(1.0)

        def extra():
            model.kept["second"].apply_gradients([(tf.constant(1.0), model.scale)])
            return {"t": model.kept["counts"][0].assign_add(two), "drawn": self.generator.uniform([])}

        model.extra = extra
        return model


class FailsAlike(Plain):
    """TensorFlow takes these words for a worker's failure, whatever writes them."""

    def extra(self):
        with tf.control_dependencies([tf.debugging.Assert(none_of_them() > 0, ["unknown device in the data"])]):
            return {"t": tf.constant(1.0)}


def none_of_them():
    return tf.size(tf.where(tf.random.uniform([4]) > 2.0))
