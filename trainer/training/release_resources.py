"""Let go of what a generation left on the servers, so that the next one can make its strategy in this process.

A strategy's constructor waits, with Python's lock, until all is done that TensorFlow's default executor has asked of
the servers. What this process lets go of, it asks them to free in that way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor

POSTED_SECONDS = 0.1  # until the default executor has what another thread hands to it
# Executors, kept to the end of the process: to destroy one waits for what it has asked for.
KEPT: list[Any] = []


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Have an executor of its own ask the servers to free what is let go of in here; nobody waits for that.

    It is for iterators. tf.data's thread that tunes one may miss that it is cancelled: it is woken before the flag is
    set that it looks at, sleeps on, and ends at its next look. A worker frees an iterator when that thread has ended:
    after at most as long as it has been in use, and at most a minute. Until then it frees nothing else either.
    """
    now = context.context()
    before, own = now.executor, executor.new_executor(enable_async=True)
    KEPT.extend((before, own))
    now.executor = own
    try:
        yield
    finally:
        now.executor = before


def freed(seconds: float) -> bool:
    """Return whether the servers have freed what this process let go of, in so many seconds.

    Nobody waits for that, the next strategy's constructor neither, when one of them was found to be gone.
    """

    def wait() -> None:
        time.sleep(POSTED_SECONDS)
        default = context.context().executor
        KEPT.append(default)
        with contextlib.suppress(tf.errors.OpError):
            default.wait()

    thread = threading.Thread(target=wait, name="freeing", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
