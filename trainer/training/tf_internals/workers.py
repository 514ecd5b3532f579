"""TensorFlow's coordinator and its workers: which take part, and what becomes of a call that fails.

TensorFlow takes a worker that failed in again when all workers are back: until then no other is taken in. The
handler made here takes in each worker that is back, and leaves out the others (docs/decisions/0082).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context, executor
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from trainer.cluster.member import LostWorkers
from trainer.cluster.members.draining import is_leaving
from trainer.cluster.members.membership import Membership
from trainer.core.contracts import Coordinator, Strategy
from trainer.core.own_frames import cause
from trainer.core.repeated_failures import RepeatedFailures, failed_alike
from trainer.training.tf_internals.executors import delete_executor, keep_function
from trainer.training.tf_internals.per_worker import PerWorkerResources

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05
WAIT_SECONDS = 0.1
DEATHS = 3  # of workers in a row, which are a call's fault
WORKER_THREAD = "WorkerClosureProcessingLoop-"
CONFIRM_SECONDS = 3.0  # until the heartbeat has heard that a process ended


class WayLost(tf.errors.UnavailableError):
    """A worker's call failed since its way to another member is broken, while that member lives.

    TensorFlow takes it for the worker's failure.
    """

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(None, None, f"/job:worker/replica:0/task:{worker}: {why}")


class ReadmissionCondition(threading.Condition):
    """What a worker's thread waits on after a failure: until this worker is taken in, not just any."""

    def __init__(self, lock: Any, lost: Container[str], runs: Callable[[], bool]) -> None:
        """`lost` has the workers that are not taken in, `runs` tells whether the generation goes on."""
        super().__init__(lock)
        self._lost, self._runs = lost, runs
        self._thread = threading.local()

    def is_for(self, task: str) -> None:
        """This thread gives calls to this worker."""
        self._thread.task = task

    def wait(self, timeout: float | None = None) -> bool:
        """Wait with the lock held, as TensorFlow does; ends the thread when the generation is over."""
        while self._runs() and self._thread.task in self._lost:
            super().wait(WAIT_SECONDS)
        if not self._runs():
            raise SystemExit  # of this thread alone
        return True


class PartialHandler(cluster_coordinator.WorkerPreemptionHandler):
    """Takes in the workers that are back, without waiting for those that are not."""

    def __init__(self, server_def: Any, cluster: Any, members: Membership) -> None:
        self._members = members
        self.tasks = list(members.workers)
        """The workers, in TensorFlow's order."""
        self._whole = copy.deepcopy(server_def)
        self.lost = LostWorkers()
        self.busy: dict[str, float] = {}
        """The workers with a call, and since when."""
        self.updating_since: float | None = None
        """Since when TensorFlow is taking in workers."""
        self.budget: CallBudget
        self.resources: PerWorkerResources
        self.alike = AlikeFailures(members)
        super().__init__(server_def, cluster)
        self._worker_up_cond = ReadmissionCondition(
            self._cluster_update_lock, self.lost.since, lambda: self._should_preemption_thread_run
        )

    def announce(self, task: str, address: str) -> None:
        """Have a worker taken in, behind the others, once it answers: as if TensorFlow had lost it."""
        with self._cluster_update_lock:
            [job] = [job for job in self._whole.cluster.job if job.name == "worker"]
            job.tasks[len(self.tasks)] = address
            self.tasks.append(task)
            self.lost.since[task] = time.monotonic()
            self._cluster_due_for_update_or_finish.set()

    @contextlib.contextmanager
    def wait_on_failure(
        self,
        on_failure_fn: Callable[[Any], None] | None = None,
        on_transient_failure_fn: Callable[[], None] | None = None,
        on_recovery_fn: Callable[[], None] | None = None,
        worker_device_name: str = "(unknown)",
    ) -> Iterator[None]:
        """Do as TensorFlow's handler does, and note which worker it is about."""
        task = self.tasks[int(worker_device_name.rpartition(":")[2])]
        self._worker_up_cond.is_for(task)

        def failed(error: object) -> None:
            self.lost.since[task] = time.monotonic()
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
        error = cause(error)
        if isinstance(error, tf.errors.UnavailableError) and (why := self._members.way_lost(task, str(error))):
            raise WayLost(self.tasks.index(task), why) from error

    def _preemption_handler(self) -> None:
        while True:
            self._cluster_due_for_update_or_finish.wait()
            if not self._should_preemption_thread_run:
                return
            if not self._take_in():
                time.sleep(POLL_SECONDS)

    def _take_in(self) -> bool:
        """Take in those that are back; returns whether any was."""
        found = self.lost.poll(self.tasks, self._members.workers_serving, time.monotonic())
        if found is None:
            self.updating_since = None
            self._clear_if_done()
            return False
        back, gone = found
        if not back:
            return False
        server_def = copy.deepcopy(self._whole)
        for job in server_def.cluster.job:
            for task in gone if job.name == "worker" else ():
                del job.tasks[self.tasks.index(task)]
        self.updating_since = self.updating_since or time.monotonic()
        try:
            with self._cluster_update_lock:
                context.context().update_server_def(server_def)
                for task in back:
                    self.lost.since.pop(task)
                self._members.workers_taken_in(back)
                self._worker_up_cond.notify_all()
        except Exception as error:
            # A ps that is gone is found by the heartbeat, and a worker is left out the next time.
            log.warning("cannot take in %s, trying again: %s", ", ".join(sorted(back)), error)
            return False
        self.updating_since = None
        self._clear_if_done()
        return True

    def _clear_if_done(self) -> None:
        with self._cluster_update_lock:
            if not self.lost.since and self._should_preemption_thread_run:
                self._cluster_due_for_update_or_finish.clear()


class CallBudget:
    """Ends the run when one call has killed several workers in a row: TensorFlow would give it to the next."""

    def __init__(self, cluster: Any, members: Membership) -> None:
        """Watch the workers of TensorFlow's cluster."""
        self._queue = cluster.closure_queue
        self._members = members
        self._deaths: weakref.WeakKeyDictionary[Any, list[tuple[str, str | None]]] = weakref.WeakKeyDictionary()
        for task, worker in zip(members.workers, cluster.workers, strict=True):
            self.watch(task, worker)

    def watch(self, task: str, worker: Any) -> None:
        """Count the calls that fail on this worker, too."""
        worker._on_closure_failure = partial(self._failed, task, worker._on_closure_failure)

    def _failed(self, task: str, put_back: Callable[[Any, Any], None], closure: Any, error: object) -> None:
        """Have the call run again, unless it has killed too many; this worker's own thread waits meanwhile."""
        if is_leaving(task) or isinstance(error, WayLost):
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

    def __init__(self, members: Membership) -> None:
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
            error = cause(e)
            classes = [kind.__name__ for kind in type(error).__mro__]
            self.failures.add(task, self._members.process(task), classes, str(error))
            if self.have_all_failed(error):
                raise failed_alike(error) from error
            raise

    def have_all_failed(self, error: Exception) -> bool:
        """Return whether each worker that answers has failed so, and no member's process has ended; this waits."""
        if not self._are_alike(error):
            return False
        self._members.workers_serving(time.monotonic())
        time.sleep(CONFIRM_SECONDS)  # the ended ones are known then
        return not self._members.lost_ps() and self._are_alike(error)

    def _are_alike(self, error: Exception) -> bool:
        workers = [(task, self._members.process(task)) for task in sorted(self._members.workers_serving())]
        if not self.failures.are_the_programs(str(error), workers):
            return False
        return not any(self._members.has_ended(*worker) for worker in workers)


def call_steps(closure: Any) -> int:
    """Return how many steps a call has: the first number of its second argument; 0 of an evaluation's call."""
    return int(closure._args[1][0]) if len(closure._args) == 3 else 0


def make_coordinator(strategy: Strategy, members: Membership | None) -> Coordinator:
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
    members.handler = handler = coordinator._cluster.failure_handler
    handler.resources = PerWorkerResources(coordinator)
    handler.budget = CallBudget(coordinator._cluster, members)
    handler.alike.clear_when_calls_end(coordinator._cluster.closure_queue)
    return coordinator


def ps_of(strategy: Strategy) -> int:
    """Return the number of parameter servers of a ParameterServerStrategy."""
    return int(strategy.extended._num_ps)


def stop_cluster(coordinator: Coordinator) -> None:
    """End the threads of a ClusterCoordinator; no call can follow."""
    coordinator._cluster.stop()


@contextlib.contextmanager
def worker_threads() -> Iterator[list[threading.Thread]]:
    """Give a list, which has at the end the threads of workers that a ClusterCoordinator has begun meanwhile."""
    before, found = set(threading.enumerate()), list[threading.Thread]()
    yield found
    begun = set(threading.enumerate()) - before
    found.extend(thread for thread in begun if thread.name.startswith(WORKER_THREAD))


def calls_fail(coordinator: Coordinator) -> bool:
    """Return whether calls have failed on workers since one ended well."""
    alike = getattr(coordinator._cluster.failure_handler, "alike", None)
    return alike is not None and alike.failures.any


def all_failed_alike(coordinator: Coordinator, error: Exception) -> bool:
    """Return whether every worker reported this error, since a call ended well, and no process has ended."""
    alike = getattr(coordinator._cluster.failure_handler, "alike", None)
    return alike is not None and alike.have_all_failed(cause(error))


def workers_out(coordinator: Coordinator) -> dict[int, float]:
    """Return the workers that TensorFlow has lost, by their numbers, and since when (of time.monotonic)."""
    handler = coordinator._cluster.failure_handler
    if not isinstance(handler, PartialHandler):
        return {}
    return {handler.tasks.index(task): since for task, since in dict(handler.lost.since).items()}


def is_recovering(coordinator: Coordinator) -> bool:
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
