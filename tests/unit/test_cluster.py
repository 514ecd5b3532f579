"""TF_CONFIG says who is in the cluster and which task this is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.cluster import spec
from trainer.cluster.spec import ClusterConfig
from trainer.core.settings.config import ConfigError
from trainer.core.settings.strategies import STRATEGIES

JOBS = {"chief": ["h:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}


def tf_config(job: str, index: int = 0, **more: list[str]) -> str:
    return json.dumps({"cluster": {**JOBS, **more}, "task": {"type": job, "index": index}})


def test_task_and_its_address() -> None:
    cluster = ClusterConfig.from_tf_config(tf_config("worker", 1))
    assert (cluster.task, cluster.address, cluster.workers) == ("worker-1", "w1:1", 2)
    assert cluster.servers == {"worker-0": "w0:1", "worker-1": "w1:1", "ps-0": "p:1"}


def test_evaluator_is_no_member() -> None:
    assert "evaluator" not in ClusterConfig.from_tf_config(tf_config("chief", evaluator=["e:1"])).jobs
    assert ClusterConfig.from_tf_config(tf_config("evaluator")).task == "evaluator-0"


def test_the_data_service_is_no_member_and_told_apart() -> None:
    service = {"dispatcher": ["h:2"], "data": ["d0:1", "d1:1"]}
    cluster = ClusterConfig.from_tf_config(tf_config("data", 1, **service))
    assert (cluster.task, cluster.address, cluster.jobs, cluster.service) == ("data-1", "d1:1", JOBS, service)
    assert not cluster.trains
    assert not {"data-0", "dispatcher-0"} & set(cluster.servers)
    assert ClusterConfig.from_tf_config(cluster.as_tf_config()) == cluster
    ClusterConfig(JOBS, "chief", 0, service).check_strategy("parameter_server")


def test_the_setting_needs_a_data_service() -> None:
    ClusterConfig(JOBS, "chief", 0).check_input("local")
    ClusterConfig(JOBS, "chief", 0, {"dispatcher": ["h:2"], "data": ["d:1"]}).check_input("service")
    with pytest.raises(ConfigError, match="the cluster has no data service, but 1 chief, 2 worker, 1 ps: add"):
        ClusterConfig(JOBS, "chief", 0).check_input("service")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "TF_CONFIG must be JSON like"),
        ("{}", "TF_CONFIG must be JSON like"),
        ("[]", "TF_CONFIG must be JSON like"),
        ('{"cluster": ["h:1"], "task": {"type": "chief"}}', "TF_CONFIG must be JSON like"),
        ('{"cluster": null, "task": {"type": "chief"}}', "TF_CONFIG must be JSON like"),
        (tf_config("workers"), "unknown task type 'workers': expected one of chief, ps, worker"),
        (tf_config("worker", 2), "the task is worker 2, and the cluster lists no such member"),
        (tf_config("worker", -1), "the task is worker -1"),
        (tf_config("chief", ps=["p"]), "job 'ps' must be a list of host:port, and 'p' is none"),
        (tf_config("chief", ps=["grpc://p:1"]), "job 'ps' must be a list of host:port, and 'grpc://p:1' is none"),
        (tf_config("chief", ps=["p:70000"]), "job 'ps' must be a list of host:port, and 'p:70000' is none"),
        (tf_config("chief", ps="p:1"), "job 'ps' must be a list of host:port, not 'p:1'"),
        (tf_config("chief", servers=["p:1"]), "unknown job 'servers' in the cluster: expected one of chief, ps"),
        (tf_config("chief", chief=["h:1", "h:2"]), "a cluster has one chief, not h:1, h:2"),
        (tf_config("chief", data=["d:1"]), "the data service has .* expected one dispatcher beside its data workers"),
        (tf_config("data", 1, dispatcher=["h:2"], data=["d:1"]), "the task is data 1, and the cluster lists no such"),
        (tf_config("ps", chief=[]), "TF_CONFIG: the cluster has no chief. In TensorFlow 1 worker 0 was it"),
    ],
)
def test_wrong_tf_config_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ClusterConfig.from_tf_config(text)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_strategy_has_its_jobs(strategy: str) -> None:
    jobs = {job: JOBS[job] for job in STRATEGIES[strategy].jobs}
    ClusterConfig(jobs, "chief", 0).check_strategy(strategy)


@pytest.mark.parametrize(
    ("strategy", "jobs", "expected"),
    [
        (
            "parameter_server",
            {"chief": ["h:1"], "worker": []},
            "one ps and one worker in the cluster, which has 1 chief$",
        ),
        ("parameter_server", {"worker": ["w:1"], "ps": ["p:1"]}, "needs at least one chief"),
        ("multi_worker_mirrored", {"chief": ["h:1"]}, "needs at least one worker"),
        ("multi_worker_mirrored", JOBS, "can't use the ps of the cluster.*wait for them for ever"),
        ("mirrored", JOBS, "can't use the worker and ps of the cluster.*it trains on chief alone"),
    ],
)
def test_strategy_refuses_another_cluster(strategy: str, jobs: dict[str, list[str]], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ClusterConfig(jobs, "chief", 0).check_strategy(strategy)


@pytest.mark.parametrize(
    ("job", "without", "trains"),
    [
        ("chief", "", True),
        ("worker", "", False),
        ("ps", "", False),
        ("chief", "ps", True),
        ("worker", "ps", True),
        ("evaluator", "ps", False),
    ],
)
def test_workers_train_where_no_ps_is(job: str, without: str, trains: bool) -> None:
    jobs = {name: members for name, members in JOBS.items() if name != without}
    assert ClusterConfig(jobs, job, 0).trains is trains


def test_free_ports_are_none_that_an_outgoing_connection_may_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "OUTGOING_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text("12040\t60999\n")
    ports = [int(address.rpartition(":")[2]) for address in spec.free_addresses(8)]
    assert len(set(ports)) == 8
    assert all(12000 <= port < 12040 for port in ports)


@pytest.mark.parametrize("text", ["1024 65535", ""])
def test_ports_are_free_also_where_all_may_go_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(spec, "OUTGOING_PORTS", tmp_path / "range")
    (tmp_path / "range").write_text(text)
    assert len(set(spec.free_addresses(3))) == 3
