"""Steps on this process's devices, alone or in step with other members."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Program, Strategy
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.saves.snapshot import copy_each
from trainer.training.data.data_service import DataService
from trainer.training.data.input import own_train_dataset, replica_element_spec
from trainer.training.data.worker_files import UNWRITABLE, reject_unwritable
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.outputs import output_names, outputs_of
from trainer.training.steps.draws import draw_seed, seed_for_step, seeded_by
from trainer.training.steps.model import make_model
from trainer.training.steps.runner import Call, StepRunner
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step


class LocalStepRunner(StepRunner):
    """This process's devices, alone or in step with those of the other members (multi_worker_mirrored)."""

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
        self._program, self._strategy = program, strategy
        model, counter = make_model(program, strategy)
        keras = keras_of(model)
        keras.check_settings(config)
        trained = keras.trained()
        self._data = OwnData(config, program, strategy, service)
        with seeded_by(config.seed, step, member):
            train_step = trace_step(strategy, model, self._data.iterator)
            self._call = trace_call(strategy, train_step, counter, self._data.iterator)
        super().__init__(model, trained, counter, output_names(outputs_of(train_step)), copy_each)
        self._ended: list[Call] = []

    @property
    def element_spec(self) -> ElementSpec:
        return self._data.element_spec

    @property
    def step_examples(self) -> int | None:
        return self._data.step_examples

    def call(self, steps: int) -> Call:
        """Run a call of so many steps: it has ended when this returns."""
        if not self._data.has_begun:
            self._data.begin(int(self.step.numpy()))
        began = time.monotonic()
        try:
            outputs = self._call(self._data.iterator, tf.constant([steps], tf.int64))
        except tf.errors.OutOfRangeError as error:
            raise UserError("the training data is empty, or this process's part of it") from error
        except UNWRITABLE as error:
            reject_unwritable(self._program, error)
            raise
        call = Call(steps, began, outputs)
        self._ended.append(call)
        return call

    def returned(self) -> list[Call]:
        ended, self._ended = self._ended, []
        return ended

    def agree(self, numbers: list[int]) -> list[int]:
        if not isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
            return numbers
        return [int(number) for number in self._greatest(tf.constant(numbers, tf.int64))]

    @tf.function
    def _greatest(self, numbers: tf.Tensor) -> tf.Tensor:
        rows = self._strategy.run(lambda: numbers[tf.newaxis])
        return tf.reduce_max(self._strategy.gather(rows, axis=0), axis=0)


class OwnData:
    """A dataset, and the iterator that calls read from."""

    def __init__(self, config: Config, program: Program, strategy: Strategy, service: DataService | None) -> None:
        self._config, self._program, self._strategy, self._service = config, program, strategy, service
        self._seed = draw_seed(config)
        # A data service begins to read as soon as there is an iterator: what is traced needs its type alone.
        own = config if service is None else config.replace(input="local", input_sharding="program")
        self._dataset = own_train_dataset(own, program, strategy, None, self._seed)
        self.iterator: Any = iter(self._dataset)
        self.has_begun = False
        """Whether a call reads by now."""

    @property
    def element_spec(self) -> ElementSpec:
        """What one replica gets of the program's data."""
        return replica_element_spec(self._dataset)

    @property
    def step_examples(self) -> int | None:
        """How many examples a step has, where that is known."""
        first = {spec.shape[0] for spec in tf.nest.flatten(self.element_spec) if getattr(spec, "shape", None)}
        known = first.pop() if len(first) == 1 else None
        return None if known is None else known * self._strategy.num_replicas_in_sync

    def begin(self, step: int) -> None:
        """Make the dataset again where the training doesn't begin at step 0, for which it was made."""
        self.has_begun = True
        seed_for_step(self._config, step)
        if step or self._service:
            own = own_train_dataset(self._config, self._program, self._strategy, self._service, self._seed, step)
            self._dataset, self.iterator = own, iter(own)
