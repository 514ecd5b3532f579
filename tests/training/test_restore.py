"""Right after a restore, every value is the checkpoint's, on as many ps as saved it and on others: table and slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import Process, Runs, run_check

from trainer.tasks.local import local_cluster

pytestmark = pytest.mark.timeout(300)


def servers(runs: Runs, cluster: dict[str, list[str]]) -> list[Process]:
    """Start the cluster's workers and ps, with nothing but TF_CONFIG."""
    started = []
    for job in ("ps", "worker"):
        for index in range(len(cluster[job])):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            started.append(runs.task(TF_CONFIG=config))
    for process in started:
        process.search("serves at")
    return started


def coordinate(mode: str, cluster: dict[str, list[str]], runs: Runs, values: Path) -> dict:
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    return run_check("restore_check.py", mode, str(runs.shared), str(values), TF_CONFIG=config)


def places(servers: int) -> list[str]:
    return [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(servers)]


@pytest.fixture(scope="module")
def values(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[dict, dict]]]:
    """Yield, by the number of ps, the values and where the shards are: 0 for the training on two, else restored."""
    directory = tmp_path_factory.mktemp("values")
    cluster = local_cluster(2, 3)
    started = servers(runs, cluster)
    found = {}
    for number in (0, 2, 1, 3):
        file = directory / f"{number}.npz"
        fewer = {**cluster, "ps": cluster["ps"][: number or 2]}
        answer = coordinate("restore" if number else "train", fewer, runs, file)
        with np.load(file) as read:
            found[number] = dict(read), answer
    yield found
    for process in started:
        process.end()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_table_and_its_slots_are_sharded_over_all_ps_that_there_are(
    values: dict[int, tuple[dict, dict]], number: int
) -> None:
    answer = values[number][1]
    assert answer["table"] == places(number)
    assert answer["slots"] == [places(number)] * 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_values_restored_on_any_number_of_ps_equal_the_saved_ones(
    values: dict[int, tuple[dict, dict]], number: int
) -> None:
    saved, restored = values[0][0], values[number][0]
    assert set(saved) == set(restored)
    different = [name for name in saved if not np.array_equal(saved[name], restored[name])]
    assert different == []


def test_saved_values_are_not_the_initial_ones(values: dict[int, tuple[dict, dict]]) -> None:
    saved = values[0][0]
    slots = [saved[name] for name in saved if name.startswith("optimizer") and saved[name].ndim == 2]
    assert int(saved["step"]) == 40
    # Two moments for the table and for the dense kernel.
    assert sorted(slot.shape for slot in slots) == [(16, 1), (16, 1), (256, 16), (256, 16)]
    assert all(np.any(slot) for slot in slots)
