"""Gradients of a split weight as of a whole one: a tape gives them, and an optimizer takes them, part by part."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor, Variable

ShardedVariable: Any = tf.__internal__.distribute.ShardedVariable


@dataclasses.dataclass
class Asked:
    """What a step asks for while it is traced."""

    sources: list[list[tuple[Any, bool]]] = dataclasses.field(default_factory=list)
    """For each call of a tape its sources, and whether each has a gradient."""
    places: dict[tuple[int, ...], dict[int, str]] = dataclasses.field(default_factory=dict)
    """By the weights of a list: the places that were taken, each with why it must not be by itself, or nothing."""


_noted: list[Asked] = []


@contextlib.contextmanager
def noting_asked() -> Iterator[Asked]:
    """Give what is asked for meanwhile."""
    _noted.append(Asked())
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def noted() -> Asked | None:
    """Return what has been asked for in the step that is traced, if one is."""
    return _noted[-1] if _noted else None


def of_whole_sources(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tape's `gradient`, which gives that of a split weight, of whichever Keras, as of a whole one."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(plain)
    def gradient(tape: tf.GradientTape, target: Any, sources: Any, *given: object, **named: object) -> Any:
        flat = tf.nest.flatten(sources)
        found = plain(tape, target, [parts_or_itself(one) for one in flat], *given, **named)
        if _noted:
            _noted[-1].sources.append([(one, each is not None) for one, each in zip(flat, found, strict=True)])
        return tf.nest.pack_sequence_as(sources, [joined(*one) for one in zip(flat, found, strict=True)])

    return gradient


def of_whole_variables(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tf.gradients`, which gives that of a split weight as of a whole one."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(plain)
    def gradients(ys: Any, xs: Any, *given: object, **named: object) -> Any:
        flat = tf.nest.flatten(xs)
        parts = [parts_or_itself(one) for one in flat]
        found = tf.nest.pack_sequence_as(parts, plain(ys, tf.nest.flatten(parts), *given, **named))
        return [joined(*one) for one in zip(flat, found, strict=True)]

    return gradients


def watching_parts(plain: Callable[..., None]) -> Callable[..., None]:
    """Return what begins a `tf.autodiff.ForwardAccumulator`, which takes a split weight and its tangent as a whole."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(plain)
    def begin(accumulator: Any, primals: Any, tangents: Any) -> None:
        if any(split_beneath(one) is not None for one in tf.nest.flatten(primals)):
            pairs = by_parts(zip(tf.nest.flatten(tangents), tf.nest.flatten(primals), strict=True))
            primals, tangents = [one for _, one in pairs], [one for one, _ in pairs]
        plain(accumulator, primals, tangents)

    return begin


class PartsGradients:
    """What TensorFlow asks a composite tensor for, as in an eager call of a function with a gradient of its own."""

    def get_gradient_components(self, value: Variable) -> list[Variable]:
        return list(value.variables)

    def replace_gradient_components(self, value: Variable, component_grads: Sequence[Tensor]) -> Tensor:
        return joined(value, component_grads)


def split_beneath(variable: Any) -> Any:
    """Return the split variable that this one is, or that lies beneath one of Keras 3; else None."""
    found = getattr(variable, "_value", variable)
    return found if isinstance(found, ShardedVariable) else None


def parts_or_itself(source: Any) -> Any:
    split = split_beneath(source)
    return source if split is None else list(split.variables)


def joined(source: Any, found: Any) -> Any:
    """Return the gradient of a source, where those of a split one's parts were found."""
    split = split_beneath(source)
    known = [one for one in found if one is not None] if split is not None else []
    if not known:
        return None if split is not None else found
    bounds = list(bounds_of(split))
    if all(isinstance(one, tf.IndexedSlices) for one in known):
        rows = [(one, begin) for one, (begin, _) in zip(found, bounds, strict=True) if one is not None]
        numbers = tf.concat([one.indices + tf.cast(begin, one.indices.dtype) for one, begin in rows], axis=0)
        return tf.IndexedSlices(tf.concat([one.values for one, _ in rows], axis=0), numbers, tf.shape(split))
    zeros = (tf.zeros([end - begin, *split.shape[1:]], known[0].dtype) for begin, end in bounds)
    return tf.concat([zero if one is None else one for one, zero in zip(found, zeros, strict=True)], axis=0)


def bounds_of(split: Variable) -> Iterator[tuple[int, int]]:
    """Yield the first row of each part, and the one behind its last."""
    ends = itertools.accumulate((int(part.shape[0]) for part in split.variables), initial=0)
    return itertools.pairwise(ends)


def by_parts(
    pairs: Iterable[tuple[Tensor, Variable]], parts_of: Callable[[Any], Sequence[Variable]] | None = None
) -> list[tuple[Tensor, Variable]]:
    """Return gradients and variables with the parts of each split one in its place."""
    found: list[tuple[Any, Any]] = []
    for gradient, variable in pairs:
        split = split_beneath(variable)
        if split is None:
            found.append((gradient, variable))
        else:
            parts = split.variables if parts_of is None else parts_of(variable)
            rows = [rows_between(gradient, *bounds) for bounds in bounds_of(split)]
            found += zip(rows, parts, strict=True)
    return found


def rows_between(gradient: Tensor, begin: int, end: int) -> Tensor:
    """Return the part of a gradient that belongs to these rows."""
    if gradient is None:
        return None
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[begin:end]
    own = (gradient.indices >= begin) & (gradient.indices < end)
    values, numbers = (tf.boolean_mask(one, own) for one in (gradient.values, gradient.indices))
    shape = tf.concat([[end - begin], tf.shape(gradient.values)[1:]], axis=0)
    return tf.IndexedSlices(values, numbers - tf.cast(begin, numbers.dtype), shape)
