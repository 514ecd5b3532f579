"""Each worker's part of the data.

Under parameter servers TensorFlow traces the dataset function once and tells every worker that it is pipeline 0 of 1,
so `shard` does nothing. The context made here tells the truth: its pipeline number is a tensor that TensorFlow fills
in for the worker that runs the traced function, also when it runs it again on a worker that came back. One trace
serves any number of workers (docs/decisions/0001-one-trace-for-all-workers.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Without this, AutoGraph would convert the program's whole train_dataset, or, switched off, not even `map` functions.
from tensorflow.python.autograph.core import ag_ctx

from trainer.failures import UserError, explain
from trainer.program import program_file

SYMBOLIC = (
    "a worker's number is a tensor, because one trace of train_dataset serves all workers: use it in tf.data, as in "
    "dataset.shard(context.num_input_pipelines, context.input_pipeline_id), not as a Python number"
)


def train_dataset_fn(program: Any, workers: int) -> Callable[[], tf.data.Dataset]:
    """Return a dataset function for `ClusterCoordinator.create_per_worker_dataset`; it repeats the program's data."""

    def dataset_fn() -> tf.data.Dataset:
        number = tf.distribute.coordinator.experimental_get_current_worker_index()
        context = tf.distribute.InputContext(
            num_input_pipelines=workers, input_pipeline_id=number, num_replicas_in_sync=1
        )
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED):
            try:
                dataset = program.train_dataset(context)
            except (TypeError, NotImplementedError, tf.errors.OperatorNotAllowedInGraphError) as error:
                if "ymbolic" in str(error) or "Tensor" in str(error):
                    raise UserError(f"{explain(error, program_file(program))} ({SYMBOLIC})") from error
                raise
        return check_dataset(program, "train_dataset", dataset).repeat()

    return tf.function(dataset_fn, autograph=False)


def eval_dataset(program: Any) -> tf.data.Dataset:
    """Return the program's whole evaluation data, read by this process alone."""
    context = tf.distribute.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    dataset = check_dataset(program, "eval_dataset", program.eval_dataset(context))
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UserError(f"{type(program).__name__}.eval_dataset never ends: return it without repeat()")
    return dataset


def check_dataset(program: Any, method: str, dataset: Any) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        raise UserError(
            f"{type(program).__name__}.{method} returned {type(dataset).__name__}, not a tf.data.Dataset of batches"
        )
    return dataset
