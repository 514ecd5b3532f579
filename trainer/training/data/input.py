"""Each worker's part of the data.

Under parameter servers TensorFlow traces the dataset function once and tells every worker that it is pipeline 0 of 1,
so `shard` does nothing. The context made here tells the truth: its pipeline number is a tensor that TensorFlow fills
in for the worker that runs the traced function, also when it runs it again on a worker that came back. One trace
serves any number of workers (docs/decisions/0001-one-trace-for-all-workers.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Dataset, ElementSpec, Program, Strategy
from trainer.core.failures import UserError, explain
from trainer.core.program import program_file
from trainer.core.settings.config import Config
from trainer.run.data_position import Beginning
from trainer.training.data.context import WHOLE, DataPass, Found
from trainer.training.data.data_service import DataService
from trainer.training.data.given_files import GivenFile, GivenFiles
from trainer.training.data.large_arrays import reject_large_arrays
from trainer.training.data.other_data import fix_of
from trainer.training.data.places import file_after_file, pass_after_pass
from trainer.training.data.python_calls import has_python
from trainer.training.data.worker_files import (
    THIS,
    WorkerFiles,
    kept_apart,
    left_out,
    own_files,
    rejecting_files_in_service,
    tag_of,
)
from trainer.training.tf_internals.datasets import converting_as_ever, drawing_from, for_each_worker, refusing_loops

log = logging.getLogger(__name__)

POLICIES = {
    "auto": tf.data.experimental.AutoShardPolicy.AUTO,
    "file": tf.data.experimental.AutoShardPolicy.FILE,
    "data": tf.data.experimental.AutoShardPolicy.DATA,
    "off": tf.data.experimental.AutoShardPolicy.OFF,
}
# What makes batches, of the size that is its second input, and what makes others of them.
BATCHING = ("BatchDataset", "BatchDatasetV2", "PaddedBatchDataset", "PaddedBatchDatasetV2", "ParallelBatchDataset")
UNBATCHING = ("UnbatchDataset", "RebatchDataset", "RebatchDatasetV2")
PYTHON_IN_PIPELINE = (
    "has Python in its pipeline (from_generator, py_function or numpy_function). Under parameter_server the workers' "
    "servers run no Python: it would run in the coordinator, for all of them, or hang. Read files instead "
    "(TFRecordDataset, TextLineDataset) and use TensorFlow's own operations in map; or choose a strategy whose "
    "processes run the program themselves: multi_worker_mirrored, mirrored or one_device"
)
PYTHON_IN_SERVICE = (
    "has Python in its pipeline (from_generator, py_function or numpy_function), and input is service: the hosts of "
    "the group data run TensorFlow's operations alone. Use those in map, and read files; or set input: local"
)
DATASET_FROM_OUTSIDE = (
    "uses a tf.data.Dataset that was made before, which lives in the coordinator: under parameter_server make the "
    "whole dataset in this method, so that each worker makes its own (arrays and tensors may come from outside)"
)
RESOURCE_FROM_OUTSIDE = (
    "uses a lookup table, a variable or a random generator that lives in the coordinator: workers would ask there for "
    "every element, or find nothing. Make it in build_model, which is called in the strategy's scope; a "
    "StaticVocabularyTable stays in the coordinator even so: take a StringLookup, IntegerLookup or StaticHashTable"
)
NO_FILES = (
    "asks for no files, and input_sharding: dynamic gives them out one by one: begin with context.files(PATTERN), "
    "which gives the name of the file to be read; or leave input_sharding out"
)
TRACED = (
    "the method is traced, once for all workers. So a worker's number, and what a dataset gives, is a tensor: use it "
    "in tf.data, as in dataset.shard(context.num_input_pipelines, context.input_pipeline_id). A length and a loop over "
    "data belong in the constructor, and a layer's adapt in build_model (docs/input.md)"
)
# What Python and TensorFlow say of a tensor, or of a call, that has no number while it is traced.
NEEDS_NUMBERS = ("ymbolic", "Tensor", "indices must be integers", "eager mode", "inside a `tf.function`")
NO_TENSOR = "Failed to convert elements"  # of what is no array


@dataclasses.dataclass(frozen=True)
class ReadingPlan:
    """How the workers of a cluster read their parts of the data."""

    begins: Callable[[int], Beginning] = lambda worker: Beginning(0)
    """Says where a worker's reading begins, each time that it does."""
    seeded: bool = True
    """Whether its order follows from that alone."""
    exact: bool = False
    """Whether iterators give pairs: how far they are (the pass, and the examples taken of it), and the batch."""
    files: WorkerFiles = dataclasses.field(default_factory=WorkerFiles)
    """Those that the workers write."""
    found: Found = lambda names: None
    """Gets the names of the files that they divide, in order."""
    part_of: Callable[[int], int] = lambda worker: worker
    """Gives the number of a worker's part."""


def train_dataset_fn(
    program: Program,
    workers: int,
    strategy: Strategy,
    plan: ReadingPlan = ReadingPlan(),
    *,
    service: DataService | None = None,
    given: GivenFiles | None = None,
    batches: Callable[[int | None], object] = lambda size: None,
) -> Callable[[], Dataset]:
    """Return a dataset function for `ClusterCoordinator.create_per_worker_dataset`; it repeats the program's data.

    Where a worker has several GPUs, its iterator gives `strategy.run` a batch for each of them. With a `service` that
    one reads, for all workers. Where files are `given` out one by one, the iterator gives the ticket, and the examples
    taken of its file. `batches` is given the size of the program's batches, where it is known.
    """

    def part(_: object = None) -> tf.data.Dataset:
        if service is not None:
            dataset = service_train_dataset(program, strategy, plan, service)
        elif given is not None:
            dataset = files_train_dataset(program, strategy, given)
        else:
            dataset = worker_train_dataset(program, workers, strategy, plan)
        batches(batch_size(tf.compat.v1.get_default_graph()))
        return dataset

    def dataset_fn() -> Dataset:
        return part() if strategy.num_replicas_in_sync == 1 else strategy.distribute_datasets_from_function(part)

    return tf.function(dataset_fn, autograph=False)


def service_train_dataset(
    program: Program, strategy: Strategy, plan: ReadingPlan, service: DataService
) -> tf.data.Dataset:
    """Return what one worker is given of the data that the data service reads, without end; call it while tracing.

    The data service divides the data: the program gives all of them. It repeats them as well, so that its job never
    ends: those that train would have to agree on when the next one begins.
    """
    seed, number, _ = tf.unstack(for_each_worker(lambda worker: dataclasses.astuple(plan.begins(worker)), 3))
    whole = DataPass(1, 0, strategy.num_replicas_in_sync, seed, number, plan.seeded)
    with rejecting_files_in_service(f"{type(program).__name__}.train_dataset"):
        dataset = whole.ask(program, functools.partial(call_program, program, "train_dataset"))
    return service.read(check_pipeline(program, "train_dataset", dataset))


def worker_train_dataset(
    program: Program, workers: int, strategy: Strategy, plan: ReadingPlan = ReadingPlan()
) -> tf.data.Dataset:
    """Return one worker's part of the training data, without end; call it while tracing a dataset function.

    A batch is what one replica gets.
    """

    def numbers(worker: int) -> list[int]:
        return [*dataclasses.astuple(plan.begins(worker)), plan.part_of(worker)]

    seed, first, taken, own = tf.unstack(for_each_worker(numbers, 4))
    replicas = strategy.num_replicas_in_sync  # of one worker: workers don't wait for each other

    def read(turn: tf.Tensor) -> tf.data.Dataset:
        part = DataPass(workers, own, replicas, seed, turn, plan.seeded, goes_on=plan.exact, found=plan.found)
        return part.ask(program, functools.partial(call_program, program, "train_dataset"))

    what = f"{type(program).__name__}.train_dataset"
    if plan.exact:
        with left_out(what, "with input_position: exact each pass is read in an order of its own"):
            dataset = pass_after_pass(read, first, taken)
    else:
        number = tf.distribute.coordinator.experimental_get_current_worker_index()
        with kept_apart(plan.files.for_worker(number), what):
            dataset = read(first).repeat()
    return check_pipeline(program, "train_dataset", dataset)


def files_train_dataset(program: Program, strategy: Strategy, given: GivenFiles) -> tf.data.Dataset:
    """Return what one worker reads of the files that it is given, without end; call it while tracing."""

    def read(file: GivenFile) -> tf.data.Dataset:
        whole = DataPass(1, 0, strategy.num_replicas_in_sync, 0, file.order, goes_on=True, given=file)
        dataset = whole.ask(program, functools.partial(call_program, program, "train_dataset"))
        if not file.pattern:
            raise UserError(f"{type(program).__name__}.train_dataset {NO_FILES}")
        given.named(file.pattern)
        return dataset

    with left_out(f"{type(program).__name__}.train_dataset", "each file is read once a pass, by any worker"):
        dataset = file_after_file(read, given.tickets(), waits=given.waits)
        return check_pipeline(program, "train_dataset", dataset)


def batch_size(graph: Any) -> int | None:
    """Return the size of the batches of a pipeline that was traced there; None where it has none, or several.

    A dataset's type has it only where the last batch, which may be smaller, is dropped.
    """
    found = [
        None if operation.type in UNBATCHING else tf.get_static_value(operation.inputs[1])
        for operation in graph.get_operations()
        if operation.type in (*BATCHING, *UNBATCHING)
    ]
    sizes = {None if size is None else int(size) for size in found}
    return sizes.pop() if len(sizes) == 1 else None


def trace_eval_dataset(program: Program, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Call the program's `eval_dataset` while tracing a function that workers will run.

    Raises UserError where the program uses a worker's number in Python, or Python in the pipeline.
    """
    why = "a part of the evaluation is read once, by any worker"
    with evaluating(), left_out(f"{type(program).__name__}.eval_dataset", why):
        return check_pipeline(program, "eval_dataset", call_program(program, "eval_dataset", context))


def evaluating() -> contextlib.AbstractContextManager[Any]:
    """Have evaluations read in one order, also in processes whose TensorFlow has another seed."""
    return drawing_from(tf.constant(0, tf.int64), tf.constant(0, tf.int64))


def call_program(program: Program, method: str, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Call the method; raises UserError where it uses in Python what has no number while it is traced."""
    # AutoGraph would convert the program's whole train_dataset, or, switched off, not even `map` functions.
    with converting_as_ever(), refusing_loops():
        try:
            dataset = getattr(program, method)(context)
        except (TypeError, AttributeError, RuntimeError, tf.errors.OperatorNotAllowedInGraphError) as error:
            if any(words in str(error) for words in NEEDS_NUMBERS) and NO_TENSOR not in str(error):
                raise UserError(f"{explain(error, program_file(program))} ({TRACED})") from error
            raise
    return check_dataset(program, method, dataset)


def check_pipeline(program: Program, method: str, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that is traced by now; raises UserError where workers can't run it."""
    graph = tf.compat.v1.get_default_graph()
    reject_large_arrays(graph, f"{type(program).__name__}.{method}", kept_once=graph)
    problem = find_problem(graph, dataset)
    if problem:
        raise UserError(f"{type(program).__name__}.{method} {problem}")
    return dataset


def find_problem(graph: Any, dataset: tf.data.Dataset) -> str:
    """Say what a pipeline, traced in a FuncGraph, needs that a worker's server does not have; nothing if it can run."""
    definition = graph.as_graph_def()
    if has_python(definition):
        return PYTHON_IN_PIPELINE
    # What TensorFlow puts in for each worker, such as a table made in the strategy's scope, is not among these.
    outside = [tensor for tensor, _ in graph.captures if not tf.is_symbolic_tensor(tensor)]
    outside.append(tf.data.experimental.to_variant(dataset))
    for tensor in outside:
        if tensor.dtype == tf.variant and not tf.is_symbolic_tensor(tensor):
            return DATASET_FROM_OUTSIDE
        if tensor.dtype == tf.resource and "/job:ps/" not in tensor.device:
            return RESOURCE_FROM_OUTSIDE
    return ""


def uses_python(dataset: tf.data.Dataset) -> bool:
    """Return whether an eager dataset's pipeline calls Python, which stays in this process."""
    definition = tf.compat.v1.GraphDef()
    definition.ParseFromString(dataset._as_serialized_graph().numpy())
    return has_python(definition)


def own_train_dataset(
    config: Config,
    program: Program,
    strategy: Strategy,
    service: DataService | None = None,
    seed: int = 0,
    step: int = 0,
) -> Dataset:
    """Return the program's training data, without end, distributed over the replicas of a strategy that trains here.

    `step` is where the training begins to read them.

    With `input_sharding: program` the program divides its data by TensorFlow's own context and its batches go to one
    replica each. Otherwise it gives the whole data, TensorFlow divides that by the policy, and a batch is the global
    one: TensorFlow splits it over all replicas. A program that sizes its batches with
    `context.get_per_replica_batch_size(GLOBAL_BATCH)` takes the same steps either way.
    """

    one_pass = functools.partial(own_part, config, program, service, seed, step)

    def endless(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return one_pass(context).repeat()

    def served(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = one_pass(context)
        if uses_python(dataset):
            raise UserError(f"{type(program).__name__}.train_dataset {PYTHON_IN_SERVICE}")
        assert service is not None
        return service.read(dataset)

    if service is not None:
        return strategy.distribute_datasets_from_function(served)
    if config.input_sharding == "program":
        return strategy.distribute_datasets_from_function(endless)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICIES[config.input_sharding]
    dataset = endless(WHOLE).with_options(options)
    if not config.traits.in_step or config.input_sharding not in ("auto", "file"):
        return strategy.experimental_distribute_dataset(dataset)
    return by_file(strategy, dataset, config.input_sharding)


def own_part(
    config: Config,
    program: Program,
    service: DataService | None,
    seed: int,
    step: int,
    context: tf.distribute.InputContext,
) -> tf.data.Dataset:
    """Return one pass over the part of the data that a context is for."""
    pipelines, number = context.num_input_pipelines, context.input_pipeline_id
    part = DataPass(pipelines, number, context.num_replicas_in_sync, seed, step, config.seed is not None)
    what = f"{type(program).__name__}.train_dataset"
    files = own_files(tag_of(config.shared_dir, config.run), number, range(pipelines))
    with kept_apart(files, what) if service is None else rejecting_files_in_service(what):
        return part.ask(program, lambda own: check_dataset(program, "train_dataset", program.train_dataset(own)))


def by_file(strategy: Strategy, dataset: tf.data.Dataset, policy: str) -> Dataset:
    """Have TensorFlow divide a dataset by its files; raises UserError where there are too few."""
    try:
        distributed = strategy.experimental_distribute_dataset(dataset)
        # Too few files show only here, and only where no other member waits for this one. A shuffle fills for it.
        next(iter(distributed))
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, StopIteration) as error:
        raise UserError(
            f"input_sharding: {policy}: {why_not_by_file(error)}. Divide the data into at least as many "
            "files as there are workers (chief and workers), or set input_sharding to data (each worker reads "
            "everything and keeps its part) or program"
        ) from error
    return distributed


def why_not_by_file(error: Exception) -> str:
    """Say why a dataset could not be divided by files; the member without a file just sees no data."""
    if isinstance(error, StopIteration):
        return "there is no file for this worker"
    if "unshardable" in str(error):
        return "train_dataset reads no files"
    found = re.search(r"only has (\d+) file", str(error))
    if found is None:
        raise error
    return f"train_dataset reads fewer files ({found[1]}) than there are workers"


def element_spec_of(program: Program, strategy: Strategy) -> ElementSpec:
    """Return what one replica gets of a program's training data; nothing is read. Raises UserError."""
    traced: Any = train_dataset_fn(program, 1, strategy)
    return replica_element_spec(traced.get_concrete_function().structured_outputs)


def replica_element_spec(dataset: Dataset) -> ElementSpec:
    """Return what one replica gets from a (distributed) dataset, of several replicas the first."""

    def of_one(spec: ElementSpec) -> ElementSpec:
        return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec

    return tf.nest.map_structure(of_one, dataset.element_spec)


def eval_dataset(program: Program) -> tf.data.Dataset:
    """Return the program's whole evaluation data, read by this process alone."""
    return own_eval_dataset(program, WHOLE)


def own_eval_dataset(program: Program, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Return a part of the program's evaluation data, read by this process."""
    files = own_files(f"evaluation-{THIS}", context.input_pipeline_id, range(context.num_input_pipelines))
    with evaluating(), kept_apart(files, f"{type(program).__name__}.eval_dataset"):
        dataset = check_dataset(program, "eval_dataset", program.eval_dataset(context))
        size, name = int(dataset.cardinality()), f"{type(program).__name__}.eval_dataset"
        if size == tf.data.INFINITE_CARDINALITY:
            raise UserError(f"{name} never ends: return it without repeat()")
        if size == 0 and context.num_input_pipelines == 1:
            raise UserError(f"{name} is empty: there is nothing to evaluate")
    return dataset


def check_dataset(program: Program, method: str, dataset: Dataset) -> tf.data.Dataset:
    if not isinstance(dataset, tf.data.Dataset):
        what = f"{type(program).__name__}.{method} returned {type(dataset).__name__}, not a tf.data.Dataset of batches"
        raise UserError(": ".join(filter(None, [what, fix_of(dataset)])))
    return dataset
