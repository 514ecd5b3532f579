"""Hosts that reboot, and a shared path that is away."""

from tests.hosts import wait_until

from .conftest import reboot, wait_for_progress


def restarts(host):
    return int(host.check_output("systemctl show --value --property=NRestarts trainer@worker-0"))


def test_a_task_never_starts_on_an_unmounted_path(lab, long_run):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "systemctl stop trainer@worker-0")
        host.run_expect([0], "umount --lazy /srv/trainer")
        assert not host.mount_point("/srv/trainer").exists
        assert host.run("systemctl start trainer@worker-0").rc != 0
        before = restarts(host)
        wait_until(lambda: restarts(host) > before + 1, 90, "systemd tries again")
        assert not host.service("trainer@worker-0").is_running
        assert "nothing is mounted there" in host.check_output(
            "journalctl --no-pager --lines=20 --unit=trainer@worker-0"
        )
        assert host.check_output("ls -A /srv/trainer") == ""
    reboot(host)
    with host.sudo():
        wait_until(lambda: host.service("trainer@worker-0").is_running, 60, "worker-0 runs again")
        assert host.sysctl("net.ipv4.tcp_retries2") == 6
    wait_for_progress(lab)


def test_a_path_that_nobody_else_sees_is_refused(lab, long_run):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "mount -t tmpfs none /srv/trainer")
        try:
            host.run_expect([0], "install -d -o trainer -g trainer /srv/trainer")
            check = host.run("/usr/local/sbin/psfleet-check-shared-path")
            host.run_expect([0], "mkfifo /srv/trainer/.psfleet-host-head")  # hangs its readers
            hanging = host.run("/usr/local/sbin/psfleet-check-shared-path")
        finally:
            host.run_expect([0], "umount /srv/trainer")
        assert (check.rc, hanging.rc) == (1, 1)
        assert "no marker of head is there" in check.stderr
        assert "can't be read within 10 s" in hanging.stderr
        assert host.run("/usr/local/sbin/psfleet-check-shared-path").rc == 0
