"""Each update of a variable with its slots is one act, whatever the optimizer: replayed one by one it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from trainer import testing  # noqa: F401  before TensorFlow: tf.keras is tf_keras
from trainer.training.atomic_updates import AtomicUpdates
from trainer.training.one_update import gather, gather_keras3

# isort: split
import keras
import tensorflow as tf
from replay import Recorded, differing

pytestmark = pytest.mark.timeout(600)
ROWS, WIDTH, WORKERS, UPDATES = 256, 8, 4, 75
START = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
Make = Callable[[], Any]
two, legacy, three = tf.keras.optimizers, tf.keras.optimizers.legacy, keras.optimizers
# Names of optimizers, which may have arguments, by the Keras that they are of.
TF_KERAS = (
    *("Adam(0.1)", "Nadam(0.1)", "SGD(0.1, momentum=0.9, nesterov=True)", "RMSprop(0.1, centered=True, momentum=0.5)"),
    *("Adam(0.1, amsgrad=True)", "AdamW(0.1)", "Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
    *("SGD(0.1)", "Adafactor(0.1)", "Lion(0.1)", "Adam(0.1, clipnorm=0.5)", "Adam(0.1, global_clipnorm=0.5)"),
    *("Adam(0.1, use_ema=True, weight_decay=0.01)", "SGD(0.1, use_ema=True)", "SGD(0.1, weight_decay=0.01)"),
    "Adagrad(0.1, use_ema=True, weight_decay=0.01, clipvalue=0.1)",
)
LEGACY = (
    *("Adam(0.1)", "Nadam(0.1)", "Adam(0.1, amsgrad=True)", "SGD(0.1, momentum=0.9)", "RMSprop(0.1, centered=True)"),
    *("Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
)
KERAS_3 = (
    *("Adam(0.1)", "Nadam(0.1)", "SGD(0.1, momentum=0.9)", "RMSprop(0.1, centered=True, momentum=0.5)", "Lion(0.1)"),
    *("Adam(0.1, amsgrad=True)", "AdamW(0.1)", "Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
    *("Adafactor(0.1)", "Lamb(0.1)", "Adam(0.1, use_ema=True, weight_decay=0.01)", "SGD(0.1, clipnorm=0.5)"),
)
QUICK = {two: TF_KERAS[:2] + TF_KERAS[-4:-3], legacy: LEGACY[:2], three: KERAS_3[:1] + KERAS_3[-2:-1]}
OPTIMIZERS = [
    pytest.param(
        (kind, name),
        marks=[] if name in QUICK[kind] else [pytest.mark.matrix],
        id=f"{kind.__name__.removesuffix('.optimizers').split('.')[-1]}-{name}",
    )
    for kind, names in ((two, TF_KERAS), (legacy, LEGACY), (three, KERAS_3))
    for name in names
]


class Table(tf.keras.layers.Layer):
    """A table whose gradient names rows, and a bias whose gradient doesn't; both have a constraint."""

    def __init__(self, constraint: Any = None) -> None:
        super().__init__()
        own = {"constraint": constraint} if constraint else {}
        self.table = self.add_weight("table", [ROWS, WIDTH], initializer=lambda *_, **__: tf.constant(START), **own)
        self.bias = self.add_weight("bias", [WIDTH], initializer=lambda *_, **__: tf.constant(START[0]), **own)


class Trained:
    """An optimizer as `trainer` has it, and what it trains."""

    def __init__(self, made: tuple[Any, str], record: Any = None, constraint: Any = None) -> None:
        kind, name = made
        self.optimizer: Any = eval(f"kind.{name}", {"kind": kind})
        self.weights = Table(constraint)
        variables = self.variables = [self.weights.table, self.weights.bias]
        if hasattr(self.optimizer, "build"):
            self.optimizer.build(variables)
        self.updates: AtomicUpdates | None = None
        if record is not None:
            gather_keras3(self.optimizer) if kind is three else gather(self.optimizer)
            self.updates = AtomicUpdates(tf.distribute.get_strategy(), record)

    def step(self, ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(self.weights.table, ids) * self.weights.bias - 1) ** 2)
        gradients = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True)))

    def traced(self) -> Any:
        @tf.function(autograph=False)
        def step(ids: Any) -> None:
            if self.updates is None:
                self.step(ids)
            else:
                with self.updates.active():
                    self.step(ids)

        return step.get_concrete_function(tf.TensorSpec([None], tf.int64))

    @property
    def state(self) -> list[np.ndarray]:
        found = self.optimizer.variables() if callable(self.optimizer.variables) else self.optimizer.variables
        return [np.array(one) for one in (*self.variables, *found)]


def by_many(step: Any, seed: int = 0) -> None:
    """Run a step on several threads at once, as workers have a ps do."""

    def work(worker: int) -> None:
        generator = np.random.default_rng([seed, worker])
        for _ in range(UPDATES):
            step(tf.constant(generator.integers(ROWS, size=6)))

    with ThreadPoolExecutor(WORKERS) as workers:
        for future in [workers.submit(work, number) for number in range(WORKERS)]:
            future.result()


@pytest.fixture(autouse=True, scope="module")
def _as_written() -> Iterator[None]:
    """Have no optimization of graphs round otherwise in a replay than before."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.parametrize("made", OPTIMIZERS)
def test_updates_of_many_workers_are_some_order_of_whole_ones(made: tuple[Any, str]) -> None:
    recorded = Recorded()
    trained = Trained(made, recorded)
    by_many(trained.traced())
    count, found = recorded.replay()
    assert count >= 2 * WORKERS * UPDATES
    assert differing(found) == {}
    assert not np.array_equal(trained.state[0], START)
