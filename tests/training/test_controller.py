"""When a run saves and evaluates, also when it was cut off or a call ran twice; the runner here only counts."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.cluster.deadlines import Phases
from trainer.cluster.members.formation import MembershipChanged
from trainer.core.failures import StalePath, Stopped, UserError
from trainer.core.settings.config import Config
from trainer.run.catalogue import Catalogue
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState
from trainer.run.saves.checkpoints import Checkpoints, in_thread
from trainer.run.saves.snapshot import copy_each
from trainer.tasks.generation import Generation
from trainer.telemetry.outlets.systemd import Notifier
from trainer.telemetry.progress import Progress
from trainer.training.loop.controller import Controller
from trainer.training.loop.custom_loop import train_with_loop
from trainer.training.run_context import RunContext
from trainer.training.steps.runner import Call

SETTINGS = {"program": "a:B", "steps": 100, "epoch_steps": 20}


class Counting:
    """Counts the steps of calls, and those of one call twice; a call ends when the controller looks for it."""

    is_recovering = is_failing = is_over = takes_in = False
    news = ""
    files: Mapping[str, int] = MappingProxyType({})
    position = tables = marks = None
    seconds_waited = 0.0
    lookups: Mapping[str, Any] = MappingProxyType({})
    file_sizes: Mapping[str, Any] = MappingProxyType({})
    copy = staticmethod(copy_each)

    def __init__(self, twice: int = -1) -> None:
        self.model = self.trained = tf.Module()
        self.step = tf.Variable(0, dtype=tf.int64)
        self.most_in_flight = 0
        self._twice = twice
        self._calls: list[Call] = []

    def call(self, steps: int) -> Call:
        self._calls.append(Call(steps, time.monotonic()))
        self.most_in_flight = max(self.most_in_flight, len(self._calls))
        return self._calls[-1]

    def look(self) -> None:
        """Called while calls are in flight."""

    def returned(self) -> list[Call]:
        if not self._calls:
            return []
        self.look()
        call = self._calls.pop(0)
        again = self.step.numpy() <= self._twice < self.step.numpy() + call.steps
        self.step.assign_add(2 * call.steps if again else call.steps)
        call.outputs, call.counted = {"loss": np.float32(0.0)}, int(self.step.numpy())
        return [call]

    def aggregate_outputs(self, outputs: Any) -> Any:
        return outputs

    def write_metrics(self) -> None:
        """It has none."""

    reset_metrics = doubt = write_metrics

    def agree(self, numbers: list[int]) -> list[int]:
        return numbers


class Run:
    """A run of 100 steps with epochs of 20."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.config = Config.from_dict({**SETTINGS, "shared_dir": str(path), **settings})
        self.directory = RunDirectory(path, "default")
        self.evaluated: list[int] = []
        self.evaluates = True

    def train(
        self,
        twice: int = -1,
        stop_at: int | None = None,
        die_after: int = 99,
        runner: Counting | None = None,
        members: Any = None,
        phases: dict[str, float] | None = None,
        for_callbacks: bool = False,
    ) -> None:
        runner = runner or Counting(twice)

        def evaluate() -> dict[str, float]:
            self.evaluated.append(int(runner.step.numpy()))
            if len(self.evaluated) > die_after:
                raise SystemExit
            return {"loss": 0.0}

        self.progress = progress = Progress(self.config, self.directory, Notifier())
        self.phases = Phases(phases or {}, progress.phase)
        stopping: Any = lambda: stop_at is not None and bool(runner.step.numpy() >= stop_at)  # noqa: E731
        context = RunContext(self.config, None, self.directory, progress, self.phases, members, None, stopping)
        controller = Controller(context, runner, evaluate if self.evaluates else None, for_callbacks=for_callbacks)
        controller.restore()
        if for_callbacks:
            train_in_heard_epochs(controller, progress)
        else:
            runner.model.optimizer = None
            train_with_loop(runner.model, controller)
        progress.close()


def train_in_heard_epochs(controller: Controller, progress: Progress) -> None:
    """Train as where callbacks hear of each epoch's end, between its evaluation and its save."""
    controller.begin()
    while not controller.done:
        if steps := controller.next_call():
            controller.call(steps)
        else:
            controller.evaluate()
            written = Event()
            progress.post(written.set)
            assert written.wait(60)
            controller.end_epoch()


def test_each_epoch_is_evaluated_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


def test_a_last_step_that_is_on_the_ps_alone_is_saved_before_the_run_ends(tmp_path: Path) -> None:
    """A coordinator died when all was trained, and its last checkpoint was not on disk."""
    run = Run(tmp_path, epoch_steps=0, evaluation="none")
    progress = Progress(run.config, run.directory, Notifier())
    context = RunContext(run.config, None, run.directory, progress, Phases({}), None, None, lambda: False)  # type: ignore[arg-type]
    runner: Any = Counting()
    runner.step.assign(100)
    runner.model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(1,))])
    runner.model.compile("sgd")
    left: Any = SimpleNamespace(lacking=set(), position=None, take_over=lambda *_: True, offer=print, refresh=print)
    controller = Controller(context, runner, None, handover=left)
    controller.restore()
    none: Any = None
    Generation(context, runner, controller, [], none).train()
    progress.close()
    assert run.directory.catalogue.steps() == [100]


@pytest.mark.parametrize("for_callbacks", [False, True])
def test_what_an_evaluation_gave_is_kept_beside_its_checkpoint(tmp_path: Path, for_callbacks: bool) -> None:
    run = Run(tmp_path, checkpoints_kept=5, checkpoints_kept_best=1)
    run.train(for_callbacks=for_callbacks)
    catalogue = run.directory.catalogue
    found = {step: catalogue.evaluation(step) for step in catalogue.steps()}
    assert found == {step: {"loss": 0.0} for step in (20, 40, 60, 80, 100)}


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("for_callbacks", [False, True])
@pytest.mark.parametrize("slow", [15, 20])
def test_an_evaluation_is_kept_though_a_save_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_callbacks: bool, slow: int
) -> None:
    write = Catalogue.write_manifest

    def write_slowly(self: Catalogue, step: int, *arguments: Any, **options: Any) -> None:
        if step == slow:  # 15: one by steps, in flight at the first epoch's end; 20: this epoch's, until the next ends
            time.sleep(0.5)
        write(self, step, *arguments, **options)

    monkeypatch.setattr(Catalogue, "write_manifest", write_slowly)
    monkeypatch.setattr("trainer.run.saves.checkpoints.PATIENCE_SECONDS", 0.0)  # what takes longer is slow
    monkeypatch.setattr("trainer.training.loop.save_schedule.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("trainer.run.saves.checkpoints.ended", partial(in_thread, "save"))  # as under parameter servers
    run = Run(tmp_path, checkpoints_kept=9, checkpoints_kept_best=1, checkpoint_steps=15, steps_per_execution=5)
    run.train(for_callbacks=for_callbacks)
    catalogue = run.directory.catalogue
    evaluated = [step for step in catalogue.steps() if catalogue.evaluation(step) is not None]
    assert evaluated == [20, 40, 60, 80, 100]


class EndingInASave(Counting):
    """The last call of the first epoch ends while a save begins; what hears of an epoch's end changes the model."""

    ended = 0

    def __init__(self) -> None:
        super().__init__()
        self.model.heard = tf.Variable(0, dtype=tf.int64)

    def agree(self, numbers: list[int]) -> list[int]:
        if len(numbers) == 1 and self.step.numpy() == 15:
            self.ended = self._calls[0].steps
            self.step.assign_add(self.ended)
        return numbers

    def look(self) -> None:
        self.step.assign_sub(self.ended)  # which counts when the call is heard of
        self.ended = 0

    def doubt(self) -> None:
        self.model.heard.assign(self.step)


@pytest.mark.usefixtures("looking")
def test_a_checkpoint_of_an_epochs_end_has_what_callbacks_have_changed(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_steps=15, checkpoints_kept=9, steps_per_execution=5)
    run.train(runner=EndingInASave(), for_callbacks=True)
    name = "model/heard/.ATTRIBUTES/VARIABLE_VALUE"
    found = {step: int(tf.train.load_variable(run.directory.catalogue.prefix(step), name)) for step in (20, 30, 60)}
    assert found == {20: 20, 30: 20, 60: 60}


def test_a_checkpoint_knows_whether_a_step_without_a_loss_told_numbers(tmp_path: Path) -> None:
    class Adversaries(Counting):
        def returned(self) -> list[Call]:
            ended = super().returned()
            for call in ended:
                is_sound = self.step.numpy() < 60
                call.outputs = {"judges": np.float32(1.0), "makes": np.float32(1.0 if is_sound else np.nan)}
            return ended

    run = Run(tmp_path, checkpoint_steps=20, checkpoints_kept=9, steps_per_execution=20)
    run.train(runner=Adversaries())
    saved = run.directory.catalogue.saved()
    assert [(each.step, each.loss, each.sound) for each in saved] == [
        (step, None, step < 60) for step in (20, 40, 60, 80, 100)
    ]


@pytest.mark.usefixtures("looking")
def test_a_loss_that_is_no_number_once_leaves_later_checkpoints_sound(tmp_path: Path) -> None:
    """Though the mean since the epoch's beginning stays NaN."""

    class Once(Counting):
        def returned(self) -> list[Call]:
            ended = super().returned()
            for call in ended:
                call.outputs = {"loss": np.float32(np.nan if self.step.numpy() == 40 else 1.0)}
            return ended

        def aggregate_outputs(self, outputs: Any) -> Any:
            return {"loss": np.float32(1.0 if self.step.numpy() < 40 else np.nan)}

    run = Run(tmp_path, checkpoint_steps=20, checkpoints_kept=9, steps_per_execution=20, epoch_steps=100)
    run.train(runner=Once(), for_callbacks=True)
    saved = run.directory.catalogue.saved()
    assert [each.step for each in saved if not each.sound] == [40]
    assert saved[2].loss == 1.0


def test_who_has_lost_the_lease_while_a_checkpoint_came_to_the_disk_removes_nothing(tmp_path: Path) -> None:
    directory, step, config = RunDirectory(tmp_path, "default"), tf.Variable(0, dtype=tf.int64), Config(program="a:B")
    looks = iter([True, True, True] * config.checkpoints_kept + [True, True, False])
    lease = SimpleNamespace(epoch=1, held=lambda: next(looks))
    checkpoints = Checkpoints(directory, CheckpointState(tf.Module(), step), config, lease=lease)  # type: ignore[arg-type]
    for _ in range(config.checkpoints_kept + 1):
        step.assign_add(1)
        checkpoints.save_and_wait()
    assert len(directory.catalogue.steps()) == config.checkpoints_kept + 1


def test_an_epoch_that_a_call_ran_beyond_is_evaluated_and_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20)
    run.train(twice=37)
    assert 45 in run.evaluated
    assert 45 in run.directory.catalogue.steps()
    assert run.evaluated[-1] == 100


def test_an_epoch_is_evaluated_again_when_its_weights_were_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_seconds=1e8)
    with pytest.raises(SystemExit):
        run.train(die_after=1)
    run.train()
    assert run.evaluated == [20, 40, 20, 40, 60, 80, 100]


def test_an_epoch_at_whose_end_a_run_was_stopped_is_evaluated_when_it_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_execution=20)
    with pytest.raises(Stopped):
        run.train(stop_at=20)
    assert run.directory.catalogue.steps() == [20]
    assert run.evaluated == []
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller looks at what is due whenever a call has ended, and queues no more of the short calls than two."""
    monkeypatch.setattr("trainer.training.loop.scheduler.POLL_SECONDS", 0.0)
    monkeypatch.setattr("trainer.training.loop.scheduler.MAX_QUEUED_CALLS", 2)


class Emptied(Counting):
    """Counts how often no call was in flight any more."""

    emptied = 0

    def returned(self) -> list[Call]:
        ended = super().returned()
        self.emptied += bool(ended) and not self._calls
        return ended


@pytest.mark.usefixtures("looking")
def test_nothing_waits_for_all_calls_but_the_end(tmp_path: Path) -> None:
    run, runner = (
        Run(tmp_path, steps_per_execution=5, checkpoint_steps=20, checkpoints_kept=9, log_seconds=0.001),
        Emptied(),
    )
    run.evaluates = False
    run.train(runner=runner)
    assert runner.emptied == 1
    assert runner.step.numpy() == 100
    assert run.directory.catalogue.steps() == [20, 40, 60, 80, 100]
    assert run.progress.status.step == 100


@pytest.mark.usefixtures("looking")
def test_an_evaluation_waits_for_all_calls_at_its_step(tmp_path: Path) -> None:
    run, runner = Run(tmp_path, steps_per_execution=5), Emptied()
    run.train(runner=runner)
    assert runner.emptied == 5
    assert run.evaluated == [20, 40, 60, 80, 100]


@pytest.mark.usefixtures("looking")
def test_a_request_to_stop_waits_for_the_calls_in_flight_and_gives_no_more(tmp_path: Path) -> None:
    run, runner = Run(tmp_path, steps_per_execution=5), Emptied()
    run.evaluates = False
    with pytest.raises(Stopped):
        run.train(stop_at=42, runner=runner)
    assert runner.emptied == 1
    assert run.directory.catalogue.steps() == [int(runner.step.numpy())] == [50]


@pytest.mark.usefixtures("looking")
def test_a_lost_ps_that_no_step_needed_is_told_when_the_calls_have_ended(tmp_path: Path) -> None:
    run, runner, members = Run(tmp_path, steps_per_execution=5), Emptied(), Present()
    members.lost_ps = lambda: ["ps-0"] if runner.step.numpy() >= 50 else []
    run.evaluates = False
    with pytest.raises(MembershipChanged, match="ps-0 has ended"):
        run.train(runner=runner, members=members)
    assert runner.emptied == 1
    assert 50 <= runner.step.numpy() < 70


def test_replicas_in_step_are_asked_for_one_call_at_a_time(tmp_path: Path) -> None:
    run, runner = (
        Run(tmp_path, steps_per_execution=5, checkpoint_steps=40, strategy="mirrored", evaluation="inline"),
        Counting(),
    )
    run.train(runner=runner)
    assert runner.most_in_flight == 1
    assert run.evaluated == [20, 40, 60, 80, 100]
    assert run.directory.catalogue.steps() == [40, 80, 100]


class Present:
    """Says who is there, as the test wants."""

    def __init__(self) -> None:
        self.alive = True
        self.was_asked = False
        self.workers = ["worker-0"]
        self.back: list[str] = []
        self.leaving: list[str] = []
        self.rebooting: list[str] = []

    def lost_ps(self) -> list[str]:
        return []

    def unreachable_ps(self) -> dict[str, str]:
        return {}

    def returned(self) -> list[str]:
        return self.back

    def leaving_ps(self) -> list[str]:
        return self.leaving

    def leaving_workers(self) -> list[str]:
        return self.rebooting

    def drained_workers(self) -> list[str]:
        return []

    def workers_serving(self) -> bool:
        self.was_asked = True
        return self.alive


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Returns what sets the clock forward."""
    passed, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    return lambda seconds: passed.append(passed.pop() + seconds)


class Deserted(Counting):
    """All workers are away during the calls that end beyond step 50: twice, for half of the time each."""

    def __init__(self, run: Run, members: Present, pass_time: Callable[[float], None], seconds: float) -> None:
        super().__init__()
        self.states: list[tuple[str, str]] = []
        self._run, self._members, self._pass_time, self._seconds = run, members, pass_time, seconds
        self._phases = [False, False, True] * 2

    def returned(self) -> list[Call]:
        if self.step.numpy() < 50 or len(self.states) == 6:
            return super().returned()
        if self._members.was_asked and len(self._phases) < 6:  # the controller has waited since the last phase began
            assert not self._run.phases.overdue()
            self.states.append((self._run.progress.status.state, self._run.phases.phase))
        if len(self.states) == 6 - len(self._phases) and self._phases:
            alive = self._phases.pop(0)
            if not alive and not self._members.alive:
                self._pass_time(self._seconds / 2)
            self._members.alive, self._members.was_asked = alive, False
        return []


def test_time_without_a_worker_is_waiting_and_no_training(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    run, members = Run(tmp_path, steps_per_execution=10), Present()
    runner = Deserted(run, members, pass_time, 7200)
    run.train(runner=runner, members=members, phases={"training": 1800.0})
    gone, there = ("waiting", "waiting"), ("training", "training")
    assert runner.states == [gone, gone, there, gone, gone, there]
    ledger = run.progress.ledger.as_dict()
    assert ledger["waiting"] == pytest.approx(7200, abs=60)
    assert 0 < ledger["productive"] < 60
    assert run.progress.status.steps_per_second > 1.0


def test_a_worker_that_comes_and_goes_does_not_put_off_the_deadline(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    run, members = Run(tmp_path, steps_per_execution=10), Present()

    class Flapping(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.phases = [True, False] * 3 + [True]

        def returned(self) -> list[Call]:
            if members.was_asked and not self.phases:
                assert run.phases.overdue().startswith("training has lasted 2100 s")
                raise SystemExit
            if members.was_asked:
                pass_time(700 if len(self.phases) < 7 else 0)
                members.alive, members.was_asked = self.phases.pop(0), False
            return []

    with pytest.raises(SystemExit):
        run.train(runner=Flapping(), members=members, phases={"training": 1800.0})


def test_no_worker_for_the_users_limit_is_an_error_after_a_save(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    run, members = Run(tmp_path, steps_per_execution=10, member_wait_timeout_seconds=1000.0), Present()
    runner = Deserted(run, members, pass_time, 7200)
    with pytest.raises(UserError, match=r"waited 36\d\d s \(member_wait_timeout_seconds\) for a worker"):
        run.train(runner=runner, members=members)
    assert run.directory.catalogue.newest() == runner.step.numpy() >= 50


def test_workers_that_leave_in_order_are_waited_for_beyond_the_users_limit(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    run, members = Run(tmp_path, steps_per_execution=10, member_wait_timeout_seconds=1000.0), Present()
    members.rebooting = ["worker-0"]
    run.train(runner=Deserted(run, members, pass_time, 7200), members=members)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Says whether the shared path is full; nothing waits for longer than it must."""
    full = Event()
    write = Catalogue.write_manifest

    def write_or_fail(self: Catalogue, *arguments: Any, **options: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *arguments, **options)

    monkeypatch.setattr(Catalogue, "write_manifest", write_or_fail)
    monkeypatch.setattr("trainer.training.loop.saves.PATIENCE_SECONDS", 0.1)
    full.set()
    return full


def test_a_save_that_fails_puts_off_taking_in_who_has_returned(tmp_path: Path, full: Event) -> None:
    run, members = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20), Present()
    full.clear()

    class Returning(Counting):
        def look(self) -> None:
            members.back = ["worker-1"] if self.step.numpy() >= 30 else []
            (full.set if 30 <= self.step.numpy() < 50 else full.clear)()

    with pytest.raises(MembershipChanged, match="worker-1 answers again"):
        run.train(runner=Returning(), members=members)
    assert run.directory.catalogue.steps() == [20, 60, 80]


def test_a_ps_that_leaves_is_let_go_of_after_a_save_at_once(tmp_path: Path, full: Event) -> None:
    run, members = Run(tmp_path, steps_per_execution=5, checkpoint_steps=50), Present()
    full.clear()

    class Leaving(Counting):
        def look(self) -> None:
            members.leaving = ["ps-1"] if self.step.numpy() >= 30 else []

    with pytest.raises(MembershipChanged, match="ps-1 leaves, and the checkpoint is saved"):
        run.train(runner=Leaving(), members=members)
    [saved] = run.directory.catalogue.steps()
    assert 30 <= saved < 50


def test_a_ps_stays_while_no_checkpoint_can_be_saved(tmp_path: Path, full: Event) -> None:
    run, members = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20), Present()

    class Leaving(Counting):
        def look(self) -> None:
            members.leaving = ["ps-1"] if self.step.numpy() >= 10 else []
            (full.clear if self.step.numpy() >= 50 else full.set)()

    with pytest.raises(MembershipChanged, match="ps-1 leaves"):
        run.train(runner=Leaving(), members=members)
    assert min(run.directory.catalogue.steps()) >= 50


def test_the_end_is_saved_when_the_storage_is_back(tmp_path: Path, full: Event) -> None:
    run = Run(tmp_path)
    Timer(1.5, full.clear).start()
    run.train()
    assert run.directory.catalogue.newest() == 100


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, pass_time: Callable[[float], None]) -> list[float]:
    """Returns for how long (seconds) the next waits for a save are in vain: at first none is."""
    hanging: list[float] = []

    def settle(self: Checkpoints, seconds: float | None = None) -> bool:
        if not hanging:
            return True
        assert seconds is not None, "it would wait for ever"
        pass_time(hanging.pop(0))
        return False

    monkeypatch.setattr(Checkpoints, "settle", settle)
    return hanging


class HangsAtTheEnd(Counting):
    def __init__(self, hanging: list[float], for_seconds: list[float]) -> None:
        super().__init__()
        self._hanging, self._for_seconds = hanging, for_seconds

    def returned(self) -> list[Call]:
        ended = super().returned()
        if ended and self.step.numpy() >= 100:
            self._hanging += self._for_seconds
        return ended


def test_a_last_save_that_hangs_is_waited_for_beyond_the_phases_deadline(
    tmp_path: Path, hanging: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late = Run(tmp_path), []
    progressed = Phases.progressed

    def look(self: Phases) -> None:
        late.append(self.overdue())
        progressed(self)

    monkeypatch.setattr(Phases, "progressed", look)
    run.train(runner=HangsAtTheEnd(hanging, [1000.0] * 3), phases={"saving": 1800.0})
    assert run.directory.catalogue.newest() == 100
    assert set(late) == {""}


def test_a_last_save_that_hangs_is_an_error_after_the_users_limit(tmp_path: Path, hanging: list[float]) -> None:
    run = Run(tmp_path)
    with pytest.raises(
        UserError, match=r"last checkpoint is not written to \S+ after 4\d\d\d s; .* storage_timeout_seconds, 3600"
    ):
        run.train(runner=HangsAtTheEnd(hanging, [1000.0] * 5))


@pytest.mark.usefixtures("full")
def test_the_end_that_cannot_be_saved_is_an_error_after_the_users_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, storage_timeout_seconds=1.0)
    with pytest.raises(
        UserError, match=r"no checkpoint could be saved in \S+ for \d+ s: .* " r"storage_timeout_seconds, 1"
    ):
        run.train()


def failing(monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> None:
    """Have saves fail so, one after the other (None: it doesn't fail); those after the last don't."""
    write = Catalogue.write_manifest

    def write_or_fail(self: Catalogue, *arguments: Any, **options: Any) -> None:
        if errors and (error := errors.pop(0)):
            raise error
        write(self, *arguments, **options)

    monkeypatch.setattr(Catalogue, "write_manifest", write_or_fail)
    monkeypatch.setattr("trainer.training.loop.saves.PATIENCE_SECONDS", 0.1)


def test_a_last_save_that_a_server_broke_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    failing(monkeypatch, [tf.errors.UnavailableError(None, None, "Socket closed")] * 2)
    run.train()
    assert run.directory.catalogue.newest() == 100


def stale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize(("before", "saved"), [(1, [20]), (4, [20, 40, 60, 80])])
def test_a_stale_path_ends_the_process_in_the_middle_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, saved: list[int]
) -> None:
    run = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20, checkpoints_kept=9)
    failing(monkeypatch, [*[None] * before, *(stale() for _ in range(1000))])
    with pytest.raises(StalePath, match="must be mounted again"):
        run.train()
    assert run.directory.catalogue.steps() == saved
