"""The NFS server: one directory, one version, the cluster's addresses and nobody else."""

import pytest

from .conftest import member_address

testinfra_hosts = ["ansible://nfs_server"]
pytestmark = pytest.mark.usefixtures("_as_root")


def test_server_runs_and_comes_back_at_boot(host):
    assert host.service("nfs-server").is_running
    assert host.service("nfs-server").is_enabled
    assert host.socket("tcp://2049").is_listening


def test_only_version_4_2_is_spoken(host):
    versions = host.file("/proc/fs/nfsd/versions").content_string.split()
    assert {one for one in versions if one.startswith("+")} == {"+4", "+4.2"}


def test_nothing_of_version_3_listens(host):
    """Neither the port mapper, nor mountd, nor statd: others reach ports 2049 and SSH's alone."""
    listening = host.check_output("ss --listening --tcp --numeric --no-header").splitlines()
    addresses = [line.split()[3] for line in listening]
    reachable = {one.rpartition(":")[2] for one in addresses if not one.startswith(("127.", "[::1]"))}
    assert reachable == {"22", "2049"}, addresses


def test_the_cluster_s_addresses_alone_may_mount(host, truth, site):
    """As the kernel has it, not as the file says."""
    exported = host.check_output("exportfs -s").splitlines()
    allowed = {line.split()[1].partition("(")[0] for line in exported}
    hosts = {name for group in ("chief", "ps", "worker") for name in truth[group]["hosts"]}
    assert allowed == {member_address(truth, name) for name in hosts}
    assert {line.split()[0] for line in exported} == {site["cluster_nfs_dir"]}
    assert all("root_squash" in line and "no_root_squash" not in line for line in exported)


def test_the_machines_own_exports_are_left_alone(host):
    assert "psfleet" not in host.file("/etc/exports").content_string
    assert host.file("/etc/exports.d/psfleet.exports").exists


def test_directory_belongs_to_the_one_uid(host, site):
    directory = host.file(site["cluster_nfs_dir"])
    assert (directory.uid, directory.gid, directory.mode) == (site["cluster_uid"], site["cluster_uid"], 0o755)


def test_an_address_outside_the_cluster_is_refused(host, site):
    """The server's own address isn't among its clients."""
    tried = host.run(
        f"mkdir -p /run/nfs-test && timeout 60 mount -t nfs4 -o vers=4.2,retry=0 "
        f"$(hostname -I | tr ' ' '\n' | grep -m1 {site['ansible_host'].rpartition('.')[0]}):{site['cluster_nfs_dir']} "
        "/run/nfs-test"
    )
    host.run("umount /run/nfs-test")
    assert tried.rc != 0
    assert "denied" in tried.stderr or "No such file" in tried.stderr, tried.stderr
