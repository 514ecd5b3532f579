"""When a run saves and evaluates, also when it was cut off or a call ran twice; the replicas here only count."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer.checkpoints import RunDirectory
from trainer.config import Config
from trainer.course import Course
from trainer.failures import Stopped, UserError
from trainer.loop import train_with_loop
from trainer.metrics import Progress
from trainer.notify import Notifier
from trainer.phases import Phases

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

    def train(self, twice: int = -1, stop: bool = False, die_after: int = 99) -> None:
        replicas = Counting(twice)

        def evaluate() -> dict[str, float]:
            self.evaluated.append(int(replicas.step.numpy()))
            if len(self.evaluated) > die_after:
                raise SystemExit
            return {"loss": 0.0}

        progress = Progress(self.config, self.directory, Notifier())
        course = Course(self.config, replicas, self.directory, progress, lambda: stop, evaluate, Phases({}))
        course.restore()
        train_with_loop(replicas, course)


def test_each_epoch_is_evaluated_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


def test_an_epoch_that_a_call_ran_beyond_is_evaluated_and_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_call=5, checkpoint_steps=20)
    run.train(twice=37)
    assert 45 in run.evaluated
    assert 45 in run.directory.steps()
    assert run.evaluated[-1] == 100


def test_an_epoch_is_evaluated_again_when_its_weights_were_lost(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_seconds=1e9)
    with pytest.raises(SystemExit):
        run.train(die_after=1)
    run.train()
    assert run.evaluated == [20, 40, 20, 40, 60, 80, 100]


def test_an_epoch_at_whose_end_a_run_was_stopped_is_evaluated_when_it_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, steps_per_call=20)
    with pytest.raises(Stopped):
        run.train(stop=True)
    assert run.directory.steps() == [20]
    assert run.evaluated == []
    run.train()
    assert run.evaluated == [20, 40, 60, 80, 100]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Says whether the shared path is full; nothing waits for longer than it must."""
    full = Event()
    write = RunDirectory.write_manifest

    def write_or_fail(self: RunDirectory, *arguments: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, *arguments)

    monkeypatch.setattr(RunDirectory, "write_manifest", write_or_fail)
    monkeypatch.setattr("trainer.course.PATIENCE_SECONDS", 0.1)
    full.set()
    return full


def test_the_end_is_saved_when_the_storage_is_back(tmp_path: Path, full: Event) -> None:
    run = Run(tmp_path)
    Timer(1.5, full.clear).start()
    run.train()
    assert run.directory.newest() == 100


@pytest.mark.usefixtures("full")
def test_the_end_that_cannot_be_saved_is_an_error_after_the_users_limit(tmp_path: Path) -> None:
    run = Run(tmp_path, storage_seconds=1.0)
    with pytest.raises(UserError, match=r"no checkpoint could be saved in \S+ for 1 s: .* storage_seconds, 1"):
        run.train()
