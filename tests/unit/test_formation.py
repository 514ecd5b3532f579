"""Which members a training begins with."""

from __future__ import annotations

import pytest

from trainer.cluster.formation import can_do_without
from trainer.cluster.spec import Cluster
from trainer.config import Config

CLUSTER = Cluster({"chief": ["h:1"], "worker": ["a:1", "b:1", "c:1"], "ps": ["d:1", "e:1"]}, "chief", 0)


def config(**settings: object) -> Config:
    return Config.from_dict({"program": "p:P", "ps_wait_seconds": 30.0, "worker_wait_seconds": 60.0, **settings})


@pytest.mark.parametrize(
    ("missing", "without", "waited", "settings", "expected"),
    [
        ({"worker-1"}, set(), 59.0, {}, False),
        ({"worker-1"}, set(), 60.0, {}, True),
        ({"worker-1"}, {"worker-1"}, 0.0, {}, True),
        ({"worker-1", "worker-2"}, {"worker-1"}, 0.0, {}, False),
        ({"worker-0", "worker-1", "worker-2"}, {"worker-0", "worker-1", "worker-2"}, 1e6, {}, False),
        ({"ps-0"}, set(), 29.0, {}, False),
        ({"ps-0"}, set(), 30.0, {}, True),
        ({"ps-0", "worker-1"}, set(), 30.0, {}, False),
        ({"ps-0", "ps-1"}, set(), 1e6, {}, False),
        ({"worker-1"}, set(), 1e6, {"elastic": False}, False),
        ({"ps-0"}, {"ps-0"}, 1e6, {"elastic": False}, False),
    ],
)
def test_who_can_be_done_without(
    missing: set[str], without: set[str], waited: float, settings: dict[str, object], expected: bool
) -> None:
    assert can_do_without(config(**settings), CLUSTER, missing, without, waited) is expected


def test_cluster_of_those_who_are_there_moves_up() -> None:
    smaller = CLUSTER.only({"worker-0", "worker-2", "ps-1"})
    assert smaller.jobs == {"chief": ["h:1"], "worker": ["a:1", "c:1"], "ps": ["e:1"]}
