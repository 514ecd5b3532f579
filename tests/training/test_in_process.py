"""Which clusters one process can be; none of these starts a server."""

from __future__ import annotations

import pytest

from trainer.core.settings.config import ConfigError
from trainer.tasks.in_process import start_cluster


@pytest.mark.parametrize("strategy", ["mirrored", "one_device", "central_storage"])
def test_strategy_of_one_process_has_its_chief_alone(strategy: str) -> None:
    cluster = start_cluster(strategy, workers=2, servers=1)
    assert list(cluster.jobs) == ["chief"]
    assert cluster.trains


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("multi_worker_mirrored", "needs a process for each member: leave --in-process out"),
        ("parameter_server", "needs at least one ps and one worker in the cluster, which has 1 chief"),
    ],
)
def test_cluster_that_one_process_can_not_be_is_refused(strategy: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        start_cluster(strategy, workers=0, servers=0)
