"""Members that a task's environment file names later."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from stale_tasks import names_more

from fleet.site.escaping import environment_value
from trainer.cluster.members.growth import MEMBERS_POLL_SECONDS, Growing, is_growth, present
from trainer.cluster.spec import ClusterConfig

JOBS = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterConfig:
    return ClusterConfig(JOBS, "worker", 1, source=tmp_path / "worker-1.env")


def write(cluster: ClusterConfig, **jobs: Any) -> None:
    config = json.dumps({"cluster": JOBS | jobs, "task": {"type": "worker", "index": 1}})
    assert cluster.source is not None
    cluster.source.write_text(f"# managed\nTF_CONFIG={environment_value(config)}\nTRAINER_SETTINGS=/x\n")


def test_members_behind_the_others_are_found_once(cluster: ClusterConfig) -> None:
    growing = Growing(cluster)
    assert growing.poll(100.0) == {}  # there is no file
    write(cluster, worker=["b:1", "c:1", "e:1"], ps=["d:1", "f:1"])
    assert growing.poll(100.0 + MEMBERS_POLL_SECONDS / 2) == {}
    assert growing.poll(100.0 + MEMBERS_POLL_SECONDS) == {"worker-2": "e:1", "ps-1": "f:1"}
    assert growing.poll(100.0 + 2 * MEMBERS_POLL_SECONDS) == {}
    assert growing.cluster.jobs == {"chief": ["a:1"], "worker": ["b:1", "c:1", "e:1"], "ps": ["d:1", "f:1"]}


@pytest.mark.parametrize(
    "jobs",
    [
        {"worker": ["b:1"]},
        {"worker": ["e:1", "b:1", "c:1"]},
        {"chief": ["e:1"]},
        {"ps": []},
        {"worker": ["b:1", "c:1", "no address"]},
    ],
)
def test_another_cluster_is_for_the_next_process(cluster: ClusterConfig, jobs: dict[str, Any]) -> None:
    write(cluster, **jobs)
    assert present(cluster).jobs == JOBS


def test_those_in_step_never_grow(cluster: ClusterConfig) -> None:
    in_step = dataclasses.replace(cluster, jobs={**JOBS, "ps": []})
    write(cluster, ps=[], worker=["b:1", "c:1", "e:1"])
    assert present(in_step).workers == 2


def test_a_file_that_is_cut_off_changes_nothing(cluster: ClusterConfig) -> None:
    assert cluster.source is not None
    cluster.source.write_text('TF_CONFIG=\'{"cluster": {')
    assert present(cluster) is cluster


ADDRESSES = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("task", ["worker", "chief"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"worker": ["b:1", "d:1"]},
        {"ps": ["c:1", "e:1"]},
        {"worker": ["b:1", "d:1"], "ps": ["c:1", "e:1", "f:1"]},
        {"worker": ["d:1", "b:1"]},
        {"worker": []},
        {"ps": ["e:1"]},
        {"chief": ["g:1"]},
    ],
)
def test_what_restarts_a_task_is_what_it_does_not_follow(change: dict[str, list[str]], task: str, index: int) -> None:
    """The role finds stale tasks by one function, and a task follows its file by another."""

    def config(jobs: dict[str, list[str]], number: int) -> str:
        return json.dumps({"cluster": jobs, "task": {"type": task, "index": number}})

    before, after = config(ADDRESSES, 0), config({**ADDRESSES, **change}, index)
    if index >= len({**ADDRESSES, **change}[task]):
        pytest.skip("there is no such task")
    follows = is_growth(ClusterConfig.from_tf_config(before), ClusterConfig.from_tf_config(after))
    assert names_more(before, after) == follows
