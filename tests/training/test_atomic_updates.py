"""Each update of a variable with its slots is one act, whatever the optimizer: replayed one by one it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, Timer
from typing import Any

import numpy as np
import pytest

from trainer.training.keras.keras3 import row_updates as rows_of_keras3
from trainer.training.steps.step_copy import StepCopy
from trainer.training.tables.row_updates import leave_momentum_out, update_by_rows
from trainer.training.updates import joined
from trainer.training.updates.atomic_updates import GATE, AtomicUpdates, mutex_name
from trainer.training.updates.one_update import gather, gather_keras3

# isort: split
import keras
import tensorflow as tf
from replay import Recorded, differing

pytestmark = pytest.mark.timeout(600)
ROWS, WIDTH, WORKERS, UPDATES = 256, 8, 4, 75
START = np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)
Make = Callable[[], Any]
two, legacy, three = tf.keras.optimizers, tf.keras.optimizers.legacy, keras.optimizers
# Names of optimizers, which may have arguments, by the Keras that they are of.
TF_KERAS = (
    *("Adam(0.1)", "Nadam(0.1)", "SGD(0.1, momentum=0.9, nesterov=True)", "RMSprop(0.1, centered=True, momentum=0.5)"),
    *("Adam(0.1, amsgrad=True)", "AdamW(0.1)", "Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
    *("SGD(0.1)", "Adafactor(0.1)", "Lion(0.1)", "Adam(0.1, clipnorm=0.5)", "Adam(0.1, global_clipnorm=0.5)"),
    *("Adam(0.1, use_ema=True, weight_decay=0.01)", "SGD(0.1, use_ema=True)", "SGD(0.1, weight_decay=0.01)"),
    "Adagrad(0.1, use_ema=True, weight_decay=0.01, clipvalue=0.1)",
)
LEGACY = (
    *("Adam(0.1)", "Nadam(0.1)", "Adam(0.1, amsgrad=True)", "SGD(0.1, momentum=0.9)", "RMSprop(0.1, centered=True)"),
    *("Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
)
KERAS_3 = (
    *("Adam(0.1)", "Nadam(0.1)", "SGD(0.1, momentum=0.9)", "RMSprop(0.1, centered=True, momentum=0.5)", "Lion(0.1)"),
    *("Adam(0.1, amsgrad=True)", "AdamW(0.1)", "Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Adagrad(0.1)"),
    *(
        "Adafactor(0.1)",
        "Lamb(0.1)",
        # Of raw variables Muon can't ask for the path that tells an embedding.
        "Muon(0.1, weight_decay=0.1, adam_weight_decay=None, exclude_embeddings=False)",
        "Adam(0.1, use_ema=True, weight_decay=0.01)",
        "SGD(0.1, clipnorm=0.5)",
    ),
)
# With `lazy_optimizers`: rows of a table, and the dense bias, are changed by the same code.
LAZY = {
    two: (*TF_KERAS[:6], "Adamax(0.1)", "Adadelta(0.1)", "Ftrl(0.1)", "Lion(0.1)", *TF_KERAS[13:18]),
    three: (*KERAS_3[:4], "Adam(0.1, amsgrad=True)", "AdamW(0.1)", "Adamax(0.1)", "Ftrl(0.1)", KERAS_3[-2]),
}
QUICK = {two: TF_KERAS[:2] + TF_KERAS[-4:-3], legacy: LEGACY[:2], three: KERAS_3[:1] + KERAS_3[-2:-1]}
OPTIMIZERS = [
    pytest.param(
        (kind, name),
        marks=[] if name in QUICK[kind] else [pytest.mark.matrix],
        id=f"{kind.__name__.removesuffix('.optimizers').split('.')[-1]}-{name}",
    )
    for kind, names in ((two, TF_KERAS), (legacy, LEGACY), (three, KERAS_3))
    for name in names
]


class Table(tf.keras.layers.Layer):
    """A table whose gradient names rows, and a bias whose gradient doesn't; both have a constraint."""

    def __init__(self, constraint: Any = None) -> None:
        super().__init__()
        own = {"constraint": constraint} if constraint else {}
        self.table = self.add_weight("table", [ROWS, WIDTH], initializer=lambda *_, **__: tf.constant(START), **own)
        self.bias = self.add_weight("bias", [WIDTH], initializer=lambda *_, **__: tf.constant(START[0]), **own)


class Trained:
    """An optimizer as `trainer` has it, and what it trains."""

    def __init__(
        self, made: tuple[Any, str], record: Any = None, constraint: Any = None, *, lazy: bool = False
    ) -> None:
        kind, name = made
        self.optimizer: Any = eval(f"kind.{name}", {"kind": kind})
        self.weights = Table(constraint)
        variables = self.variables = [self.weights.table, self.weights.bias]
        if hasattr(self.optimizer, "build"):
            self.optimizer.build(variables)
        self.updates: AtomicUpdates | None = None
        if record is not None:
            gather_keras3(self.optimizer) if kind is three else gather(self.optimizer)
            if lazy:
                model = tf.Module()
                model.optimizer = self.optimizer
                (rows_of_keras3.update_by_rows if kind is three else update_by_rows)(model, lazy=True)
            self.updates = AtomicUpdates(tf.distribute.get_strategy(), record)

    def step(self, ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(self.weights.table, ids) * self.weights.bias - 1) ** 2)
        gradients = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True)))

    def traced(self) -> Any:
        @tf.function(autograph=False)
        def step(ids: Any) -> None:
            if self.updates is None:
                self.step(ids)
            else:
                with self.updates.active():
                    self.step(ids)

        return step.get_concrete_function(tf.TensorSpec([None], tf.int64))

    @property
    def state(self) -> list[np.ndarray]:
        found = self.optimizer.variables() if callable(self.optimizer.variables) else self.optimizer.variables
        return [np.array(one) for one in (*self.variables, *found)]


def by_many(step: Any, seed: int = 0) -> None:
    """Run a step on several threads at once, as workers have a ps do."""

    def work(worker: int) -> None:
        generator = np.random.default_rng([seed, worker])
        for _ in range(UPDATES):
            step(tf.constant(generator.integers(ROWS, size=6)))

    with ThreadPoolExecutor(WORKERS) as workers:
        for future in [workers.submit(work, number) for number in range(WORKERS)]:
            future.result()


@pytest.fixture(autouse=True, scope="module")
def _as_written() -> Iterator[None]:
    """Have no optimization of graphs round otherwise in a replay than before."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(before)


@pytest.mark.parametrize("made", OPTIMIZERS)
def test_updates_of_many_workers_are_some_order_of_whole_ones(made: tuple[Any, str]) -> None:
    recorded = Recorded()
    trained = Trained(made, recorded)
    by_many(trained.traced())
    count, found = recorded.replay()
    assert count >= 2 * WORKERS * UPDATES
    assert differing(found) == {}
    assert not np.array_equal(trained.state[0], START)


@pytest.mark.parametrize("made", [pytest.param(one, id=one[1]) for one in ((two, "Nadam(0.1)"), (three, "Adam(0.1)"))])
def test_updates_in_one_act_are_some_order_of_whole_ones(
    made: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "may_wait", lambda update: True)
    recorded = Recorded()
    trained = Trained(made, recorded)
    by_many(trained.traced())
    assert any(len(update.handles) > 3 for update, *_ in recorded.staged)  # of the table and the bias
    count, found = recorded.replay()
    assert count >= WORKERS * UPDATES
    assert differing(found) == {}
    assert not np.array_equal(trained.state[0], START)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(
            (kind, name),
            marks=[] if number == 0 else [pytest.mark.matrix],
            id=f"{'keras3' if kind is three else 'tf_keras'}-{name}",
        )
        for kind, names in LAZY.items()
        for number, name in enumerate(names)
    ],
)
def test_lazy_updates_of_many_workers_are_some_order_of_whole_ones(made: tuple[Any, str]) -> None:
    recorded = Recorded()
    trained = Trained(made, recorded, lazy=True)
    by_many(trained.traced())
    count, found = recorded.replay()
    assert count >= 2 * WORKERS * UPDATES
    assert differing(found) == {}
    assert not np.array_equal(trained.state[0], START)


@pytest.mark.parametrize("constraint", [None, "non_neg"])
@pytest.mark.parametrize("made", OPTIMIZERS)
def test_an_update_alone_is_keras_own(made: tuple[Any, str], constraint: str | None) -> None:
    if made[0] is three and constraint:
        pytest.skip("Keras 3 has constraints in variables of its own: test_keras3_parts.py")
    if made[0] is legacy and constraint:
        pytest.skip("legacy optimizers take no constraint of a table that is looked up")
    ours, plain = Trained(made, lambda *_: [], constraint), Trained(made, None, constraint)
    # In a graph tf_keras's Nadam multiplies its momenta once for each variable; without one it is right.
    one, other = ours.traced(), plain.step if made == (two, "Nadam(0.1)") else plain.traced()
    for ids in ([1, 5, 5], [200, 3, 1], [7, 7, 7], [0, 255, 1]):
        one(tf.constant(ids, tf.int64))
        other(tf.constant(ids, tf.int64))
    for value, expected in zip(ours.state, plain.state, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert not np.array_equal(ours.state[0], START)


@pytest.mark.parametrize("made", [pytest.param(one, id=one[1]) for kind in QUICK for one in [(kind, QUICK[kind][0])]])
def test_with_the_mutex_an_update_waits_for_nothing_but_the_ps(made: tuple[Any, str]) -> None:
    """Else a worker that is slow or gone would keep the others from the variable."""
    graph = Trained(made, lambda *_: []).traced().graph
    locks = locks_in(graph)
    assert len(locks) >= 2
    for lock in locks:
        before = waited_for(lock)
        within = {one for one in graph.get_operations() if lock in one.control_inputs}
        assert {one.type for one in within} & {"AssignSubVariableOp", "ResourceApplyAdam", "AssignVariableOp"}
        awaited = {each for one in within for each in waits_for(one)} - within - before - {lock}
        assert not [one.name for one in awaited if one.type not in ("Const", "Placeholder")]


def locks_in(graph: Any) -> list[Any]:
    """Return the operations that take a mutex, but for those of its gate."""
    locks = [one for one in graph.get_operations() if one.type == "MutexLock"]
    gates = [one for one in locks if mutex_name(one).endswith(GATE)]
    rest = [one for one in locks if one not in gates]
    for gate, lock in zip(gates, rest, strict=True):
        assert mutex_name(gate) == mutex_name(lock) + GATE
        assert gate in waited_for(lock)
    return rest


def waits_for(operation: Any) -> set[Any]:
    return {each.op for each in operation.inputs} | set(operation.control_inputs)


def waited_for(operation: Any) -> set[Any]:
    found: set[Any] = set()
    left = [operation]
    while left:
        new = waits_for(left.pop()) - found
        found |= new
        left.extend(new)
    return found


class Late:
    """Gives a tensor, in a step, only when `go` is set."""

    def __init__(self) -> None:
        self.asked, self.go = Event(), Event()

    def __call__(self, value: Any) -> Any:
        late = tf.numpy_function(self._given, [value], value.dtype)
        late.set_shape(value.shape)
        return late

    def _given(self, value: Any) -> Any:
        self.asked.set()
        return value if self.go.wait(60) else None


def ends(step: Any) -> bool:
    """Run it in a thread, which may stay."""
    thread = Thread(target=step, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def active(function: Any) -> Any:
    """Return a function that makes updates, each of which is one act, and is traced."""
    updates = AtomicUpdates(tf.distribute.get_strategy())

    def step() -> Any:
        with updates.active():
            return function()

    return tf.function(step, autograph=False).get_concrete_function()


def test_two_updates_of_a_variable_in_one_step_end_in_whichever_order_their_gradients_come() -> None:
    table, first, values = tf.Variable(START), Late(), tf.constant(START)
    optimizers = [two.Adam(0.1), two.Adagrad(0.1)]
    for optimizer in optimizers:
        optimizer.build([table])
        gather(optimizer)

    def step() -> None:
        for optimizer, gradient in zip(optimizers, (first(values), values), strict=True):
            optimizer.apply_gradients([(gradient, table)])

    traced = active(step)
    Timer(0.5, first.go.set).start()
    assert ends(traced)
    np.testing.assert_allclose(optimizers[1]._accumulators[0], 0.1 + START**2, rtol=1e-5)
    np.testing.assert_allclose(optimizers[0]._momentums[0], 0.1 * START, rtol=1e-5)


@pytest.mark.parametrize("reads", [False, True])
def test_a_step_that_is_late_keeps_no_other_from_a_variable(reads: bool) -> None:
    """Neither one whose gradient has not come, nor one that reads late what it updates then."""
    table, late = tf.Variable(START), Late()
    optimizer = two.Adam(0.1)
    optimizer.build([table])
    gather(optimizer)

    def update(value: Any) -> None:
        optimizer.apply_gradients([(value, table)])

    def step() -> Any:
        if not reads:
            return update(late(tf.constant(START)))
        read = tf.reduce_sum(tf.gather(table, late(tf.constant([3, 4]))))
        update(tf.constant(START))
        return read

    other = Thread(target=active(step), daemon=True)
    quick = active(lambda: update(tf.constant(START)))
    other.start()
    try:
        assert ends(lambda: [quick() for _ in range(50)])
    finally:
        late.go.set()
        other.join()


def test_what_a_step_computes_of_a_variable_is_not_lost() -> None:
    """A layer's counter and moving average, as programs write them, and what two workers add to one row."""
    counter, average, large = tf.Variable(0), tf.Variable([0.0, 0.0]), tf.Variable(tf.zeros([20_000, 64]))
    norm = tf.keras.layers.BatchNormalization(momentum=0.5)
    norm.build([None, 3])
    optimizer = two.SGD(1.0)
    optimizer.build([large])
    recorded = Recorded()
    updates = AtomicUpdates(tf.distribute.get_strategy(), recorded)
    gather(optimizer)

    @tf.function(autograph=False)
    def step(data: Any) -> None:
        with updates.active():
            counter.assign(counter + 1)
            average.assign(0.9 * average + 0.1 * tf.reduce_mean(data))
            norm(data, training=True)
            optimizer.apply_gradients([(tf.IndexedSlices(-tf.ones(large.shape), tf.range(20_000)), large)])

    traced = step.get_concrete_function(tf.TensorSpec([None, 3]))

    def work(worker: int) -> None:
        for number in range(20):
            traced(tf.random.stateless_normal([4, 3], [worker, number]))

    with ThreadPoolExecutor(WORKERS) as workers:
        for future in [workers.submit(work, number) for number in range(WORKERS)]:
            future.result()
    assert counter.numpy() == WORKERS * 20
    assert np.all(large.numpy() == WORKERS * 20)
    count, found = recorded.replay()
    assert (count, differing(found)) == (5 * WORKERS * 20, {})
    assert len(found) == 6  # SGD has a slot


@pytest.mark.parametrize("form", ["average", "step", "rows"])
def test_a_moving_average_of_what_is_computed_of_itself_loses_nothing(form: str) -> None:
    """As the rows of a codebook follow what is nearest to each: a late worker keeps what another has added."""
    codes, late = tf.Variable([[0.0], [8.0]]), Late()

    def step(data: Any) -> None:
        nearest = tf.one_hot(tf.argmin((data - tf.transpose(codes)) ** 2, axis=1), 2)
        mean = tf.matmul(nearest, data, transpose_a=True) / tf.reduce_sum(nearest, axis=0)[:, None]
        if form == "rows":
            codes.assign(0.5 * tf.tensor_scatter_nd_add(codes, tf.argmax(nearest, 1)[:, None], mean))
        elif form == "average":
            codes.assign(0.5 * codes + 0.5 * mean)
        else:
            codes.assign(codes - 0.5 * (codes - mean))

    first, second = tf.constant([[1.0], [9.0]]), tf.constant([[2.0], [12.0]])
    waiting = Thread(target=active(lambda: step(late(first))), daemon=True)
    quick = active(lambda: step(second))
    waiting.start()
    assert late.asked.wait(60)
    assert ends(quick)
    late.go.set()
    waiting.join(60)
    np.testing.assert_allclose(codes, [[1.0], [9.5]])


def test_a_counter_that_is_added_to_needs_no_mutex() -> None:
    counter = tf.Variable(0)
    graph = active(lambda: counter.assign_add(1)).graph
    assert "MutexLock" not in {one.type for one in graph.get_operations()}


def mutexes_of(constraint: Any, *optimizers: str) -> list[int]:
    """Return how many mutexes a step takes for each of its optimizers, one after the other, whose gradient is dense."""
    weights = tf.Variable(START[0], constraint=constraint)
    made = [eval(f"two.{name}") for name in optimizers]
    for one in made:
        if "momentum" not in optimizers[0] and isinstance(one, two.SGD):
            leave_momentum_out(one)  # as a training does
        one.build([weights])
        gather(one)
    graph = active(lambda: [one.apply_gradients([(tf.constant(START[1]), weights)]) for one in made]).graph
    return len(locks_in(graph))


def test_an_addition_alone_needs_no_mutex() -> None:
    assert mutexes_of(None, "SGD(0.1)") == 0
    assert mutexes_of(tf.keras.constraints.NonNeg(), "SGD(0.1)") == 1
    assert mutexes_of(None, "SGD(0.1, momentum=0.9)") == 1


def test_an_addition_beside_an_update_of_several_operations_takes_its_mutex() -> None:
    assert mutexes_of(None, "SGD(0.1)", "Adam(0.1)") == 2


def test_additions_of_several_threads_are_none_lost() -> None:
    """What psfleet leaves without a mutex: TensorFlow's own kernel makes one act of it."""
    weights = tf.Variable(tf.zeros([20_000], tf.float64))
    add = tf.function(lambda: weights.assign_add(tf.ones([20_000], tf.float64)), autograph=False)
    add()
    with ThreadPoolExecutor(WORKERS) as pool:
        for one in [pool.submit(add) for _ in range(400)]:
            one.result()
    assert set(weights.numpy()) == {401.0}


def test_copies_of_a_step_in_one_round_take_a_mutex_in_turn() -> None:
    """A later copy would wait for the earlier one's writes with the mutex that these need."""
    counter = tf.Variable(0)
    copy = StepCopy(active(lambda: [counter.assign(counter + 1).read_value()][0]))

    @tf.function(autograph=False)
    def steps() -> Any:
        for _ in range(4):
            outputs = copy.make([])
        return outputs

    graph = steps.get_concrete_function().graph
    locks = locks_in(graph)
    before = [sum(each.type == "ConsumeMutexLock" for each in waited_for(lock)) for lock in locks]
    assert before == [0, 2, 4, 6]  # with the gate
    for _ in range(50):
        steps()
    assert counter.numpy() == 200


def test_a_target_that_follows_trained_weights_waits_for_nothing_of_itself() -> None:
    """It is read for the loss, and written from weights that were updated by that loss."""
    weights, target = tf.Variable([1.0, 2.0]), tf.Variable([0.0, 0.0])
    optimizer = two.SGD(0.5)
    optimizer.build([weights])
    gather(optimizer)

    def step() -> None:
        before = target.read_value()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weights - before) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        target.assign(0.9 * before + 0.1 * weights)

    active(step)()
    np.testing.assert_allclose(weights, [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(target, [0.0, 0.0], atol=1e-6)


def test_a_target_that_follows_a_weight_waits_for_nothing_of_itself_in_one_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the weight, which the target waits for, is one act with one that waits for the target."""
    monkeypatch.setattr(joined, "may_wait", lambda update: True)
    weights, others, target = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0]), tf.Variable([0.0, 1.0])
    optimizer = two.SGD(0.5, momentum=0.9)
    optimizer.build([weights, others])
    gather(optimizer)

    def step() -> None:
        before = target.read_value()
        optimizer.apply_gradients([(tf.constant([1.0, 1.0]), weights)])
        after = tf.square(weights)
        optimizer.apply_gradients([(before + 1.0, others)])
        target.assign(before + after)

    traced = active(step)
    assert len(locks_in(traced.graph)) == 1
    traced()
    np.testing.assert_allclose(weights, [0.5, 1.5])
    np.testing.assert_allclose(others, [0.5, 1.0])
    np.testing.assert_allclose(target, [0.25, 3.25])


def test_rows_that_a_step_adds_to_a_table_itself_take_the_tables_mutex() -> None:
    table = tf.Variable(START)
    optimizer = two.SGD(0.1)
    optimizer.build([table])
    gather(optimizer)

    def step() -> None:
        optimizer.apply_gradients([(tf.constant(START), table)])
        table.scatter_add(tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([3])))

    graph = active(step).graph
    (added,) = [one for one in graph.get_operations() if one.type == "ResourceScatterAdd"]
    assert "MutexLock" in {one.type for one in added.control_inputs}


def test_an_update_waits_before_it_has_the_mutex_for_what_the_program_has_it_wait_for() -> None:
    table = tf.Variable(START)
    optimizer = two.Adam(0.1)
    optimizer.build([table])
    gather(optimizer)

    def step() -> None:
        with tf.control_dependencies([tf.identity(START, name="before")]):
            optimizer.apply_gradients([(tf.constant(START), table)])

    graph = active(step).graph
    locks = locks_in(graph)
    assert locks
    assert all("before" in {each.name for each in waited_for(lock)} for lock in locks)
