"""The clouds' inventory files, without the clouds' libraries.

Each file's `compose` and `keyed_groups` are evaluated by Ansible's plugin `constructed` over what the cloud's own
plugin made of a recorded answer (tests/cloud/plugins). In tests/cloud those plugins themselves run.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from fleet.errors import OperatorMistake
from fleet.site.inventory import load_inventory

ROOT = Path(__file__).parents[2]
FILES = {"aws": "aws_ec2.yml", "gcp": "gcp_compute.yml", "openstack": "openstack.yml"}
WORKERS = ["10.0.0.15", "10.0.0.16", "10.0.0.14"]  # by worker_index; the clouds list them in another order
TAGS = {"aws": lambda v: v["tags"], "gcp": lambda v: v["labels"], "openstack": lambda v: v["openstack"]["metadata"]}


@pytest.fixture(params=FILES)
def cloud(request):
    return request.param


@pytest.fixture
def machines(cloud):
    return json.loads((ROOT / "tests" / "cloud" / "plugins" / f"{cloud}.json").read_text())


def load(cloud, machines, directory):
    """Read an inventory of the recorded machines, with the groups and variables that our file gives them."""
    ours = ROOT / "inventory" / f"cloud-{cloud}"
    settings = yaml.safe_load((ours / FILES[cloud]).read_text())
    constructed = {key: settings[key] for key in ("compose", "keyed_groups", "strict") if key in settings}
    (directory / "1-hosts.yml").write_text(json.dumps({"all": {"hosts": machines}}))
    (directory / "2-groups.yml").write_text(json.dumps({"plugin": "ansible.builtin.constructed", **constructed}))
    shutil.copytree(ours / "group_vars", directory / "group_vars", dirs_exist_ok=True)
    return load_inventory(str(directory))


def workers(inventory):
    return {task.index: task.address for task in inventory.tasks if task.job == "worker"}


def test_tags_make_a_right_cluster(cloud, machines, tmp_path):
    found = load(cloud, machines, tmp_path)
    load_inventory(found.source, check=True)
    jobs = [task.name for task in found.tasks]
    assert jobs == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2", "evaluator-0"]
    assert workers(found) == dict(enumerate(WORKERS))
    assert len(found.groups["gpu"]) == 3
    assert found.hosts[found.chief.host].address == "203.0.113.11"
    assert found.chief.address == "10.0.0.11"


def test_the_order_of_the_machines_is_of_no_account(cloud, machines, tmp_path):
    turned = dict(reversed(machines.items()))
    assert list(turned) != list(machines)
    assert workers(load(cloud, turned, tmp_path)) == dict(enumerate(WORKERS))


def test_a_machine_that_is_gone_leaves_its_place_to_the_next(cloud, machines, tmp_path):
    (gone,) = [name for name, variables in machines.items() if WORKERS[1] in json.dumps(variables)]
    spare = machines.pop(gone)
    assert workers(load(cloud, machines, tmp_path)) == {0: WORKERS[0], 2: WORKERS[2]}
    assert workers(load(cloud, {"a-new-one": spare, **machines}, tmp_path)) == dict(enumerate(WORKERS))


def test_a_machine_without_the_tag_is_refused_by_name(cloud, machines, tmp_path):
    (name,) = [name for name, variables in machines.items() if WORKERS[1] in json.dumps(variables)]
    del TAGS[cloud](machines[name])["psfleet_index"]
    with pytest.raises(OperatorMistake, match=f"worker_index is missing on {name}.*1 is free"):
        load(cloud, machines, tmp_path)


def test_the_static_example_is_right():
    found = load_inventory(str(ROOT / "inventory" / "cloud-static"))
    load_inventory(found.source, check=True)
    assert [(task.name, task.address) for task in found.tasks if task.job == "worker"] == [
        ("worker-0", "10.0.0.14"),
        ("worker-1", "10.0.0.15"),
    ]
    assert found.hosts["train-a"].address == "203.0.113.14"
    assert found.groups["gpu"] == ["train-a", "train-b"]
