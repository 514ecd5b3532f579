"""Ansible's own inventory plugins of the clouds, with our inventory files, against recorded answers of the APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.errors import OperatorMistake
from fleet.site.inventory import Inventory, load_inventory
from tests.cloud.clouds import Cloud

INVENTORIES = Path(__file__).parents[2] / "inventory"
# The machine with each worker_index, in the order of the indices. By name and by id they would come in another order.
WORKERS = {
    "aws": ["i-403ff2d2050b74c80", "i-5d52bce5a607ffa15", "i-167c70d7485f99d3a"],
    "gcp": ["train-y", "train-z", "train-x"],
    "openstack": ["train-y", "train-z", "train-x"],
}
FILTERS = {
    "aws": [
        "Filter.1.Name=tag:psfleet_cluster&Filter.1.Value.1=first",
        "Filter.2.Name=instance-state-name&Filter.2.Value.1=running",
    ],
    "gcp": ["filter=(labels.psfleet_cluster = first) (status = RUNNING)"],
    "openstack": ["status=ACTIVE"],
}

pytest.importorskip("boto3", reason="needs locks/cloud.txt: make cloud")
pytest.importorskip("google.auth", reason="needs locks/cloud.txt: make cloud")
pytest.importorskip("openstack", reason="needs locks/cloud.txt: make cloud")


@pytest.fixture(params=["aws", "gcp", "openstack"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    found = Cloud(request.param, tmp_path)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def load(cloud: Cloud) -> Callable[[], Inventory]:
    return lambda: load_inventory(str(INVENTORIES / f"cloud-{cloud.name}"))


def workers(inventory: Inventory) -> dict[int, str]:
    """The worker with each index, by the private address of its machine."""
    return {task.index: task.address for task in inventory.tasks if task.job == "worker"}


def test_tags_make_the_cluster(cloud: Cloud, load: Callable[[], Inventory]) -> None:
    found = load()
    load_inventory(found.source, check=True)
    assert [task.name for task in found.tasks] == [
        "chief-0",
        "ps-0",
        "ps-1",
        "worker-0",
        "worker-1",
        "worker-2",
        "evaluator-0",
    ]
    assert sorted(found.groups["gpu"]) == sorted(task.host for task in found.tasks if task.job == "worker")
    assert found.tensorboard_url == "http://10.0.0.11:6006"
    # Another cluster's machine, which OpenStack's answer has too, would be configured like ours.
    assert len(found.groups["all"]) == 6


def test_the_index_is_the_tags_and_not_the_plugins_order(cloud: Cloud, load: Callable[[], Inventory]) -> None:
    found = load()
    hosts = {task.index: task.host for task in found.tasks if task.job == "worker"}
    assert [hosts[index].removeprefix("train-") for index in range(3)] == [
        name if cloud.name == "aws" else name.removeprefix("train-") for name in WORKERS[cloud.name]
    ]
    assert workers(found) == {0: "10.0.0.15", 1: "10.0.0.16", 2: "10.0.0.14"}
    assert list(found.groups["worker"]) != [hosts[index] for index in range(3)]


def test_members_talk_privately_and_ssh_goes_where_it_can(cloud: Cloud, load: Callable[[], Inventory]) -> None:
    found = load()
    assert found.chief.address == "10.0.0.11"
    assert found.hosts[found.chief.host].address == "203.0.113.11"
    worker = found.task("worker-0")
    # Only AWS's recorded machines all have a public address.
    assert found.hosts[worker.host].address == ("203.0.113.15" if cloud.name == "aws" else "10.0.0.15")


def test_the_cloud_is_asked_for_this_cluster(cloud: Cloud, load: Callable[[], Inventory]) -> None:
    load()
    assert all(any(wanted in asked for asked in cloud.asked) for wanted in FILTERS[cloud.name]), cloud.asked


def test_machines_that_go_and_come_shift_nobody(cloud: Cloud, load: Callable[[], Inventory]) -> None:
    first, gone, last = WORKERS[cloud.name]
    cloud.drop(gone)
    assert workers(load()) == {0: "10.0.0.15", 2: "10.0.0.14"}
    cloud.drop(first)
    cloud.tag(last, "psfleet_index", "1")
    assert workers(load()) == {1: "10.0.0.14"}


def test_a_machine_that_says_no_job_gets_none(
    cloud: Cloud, load: Callable[[], Inventory], capfd: pytest.CaptureFixture[str]
) -> None:
    machine = WORKERS[cloud.name][2]
    cloud.tag(machine, "psfleet_jobs", None)
    if cloud.name == "gcp":  # its plugin has no strict
        assert workers(load()) == {0: "10.0.0.15", 1: "10.0.0.16"}
    else:
        with pytest.raises(OperatorMistake, match="can't be read"):
            load()
        # Ansible puts the reason before it, as a warning.
        errors = capfd.readouterr().err
        assert "Could not generate group for host" in errors
        assert machine in errors
        assert "psfleet_jobs" in errors


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "worker_index is missing on .*1 is free"),
        ("0", "are both worker-0.* 1 is free"),
        ("second", "worker_index: 'second'; expected the index"),
    ],
)
def test_a_machine_without_a_right_index_is_refused(
    cloud: Cloud, load: Callable[[], Inventory], value: str | None, message: str
) -> None:
    cloud.tag(WORKERS[cloud.name][1], "psfleet_index", value)
    with pytest.raises(OperatorMistake, match=message):
        load()
