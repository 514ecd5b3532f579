"""Right after a restore, every value is the checkpoint's: a table sharded over both ps, and Adam's slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import Process, Runs, run_check

from trainer.local import local_cluster

pytestmark = pytest.mark.timeout(300)


def servers(runs: Runs, cluster: dict[str, list[str]]) -> list[Process]:
    """Start the cluster's workers and ps as they start on hosts, with nothing but TF_CONFIG."""
    started = []
    for job in ("ps", "worker"):
        for index in range(len(cluster[job])):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            started.append(runs.start(["-m", "trainer"], TF_CONFIG=config))
    for process in started:
        process.search("serves at")
    return started


def coordinate(mode: str, cluster: dict[str, list[str]], runs: Runs, values: Path) -> dict:
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    return run_check("restore_check.py", mode, str(runs.shared), str(values), TF_CONFIG=config)


@pytest.fixture(scope="module")
def values(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict, dict, dict]]:
    """Yield the values after training, after a new coordinator's restore, and where the shards are."""
    directory = tmp_path_factory.mktemp("values")
    cluster = local_cluster(2, 2)
    started = servers(runs, cluster)
    said = [coordinate(mode, cluster, runs, directory / f"{mode}.npz") for mode in ("train", "restore")]
    for process in started:
        process.end()
    with np.load(directory / "train.npz") as saved, np.load(directory / "restore.npz") as restored:
        yield saved, restored, said[-1]


def test_table_and_its_slots_are_sharded_over_both_ps(values: tuple[dict, dict, dict]) -> None:
    said = values[2]
    both = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in (0, 1)]
    assert said["table"] == both
    assert said["slots"] == [both, both]


def test_restored_values_equal_the_saved_ones_tensor_by_tensor(values: tuple[dict, dict, dict]) -> None:
    saved, restored, _ = values
    assert set(saved) == set(restored)
    different = [name for name in saved if not np.array_equal(saved[name], restored[name])]
    assert different == []


def test_saved_values_are_not_the_initial_ones(values: tuple[dict, dict, dict]) -> None:
    saved = values[0]
    slots = [saved[name] for name in saved if name.startswith("optimizer") and saved[name].ndim == 2]
    assert int(saved["step"]) == 40
    # Two moments for the table and for the dense kernel.
    assert sorted(slot.shape for slot in slots) == [(16, 1), (16, 1), (256, 16), (256, 16)]
    assert all(np.any(slot) for slot in slots)
