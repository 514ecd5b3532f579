"""What a task needs, what it must not have, and where it may write, tried from inside its sandbox; prints JSON.

Runs on a host, by itself: `sandbox_probe.py needs|refused`, `writes DIRECTORY...`, `opens FILE...`. Each attempt has
"ok" or its error.
"""

import contextlib
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

CLONE_NEWUSER = 0x10000000
OUTSIDE = ("198.51.100.1", 9)  # of the documentation's network: nobody's
LIBC = ctypes.CDLL(None, use_errno=True)


def call(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_of(child: int) -> int:
    return os.waitpid(child, 0)[1]


# What a task needs


def convolve() -> None:
    """By oneDNN, which writes the machine code for it as it goes."""
    import tensorflow as tf

    layer = tf.function(lambda x: tf.nn.relu(tf.nn.conv2d(x, tf.ones([3, 3, 16, 16]), 1, "SAME")))
    assert float(tf.reduce_max(layer(tf.ones([8, 32, 32, 16])))) == 144.0


def compile_xla() -> None:
    import tensorflow as tf

    assert float(tf.function(lambda x: tf.reduce_sum(x * x), jit_compile=True)(tf.ones([1000]))) == 1000.0


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(end_of(child)) == 7


def place_threads() -> None:
    os.sched_setaffinity(0, os.sched_getaffinity(0))


def serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass


def abort_without_a_core() -> None:
    child = os.fork()
    if child == 0:
        os.chdir(os.environ.get("TMPDIR", "/tmp"))  # where it may write
        os.abort()
    assert not os.WCOREDUMP(end_of(child))
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)


NEEDS = {
    "oneDNN's convolution": convolve,
    "XLA": compile_xla,
    "fork": fork,
    "another program": lambda: subprocess.run(["true"], check=True),
    "processors of threads": place_threads,
    "a port": serve,
    "names": lambda: socket.getaddrinfo("localhost", 80),
    "the boot's id": lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
    "an end without a core": abort_without_a_core,
}


# What it must not have


def mark_setuid() -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"probe-{uuid.uuid4()}")
    path.touch()
    try:
        path.chmod(0o4755)
    finally:
        path.unlink()


def send_outside() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        outside.sendto(b"", OUTSIDE)


REFUSED = {
    "a user namespace": lambda: call(LIBC.unshare(CLONE_NEWUSER)),
    "a mount": lambda: call(LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None)),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
    "raw packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close(),
    "packets to others": send_outside,
    "processes of others": lambda: Path("/proc/1/cmdline").read_bytes(),
    "homes": lambda: list(Path("/home/admin").iterdir()),
    "the kernel's log": lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY)),
    "a setuid file": mark_setuid,
    "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
    "another user": lambda: os.setuid(0),
    "a core": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
}


def write(directory: str) -> None:
    path = Path(directory, f".probe-{uuid.uuid4()}")
    path.write_text("")
    path.unlink()


def look(device: str) -> None:
    os.close(os.open(device, os.O_RDWR | os.O_NONBLOCK))


def attempt(what: Callable[[], object]) -> str:
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return "ok"


def attempt_apart(what: Callable[[], object]) -> str:
    """In a process of its own, which takes with it what it gained or gave up, and may be ended for it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, attempt(what).encode())
        os._exit(0)
    os.close(write)
    end = os.waitstatus_to_exitcode(end_of(child))
    try:
        return os.read(read, 4096).decode() or f"ended with {end}"
    finally:
        os.close(read)


def main() -> None:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    what, *places = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        match what:
            case "needs":
                results = {name: attempt_apart(need) for name, need in NEEDS.items()}
            case "refused":
                results = {name: attempt_apart(refused) for name, refused in REFUSED.items()}
            case "writes":
                results = {place: attempt(partial(write, place)) for place in places}
            case "opens":
                results = {place: attempt(partial(look, place)) for place in places}
            case _:
                sys.exit(f"{what!r} is none of needs, refused, writes, opens")
    print(json.dumps(results))


main()
