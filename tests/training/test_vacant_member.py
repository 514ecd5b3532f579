"""A place in TF_CONFIG that no machine has: the training goes on without it, and the others keep their numbers."""

from __future__ import annotations

import json

import pytest
from processes import DIGITS, Runs

from fleet.site.topology import cluster_spec, host_tasks
from trainer.cluster.spec import VACANT, free_addresses

pytestmark = pytest.mark.timeout(300)


def test_training_ends_without_the_member_that_no_machine_is(runs: Runs) -> None:
    ports = [int(address.rpartition(":")[2]) for address in free_addresses(4)]
    groups = {"chief": ["head"], "ps": ["store"], "worker": ["train-c", "train-a"]}
    hostvars = {
        "head": {"ansible_host": "127.0.0.1", "chief_port": ports[0]},
        "store": {"ansible_host": "127.0.0.1", "ps_port": ports[1]},
        "train-a": {"ansible_host": "127.0.0.1", "worker_port": ports[2], "worker_index": 0},
        "train-c": {"ansible_host": "127.0.0.1", "worker_port": ports[3], "worker_index": 2},
    }
    settings = runs.shared / "settings.json"
    run = {"program": DIGITS, "shared_dir": str(runs.shared), "run": "vacant", "steps": 200, "worker_wait_seconds": 10}
    settings.write_text(json.dumps(run | {"evaluation": "none"}))
    hostvars["head"]["trainer_run"] = run
    spec = cluster_spec(groups, hostvars)
    assert spec["cluster"]["worker"][1] == VACANT
    started = {
        task["name"]: runs.task(TF_CONFIG=task["tf_config"], TRAINER_SETTINGS=str(settings))
        for host in ("store", "train-a", "train-c", "head")
        for task in host_tasks(spec, host)
    }
    assert sorted(started) == ["chief-0", "ps-0", "worker-0", "worker-2"]
    assert started["chief-0"].wait() == 0, started["chief-0"].output
    assert "worker-1" not in started["chief-0"].output
    status = runs.status("vacant")
    assert status["step"] == 200
    assert status["workers"].keys() == {"worker-0", "worker-2"}
