"""Values of an inventory that are right alone and senseless together: each is refused in a sentence with its fix."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.site.preflight import inventory_problems

RUN = {"program": "trainer.examples.digits:Digits"}
SITE = {"cluster_shared_dir": "/srv/trainer", "cluster_uid": 6006, "trainer_run": RUN}
UUIDS = [f"GPU-8e0e2a41-30d1-4fa0-8a3c-4a1f0a3c1b1{number}" for number in range(4)]
MIG = [f"MIG-8e0e2a41-30d1-4fa0-8a3c-4a1f0a3c1b1{number}" for number in range(4)]
PROMETHEUS = {"prometheus": ["head"]}


def problems(groups: dict[str, list[str]], hosts: dict[str, dict[str, Any]], **site: Any) -> list[str]:
    """What is wrong with a right inventory of four hosts, changed so; `run` is laid over the run settings."""
    groups = {"chief": ["head"], "ps": ["ps-0"], "worker": ["worker-0", "worker-1"]} | groups
    names = list(dict.fromkeys(host for group in groups.values() for host in group))
    run = RUN | site.pop("run", {})
    hostvars = {
        name: SITE | {"ansible_host": f"10.0.3.{10 + number}", "trainer_run": run} | site | hosts.get(name, {})
        for number, name in enumerate(names)
    }
    found = map(str, inventory_problems(groups | {"all": names}, hostvars))
    # Of two workers one has GPUs in some cases, which is refused for another reason.
    return [problem for problem in found if "the same number of GPUs" not in problem]


STRANGE: list[tuple[dict[str, list[str]], dict[str, dict[str, Any]], dict[str, Any], str]] = [
    # A host's variable of a group that it is not in
    ({}, {"ps-0": {"worker_tasks": 2}}, {}, "'ps-0': worker_tasks is 2, and it is for hosts of the group worker"),
    ({}, {"worker-1": {"ps_port": 2500}}, {}, "ps_port is 2500, and it is for hosts of the group ps"),
    ({}, {"worker-1": {"chief_port": 2500}}, {}, "it is for hosts of the group chief"),
    ({}, {"worker-0": {"gpu_count": 2}}, {}, "gpu_count is 2, and it is for hosts of the group gpu"),
    ({}, {"worker-0": {"nvidia_driver_branch": "535"}}, {}, "it is for hosts of the group gpu"),
    ({}, {"worker-0": {"tensorboard_port": 7000}}, {}, "it is for hosts of the group tensorboard"),
    ({}, {"worker-0": {"data_tasks": 2}, "worker-1": {"data_tasks": 2}}, {}, "hosts worker-0, worker-1: data_tasks"),
    ({}, {"worker-0": {"snapshots_kept": 3}}, {}, "it is for hosts of the group nfs_server"),
    ({}, {"worker-0": {"ps_index": 3}}, {}, "it is for hosts of the group ps"),
    # Addresses
    ({}, {"worker-1": {"ansible_host": "fd00::7"}}, {}, "the address is of IPv6, and head, ps-0, worker-0 have one of"),
    ({}, {"head": {"common_time_servers": ["10.0.3.10"]}}, {}, "10.0.3.10, which is the host itself"),
    # GPUs
    ({"gpu": ["worker-0"]}, {"worker-0": {"gpu_count": 4, "gpu_devices": UUIDS[:2]}}, {}, "gpu_devices names 2, and"),
    ({"gpu": ["worker-0"]}, {"worker-0": {"gpu_count": 1, "gpu_devices": UUIDS[:2]}}, {}, "expected as many"),
    # How long things take
    ({}, {}, {"trainer_stop_seconds": 30}, "a save may take saving_timeout_seconds, 1800"),
    ({}, {}, {"run": {"saving_timeout_seconds": 3600}}, "trainer_stop_seconds is 600, and a save may take"),
    ({}, {}, {"trainer_stop_seconds": 100, "run": {"saving_timeout_seconds": 101}}, "expected 101 or more"),
    ({}, {}, {"trainer_return_seconds": 30}, "trainer_return_seconds is 30, and ps_grace_seconds is 30"),
    ({}, {}, {"storage_rename_seconds": 60}, "storage_rename_seconds is 60, and lease_seconds is 30"),
    # The run settings among themselves, as the inventory has them
    ({}, {}, {"run": {"checkpoint_seconds": 0, "checkpoint_steps": 2000}}, "no checkpoint is saved before the end"),
    ({}, {}, {"run": {"partitioner_min_bytes": 2000, "partitioner_max_bytes": 1000}}, "not above the largest"),
    ({}, {}, {"run": {"log_seconds": 1e-9}}, "log_seconds: must be at least 0.001"),
    ({}, {}, {"run": {"run": "wide", "initial_weights": "wide@500"}}, "a checkpoint of the run itself"),
    ({}, {}, {"run": {"initial_weights": "default@500"}}, "a checkpoint of the run itself"),
    ({}, {}, {"run": {"checkpoints_kept_best": 1}}, "group evaluator is empty, so that the best ones are unknown"),
    ({}, {}, {"cluster_shared_dir": "", "run": {"strategy": "multi_worker_mirrored"}}, "give all hosts a shared path"),
    ({}, {}, {"cluster_uid": 999}, "cluster_uid is 999; expected the user number"),
    ({}, {}, {"cluster_uid": 61184}, "cluster_uid is 61184; expected the user number"),
    # Services and minimums
    ({"alertmanager": ["head"]}, {}, {}, "group prometheus is empty: it would get no alert"),
    (PROMETHEUS, {}, {"metrics_port": 0}, "Prometheus would have no task to scrape"),
    (PROMETHEUS, {}, {"run": {"checkpoint_seconds": 3600}}, "prometheus_checkpoint_seconds is 1800, and a checkpoint"),
    (PROMETHEUS, {"head": {"prometheus_no_step_seconds": 5}}, {}, "prometheus_no_step_seconds is 5, and steps are"),
    (PROMETHEUS, {"head": {"prometheus_down_seconds": 5}}, {}, "prometheus_down_seconds is 5, and a silent member"),
    (
        {"data": ["d"]},
        {"d": {"data_tasks": 0}},
        {"run": {"input": "service", "input_sharding": "off"}},
        "group data is",
    ),
    (
        {"evaluator": ["head"]},
        {},
        {"cluster_minimum": {"evaluator": 1}, "run": {"evaluation": "none"}},
        "these run settings start no evaluator",
    ),
    ({"evaluator": ["head"]}, {"head": {"evaluator_tasks": 0}}, {}, "evaluator_tasks is 0, and evaluation is sidecar"),
    ({}, {}, {"cluster_minimum": {"ps": 1}, "run": {"strategy": "mirrored"}}, "cluster_minimum: ps is 1, and these"),
    ({}, {}, {"cluster_minimum": {"worker": 1}, "run": {"elastic": False}}, "wait for all 2; expected all"),
    # Paths, packages, plugs
    (
        {},
        {},
        {"cluster_local_dir": "/srv/own"},
        "cluster_local_dir is /srv/own, and cluster_shared_dir is /srv/trainer",
    ),
    ({}, {}, {"cluster_nfs_dir": "/srv/nfs"}, "group nfs_server is empty: no host would serve it"),
    ({}, {}, {"common_packages": ["htop"]}, "common_packages has no acl, nftables, rsync"),
    ({}, {}, {"drill_power_off": "plug off {host}"}, "drill_power_off is set, and drill_power_on is not"),
    (
        {},
        {},
        {"drill_power_off": "plug off", "drill_power_on": "plug {host}"},
        "drill_power_off is 'plug off' for each",
    ),
]


@pytest.mark.parametrize(("groups", "hosts", "site", "expected"), STRANGE, ids=[case[3][:40] for case in STRANGE])
def test_values_that_make_no_sense_together_are_refused(
    groups: dict[str, list[str]], hosts: dict[str, dict[str, Any]], site: dict[str, Any], expected: str
) -> None:
    found = problems(groups, hosts, **site)
    assert any(expected in problem for problem in found), found
    assert len(found) == 1, found


@pytest.mark.parametrize(
    ("groups", "hosts", "site"),
    [
        ({}, {}, {}),
        ({}, {}, {"worker_port": 2500, "gpu_count": 2, "tensorboard_port": 7000}),  # in group_vars/all.yml
        ({}, {"ps-0": {"worker_tasks": 0, "worker_index": "", "gpu_count": None}}, {}),  # as a cloud's tags compose it
        ({"gpu": ["worker-0"]}, {"worker-0": {"gpu_count": 2}, "worker-1": {"gpu_count": 2}}, {}),  # of group worker
        ({"gpu": ["worker-0"]}, {"worker-0": {"gpu_count": 1, "gpu_devices": MIG, "worker_tasks": 4}}, {}),
        ({}, {"worker-1": {"cluster_address": "node.example.org"}}, {}),
        ({}, {}, {"trainer_stop_seconds": 60, "run": {"saving_timeout_seconds": 60}}),
        ({"evaluator": ["head"]}, {}, {"run": {"checkpoints_kept_best": 1}}),
        ({}, {}, {"run": {"initial_weights": "other@500"}}),
        (PROMETHEUS, {}, {"run": {"checkpoint_seconds": 0, "checkpoint_steps": 500}}),
        ({}, {}, {"cluster_minimum": {"worker": "all", "ps": 1}, "run": {"elastic": False}}),
        ({}, {}, {"drill_power_off": "off {host}", "drill_power_on": "on {address}"}),
        ({}, {}, {"cluster_uid": 1000}),
        ({}, {}, {"cluster_uid": 59999}),
    ],
)
def test_values_that_make_sense_together_are_taken(
    groups: dict[str, list[str]], hosts: dict[str, dict[str, Any]], site: dict[str, Any]
) -> None:
    assert problems(groups, hosts, **site) == []
