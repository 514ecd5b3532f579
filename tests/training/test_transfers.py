"""What a step sends goes together, in one message for each way and stage; and the numbers stay the same."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.core.settings.config import Config
from trainer.tasks.in_process import start_cluster
from trainer.training.measures.staleness import SCOPE
from trainer.training.steps import traced_step
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.strategies import make_strategy
from trainer.training.updates import atomic_updates
from trainer.training.updates.orders import sources
from trainer.training.updates.transfers import WORKER, crossing, pack, places_of, sending_together, unpack

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("rounds_of_two")]
TABLES, ROWS = 3, 300
ROUNDS = 17  # so many steps of one call are done in rounds of several
keras = tf.keras


class Tables:
    """A table for each of the ids of an example, looked up by rows of them, and a small dense net."""

    optimizer = "Adagrad"

    def model(self, inputs: Any, outputs: Any) -> Any:
        return keras.Model(inputs, outputs)

    def build_model(self) -> Any:
        keras.utils.set_random_seed(1)
        inputs = [keras.layers.Input((2,), dtype=tf.int64, name=f"id{number}") for number in range(TABLES)]
        tables = [keras.layers.Embedding(ROWS, 8, name=f"table{number}") for number in range(TABLES)]
        rows = [keras.layers.Flatten()(table(one)) for table, one in zip(tables, inputs, strict=True)]
        model = self.model(inputs, keras.layers.Dense(1)(keras.layers.Dense(16, "relu")(tf.concat(rows, axis=1))))
        model.compile(getattr(keras.optimizers, self.optimizer)(0.1), "mse")
        return model

    def train_dataset(self, context: Any) -> Any:
        ids = tf.random.stateless_uniform([128, TABLES, 2], [1, 2], maxval=ROWS, dtype=tf.int64)
        features = {f"id{number}": ids[:, number] for number in range(TABLES)}
        return tf.data.Dataset.from_tensor_slices((features, tf.ones([128, 1]))).repeat().batch(16)


class Adam(Tables):
    optimizer = "Adam"


class TwiceAStep(Tables):
    """Reads a weight after its update, and updates it once more by what was read."""

    optimizer = "SGD"

    def model(self, inputs: Any, outputs: Any) -> Any:
        class Twice(keras.Model):
            def train_step(self, data: Any) -> Any:
                numbers = super().train_step(data)
                *weights, _ = self.layers[-1].trainable_variables  # the parts of its kernel
                self.optimizer.apply_gradients([(tf.square(weight) * 0.01, weight) for weight in weights])
                return {**numbers, "weight": tf.add_n([tf.reduce_sum(weight) for weight in weights])}

        return Twice(inputs, outputs)


class Measured(Tables):
    """With metrics, whose states a call keeps on its worker."""

    def model(self, inputs: Any, outputs: Any) -> Any:
        class WithMetrics(keras.Model):
            def compile(self, optimizer: Any, loss: Any) -> None:
                super().compile(optimizer, loss, metrics=["mae", keras.metrics.AUC(num_thresholds=5)])

        return WithMetrics(inputs, keras.layers.Activation("sigmoid")(outputs))


class Printing(Tables):
    """Prints what it has looked up, and then draws samples: tf.function keeps the order of such operations."""

    optimizer = "SGD"

    def model(self, inputs: Any, outputs: Any) -> Any:
        class Prints(keras.Model):
            def train_step(self, data: Any) -> Any:
                rows = tf.gather(self.trainable_variables[0], data[0]["id0"][:, 0])
                tf.print("psfleet-test", tf.size(rows), output_stream="file:///dev/null")
                drawn, *_ = tf.random.uniform_candidate_sampler(data[0]["id1"], 2, 1, True, ROWS, seed=1)
                numbers = super().train_step(data)
                return {**numbers, "rows": tf.reduce_sum(tf.gather(self.trainable_variables[2], drawn)) * 0.0}

        return Prints(inputs, outputs)


class OfKeras3(Tables):
    optimizer = "Adam"

    def build_model(self) -> Any:
        import keras as keras3

        keras3.utils.set_random_seed(1)
        inputs = [keras3.layers.Input((2,), dtype="int64", name=f"id{number}") for number in range(TABLES)]
        rows = [keras3.layers.Flatten()(keras3.layers.Embedding(ROWS, 8)(one)) for one in inputs]
        outputs = keras3.layers.Dense(1)(keras3.layers.Concatenate()(rows))
        model = keras3.Model(dict(zip([one.name for one in inputs], inputs, strict=True)), outputs)
        model.compile(keras3.optimizers.Adam(0.1), "mse", metrics=["mae"])
        return model


def trained_and_counted(
    program: Any, monkeypatch: pytest.MonkeyPatch, together: Any, **settings: Any
) -> tuple[np.ndarray, int, int]:
    """Return the weights and slots after some steps, and how many tensors a step sends.

    And how many mutexes it takes on that ps where it takes most, apart from lookups.
    """
    sent: list[int] = []
    locks: list[int] = []

    @contextlib.contextmanager
    def counting(local: Any) -> Iterator[None]:
        graph = tf.compat.v1.get_default_graph()
        with together(local):
            yield
        places = places_of(graph, local())
        found = crossing(graph, places).values()
        sent.append(sum(tensor.dtype != tf.resource for tensors in found for tensor in tensors))
        handles = {id(piece.handle) for piece in local()}
        of_metrics = [inner for outer, inner in graph.captures if id(outer) in handles]
        locked = [one.device for one in graph.get_operations() if one.type == "MutexLock"]
        locks.append(max(map(locked.count, locked)))
        counts = [one for one in graph.get_operations() if SCOPE in one.name and places[one.name] == WORKER]
        told = {given.name for one in counts for given in sources(one) if places[given.name] != WORKER}
        assert len(told) == 1  # how many updates of others came between
        packed = {one.name for one in graph.get_operations() if "psfleet_together" in one.name}
        for user in (user for handle in of_metrics for user in handle.consumers()):
            assert not {given.op.name for given in user.inputs} & packed
            assert not {one.name for output in user.outputs for one in output.consumers()} & packed

    monkeypatch.setattr(traced_step, "sending_together", counting)
    known = {"program": "any:One", "run": "test", "shared_dir": "/tmp", "steps": 100, "seed": 3}
    config = Config.from_dict({**known, "evaluation": "none", **settings})
    strategy = make_strategy(config, start_cluster("parameter_server", 1, 2))
    runner = RemoteStepRunner(config, program, strategy, 1)
    for steps in (1, 1, ROUNDS):
        runner.call(steps)
        runner.join()
    variables = [*runner.model.trainable_variables, *runner.model.optimizer.variables]
    variables = [one for one in variables if not hasattr(one, "is_reserved")]  # a dynamic table is not read as a whole
    if isinstance(program, OfKeras3):
        variables = [variable.value for variable in variables]
    values = np.concatenate([np.ravel(variable.numpy()).astype(np.float64) for variable in variables])
    runner.close()
    return values, sent[-1], locks[-1]


@functools.cache
def trained_together(program: Callable[[], Any], settings: str) -> tuple[np.ndarray, int, int]:
    """Do the same with packed messages, once for the tests of messages and of acts; `settings` are JSON."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return trained_and_counted(program(), monkeypatch, sending_together, **json.loads(settings))


SPLIT = {"partitioner": "fixed_shards"}
DYNAMIC = {"dynamic_tables": {f"table{number}": {"capacity": 5000} for number in range(TABLES)}}


@pytest.mark.parametrize(
    ("program", "settings", "most"),
    [
        *((Tables, DYNAMIC, 7), (TwiceAStep, SPLIT, 24), (OfKeras3, {}, 20)),
        pytest.param(Tables, SPLIT, 7, marks=pytest.mark.matrix),
        pytest.param(Tables, {}, 7, marks=pytest.mark.matrix),
        pytest.param(Adam, {}, 8, marks=pytest.mark.matrix),
        pytest.param(TwiceAStep, {}, 24, marks=pytest.mark.matrix),
        pytest.param(Measured, {}, 7, marks=pytest.mark.matrix),
        pytest.param(Printing, {}, 24, marks=pytest.mark.matrix),
    ],
)
def test_packed_messages_change_no_number(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any], settings: dict[str, Any], most: int
) -> None:
    apart, many, _ = trained_and_counted(program(), monkeypatch, lambda local: contextlib.nullcontext(), **settings)
    together, few, _ = trained_together(program, json.dumps(settings))
    assert np.isfinite(apart).all()
    assert np.array_equal(apart, together)
    assert few <= most < many


@pytest.mark.parametrize(
    ("program", "settings", "acts"),
    [
        *((Tables, DYNAMIC, 1), (TwiceAStep, SPLIT, 2)),
        pytest.param(Tables, SPLIT, 1, marks=pytest.mark.matrix),
        pytest.param(OfKeras3, {}, 1, marks=pytest.mark.matrix),
        pytest.param(Measured, {}, 1, marks=pytest.mark.matrix),
    ],
)
def test_updates_in_one_act_change_no_number(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[], Any], settings: dict[str, Any], acts: int
) -> None:
    joint, _, few = trained_together(program, json.dumps(settings))
    monkeypatch.setattr(atomic_updates, "joined", lambda updates: [[one] for one in updates])
    apart, _, many = trained_and_counted(program(), monkeypatch, sending_together, **settings)
    assert np.isfinite(apart).all()
    assert np.array_equal(apart, joint)
    assert few <= 2 * acts < many  # each act has a gate before its mutex


def test_tensors_of_all_types_and_of_any_length_are_unpacked_as_they_were() -> None:
    given = [
        np.arange(6, dtype=np.int64).reshape(3, 2),
        np.zeros([0, 2], np.int32),
        np.float32(0.5),
        np.array([[1.5, -2.0]], np.float16),
        np.array([250, 1, 7], np.uint8),
        np.array([-1, 1], np.int8),
        np.array([np.pi]),
        np.arange(8, dtype=np.float32).reshape(4, 2),
    ]
    for known in (True, False):

        @tf.function
        def there_and_back(*tensors: Any) -> Any:
            return unpack(pack(tensors), tensors)

        shapes = [one.shape if known or not one.shape else (None, *one.shape[1:]) for one in given]
        shapes[-1] = (4, 2 if known else None)
        specs = [tf.TensorSpec(shape, one.dtype) for shape, one in zip(shapes, given, strict=True)]
        for before, after in zip(given, there_and_back.get_concrete_function(*specs)(*given), strict=True):
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after.numpy(), before)
