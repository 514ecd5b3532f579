"""What a program sees of a part of a split weight: the whole's name, and rows that are no number to go by.

A rule as `if v.shape[0] > 1000` or `if v.name.endswith("kernel:0")` would treat parts otherwise than the weight. What
TensorFlow, Keras and the trainer themselves see of a part stays its own.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import KINDS, beneath, whole_of

LIBRARIES = ("keras", "numpy", "tensorflow", "tf_keras", "trainer")
NUMBERS = (int, float, np.number)


class PartName(str):
    """A weight's name, as of one part of it: equal to the same text, but not to the name of another part.

    So a dictionary by names keeps what belongs to each part.
    """

    part: str
    __hash__ = str.__hash__

    def __new__(cls, whole: str, part: str) -> PartName:
        made = super().__new__(cls, whole)
        made.part = part
        return made

    def __eq__(self, other: object) -> bool:
        return self.part == other.part if isinstance(other, PartName) else str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class Rows(int):
    """How many rows, or numbers, a part has; raises UserError where a program's comparison is otherwise of the whole's.

    A number that is the part's own is one that the program took from a part.
    """

    whole: int
    weight: str
    __hash__ = int.__hash__

    def __new__(cls, part: int, whole: int, weight: str) -> Rows:
        made = super().__new__(cls, part)
        made.whole, made.weight = whole, weight
        return made

    def __mul__(self, other: Any) -> Any:
        if type(other) is int:
            return Rows(int(self) * other, self.whole * other, self.weight)
        return int.__mul__(self, other)

    __rmul__ = __mul__


def comparing(name: str) -> Callable[[Rows, Any], Any]:
    compare, plain = getattr(operator, name), getattr(int, f"__{name}__")

    def compared(rows: Rows, other: Any) -> Any:
        is_other = isinstance(other, NUMBERS) and not isinstance(other, Rows) and other != int(rows)
        if is_other and is_for_program() and compare(rows.whole, other) != compare(int(rows), other):
            raise refusal(rows.weight, f"{int(rows):,} of {rows.whole:,} rows or numbers", f"{other:,}")
        return plain(rows, other)

    return compared


for _name in ("eq", "ge", "gt", "le", "lt", "ne"):
    setattr(Rows, f"__{_name}__", comparing(_name))


class PartShape(tf.TensorShape):
    """The shape of a part, whose rows and numbers are `Rows` for a program."""

    def __init__(self, part: Any, whole: Any, weight: str) -> None:
        super().__init__(part)
        self._whole, self._weight = tf.TensorShape(whole), weight

    __hash__ = tf.TensorShape.__hash__

    def __reduce__(self) -> Any:
        return tf.TensorShape, (tf.TensorShape(self._dims),)

    def __eq__(self, other: object) -> Any:
        same = super().__eq__(other)
        if same is False and is_for_program() and self._whole == other:
            raise refusal(self._weight, f"the shape {tuple(self._dims)} of {tuple(self._whole)}", str(other))
        return same

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        is_rows = not isinstance(key, slice) and key in (0, -len(self._dims))
        return self._rows() if is_rows and is_for_program() else found

    def __iter__(self) -> Iterator[Any]:
        return iter([self._rows(), *self._dims[1:]] if is_for_program() else self._dims)

    @tf.autograph.experimental.do_not_convert  # its calls would have other frames
    def as_list(self) -> list[Any]:
        return [self._rows(), *self._dims[1:]] if is_for_program() else list(self._dims)

    @tf.autograph.experimental.do_not_convert
    def num_elements(self) -> Any:
        part, whole = super().num_elements(), self._whole.num_elements()
        return Rows(part, whole, self._weight) if is_for_program() else part

    def __array_function__(self, function: Any, types: Any, given: Any, named: Any) -> Any:
        if function is np.prod and len(given) == 1 and not named:
            return Rows(super().num_elements(), self._whole.num_elements(), self._weight)
        plain = [tuple(one._dims) if isinstance(one, PartShape) else one for one in given]
        return function(*plain, **named)

    def _rows(self) -> Rows:
        return Rows(self._dims[0], self._whole[0], self._weight)


def refusal(weight: str, part: str, other: str) -> UserError:
    return UserError(
        f"the program compares a part of {weight}, which is split over the ps, with {other}: it has {part}, so that "
        "a rule by shape would be another one than of the whole. Set partitioner to none, so that weights stay whole, "
        "or go by the weight's name"
    )


def is_for_program() -> bool:
    """Return whether neither a library nor the trainer asks: what does is two calls up, or what AutoGraph calls for."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and module_of(frame).startswith("tensorflow.python.autograph."):
        frame = frame.f_back
    return frame is not None and module_of(frame).partition(".")[0] not in LIBRARIES


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@functools.cache
def see_whole_rules() -> None:
    """Have programs of this process see parts so: those of tf_keras's layers, and of variables made by hand."""
    for kind in KINDS:
        see(kind, "name", whole_of, lambda part, own: PartName(f"{name_of(beneath(part))}:0", own))
        see(kind, "shape", whole_of, lambda part, own: PartShape(own, whole_of(part).shape, name_of(beneath(part))))


def see(kind: Any, name: str, whole: Callable[[Any], Any], seen: Callable[[Any, Any], Any]) -> None:
    """Have a program read this of variables that are part of a whole: `seen` takes one, and what a library reads."""
    plain = getattr(kind, name).fget

    def read(variable: Variable) -> Any:
        own = plain(variable)
        return seen(variable, own) if whole(variable) is not None and is_for_program() else own

    setattr(kind, name, property(read))
