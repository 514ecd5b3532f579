"""A delay on each way between tasks of this machine, made in user space: every byte waits in a process between them.

`python -m bench.delays MS LISTEN TARGET [LISTEN TARGET ...]` takes connections at each port LISTEN of 127.0.0.1, and
passes what comes on to the port TARGET, so many milliseconds later, in both directions. Bytes keep their rate.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.tasks import TaskProcess

CHUNK = 1 << 18


@contextlib.contextmanager
def delaying(milliseconds: float, targets: Mapping[str, str], log: Path) -> Iterator[None]:
    """Have a process pass on, so much later, what comes at each address; `targets` says where to."""
    ports = [address.rpartition(":")[2] for pair in targets.items() for address in pair]
    task = TaskProcess("delays", ["-m", "bench.delays", str(milliseconds), *ports], log, {})
    try:
        task.until(lambda: task.says("delays"), "it listened")
        yield
    finally:
        task.end()


def receive(source: socket.socket, late: queue.SimpleQueue[tuple[float, bytes]], seconds: float) -> None:
    """Put what a connection brings, with the time when it is due; at its end nothing."""
    data = b"-"
    while data:
        try:
            data = source.recv(CHUNK)
        except OSError:
            data = b""
        late.put((time.monotonic() + seconds, data))


def send(late: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
    while True:
        due, data = late.get()
        if (left := due - time.monotonic()) > 0:
            time.sleep(left)
        try:
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
        except OSError:
            return


def join(near: socket.socket, port: int, seconds: float) -> None:
    """Join a connection to the one that it is meant for; closed where no answer comes."""
    try:
        far = socket.create_connection(("127.0.0.1", port))
    except OSError:
        near.close()
        return
    for source, target in ((near, far), (far, near)):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=receive, args=(source, late, seconds), daemon=True).start()
        threading.Thread(target=send, args=(late, target), daemon=True).start()


def serve(listen: int, target: int, seconds: float) -> None:
    with socket.create_server(("127.0.0.1", listen), backlog=64) as server:
        while True:
            join(server.accept()[0], target, seconds)


def main(arguments: list[str]) -> None:
    milliseconds, *ports = arguments
    pairs = list(zip(map(int, ports[::2]), map(int, ports[1::2]), strict=True))
    for pair in pairs:
        threading.Thread(target=serve, args=(*pair, float(milliseconds) / 1000), daemon=True).start()
    print(f"delays {len(pairs)} ports", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
