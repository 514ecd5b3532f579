"""Steps on the workers of a parameter-server cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from trainer.core.config import Config
from trainer.core.contracts import Dataset, ElementSpec, Program, Strategy, Structure, Traced
from trainer.core.failures import EmptyPart, UserError
from trainer.run.position import FIRST, Position
from trainer.training.atomic_updates import AtomicUpdates
from trainer.training.data_service import DataService
from trainer.training.dynamic.table import giving_rows
from trainer.training.dynamic.tables import DynamicTables, TablesLeft
from trainer.training.input import ENDLESS, Beginning, replica_element_spec, train_dataset_fn
from trainer.training.keras.adapters import keras_of
from trainer.training.keras.base import KerasModel
from trainer.training.large_arrays import refuse_large_arrays
from trainer.training.learning_rate import LearningRate
from trainer.training.lookups import asking_once
from trainer.training.metrics import CallMetrics
from trainer.training.outside import refuse_outside
from trainer.training.release_resources import Iterators
from trainer.training.row_updates import may_ask_once
from trainer.training.staleness import Staleness
from trainer.training.steps.draws import draw_anew, draw_seed
from trainer.training.steps.model import make_model
from trainer.training.steps.outputs import names_told, outputs_of
from trainer.training.steps.reports import Report, Reports
from trainer.training.steps.runner import POLL_SECONDS, Call
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step
from trainer.training.tf_internals.datasets import elements_of, iterator_handles, iterator_type_spec
from trainer.training.tf_internals.workers import (
    Members,
    all_failed_alike,
    calls_fail,
    is_recovering,
    make_coordinator,
    stop_cluster,
    worker_threads,
)
from trainer.training.worker_files import WorkerFiles, processes_of, refuse_unwritable, tag_of

# Between workers and ps each round of a call's loop costs messages of its own, which short steps feel. Several steps a
# round take several times as long to trace, which only a small model is worth: only its steps are that short.
UNROLLED_STEPS = 8
UNROLLED_VARIABLES = 20


class RemoteStepRunner:
    """The workers of a parameter-server cluster; a call is queued for whichever is free."""

    def __init__(
        self,
        config: Config,
        program: Program,
        strategy: Strategy,
        workers: int,
        members: Members | None = None,
        service: DataService | None = None,
        handover: TablesLeft | None = None,
    ) -> None:
        """`handover` knows of dynamic tables that an earlier coordinator has left on the ps."""
        self._config = config
        self._program = program
        self._strategy = strategy
        self._workers = workers
        self._service = service
        self._files = WorkerFiles(tag_of(config.shared_dir, config.run, workers), processes_of(members))
        self._exact = config.input_position == "exact"
        self._seed = draw_seed(config)
        self._first = self._counted = 0  # the step where the reading began, and the highest that a call has told
        self.step_examples: int | None = None
        self.seconds_waited = 0.0
        self._places = [FIRST] * workers  # how far each part is read, with input_position: exact
        self._data = {"program": config.program, "program_args": json.loads(json.dumps(dict(config.program_args)))}
        with worker_threads() as self._threads:
            self._coordinator = make_coordinator(strategy, members)
        self.tables = DynamicTables.of(config, strategy, handover)
        self.model, self.step = make_model(program, strategy, self.tables)
        keras = keras_of(self.model)
        keras.check_settings(config)
        keras.gather_updates(config, self.tables)
        self._dataset = self._trace_dataset()
        self._iterator: Any = None  # made with the first call, at whose step the reading begins
        element = iterator_type_spec(strategy, self._dataset)
        self._elements = elements_of(element)
        with strategy.scope(), self._building_tables():
            keras.build(self.element_spec)
        self._rate = LearningRate(self.model.optimizer)
        self._reports = Reports()
        self._told: list[Report] = []  # reports that nobody has heard of yet
        self._stale = Staleness(self.model.optimizer)
        updates = AtomicUpdates(strategy)
        train_step = self._trace_step(keras, element, updates)
        self.copy = updates.copy
        if self.tables is not None:
            self.tables.mutex_of = updates.mutex_of
        self.tells = names_told(outputs_of(train_step, placed=self._exact))
        self.trained = keras.trained()
        self._metrics = CallMetrics(self.model, train_step, self._stale.states)
        unrolled = UNROLLED_STEPS if len(self.model.trainable_variables) <= UNROLLED_VARIABLES else 1
        self._call = trace_call(
            strategy,
            train_step,
            self.step,
            element,
            self._rate,
            self._reports,
            self._metrics.states,
            updates,
            self.tables,
            unrolled=unrolled,
        )
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()

    def _trace_step(self, keras: KerasModel, element: ElementSpec, updates: AtomicUpdates) -> Traced:
        """Trace a step for the workers; raises UserError where they would train otherwise than one process does."""
        with asking_once(may_ask_once(self.model)), giving_rows(), self._building_tables():
            train_step = trace_step(
                self._strategy,
                self.model,
                element,
                self._rate,
                updates,
                self._stale,
                placed=self._exact,
                seeded=False,
            )
        refuse_large_arrays(train_step.graph, f"{type(self.model).__name__}.train_step")
        refuse_outside(self._program, train_step, f"{type(self.model).__name__}.train_step", self.model)
        with self._strategy.scope():
            keras.check_step(train_step)
        if self.tables is not None:
            self.tables.check(keras.layer_names)
        return train_step

    def _building_tables(self) -> contextlib.AbstractContextManager[None]:
        return self.tables.of_layers() if self.tables is not None else contextlib.nullcontext()

    @property
    def element_spec(self) -> ElementSpec:
        spec = replica_element_spec(self._dataset)
        return spec[1] if self._exact else spec

    @property
    def position(self) -> Position | None:
        if not self._exact:
            return None
        self._take_reports()
        return Position(self._seed, tuple(self._places), self._data)

    def go_on_from(self, position: Position) -> str:
        if not self._exact:
            return ""
        if why := position.differs(self._config.seed, self._data):
            position = position.rewound(self._config.seed, self._data)
        self._seed, self._places = position.seed, list(position.among(self._workers))
        return why

    @property
    def is_recovering(self) -> bool:
        return is_recovering(self._coordinator)

    @property
    def is_failing(self) -> bool:
        return calls_fail(self._coordinator)

    def is_failing_alike(self, error: Exception) -> bool:
        """Return whether every worker has failed with this error, while no process ended."""
        return all_failed_alike(self._coordinator, error)

    def call(self, steps: int) -> Call:
        if self._iterator is None:
            self._begin_to_read()
        number = next(self._numbers)
        args = (self._iterator, tf.constant([steps, number], tf.int64), self._rate.value)
        with self._data_refused():
            self._coordinator.schedule(self._call, args=args)
        self._calls[number] = call = Call(steps, time.monotonic())
        return call

    def returned(self) -> list[Call]:
        with self._data_refused():
            is_quiet = self._coordinator.done()
        self._take_reports()
        ended = []
        # Who waits for all calls wants TensorFlow to be done with the last one, too.
        while (len(self._calls) > 1 or is_quiet) and self._told:
            report = self._told.pop(0)
            # One that ran twice, because its worker died, may have told twice.
            if call := self._calls.pop(report.number, None):
                (call.outputs, states, waited, numbers), call.worker = report.told, report.worker
                call.counted = report.step
                if self.tables is not None:
                    self.tables.tell(numbers)
                self._metrics.add(states)
                call.stale = self._stale.found(states[len(states) - len(self._stale.states) :], call.steps)
                self.seconds_waited = max(self.seconds_waited, sum(float(one) for one in waited))
                ended.append(call)
        return ended

    def _take_reports(self) -> None:
        while report := self._reports.take():
            self._counted = max(self._counted, report.step)
            if self._exact:
                (outputs, place), *rest = report.told
                self._places[report.worker] = (int(place[0]), int(place[1]))
                report = dataclasses.replace(report, told=(outputs, *rest))
            self._told.append(report)

    def over_all_calls(self, outputs: Structure) -> Structure:
        return self._metrics.over_all_calls(outputs)

    def write_metrics(self) -> None:
        self._metrics.write()

    def reset_metrics(self) -> None:
        self._metrics.reset()

    def join(self) -> None:
        """Wait for all calls; for scripts, which have nothing else to do meanwhile."""
        while self._calls:
            self.returned()
            time.sleep(POLL_SECONDS)

    def close(self) -> Iterators:
        stop_cluster(self._coordinator)
        self._calls.clear()
        handles = [] if self._iterator is None else iterator_handles(self._iterator)
        iterators = Iterators(handles, *self._elements, self._threads)
        del self._iterator, self._dataset, self._reports
        return iterators

    def _trace_dataset(self) -> Dataset:
        make = train_dataset_fn(
            self._program,
            self._workers,
            self._strategy,
            self._begins,
            self._service,
            seeded=self._exact or self._config.seed is not None,
            exact=self._exact,
            batches=self._set_examples,
            files=self._files,
        )
        return self._coordinator.create_per_worker_dataset(make)

    def _set_examples(self, batch: int | None) -> None:
        self.step_examples = None if batch is None else batch * self._strategy.num_replicas_in_sync

    def _begins(self, worker: int) -> Beginning:
        """Return where a worker's reading begins that begins now: a worker may come back."""
        if self._exact:
            return Beginning(self._seed, *self._places[worker])
        # The data service is given one order for all workers.
        return Beginning(self._seed, self._first if self._service else self._counted)

    def _begin_to_read(self) -> None:
        """Have each worker make its iterator."""
        self._first = self._counted = int(self.step.numpy())
        if draw_anew(self._config, self._counted) and not self._exact:
            self._dataset = self._trace_dataset()  # an operation that draws within `map` gets its seed there
        self._iterator = iter(self._dataset)

    @contextlib.contextmanager
    def _data_refused(self) -> Iterator[None]:
        # `schedule` raises what went wrong in an earlier call, as `done` does.
        try:
            yield
        except tf.errors.OutOfRangeError as error:
            raise EmptyPart(
                f"a worker's part of the training data is empty: {self._workers} workers share it"
            ) from error
        except tf.errors.InvalidArgumentError as error:
            if ENDLESS in str(error):
                raise UserError(f"{type(self._program).__name__}: {ENDLESS}") from error
            raise
        except (tf.errors.AlreadyExistsError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
            refuse_unwritable(self._program, error)
            raise

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the numbers: one coordinator decides alone."""
        return numbers
