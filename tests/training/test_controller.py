"""When a run saves and evaluates, also when it was cut off or a call ran twice; the replicas here only count."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer.cluster.deadlines import Phases
from trainer.cluster.formation import MembershipChanged
from trainer.config import Config
from trainer.failures import StalePath, Stopped, UserError
from trainer.reporting.notify import Notifier
from trainer.reporting.progress import Progress
from trainer.run.catalogue import Catalogue
from trainer.run.checkpoints import Checkpoints
from trainer.run.directory import RunDirectory
from trainer.training.controller import Controller
from trainer.training.loop import train_with_loop

SETTINGS = {"program": "a:B", "steps": 100, "epoch_steps": 20}


class Counting:
    """Counts the steps of calls, and those of one call twice."""

    parallel = 1

    def __init__(self, twice: int = -1) -> None:
        self.model = tf.Module()
        self.model.reset_metrics = lambda: None
        self.step = tf.Variable(0, dtype=tf.int64)
        self._twice = twice

    def call(self, steps: int) -> Any:
        again = self.step.numpy() <= self._twice < self.step.numpy() + steps
        self.step.assign_add(2 * steps if again else steps)
        return SimpleNamespace(fetch=lambda: {"loss": tf.constant(0.0).numpy()})

    def join(self, waiting: Any) -> None:
        pass

    def agree(self, numbers: list[int]) -> list[int]:
        return numbers


class Run:
    """A run of 100 steps with epochs of 20."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.config = Config.from_dict({**SETTINGS, "shared_dir": str(path), **settings})
        self.directory = RunDirectory(path, "default")
        self.evaluated: list[int] = []

    def train(
        self,
        twice: int = -1,
        stop: bool = False,
        die_after: int = 99,
        replicas: Counting | None = None,
        members: Any = None,
        phases: dict[str, float] | None = None,
    ) -> None:
        replicas = replicas or Counting(twice)

        def evaluate() -> dict[str, float]:
            self.evaluated.append(int(replicas.step.numpy()))
            if len(self.evaluated) > die_after:
                raise SystemExit
            return {"loss": 0.0}

        self.progress = progress = Progress(self.config, self.directory, Notifier())
        self.phases = Phases(phases or {}, progress.phase)
        course = Controller(
            self.config, replicas, self.directory, progress, lambda: stop, evaluate, self.phases, members=members
        )
        course.restore()
        train_with_loop(replicas, course)


def test_each_epoch_is_evaluated_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


def test_an_epoch_that_a_call_ran_beyond_is_evaluated_and_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20)
    run.train(twice=37)
    assert 45 in run.evaluated
    assert 45 in run.directory.catalogue.steps()
    assert run.evaluated[-1] == 100


def test_an_epoch_is_evaluated_again_when_its_weights_were_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_seconds=1e9)
    with pytest.raises(SystemExit):
        run.train(die_after=1)
    run.train()
    assert run.evaluated == [20, 40, 20, 40, 60, 80, 100]


def test_an_epoch_at_whose_end_a_run_was_stopped_is_evaluated_when_it_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_execution=20)
    with pytest.raises(Stopped):
        run.train(stop=True)
    assert run.directory.catalogue.steps() == [20]
    assert run.evaluated == []
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


class Present:
    """Says who is there, as the test wants."""

    def __init__(self) -> None:
        self.alive = True
        self.back: list[str] = []

    def lost_ps(self) -> list[str]:
        return []

    def returned(self) -> list[str]:
        return self.back

    def workers_serving(self) -> bool:
        return self.alive


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Returns what sets the clock forward."""
    passed, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    return lambda seconds: passed.append(passed.pop() + seconds)


class Deserted(Counting):
    """All workers are away during the block that ends beyond step 50: twice, for half of the time each."""

    recovering = False

    def __init__(self, run: Run, members: Present, pass_time: Callable[[float], None], seconds: float) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []
        self._run, self._members, self._pass_time, self._seconds = run, members, pass_time, seconds

    def join(self, waiting: Any) -> None:
        if self.told or self.step.numpy() < 50:
            return
        for alive in (False, False, True) * 2:
            if not alive and not self._members.alive:
                self._pass_time(self._seconds / 2)
            self._members.alive = alive
            waiting()
            assert not self._run.phases.overdue()
            self.told.append((self._run.progress.status.state, self._run.phases.phase))


def test_time_without_a_worker_is_waiting_and_no_training(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    run, members = Run(tmp_path, steps_per_execution=10), Present()
    replicas = Deserted(run, members, pass_time, 7200)
    run.train(replicas=replicas, members=members, phases={"training": 1800.0})
    gone, there = ("waiting", "waiting"), ("training", "training")
    assert replicas.told == [gone, gone, there, gone, gone, there]
    ledger = run.progress.ledger.as_dict()
    assert ledger["waiting"] == pytest.approx(7200, abs=60)
    assert 0 < ledger["productive"] < 60
    assert run.progress.status.steps_per_second > 1.0


def test_a_worker_that_comes_and_goes_does_not_put_off_the_deadline(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    run, members = Run(tmp_path, steps_per_execution=10), Present()

    class Flapping(Counting):
        def join(self, waiting: Any) -> None:
            for alive in (True, False) * 3:
                members.alive = alive
                waiting()
                pass_time(700)
            members.alive = True
            waiting()
            assert run.phases.overdue().startswith("training has lasted 2100 s")
            raise SystemExit

    with pytest.raises(SystemExit):
        run.train(replicas=Flapping(), members=members, phases={"training": 1800.0})


def test_no_worker_for_the_users_limit_is_an_error_after_a_save(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    run, members = Run(tmp_path, steps_per_execution=10, member_wait_timeout_seconds=1000.0), Present()
    replicas = Deserted(run, members, pass_time, 7200)
    with pytest.raises(UserError, match=r"waited 36\d\d s \(member_wait_timeout_seconds\) for a worker"):
        run.train(replicas=replicas, members=members)
    assert run.directory.catalogue.newest() == replicas.step.numpy() > 50


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
    monkeypatch.setattr("trainer.training.controller.PATIENCE_SECONDS", 0.1)
    full.set()
    return full


def test_a_save_that_fails_puts_off_taking_in_who_has_returned(tmp_path: Path, full: Event) -> None:
    run, members = Run(tmp_path, steps_per_execution=5, checkpoint_steps=20), Present()
    full.clear()

    class Returning(Counting):
        recovering = False

        def join(self, waiting: Any) -> None:
            members.back = ["worker-1"] if self.step.numpy() >= 30 else []
            (full.set if 30 <= self.step.numpy() < 50 else full.clear)()

    with pytest.raises(MembershipChanged, match="worker-1 answers again"):
        run.train(replicas=Returning(), members=members)
    assert run.directory.catalogue.steps() == [20, 60, 80]


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

    def join(self, waiting: Any) -> None:
        if self.step.numpy() >= 100:
            self._hanging += self._for_seconds


def test_a_last_save_that_hangs_is_waited_for_beyond_the_phases_deadline(
    tmp_path: Path, hanging: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late = Run(tmp_path), []
    progressed = Phases.progressed

    def look(self: Phases) -> None:
        late.append(self.overdue())
        progressed(self)

    monkeypatch.setattr(Phases, "progressed", look)
    run.train(replicas=HangsAtTheEnd(hanging, [1000.0] * 3), phases={"saving": 1800.0})
    assert run.directory.catalogue.newest() == 100
    assert set(late) == {""}


def test_a_last_save_that_hangs_is_an_error_after_the_users_limit(tmp_path: Path, hanging: list[float]) -> None:
    run = Run(tmp_path)
    with pytest.raises(
        UserError, match=r"last checkpoint is not written to \S+ after 4\d\d\d s; .* storage_timeout_seconds, 3600"
    ):
        run.train(replicas=HangsAtTheEnd(hanging, [1000.0] * 5))


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
    monkeypatch.setattr("trainer.training.controller.PATIENCE_SECONDS", 0.1)


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
    with pytest.raises(StalePath, match="must be mounted anew"):
        run.train()
    assert run.directory.catalogue.steps() == saved
