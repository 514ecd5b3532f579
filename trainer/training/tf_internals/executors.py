"""What runs a thread's eager operations, and how this process lets go of that and of functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, executor

# To the end of the process: to let go of one waits for what it has asked for.
KEPT: list[Any] = []


def default_executor() -> Any:
    """Return what runs this thread's eager operations."""
    KEPT.append(context.context().executor)
    return KEPT[-1]


def make_executor() -> Any:
    """Return an executor of eager operations that does not wait for them."""
    KEPT.append(executor.new_executor(enable_async=True, enable_streaming_enqueue=False))
    return KEPT[-1]


@contextlib.contextmanager
def on_executor(own: Any, before: Any) -> Iterator[None]:
    """Run this thread's eager operations on an executor, and then on `before`, which it had until now."""
    context.context().executor = own
    try:
        yield
    finally:
        context.context().executor = before


def delete_executor(self: Any) -> None:
    """Let go of an executor without waiting for what it has in flight.

    Each call drops a reference to TensorFlow's default executor, which frees results. On a silent worker that waits,
    and all workers' calls would wait with it.
    """
    with contextlib.suppress(TypeError):  # at the process's end
        pywrap_tfe.TFE_DeleteExecutor(self._handle)


def keep_function(self: Any, name: str) -> None:
    """Keep a function that is no longer used, instead of having the members forget it.

    TensorFlow asks one member after the other to forget it, with Python's lock: one that is frozen would stop all
    threads of this process, also the heartbeat that finds it frozen. Python's garbage collector does it at any moment.
    This process keeps it to its end, and so trains no more than MAX_GENERATIONS (trainer/tasks/training.py).
    """
