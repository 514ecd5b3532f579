"""WireGuard of the VMs' own kernels: NFS through it, what passes libvirt's bridge, and what a stranger reaches.

This machine is the stranger: it has an address in the VMs' network, and is no member. With cluster_encryption alone.
"""

import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

from fleet.site.wireguard import INTERFACE, is_encrypted, tunnel_network
from lab.vm import NETWORK
from tests.hosts import name_of, wait_until

from .conftest import member_address, virsh

NFS_PORT, SSH_PORT = 2049, 22
# A member's kernel gives what passes its tunnel in clear; looks for a text there until it is found.
LISTEN = """
import socket, sys, time
listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
listening.bind((sys.argv[1], 0))
listening.settimeout(1)
end = time.monotonic() + 300
open("/run/psfleet-test-listens", "w").close()
while time.monotonic() < end:
    try:
        if sys.argv[2].encode() in listening.recv(1 << 16):
            print("found")
            break
    except TimeoutError:
        pass
"""
SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[1].encode(), (sys.argv[2], 9))
"""
KNOCK = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
"""


@pytest.fixture(autouse=True)
def _encrypted(site):
    if not is_encrypted(site):
        pytest.skip("the inventory says nothing of cluster_encryption: true")


@pytest.fixture(scope="session")
def worker(vms, truth):
    return vms[truth["worker"]["hosts"][0]]


@pytest.fixture(scope="session")
def bridge():
    """The interface of this machine that all packets between the VMs pass."""
    return re.search(r"^Bridge:\s+(\S+)", virsh("net-info", NETWORK), re.MULTILINE)[1]


@pytest.fixture
def capture(bridge, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may capture packets")

    @contextmanager
    def capturing(what=""):
        """Record what passes the bridge; gives a file that is whole afterwards."""
        path = tmp_path / f"capture-{secrets.token_hex(4)}"
        command = ["tcpdump", "-i", bridge, "-s", "0", "-U", "--immediate-mode", "-Z", "root", "-w", str(path)]
        with subprocess.Popen([*command, *what.split()], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert any("listening on" in line for line in process.stderr)
                yield path
                time.sleep(1)
            finally:
                process.terminate()
        assert path.exists()

    return capturing


def opens(address, port, seconds=10):
    """Whether anybody accepts a connection; a refusal is an answer as well, and fails."""
    try:
        with socket.create_connection((address, port), timeout=seconds):
            return True
    except TimeoutError:
        return False


def test_the_interface_is_the_kernels(vms):
    for name, host in vms.items():
        with host.sudo():
            assert " wireguard " in host.check_output("ip -details link show %s", INTERFACE), name
            assert host.file("/sys/module/wireguard").is_directory, name
            assert host.run("pgrep --exact wireguard-go").rc == 1, name
            assert not host.package("wireguard-go").is_installed, name


def test_each_pair_of_members_has_met(vms):
    for name, host in vms.items():
        with host.sudo():
            peers = host.check_output("wg show %s latest-handshakes", INTERFACE).splitlines()
            assert len(peers) == len(vms) - 1, name
            wait_until(
                lambda host=host: host.check_output("/usr/local/sbin/psfleet-wireguard met") == "",
                120,
                f"{name} met all",
            )


def test_the_mount_speaks_with_the_servers_address_in_the_tunnel_alone(truth, head, worker):
    """As the connections say, and not the table of mounts."""
    server = member_address(truth, truth["nfs_server"]["hosts"][0])
    for host in (head, worker):
        with host.sudo():
            found = host.check_output(f"ss --tcp --numeric --no-header state established dport = :{NFS_PORT}")
        assert {line.split()[-1] for line in found.splitlines()} == {f"[{server}]:{NFS_PORT}"}


@pytest.mark.parametrize("group", ["nfs_server", "chief", "worker"])
def test_a_stranger_reaches_ssh_alone(vms, truth, group):
    """Ports that are listened on at all addresses: the export's, and those of tasks, which a stand-in may open."""
    host = vms[truth[group]["hosts"][0]]
    ports = {NFS_PORT} if group == "nfs_server" else tasks_ports(host)
    assert ports
    with host.sudo():
        for port in ports - listening(host):
            stand_in = f"python3 -m http.server --bind :: {port}"
            host.run_expect([0], f"systemd-run --quiet --collect --unit=psfleet-test-{port} {stand_in}")
        wait_until(lambda: ports <= listening(host), 120, f"something listens on {ports}")
    try:
        reached = {port for port in ports | {SSH_PORT} if opens(raw_address(truth, host), port)}
    finally:
        with host.sudo():
            host.run("systemctl stop 'psfleet-test-*'")
    assert reached == {SSH_PORT}


def tasks_ports(host):
    """The ports that the table guards on this host."""
    with host.sudo():
        listed = json.loads(host.check_output("nft --json list set inet psfleet guarded"))
    return {port for entry in listed["nftables"] if "set" in entry for port in entry["set"].get("elem", [])}


def listening(host):
    lines = host.check_output("ss --listening --tcp --numeric --no-header").splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def test_what_is_written_over_nfs_passes_the_bridge_unreadable(vms, truth, head, server, worker, site, capture):
    """The same text is found inside of the tunnel, and on the bridge where it is said in clear."""
    text, clear = (f"psfleet-{secrets.token_hex(16)}" for _ in range(2))
    name = f"wire-{secrets.token_hex(4)}"
    path, served = f"{site['cluster_shared_dir']}/{name}", f"{site['cluster_nfs_dir']}/{name}"
    with worker.sudo():
        worker.run_expect([0], "rm -f /run/psfleet-test-listens /run/psfleet-test-found")
        worker.run_expect(
            [0],
            "systemd-run --quiet --collect --unit=psfleet-test-listen "
            "--property=StandardOutput=truncate:/run/psfleet-test-found python3 -c %s %s %s",
            LISTEN,
            INTERFACE,
            text,
        )
        wait_until(lambda: worker.file("/run/psfleet-test-listens").exists, 120, "the worker listens")
    with capture() as captured:
        with worker.sudo("trainer"):
            # The shell makes the text: the packets of SSH are encrypted, and have it in no case.
            worker.run_expect([0], "yes %s | head --lines=2000 >%s && sync %s", text, path, path)
        with head.sudo("trainer"):
            assert text in head.check_output("head --lines=1 %s", path)
        worker.run_expect([0], "python3 -c %s %s %s", SAY, clear, raw_address(truth, head))
    packets = captured.read_bytes()
    with server.sudo():
        assert server.check_output("grep --count %s %s", text, served) == "2000"
        server.run_expect([0], "rm %s", served)
    assert clear.encode() in packets, "the capture finds nothing at all"
    assert text.encode() not in packets
    assert len(packets) > 2000 * len(text), "what was written did not pass the bridge"
    with worker.sudo():
        wait_until(
            lambda: worker.file("/run/psfleet-test-found").content_string == "found\n", 330, "found in the tunnel"
        )


def test_without_the_tunnel_nothing_leaves_and_the_mount_comes_back(truth, server, worker, site, capture):
    """Another way to the tunnel's addresses is made, as a default route is: the table alone holds the packets."""
    inside = member_address(truth, name_of(server))
    network = str(tunnel_network(site))
    _, hardware = interface_of(server, raw_address(truth, server))
    outside, _ = interface_of(worker, raw_address(truth, worker))
    with worker.sudo():
        knock = f"python3 -c {shlex.quote(KNOCK)} {inside} {NFS_PORT}"
        worker.run_expect([0], knock)
        try:
            with capture(f"ip6 and host {inside} or tcp port {NFS_PORT}") as captured:
                worker.run_expect([0], "ip link delete %s", INTERFACE)
                worker.run_expect([0], f"ip route add {network} dev {outside}")
                worker.run_expect([0], f"ip neighbour replace {inside} lladdr {hardware} dev {outside}")
                held = dropped(worker, network)
                assert worker.run(knock).rc != 0
                assert worker.run(f"timeout 10 stat --cached=never {site['cluster_shared_dir']}").rc != 0
                held = dropped(worker, network) - held
            assert captured.stat().st_size == 24, "packets left for the tunnel's addresses"  # a capture's header alone
            assert held > 0, "no packet tried to leave: the test proves nothing"
        finally:
            worker.run(f"ip route delete {network} dev {outside}; ip neighbour delete {inside} dev {outside}")
            worker.run_expect([0], "systemctl restart psfleet-wireguard")
        wait_until(
            lambda: worker.run(f"timeout 10 stat --cached=never {site['cluster_shared_dir']}").rc == 0,
            600,
            "the shared path answers again",
        )


def raw_address(truth, host):
    return truth["_meta"]["hostvars"][name_of(host)]["ansible_host"]


def interface_of(host, address):
    """The name and the hardware address of the interface that has this address."""
    for one in json.loads(host.check_output("ip -json address")):
        if address in (known.get("local") for known in one["addr_info"]):
            return one["ifname"], one["address"]
    raise AssertionError(f"{name_of(host)} does not have the address {address}")


def dropped(host, network):
    """How many packets to the tunnel's addresses the table has kept from another way out."""
    rules = host.check_output("nft list chain inet psfleet output")
    line = next(one for one in rules.splitlines() if f"daddr {network}" in one and "drop" in one)
    return int(re.search(r"packets (\d+)", line)[1])
