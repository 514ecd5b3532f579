"""The steps that a run must meet exactly."""

from __future__ import annotations

import pytest

from trainer.core.settings.config import Config
from trainer.training.loop.epoch_ends import EpochEnds


@pytest.mark.parametrize(
    ("ends", "step", "end"),
    [
        (EpochEnds(100, 20, meets_epochs=True), 0, 20),
        (EpochEnds(100, 20, meets_epochs=True), 20, 40),
        (EpochEnds(100, 20, meets_epochs=True), 45, 60),
        (EpochEnds(90, 20, meets_epochs=True), 80, 90),
        (EpochEnds(100, 20, meets_epochs=False), 0, 100),
        (EpochEnds(100, 20, meets_epochs=True, checkpoint_steps=15), 20, 30),
        (EpochEnds(100, 20, meets_epochs=False, checkpoint_steps=15), 0, 15),
    ],
)
def test_calls_end_at_the_next_step_that_must_be_met(ends: EpochEnds, step: int, end: int) -> None:
    assert ends.begin(step) == end


def test_an_epoch_has_ended_when_its_last_call_has() -> None:
    ends = EpochEnds(100, 20, meets_epochs=True)
    ends.begin(0)
    ends.update(20, is_quiet=False)
    assert not ends.ended
    ends.update(25, is_quiet=True)  # a call ran twice
    assert ends.ended
    ends.begin(25)
    assert not ends.ended


@pytest.mark.parametrize(("step", "ended"), [(0, False), (20, True), (21, False)])
def test_a_run_that_goes_on_at_an_epochs_end_knows_it(step: int, ended: bool) -> None:
    ends = EpochEnds(100, 20, meets_epochs=True)
    ends.restored(step)
    assert ends.ended is ended


def test_calls_that_go_on_beside_saves_meet_no_save() -> None:
    config = Config(program="a:B", steps=100, epoch_steps=20, checkpoint_steps=15)
    assert EpochEnds.from_config(config, evaluated=False, for_callbacks=False).begin(0) == 100
    assert EpochEnds.from_config(config, evaluated=True, for_callbacks=False).begin(0) == 20
    in_step = config.replace(strategy="mirrored", evaluation="inline")
    assert EpochEnds.from_config(in_step, evaluated=False, for_callbacks=False).begin(0) == 15


def test_callbacks_are_waited_for_at_an_epochs_end_until_they_have_heard() -> None:
    ends = EpochEnds(100, 20, meets_epochs=True, for_callbacks=True)
    ends.begin(0)
    ends.update(20, is_quiet=False)
    assert not ends.waits_for_callbacks(20)
    ends.update(20, is_quiet=True)
    assert ends.waits_for_callbacks(20)
    ends.heard = True
    assert not ends.waits_for_callbacks(20)
    ends.heard = False
    assert not ends.waits_for_callbacks(100)  # the run's end is done at once
    ends.for_callbacks = False
    assert not ends.waits_for_callbacks(20)
