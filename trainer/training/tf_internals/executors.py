"""What runs a thread's eager operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context, executor


def default_executor() -> Any:
    """Return what runs this thread's eager operations."""
    return context.context().executor


def make_executor() -> Any:
    """Return an executor of eager operations that does not wait for them; letting go of it does: keep it."""
    return executor.new_executor(enable_async=True, enable_streaming_enqueue=False)


@contextlib.contextmanager
def on_executor(own: Any, before: Any) -> Iterator[None]:
    """Run this thread's eager operations on an executor, and then on `before`, which it had until now."""
    context.context().executor = own
    try:
        yield
    finally:
        context.context().executor = before
