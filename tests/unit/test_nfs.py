"""Who mounts the shared path, and from where."""

from pathlib import Path

import yaml

from fleet.site.nfs import nfs_clients, nfs_source

ROLE = Path(__file__).parents[2] / "roles/nfs_server"
HOSTVARS = {
    # The directory is the server's: clients need not know of it.
    "store": {"ansible_host": "192.0.2.1", "cluster_address": "10.0.0.1", "cluster_nfs_dir": "/srv/nfs"},
    "head": {"ansible_host": "192.0.2.2", "cluster_address": "10.0.0.2"},
    "worker-0": {"ansible_host": "192.0.2.3"},
}
GROUPS = {
    "nfs_server": ["store"],
    "chief": ["head"],
    "ps": ["head"],
    "worker": ["worker-0"],
    "tensorboard": ["head"],
}


def test_each_host_of_a_job_may_mount_once_by_the_address_that_the_cluster_uses():
    assert nfs_clients(GROUPS, HOSTVARS) == ["10.0.0.2", "192.0.2.3"]


def test_the_server_is_no_client_of_its_own():
    assert nfs_clients(GROUPS | {"ps": ["store"]}, HOSTVARS) == ["10.0.0.2", "192.0.2.3"]
    assert nfs_source(GROUPS, HOSTVARS, "store") == "/srv/nfs"


def test_clients_mount_from_the_server_s_address():
    assert nfs_source(GROUPS, HOSTVARS, "worker-0") == "10.0.0.1:/srv/nfs"


def test_an_ipv6_address_stands_in_brackets():
    hostvars = HOSTVARS | {"store": {"ansible_host": "fd00::1", "cluster_nfs_dir": "/srv/nfs"}}
    assert nfs_source(GROUPS, hostvars, "head") == "[fd00::1]:/srv/nfs"


def test_the_machines_own_exports_are_left_alone():
    """No NFS server runs in a container: `make test-vms` sees the file, and this which task writes it."""
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    files = [each for task in tasks for each in task.get("write_files", {}).get("files", ())]
    assert {each["dest"]: each["src"] for each in files if "exports" in each["dest"]} == {
        "/etc/exports.d/psfleet.exports": "exports.j2",
    }
