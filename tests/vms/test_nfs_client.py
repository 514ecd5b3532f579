"""The shared path on a client: really NFS, really shared, and never the directory under it."""

import pytest

from tests.hosts import name_of, wait_until

from .conftest import member_address

testinfra_hosts = ["ansible://chief", "ansible://worker"]
pytestmark = pytest.mark.usefixtures("_as_root")


@pytest.fixture
def path(site):
    return site["cluster_shared_dir"]


def test_shared_path_is_mounted_over_nfs_4_2(host, path, truth, site):
    mount = host.mount_point(path)
    server = member_address(truth, truth["nfs_server"]["hosts"][0])
    assert mount.exists
    assert mount.filesystem == "nfs4"
    assert mount.device == f"{f'[{server}]' if ':' in server else server}:{site['cluster_nfs_dir']}"
    assert {"vers=4.2", "hard", "noatime", "nodev", "nosuid", "timeo=150"} <= set(mount.options)


def test_mount_is_a_unit_that_comes_back_at_boot(host, path):
    unit = host.check_output(f"systemd-escape --path --suffix mount {path}")
    assert host.service(unit).is_enabled
    assert host.check_output(f"systemctl show --value --property=ActiveState {unit}") == "active"
    assert "network-online.target" in host.check_output(f"systemctl show --value --property=After {unit}")


@pytest.mark.parametrize("unit", ["trainer@any-0.service"])
def test_a_task_mounts_the_path_and_goes_with_it(host, path, unit):
    mount = host.check_output(f"systemd-escape --path --suffix mount {path}")
    for dependency in ("Wants", "After", "PartOf"):
        assert mount in host.check_output(f"systemctl show --value --property={dependency} {unit}").split()
    assert mount not in host.check_output(f"systemctl show --value --property=Requires {unit}").split()


def test_root_of_a_client_is_nobody_there(host, path):
    tried = host.run(f"touch {path}/written-by-root")
    assert tried.rc != 0
    assert "Permission denied" in tried.stderr


def test_what_one_host_renames_the_others_see(host, path, vms):
    name = name_of(host)
    with host.sudo("trainer"):
        host.run_expect([0], f"echo {name} >{path}/rename.new && mv {path}/rename.new {path}/rename-{name}")
    others = [one for other, one in vms.items() if other not in (name, "vm-nfs")]
    for other in others:
        wait_until(lambda other=other: other.run(f"cat {path}/rename-{name}").stdout.strip() == name, 120, "it is seen")
    with host.sudo("trainer"):
        host.run_expect([0], f"rm {path}/rename-{name}")


def test_check_of_the_shared_path_passes(host):
    assert host.run("/usr/local/sbin/psfleet-check-shared-path").rc == 0


def test_nobody_writes_to_the_empty_mount_point(host, path):
    """A view of the machine without its mounts: what a task would write to if nothing were mounted."""
    below = host.check_output(
        f"mkdir -p /run/below && mount --bind / /run/below && ls -A /run/below{path} && "
        f"stat --format %a:%U /run/below{path}; umount /run/below"
    )
    assert below == "555:root"
    user = "setpriv --reuid=trainer --regid=trainer --init-groups"
    tried = host.run(
        f"mount --bind / /run/below && {user} touch /run/below{path}/x; code=$?; umount /run/below; exit $code"
    )
    assert tried.rc != 0
