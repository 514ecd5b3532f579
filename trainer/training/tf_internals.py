"""Private names of TensorFlow and both Keras that this project builds on; test_tf_internals.py holds them.

No other module imports any, but warm_start.py, which comes before all this.

TensorFlow takes a worker that failed in again when all workers are back: until then nobody else is taken in. The
handler made here takes in whoever is back, and leaves out the others (docs/decisions/0082).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import random
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, trackable_object_graph_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.data.experimental.ops.testing import sleep as sleep
from tensorflow.python.data.util import random_seed, structure
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context
from tensorflow.python.eager import context, executor
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps import register_acd_resource_resolver
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import load as saved_model_load
from tensorflow.python.saved_model import save as saved_model_save
from tf_keras.src import backend as tf_keras_backend
from tf_keras.src.layers.rnn import gru_lstm_utils
from tf_keras.src.mixed_precision import autocast_variable
from tf_keras.src.saving.legacy import hdf5_format

from trainer.cluster.member import to_take_in
from trainer.repeated_failures import RepeatedFailures

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05
WAIT_SECONDS = 0.1
DEATHS = 3  # of workers in a row, which are a call's fault
WORKER_THREAD = "WorkerClosureProcessingLoop-"
CONFIRM_SECONDS = 3.0  # until the heartbeat has heard that a process ended
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
GRAPH_SEED = 87654321  # TensorFlow's own, beside a seed that a program gives
ENDLESS = ("repeat", "counter", "random")  # methods of tf.data.Dataset
# Operations that call functions, choose one, and repeat one.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
CHOICES = ("If", "StatelessIf")
LOOPS = ("While", "StatelessWhile")
APART = "atomic_update"  # a scope of names
HDF5_FUNCTIONS = (
    "load_weights_from_hdf5_group",
    "load_weights_from_hdf5_group_by_name",
    "save_weights_to_hdf5_group",
)
RESOURCE_HANDLE = b"\x72"  # the tag of TensorProto.resource_handle_val, whose length and bytes the content is


class Members(Protocol):
    """Who knows of the workers: the tasks in TensorFlow's order, and who is told what becomes of them."""

    handler: Any

    @property
    def workers(self) -> list[str]: ...
    def workers_serving(self, since: float = 0.0) -> set[str]: ...
    def worker_lost(self, task: str) -> None: ...
    def way_lost(self, task: str, message: str) -> str: ...
    def process(self, task: str) -> str | None: ...
    def has_ended(self, task: str, process: str | None) -> bool: ...
    def leaves(self, task: str) -> bool: ...
    def killed_by_call(self, tasks: list[str], steps: int) -> Exception: ...
    def lost_ps(self) -> list[str]: ...
    def failed_alike(self, error: Exception) -> Exception: ...
    def workers_taken_in(self, tasks: Collection[str]) -> None: ...


class WayLost(tf.errors.UnavailableError):
    """A worker's call failed since its way to another member is broken, while that member lives.

    TensorFlow takes it for the worker's failure.
    """

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(None, None, f"/job:worker/replica:0/task:{worker}: {why}")


class TakenIn(threading.Condition):
    """What a worker's thread waits on after a failure: until this worker is taken in, not just any."""

    def __init__(self, handler: PartialHandler, lock: Any) -> None:
        super().__init__(lock)
        self._handler = handler

    def wait(self, timeout: float | None = None) -> bool:
        """Wait with the lock held, as TensorFlow does; ends the thread when the generation is over."""
        task = self._handler.own_task()
        while self._handler._should_preemption_thread_run and task in self._handler.out:
            super().wait(WAIT_SECONDS)
        if not self._handler._should_preemption_thread_run:
            raise SystemExit  # of this thread alone
        return True


class PartialHandler(cluster_coordinator.WorkerPreemptionHandler):
    """Takes in the workers that are back, without waiting for those that are not."""

    def __init__(self, server_def: Any, cluster: Any, members: Members) -> None:
        self._members = members
        self._tasks = list(members.workers)
        self._whole = copy.deepcopy(server_def)
        self._thread = threading.local()
        self.out: dict[str, float] = {}
        """The workers that TensorFlow has lost, and since when."""
        self.busy: dict[str, float] = {}
        """The workers with a call, and since when."""
        self.updating_since: float | None = None
        """Since when TensorFlow is taking in workers."""
        self._asked_again: float | None = None
        self.alike = AlikeFailures(members)
        super().__init__(server_def, cluster)
        self._worker_up_cond = TakenIn(self, self._cluster_update_lock)

    def own_task(self) -> str:
        """Return the worker that this thread gives calls to."""
        return self._tasks[self._thread.worker]

    @contextlib.contextmanager
    def wait_on_failure(
        self,
        on_failure_fn: Callable[[Any], None] | None = None,
        on_transient_failure_fn: Callable[[], None] | None = None,
        on_recovery_fn: Callable[[], None] | None = None,
        worker_device_name: str = "(unknown)",
    ) -> Iterator[None]:
        """Do as TensorFlow's handler does, and note which worker it is about."""
        self._thread.worker = int(worker_device_name.rpartition(":")[2])
        task = self.own_task()

        def failed(error: Any) -> None:
            self.out[task] = time.monotonic()
            self.busy.pop(task, None)
            if on_failure_fn is not None:
                on_failure_fn(error)
            self._members.worker_lost(task)

        self.busy[task] = time.monotonic()
        try:
            with (
                super().wait_on_failure(
                    on_failure_fn=failed,
                    on_transient_failure_fn=on_transient_failure_fn,
                    on_recovery_fn=on_recovery_fn,
                    worker_device_name=worker_device_name,
                ),
                self.alike.watching(task),
            ):
                try:
                    yield
                except (
                    tf.errors.UnavailableError,
                    cluster_coordinator.ClosureInputError,
                    cluster_coordinator.ClosureAbortedError,
                ) as error:
                    self._blame(task, error)
                    raise
        finally:
            self.busy.pop(task, None)

    def _blame(self, task: str, error: Exception) -> None:
        """Raise WayLost where a call failed because its worker has lost a way."""
        error = getattr(error, "original_exception", error)
        if isinstance(error, tf.errors.UnavailableError) and (why := self._members.way_lost(task, str(error))):
            raise WayLost(self._thread.worker, why) from error

    def _preemption_handler(self) -> None:
        while True:
            self._cluster_due_for_update_or_finish.wait()
            if not self._should_preemption_thread_run:
                return
            if not self._take_in():
                time.sleep(POLL_SECONDS)

    def _take_in(self) -> bool:
        """Take in those that are back; returns whether any was."""
        out = dict(self.out)
        if not self._members.workers_serving(since=max(out.values(), default=0.0)) & out.keys():
            self.updating_since = self._asked_again = None
            self._clear_if_done()
            return False
        # Somebody is back: who else is there shall say so once more.
        self._asked_again = self._asked_again or time.monotonic()
        back = to_take_in(self._tasks, out, self._members.workers_serving(self._asked_again))
        if not back:
            return False
        gone = out.keys() - back
        server_def = copy.deepcopy(self._whole)
        for job in server_def.cluster.job:
            for task in gone if job.name == "worker" else ():
                del job.tasks[self._tasks.index(task)]
        self.updating_since = self.updating_since or time.monotonic()
        try:
            with self._cluster_update_lock:
                context.context().update_server_def(server_def)
                for task in back:
                    self.out.pop(task)
                self._members.workers_taken_in(back)
                self._worker_up_cond.notify_all()
        except Exception as error:
            # A ps that is gone is found by the heartbeat, and a worker is left out the next time.
            log.warning("cannot take in %s, trying again: %s", ", ".join(sorted(back)), error)
            return False
        finally:
            self._asked_again = None
        self.updating_since = None
        self._clear_if_done()
        return True

    def _clear_if_done(self) -> None:
        with self._cluster_update_lock:
            if not self.out and self._should_preemption_thread_run:
                self._cluster_due_for_update_or_finish.clear()


class CallBudget:
    """Ends the run when one call has killed several workers in a row: TensorFlow would give it to the next."""

    def __init__(self, cluster: Any, members: Members) -> None:
        """Watch the workers of TensorFlow's cluster."""
        self._queue = cluster.closure_queue
        self._members = members
        self._deaths: weakref.WeakKeyDictionary[Any, list[tuple[str, str | None]]] = weakref.WeakKeyDictionary()
        for task, worker in zip(members.workers, cluster.workers, strict=True):
            worker._on_closure_failure = partial(self._failed, task, worker._on_closure_failure)

    def _failed(self, task: str, put_back: Callable[[Any, Any], None], closure: Any, error: Any) -> None:
        """Have the call run again, unless it has killed too many; this worker's own thread waits meanwhile."""
        if self._members.leaves(task) or isinstance(error, WayLost):
            put_back(closure, error)
            return
        deaths = [death for death in self._deaths.get(closure, []) if self._members.has_ended(*death)]
        deaths.append((task, self._members.process(task)))
        self._deaths[closure] = deaths
        if len(deaths) < DEATHS or not self._is_confirmed(*deaths[-1]):
            put_back(closure, error)
            return
        killed = self._members.killed_by_call([death[0] for death in deaths], call_steps(closure))
        closure.maybe_call_with_output_remote_value(lambda value: value._set_error(killed))
        self._queue.mark_failed(killed)

    def _is_confirmed(self, task: str, process: str | None) -> bool:
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not (ended := self._members.has_ended(task, process)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return ended


class AlikeFailures:
    """Finds the program's error where every worker fails in the same way: TensorFlow would repeat that for ever."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.failures = RepeatedFailures()

    def clear_when_calls_end(self, queue: Any) -> None:
        """Begin the count again each time that a call ends well; to make an iterator is no such call."""
        finished = queue.mark_finished

        def ended_well() -> None:
            self.failures.clear()
            finished()

        queue.mark_finished = ended_well

    @contextlib.contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """Raise the program's error in the place of the one that a worker reports, where it is that."""
        try:
            yield
        except (tf.errors.OpError, cluster_coordinator.ClosureInputError, cluster_coordinator.ClosureAbortedError) as e:
            error = getattr(e, "original_exception", None) or e
            classes = [kind.__name__ for kind in type(error).__mro__]
            self.failures.add(task, self._members.process(task), classes, str(error))
            if self.have_all_failed(error):
                raise self._members.failed_alike(error) from error
            raise

    def have_all_failed(self, error: Exception) -> bool:
        """Return whether each worker that answers has failed so, and no member's process has ended; this waits."""
        if not self._are_alike(error):
            return False
        self._members.workers_serving(time.monotonic())
        time.sleep(CONFIRM_SECONDS)  # who has ended is known then
        return not self._members.lost_ps() and self._are_alike(error)

    def _are_alike(self, error: Exception) -> bool:
        workers = [(task, self._members.process(task)) for task in sorted(self._members.workers_serving())]
        if not self.failures.are_the_programs(str(error), workers):
            return False
        return not any(self._members.has_ended(*worker) for worker in workers)


def call_steps(closure: Any) -> int:
    """Return how many steps a call has: the first number of its second argument; 0 of an evaluation's call."""
    return int(closure._args[1][0]) if len(closure._args) == 3 else 0


def delete_executor(self: Any) -> None:
    """Let go of an executor without waiting for what it has in flight.

    Each call drops a reference to TensorFlow's default executor, which frees results. On a silent worker that waits,
    and all workers' calls would wait with it.
    """
    with contextlib.suppress(TypeError):  # at the process's end
        pywrap_tfe.TFE_DeleteExecutor(self._handle)


def keep_function(self: Any, name: str) -> None:
    """Keep a function that nobody uses any longer, instead of having the members forget it.

    TensorFlow asks one member after the other to forget it, with Python's lock: one that is frozen would stop all
    threads of this process, also the heartbeat that finds it frozen. Python's garbage collector does it at any moment.
    This process keeps it to its end, and so trains no more than MOST_GENERATIONS (trainer/tasks/coordinator.py).
    """


def make_coordinator(strategy: Any, members: Members | None) -> Any:
    """Make a ClusterCoordinator whose workers are taken in one by one; without members it is TensorFlow's own."""
    if members is None:
        return tf.distribute.coordinator.ClusterCoordinator(strategy)
    executor.Executor.__del__ = delete_executor
    context.Context.remove_function = keep_function
    original = cluster_coordinator.WorkerPreemptionHandler
    cluster_coordinator.WorkerPreemptionHandler = lambda server_def, cluster: PartialHandler(
        server_def, cluster, members
    )
    try:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    finally:
        cluster_coordinator.WorkerPreemptionHandler = original
    members.handler = coordinator._cluster.failure_handler
    CallBudget(coordinator._cluster, members)
    members.handler.alike.clear_when_calls_end(coordinator._cluster.closure_queue)
    return coordinator


def iterator_type_spec(strategy: Any, per_worker_dataset: Any) -> Any:
    """Return the type of one worker's iterator of a per-worker dataset, before there is one."""
    return input_lib.get_iterator_spec_from_dataset(strategy, per_worker_dataset._dataset_fn.structured_outputs)


def for_each_worker(numbers: Callable[[int], Sequence[int]], size: int) -> tf.Tensor:
    """Return, in what is traced, numbers of the worker that runs it: asked of this process each time that it runs."""

    def of_this_worker() -> tf.Tensor:
        return tf.constant(numbers(int(coordinator_context.get_current_dispatch_context().worker_index)), tf.int64)

    graph = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(of_this_worker, tf.TensorSpec([size], tf.int64))


@contextlib.contextmanager
def drawing_from(seed: tf.Tensor | None, reading: tf.Tensor) -> Iterator[list[Any]]:
    """Have the pipelines that are made meanwhile draw from `seed`, each of their operations numbers of its own.

    Without one each iterator draws its own: also one that `interleave` makes, which else repeats those before it. A
    `shuffle` with a seed of the program's own keeps it, with `reading` added where it shuffles anew each time. Gives
    a list that has an entry for each operation that draws otherwise in another reading.
    """
    get_seed, shuffle = random_seed.get_seed, tf.data.Dataset.shuffle
    numbers, draws = itertools.count(1), list[Any]()

    def drawn(given: Any) -> Any:
        if given is None:
            draws.append(given)
        if given is None and seed is None:
            return tf.constant(0, tf.int64), tf.constant(0, tf.int64)  # tf.data's way to ask for that
        if given is None:
            return seed, tf.constant(next(numbers), tf.int64)
        # Not the run's seed, as TensorFlow would: an order that is always the same is so in the evaluator, too.
        return tf.constant(GRAPH_SEED, tf.int64), tf.cast(given, tf.int64)

    def shuffled(
        self: Any, buffer_size: Any, seed: Any = None, reshuffle_each_iteration: bool = True, name: str | None = None
    ) -> Any:
        if seed is not None and reshuffle_each_iteration is not False:
            draws.append(seed)
            seed = tf.cast(seed, tf.int64) + reading
        return shuffle(self, buffer_size, seed, reshuffle_each_iteration, name)

    random_seed.get_seed, tf.data.Dataset.shuffle = drawn, shuffled
    try:
        yield draws
    finally:
        random_seed.get_seed, tf.data.Dataset.shuffle = get_seed, shuffle


@contextlib.contextmanager
def noting_endless() -> Iterator[list[str]]:
    """Give a list that has an entry for each dataset without end that a program makes meanwhile."""
    plain = {name: vars(tf.data.Dataset)[name] for name in ENDLESS}
    found: list[str] = []

    def noting(name: str) -> Any:
        make = getattr(tf.data.Dataset, name)

        def made(*given: Any, **named: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            # TensorFlow makes some for itself; AutoGraph calls what the program does.
            by_tensorflow = caller.startswith("tensorflow.") and ".autograph." not in caller
            count = named.get("count", given[1] if len(given) > 1 else None)
            if not by_tensorflow and (name != "repeat" or count is None or (isinstance(count, int) and count < 0)):
                found.append(name)
            return make(*given, **named)

        return made

    for name, one in plain.items():
        setattr(tf.data.Dataset, name, staticmethod(noting(name)) if isinstance(one, staticmethod) else noting(name))
    try:
        yield found
    finally:
        for name, one in plain.items():
            setattr(tf.data.Dataset, name, one)


def iterator_handles(per_worker: Any) -> list[Any]:
    """Return the handle of each worker's iterator that is there, on its worker."""
    parts = [remote._values for remote in per_worker._values if remote._values is not None]
    return [part for part in tf.nest.flatten(parts, expand_composites=True) if part.dtype == tf.resource]


def elements_of(iterator_spec: Any) -> tuple[list[tf.DType], list[tf.TensorShape]]:
    """Return types and shapes of the tensors that an iterator of this type gives."""
    element = iterator_spec._element_spec
    return structure.get_flat_tensor_types(element), structure.get_flat_tensor_shapes(element)


def forget_uncompressing() -> None:
    """Have TensorFlow make anew what uncompresses a data service's elements.

    It keeps that function for all datasets with such elements. After this process has joined a cluster anew, the
    workers lack it: "Could not find required function definition".
    """
    data_service_ops._get_uncompress_func.cache_clear()


def whole_of(variable: Any) -> Any:
    """Return the split variable that this one is a shard of, or None."""
    container = getattr(variable, "_sharded_container", None)
    return container() if container is not None else None


@tf.autograph.experimental.do_not_convert  # it can't, and would warn where a train_step calls apply_gradients
def beneath(variable: Any) -> Any:
    """Return TensorFlow's own variable beneath what casts it, or stands for it on several replicas."""
    while (inner := vars(variable).get("_variable", vars(variable).get("_v"))) is not None:
        variable = inner
    return variable


def moving_average(optimizer: Any, weight: Any) -> Any:
    """Return the average that an optimizer with use_ema keeps of a weight, None of one that it doesn't train."""
    number = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(weight))
    return None if number is None else optimizer._model_variables_moving_average[number]


def full_names(reader: Any) -> dict[str, str]:
    """Return the variables' names by their keys in a checkpoint, as the program had them that saved it."""
    if not reader.has_tensor(OBJECT_GRAPH):
        return {}
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(reader.get_tensor(OBJECT_GRAPH))
    return {each.checkpoint_key: each.full_name for node in graph.nodes for each in node.attributes}


def autocast_dtype() -> Any:
    """Return the type that a layer of tf_keras computes in just now, or None."""
    return getattr(autocast_variable._autocast_dtype, "dtype", None)


def wrap_autocast_variables(wrap: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have `wrap`, given tf_keras's own wrapper and a weight, wrap what layers with a mixed policy make."""
    plain = autocast_variable.create_autocast_variable
    if not hasattr(plain, "of_psfleet"):

        def wrapped(variable: Any) -> Any:
            return wrap(plain, variable)

        wrapped.of_psfleet = True  # type: ignore[attr-defined]
        autocast_variable.create_autocast_variable = wrapped


def forget_keras3_seeds() -> None:
    """Have `keras.random` of Keras 3 without a seed begin anew; call it when `keras` is imported."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)


@contextlib.contextmanager
def keras3_seeds_drawn() -> Iterator[None]:
    """Have `keras.random` of Keras 3 without a seed draw one each time, meanwhile and on this thread.

    Keras keeps a state for them in a variable, one for each thread, which no step that is traced may make.
    """
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, DrawnSeeds())
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


class DrawnSeeds:
    """Does for Keras 3 what its SeedGenerator does, without a state: whoever runs the step draws a seed of its own."""

    def next(self, ordered: bool = True) -> tf.Tensor:
        return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int64)


def converting_as_ever() -> contextlib.AbstractContextManager[Any]:
    """Have AutoGraph translate neither a whole method of the program's nor nothing, but what `map` is given."""
    return ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED)


def default_executor() -> Any:
    """Return what runs this thread's eager operations."""
    return context.context().executor


def make_executor() -> Any:
    """Return an executor of eager operations that does not wait for them; whoever lets go of it does: keep it."""
    return executor.new_executor(enable_async=True, enable_streaming_enqueue=False)


@contextlib.contextmanager
def on_executor(own: Any, before: Any) -> Iterator[None]:
    """Run this thread's eager operations on an executor, and then on `before`, which it had until now."""
    context.context().executor = own
    try:
        yield
    finally:
        context.context().executor = before


def called_graphs(operation: Any) -> list[tuple[Any, list[Any]]]:
    """Return the graphs of the functions that an operation calls, or chooses from, each with what it is given.

    Of a loop it is the body, with what its first round is given; of what is not known there are none.
    """
    inputs = list(operation.inputs)
    if operation.type in CALLS:
        called, given = ["f"], inputs
    elif operation.type in CHOICES:
        called, given = ["then_branch", "else_branch"], inputs[1:]
    elif operation.type in LOOPS:
        called, given = ["body"], inputs
    else:
        return []
    found = [operation.graph._get_function(operation.get_attr(name).name) for name in called]
    if any(one is None or len(one.graph.inputs) != len(given) for one in found):
        return []
    return [(one.graph, given) for one in found]


def inner_graphs(graph: Any) -> Iterator[Any]:
    """Yield a traced graph, and those of the functions in it, each once."""
    seen, left = set[int](), [graph]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [each.graph for each in one._functions.values() if getattr(each, "graph", None) is not None]


def is_read_since_writes(read: Any, handle: Any, reading: Collection[str]) -> bool:
    """Return whether what was read of a handle is still so: no operation came later, but for those of these types."""
    return not any(one._id > read._id and one.type not in reading for one in handle.consumers())


def stop_cluster(coordinator: Any) -> None:
    """End the threads of a ClusterCoordinator; no call can follow."""
    coordinator._cluster.stop()


@contextlib.contextmanager
def worker_threads() -> Iterator[list[threading.Thread]]:
    """Give a list, which has at the end the threads of workers that a ClusterCoordinator has begun meanwhile."""
    before, found = set(threading.enumerate()), list[threading.Thread]()
    yield found
    begun = set(threading.enumerate()) - before
    found.extend(thread for thread in begun if thread.name.startswith(WORKER_THREAD))


def calls_fail(coordinator: Any) -> bool:
    """Return whether calls have failed on workers since one ended well."""
    alike = getattr(coordinator._cluster.failure_handler, "alike", None)
    return alike is not None and alike.failures.any


def all_failed_alike(coordinator: Any, error: Exception) -> bool:
    """Return whether every worker reported this error, since a call ended well, and no process has ended."""
    alike = getattr(coordinator._cluster.failure_handler, "alike", None)
    return alike is not None and alike.have_all_failed(getattr(error, "original_exception", None) or error)


def is_recovering(coordinator: Any) -> bool:
    """Return whether a ClusterCoordinator takes in a worker: another strategy made meanwhile would hang or crash."""
    handler = coordinator._cluster.failure_handler
    if isinstance(handler, PartialHandler):
        return handler.updating_since is not None
    return handler._cluster_due_for_update_or_finish.is_set() or handler._cluster_update_lock.locked()


def connected_workers() -> int:
    """Return how many workers TensorFlow's cluster has, which may lack some that its strategy was made for."""
    server_def = context.get_server_def()
    jobs = server_def.cluster.job if server_def is not None else []
    return sum(len(job.tasks) for job in jobs if job.name == "worker")


def forget_traces() -> None:
    """Have each `tf.function` that was called before be traced again when it is called next; call it before a strategy.

    TensorFlow sends a function to the members when it is traced. They would lack one that was called before, at import
    or in an earlier generation, where a step uses it: "Can't find a function".
    """
    for one in gc.get_objects():
        if type(one) is polymorphic_function.Function:
            one._function_cache.clear()


def context_id() -> int:
    """Return the number of this process's context on all servers of its cluster; another cluster gives another."""
    context.ensure_initialized()
    return int(pywrap_tfe.TFE_GetContextId(context.context()._context_handle))


def resource_names(handles: Sequence[Any]) -> list[tuple[str, str]]:
    """Return container and name of each variable's handle, by which every client of its server finds it.

    Call it with the handles' server as the device. TensorFlow draws the name of an eager variable there, and keeps it
    from the coordinator; it is written in the serialized handle (ResourceHandleProto).
    """
    if not handles:
        return []
    serialized = tf.stack([tf.raw_ops.SerializeTensor(tensor=handle) for handle in handles]).numpy()
    proto = type(tf.make_tensor_proto(0))
    found = [proto.FromString(RESOURCE_HANDLE + proto.FromString(one).tensor_content) for one in serialized]
    return [(one.resource_handle_val[0].container, one.resource_handle_val[0].name) for one in found]


def outermost(tensor: Any) -> Any:
    """Return the tensor outside of all functions that one within a function stands for."""
    while tf.is_symbolic_tensor(tensor):
        outer = [outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor]
        if not outer:
            break
        tensor = outer[0]
    return tensor


def handle_shape(handle: Any) -> tf.TensorShape:
    """Return the shape of the variable with this handle."""
    data = resource_variable_ops.get_eager_safe_handle_data(handle)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return tf.TensorShape(data.shape_and_type[0].shape if known else None)


def read_only_inputs(operation: Any) -> list[int]:
    """Return the numbers of the variables among its inputs that a call of a function leaves as they are."""
    try:
        return list(operation.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return []


def mutex(name: str) -> Any:
    """Return the mutex of that name on the device where it is asked for (TensorFlow's MutexV2)."""
    return tf.raw_ops.MutexV2(shared_name=name)


def arrival(tensors: Sequence[Any]) -> Any:
    """Return an operation that ends when these tensors have arrived on the device where it is asked for.

    TensorFlow's optimizations leave this one in place, and would take a control dependency for an Identity.
    """
    return tf.raw_ops.Assert(condition=True, data=[*tensors, 0])


@register_acd_resource_resolver
def _order_apart(operation: Any, reads: Any, writes: Any) -> bool:
    """Have tf.function order each operation that was made within `APART` by its own dependencies alone.

    Otherwise all that have a state would wait for each other: those on one ps for those on another.
    """
    del reads
    if writes or APART not in operation.name or not (operation.outputs or operation.inputs):
        return False
    writes.add((operation.outputs or operation.inputs)[0])
    return True


def patch_hdf5_format(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], listed: Callable[[Any], list[Any]]
) -> None:
    """Have `wrap` wrap what reads and writes a model's weights in a file .h5, and `listed` list a layer's."""
    for name in HDF5_FUNCTIONS:
        setattr(hdf5_format, name, wrap(getattr(hdf5_format, name)))
    hdf5_format._legacy_weights = listed


def load_saved_model_within(scope: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Have `tf.saved_model.load` make its variables within `scope`; tf_keras loads its models without that."""
    plain = saved_model_load.load_partial

    def load_partial(*given: Any, **named: Any) -> Any:
        with scope():
            return plain(*given, **named)

    saved_model_load.load_partial = load_partial


def read_split_kernels(read: Callable[[Any], Any]) -> None:
    """Have recurrent layers of tf_keras read a split weight by `read`: they give what they have read to a function."""
    plain = gru_lstm_utils.read_variable_value

    def read_variable_value(weight: Any) -> Any:
        return read(weight) if hasattr(weight, "variables") else plain(weight)

    gru_lstm_utils.read_variable_value = read_variable_value


@contextlib.contextmanager
def keeping_default_graph() -> Iterator[None]:
    """Have `clear_session` of either Keras and `reset_default_graph` keep the default graph meanwhile.

    The graph holds the strategy whose scope this is: in another one, variables would be made on the coordinator.
    """
    stack = ops._default_graph_stack
    stack.reset = lambda: None
    try:
        yield
    finally:
        del stack.reset


@contextlib.contextmanager
def tracing_saves() -> Iterator[None]:
    """Have what saves a SavedModel meanwhile trace all of it, and write nothing."""
    plain = saved_model_save.save_and_return_nodes

    def trace(obj: Any, export_dir: str, signatures: Any = None, options: Any = None, **_: Any) -> None:
        options = options or tf.saved_model.SaveOptions()
        saved_model_save._build_meta_graph(obj, signatures, options, meta_graph_pb2.MetaGraphDef())

    saved_model_save.save_and_return_nodes = trace
    try:
        yield
    finally:
        saved_model_save.save_and_return_nodes = plain


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Have TensorFlow and both Keras draw from other seeds meanwhile, and go on afterwards where they were.

    TensorFlow keeps a state for each pair of seeds that an operation was run with.
    """
    eager, of_keras = context.context(), tf_keras_backend._SEED_GENERATOR
    seed, drawn = eager._seed, getattr(eager, "_rng", None)  # without a seed there is no state
    generator = getattr(of_keras, "generator", None)
    if seed is not None:
        eager._seed, eager._rng = secrets.randbelow(2**31), random.Random()
    of_keras.generator = random.Random() if generator is not None else None
    with keras3_seeds_forgotten() if "keras" in sys.modules else contextlib.nullcontext():
        try:
            yield
        finally:
            eager._seed, eager._rng = seed, drawn
            of_keras.generator = generator


@contextlib.contextmanager
def keras3_seeds_forgotten() -> Iterator[None]:
    """Have `keras.random` of Keras 3 without a seed begin again, and go on afterwards where it was."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


def owner_of(resource: Any) -> Any:
    """Return the object that a resource's handle belongs to, as a table or a variable; None where nobody knows."""
    owner = getattr(resource, "_parent_trackable", None)
    return owner() if owner is not None else None


def track(root: Any, name: str, child: Any) -> None:
    """Have what saves `root` find the child by that name, without an attribute of the root."""
    root._track_trackable(child, name, overwrite=True)
