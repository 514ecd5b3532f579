"""Rows of a variable, which an optimizer's own dense update takes for a variable of so many rows.

So an update of rows is what the optimizer does to a small weight: no algorithm is written again here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Optimizer, Tensor, Variable
from trainer.training.updates.learning_rate import replaced

# By which optimizers know a variable.
KNOWN_BY = ("name", "_unique_id", "_sharded_container", "_distributed_container")
ALL_VARIABLES = ("_variables", "_trainable_variables")
NOT_BUILT = -1  # the place of a variable that has no slots of the optimizer's own


class Rows:
    """Rows of a variable: read when they are first used, and written by `write`.

    The numbers of the rows must differ: it is faster to write rows than to add to them, since a gather fetches ahead.
    """

    def __init__(self, variable: Variable, numbers: Tensor) -> None:
        """Take TensorFlow's variable, and the numbers of rows of it, of shape [n]."""
        self.dtype = variable.dtype
        for name in KNOWN_BY:
            if hasattr(variable, name):
                setattr(self, name, getattr(variable, name))
        self._handle, self._numbers = variable.handle, numbers
        self._now: Any = None
        self._is_changed = False

    @property
    def value(self) -> Tensor:
        """The rows as they are now, of shape [n, ...]."""
        if self._now is None:
            self._now = tf.raw_ops.ResourceGather(resource=self._handle, indices=self._numbers, dtype=self.dtype)
        return self._now

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    def assign(self, value: Any, **_: object) -> None:
        self._now, self._is_changed = tf.convert_to_tensor(value, self.dtype), True

    def assign_add(self, change: Any, **_: object) -> None:
        self.assign(self.value + change)

    def assign_sub(self, change: Any, **_: object) -> None:
        self.assign(self.value - change)

    def scatter_add(self, change: tf.IndexedSlices, **_: object) -> None:
        self.assign(tf.tensor_scatter_nd_add(self.value, change.indices[:, tf.newaxis], change.values))

    def scatter_sub(self, change: tf.IndexedSlices, **_: object) -> None:
        self.assign(tf.tensor_scatter_nd_sub(self.value, change.indices[:, tf.newaxis], change.values))

    def sparse_read(self, numbers: Tensor, **_: object) -> Tensor:
        return tf.gather(self.value, numbers)

    def write(self) -> None:
        """Write the rows, if they have changed."""
        if self._is_changed:
            tf.raw_ops.ResourceScatterUpdate(resource=self._handle, indices=self._numbers, updates=self._now)


def as_tensors_do(operator: str) -> Any:
    def operate(rows: Rows, *others: Any) -> Any:
        return getattr(rows.value, operator)(*others)

    return operate


for each in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs"):
    setattr(Rows, f"__{each}__", as_tensors_do(f"__{each}__"))


@contextlib.contextmanager
def as_rows(optimizer: Optimizer, variable: Variable, numbers: Tensor) -> Iterator[Rows]:
    """Give rows of a variable, and have the optimizer find the same rows of its slots; at the end all are written."""
    place = place_of(optimizer, variable)
    slots = {name: own(listed[place]) for name, listed in slots_of(optimizer, variable, place).items()}
    with with_slots(optimizer, variable, slots, numbers) as rows:
        yield rows


@contextlib.contextmanager
def with_slots(optimizer: Optimizer, variable: Variable, slots: Mapping[str, Any], numbers: Tensor) -> Iterator[Rows]:
    """Do so with slots by the names of the lists in which the optimizer looks for them.

    A variable that the optimizer was not built with has the place NOT_BUILT in them.
    """
    place, made = place_of(optimizer, variable), [Rows(variable, numbers)]
    with contextlib.ExitStack() as stack:
        for name, slot in slots.items():
            made.append(Rows(slot, numbers))
            stack.enter_context(replaced(optimizer, name, put(vars(optimizer)[name], place, made[-1])))
        yield made[0]
    for rows in made:
        rows.write()


def put(listed: Sequence[Any], place: int, rows: Rows) -> list[Any]:
    return [*listed, rows] if place == NOT_BUILT else [*listed[:place], rows, *listed[place + 1 :]]


def place_of(optimizer: Optimizer, variable: Variable) -> int:
    """Return the place of a variable in the lists of slots of an optimizer, of whichever Keras."""
    places = vars(optimizer).get("_trainable_variables_indices", vars(optimizer).get("_index_dict"))
    return int(places[optimizer._var_key(variable)])


def slots_of(optimizer: Optimizer, variable: Variable, place: int) -> dict[str, Any]:
    """Return the lists with a slot of a variable's shape for it at its place, by their names."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in ALL_VARIABLES
        and place < len(value)
        and isinstance(own(value[place]), tf.Variable)
        and value[place].shape == variable.shape
    }


def own(variable: Variable) -> Variable:
    """Return TensorFlow's variable beneath one of Keras 3; others are their own."""
    return getattr(variable, "_value", variable)
