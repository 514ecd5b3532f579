"""The lab machine is on the hosts' network and no member: a stranger. What it sees, and what stays shut when."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.hosts import ROOT, wait_until

from .conftest import reboot, wait_for_progress

MEMBERS = {"head": {2222, 6006}, "ps-0": {2300}, "ps-1": {2300}, "worker-0": {2400}, "worker-1": {2400}}
CHECK = "/usr/local/sbin/psfleet-firewall check"
pytestmark = pytest.mark.usefixtures("long_run")


def address_in(truth, host):
    return truth["_meta"]["hostvars"][host]["ansible_host"]


@pytest.fixture
def address(truth):
    return partial(address_in, truth)


KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("silent")
"""


def knock(address, port, *at):
    """What becomes of a connection from here, or by the command `at` from elsewhere."""
    command = [*at, sys.executable, "-c", KNOCK, address, str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def elsewhere(address):
    """The command that runs another one on a stranger's machine: a network namespace on the hosts' bridge.

    The lab machine is the hosts' name server, which a unit's list lets in.
    """
    name, free = "psfleet-stranger", address("head").rpartition(".")[0] + ".66/24"
    for command in (
        f"ip netns add {name}",
        f"ip link add {name[:12]} type veth peer name eth0 netns {name}",
        f"ip link set {name[:12]} master lxcbr0 up",
        f"ip -n {name} address add {free} dev eth0",
        f"ip -n {name} link set eth0 up",
    ):
        subprocess.run(command.split(), check=True)
    yield ["ip", "netns", "exec", name]
    subprocess.run(["ip", "netns", "delete", name], check=True)


def reaches(host, target, port, user="root"):
    """Whether a user of a host can open a port of another."""
    with host.sudo(user):
        return host.run(f"timeout 2 bash -c ': >/dev/tcp/{target}/{port}'").rc == 0


@pytest.fixture
def loaded(lab):
    """Whatever was done to a table, it is loaded again."""
    yield
    for host in lab.values():
        with host.sudo():
            host.run_expect([0], "systemctl restart psfleet-firewall")


@pytest.fixture(scope="module")
def found(truth, long_run):
    """What a stranger finds at each port of each host."""
    doors = [(host, port) for host in MEMBERS for port in (22, 111, 2049, 2222, 2300, 2400, 6006, 9100)]
    with ThreadPoolExecutor(len(doors)) as pool:  # each silent one takes two seconds
        return dict(zip(doors, pool.map(lambda door: knock(address_in(truth, door[0]), door[1]), doors), strict=True))


@pytest.mark.parametrize("host", MEMBERS)
def test_a_stranger_reaches_ssh_alone(found, host):
    ports = {port: what for (name, port), what in found.items() if name == host}
    assert ports == dict.fromkeys(ports, "silent") | {22: "open"}


@pytest.mark.slow
def test_nmap_finds_ssh_alone_on_every_member(address):
    scan = ["nmap", "-n", "-Pn", "-p1-65535", "--min-rate=5000", "--max-retries=1", "--open", *map(address, MEMBERS)]
    output = subprocess.run(scan, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in output.splitlines() if "/tcp" in line] == ["22/tcp"] * len(MEMBERS)


def test_members_reach_what_they_need_and_nothing_else(lab, address):
    assert reaches(lab["head"], address("ps-0"), 2300)
    assert reaches(lab["worker-0"], address("ps-0"), 2300)
    assert reaches(lab["ps-0"], address("worker-0"), 2400)
    assert reaches(lab["worker-0"], address("head"), 6006)
    assert reaches(lab["worker-0"], address("head"), 2222)
    assert not reaches(lab["worker-0"], address("worker-1"), 2400)
    assert not reaches(lab["ps-0"], address("worker-0"), 9100)


def test_another_user_of_a_member_reaches_no_task_of_it(lab, address):
    for where in ("127.0.0.1", address("worker-0")):
        assert not reaches(lab["worker-0"], where, 2400, "nobody")
        assert not reaches(lab["worker-0"], where, 2400, "admin")
        assert reaches(lab["worker-0"], where, 2400, "trainer")


@pytest.mark.usefixtures("loaded")
def test_the_units_lists_hold_where_the_table_is_flushed(lab, address, elsewhere):
    """systemd leaves them out without a word where the kernel has no BPF: so it is tried."""
    with lab["worker-0"].sudo():
        lab["worker-0"].run_expect([0], "nft flush ruleset")
    assert knock(address("worker-0"), 9, *elsewhere) == "refused"  # nothing is filtered there any more
    assert knock(address("worker-0"), 2400, *elsewhere) == "silent"
    assert reaches(lab["head"], address("worker-0"), 2400)
    wait_for_progress(lab)


@pytest.mark.usefixtures("loaded")
def test_no_task_starts_without_the_table(lab):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "nft delete table inet psfleet")
        host.run("systemctl restart --no-block trainer@worker-0")
        journal = "journalctl --no-pager --since=-60s --unit=trainer@worker-0"
        wait_until(lambda: "systemctl restart psfleet-firewall" in host.run(journal).stdout, 60, "the start is refused")
        assert not host.service("trainer@worker-0").is_running
        host.run_expect([0], "systemctl restart psfleet-firewall")
        wait_until(lambda: host.service("trainer@worker-0").is_running, 120, "worker-0 runs")
    wait_for_progress(lab)


@pytest.mark.parametrize("done", [pytest.param("restart", marks=pytest.mark.slow), "reload"])
def test_the_distributions_service_does_not_open_the_host(lab, address, done):
    host = lab["worker-0"]
    with host.sudo():
        enabled = host.run("systemctl is-active nftables").rc == 0
        host.run_expect([0], "systemctl start nftables")
        host.run_expect([0], f"systemctl {done} nftables")
        host.run_expect([0], CHECK)
        if not enabled:
            host.run_expect([0], "systemctl stop nftables")
        host.run_expect([0], CHECK)
    assert knock(address("worker-0"), 2400) == "silent"


def test_a_table_without_ssh_is_taken_back(lab, address):
    with lab["worker-1"].sudo():
        wrong = "sed 's/tcp dport { 22 } accept/tcp dport { 2022 } accept/' /etc/psfleet/firewall.nft >/root/wrong.nft"
        lab["worker-1"].run_expect([0], wrong)
    environment = os.environ | {
        "ANSIBLE_ACTION_PLUGINS": "roles/firewall/action_plugins",
        "ANSIBLE_LIBRARY": "roles/firewall/library",
    }
    # One try to come back, which is given up well before the trial ends.
    arguments = "program=/usr/local/sbin/psfleet-firewall wanted=/root/wrong.nft seconds=15"
    command = ["ansible", "worker-1", "--timeout=10", "--become", "--module-name=try_firewall", "--args", arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout
    assert "no new SSH connection came through" in done.stdout
    assert knock(address("worker-1"), 22) == "open"
    assert knock(address("worker-1"), 2400) == "silent"
    with lab["worker-1"].sudo():
        lab["worker-1"].run_expect([0], CHECK)


@pytest.mark.slow
def test_it_is_closed_again_after_a_reboot(lab, address):
    host = lab["worker-1"]
    with host.sudo():
        reboot(host)
        host.run_expect([0], CHECK)
        order = host.check_output("systemctl show --property=After --value ssh.service")
        assert "psfleet-firewall.service" in order.split()
        wait_until(lambda: host.service("trainer@worker-1").is_running, 120, "worker-1 runs")
    assert knock(address("worker-1"), 2400) == "silent"
    wait_for_progress(lab)
