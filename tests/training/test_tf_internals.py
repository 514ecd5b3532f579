"""Private names of TensorFlow and Keras are still there, and still do what this project builds on."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import until

from trainer import testing  # isort: skip  before TensorFlow: it chooses the Keras

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.experimental.ops import data_service_ops
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context, executor
from tensorflow.python.eager.cancellation import CancellationManager
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tf_keras.src.mixed_precision import autocast_variable

from trainer.cluster.members import draining
from trainer.cluster.reach.ways import named_in
from trainer.core.task_id import TaskId
from trainer.training import strategies
from trainer.training.tables.whole_weights import see_whole_weights
from trainer.training.tf_internals.datasets import (
    converting_as_ever,
    drawing_from,
    forget_uncompressing,
    iterator_type_spec,
    sleep,
)
from trainer.training.tf_internals.executors import (
    default_executor,
    delete_executor,
    keep_function,
    make_executor,
    on_executor,
)
from trainer.training.tf_internals.graphs import resource_names
from trainer.training.tf_internals.variables import (
    autocast_dtype,
    full_names,
    moving_average,
    whole_of,
    wrap_autocast_variables,
)
from trainer.training.tf_internals.workers import (
    CallBudget,
    PartialHandler,
    WayLost,
    context_id,
    is_recovering,
    make_coordinator,
    stop_cluster,
    worker_threads,
)

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
PRIVATE = ("tensorflow.python", "tensorflow.core", "tf_keras.src", "keras.src")
HANDLER = cluster_coordinator.WorkerPreemptionHandler


def calls(function: Any) -> set[str]:
    """Return what a function reads and calls, as written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name | ast.Call)}


def test_private_modules_are_imported_in_one_place() -> None:
    found = set()
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            if any(f"{name}.".startswith(f"{private}.") for name in names for private in PRIVATE):
                found.add(str(path.relative_to(TRAINER)))
    there = {str(path.relative_to(TRAINER)) for path in (TRAINER / "training/tf_internals").glob("*.py")}
    # By name: whether a fork is safe, what a server needs, and Keras 3's, with which programs are loaded before
    # TensorFlow's.
    assert found - there == {"process/warm_start.py", "process/server_library.py", "core/layer_names.py"}


def test_the_handler_of_failures_is_made_and_used_as_ever() -> None:
    cluster = calls(cluster_coordinator.Cluster.__init__)
    assert "WorkerPreemptionHandler(context.get_server_def(), self)" in cluster
    assert "'/job:worker/replica:0/task:%d' % i" in inspect.getsource(cluster_coordinator.Cluster.__init__).replace(
        '"', "'"
    )
    for closure in ("_process_closure", "_process_resource_closure"):
        source = inspect.getsource(getattr(cluster_coordinator.Worker, closure))
        assert "self.failure_handler.wait_on_failure(" in source
        assert "worker_device_name=self.device_name" in source
        assert "except Exception as e" in source  # which lets SystemExit through
    assert "_preemption_handler" in inspect.getsource(HANDLER.__init__)


def test_a_lost_way_is_a_workers_failure_to_tensorflow_and_no_ps_s() -> None:
    lost = WayLost(1, "worker-1 can't reach ps-1 at 10.0.3.21:2300 (its call failed)")
    aborted = cluster_coordinator.ClosureAbortedError(lost)
    for error in (lost, aborted, cluster_coordinator.ClosureInputError(aborted)):
        assert cluster_coordinator._is_worker_failure(error)
        assert not cluster_coordinator._is_ps_failure(error)
    real = tf.errors.UnavailableError(None, None, f"{cluster_coordinator._RPC_ERROR_FROM_PS}/replica:0/task:1 while")
    assert named_in(str(real)) == [TaskId("ps", 1)]


def test_the_handler_waits_for_its_condition_with_its_lock() -> None:
    source = inspect.getsource(HANDLER.wait_on_failure)
    assert list(inspect.signature(HANDLER.wait_on_failure).parameters) == [
        *inspect.signature(PartialHandler.wait_on_failure).parameters
    ]
    lock, due, wait = (
        source.index("with self._cluster_update_lock:"),
        source.index("self._cluster_due_for_update_or_finish.set()"),
        source.index("self._worker_up_cond.wait("),
    )
    assert source.index("on_failure_fn(e)") < lock < due < wait < source.index("on_recovery_fn()")
    assert "self._should_preemption_thread_run = False" in inspect.getsource(HANDLER.stop)


class Cluster:
    """What the handler asks of TensorFlow's cluster."""

    closure_queue = SimpleNamespace(_cancellation_mgr=SimpleNamespace(is_cancelled=False))

    def _record_and_ignore_transient_ps_failure(self, error: Any) -> bool:
        return False

    _record_and_ignore_transient_timeouts = _record_and_ignore_transient_ps_failure


class Members:
    """Three workers, of whom a test says who answers."""

    handler: Any = None
    workers = ("worker-0", "worker-2", "worker-3")

    def __init__(self) -> None:
        self.serving: set[str] = set()
        self.lost: list[str] = []
        self.taken: list[set[str]] = []

    def workers_serving(self, since: float = 0.0) -> set[str]:
        return self.serving

    def worker_lost(self, task: str) -> None:
        self.lost.append(task)

    def process(self, task: str) -> str:
        return task

    def has_ended(self, task: str, process: str | None) -> bool:
        return False

    def lost_ps(self) -> list[str]:
        return []

    def way_lost(self, task: str, error: str) -> str | None:
        return None

    def workers_taken_in(self, tasks: Any) -> None:
        self.taken.append(set(tasks))


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, str]]:
    """What TensorFlow hears about its workers."""
    found: list[dict[int, str]] = []

    def update(self: Any, server_def: Any) -> None:
        (job,) = (job for job in server_def.cluster.job if job.name == "worker")
        found.append(dict(job.tasks))

    monkeypatch.setattr(context.Context, "update_server_def", update)
    return found


def test_only_those_who_are_back_are_taken_in(updates: list[dict[int, str]]) -> None:
    import threading

    from tensorflow import errors
    from tensorflow.core.protobuf import tensorflow_server_pb2

    server_def = tensorflow_server_pb2.ServerDef()
    for name in ("worker", "ps"):
        job = server_def.cluster.job.add()
        job.name = name
        job.tasks.update({0: "a:1", 1: "b:1", 2: "c:1"})
    members = Members()
    handler = PartialHandler(server_def, Cluster(), members)
    recovered, put_back = [], []

    def fails(number: int) -> None:
        device = f"/job:worker/replica:0/task:{number}"
        with handler.wait_on_failure(
            on_failure_fn=lambda error: put_back.append(number),
            on_recovery_fn=lambda: recovered.append(number),
            worker_device_name=device,
        ):
            raise errors.UnavailableError(None, None, f"Socket closed, from {device}")

    threads = [threading.Thread(target=fails, args=(number,), daemon=True) for number in (0, 2)]
    for thread in threads:
        thread.start()
    until(lambda: len(members.lost) == 2, "both calls have failed")
    assert (set(put_back), set(members.lost), handler.busy) == ({0, 2}, {"worker-0", "worker-3"}, {})
    threads[0].join(0.5)
    assert updates == []
    # One is back; the one in the middle, which TensorFlow has not lost, says nothing: it would be waited for.
    members.serving = {"worker-0"}
    threads[0].join(0.5)
    assert updates == []
    members.serving = {"worker-0", "worker-2"}
    threads[0].join(30)
    assert (updates, recovered, members.taken) == ([{0: "a:1", 1: "b:1"}], [0], [{"worker-0"}])
    members.serving = {"worker-0", "worker-2", "worker-3"}
    threads[1].join(30)
    assert (updates[1:], recovered) == ([{0: "a:1", 1: "b:1", 2: "c:1"}], [0, 2])
    # A thread that waits ends with the generation, and reports nothing.
    members.serving = set()

    def ends() -> None:
        with contextlib.suppress(SystemExit):  # of which Python says nothing in a thread, and pytest does
            fails(0)

    waiting = threading.Thread(target=ends, daemon=True)
    waiting.start()
    until(lambda: "worker-0" in handler.lost.since, "the call has failed")
    handler.stop()
    waiting.join(30)
    assert not waiting.is_alive()
    assert recovered == [0, 2]


def test_an_executor_is_let_go_of_as_ever_but_for_the_wait() -> None:
    """`executor_scope` makes a reference of TensorFlow's default executor and drops it."""
    assert {"self.wait()", "pywrap_tfe.TFE_DeleteExecutor(self._handle)"} <= calls(executor.Executor.__del__) or (
        executor.Executor.__del__ is delete_executor
    )
    assert "TFE_ContextGetExecutorForThread(" in inspect.getsource(context.Context.executor.fget)
    assert callable(pywrap_tfe.TFE_DeleteExecutor)


def test_a_mutex_lets_another_in_when_one_that_waits_for_it_is_cancelled() -> None:
    """TensorFlow's fault, for which each mutex has a gate (trainer/training/updates/atomic_updates.py)."""
    inside, leave = threading.Semaphore(0), threading.Event()

    def hold() -> Any:
        def stay(value: Any) -> Any:
            inside.release()
            leave.wait(30)
            return value

        def take() -> tf.Tensor:
            lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name="broken"))
            with tf.control_dependencies([lock]):
                held = tf.numpy_function(stay, [tf.zeros([])], tf.float32)
            with tf.control_dependencies([held]):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
            return held

        return tf.function(take, autograph=False).get_concrete_function()

    def wait(function: Any) -> None:
        with contextlib.suppress(tf.errors.CancelledError):
            function()

    holder, waiting, next_one = (hold() for _ in range(3))
    cancellation = CancellationManager()
    threads = [threading.Thread(target=wait, args=(one,)) for one in (holder, next_one)]
    threads.insert(1, threading.Thread(target=wait, args=(cancellation.get_cancelable_function(waiting),)))
    threads[0].start()
    assert inside.acquire(timeout=30)
    threads[1].start()
    time.sleep(1)  # by then it waits for the mutex
    cancellation.start_cancel()
    threads[1].join(30)
    threads[2].start()
    try:
        assert inside.acquire(timeout=10), "TensorFlow keeps the next one out: the gates can go"
    finally:
        leave.set()
        for thread in threads:
            thread.join(30)


def test_a_function_that_nobody_uses_is_forgotten_by_no_member(coordinator: Any) -> None:
    """TensorFlow would ask each member, with Python's lock: a frozen one would stop this process."""
    assert "self._bound_context.remove_function(self.name)" in calls(AtomicFunction.__del__)
    assert "context.Context.remove_function = keep_function" in inspect.getsource(make_coordinator)
    plain = context.Context.remove_function
    if plain is not keep_function:
        assert "pywrap_tfe.TFE_ContextRemoveFunction(self._handle, name)" in calls(plain)
    context.Context.remove_function = keep_function
    try:
        one = tf.function(lambda: tf.zeros([]), autograph=False).get_concrete_function()
        name = one.name
        del one
        gc.collect()
        known = {tf.compat.as_text(each) for each in context.context().list_function_names()}
        assert tf.compat.as_text(name) in known
    finally:
        context.Context.remove_function = plain


@pytest.fixture(scope="module")
def coordinator() -> Any:
    return tf.distribute.coordinator.ClusterCoordinator(testing.in_process_cluster(workers=1, ps=1))


def test_a_per_worker_dataset_tells_the_type_of_a_workers_iterator(coordinator: Any) -> None:
    dataset = coordinator.create_per_worker_dataset(tf.function(lambda: tf.data.Dataset.range(3)))
    spec = iterator_type_spec(coordinator.strategy, dataset)
    following = tf.function(lambda part: next(part)).get_concrete_function(spec)
    value = coordinator.schedule(following, args=(iter(dataset),))
    coordinator.join()
    assert value.fetch() == 0


def test_a_cluster_says_that_it_takes_in_a_worker(coordinator: Any) -> None:
    assert not is_recovering(coordinator)
    with coordinator._cluster.failure_handler._cluster_update_lock:
        assert is_recovering(coordinator)


class Dying(Members):
    """Three workers whose processes have ended whenever a call fails on them."""

    def process(self, task: str) -> str:
        return task

    def has_ended(self, task: str, process: str | None) -> bool:
        return True

    def killed_by_call(self, tasks: list[str], steps: int) -> Exception:
        return RuntimeError(" ".join(tasks))


@pytest.mark.parametrize(("leaving", "ends"), [(set(), True), ({"worker-2"}, False)])
def test_a_call_answers_for_no_worker_that_left_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: set[str], ends: bool
) -> None:
    monkeypatch.setattr(draining, "LEAVING", tmp_path)
    for task in leaving:
        (tmp_path / task).touch()
    put_back: list[Any] = []
    failed: list[Exception] = []
    workers = [SimpleNamespace(_on_closure_failure=lambda call, error: put_back.append(call)) for _ in Members.workers]
    queue = SimpleNamespace(mark_failed=failed.append)
    CallBudget(SimpleNamespace(closure_queue=queue, workers=workers), Dying())

    class Call:
        _args = ()

        def maybe_call_with_output_remote_value(self, function: Any) -> None:
            pass

    call = Call()
    for worker in workers:
        worker._on_closure_failure(call, RuntimeError("gone"))
    assert len(put_back) == (2 if ends else 3)
    assert [str(error) for error in failed] == (["worker-0 worker-2 worker-3"] if ends else [])


def test_a_stopped_cluster_has_no_threads() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if "Worker" in thread.name]

    before = set(threading.enumerate())
    with worker_threads() as begun:
        stopped = tf.distribute.coordinator.ClusterCoordinator(testing.in_process_cluster(workers=2, ps=1))
    assert len(begun) == 2
    assert threads()
    stop_cluster(stopped)
    end = time.monotonic() + 60
    while left := threads():
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_variable_is_found_by_the_name_in_its_handle() -> None:
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)]
    for variable, (container, name) in zip(variables, resource_names([v.handle for v in variables]), strict=True):
        options = {"container": container, "shared_name": name, "shape": variable.shape}
        handle = tf.raw_ops.VarHandleOp(dtype=variable.dtype, **options)
        found = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
        assert found.numpy().tolist() == variable.numpy().tolist()
    assert resource_names([]) == []


def test_a_context_keeps_its_number() -> None:
    # test_handover.py closes contexts by the numbers that they have in a cluster.
    assert context_id() == context_id() != 0


def test_a_shard_knows_its_whole() -> None:
    shards = [tf.Variable([1.0]), tf.Variable([2.0])]
    assert whole_of(shards[0]) is None
    whole = tf.__internal__.distribute.ShardedVariable(shards)
    assert [whole_of(shard) for shard in shards] == [whole, whole]


def test_a_checkpoint_has_the_names_of_its_variables(tmp_path: Path) -> None:
    prefix = tf.train.Checkpoint(one=tf.Variable(1.0, name="here")).write(str(tmp_path / "ckpt"))
    assert full_names(tf.train.load_checkpoint(prefix)) == {"one/.ATTRIBUTES/VARIABLE_VALUE": "here"}


def test_a_checkpoint_has_the_name_of_a_split_variable(tmp_path: Path) -> None:
    see_whole_weights()
    parts = [tf.Variable([1.0], name=f"table/part_{number}") for number in range(2)]
    split = tf.train.Checkpoint(one=tf.__internal__.distribute.ShardedVariable(parts))
    names = full_names(tf.train.load_checkpoint(split.write(str(tmp_path / "ckpt"))))
    assert names == {"one/.ATTRIBUTES/VARIABLE_VALUE": "table"}


def test_the_average_of_a_weight_is_found() -> None:
    optimizer, weights = tf.keras.optimizers.SGD(use_ema=True), [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    optimizer.build(weights)
    assert [moving_average(optimizer, weight).numpy().tolist() for weight in reversed(weights)] == [[3.0], [1.0, 2.0]]
    assert moving_average(optimizer, tf.Variable(1.0)) is None


@pytest.mark.parametrize(
    ("address", "other"), [("10.0.0.3:2222", "[::ffff:10.0.0.3]:2222"), ("[fd00::3]:2222", ""), ("ps.example:2222", "")]
)
def test_tensorflow_gets_another_address_for_each_process_of_a_ps(
    monkeypatch: pytest.MonkeyPatch, address: str, other: str
) -> None:
    monkeypatch.setattr(strategies, "WRITTEN", {})
    written = [strategies.write_address(address, process) for process in ("a", "a", "b", "b", "c")]
    assert written == [address, address, other or address, other or address, address]


def test_without_a_seed_a_shuffle_that_interleave_makes_has_another_order_each_time() -> None:
    with drawing_from(None, tf.constant(0, tf.int64)):
        numbers = tf.data.Dataset.range(4).interleave(lambda _: tf.data.Dataset.range(16).shuffle(16).batch(16))
    assert len({tuple(order) for order in numbers.as_numpy_iterator()}) == 4


def test_a_layer_with_a_mixed_policy_has_its_weights_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = autocast_variable.create_autocast_variable
    while hasattr(plain, "of_psfleet"):  # a training in this process before
        plain = inspect.getclosurevars(plain).nonlocals["plain"]
    monkeypatch.setattr(autocast_variable, "create_autocast_variable", plain)
    wrapped = []

    def wrap(plain: Any, variable: Any) -> Any:
        wrapped.append(variable)
        return plain(variable)

    for _ in range(2):  # once is enough
        wrap_autocast_variables(wrap)
    seen = []

    class Line(tf.keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight("weight", ())

        def call(self, inputs: Any) -> Any:
            seen.append(autocast_dtype())
            return inputs * self.weight

    layer = Line(dtype="mixed_bfloat16")
    assert layer(tf.ones([1])).dtype == tf.bfloat16
    assert seen == [tf.bfloat16]
    assert autocast_dtype() is None
    assert len(wrapped) == 1
    assert isinstance(layer.weight, autocast_variable.AutoCastVariable)


def test_a_thread_has_an_executor_of_its_own_for_a_while() -> None:
    before = default_executor()
    assert not before.is_async()
    own = make_executor()
    assert own.is_async()
    with on_executor(own, before):
        assert default_executor().is_async()
    assert not default_executor().is_async()


def test_what_map_is_given_is_translated_and_nothing_around_it() -> None:
    @tf.function(autograph=False)
    def make() -> Any:
        with converting_as_ever():
            return tf.data.Dataset.range(3).map(sign)

    def sign(number: tf.Tensor) -> tf.Tensor:
        if number > 1:
            return number
        return -number

    assert list(make().as_numpy_iterator()) == [0, -1, 2]


def test_a_dataset_sleeps() -> None:
    began = time.monotonic()
    assert list(tf.data.Dataset.range(2).apply(sleep(50_000)).as_numpy_iterator()) == [0, 1]
    assert time.monotonic() - began >= 0.09  # two clocks


def test_what_uncompresses_is_made_again() -> None:
    """TensorFlow keeps it for all datasets of the same elements, also beyond the cluster that it was made in."""
    spec = data_service_ops.HashableElementSpec(tf.TensorSpec([], tf.int64))
    first = data_service_ops._get_uncompress_func(spec)
    assert data_service_ops._get_uncompress_func(spec) is first
    forget_uncompressing()
    assert data_service_ops._get_uncompress_func(spec) is not first
