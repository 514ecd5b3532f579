"""Steps on the workers of a parameter-server cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from trainer.cluster.members.membership import Membership
from trainer.core.contracts import ElementSpec, Program, Strategy, Structure, Traced, Variable
from trainer.core.joining import why_at_a_save
from trainer.core.settings.config import Config
from trainer.run.data_position import Position
from trainer.training.data.data_service import DataService
from trainer.training.data.file_names import matching
from trainer.training.data.given_files import TicketQueue
from trainer.training.data.large_arrays import reject_large_arrays
from trainer.training.data.python_calls import look_for_python
from trainer.training.data.worker_files import WorkerFiles, processes_of, tag_of
from trainer.training.forgotten import all_of, warn_of_forgotten
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.metrics import metric_pieces
from trainer.training.measures.outputs import output_names, outputs_of
from trainer.training.metric_uses import reject_uses
from trainer.training.outside import reject_changing_shapes, reject_outside
from trainer.training.release_resources import Iterators
from trainer.training.steps.call_accounts import CallAccounts
from trainer.training.steps.calls_in_flight import CallsInFlight
from trainer.training.steps.draws import draw_seed
from trainer.training.steps.file_order import FileOrder
from trainer.training.steps.model import make_model
from trainer.training.steps.read_order import ReadOrder
from trainer.training.steps.runner import CALL_POLL_SECONDS, Call, StepRunner
from trainer.training.steps.traced_call import trace_call
from trainer.training.steps.traced_step import trace_step
from trainer.training.steps.workers_data import WorkersData
from trainer.training.tables.declared_tables import reject_undeclared
from trainer.training.tables.dynamic.table import giving_rows
from trainer.training.tables.dynamic.tables import DynamicTables, TablesLeft
from trainer.training.tables.row_updates import may_deduplicate_lookups
from trainer.training.tables.table_lookups import deduplicated_lookups
from trainer.training.tf_internals.joining import add_worker, announce, known_workers, taken_in
from trainer.training.tf_internals.workers import (
    all_failed_alike,
    calls_fail,
    is_recovering,
    make_coordinator,
    stop_cluster,
    worker_threads,
    workers_out,
)

# Between workers and ps each round of a call's loop costs messages of its own, which short steps feel. Each worker
# optimises the graph of a round before its first step: so many operations take it some seconds.
UNROLLED_STEPS = 8
ROUND_OPERATIONS = 4_000
MIN_AHEAD = 2  # steps of a round, of which all but the first one read ahead


class RemoteStepRunner(StepRunner):
    """The workers of a parameter-server cluster; a call is queued for whichever is free."""

    def __init__(
        self,
        config: Config,
        program: Program,
        strategy: Strategy,
        workers: int,
        members: Membership | None = None,
        service: DataService | None = None,
        handover: TablesLeft | None = None,
    ) -> None:
        """`handover` knows of dynamic tables that an earlier coordinator has left on the ps."""
        order = order_of(config, workers, service)
        self._members, self._gpus = members, strategy.num_replicas_in_sync
        self._takes_in = takes_in(config, strategy, members)
        files = functools.partial(WorkerFiles, tag_of(config.shared_dir, config.run), processes_of(members))
        with worker_threads() as self._threads:
            self._coordinator = make_coordinator(strategy, members)
        tables = DynamicTables.from_config(config, strategy, handover)
        model, step = make_model(program, strategy, tables)
        keras = keras_of(model)
        keras.check_settings(config)
        keras.gather_updates(config, tables)
        self._data = WorkersData(config, program, strategy, self._coordinator, order, service, files)
        with strategy.scope(), building(tables):
            keras.build(self.element_spec)
        # What reads ahead may come after nothing but reads, and a batch that is given has been waited for elsewhere.
        wait, ask = not config.weights_ahead and not self._data.waits, not config.weights_ahead
        self._accounts = CallAccounts(model, strategy, tables, wait=wait, ask=ask, mark=config.incremental_saves > 0)
        train_step = trace_for_workers(program, strategy, self._accounts, self._data)
        super().__init__(
            model,
            keras.trained(),
            step,
            output_names(outputs_of(train_step, placed=order.exact and not self._data.waits)),
            self._accounts.updates.copy,
            tables,
            self._accounts.marks,
        )
        self._call = pack(strategy, train_step, step, self._accounts, self._data, ahead=config.weights_ahead)
        self._in_flight = CallsInFlight()

    @property
    def element_spec(self) -> ElementSpec:
        return self._data.element_spec

    @property
    def step_examples(self) -> int | None:
        return self._data.step_examples

    @property
    def seconds_waited(self) -> float:
        return self._accounts.updates.seconds_waited

    @property
    def position(self) -> Position | None:
        if self._data.order.exact:
            self._take_reports()
        return self._data.order.position

    @property
    def is_over(self) -> bool:
        return isinstance(self._data.order, FileOrder) and self._data.order.is_over

    @property
    def news(self) -> str:
        return self._data.order.news if isinstance(self._data.order, FileOrder) else ""

    @property
    def files(self) -> Mapping[str, int]:
        return self._data.order.counts() if isinstance(self._data.order, FileOrder) else {}

    @property
    def lookups(self) -> Mapping[str, Mapping[str, Any]]:
        return self._accounts.asked.lookups.summary()

    @property
    def file_sizes(self) -> Mapping[str, Any]:
        return self._data.file_sizes

    def go_on_from(self, position: Position) -> str:
        return self._data.order.go_on_from(position)

    @property
    def is_recovering(self) -> bool:
        return is_recovering(self._coordinator)

    @property
    def is_failing(self) -> bool:
        return calls_fail(self._coordinator)

    def is_failing_alike(self, error: Exception) -> bool:
        return all_failed_alike(self._coordinator, error)

    @property
    def takes_in(self) -> bool:
        return self._takes_in

    def take_in(self, task: str, address: str) -> bool:
        # The data may not divide among one more.
        coming = range(len(self._coordinator._cluster.workers), 1 + known_workers(self._coordinator))
        self._takes_in = self._takes_in and self._data.can_join(coming)
        if self._takes_in:
            announce(self._coordinator, task, address)
        return self._takes_in

    def joined(self) -> list[str]:
        tasks = taken_in(self._coordinator)
        for task in tasks:
            others = list(self._coordinator._cluster.workers)
            with worker_threads() as begun:
                worker = add_worker(self._coordinator, task)
            self._threads += begun
            self._data.join(worker, others)
            worker.begin()
        return tasks

    def leave_out(self, tasks: Collection[str]) -> bool | None:
        assert self._members is not None  # who else would drain?
        workers, names = list(self._coordinator._cluster.workers), self._members.workers
        readers = [worker.worker_index for worker in workers if names[worker.worker_index] not in tasks]
        if self._data.is_given_out or not readers:
            return None
        return self._gpus == 1 and self._data.divide(readers, workers)

    def call(self, steps: int) -> Call:
        if self._data.iterator is None:
            self._data.begin(int(self.step.numpy()))
        number = self._in_flight.next_number()
        args = (self._data.iterator, tf.constant([steps, number], tf.int64), self._accounts.rate.value)
        with self._data.naming_bad_data():  # `schedule` raises what went wrong in an earlier call, as `done` does
            self._coordinator.schedule(self._call, args=args)
        call = Call(steps, time.monotonic())
        self._in_flight.add(number, call)
        return call

    def returned(self) -> list[Call]:
        with self._data.naming_bad_data():
            is_quiet = self._coordinator.done()
        self._take_reports()
        ended = self._in_flight.ended(is_quiet=is_quiet)
        for call, report in ended:
            self._accounts.add_report(call, report)
        return [call for call, _ in ended]

    def _take_reports(self) -> None:
        order = self._data.order
        if isinstance(order, FileOrder):  # before the reports: what a lost worker has reported counts
            lost = workers_out(self._coordinator)
        while report := self._accounts.reports.pop_oldest():
            order.count(report.step)
            if order.exact:
                (outputs, place), *rest = report.result
                order.advance(report.worker, (int(place[0]), int(place[1])))
                report = dataclasses.replace(report, result=(outputs, *rest))
            self._in_flight.report(report)
        if isinstance(order, FileOrder):
            order.lose(lost)
            order.fill()

    def aggregate_outputs(self, outputs: Structure) -> Structure:
        return self._accounts.metrics.aggregate_outputs(outputs)

    def write_metrics(self) -> None:
        self._accounts.metrics.write()

    def reset_metrics(self) -> None:
        self._accounts.metrics.reset()

    def join(self) -> None:
        """Wait for all calls; for scripts, which have nothing else to do meanwhile."""
        while self._in_flight:
            self.returned()
            time.sleep(CALL_POLL_SECONDS)

    def close(self) -> Iterators:
        stop_cluster(self._coordinator)
        self._in_flight.clear()
        self._accounts.close()
        return Iterators(*self._data.close(), self._threads)


def order_of(config: Config, workers: int, service: DataService | None) -> ReadOrder | FileOrder[TicketQueue]:
    """Return who says what each worker reads: it gives out files, or knows where each part's reading begins."""
    seed = draw_seed(config)
    if config.input_sharding == "dynamic" and service is None:
        return FileOrder(config, workers, seed, TicketQueue, matching)
    return ReadOrder(config, workers, seed, of_all=service is not None)


def takes_in(config: Config, strategy: Strategy, members: Membership | None) -> bool:
    """Return whether workers can join those that train; else the cluster is formed again with them, after a save.

    With several GPUs a worker has an iterator for each.
    """
    names = ("input", "input_position", "input_sharding", "evaluation")
    settings = {name: getattr(config, name) for name in names}
    return members is not None and not why_at_a_save(settings) and strategy.num_replicas_in_sync == 1


def building(tables: DynamicTables | None) -> contextlib.AbstractContextManager[None]:
    """Have the layers that are built meanwhile get their dynamic tables."""
    return tables.of_layers() if tables is not None else contextlib.nullcontext()


def trace_for_workers(program: Program, strategy: Strategy, accounts: CallAccounts, data: WorkersData) -> Traced:
    """Trace a step for the workers, and its metrics.

    Raises UserError where workers would train otherwise than one process does.
    """
    model, tables = accounts.model, accounts.tables
    keras, name = keras_of(model), f"{type(model).__name__}.train_step"
    with deduplicated_lookups(may_deduplicate_lookups(model)), giving_rows(), building(tables):
        trace = functools.partial(
            trace_step,
            strategy,
            model,
            data.element_spec if data.waits else data.iterator_spec,
            accounts,
            placed=data.order.exact and not data.waits,
            given=data.waits,
            seeded=False,
        )
        train_step = trace()
        if tables is not None and tables.found_more():
            train_step = trace()
    reject_large_arrays(train_step.graph, name)
    look_for_python(train_step.graph, name)
    reject_outside(program, train_step, name, model)
    reject_changing_shapes(train_step, name)
    with strategy.scope():
        keras.check_step(train_step)
    warn_of_forgotten(program, model, train_step, all_of(keras.trained(), keras.optimizers, accounts.beside))
    reject_undeclared(keras.layers, *((tables.tables, tables.names) if tables is not None else ((), ())))
    if tables is not None:
        tables.check({layer.name for layer in keras.layers})
    accounts.trace(train_step)
    reject_uses(train_step, accounts.metrics.states.pieces, metric_pieces(model), name)
    return train_step


def pack(
    strategy: Strategy, train_step: Traced, step: Variable, accounts: CallAccounts, data: WorkersData, *, ahead: bool
) -> Traced:
    """Trace the call that workers are given, of a traced step; raises UserError where it can't read `ahead`."""
    fitting = ROUND_OPERATIONS // len(train_step.graph.get_operations())
    return trace_call(
        strategy,
        train_step,
        step,
        data.iterator_spec,
        accounts,
        unrolled=max(MIN_AHEAD if ahead else 1, min(UNROLLED_STEPS, fitting)),
        waits=data.waits,
        ahead=ahead,
    )
