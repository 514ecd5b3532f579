"""Evaluation by the coordinator itself or over its workers, while no call is in flight (docs/evaluation.md).

The side-car evaluator (evaluator.py) needs none of this; it shares only how results are published.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import DataIterator, Dataset, ElementSpec, Model, Program, Strategy, Structure
from trainer.core.failures import UserError, explain
from trainer.core.program import reject_own_function
from trainer.core.settings.config import Config
from trainer.run.directory import RunDirectory
from trainer.run.records import to_json, write_record
from trainer.telemetry.events import append, at_once
from trainer.telemetry.outlets.tensorboard import EventWriter
from trainer.telemetry.status import render_metrics
from trainer.training.data.context import WHOLE, InputContext
from trainer.training.data.input import eval_dataset, own_eval_dataset, trace_eval_dataset
from trainer.training.data.places import tensors_in
from trainer.training.exports.export import lacks_evaluation
from trainer.training.keras.adapters import keras_of
from trainer.training.loop.callbacks import KERAS
from trainer.training.measures.evaluation_outputs import Made, checked_outputs, weighed
from trainer.training.measures.metrics import MAXIMUM, MINIMUM, SUM, MetricStates, merges, metrics_of
from trainer.training.measures.outputs import fetch_numbers
from trainer.training.outside import reject_changing_shapes
from trainer.training.tables.row_saves import writes_large

log = logging.getLogger(__name__)
OTHER_WAYS = "set evaluation to distributed, inline or sidecar, which call test_step"
# What Keras's exact evaluation never calls.
NOT_CALLED = ("test_step", "compute_loss", "compute_metrics")
PROBED_BATCHES = 2


class Results:
    """Where evaluations are published: TensorBoard's events, evaluation.json (which status shows) and the log."""

    def __init__(
        self, directory: RunDirectory, post: Callable[[Callable[[], None]], object] = at_once, best_metric: str = ""
    ) -> None:
        """`post` says on which thread they are written, `best_metric` by which metric checkpoints are kept."""
        self._best_metric = best_metric
        self._record = directory.evaluation
        self._history = directory.evaluations
        self._catalogue = directory.catalogue
        self._events = EventWriter(directory.eval_events)
        self._post = post

    def publish(
        self,
        step: int,
        metrics: dict[str, float],
        seconds: float,
        saved: int | None = None,
        *,
        checkpointed: bool = False,
    ) -> None:
        """Publish the metrics of the model at a step, whose evaluation took so long.

        `saved` is its checkpoint's time; with `checkpointed` the metrics are kept beside it, if it is there.
        """
        now = time.time()
        self._post(partial(self._events.write, step, metrics, now))
        record = {"step": step, "metrics": metrics, "updated": now} | ({} if saved is None else {"saved": saved})
        if self._best_metric and self._best_metric not in metrics:
            record["trouble"] = (
                f"no checkpoint is kept as one of the best: {no_such_metric(self._best_metric, metrics)}"
            )
            log.error("%s", record["trouble"])
        self._post(partial(write_record, self._record, record))
        self._post(
            partial(append, self._history, to_json({"t": now, "step": step, "values": metrics, "seconds": seconds}))
        )
        if checkpointed:
            self._post(partial(self._catalogue.write_evaluation, step, metrics, saved))
        log.info("evaluated step %d in %.1f s: %s", step, seconds, render_metrics(metrics))


def no_such_metric(name: str, there: Iterable[str]) -> str:
    return (
        f"checkpoints_best_metric is {name!r}, which the evaluation does not have: name one of its metrics, "
        f"{', '.join(sorted(there))}"
    )


def reject_best_metric(config: Config, evaluate: Any, model: Model, outputs: Collection[str]) -> None:
    """Raise UserError where checkpoints are kept by a metric that the evaluation will not have.

    `outputs` are the names of a training step's. An evaluation has the same where both steps are Keras's own. Of others
    the names are known before the first one only where the coordinator has traced it; else `Results` says so.
    """
    own_steps = (getattr(type(model), name).__module__.startswith(KERAS) for name in ("train_step", "test_step"))
    names = getattr(evaluate, "names", None) or (outputs if all(own_steps) else [config.best_metric])
    if config.best_metric and config.best_metric not in names:
        raise UserError(no_such_metric(config.best_metric, names))


def make_evaluation(
    config: Config, program: Program, model: Model, strategy: Strategy, workers: int
) -> Callable[[], dict[str, float]] | None:
    """Return what evaluates the model as it is now, or None when that is not the coordinator's work.

    Call it with nothing in flight; it returns plain numbers by metric name and leaves the model's metrics reset. Under
    multi_worker_mirrored every member must make it, and call it at the same step; all get the same numbers. Raises
    UserError when the program can't be evaluated in that way.
    """
    if config.evaluation == "none":
        return None
    if why := lacks_evaluation(model):
        if config.evaluation != "sidecar":
            raise UserError(why)
        log.warning("%s", why)
    if config.evaluation == "sidecar":
        return None
    reject_own_evaluation(program, model, "put what it does into test_step, or set evaluation to sidecar")
    if not config.traits.remote:
        return Replicated(program, model, strategy)
    way: Any = {"inline": Inline, "distributed": Distributed, "exact": Exact}[config.evaluation]
    evaluation: Callable[[], dict[str, float]] = way(program, model, strategy, workers)
    return evaluation


def reject_own_evaluation(program: Program, model: Model, fix: str) -> None:
    """Raise UserError where Keras's evaluation is replaced by the model's own, which is not called here."""
    for method in ("evaluate", "make_test_function"):
        reject_own_function(program, model, method, fix)


class Inline:
    """This process evaluates all the data, reading the variables from the ps."""

    def __init__(self, program: Program, model: Model, strategy: Strategy, workers: int) -> None:
        self._dataset = eval_dataset(program)
        self._step = TestStep(program, model, strategy, self._dataset.element_spec)
        self.names, self.may_write = self._step.names, self._step.may_write

    def __call__(self) -> dict[str, float]:
        return self._step.evaluate(self._dataset)


class Distributed:
    """The workers evaluate, each of them a part of the data.

    A part is one call: its number is the argument, its result is what it returns. So a call that is lost with its
    worker is run again, perhaps on another one, and counts once.
    """

    def __init__(self, program: Program, model: Model, strategy: Strategy, workers: int) -> None:
        self._parts = workers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._step = step = TestStep(program, model, strategy, eval_dataset(program).element_spec)
        step.check_merging(f"{type(program).__name__}'s model", (SUM, MAXIMUM, MINIMUM))
        step.check_shapes(f"{type(program).__name__}'s test_step")
        self.names, self.may_write = step.names, step.may_write

        @tf.function(autograph=False)
        def evaluate_part(part: tf.Tensor) -> Structure:
            return step.run(call_watched(InputContext(workers, part), program, partial(trace_eval_dataset, program)))

        self._evaluate_part = evaluate_part.get_concrete_function(tf.TensorSpec([], tf.int64))

    def __call__(self) -> dict[str, float]:
        calls = [
            self._coordinator.schedule(self._evaluate_part, args=(tf.constant(part, tf.int64),))
            for part in range(self._parts)
        ]
        self._coordinator.join()
        return self._step.results([call.fetch() for call in calls])


class Exact:
    """The workers evaluate by Keras's `Model.evaluate` with `pss_evaluation_shards`, which counts each example once.

    Keras calls the model, its loss and its metrics there, not `test_step`, with copies made from their configurations,
    and it leaves regularization and the weights of losses out. So what it says of the first batches is compared with
    what `test_step` says of them.
    """

    def __init__(self, program: Program, model: Model, strategy: Strategy, workers: int) -> None:
        self._model = model
        self._strategy = strategy
        name = f"{type(program).__name__}'s model"
        for method in NOT_CALLED:
            if getattr(type(model), method) is not getattr(tf.keras.Model, method):
                raise UserError(f"{name} has its own {method}, which exact evaluation does not call: {OTHER_WAYS}")
        if model.losses:
            raise UserError(f"{name} has regularization, which exact evaluation leaves out of the loss: {OTHER_WAYS}")
        # Raises UserError if workers can't run the pipeline.
        tf.function(partial(trace_eval_dataset, program, WHOLE), autograph=False).get_concrete_function()
        # TensorFlow would divide the files, where there are any, and a `take` or `skip` would count in each part. It
        # finds no files behind this, and then divides the batches; options that say so have no effect here.
        dataset = eval_dataset(program).take_while(lambda *_: True)
        # Tracing test_step makes the model's metrics. Before that (or before a fit) Keras would fail with a TypeError.
        step = TestStep(program, model, strategy, dataset.element_spec)
        step.check_merging(name, (SUM,))
        self.names, self.may_write = step.names, step.may_write
        if step.has_tables:
            raise UserError(f"{name} has a lookup table, which exact evaluation can't use on a worker: {OTHER_WAYS}")
        first = dataset.take(PROBED_BATCHES)
        try:
            self._check_probe(name, step.evaluate(first), self._evaluate(self._distribute(first, PROBED_BATCHES)))
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise UserError(f"{name} can't be evaluated exactly: {explain(error)}: {OTHER_WAYS}") from error
        self._data = self._distribute(dataset, workers)

    def __call__(self) -> dict[str, float]:
        return self._evaluate(self._data)

    def _check_probe(self, name: str, expected: dict[str, float], found: dict[str, float]) -> None:
        for metric, value in expected.items():
            if not np.isclose(found.get(metric, np.nan), value, rtol=1e-5, atol=1e-6, equal_nan=True):
                raise UserError(
                    f"exact evaluation gives {found.get(metric)} for {metric!r} of {name} in the first "
                    f"{PROBED_BATCHES} batches where test_step gives {value}: it leaves out the weights of losses, "
                    "copies losses and metrics by their get_config, and adds up the states of metrics: "
                    f"{OTHER_WAYS}"
                )

    def _distribute(self, dataset: tf.data.Dataset, shards: int) -> Dataset:
        """Give the workers a dataset, once: `evaluate` would do so each time, and they would keep them all."""
        # A part without a batch is an error there.
        shards = int(dataset.take(shards).reduce(np.int64(0), lambda number, *_: number + 1))
        self._model._cluster_coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        with self._strategy.scope():
            return tf.keras.__internal__.utils.get_data_handler(
                x=dataset, model=self._model, pss_evaluation_shards=shards
            )

    def _evaluate(self, data: Structure) -> dict[str, float]:
        model = self._model
        # What `fit` keeps of its validation data and what `compile` is told, though the program need not know.
        model._eval_data_handler, model._pss_evaluation_shards = data, data._total_shards
        try:
            results = model.evaluate(verbose=0, return_dict=True, _use_cached_eval_dataset=True)
        finally:
            model._eval_data_handler, model._pss_evaluation_shards = None, 0
        model.reset_metrics()
        return fetch_numbers(results)


class Replicated:
    """The replicas that train evaluate, too: this process's, in step with those of the other members.

    TensorFlow gives replicas that have run out of data empty batches, so that every example counts once.
    """

    def __init__(self, program: Program, model: Model, strategy: Strategy) -> None:
        name = f"{type(program).__name__}'s model"
        self._model = model
        self._strategy = strategy

        def own_part(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return call_watched(context, program, lambda watched: own_eval_dataset(program, watched))

        self._dataset = strategy.distribute_datasets_from_function(own_part)
        with strategy.scope():
            self._examples = tf.keras.metrics.Sum(name="examples", dtype=tf.float64)
            step = tf.function(self._first_outputs).get_concrete_function(self._dataset.element_spec)
            self.names, own, self._made = checked_outputs(name, model, step)
            self._sums = {one: tf.keras.metrics.Sum(name=one, dtype=tf.float64) for one in own}
        self._evaluate = tf.function(self._run)

    def _first_outputs(self, batch: Structure) -> Structure:
        outputs = self._strategy.run(self._model.test_step, args=(batch,))
        return tf.nest.map_structure(lambda output: self._strategy.experimental_local_results(output)[0], outputs)

    def _run(self, iterator: DataIterator) -> None:
        for batch in iterator:
            self._strategy.run(self._test_step, args=(batch,))

    def _test_step(self, batch: Structure) -> None:
        outputs, examples = self._model.test_step(batch), batch_size(batch)
        self._examples.update_state(examples)
        for name, value in weighed(outputs, self._sums, examples).items():
            self._sums[name].update_state(value)

    def __call__(self) -> dict[str, float]:
        with self._strategy.scope():
            self._model.reset_metrics()
            for one in (self._examples, *self._sums.values()):
                one.reset_state()
            self._evaluate(iter(self._dataset))
            check_examples(examples := int(self._examples.result()))
            own = {name: float(one.result()) / examples for name, one in self._sums.items()}
            return take_results(self._model, self.names, self._made) | own


class TestStep:
    """The model's test_step, with metrics whose state is returned by each call instead of kept on the ps."""

    def __init__(self, program: Program, model: Model, strategy: Strategy, element_spec: ElementSpec) -> None:
        self._model = model
        name = f"{type(program).__name__}'s model"
        with strategy.scope():
            # This makes the variables that metrics still lack, too.
            self._step = tf.function(keras_of(model).test_step()).get_concrete_function(element_spec)
            self.names, self.own, self._made = checked_outputs(name, model, self._step)
        self._states = MetricStates(metrics_of(model), self._step)
        self._evaluate = tf.function(self.run, autograph=False)
        self.may_write = writes_large(self._step)

    def check_merging(self, name: str, ways: Collection[str]) -> None:
        """Refuse metrics whose states for parts of the data don't make that of all in one of these ways."""
        for metric in metrics_of(self._model):
            if set(merges(metric, self._step)) - set(ways):
                raise UserError(
                    f"the metric {metric.name!r} of {name} keeps no {' or '.join(ways)}, or has its own merge_state: "
                    "its states for parts of the data can't be merged (a sum begins at zero). Leave it out, or set "
                    "evaluation to inline or sidecar"
                )

    def check_shapes(self, what: str) -> None:
        """Refuse variables that workers can't have."""
        reject_changing_shapes(self._step, what)

    @property
    def has_tables(self) -> bool:
        return bool(self._step.graph.deferred_external_captures)

    def run(self, dataset: tf.data.Dataset) -> tuple[tf.Tensor, dict[str, tf.Tensor], list[tf.Tensor]]:
        """Return the number of examples, the step's own numbers and the metrics' state; call it in a tf.function."""
        state = self._states.in_call()
        self._states.exchange(self._step, state)
        iterator = iter(dataset)

        def take_step(
            following: tf.experimental.Optional, examples: tf.Tensor, sums: dict[str, tf.Tensor]
        ) -> Structure:
            batch = following.get_value()
            more = weighed(self._step(batch), self.own, size := batch_size(batch))
            sums = {name: sums[name] + more[name] for name in sums}
            return iterator.get_next_as_optional(), examples + size, sums

        # Not by AutoGraph: its loop over an iterator has a condition in it, from where no lookup table can be reached.
        zeros = {name: tf.constant(0, tf.float64) for name in self.own}
        _, examples, sums = tf.while_loop(
            lambda following, *_: following.has_value(),
            take_step,
            (iterator.get_next_as_optional(), tf.constant(0, tf.int64), zeros),
        )
        return examples, sums, [variable.read_value() for variable in state]

    def evaluate(self, dataset: tf.data.Dataset) -> dict[str, float]:
        """Evaluate a dataset in this process."""
        return self.results([self._evaluate(dataset)])

    def results(self, parts: list[Any]) -> dict[str, float]:
        """Return what the metrics make of what `run` returned for the parts of the data; leaves them reset."""
        check_examples(examples := sum(int(part) for part, *_ in parts))
        own = {name: sum(float(sums[name]) for _, sums, _ in parts) / examples for name in self.own}
        merged = functools.reduce(self._states.merge, (state for *_, state in parts))
        for piece, value in zip(self._states.pieces, merged, strict=True):
            piece.assign(value)
        return take_results(self._model, self.names, self._made) | own


def take_results(model: Model, names: Collection[str], made: Made) -> dict[str, float]:
    """Return what the model's metrics of these names say, and what is made of them; leaves all reset."""
    results = {**made(), **model.get_metrics_result()}
    numbers = fetch_numbers({name: results[name] for name in results if name in names})
    model.reset_metrics()
    return numbers


def call_watched(context: tf.distribute.InputContext, program: Program, make_dataset: Callable[[Any], Any]) -> Dataset:
    """Make a part of the data; raises UserError when the program did not ask which part it should be."""
    watched = InputContext(context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
    dataset = make_dataset(watched)
    if context.num_input_pipelines > 1 and not watched.asked:
        raise UserError(
            f"{type(program).__name__}.eval_dataset does not use its context: each of {context.num_input_pipelines} "
            "processes would evaluate all the data. Return a part: before batch(), "
            "dataset.shard(context.num_input_pipelines, context.input_pipeline_id)"
        )
    return dataset


def batch_size(batch: Structure) -> tf.Tensor:
    first = tensors_in(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int64)
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first, tf.int64)[0]


def check_examples(examples: int) -> None:
    if not examples:
        raise UserError("eval_dataset is empty: there is nothing to evaluate")
    log.info("evaluated %d examples", examples)
