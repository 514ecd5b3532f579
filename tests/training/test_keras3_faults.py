"""A training of Keras 3 whose worker, ps and coordinator are killed in turn: what is counted is in the table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from processes import Runs
from test_fault_tolerance import BATCH, CALL, Training, goes_back, restarted

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]
WORKERS = 2


def test_a_table_has_each_counted_step_after_deaths_of_every_kind(runs: Runs, tmp_path: Path) -> None:
    named = {"program": "paced3:Paced3", "run": "faults-keras3"}
    training = Training(runs, tmp_path, "--partitioner-min-bytes", "1024", **named, steps=3000)
    try:
        training.until(lambda: training.newest, "a checkpoint")
        training.awaits("step-0")
        before = training.kill("worker-0")
        training.serves_again("worker-0", before)
        training.trains_on()
        assert restarted(training, before) == {"worker-0"}

        goes_back(training, training.kill, "ps-1")

        step, before = training.step, training.kill("chief-0")
        training.starts_again("chief-0", before)
        found = training.process.search(r"attached to the variables on the ps, at step (\d+)")
        assert int(found[1]) >= step
        training.trains_on()
        assert restarted(training, before) == {"chief-0"}
        training.ends()
    finally:
        training.process.end()
    status = runs.status(training.run)
    assert status["state"] == "finished"
    reader = tf.train.load_checkpoint(str(runs.directory(training.run) / "checkpoints" / f"ckpt-{status['step']}"))
    [table] = [name for name in reader.get_variable_to_shape_map() if "table" in name]
    counted = reader.get_tensor(table)
    assert np.array_equal(counted, np.round(counted[:, :1]).repeat(counted.shape[1], axis=1))
    done = counted[:, 0].sum() / BATCH
    # What was in flight is done again: of the killed worker, at the save, and when the coordinator died.
    assert status["step"] <= done <= status["step"] + CALL * (1 + 2 * WORKERS)
    assert re.search(r"going on at step \d+", training.process.output)
