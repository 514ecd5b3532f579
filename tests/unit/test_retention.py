"""Which checkpoints the rules keep, and why."""

from __future__ import annotations

import math

import pytest

from trainer.core.settings.config import Config
from trainer.run.retention import HOUR, CheckpointInfo, Retention, is_sound


def saved(*steps: int, every: float = HOUR / 2, **more: object) -> list[CheckpointInfo]:
    """Return checkpoints of these steps, saved at equal intervals."""
    return [CheckpointInfo(step, 1000 + number * every, **more) for number, step in enumerate(steps)]  # type: ignore[arg-type]


def kept(rules: Retention, found: list[CheckpointInfo]) -> dict[int, list[str]]:
    return {step: why for step, why in rules.reasons(found).items() if why}


def test_the_newest_are_kept() -> None:
    assert kept(Retention(3), saved(10, 20, 30, 40)) == {20: ["newest"], 30: ["newest"], 40: ["newest"]}
    assert kept(Retention(3), saved(10)) == {10: ["newest"]}


def test_the_best_by_a_metric_are_kept_besides() -> None:
    found = [
        CheckpointInfo(10, 1, evaluation={"loss": 0.5, "accuracy": 0.7}),
        CheckpointInfo(20, 2, evaluation={"loss": 0.1, "accuracy": 0.9}),
        CheckpointInfo(30, 3, evaluation={"loss": 0.2, "accuracy": 0.95}),
        CheckpointInfo(40, 4, evaluation={"loss": math.nan, "accuracy": math.nan}),
        CheckpointInfo(50, 5),
    ]
    assert kept(Retention(1, best=1), found) == {20: ["best"], 50: ["newest"]}
    assert kept(Retention(1, best=2, metric="accuracy", mode="max"), found) == {
        20: ["best"],
        30: ["best"],
        50: ["newest"],
    }
    assert kept(Retention(1, best=2, metric="auc"), found) == {50: ["newest"]}


def test_of_equally_good_ones_the_later_is_kept() -> None:
    found = saved(10, 20, 30, evaluation={"loss": 0.5})
    assert kept(Retention(1, best=1), found) == {30: ["newest", "best"]}


def test_one_every_so_many_hours_is_kept_whenever_the_rules_are_asked() -> None:
    rules, there = Retention(1, hours=2), []
    for each in saved(*range(1, 14)):  # 6 hours
        there = [one for one in [*there, each] if rules.reasons([*there, each])[one.step]]
    assert [one.step for one in there] == [1, 5, 9, 13]


def test_a_clock_that_was_put_back_costs_no_checkpoint_of_an_hour() -> None:
    before, after = CheckpointInfo(1, 1000 * HOUR), [CheckpointInfo(step, step * HOUR) for step in range(2, 5)]
    assert list(kept(Retention(1, hours=1), [before, *after])) == [1, 2, 3, 4]


def test_a_run_whose_loss_became_nan_keeps_two_from_before() -> None:
    sound = [True, True, True, False, False, False, False]
    found = [CheckpointInfo(10 * number, number, sound=one) for number, one in enumerate(sound)]
    assert kept(Retention(3), found) == {10: ["sound"], 20: ["sound"], 40: ["newest"], 50: ["newest"], 60: ["newest"]}


@pytest.mark.parametrize(
    ("numbers", "sound"),
    [
        ({"loss": 0.1, "share": math.nan}, True),
        ({"loss": math.nan, "share": 0.1}, False),
        ({"judges": 0.1, "makes": -3.0}, True),
        ({"judges": 0.1, "makes": math.inf}, False),
        ({}, None),
    ],
)
def test_a_step_is_sound_by_its_loss_or_where_it_tells_none_by_all_that_it_tells(
    numbers: dict[str, float], sound: bool | None
) -> None:
    assert is_sound(numbers) is sound


def test_rules_are_the_settings() -> None:
    config = Config(
        program="a:B",
        checkpoints_kept=4,
        checkpoints_kept_best=2,
        checkpoints_best_metric="accuracy",
        checkpoints_best_mode="max",
        checkpoints_kept_hours=6,
    )
    assert Retention.from_config(config) == Retention(4, 2, "accuracy", "max", 6)
