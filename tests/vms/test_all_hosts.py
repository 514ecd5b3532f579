"""What every VM has in common, and no container has: a kernel, a clock and a journal of its own."""

import pytest

from tests.hosts import answer, hosts_of, name_of, wait_until

testinfra_hosts = ["ansible://all"]
pytestmark = pytest.mark.usefixtures("_as_root")


def test_machine_has_its_own_kernel(host):
    assert host.run("systemd-detect-virt --container").stdout.strip() == "none"
    boots = {name: answer(one, "cat /proc/sys/kernel/random/boot_id") for name, one in hosts_of("all").items()}
    assert len(set(boots.values())) == len(boots)


def test_processor_has_what_tensorflow_needs(host):
    assert " avx " in host.file("/proc/cpuinfo").content_string


def test_time_service_runs(host):
    assert host.service("chrony").is_running
    assert host.service("chrony").is_enabled


def test_clock_is_synchronised(host, truth):
    """With the server that the inventory names; the server itself may have nothing but its own clock (stratum 10)."""
    servers = set(truth["_meta"]["hostvars"][name_of(host)]["common_time_servers"])
    wait_until(
        lambda: host.check_output("chronyc -c tracking").split(",")[-1] == "Normal",
        300,
        "chrony says that the clock is synchronised",
    )
    tracking = host.check_output("chronyc -c tracking").split(",")
    assert abs(float(tracking[4])) < 1, "system time is so many seconds off"
    sources = [line.split(",") for line in host.check_output("chronyc -n -c sources").splitlines()]
    # Selected, combined, or good and not needed: where there is a way out, Debian's own pool is better.
    assert servers <= {address for _mode, state, address, *_ in sources if state in "*+-"}, sources


def test_journal_is_kept_small(host):
    assert "SystemMaxUse=1G" in host.check_output("systemd-analyze cat-config systemd/journald.conf")
    assert host.service("systemd-journald").is_running


def test_silent_connections_are_given_up_soon(host):
    assert host.sysctl("net.ipv4.tcp_retries2") == 6


def test_user_has_the_one_uid(host, site):
    user = host.user("trainer")
    assert user.uid == user.gid == site["cluster_uid"]


def test_no_unit_failed(host):
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
