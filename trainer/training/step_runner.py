"""What computes the steps: a model in a strategy's scope, its data, and a call that packs a number of steps.

`RemoteReplicas` are the workers of a parameter-server cluster, `OwnReplicas` this process's devices. The custom loop
and `fit` drive either in the same way: call, call, ..., join.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.config import Config
from trainer.failures import EmptyPart, UserError
from trainer.program import build_model
from trainer.training.input import own_train_dataset, replica_element_spec, train_dataset_fn
from trainer.training.learning_rate import LearningRate
from trainer.training.tf_internals import Members, is_recovering, make_coordinator

# Between workers and ps each round of a call's loop costs messages of its own, which short steps feel. Several steps a
# round take several times as long to trace, which only a small model is worth: only its steps are that short.
UNROLLED_STEPS = 4
UNROLLED_VARIABLES = 20
POLL_SECONDS = 0.005


class RemoteReplicas:
    """The workers of a parameter-server cluster; calls are scheduled on whichever is free."""

    def __init__(
        self, config: Config, program: Any, strategy: Any, workers: int, members: Members | None = None
    ) -> None:
        self.parallel = workers
        self._coordinator = make_coordinator(strategy, members)
        self.model, self.step = make_model(program, strategy)
        self._dataset = self._coordinator.create_per_worker_dataset(train_dataset_fn(program, workers, strategy))
        self._iterator = iter(self._dataset)
        # The worker-specific type of a per-worker value has no public name; `schedule` takes it from here too.
        element = self._iterator._values[0]._type_spec
        self._rate = LearningRate(self.model.optimizer)
        self._call = trace(strategy, self.model, self.step, element, self._rate)
        if len(self.model.trainable_variables) <= UNROLLED_VARIABLES:
            self._call = trace(strategy, self.model, self.step, element, self._rate, UNROLLED_STEPS)

    @property
    def element_spec(self) -> Any:
        """What one replica gets of the program's training data."""
        return replica_element_spec(self._dataset)

    def call(self, steps: int) -> Any:
        """Schedule a call of so many steps; returns its outputs, to be fetched later."""
        args = (self._iterator, tf.constant(steps, tf.int64), self._rate.value)
        with self._empty_part_named():
            return self._coordinator.schedule(self._call, args=args)

    def join(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for all calls; raises what went wrong in them, or what `waiting`, called again and again, raises."""
        with self._empty_part_named():
            while not self._coordinator.done():
                waiting()
                time.sleep(POLL_SECONDS)

    @property
    def recovering(self) -> bool:
        """Whether TensorFlow is taking in a worker again: another strategy made meanwhile would hang or crash."""
        return is_recovering(self._coordinator)

    def close(self) -> Any:
        """End TensorFlow's threads of this cluster, no call can follow; returns what holds the iterators."""
        self._coordinator._cluster.stop()
        iterators = self._iterator, self._dataset
        del self._iterator, self._dataset
        return iterators

    @contextlib.contextmanager
    def _empty_part_named(self) -> Iterator[None]:
        # `schedule` raises what went wrong in an earlier call, as `join` does.
        try:
            yield
        except tf.errors.OutOfRangeError as error:
            raise EmptyPart(
                f"a worker's part of the training data is empty: {self.parallel} workers share it"
            ) from error

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the numbers: one coordinator decides alone."""
        return numbers


class OwnReplicas:
    """This process's devices, alone or in step with those of the other members (multi_worker_mirrored)."""

    parallel = 1

    def __init__(self, config: Config, program: Any, strategy: Any) -> None:
        self._strategy = strategy
        self.model, self.step = make_model(program, strategy)
        self._dataset = own_train_dataset(config, program, strategy)
        self._iterator = iter(self._dataset)
        self._call = trace(strategy, self.model, self.step, self._iterator)

    @property
    def element_spec(self) -> Any:
        """What one replica gets of the program's training data."""
        return replica_element_spec(self._dataset)

    def call(self, steps: int) -> Any:
        """Run a call of so many steps; returns its outputs."""
        try:
            return self._call(self._iterator, tf.constant(steps, tf.int64))
        except tf.errors.OutOfRangeError as error:
            raise UserError("the training data is empty, or this process's part of it") from error

    def join(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Nothing is in flight here after a call."""

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the greatest of all members' numbers, place by place: members must do the same at the same time."""
        if not isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return numbers
        return [int(number) for number in self._greatest(tf.constant(numbers, tf.int64))]

    @tf.function
    def _greatest(self, numbers: tf.Tensor) -> tf.Tensor:
        rows = self._strategy.run(lambda: numbers[tf.newaxis])
        return tf.reduce_max(self._strategy.gather(rows, axis=0), axis=0)


def make_model(program: Any, strategy: Any) -> tuple[Any, Any]:
    """Build the program's model and the trainer's own step counter in the strategy's scope."""
    with strategy.scope():
        model = build_model(program)
        once = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return model, tf.Variable(0, dtype=tf.int64, trainable=False, name="step", aggregation=once)


def trace(
    strategy: Any, model: Any, step: Any, iterator: Any, rate: LearningRate | None = None, unrolled: int = 1
) -> Any:
    """Trace the packed call; this makes what a lazily built model and its optimizer still lack.

    A call for other processes takes the learning rate as its last argument. `unrolled` is the number of steps in a
    round of the call's loop; what that leaves over is done first, in rounds of one step.
    """

    def train_step(iterator: Any) -> Any:
        return reduce_replicas(strategy, strategy.run(model.train_step, args=(next(iterator),)))

    @tf.function
    def train_call(iterator: Any, steps: tf.Tensor, *value: tf.Tensor) -> Any:
        with rate.given(*value) if rate else contextlib.nullcontext():
            # At least one: a loop that may not run at all cannot make the outputs.
            for _ in tf.range((steps - 1) % unrolled + 1 if unrolled > 1 else steps):
                outputs = train_step(iterator)
            if unrolled > 1:
                for _ in tf.range((steps - 1) // unrolled):
                    for _ in range(unrolled):
                        outputs = train_step(iterator)
        # Once a call and at its end, so that a call that is run again on another worker counts once.
        with tf.control_dependencies(tf.nest.flatten(outputs, expand_composites=True)):
            step.assign_add(steps)
        return outputs

    specs = (iterator, tf.TensorSpec([], tf.int64))
    with strategy.scope(), quiet_tracing():
        return rate.trace(train_call, *specs) if rate else train_call.get_concrete_function(*specs)


def reduce_replicas(strategy: Any, outputs: Any) -> Any:
    """Average what train_step returns over this process's replicas, without a word to other members.

    Keras's metrics are reduced over all replicas already.
    """

    def reduce(value: Any) -> Any:
        values = strategy.experimental_local_results(value)
        return tf.add_n(values) / len(values) if len(values) > 1 else values[0]

    return tf.nest.map_structure(reduce, outputs)


def fetch_numbers(outputs: Any) -> dict[str, float]:
    """Fetch what train_step or an evaluation returned, by name; what is not one number has no place in the log."""
    fetched = outputs.fetch() if hasattr(outputs, "fetch") else outputs
    if not isinstance(fetched, dict):
        fetched = {"loss": fetched}
    return {str(name): float(value) for name, value in fetched.items() if getattr(value, "ndim", 0) == 0}


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Drop TensorFlow's warning that `run` was called outside `schedule`: it is only being traced."""

    def keep(record: logging.LogRecord) -> bool:
        return "method is invoked without using `ClusterCoordinator.schedule`" not in record.getMessage()

    logger = logging.getLogger("tensorflow")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
