"""Which connections of this process end."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

import pytest

from tests.waiting import until
from trainer.cluster.members import fence
from trainer.cluster.members.fence import Fence, ends, limit_waits, shut
from trainer.cluster.members.heartbeat import MARK


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(server: socket.socket, family: int = socket.AF_INET) -> socket.socket:
    found = socket.socket(family)
    found.settimeout(10)
    host, port = server.getsockname()
    found.connect((host if family == socket.AF_INET else f"::ffff:{host}", port))
    return found


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_connections_to_an_address_are_shut_and_no_others(listening: socket.socket, family: int) -> None:
    host, port = listening.getsockname()
    with connect(listening, family) as one, socket.create_server(("127.0.0.1", 0)) as other, connect(other) as spared:
        assert shut(f"{host}:{port}") == 1
        assert one.recv(1) == b""
        spared.settimeout(0.1)
        with pytest.raises(TimeoutError):
            spared.recv(1)


def test_a_connection_that_is_being_made_is_shut() -> None:
    """Of a full queue the kernel takes no more: the connection is not made, and not refused."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        made = []
        for _ in range(8):
            made.append(socket.socket())
            made[-1].setblocking(False)
            made[-1].connect_ex(server.getsockname())
        assert shut(f"127.0.0.1:{server.getsockname()[1]}") == len(made)
        for one in made:
            one.close()


def test_the_heartbeats_own_connections_are_spared(listening: socket.socket) -> None:
    host, port = listening.getsockname()
    with connect(listening) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MARK)
        assert shut(f"{host}:{port}") == 0


def test_the_heartbeats_connections_bear_its_mark(listening: socket.socket) -> None:
    """gRPC sets it, as the channels' options say."""
    import grpc

    from trainer.cluster.members.heartbeat import CHANNEL_OPTIONS

    host, port = listening.getsockname()
    with grpc.insecure_channel(f"{host}:{port}", options=CHANNEL_OPTIONS) as channel:
        channel.subscribe(lambda state: None, try_to_connect=True)
        listening.settimeout(30)
        listening.accept()
        assert shut(f"{host}:{port}") == 0


def test_an_address_is_written_as_the_kernel_does() -> None:
    assert ends("127.0.0.1:80") == {"0100007F:0050", "0000000000000000FFFF00000100007F:0050"}
    assert ends("[::1]:80") == {"00000000000000000000000001000000:0050"}


def test_a_name_that_nobody_resolves_now_is_tried_again(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network that a member has lost may be the way to the name server too."""
    tried: list[str] = []
    host, port = listening.getsockname()

    def look_up(name: str, *more: int, **named: int) -> list[object]:
        tried.append(name)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    ends(f"{host}:{port}")
    monkeypatch.setattr(fence.socket, "getaddrinfo", look_up)
    kept = Fence(lambda: ["worker-0.example:2300", f"{host}:{port}"])
    kept.start()
    with connect(listening) as one:
        assert one.recv(1) == b""
    until(lambda: len(tried) > 1)
    kept.stop()
    assert tried[:2] == ["worker-0.example"] * 2


def test_the_connections_to_many_members_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's table has them all: as many lines as members, for as many silent ones."""
    looks: list[set[str]] = []
    monkeypatch.setattr(fence, "inodes", lambda wanted: looks.append(set(wanted)) or set())
    silent = [f"10.9.0.{number}:2300" for number in range(1, 101)]
    kept = Fence(lambda: [] if looks else silent)
    kept.start()
    until(lambda: looks)
    time.sleep(0.1)
    kept.stop()
    assert looks == [{end for address in silent for end in ends(address)}]


def test_what_is_not_acknowledged_ends_a_connection(listening: socket.socket) -> None:
    """The other side reads nothing: it takes no more, as one that is frozen."""
    with connect(listening) as one, connect(listening) as own, socket.socket(socket.AF_UNIX) as other:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MARK)
        assert limit_waits(0.5) >= 1
        assert limit_waits(0.5) == 0
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == MARK
        assert other.fileno() >= 0
        with pytest.raises(TimeoutError) as ended:
            one.sendall(bytes(2**26))
        assert ended.value.errno == errno.ETIMEDOUT  # and not its own timeout
