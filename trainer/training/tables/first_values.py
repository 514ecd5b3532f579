"""First values of a weight that tf_keras makes in parts: those that the whole one would have."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Layer, Tensor
from trainer.training.tf_internals.variables import fans_of


def scaled_as_whole(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what gives first values, of a part of a weight too: tf_keras would scale these by the part's shape."""

    @functools.wraps(plain)
    def initial(initializer: Any, shape: Any, dtype: Any = None, **more: Any) -> Tensor:
        if (part := more.get("partition_shape")) is not None:
            scale = initializer.scale * fan(initializer.mode, part) / fan(initializer.mode, shape)
            initializer = copy.copy(initializer)
            initializer.scale = scale
        return plain(initializer, shape, dtype, **more)

    return initial


def fan(mode: str, shape: Any) -> float:
    """Return what an initializer divides its scale by."""
    fan_in, fan_out = fans_of(shape)
    return max(1.0, {"fan_in": fan_in, "fan_out": fan_out}.get(mode, (fan_in + fan_out) / 2))


def initialized_as_whole(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return what adds a weight to a layer, whose initializer gives all parts the rows of one whole weight."""

    @functools.wraps(plain)
    def add(layer: Layer, *given: Any, initializer: Any = None, **named: Any) -> Any:
        if callable(initializer) and not isinstance(initializer, type):
            initializer = at_once(initializer)
        return plain(layer, *given, initializer=initializer, **named)

    return add


def at_once(initializer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an initializer that is asked once where it gives whole weights: another time it may draw other numbers.

    A function is not asked for parts. That of an LSTM's bias would make its pieces of them, which don't fit together.
    """
    kept: list[Any] = []
    has_seed = getattr(initializer, "seed", None) is not None  # by which TensorFlow's own draw the same for each part
    makes_parts = isinstance(initializer, tf.keras.initializers.Initializer) or (
        hasattr(initializer, "get_config") and not has_seed
    )

    def initial(shape: Any, dtype: Any = None, **part: Any) -> Tensor:
        if not part:
            return initializer(shape, dtype=dtype)
        if makes_parts and not kept:
            with contextlib.suppress(TypeError, ValueError):  # of one that makes no parts
                value = initializer(shape, dtype=dtype, **part)
                if value.shape != tf.TensorShape(shape):
                    return value
        if not kept:
            kept.append(initializer(shape, dtype=dtype))
        return kept[0]

    return initial
