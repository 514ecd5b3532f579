"""What computes the steps: a model in a strategy's scope, its data, and a call that packs a number of steps.

`RemoteStepRunner` has the workers of a parameter-server cluster do it, `LocalStepRunner` this process's devices. The
controller drives either in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer.config import Config
from trainer.failures import EmptyPart, UserError
from trainer.program import build_model, is_keras3
from trainer.run.checkpoints import COORDINATOR
from trainer.run.position import FIRST, Position
from trainer.run.snapshot import Copies, copy_each
from trainer.training import keras3
from trainer.training.atomic_updates import AtomicUpdates, in_turn
from trainer.training.constraints import refuse_split_constraints
from trainer.training.data_service import DataService
from trainer.training.input import ENDLESS, Beginning, own_train_dataset, replica_element_spec, train_dataset_fn
from trainer.training.large_arrays import refuse_large_arrays
from trainer.training.learning_rate import LearningRate
from trainer.training.lookups import asking_once
from trainer.training.metrics import CallMetrics, MetricStates, metrics_of, pieces
from trainer.training.one_update import gather
from trainer.training.optimizers import (
    forget_children,
    is_wrapper,
    optimizers_of,
    refuse_state_of_shards,
    share_among_workers,
    treat_as_whole,
)
from trainer.training.outside import refuse_outside, refuse_outside_model
from trainer.training.precision import cast_split_variables, no_loss_scaling
from trainer.training.release_resources import Iterators
from trainer.training.row_updates import may_ask_once, update_by_rows
from trainer.training.staleness import SCOPE, Staleness
from trainer.training.tf_internals import (
    Members,
    all_failed_alike,
    calls_fail,
    elements_of,
    is_recovering,
    iterator_handles,
    iterator_type_spec,
    keeping_default_graph,
    make_coordinator,
    stop_cluster,
    worker_threads,
)
from trainer.training.whole_weights import building_whole
from trainer.training.worker_files import WorkerFiles, processes_of, refuse_unwritable, tag_of

# Between workers and ps each round of a call's loop costs messages of its own, which short steps feel. Several steps a
# round take several times as long to trace, which only a small model is worth: only its steps are that short.
UNROLLED_STEPS = 8
UNROLLED_VARIABLES = 20
COPIED_BYTES = 1 << 24
POLL_SECONDS = 0.005
MOST_REPORTS = 1 << 20


@dataclasses.dataclass
class Call:
    """A call that was given to a worker, and what it told when it had ended."""

    steps: int
    began: float
    """When it was given (of time.monotonic)."""
    outputs: Any = None
    """What train_step returned at its last step."""
    worker: int = 0
    counted: int = 0
    """The step as it was then; 0 where this process ran it."""
    stale: tuple[int, int] | None = None
    """Updates of others between a step's read of the weights and its update: the sum over its steps, and the most."""


class StepRunner(Protocol):
    """Runs packed calls, and has what they train."""

    model: Any
    trained: Any
    """What checkpoints hold of the model: of tf_keras the model itself."""
    step: Any
    """The variable that counts the steps of the calls that have ended."""
    tells: Collection[str]
    """The names of what a step tells."""
    step_examples: int | None
    """How many examples a step has, where that is known."""
    seconds_waited: float
    """How long updates have waited for others' updates of the same variable, on all ps together."""

    @property
    def element_spec(self) -> Any:
        """What one replica gets of the program's training data."""

    @property
    def position(self) -> Position | None:
        """How far the data are read, with `input_position: exact`: all of it is in what the ended calls have done."""

    def go_on_from(self, position: Position) -> str:
        """Begin to read there, with `input_position: exact`; call it before the first call.

        Where other data were counted, the pass under way begins anew; returns what differs.
        """

    def copy(self, copies: Copies, /) -> None:
        """Copy variables to other handles, in what is traced: each with its slots, between two updates."""

    @property
    def is_recovering(self) -> bool:
        """Whether TensorFlow is taking in a worker again."""

    @property
    def is_failing(self) -> bool:
        """Whether calls have failed, and none has ended well since."""

    def call(self, steps: int) -> Call:
        """Give a call of so many steps."""

    def returned(self) -> list[Call]:
        """Return the calls that have ended since the last time; raises what went wrong in one."""

    def over_all_calls(self, outputs: Any) -> Any:
        """Return the outputs of the call that ended last, with metrics over all calls since they were reset."""

    def write_metrics(self) -> None:
        """Let the model's own metrics say the same; nothing may be in flight."""

    def reset_metrics(self) -> None:
        """Begin the metrics anew."""

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the greatest of all members' numbers, place by place: members must do the same at the same time."""

    def close(self) -> Iterators | None:
        """End what this process does on others, no call can follow; returns the iterators that it has there."""


class RemoteStepRunner:
    """The workers of a parameter-server cluster; a call is queued for whichever is free."""

    def __init__(
        self,
        config: Config,
        program: Any,
        strategy: Any,
        workers: int,
        members: Members | None = None,
        service: DataService | None = None,
    ) -> None:
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
        self.model, self.step = make_model(program, strategy)
        if not (of_keras3 := is_keras3(self.model)):
            update_by_rows(self.model, lazy_adam=config.lazy_adam)
            for optimizer in optimizers_of(self.model):
                if optimizer is not None and not is_wrapper(optimizer):
                    gather(optimizer)
        else:
            keras3.refuse_settings(config, self.model)
        self._dataset = self._trace_dataset()
        self._iterator: Any = None  # made with the first call, at whose step the reading begins
        element = iterator_type_spec(strategy, self._dataset)
        self._elements = elements_of(element)
        if of_keras3:
            with strategy.scope():
                keras3.build(self.model, self.element_spec)
        self._rate = LearningRate(self.model.optimizer)
        self._reports = Reports()
        self._told: list[Report] = []  # reports that nobody has heard of yet
        self._stale = Staleness(self.model.optimizer)
        updates = AtomicUpdates(strategy)
        with asking_once(may_ask_once(self.model)):
            train_step = trace_step(
                strategy,
                self.model,
                element,
                self._rate,
                updates,
                self._stale,
                placed=self._exact,
                seeded=False,
            )
        refuse_large_arrays(train_step.graph, f"{type(self.model).__name__}.train_step")
        refuse_outside(program, train_step, f"{type(self.model).__name__}.train_step", self.model)
        if of_keras3:
            with strategy.scope():
                keras3.begin_averages(self.model)
            keras3.refuse_hidden_optimizers(self.model, train_step)
            keras3.warn_of_whole_tables(self.model, train_step)
        else:
            forget_children(self.model)
            refuse_state_of_shards(self.model, type(self.model.optimizer).__name__)
            refuse_split_constraints(self.model)
        self.copy = updates.copy
        self.tells = names_told(outputs_of(train_step, placed=self._exact))
        self.trained = keras3.trained_by(self.model)
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
            unrolled=unrolled,
        )
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()

    @property
    def element_spec(self) -> Any:
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
            position = position.anew(self._config.seed, self._data)
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
                (call.outputs, states, waited), call.worker, call.counted = report.told, report.worker, report.step
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

    def over_all_calls(self, outputs: Any) -> Any:
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

    def _trace_dataset(self) -> Any:
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


class LocalStepRunner:
    """This process's devices, alone or in step with those of the other members (multi_worker_mirrored)."""

    is_recovering = is_failing = False
    position = None
    seconds_waited = 0.0
    copy = staticmethod(copy_each)

    def __init__(
        self,
        config: Config,
        program: Any,
        strategy: Any,
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
        if is_keras3(self.model):
            keras3.refuse_settings(config, self.model)
        self.trained = self.model
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
    def element_spec(self) -> Any:
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
        """Make the dataset anew where the training doesn't begin at step 0, for which it was made."""
        self._is_reading = True
        step = int(self.step.numpy())
        draw_anew(self._config, step)
        if step or self._service:
            own = own_train_dataset(self._config, self._program, self._strategy, self._service, self._seed, step)
            self._dataset, self._iterator = own, iter(own)

    def returned(self) -> list[Call]:
        ended, self._ended = self._ended, []
        return ended

    def over_all_calls(self, outputs: Any) -> Any:
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


@dataclasses.dataclass(frozen=True)
class Report:
    """What a call tells at its end: its number, its worker's, the step as it was then, and what it has to say."""

    number: int
    worker: int
    step: int
    told: Any


class Reports:
    """Where calls on workers tell that they have ended: a queue on the coordinator, which the call itself fills.

    `schedule` returns a RemoteValue that could be waited for. As long as anybody holds it, TensorFlow fetches what lies
    on the worker, by a function for each value, in many threads at once, and in these requests have been garbled.
    """

    def __init__(self) -> None:
        self._queue: Any = None
        self._structure: Any = None

    @tf.autograph.experimental.do_not_convert
    def put(self, number: tf.Tensor, step: tf.Tensor, told: Any) -> None:
        """Tell of a call, in what is traced."""
        flat = tf.nest.flatten(told, expand_composites=True)
        self._structure = told
        with tf.init_scope(), tf.device(COORDINATOR):
            self._queue = tf.queue.FIFOQueue(MOST_REPORTS, [tf.int64, *(value.dtype for value in flat)])
        with tf.device(COORDINATOR):
            worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
            self._queue.enqueue([tf.stack([number, worker, step]), *flat])

    def take(self) -> Report | None:
        """Return the oldest report, or None when there is none."""
        with tf.device(COORDINATOR):
            if not int(self._queue.size()):
                return None
            taken = self._queue.dequeue()
        about, *flat = taken if isinstance(taken, list) else [taken]
        number, worker, step = (int(value) for value in about.numpy())
        return Report(number, worker, step, tf.nest.pack_sequence_as(self._structure, flat, expand_composites=True))


def make_model(program: Any, strategy: Any) -> tuple[Any, Any]:
    """Build the program's model and the trainer's own step counter in the strategy's scope."""
    cast_split_variables()
    with strategy.scope(), no_loss_scaling():
        keras3.forget_seeds()
        keras3.train_shards()
        with building_whole(), keeping_default_graph():
            model = build_model(program)
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            refuse_outside_model(program, model)
        if is_keras3(model):
            keras3.prepare(model)
        else:
            treat_as_whole(model)
            if isinstance(strategy, tf.distribute.ParameterServerStrategy):
                share_among_workers(model)
                refuse_split_constraints(model)
        once = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return model, tf.Variable(0, dtype=tf.int64, trainable=False, name="step", aggregation=once)


def draw_seed(config: Config) -> int:
    return secrets.randbelow(2**31) if config.seed is None else config.seed


def draw_anew(config: Config, step: int) -> bool:
    """Seed what the program's pipeline draws that goes on at this step, where the run has a seed; returns whether."""
    if config.seed is None or not step:
        return False
    tf.keras.utils.set_random_seed(mixed(config.seed, step))
    return True


@contextlib.contextmanager
def seeded_by(seed: int | None, *numbers: int) -> Iterator[None]:
    """Have what is traced meanwhile draw by these numbers, too; by the run's seed alone where all of them are 0."""
    if seed is not None and any(numbers):
        tf.random.set_seed(mixed(seed, *numbers))
    try:
        yield
    finally:
        if seed is not None and any(numbers):
            tf.random.set_seed(seed)


def mixed(*numbers: int) -> int:
    """Return a seed that follows from these numbers."""
    return zlib.crc32(" ".join(map(str, numbers)).encode()) % 2**31


def one_step(
    strategy: Any, own_step: Callable[[Any], Any], stale: Staleness | None = None, *, placed: bool = False
) -> Callable[[Any], Any]:
    """Return what does a model's train_step with an iterator's next batches, one for each replica of this process.

    With `placed` the iterator tells how far it is, beside each batch, and so does the step beside its outputs.
    """

    def train_step(iterator: Any) -> Any:
        place, batch = next(iterator) if placed else (None, next(iterator))
        with stale.measured(batch) if stale else contextlib.nullcontext():
            outputs = reduce_replicas(strategy, strategy.run(own_step, args=(batch,)))
        return (outputs, strategy.experimental_local_results(place)[-1]) if placed else outputs

    return train_step


def trace_step(
    strategy: Any,
    model: Any,
    iterator: Any,
    rate: LearningRate | None = None,
    updates: AtomicUpdates | None = None,
    stale: Staleness | None = None,
    *,
    placed: bool = False,
    seeded: bool = True,
) -> Any:
    """Trace one step, which takes an iterator and, for other processes, the learning rate.

    With `updates` each update that it makes is one act: other processes make some at the same time.

    This makes what a lazily built model and its optimizer still lack. `placed` is as for `one_step`. Where it is not
    `seeded`, what it draws has no seed of TensorFlow's: each process that runs it draws other numbers, each time.
    """

    own_step = keras3.Step(model) if is_keras3(model) else model.train_step

    def states() -> list[Any]:
        counts = [one for one, _ in stale.states] if stale else []
        if is_keras3(model):  # it is added to a count of steps
            counts += [one._iterations._value for _, one in keras3.optimizers_of(model)]
        return [piece for metric in metrics_of(model) for piece in pieces(metric)] + counts

    def trace() -> Any:
        @tf.function
        def train_step(iterator: Any, *value: tf.Tensor) -> Any:
            if not seeded:
                tf.compat.v1.get_default_graph().seed = None
            with contextlib.ExitStack() as stack:
                if rate:
                    stack.enter_context(rate.given(*value))
                if updates:
                    stack.enter_context(updates.active(states))
                return one_step(strategy, own_step, stale, placed=placed)(iterator)

        return rate.trace(train_step, iterator) if rate else train_step.get_concrete_function(iterator)

    with strategy.scope(), quiet_tracing(), no_loss_scaling():
        traced = trace()
        while isinstance(own_step, keras3.Step) and own_step.found_more:
            traced = trace()
    outputs = outputs_of(traced, placed=placed)
    if None in tf.nest.flatten(outputs):
        raise UserError(
            f"{type(model).__name__}.train_step returned {describe(outputs)}; expected tensors alone, such as "
            '{"loss": loss}'
        )
    return traced


def outputs_of(traced: Any, *, placed: bool = False) -> Any:
    """Return what a traced step returns, without what `placed` has it say besides."""
    return traced.structured_outputs[0] if placed else traced.structured_outputs


def names_told(outputs: Any) -> Collection[str]:
    """Return the names by which `fetch_numbers` gives a step's outputs."""
    return list(outputs) if isinstance(outputs, dict) else ["loss"]


def describe(outputs: Any) -> str:
    """Name what a step returned, None by its names."""
    if not isinstance(outputs, dict):
        return "None" if outputs is None else "None beside its tensors"
    return "None for " + ", ".join(repr(name) for name, value in outputs.items() if None in tf.nest.flatten(value))


def trace_call(
    strategy: Any,
    train_step: Any,
    counter: Any,
    iterator: Any,
    rate: LearningRate | None = None,
    reports: Reports | None = None,
    states: MetricStates | None = None,
    updates: AtomicUpdates | None = None,
    *,
    unrolled: int = 1,
) -> Any:
    """Trace the packed call, which does a traced step as often as it is told to and counts that.

    It takes an iterator, and a vector of the number of steps and, with `reports`, its own number; there it puts what it
    would return otherwise: the step's outputs, the metrics' states, and how long `updates` have waited. A call for
    other processes takes the learning rate as its last argument, and keeps `states` itself. `unrolled` is the number of
    steps in a round of the call's loop; what that leaves over is done first, in rounds of one step. The first step of a
    round counts how stale its update is, which costs a tiny step a fifth of its speed. A step that would
    draw the same random numbers several times in a round has rounds of one.
    """

    copy = StepCopy(train_step) if unrolled > 1 else None
    if copy and not copy.is_possible:
        unrolled = 1 if copy.has_seeds else unrolled
        copy = None

    def take_step(*arguments: Any, counts: bool) -> list[tf.Tensor]:
        if copy:
            return copy.make(arguments, counts=counts)
        return tf.nest.flatten(train_step(*arguments), expand_composites=True)

    # AutoGraph would translate the loops' source, which takes longer than all the rest.
    @tf.function(autograph=False)
    def train_call(iterator: Any, order: tf.Tensor, *value: tf.Tensor) -> Any:
        def repeat(rounds: tf.Tensor, steps: int, outputs: list[Any]) -> tuple[tf.Tensor, list[Any]]:
            def take_round(done: tf.Tensor, *_outputs: Any) -> Any:
                for number in range(steps):
                    told = take_step(iterator, *value, counts=number == 0)
                return done + 1, *told

            begin = (tf.zeros([], tf.int64), *outputs)
            shapes = (tf.TensorShape([]), *(spec.shape for spec in specs))
            done, *outputs = tf.while_loop(lambda done, *_: done < rounds, take_round, begin, shapes)
            return done, outputs

        steps = order[0]
        kept = states.in_call() if states else []
        if states:
            states.exchange(train_step, kept)
        with strategy.scope():
            # Each loop needs outputs to begin with; at least one step is done, so that these are never returned.
            specs = tf.nest.flatten(train_step.structured_outputs, expand_composites=True)
            lengths = [spec.shape.as_list() if spec.shape.rank else [] for spec in specs]
            flat = [tf.zeros([one or 0 for one in each], spec.dtype) for each, spec in zip(lengths, specs, strict=True)]
            done, flat = repeat((steps - 1) % unrolled + 1 if unrolled > 1 else steps, 1, flat)
            if unrolled > 1:
                done, flat = repeat((steps - 1) // unrolled, unrolled, flat)
            outputs = tf.nest.pack_sequence_as(train_step.structured_outputs, flat, expand_composites=True)
            # Once a call and at its end, so that a call that is run again on another worker counts once.
            with tf.control_dependencies([done, *flat]):  # a step may return nothing
                counter.assign_add(steps)
            if rate:
                rate.show()
            if reports is None:
                return outputs
            waited = updates.waited() if updates else []
            reports.put(order[1], counter.read_value(), (outputs, [state.read_value() for state in kept], waited))
            return None

    takes = (iterator, tf.TensorSpec([None], tf.int64), *((rate.spec,) if rate else ()))
    with quiet_tracing():
        return train_call.get_concrete_function(*takes)


class StepCopy:
    """Does what a traced step does by operations of its own.

    A call would wait until all of the one before has ended, with a message from the ps. Operations wait only for those
    that used the same variable.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._graph = graph = step.graph.as_graph_def()
        functions = graph.library.function
        nodes = itertools.chain(graph.node, *(function.node_def for function in functions))
        self._without_counts = without(graph, SCOPE)
        nodes = itertools.chain(nodes, self._without_counts.node)
        self._seeded = [node for node in nodes if has_seed(node)]
        self.has_seeds = bool(self._seeded)
        """Whether several calls in one graph would draw the same random numbers."""
        # By the graph: what gives mutexes back in its last copy.
        self._last: weakref.WeakKeyDictionary[Any, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
        self.is_possible = not functions and graph.ByteSize() < COPIED_BYTES
        """Whether it can be copied: it calls no function, as loops and conditions do, and is not big."""
        for node in itertools.chain(graph.node, self._without_counts.node):
            if node.device:
                node.attr.pop("_class", None)  # it names what stands for a variable, and would take the device of that

    def make(self, arguments: Any, *, counts: bool = True) -> list[tf.Tensor]:
        """Copy it into the function that is being traced; returns what it gives, flat.

        One that does not count leaves out how stale its updates are. Each copy draws other random numbers, also where
        the program has seeded them.
        """
        for node in self._seeded:
            node.attr["seed2"].i += 1 << 32  # beyond what TensorFlow gives to other operations
        graph, given = tf.compat.v1.get_default_graph(), tf.nest.flatten(arguments, expand_composites=True)
        names = {}
        for inner, outer in zip(self._step.inputs, [*given, *self._step.captured_inputs], strict=True):
            names[inner.name] = names["^" + inner.op.name] = graph.capture(outer)
        outputs = [output.name for output in self._step.outputs]
        before = len(graph.get_operations())
        step = self._graph if counts else self._without_counts
        returned = list(tf.graph_util.import_graph_def(step, names, outputs, name="step"))
        self._last[graph] = in_turn(graph.get_operations()[before:], self._last.get(graph, {}))
        for one, output in zip(returned, self._step.outputs, strict=True):
            one.set_shape(output.shape)  # which Python may have told TensorFlow
        return returned


def without(graph: Any, scope: str) -> Any:
    """Return a graph without what was made in a name scope, whose values nothing else uses."""
    kept = tf.compat.v1.GraphDef()
    kept.CopyFrom(graph)
    del kept.node[:]
    for node in graph.node:
        if scope not in node.name or node.op == "Placeholder":  # an input that others may use too
            inputs = [name for name in node.input if not (name.startswith("^") and scope in name)]
            one = kept.node.add()
            one.CopyFrom(node)
            del one.input[:]
            one.input.extend(inputs)
    return kept


def has_seed(node: Any) -> bool:
    return "seed2" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)


@tf.autograph.experimental.do_not_convert
def reduce_replicas(strategy: Any, outputs: Any) -> Any:
    """Average what train_step returns over this process's replicas, without a word to other members.

    Keras's metrics are reduced over all replicas already.
    """

    def reduce(value: Any) -> Any:
        values = strategy.experimental_local_results(value)
        return tf.add_n(values) / len(values) if len(values) > 1 else values[0]

    return tf.nest.map_structure(reduce, outputs)


def fetch_numbers(outputs: Any) -> dict[str, float]:
    """Return what train_step or an evaluation returned, by name; of several numbers their mean, as Keras shows them."""
    if not isinstance(outputs, dict):
        outputs = {"loss": outputs}
    return {str(name): mean_of(value) for name, value in outputs.items() if has_numbers(value)}


def has_numbers(value: Any) -> bool:
    """Return whether a value is a number, or an array of numbers: a text has no place in the log."""
    return not getattr(value, "ndim", 0) or np.asarray(value).dtype.kind in "biuf"


def mean_of(value: Any) -> float:
    return float(np.mean(value)) if getattr(value, "ndim", 0) else float(value)


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
