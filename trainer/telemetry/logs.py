"""Log lines for humans, on standard error."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from trainer.core.runtime import NO_GPU, importing
from trainer.telemetry.outlets.journald import SOCKET, JournalHandler

# What TensorFlow prints in every process, whatever TF_CPP_MIN_LOG_LEVEL says.
CHATTER = ("absl::InitializeLog()", "oneDNN custom operations are on", "Could not find cuda drivers on your machine")
# What it prints as an error where the machine has no GPU's driver, or the task is to see no GPU.
NOTHING_FOUND = "failed call to cuInit"
DRIVER = Path("/dev/nvidiactl")
HIDES_ALL = ("", NO_GPU, "NoDevFiles")  # in CUDA_VISIBLE_DEVICES


def set_up_logging(journal: bool, native: str = SOCKET) -> None:
    """Log to standard error, with times; to the journal without them, and with fields where it has its `native` socket.

    What others write to standard error comes to the journal all the same, and so do the lines of Python at which native
    code has crashed.
    """
    faulthandler.enable(2)
    logging.basicConfig(
        stream=own_stderr(),
        level=logging.INFO,
        format="%(levelshort)s%(message)s" if journal else "%(asctime)s %(levelshort)s%(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    root = logging.getLogger()
    (lines,) = root.handlers
    lines.addFilter(shorten_level)
    if journal:
        with contextlib.suppress(OSError):
            handler = JournalHandler(lines, native)
            handler.addFilter(shorten_level)
            handler.setFormatter(lines.formatter)
            root.handlers = [handler]
    # Made where TensorFlow was imported earlier, as in the parent of a fork: each line would be there twice.
    logging.getLogger("tensorflow").handlers = []
    for noisy in ("absl", "tensorflow", "h5py", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def own_stderr() -> TextIO:
    """Return a stream to standard error that stays open when a program closes sys.stderr.

    Where something else stands for sys.stderr, as in a notebook, it is that.
    """
    if sys.stderr is None or sys.stderr is not sys.__stderr__:
        return sys.stderr
    return os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")


def shorten_level(record: logging.LogRecord) -> bool:
    """Show the level only where it is news."""
    record.levelshort = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
    return True


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Hold back what native code writes to standard error, and pass it on without TensorFlow's chatter."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDES_ALL
    chatter = (*CHATTER, NOTHING_FOUND) if hidden or not DRIVER.exists() else CHATTER
    sys.stderr.flush()
    kept = os.dup(2)
    with file_in_memory() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not any(known in line for known in chatter):
                    sys.stderr.write(line)


def file_in_memory() -> IO[bytes]:
    """Return an open file that needs no room on a disk: a full one must keep no task from its start."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("psfleet"), "w+b")
    return tempfile.TemporaryFile()


def load_tensorflow() -> Any:
    """Return TensorFlow, which has looked for this machine's devices: what it says of them is held back, as above.

    Not for a process that forks: looking for devices initialises CUDA.
    """
    with importing(), without_chatter():
        import tensorflow as tf

        tf.config.list_physical_devices()
    return tf
