"""Fork processes that have TensorFlow imported already, from a parent that has done nothing else with it.

A fork takes over the thread that calls it alone: what another thread held locked stays locked for ever in the child.
So the parent has one thread, counted before each fork, and no context, no device and no channel of TensorFlow's.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import pkgutil
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainer.core.runtime import importing, prepare_tensorflow
from trainer.process.server_library import import_server_library
from trainer.telemetry.logs import without_chatter

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ROOMS = ("trainer.tasks", "trainer.training")  # whose modules the tasks import, with what these import
SERVER = "trainer.tasks.server"
# numpy's OpenBLAS makes a thread for each core when it is imported.
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")


def warm_up() -> None:
    """Import TensorFlow and the package's own modules, and nothing of the user's."""
    with _importing():
        for room in ROOMS:
            for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
                importlib.import_module(module.name)
        importlib.import_module("tensorflow").keras.Model  # noqa: B018 - which loads Keras


def warm_up_server() -> None:
    """Import what a ps or a worker needs, which is a part of TensorFlow, and of the package."""
    with _importing():
        importlib.import_module(SERVER)
        import_server_library()


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    name, value = ONE_THREAD
    ours = name not in os.environ
    os.environ.setdefault(name, value)
    prepare_tensorflow()
    gc.disable()  # an import makes next to no garbage, and each collection would look at all objects
    with importing(), without_chatter():
        yield
    if ours:
        del os.environ[name]  # a library with an OpenBLAS of its own, in the user's program, may use every core
    gc.enable()
    gc.freeze()  # a collection in the child would write to every page that it shares with its parent


def import_from(places: Sequence[str]) -> None:
    """Have a forked process import from these directories alone, as one does that is started there."""
    sys.path[:] = places
    importlib.invalidate_caches()


def why_unsafe() -> str:
    """Say why a fork of this process could hang, or nothing."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        return f"it has {threads} threads"
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is not None and context._context is not None:
        return "TensorFlow has a context"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return "it has opened a GPU"
    return ""


def fork(run: Callable[[], int]) -> int:
    """Return the pid of a child that does `run` and ends with its code; it never outlives this process."""
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone, as of a journal that was stopped
            stream.flush()
    # A signal between the fork and the child's own handlers would run the parent's in the child.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    try:
        pid = os.fork()
        if pid:
            return pid
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    code = 1
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Ctrl-C is for the parent, which ends its children in order. A session of its own would do as well, but Linux
        # shares the processors out among sessions: the one that all wait for would get no more than the others.
        os.setpgid(0, 0)
        seed_again()
        code = run()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        log.exception("process %d ends", os.getpid())
    finally:
        end(code)
    raise AssertionError("not reached")


def seed_again() -> None:
    """Seed what would draw the same numbers in each child; Python's own generator does so itself."""
    random.seed()
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed()


def end(code: int) -> None:
    """End this process now: TensorFlow's threads may wait for members that are gone."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def die_with_parent(parent: int) -> None:
    """End this process when its parent dies, however it dies (Linux)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
