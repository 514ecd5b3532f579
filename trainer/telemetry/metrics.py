"""What a task tells Prometheus: names, types, labels and meanings, in one place (docs/observing.md#metrics).

Nothing is measured here. It is read from what the process keeps, when Prometheus asks: neither the shared path nor a
thread that trains is waited for. The client library is needed only where it does ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from trainer import __version__
from trainer.core.states import RunState
from trainer.telemetry.counters import Counters, Histogram
from trainer.telemetry.events import FAULTS
from trainer.telemetry.goodput import KINDS
from trainer.telemetry.progress import Progress
from trainer.telemetry.resources import gpu_use

STATES = (RunState.WAITING, RunState.TRAINING, RunState.STOPPED, RunState.FINISHED, RunState.FAILED)
# A program may have a metric for each of its classes: Prometheus keeps a series for each.
MAX_METRICS = 100


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's name, type and meaning, and its labels besides `run`."""

    name: str
    type: str
    meaning: str
    labels: tuple[str, ...] = ()
    of_run: bool = True


METRICS = {
    metric.name: metric
    for metric in (
        Metric("psfleet_build_info", "gauge", "Always 1", ("version", "release", "tensorflow"), of_run=False),
        Metric("psfleet_task_restarts_total", "counter", "Processes that the task's supervisor has started after its "
               "first", of_run=False),
        Metric("psfleet_task_gpu_busy_ratio", "gauge", "Share of time in which the task's GPUs computed, their mean",
               of_run=False),
        Metric("psfleet_task_gpu_memory_used_bytes", "gauge", "Memory in use on the task's GPUs", of_run=False),
        Metric("psfleet_run_state", "gauge", "1 for the run's state, else 0", ("state",)),
        Metric("psfleet_run_steps", "gauge", "Step at which the run is finished"),
        Metric("psfleet_step", "gauge", "Step of the run"),
        Metric("psfleet_steps_total", "counter", "Steps that have ended while this process watched"),
        Metric("psfleet_examples_total", "counter", "Examples in these steps: steps times the size of a batch"),
        Metric("psfleet_worker_steps_total", "counter", "The same steps, by the worker that trained them", ("worker",)),
        Metric("psfleet_worker_stale_updates_total", "counter", "Updates of other workers between a step's read of the "
               "weights and its own update, added up over these steps", ("worker",)),
        Metric("psfleet_worker_stale_updates_max", "gauge", "The most of them in one step", ("worker",)),
        Metric("psfleet_worker_input_wait_seconds_total", "counter", "Time that a worker's steps have waited for their "
               "batches", ("worker",)),
        Metric("psfleet_update_wait_seconds_total", "counter", "Time that updates have waited on the parameter servers "
               "for other updates of the same variable"),
        Metric("psfleet_table_rows", "gauge", "Rows of a dynamic table", ("table",)),
        Metric("psfleet_table_size_bytes", "gauge", "What its rows take, with slots and index", ("table",)),
        Metric("psfleet_table_new_rows_total", "counter", "Rows that new keys were given", ("table",)),
        Metric("psfleet_table_evicted_rows_total", "counter", "Rows that were taken away", ("table",)),
        Metric("psfleet_table_refused_keys_total", "counter", "Keys of batches that found no room for a row",
               ("table",)),
        Metric("psfleet_table_ps_rows_ratio", "gauge", "A ps's share of the rows that steps ask for lately",
               ("table", "ps")),
        Metric("psfleet_table_hot_key_ratio", "gauge", "The hottest key's share of the ids lately, from 0.01 on",
               ("table",)),
        Metric("psfleet_input_files", "gauge", "With input_sharding: dynamic, files that are done, under_way and found",
               ("state",)),
        Metric("psfleet_input_passes", "gauge", "Passes whose files have all been given out"),
        Metric("psfleet_step_seconds", "histogram", "Time of a step on its worker: a call's time divided by its steps, "
               "without its time in the queue"),
        Metric("psfleet_time_seconds_total", "counter", "Time of the run by what became of it, since the process "
               "before reported it last", ("kind",)),
        Metric("psfleet_training_metric", "gauge", "Loss and metrics of the training as logged last", ("metric",)),
        Metric("psfleet_faults_total", "counter", "Faults of the run by their event, over all processes", ("kind",)),
        Metric("psfleet_member_state", "gauge", "1 for the member's state, else 0", ("member", "state")),
        Metric("psfleet_member_silence_seconds", "gauge", "Time since the member's last answer", ("member",)),
        Metric("psfleet_member_drained", "gauge", "1 where an operator has drained the member's host, else 0",
               ("member",)),
        Metric("psfleet_way_works", "gauge", "1 where a member reaches another one, else 0", ("source", "target")),
        Metric("psfleet_checkpoint_step", "gauge", "Step of the newest checkpoint"),
        Metric("psfleet_checkpoint_timestamp_seconds", "gauge", "When it was saved, since 1970"),
        Metric("psfleet_checkpoint_size_bytes", "gauge", "Size of its files"),
        Metric("psfleet_checkpoint_save_seconds", "histogram", "Time of a save, until the checkpoint counts"),
        Metric("psfleet_checkpoint_failures_total", "counter", "Saves of the run that failed, over all processes"),
        Metric("psfleet_restore_seconds", "gauge", "Time that the last restore took"),
        Metric("psfleet_evaluation_step", "gauge", "Step of the last evaluation"),
        Metric("psfleet_evaluation_metric", "gauge", "Metrics of the last evaluation", ("metric",)),
        Metric("psfleet_shared_path_size_bytes", "gauge", "Room on the shared path in all"),
        Metric("psfleet_shared_path_free_bytes", "gauge", "Room on the shared path that is free"),
    )
}  # fmt: skip
Sample = tuple[str, tuple[str, ...], "float | Histogram | None"]


class MetricsCollector:
    """What one process tells of itself and of its run, as a collector of prometheus_client."""

    def __init__(self, member_states: tuple[str, ...] = (), restarts: int = 0, release: str | None = None) -> None:
        self._member_states = member_states
        self._restarts = restarts
        self._release = release or ""
        self._run = ""
        self._counters: Counters | None = None
        self._progress: Progress | None = None

    def report_on(self, run: str, counters: Counters, progress: Progress | None = None) -> None:
        """Tell of this run from now on; an evaluator has no progress of its own."""
        self._run, self._counters, self._progress = run, counters, progress

    def collect(self) -> Iterator[Any]:
        """Yield each metric that there are numbers of, in the order of the table."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        found: dict[str, Any] = {}
        for name, labels, value in self._samples():
            if value is None:
                continue
            metric = METRICS[name]
            if name not in found:
                names = ("run", *metric.labels) if metric.of_run else metric.labels
                found[name] = families[metric.type](name, metric.meaning, labels=names)
            values = (self._run, *labels) if metric.of_run else labels
            if isinstance(value, Histogram):
                found[name].add_metric(values, value.buckets(), value.sum)
            else:
                found[name].add_metric(values, value)
        yield from (found[name] for name in METRICS if name in found)

    def _samples(self) -> Iterator[Sample]:
        yield "psfleet_build_info", (__version__, self._release, tensorflow_version()), 1
        yield "psfleet_task_restarts_total", (), self._restarts
        if (use := gpu_use()) is not None:
            yield "psfleet_task_gpu_busy_ratio", (), use.busy
            yield "psfleet_task_gpu_memory_used_bytes", (), use.memory
        if self._progress is not None:
            yield from of_progress(self._progress)
        if self._counters is not None:
            yield from of_tally(self._counters, self._member_states)


def of_progress(progress: Progress) -> Iterator[Sample]:
    """Yield what the coordinator says of the run everywhere else, too."""
    status, kept = progress.status, progress.ledger
    ledger = kept.as_dict()
    for state in STATES:
        yield "psfleet_run_state", (state.value,), float(status.state is state)
    yield "psfleet_run_steps", (), status.steps
    yield "psfleet_step", (), ledger["step"]
    for kind in KINDS:
        # In full it would fall a little at each crash, and Prometheus would count all of it once more.
        yield "psfleet_time_seconds_total", (kind,), round(ledger[kind] - kept.taken_up[kind], 3)
    values = {**({} if status.loss is None else {"loss": status.loss}), **status.metrics}
    yield from by_metric("psfleet_training_metric", values)
    counters = progress.counters
    yield "psfleet_steps_total", (), counters.steps
    yield "psfleet_examples_total", (), counters.examples
    for worker, steps in counters.worker_steps.copy().items():
        yield "psfleet_worker_steps_total", (worker,), steps
    for worker, stale in counters.worker_stale.copy().items():
        yield "psfleet_worker_stale_updates_total", (worker,), stale
        yield "psfleet_worker_stale_updates_max", (worker,), counters.worker_stale_max[worker]
    for worker, seconds in counters.worker_input_wait.copy().items():
        yield "psfleet_worker_input_wait_seconds_total", (worker,), round(seconds, 3)
    yield "psfleet_update_wait_seconds_total", (), counters.update_wait_seconds
    yield from of_tables(counters.tables, status.lookups)
    for kind, number in counters.files.items():
        yield ("psfleet_input_passes", (), number) if kind == "pass" else ("psfleet_input_files", (kind,), number)
    yield "psfleet_step_seconds", (), counters.step_seconds
    yield "psfleet_checkpoint_save_seconds", (), counters.save_seconds
    if progress.events.counts is not None:
        faults = dict(progress.events.counts)
        for kind in FAULTS:
            yield "psfleet_faults_total", (kind,), faults.get(kind, 0)
        yield "psfleet_checkpoint_failures_total", (), faults.get("save-failed", 0)


def of_tables(tables: Mapping[str, Mapping[str, int]], lookups: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    """Yield what dynamic tables hold, and what steps ask of tables."""
    for name, table in tables.items():
        yield "psfleet_table_rows", (name,), table["rows"]
        yield "psfleet_table_size_bytes", (name,), table["bytes"]
        yield "psfleet_table_new_rows_total", (name,), table["new"]
        yield "psfleet_table_evicted_rows_total", (name,), table["evicted"]
        yield "psfleet_table_refused_keys_total", (name,), table["refused"]
    for name, asked in lookups.items():
        for server, share in asked["by_ps"].items():
            yield "psfleet_table_ps_rows_ratio", (name, server), share
        yield "psfleet_table_hot_key_ratio", (name,), asked["hot"][0][1] if asked["hot"] else 0.0


def of_tally(counters: Counters, member_states: tuple[str, ...]) -> Iterator[Sample]:
    """Yield what there is only once it is known."""
    members, drained = counters.members() if counters.members else {}, counters.drained()
    for member, seen in members.items():
        for state in member_states:
            yield "psfleet_member_state", (member, state), float(seen.state == state)
        yield "psfleet_member_silence_seconds", (member,), seen.silence
    for member in sorted({*members, *drained}):
        yield "psfleet_member_drained", (member,), float(member in drained)
    for source, row in counters.ways.items():
        for target, how in row.items():
            yield "psfleet_way_works", (source, target), float(not how.startswith("broken"))
    if counters.checkpoint is not None:
        yield "psfleet_checkpoint_step", (), counters.checkpoint.step
        yield "psfleet_checkpoint_timestamp_seconds", (), counters.checkpoint.at
        yield "psfleet_checkpoint_size_bytes", (), counters.checkpoint.size
    yield "psfleet_restore_seconds", (), counters.restore_seconds
    if counters.evaluation is not None:
        step, metrics = counters.evaluation
        yield "psfleet_evaluation_step", (), step
        yield from by_metric("psfleet_evaluation_metric", metrics)
    if counters.room is not None:
        size, free = counters.room
        yield "psfleet_shared_path_size_bytes", (), size
        yield "psfleet_shared_path_free_bytes", (), free


def by_metric(name: str, values: Mapping[str, float]) -> Iterator[Sample]:
    for metric, value in list(values.items())[:MAX_METRICS]:
        yield name, (metric,), value


def tensorflow_version() -> str:
    """Return TensorFlow's version without its import, which a process that waits has not made."""
    for name in ("tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""
