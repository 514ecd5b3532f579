"""Steps on this process's devices, alone or in step with other members."""

from __future__ import annotations

import time

import tensorflow as tf

from trainer.core.config import Config
from trainer.core.contracts import ElementSpec, Program, Strategy, Structure
from trainer.core.failures import UserError
from trainer.run.position import Position
from trainer.run.snapshot import copy_each
from trainer.training.data_service import DataService
from trainer.training.dynamic.tables import DynamicTables
from trainer.training.input import own_train_dataset, replica_element_spec
from trainer.training.keras.adapters import keras_of
from trainer.training.steps.draws import draw_anew, draw_seed, seeded_by
from trainer.training.steps.model import make_model
from trainer.training.steps.outputs import names_told, outputs_of
from trainer.training.steps.runner import Call
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step
from trainer.training.worker_files import refuse_unwritable


class LocalStepRunner:
    """This process's devices, alone or in step with those of the other members (multi_worker_mirrored)."""

    is_recovering = is_failing = False
    position = None
    seconds_waited = 0.0
    copy = staticmethod(copy_each)
    tables: DynamicTables | None = None

    def __init__(
        self,
        config: Config,
        program: Program,
        strategy: Strategy,
        service: DataService | None = None,
        step: int = 0,
        member: int = 0,
    ) -> None:
        """`step` is the one to go on at, as far as it is known, and `member` this process's number among those in step.

        What a step draws depends on both.
        """
        self._config = config
        self._program = program
        self._service = service
        self._strategy = strategy
        self._seed = draw_seed(config)
        self.model, self.step = make_model(program, strategy)
        keras = keras_of(self.model)
        keras.check_settings(config)
        self.trained = keras.trained()
        # A data service begins to read as soon as there is an iterator: what is traced needs its type alone.
        own = config if service is None else config.replace(input="local", input_sharding="program")
        self._dataset = own_train_dataset(own, program, strategy, None, self._seed)
        self._iterator = iter(self._dataset)
        self._is_reading = False
        with seeded_by(config.seed, step, member):
            train_step = trace_step(strategy, self.model, self._iterator)
            self._call = trace_call(strategy, train_step, self.step, self._iterator)
        self.tells = names_told(outputs_of(train_step))
        first = {spec.shape[0] for spec in tf.nest.flatten(self.element_spec) if getattr(spec, "shape", None)}
        known = first.pop() if len(first) == 1 else None
        self.step_examples = None if known is None else known * strategy.num_replicas_in_sync
        self._ended: list[Call] = []

    @property
    def element_spec(self) -> ElementSpec:
        return replica_element_spec(self._dataset)

    def call(self, steps: int) -> Call:
        """Run a call of so many steps: it has ended when this returns."""
        if not self._is_reading:
            self._begin_to_read()
        began = time.monotonic()
        try:
            outputs = self._call(self._iterator, tf.constant([steps], tf.int64))
        except tf.errors.OutOfRangeError as error:
            raise UserError("the training data is empty, or this process's part of it") from error
        except (tf.errors.AlreadyExistsError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
            refuse_unwritable(self._program, error)
            raise
        call = Call(steps, began, outputs)
        self._ended.append(call)
        return call

    def go_on_from(self, position: Position) -> str:
        """Read in another order: these strategies know no position."""
        return ""

    def _begin_to_read(self) -> None:
        """Make the dataset again where the training doesn't begin at step 0, for which it was made."""
        self._is_reading = True
        step = int(self.step.numpy())
        draw_anew(self._config, step)
        if step or self._service:
            own = own_train_dataset(self._config, self._program, self._strategy, self._service, self._seed, step)
            self._dataset, self._iterator = own, iter(own)

    def returned(self) -> list[Call]:
        ended, self._ended = self._ended, []
        return ended

    def over_all_calls(self, outputs: Structure) -> Structure:
        return outputs

    def write_metrics(self) -> None:
        """They do."""

    def reset_metrics(self) -> None:
        self.model.reset_metrics()

    def close(self) -> None:
        return None

    def agree(self, numbers: list[int]) -> list[int]:
        if not isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return numbers
        return [int(number) for number in self._greatest(tf.constant(numbers, tf.int64))]

    @tf.function
    def _greatest(self, numbers: tf.Tensor) -> tf.Tensor:
        rows = self._strategy.run(lambda: numbers[tf.newaxis])
        return tf.reduce_max(self._strategy.gather(rows, axis=0), axis=0)
