"""What is read on the wire, who gets into the tunnel, and what becomes of it when something changes or breaks."""

from __future__ import annotations

import ipaddress
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fleet.site import wireguard
from fleet.site.wireguard import INTERFACE, PORT
from tests.security.hosts import FAMILIES, GROUPS, MEMBERS, PORTS, SSH, UNASKED
from tests.security.test_table import PERMITTED
from tests.security.wire import Wire
from tests.waiting import until

PATTERN = "weights-of-the-model-" * 8
SERVE = """
import sys
import tensorflow as tf
server = tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0)
print("serving", flush=True)
server.join()
"""
# A variable of another task, read again and again: as the weights of a ps.
READ = """
import sys
import numpy as np
import tensorflow as tf
tf.config.experimental_connect_to_host(sys.argv[1], job_name="worker")
with tf.device("/job:worker/task:0"):
    kept = tf.Variable(np.full(64, 1.2345678, np.float32))
for _ in range(50):
    with tf.device("/job:localhost/task:0"):
        assert (tf.identity(kept.read_value()).numpy() == np.float32(1.2345678)).all()
print("read", flush=True)
"""
TENSOR = struct.pack("<f", 1.2345678) * 64
GONE = GROUPS | {"worker": ["beta"]}  # without gamma


@pytest.fixture(params=FAMILIES, ids=["IPv4", "IPv6"], scope="module")
def _wire(
    request: pytest.FixtureRequest, _namespaces: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Wire]:
    made = Wire(request.param, tmp_path_factory.mktemp("wire"))
    try:
        made.listen()
        yield made
    finally:
        made.end()


@pytest.fixture
def wire(_wire: Wire) -> Iterator[Wire]:
    """Members that have met in the tunnel, with nothing closed; made for each test."""
    _wire.settings = {}
    _wire.build()
    for host in MEMBERS:
        _wire.wire(host, "check")
    yield _wire
    _wire.open()
    for host in (*MEMBERS, "stranger"):
        subprocess.run([*_wire.networks.under(host), "ip", "link", "delete", INTERFACE], capture_output=True)
    for host in MEMBERS:
        for path in _wire.place(host).iterdir():
            if path.is_file():
                path.unlink()


def enter(wire: Wire, address: str, key: str = "") -> str:
    """Give the stranger a tunnel to alpha, of which it knows all that is public; returns its own public key."""
    key = key or wire.run("stranger", "wg", "genkey").strip()
    config = (
        f"[Interface]\nPrivateKey = {key}\nListenPort = {PORT}\n[Peer]\nPublicKey = {wire.keys['alpha']}\n"
        f"AllowedIPs = {wire.inside('alpha')}\nEndpoint = {wire.outside('alpha')}\nPersistentKeepalive = 1\n"
    )
    made = subprocess.run(
        [*wire.networks.under("stranger"), "ip", "link", "add", INTERFACE, "type", "wireguard"], capture_output=True
    )
    if made.returncode:
        wire.run("stranger", "wireguard-go", INTERFACE)
    wire.run("stranger", "wg", "setconf", INTERFACE, "/dev/stdin", text=config)
    wire.run("stranger", "ip", "address", "add", f"{address}/{64 if ':' in address else 16}", "dev", INTERFACE)
    wire.run("stranger", "ip", "link", "set", INTERFACE, "up")
    return wire.run("stranger", "wg", "pubkey", text=key).strip()


def take(wire: Wire, host: str, address: str, link: str) -> None:
    """Give a host an address of the tunnel that is another one's."""
    whole = [f"{address}/128", "nodad"] if ":" in address else [f"{address}/32"]
    wire.run(host, "ip", "address", "add", *whole, "dev", link)


def test_a_capture_finds_what_is_said_without_the_tunnel_and_never_with_it(wire: Wire) -> None:
    def found(address: str) -> int:
        with wire.capture() as capture, wire.talk("gamma", "beta", 2300, address=address) as talk:
            for _ in range(100):
                assert float(talk.say(PATTERN)) < 1
        assert len(capture.packets) > 100 * len(PATTERN)
        return capture.packets.count(PATTERN.encode())

    assert found(wire.address("beta")) == 200  # there and back
    assert found(wire.inside("beta")) == 0


def test_a_capture_finds_a_tensor_without_the_tunnel_and_never_with_it(wire: Wire) -> None:
    pytest.importorskip("tensorflow")

    def target(address: str) -> str:
        return f"[{address}]:2500" if ":" in address else f"{address}:2500"

    def found(address: str) -> int:
        with wire.capture() as capture:
            assert wire.run("alpha", sys.executable, "-c", READ, target(address)) == "read\n"
        return capture.packets.count(TENSOR)

    command = [*wire.networks.under("gamma"), sys.executable, "-c", SERVE, target(wire.inside("gamma"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout
            assert serving.stdout.readline() == "serving\n"
            assert found(wire.address("gamma")) > 25  # a packet may end within one
            assert found(wire.inside("gamma")) == 0
        finally:
            serving.kill()


def test_members_reach_through_the_tunnel_what_the_table_permits(wire: Wire) -> None:
    wire.close()
    found = {
        (source, target): wire.open_inside(source, target, [UNASKED, *PORTS[target].values()])
        for source, target in PERMITTED
    }
    assert found == PERMITTED


def test_by_the_address_outside_everybody_is_a_stranger(wire: Wire) -> None:
    """A neighbour that takes a member's address outside gets as little: it is no identity any more."""
    wire.close()
    for family in FAMILIES:
        for source in ("stranger", "gamma"):
            assert wire.seen(source, "alpha", family) == {SSH}
            assert wire.seen(source, "beta", family) == {SSH}


def test_a_foreign_key_gets_no_byte(wire: Wire) -> None:
    """With nothing closed: it is the key that counts. The same stranger gets in once alpha has its key."""
    own, taken = wire.keys["alpha"], wire.inside("gamma")
    wire.stop("gamma")
    key = enter(wire, taken)
    time.sleep(6)  # a handshake is tried again after five seconds
    assert wire.open_inside("stranger", "alpha", [2300, SSH]) == set()
    assert wire.received("stranger", own) == 0

    bits = 128 if ":" in taken else 32
    wire.run("alpha", "wg", "set", INTERFACE, "peer", key, "allowed-ips", f"{taken}/{bits}")
    until(lambda: wire.open_inside("stranger", "alpha", [2300]), pause=0.5)
    assert wire.open_inside("stranger", "alpha", [2300, SSH]) == {2300, SSH}
    assert wire.received("stranger", own) > 0


def test_a_key_speaks_for_its_own_address_alone(wire: Wire) -> None:
    """A member that was taken over can't pass for another one."""
    wire.close()
    other = wire.inside("store")
    bits = 128 if ":" in other else 32
    wire.stop("store")
    take(wire, "gamma", other, INTERFACE)
    wire.run("gamma", "ip", "route", "replace", f"{wire.inside('alpha')}/{bits}", "dev", INTERFACE, "src", other)
    assert wire.open_inside("gamma", "alpha", [2300, 6006]) == set()
    wire.run("gamma", "ip", "route", "delete", f"{wire.inside('alpha')}/{bits}")
    wire.run("gamma", "ip", "address", "delete", f"{other}/{bits}", "dev", INTERFACE)
    assert wire.open_inside("gamma", "alpha", [2300, 6006]) == {2300, 6006}


def test_an_address_of_the_tunnel_counts_only_where_it_comes_through_it(wire: Wire) -> None:
    """Of a stranger that took one. The answers would go through the tunnel, so what came in is counted."""
    wire.close("alpha")
    took, target = wire.inside("gamma"), wire.inside("alpha")
    bits = 128 if ":" in took else 32
    router = wire.networks.address6("alpha") if ":" in took else wire.networks.address("alpha")
    take(wire, "stranger", took, "eth0")
    try:
        wire.run("stranger", "ip", "route", "add", f"{target}/{bits}", "via", router, "dev", "eth0", "src", took)
        before = wire.dropped("alpha", "input")
        assert wire.knock("stranger", [(target, 2300)]) == {(target, 2300): "silent"}
        assert wire.dropped("alpha", "input") > before
    finally:
        wire.run("stranger", "ip", "address", "delete", f"{took}/{bits}", "dev", "eth0")


def test_without_the_tunnel_nothing_leaves_by_the_default_route(wire: Wire) -> None:
    """Where a stranger would answer in the member's place."""
    endpoint = (wire.inside("beta"), 2300)
    bits = 128 if ":" in endpoint[0] else 32
    family = "-6" if ":" in endpoint[0] else "-4"
    router = wire.networks.address6("stranger") if ":" in endpoint[0] else wire.networks.address("stranger")
    wire.stop("alpha")
    take(wire, "stranger", endpoint[0], "eth0")
    wire.run("alpha", "ip", family, "route", "add", "default", "via", router)
    try:
        assert wire.knock("alpha", [endpoint], seconds=5)[endpoint] == "open"
        wire.close("alpha")
        with wire.capture() as capture:
            assert wire.knock("alpha", [endpoint])[endpoint] == "silent"
        assert ipaddress.ip_address(endpoint[0]).packed not in capture.packets
        assert wire.dropped("alpha", "output") > 0
    finally:
        wire.run("alpha", "ip", family, "route", "delete", "default")
        wire.run("stranger", "ip", "address", "delete", f"{endpoint[0]}/{bits}", "dev", "eth0")


def test_a_leaver_is_cut_off_by_sync_and_not_before(wire: Wire) -> None:
    with wire.talk_inside("gamma", "beta", 2300) as leaver, wire.talk_inside("alpha", "beta", 2300) as member:
        assert float(leaver.say()) < 1
        for host in ("alpha", "beta", "store"):
            wire.write(host, GONE)
            assert wire.wire(host, "add") == ""
        assert float(leaver.say()) < 1
        for host in ("alpha", "beta", "store"):
            assert wire.wire(host, "sync") == "changed"
            assert wire.wire(host, "sync") == ""
            assert wire.keys["gamma"] not in wire.run(host, "wg", "show", INTERFACE, "peers")
        assert leaver.say() == "silent"
        assert float(member.say()) < 1
    assert wire.open_inside("gamma", "beta", [SSH, 2300]) == set()


def test_one_who_comes_is_let_in_without_a_gap(wire: Wire) -> None:
    for host in ("alpha", "beta", "store"):
        wire.write(host, GONE)
        wire.wire(host, "sync")
    with wire.asking("alpha", "beta") as gap:
        for host in ("alpha", "beta", "store"):
            wire.write(host)
            assert wire.wire(host, "add") == "changed"
            assert wire.wire(host, "add") == ""
        time.sleep(1)
    assert gap.seconds < 2  # a session that was lost would take five
    with wire.talk_inside("gamma", "beta", 2300) as comer:
        assert float(comer.say()) < 1


def test_a_peer_that_was_taken_out_by_hand_is_put_back(wire: Wire) -> None:
    wire.run("beta", "wg", "set", INTERFACE, "peer", wire.keys["gamma"], "remove")
    assert wire.wire("beta", "add") == "changed"
    assert wire.wire("beta", "add") == ""


def test_a_restart_leaves_a_gap_of_less_than_ten_seconds(wire: Wire) -> None:
    """The keepalives tell the others: who asks waits for a handshake that is tried again after five seconds."""
    with wire.asking("alpha", "beta") as gap:
        wire.stop("beta")
        time.sleep(3.5)
        wire.start("beta")
        time.sleep(16)
    assert 3.5 < gap.seconds < 10


def test_new_keys_leave_a_gap_of_less_than_a_second(wire: Wire) -> None:
    before, after = dict(wire.keys), wire.prepare_keys()
    assert {host: wire.wire(host, "public") for host in MEMBERS} == before
    with wire.asking("alpha", "beta") as gap, wire.talk_inside("gamma", "beta", 2300) as talk:
        second = wire.switch_soon()
        while any(wire.try_wire(host, "met").returncode for host in MEMBERS):
            assert time.time() < second + 30
            assert float(talk.say()) < 1
        time.sleep(2)
        assert float(talk.say()) < 1
    assert gap.seconds < 1
    for host in MEMBERS:
        assert wire.wire(host, "public") == after[host] != before[host]
        wire.wire(host, "check")
        listed = set(wire.run(host, "wg", "show", INTERFACE, "peers").split())
        assert listed == {key for other, key in after.items() if other != host}
        wire.keys = after
        assert (wire.place(host) / "peers.conf").read_text() == wire.rendered(host, after)["peers.conf"]


def test_new_keys_leave_no_long_gap_where_the_first_handshakes_fail(wire: Wire) -> None:
    """WireGuard itself tries again after 5 seconds."""
    wire.prepare_keys()
    lost = f"inet lost {{ chain ways {{ type filter hook input priority 0; udp dport {PORT} drop; }}; }}"
    with wire.asking("alpha", "beta") as gap:
        second = wire.switch_soon()
        time.sleep(max(0, second - 0.1 - time.time()))
        wire.run("alpha", "nft", f"add table {lost}")
        time.sleep(max(0, second + 0.2 - time.time()))
        wire.run("alpha", "nft", "delete table inet lost")
        time.sleep(7)
    assert 0.2 < gap.seconds < 3


def test_a_switch_at_a_second_that_is_over_is_refused(wire: Wire) -> None:
    assert "there is no next key" in wire.try_wire("beta", "switch-at", str(int(time.time()) + 5)).stderr
    wire.wire("beta", "new-key")
    (wire.place("beta") / "peers.conf.next").write_text(wire.rendered("beta", wire.keys)["peers.conf"])
    for ahead in (-3, 2, 5000):
        done = wire.try_wire("beta", "switch-at", str(int(time.time()) + ahead))
        assert done.returncode == 1
        assert "seconds from now by this host's clock; expected 4 to 600" in done.stderr
    assert "not in use yet" in wire.try_wire("beta", "met").stderr


def test_who_was_not_met_is_named(wire: Wire) -> None:
    wire.stop("gamma")
    wire.stop("beta")
    wire.start("beta")
    time.sleep(7)
    assert wire.wire("beta", "met") == "gamma"


def test_a_start_is_refused_without_the_interface_whatever_its_unit_says(wire: Wire) -> None:
    unit = wire.rendered("beta", wire.keys)["unit.conf"]
    assert f"ExecStartPre=+{wire.place('beta')}/psfleet-wireguard check" in unit.splitlines()
    if pid := wire.process("beta"):  # it dies, and nobody tells the unit
        os.kill(pid, signal.SIGKILL)
    else:
        wire.run("beta", "ip", "link", "delete", INTERFACE)
    time.sleep(0.5)
    done = wire.try_wire("beta", "check")
    assert done.returncode == 1
    assert f"there is no interface {INTERFACE}, whatever its unit says" in done.stderr
    wire.start("beta")
    wire.wire("beta", "check")


def test_a_start_is_refused_with_another_key_or_without_the_address(wire: Wire) -> None:
    wire.run("beta", "ip", "address", "flush", "dev", INTERFACE)
    assert "does not have the address" in wire.try_wire("beta", "check").stderr
    wire.start("beta")
    wire.run("beta", "wg", "set", INTERFACE, "private-key", "/dev/stdin", text=wire.run("beta", "wg", "genkey"))
    assert "has another key than" in wire.try_wire("beta", "check").stderr


def mtu(wire: Wire, host: str) -> int:
    return int(wire.run(host, "cat", f"/sys/class/net/{INTERFACE}/mtu"))


def test_the_tunnels_mtu_follows_the_ways_to_the_others(wire: Wire) -> None:
    assert mtu(wire, "alpha") == 1500 - 80
    try:
        wire.run("alpha", "ip", "link", "set", "eth0", "mtu", "1400")
        assert wire.wire("alpha", "add") == "changed"
        assert mtu(wire, "alpha") == 1320
        assert wire.wire("alpha", "add") == ""
        wire.run("alpha", "ip", "link", "set", "eth0", "mtu", "1300")
        wire.wire("alpha", "sync")
        assert mtu(wire, "alpha") == 1280  # IPv6 needs as much
    finally:
        wire.run("alpha", "ip", "link", "set", "eth0", "mtu", "1500")
    wire.settings = {"wireguard_mtu": 1350}
    wire.write("alpha")
    assert wire.wire("alpha", "add") == "changed"
    assert mtu(wire, "alpha") == 1350
    wire.start("alpha")
    assert mtu(wire, "alpha") == 1350


def test_the_private_key_is_the_hosts_alone(wire: Wire) -> None:
    key = wire.place("beta") / "private.key"
    assert key.stat().st_mode & 0o777 == 0o600
    private = key.read_text().strip()
    assert wire.wire("beta", "key") == wire.keys["beta"] != private
    for host in MEMBERS:
        for path in wire.place(host).iterdir():
            if path.is_file() and path != key:
                assert private not in path.read_text(), path
    assert wireguard.is_key(private)
