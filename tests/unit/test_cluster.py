"""TF_CONFIG says who is in the cluster and which task this is."""

from __future__ import annotations

import json

import pytest

from trainer.cluster import Cluster
from trainer.config import ConfigError

JOBS = {"chief": ["h:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}


def tf_config(job: str, index: int = 0, **more: list[str]) -> str:
    return json.dumps({"cluster": {**JOBS, **more}, "task": {"type": job, "index": index}})


def test_task_and_its_address() -> None:
    cluster = Cluster.from_tf_config(tf_config("worker", 1))
    assert (cluster.task, cluster.address, cluster.workers) == ("worker-1", "w1:1", 2)
    assert cluster.servers == {"worker-0": "w0:1", "worker-1": "w1:1", "ps-0": "p:1"}


def test_evaluator_is_no_member() -> None:
    assert "evaluator" not in Cluster.from_tf_config(tf_config("chief", evaluator=["e:1"])).jobs
    assert Cluster.from_tf_config(tf_config("evaluator")).task == "evaluator-0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "TF_CONFIG must be JSON like"),
        ("{}", "TF_CONFIG must be JSON like"),
        ("[]", "TF_CONFIG must be JSON like"),
        (tf_config("workers"), "task type 'workers' is none of"),
        (tf_config("worker", 2), "the task is worker 2, and the cluster lists no such member"),
        (tf_config("worker", -1), "the task is worker -1"),
        (tf_config("chief", ps=["p"]), "job 'ps' must be a list of host:port"),
    ],
)
def test_wrong_tf_config_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Cluster.from_tf_config(text)


def test_strategy_needs_every_job() -> None:
    cluster = Cluster({"chief": ["h:1"], "worker": []}, "chief", 0)
    with pytest.raises(ConfigError, match="needs at least one worker and one ps"):
        cluster.check_strategy()
