"""Large variables that are made without a value: a model can be built and traced where there is no memory for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Variable

RESERVED_BYTES = 1 << 20  # a variable as large as this is not filled


def reserving(note: Callable[[Variable], object] = lambda _: None) -> Callable[..., Any]:
    """Return a creator of variables that gives large ones no value; `note` is called with each of these.

    They take no memory, and keep nothing that they are given.
    """

    def reserve(make: Callable[..., Any], **arguments: Any) -> Any:
        shape, dtype = shape_of(arguments)
        if shape is None or dtype is None or math.prod(shape) * dtype.size < RESERVED_BYTES:
            return make(**arguments)
        with tf.device("CPU:0"):
            arguments["initial_value"] = tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)
        variable = make(**arguments)
        for name in ("assign", "assign_add", "assign_sub"):
            with contextlib.suppress(AttributeError):
                setattr(variable, name, lambda *_, **__: variable)
        note(variable)
        return variable

    return reserve


def shape_of(arguments: dict[str, Any]) -> tuple[tuple[int, ...] | None, Any]:
    """Return shape and type of a variable that is made with these arguments, where they are known."""
    value, shape, dtype = arguments.get("initial_value"), arguments.get("shape"), arguments.get("dtype")
    if callable(value) and (shape is None or dtype is None):
        made: Any = tf.function(value, autograph=False).get_concrete_function().structured_outputs
        shape, dtype = made.shape, made.dtype
    elif not callable(value):
        shape, dtype = getattr(value, "shape", None), dtype or getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return None, None
    shape, dtype = tf.TensorShape(shape), tf.as_dtype(dtype)
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex
    return (tuple(shape), dtype) if shape.is_fully_defined() and is_number else (None, None)


def least_bytes(pieces: Sequence[int]) -> int:
    """Return what a process takes at most for variables in pieces of these bytes, where it reads large ones in turn.

    TensorFlow's allocator keeps the memory of the one before.
    """
    large = [size for size in pieces if size >= RESERVED_BYTES]
    return sum(pieces) - sum(large) + 2 * max(large, default=0)
