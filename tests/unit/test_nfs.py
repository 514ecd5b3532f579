"""Who mounts the shared path, and from where."""

from nfs import nfs_clients, nfs_source

HOSTVARS = {
    "store": {"ansible_host": "192.0.2.1", "cluster_address": "10.0.0.1"},
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
    assert nfs_source(GROUPS, HOSTVARS, "store", "/srv/nfs") == "/srv/nfs"


def test_clients_mount_from_the_server_s_address():
    assert nfs_source(GROUPS, HOSTVARS, "worker-0", "/srv/nfs") == "10.0.0.1:/srv/nfs"


def test_an_ipv6_address_stands_in_brackets():
    hostvars = HOSTVARS | {"store": {"ansible_host": "fd00::1"}}
    assert nfs_source(GROUPS, hostvars, "head", "/srv/nfs") == "[fd00::1]:/srv/nfs"
