"""The first trace of a step. TensorFlow drops it where it made variables, and traces the step again.

A lazily built model or optimizer makes its variables there. What only takes time is left out of the rest of that trace:
the updates of Keras's own optimizers, their mutexes, and the packing of messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Optimizer

_traces: list[FirstTrace] = []  # that are under way, each within the one before


class FirstTrace:
    """What is traced while this is `watched`."""

    def __init__(self) -> None:
        self.is_dropped = False
        """Whether the newest trace has made a variable, so that it is not the one to use."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look for variables that are made meanwhile, in the function that is being traced."""

        def make(make_next: Callable[..., Any], **named: object) -> Any:
            self.is_dropped = True
            return make_next(**named)

        self.is_dropped = False
        _traces.append(self)
        try:
            with tf.variable_creator_scope(make):
                yield
        finally:
            _traces.remove(self)


def is_dropped() -> bool:
    """Return whether the trace that is under way has made a variable: TensorFlow will not use it."""
    return any(trace.is_dropped for trace in _traces)


def needs_no_update(optimizer: Optimizer) -> bool:
    """Return whether an update may be left out of a trace that is dropped.

    Keras's own optimizers make their variables before any update. One of a program may make some in its update.
    """
    return is_dropped() and type(optimizer).__module__.startswith(("tf_keras.", "keras."))
