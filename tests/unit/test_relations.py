"""Run settings that are right alone and senseless together."""

from __future__ import annotations

import pytest

from trainer.core.settings.config import Config, ConfigError

PROGRAM = "trainer.examples.digits:Digits"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"steps": 100, "checkpoint_steps": 101, "checkpoint_seconds": 0},
            "checkpoint_steps is 101, steps is 100, and checkpoint_seconds is 0",
        ),
        ({"checkpoint_seconds": 3600, "checkpoints_kept_hours": 0.5}, "each one would be kept for ever"),
        ({"steps": 1000, "epoch_steps": 1001}, "epoch_steps is 1,001, and steps is 1,000"),
        (
            {"partitioner_min_bytes": 2000, "partitioner_max_bytes": 1000},
            "partitioner_min_bytes is 2,000, and partitioner_max_bytes is 1,000; expected a least size",
        ),
        (
            {"partitioner": "max_size", "partitioner_min_bytes": 2000, "partitioner_max_bytes": 1000},
            "expected a least size that is not above the largest",
        ),
        ({"strategy": "mirrored", "partitioner": "fixed_shards"}, "mirrored has no parameter servers to split"),
        ({"member_wait_timeout_seconds": 10}, "member_wait_timeout_seconds is 10, and ps_grace_seconds is 30"),
        ({"training_timeout_seconds": 5}, "training_timeout_seconds is 5, and heartbeat_timeout_seconds is 5"),
        ({"restoring_timeout_seconds": 60, "heartbeat_timeout_seconds": 90}, "of more than 90"),
        ({"log_seconds": 1e-9}, "log_seconds: must be at least 0.001, not 1e-09"),
        ({"checkpoint_seconds": 1e-9}, "checkpoint_seconds: must be at least 0.001"),
        ({"evaluate_poll_seconds": 1e-9}, "evaluate_poll_seconds: must be at least 0.001"),
        ({"checkpoints_kept_hours": 1e-9}, "checkpoints_kept_hours: must be at least 0.001"),
        ({"ps_grace_seconds": 1e-9}, "ps_grace_seconds: must be at least 0.001"),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"program": PROGRAM, **settings})
    assert expected in str(caught.value)
    assert "expected" in str(caught.value) or "must be" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps": 100, "checkpoint_steps": 101},  # and every 30 s
        {"steps": 100, "checkpoint_steps": 100, "checkpoint_seconds": 0},
        {"steps": 100, "epoch_steps": 100},
        {"partitioner_min_bytes": 2**30},  # the largest is another partitioner's, and the default
        {"partitioner": "max_size", "partitioner_max_bytes": 1024},
        {"strategy": "mirrored", "partitioner": "none"},
        {"member_wait_timeout_seconds": 10, "elastic": False},
        {"member_wait_timeout_seconds": 10, "ps_grace_seconds": 0},
        {"checkpoint_seconds": 0, "checkpoint_steps": 10, "checkpoints_kept_hours": 0.5},
    ],
)
def test_settings_that_make_sense_together_are_taken(settings: dict[str, object]) -> None:
    Config.from_dict({"program": PROGRAM, **settings})
