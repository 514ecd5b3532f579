"""TensorFlow's own resolvers under Slurm and Kubernetes: what they need, and why the rendered text does without them.

There is no Kubernetes here: a stand-in for its client answers with the pods of the rendered text.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
import yaml

from fleet.render import kubernetes
from tests.managers.test_kubernetes import TASKS, WANTED, pods_of

pytestmark = pytest.mark.timeout(600)
JOBS = {"chief": 1, "ps": 1, "worker": 2}
RESOLVED = f"""
import json, tensorflow as tf
resolver = tf.distribute.cluster_resolver.SlurmClusterResolver({JOBS}, gpus_per_node=4, auto_set_gpu=False)
print(json.dumps([resolver.cluster_spec().as_dict(), resolver.get_task_info()]))
"""
# What Slurm says to a step of twelve tasks on twelve nodes.
STEP = {
    "SLURM_STEP_NODELIST": "node[1-12]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x12)",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "1",
}


def test_slurms_resolver_finds_its_task_on_one_node(slurm: Any) -> None:
    step = slurm.call("srun", "--ntasks=4", sys.executable, "-c", RESOLVED)
    found = [json.loads(line) for line in step.splitlines() if line.startswith("[")]
    clusters = [cluster for cluster, _ in found]
    assert clusters == [clusters[0]] * 4
    assert sorted(tuple(task) for _, task in found) == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    ports = [int(member.rpartition(":")[2]) for members in clusters[0].values() for member in members]
    assert sorted(ports) == [8888, 8889, 8890, 8891]


def test_slurms_resolver_puts_tasks_of_ten_nodes_on_others_than_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's second task is on node2; the resolver sorts names as text, and sends its calls to node10."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        {"ps": 1, "worker": 11}, gpus_per_node=1, auto_set_gpu=False
    )
    assert resolver.cluster_spec().task_address(*resolver.get_task_info()) == "node10:8888"


@pytest.mark.parametrize("gpus", [0, 11])
def test_slurms_resolver_fails_where_a_node_has_fewer_gpus_than_tasks(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    for name, value in {**STEP, "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "12"}.items():
        monkeypatch.setenv(name, value)
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        {"ps": 1, "worker": 11}, gpus_per_node=gpus, auto_set_gpu=False
    )
    with pytest.raises(ValueError, match="must not be zero"):
        resolver.cluster_spec()


def test_kubernetes_resolver_finds_the_pods_by_their_labels_and_addresses_their_nodes() -> None:
    """So it is of use only to pods on their node's own network, one of each port."""
    rendered = list(yaml.safe_load_all(kubernetes.render(WANTED, "example.org/mine:1", "1Gi")))
    labels = {name: one["spec"]["template"]["metadata"]["labels"] for one in rendered for name in pods_of(one)}

    class Client:
        """Kubernetes' list of pods by a selector of labels, all on two nodes."""

        def list_pod_for_all_namespaces(self, label_selector: str) -> Any:
            asked = dict(each.split("=") for each in label_selector.split(","))
            pods = [
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name),
                    status=SimpleNamespace(
                        phase="Running", host_ip=f"192.0.2.{number % 2}", pod_ip=f"198.51.100.{number}"
                    ),
                )
                for number, (name, has) in enumerate(labels.items())
                if asked.items() <= has.items()
            ]
            return SimpleNamespace(items=pods)

    selectors = {
        job: [f"app.kubernetes.io/instance=mine,app.kubernetes.io/component={job}"] for job in ("chief", "ps", "worker")
    }
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        selectors, tf_server_port=kubernetes.PORT, override_client=Client()
    )
    found = resolver.cluster_spec().as_dict()
    assert {job: len(members) for job, members in found.items()} == {job: TASKS[job] for job in selectors}
    assert {member.rpartition(":")[0] for members in found.values() for member in members} <= {"192.0.2.0", "192.0.2.1"}
