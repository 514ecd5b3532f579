"""The program of `fab drill`: a drill can make its steps longer while it trains."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import tensorflow as tf

from trainer.drill import PACE, DrillProgram


def test_steps_are_as_long_as_the_file_says_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    pace = tmp_path / PACE
    pace.write_text("0\n")
    batches = iter(DrillProgram().train_dataset(tf.distribute.InputContext()))
    next(batches)
    changed = tmp_path / "changed"
    changed.write_text("1.5\n")
    os.replace(changed, pace)  # noqa: PTH105
    # Some were made before the change.
    longest = 0.0
    for _ in range(8):
        began = time.monotonic()
        next(batches)
        longest = max(longest, time.monotonic() - began)
        if longest >= 1.5:
            break
    assert longest >= 1.5
