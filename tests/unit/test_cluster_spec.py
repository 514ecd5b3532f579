import json

import pytest
from cluster_spec import ClusterSpecError, cluster_spec, host_tasks

LAB = {
    "chief": ["head"],
    "evaluator": ["head"],
    "tensorboard": ["head"],
    "ps": ["ps-0", "ps-1"],
    "worker": ["worker-0", "worker-1"],
}


def addresses(groups, **extra):
    hosts = sorted({host for group in groups.values() for host in group})
    return {host: {"ansible_host": f"10.0.3.{10 + i}", **extra.get(host, {})} for i, host in enumerate(hosts)}


def test_cluster_has_jobs_in_the_order_written_and_no_evaluator():
    groups = {"worker": ["b", "a"], "ps": ["c"], "chief": ["d"], "evaluator": ["d"]}
    spec = cluster_spec(groups, addresses(groups))
    assert spec["cluster"] == {
        "chief": ["10.0.3.13:2222"],
        "ps": ["10.0.3.12:2300"],
        "worker": ["10.0.3.11:2400", "10.0.3.10:2400"],
    }
    assert [task["name"] for task in spec["tasks"]] == ["chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0"]
    assert spec["tasks"][-1]["port"] is None


def test_index_counts_all_tasks_of_a_job():
    hostvars = addresses(LAB) | {"worker-0": {"ansible_host": "10.0.3.30", "worker_tasks": 2, "worker_port": 5000}}
    spec = cluster_spec(LAB, hostvars)
    assert [(t["name"], t["host"], t["port"]) for t in spec["tasks"] if t["job"] == "worker"] == [
        ("worker-0", "worker-0", 5000),
        ("worker-1", "worker-0", 5001),
        ("worker-2", "worker-1", 2400),
    ]


def test_a_job_without_tasks_is_left_out():
    hostvars = addresses(LAB) | {
        "ps-0": {"ansible_host": "a", "ps_tasks": 0},
        "ps-1": {"ansible_host": "b", "ps_tasks": 0},
    }
    assert "ps" not in cluster_spec(LAB, hostvars)["cluster"]


def test_cluster_address_is_preferred_and_ipv6_is_bracketed():
    groups = {"chief": ["a"], "ps": ["b"]}
    hostvars = {
        "a": {"ansible_host": "192.0.2.1", "cluster_address": "10.0.0.1"},
        "b": {"ansible_host": "2001:db8::2"},
    }
    assert cluster_spec(groups, hostvars)["cluster"] == {"chief": ["10.0.0.1:2222"], "ps": ["[2001:db8::2]:2300"]}


def test_host_tasks_carry_the_whole_cluster():
    spec = cluster_spec(LAB, addresses(LAB))
    (task,) = host_tasks(spec, "worker-1")
    config = json.loads(task["tf_config"])
    assert config == {"cluster": spec["cluster"], "task": {"type": "worker", "index": 1}}
    assert [task["name"] for task in host_tasks(spec, "head")] == ["chief-0", "evaluator-0"]


def test_tensorboard_is_given_its_address():
    assert cluster_spec(LAB, addresses(LAB))["tensorboard"] == {"head": {"address": "10.0.3.10", "port": 6006}}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "host 'worker-0' has no address"),
        ({"ansible_host": "{{ ansible_default_ipv4.address }}"}, "expected a literal such as 192.0.2.10"),
        ({"ansible_host": "10.0.3.30", "worker_tasks": "two"}, "worker_tasks: 'two'; expected a number"),
        ({"ansible_host": "10.0.3.30", "worker_tasks": True}, "worker_tasks: True; expected a number"),
        ({"ansible_host": "10.0.3.30", "worker_port": 70000}, "worker_port: 70000; expected a number from 1 to 65535"),
    ],
)
def test_bad_values_are_named(variables, said):
    with pytest.raises(ClusterSpecError, match=said.replace("(", r"\(")):
        cluster_spec(LAB, addresses(LAB) | {"worker-0": variables})
