"""Wires a generation: strategy, runner, callbacks, evaluation and controller; trains it, and makes its end.

It imports TensorFlow: import it where a generation begins, in the process that trains.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.cluster.spec import ClusterConfig
from trainer.core.contracts import Strategy
from trainer.core.failures import Stopped
from trainer.core.memory_limit import check_room
from trainer.core.states import Phase, RunState
from trainer.core.variables import bytes_of, flatten
from trainer.run.callback_store import CallbackStore
from trainer.run.lease import check_lease
from trainer.tasks.waits import WAIT_POLL_SECONDS, wait_for_data_service
from trainer.telemetry.status import render_metrics
from trainer.training.data.data_service import DataService
from trainer.training.evaluation import make_evaluation, reject_best_metric
from trainer.training.exports.export import export_what_is_due, make_export_due, not_exported
from trainer.training.exports.reserved import least_bytes
from trainer.training.exports.trial import is_new, try_new_run
from trainer.training.handover import Handover
from trainer.training.initial_weights import read_initial_weights
from trainer.training.keras.adapters import keras_of
from trainer.training.keras.base import has_test_step
from trainer.training.loop.callbacks import callbacks_of
from trainer.training.loop.controller import Controller
from trainer.training.loop.custom_loop import train_in_epochs, train_with_loop
from trainer.training.loop.epochs import EndWithTheData, Epochs
from trainer.training.loop.fit import train_with_fit
from trainer.training.placement import report_placement
from trainer.training.run_context import RunContext
from trainer.training.steps.local import LocalStepRunner
from trainer.training.steps.remote import RemoteStepRunner
from trainer.training.steps.runner import StepRunner
from trainer.training.strategies import make_strategy
from trainer.training.tables.declared_tables import name_declared_tables
from trainer.training.updates.learning_rate import Rates

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """A model on the members that are present, with what trains it."""

    context: RunContext
    runner: StepRunner
    controller: Controller
    callbacks: list[Any]
    store: CallbackStore
    """What callbacks remember."""

    def restore(self, model_bytes: int | None) -> None:
        """Go on where the run stands, and say so on the shared path; `model_bytes` is the model's size, if known."""
        context, controller = self.context, self.controller
        began, rates = time.monotonic(), Rates(keras_of(self.runner.model).optimizers)
        with context.phases.during(Phase.RESTORING):
            controller.restore()
        if is_new(context.directory) and controller.step == (context.directory.catalogue.newest() or 0):
            rates.take_back()
        for each in rates.replaced():
            log.info("the run goes on with %s: a callback LearningRateScheduler may set another", each)
        if context.progress.leads:
            try:
                epoch = context.lease.epoch if context.lease else None
                context.directory.set_state(RunState.TRAINING, controller.step, epoch=epoch, model_bytes=model_bytes)
            except OSError as error:  # training goes on where it can
                log.warning("cannot write down the state: %s", error)
        if controller.step:
            context.progress.counters.restore_seconds = time.monotonic() - began

    def train(self) -> str:
        """Train to the last step, and evaluate; returns what the log says of an end before it. Raises Stopped."""
        context, controller, ended = self.context, self.controller, ""
        context.phases.enter(Phase.TRAINING)
        try:
            is_done = self._train_with_api()
            controller.save_the_end()  # an earlier coordinator may have died before its last step was on disk
            if not is_done:
                ended = f", where {'its data' if self.runner.is_over else 'a callback'} ended it"
        except Stopped:
            if context.progress.leads:
                context.directory.set_state(RunState.STOPPED, controller.step)
            raise
        controller.evaluate()
        return ended

    def _train_with_api(self) -> bool:
        """Train with the API of the settings; returns False when a callback ended the training before its last step."""
        config, callbacks, controller = self.context.config, self.callbacks, self.controller
        model, store = self.runner.model, self.store
        with_fit = config.api == "fit"
        # At the end averages are taken for weights, and callbacks may put back the best ones.
        own = [each for each in callbacks if not isinstance(each, EndWithTheData)]
        has_end = bool(own or keras_of(model).averaged())
        epochs = Epochs(config, callbacks, self.runner, controller, store) if with_fit or callbacks else None
        is_over = controller.done if epochs is None else epochs.are_over
        if is_over and (not has_end or controller.final):
            return bool(controller.done)
        if is_over:
            log.warning("the end of the training at step %d was cut off: it is made up for", controller.step)
        if epochs is None:
            train_with_loop(model, controller)
        elif with_fit:
            train_with_fit(model, epochs, controller)
        else:
            train_in_epochs(model, epochs)
        if has_end:
            controller.save_the_end(again=True)
        return bool(controller.done)


def form_strategy(context: RunContext, cluster: ClusterConfig) -> tuple[Strategy, DataService | None]:
    """Make the strategy on the members of this cluster, and the data service that it reads from."""
    config, progress, membership = context.config, context.progress, context.membership
    service = DataService.from_config(config, cluster)
    if service is not None:
        wait_for_data_service(config, cluster, context.stopping, progress)
    context.phases.enter(Phase.COMPILING)
    if config.seed is not None:
        tf.keras.utils.set_random_seed(config.seed)
    strategy = make_strategy(config, cluster, membership.processes if membership else None)
    context.stopping.listen(lambda: context.phases.phase in (Phase.COMPILING, Phase.RESTORING))
    progress.enter(RunState.WAITING, "building the model")
    progress.counters.workers = context.workers(cluster.workers) or [cluster.task]
    progress.counters.servers = membership.servers if membership else ()
    return strategy, service


def with_declared_tables(context: RunContext) -> RunContext:
    """Have the settings name the layers that ask for dynamic tables themselves, and the run remember all tables."""
    config = name_declared_tables(context.config, context.program)
    if context.progress.leads:
        context.directory.declare_tables(config.dynamic_tables)
    if config is context.config:
        return context
    return dataclasses.replace(context, config=config)


def make_handover(context: RunContext, cluster: ClusterConfig) -> Handover | None:
    """Look at what an earlier coordinator has left on the ps; None where no later one could come."""
    if not context.config.traits.remote or context.membership is None:
        return None
    check = partial(check_lease, context.lease)
    config, addresses = context.config, list(cluster.servers.values())
    in_part = config.ps_recovery == "lost"
    return Handover(config.run, config.program, len(cluster.jobs["ps"]), addresses, check, in_part=in_part)


def make_runner(
    context: RunContext,
    cluster: ClusterConfig,
    strategy: Strategy,
    service: DataService | None,
    handover: Handover | None,
) -> StepRunner:
    """Build the program's model, and what computes its steps: on workers, or in this process."""
    config, program = context.config, context.program
    if config.traits.remote:
        return RemoteStepRunner(config, program, strategy, cluster.workers, context.membership, service, handover)
    member = cluster.index + (cluster.job == "worker")
    newest = context.directory.catalogue.newest() or 0
    return LocalStepRunner(config, program, strategy, service, newest, member)


def measure_model(context: RunContext, cluster: ClusterConfig, runner: StepRunner) -> int | None:
    """Report what of the model lies on each ps; returns its bytes, None where it lies in this process.

    Raises UserError where the model is to be exported, and this host has no room for its largest shard.
    """
    config, progress, membership = context.config, context.progress, context.membership
    if not config.traits.remote:
        return None  # it fits into one process
    held = report_placement(config, runner.trained, len(cluster.jobs["ps"]))
    servers = membership.servers if membership else [f"ps-{index}" for index in range(len(held))]
    progress.history.placed(dict(zip(servers, held, strict=True)))
    pieces = [bytes_of(variable) for variable in flatten(keras_of(runner.model).variables)]
    if config.export and progress.leads:
        fix = "set export: false, and export it on a larger host"
        check_room(least_bytes(pieces), "the export at the end", fix)
    return sum(pieces)


def build_generation(
    context: RunContext,
    cluster: ClusterConfig,
    strategy: Strategy,
    runner: StepRunner,
    handover: Handover | None,
    store: CallbackStore,
    began: float,
) -> Generation:
    """Wire what trains the runner's model. `began` (of time.monotonic) is when the time without training began."""
    config, program, progress = context.config, context.program, context.progress
    progress.counters.step_examples = runner.step_examples
    with strategy.scope():
        callbacks = callbacks_of(config, program, runner.model, leads=progress.leads)
    for_callbacks = config.api == "fit" or bool(callbacks)
    if config.input_new_files_seconds:  # not for its sake: numbers would add up over days
        callbacks.append(EndWithTheData(runner))
    evaluates = config.evaluation == "sidecar" and has_test_step(keras_of(runner.model))
    if progress.leads and (config.export or evaluates):
        spec = runner.element_spec
        try_new_run(program, context.directory, spec, exports=config.export, evaluates=evaluates)
    evaluate = make_evaluation(config, program, runner.model, strategy, cluster.workers)
    reject_best_metric(config, evaluate, runner.model, runner.output_names)
    read_weights = partial(read_initial_weights, config, program, runner)
    controller = Controller(
        context,
        runner,
        evaluate,
        workers=cluster.workers,
        began=began,
        handover=handover,
        read_initial_weights=read_weights if config.initial_weights else None,
        for_callbacks=for_callbacks,
    )
    return Generation(context, runner, controller, callbacks, store)


def finish_run(generation: Generation, steps: int, seconds: float, ended: str, began: float) -> None:
    """Say that the run is finished, and export the model: whatever becomes of that, the run stays finished.

    The generation trained so many steps in so many seconds; the process began at `began` (of time.monotonic).
    """
    context, controller = generation.context, generation.controller
    config, directory, progress = context.config, context.directory, context.progress
    check_lease(context.lease)
    in_step, error, element_spec = config.traits.in_step, "", generation.runner.element_spec
    progress.enter(RunState.TRAINING, "exporting the model" if config.export else "")

    def export() -> str:
        return export_what_is_due(lambda: context.program, directory, controller.step, element_spec)

    if config.export:
        make_export_due(directory, controller.step)
        if in_step:  # the others leave when the run is finished, and may not leave the chief alone before its end
            error = export()
    check_lease(context.lease)
    if context.membership is not None:
        context.membership.release()  # servers end with the run
    directory.set_state(RunState.FINISHED, controller.step, asked=config.steps)
    if config.export and not in_step:
        error = export()
    if config.export and not error:
        progress.exported(str(directory.export))
    progress.enter(RunState.FINISHED, ". ".join(filter(None, (ended.lstrip(", "), not_exported(config.run, error)))))
    if in_step:
        # The others look for this; one that still looks when the chief is gone would report its loss as an error.
        time.sleep(2 * WAIT_POLL_SECONDS)
    shown = render_metrics(controller.values)
    log.info(
        "run %s finished: %s trained to step %d%s; %d steps in %.1f s (%.4g steps/s), %.1f s in all; "
        "%scheckpoint %s; model %s",
        config.run, config.program, controller.step, ended, steps, seconds, steps / seconds,
        time.monotonic() - began, f"{shown}; " if shown else "", progress.status.checkpoint,
        directory.export if config.export and not error else "not exported",
    )  # fmt: skip
