"""Let go of what a turn left on the servers, so that the next one can make its strategy in this process.

A strategy's constructor waits, with Python's lock, until all is done that TensorFlow's default executor has asked of
the servers. What this process lets go of, it asks them to free in that way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor

# Kept to the end of the process: to destroy one waits for what it has asked for.
APART: list[Any] = []


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Have an executor of its own ask the servers to free what is let go of in here; nobody waits for that.

    It is for iterators. tf.data's thread that tunes one may miss that it is cancelled: it is woken before the flag is
    set that it looks at, sleeps on, and ends at its next look. A worker frees an iterator when that thread has ended:
    after at most as long as it has been in use, and at most a minute.
    """
    APART.append(executor.new_executor(enable_async=True))
    with context.executor_scope(APART[-1]):
        yield


def freed(seconds: float) -> bool:
    """Return whether the servers have freed all else that this process let go of, in so many seconds."""

    def wait() -> None:
        with contextlib.suppress(tf.errors.OpError):  # a server that is gone has freed everything
            context.context().executor.wait()

    thread = threading.Thread(target=wait, name="freeing", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
