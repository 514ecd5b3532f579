"""What calls on workers tell at their end beside the step's outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from trainer.core.contracts import Model, Strategy, Structure, Traced, Variable
from trainer.core.variables import flatten
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.input_wait import InputWait
from trainer.training.measures.metrics import CallMetrics, metric_pieces
from trainer.training.measures.staleness import Staleness
from trainer.training.steps.reports import Report, Reports
from trainer.training.steps.runner import Call
from trainer.training.tables.asked_rows import AskedRows
from trainer.training.tables.dynamic.tables import DynamicTables
from trainer.training.tables.row_saves import is_large
from trainer.training.updates.atomic_updates import AtomicUpdates
from trainer.training.updates.learning_rate import LearningRate
from trainer.training.updates.row_marks import RowMarks


class CallAccounts:
    """What is traced into each call to report on it, and what all calls have reported so far.

    Make it outside the strategy's scope, and `trace` the metrics once there is a step.
    """

    metrics: CallMetrics

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        tables: DynamicTables | None,
        *,
        wait: bool = True,
        ask: bool = True,
        mark: bool = False,
    ) -> None:
        """`wait` says to count how long steps wait for their batches; `ask`, to tell which rows they ask for.

        `mark` says to mark the rows of large variables that they change.
        """
        self.model = model
        self.rate = LearningRate(model.optimizer)
        self.reports = Reports()
        self.stale = Staleness(model.optimizer)
        self.wait = InputWait() if wait else None
        ask = ask and strategy.num_replicas_in_sync == 1  # several are traced in threads of their own
        self.asked = AskedRows(variables_by_now(model) if ask else [], tables if ask else None)
        self.updates = AtomicUpdates(strategy)
        self.marks: RowMarks | None = None
        if mark:
            large = [one for one in flatten(variables_by_now(model)) if is_large(one)]
            self.marks = RowMarks(large, self.updates.act_name_of)
            self.updates.traced = self.marks.add
        self.tables = tables

    @property
    def counts(self) -> list[tuple[Variable, str]]:
        """What is counted where a call runs, with how the counts of two calls are merged."""
        return [*self.stale.states, *(self.wait.states if self.wait else []), *self.asked.states]

    @property
    def beside(self) -> list[Variable]:
        """What a step changes and a checkpoint lacks: metrics, counts, marks, and tables' rows, which have files."""
        tables = self.tables.tables.values() if self.tables is not None else []
        rows = [one for table in tables for one in table.variables]
        marks = self.marks.variables if self.marks is not None else []
        return [*rows, *marks, *(one for one, _ in self.counts), *metric_pieces(self.model)]

    def trace(self, train_step: Traced) -> None:
        """Make the metrics of a traced step, which has all of the model's."""
        if self.tables is not None:
            self.tables.mutex_of = self.updates.mutex_of
        self.metrics = CallMetrics(self.model, train_step, self.counts)

    def tell(
        self, number: tf.Tensor, counter: Variable, steps: tf.Tensor, outputs: Structure, kept: Sequence[Variable]
    ) -> None:
        """Have a call of this number tell, in what is traced, of its end: the metrics' states were `kept` in it."""
        self.rate.show()
        waited, numbers = self.updates.waited(), self.tables.numbers() if self.tables else []
        states = [state.read_value() for state in kept]
        self.reports.put(number, counter.read_value(), steps, (outputs, states, waited, numbers))

    def add_report(self, call: Call, report: Report) -> None:
        """Add what a call's report tells, also to the call."""
        (call.outputs, states, waited, numbers), call.worker = report.result, report.worker
        call.counted = report.step
        if report.done is not None:
            call.done = report.done
        if self.tables is not None:
            self.tables.update_counts(numbers)
        self.metrics.add(states)
        counts = states[len(states) - len(self.counts) :]
        stale, counts = counts[: len(self.stale.states)], counts[len(self.stale.states) :]
        wait = counts[: len(counts) - len(self.asked.states)]
        self.asked.add_report(counts[len(wait) :], time.monotonic())
        call.stale = self.stale.found(stale, call.steps)
        call.input_wait = self.wait.found(wait, call.steps) if self.wait else None
        self.updates.seconds_waited = max(self.updates.seconds_waited, sum(float(one) for one in waited))

    def close(self) -> None:
        """Let go of the queue of reports: no call follows."""
        del self.reports


def variables_by_now(model: Model) -> list[Variable]:
    """Return a model's variables; none of a model of tf_keras that its first input builds."""
    try:
        return keras_of(model).variables
    except ValueError:
        return []
