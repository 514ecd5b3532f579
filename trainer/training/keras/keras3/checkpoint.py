"""What a checkpoint holds of a Keras 3 model, whatever the number of ps."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Optimizer, Variable
from trainer.core.failures import UserError
from trainer.training.keras.keras3.checks import NOT_SPLIT
from trainer.training.keras.keras3.names import kept_beside, named
from trainer.training.keras.keras3.optimizers import optimizers_of

ShardedVariable = tf.__internal__.distribute.ShardedVariable
PART = re.compile(r"_part_\d+")


class CheckpointedModel(tf.__internal__.tracking.AutoTrackable):
    """What a checkpoint holds of a model: its variables by their names in it, its optimizers' by those of its slots.

    `beside` are those of TensorFlow's own that Keras does not know.
    """

    metrics = ()

    def __init__(self, model: Model, *, with_optimizers: bool = True) -> None:
        names = named(model)
        self.weights = {name: one._value for name, one in names.items()}
        self.beside = kept_beside(model)
        self.optimizer = {name: slots(one, names) for name, one in optimizers_of(model)} if with_optimizers else {}

    @property
    def variables(self) -> list[Variable]:
        """The variables as TensorFlow has them, a split one as a whole."""
        return [*self.weights.values(), *(one for held in self.optimizer.values() for one in held.values())]


def whole_slots(optimizer: Optimizer) -> list[Variable]:
    """Return TensorFlow's variables of an optimizer in its own order, the slots of a split variable's shards as one."""
    places = {id(one): place for place, one in enumerate(raw(optimizer.variables))}
    return sorted(slots(optimizer, {}).values(), key=lambda one: places[id(getattr(one, "variables", [one])[0])])


def read_whole_slots() -> None:
    """Have optimizers of Keras 3, if it is imported, read a file's slots of whole variables into those of shards."""
    keras = sys.modules.get("keras")
    if keras is None or hasattr(keras.optimizers.Optimizer.load_own_variables, "__wrapped__"):
        return
    plain = keras.optimizers.Optimizer.load_own_variables

    @functools.wraps(plain)
    def load(optimizer: Optimizer, store: Any) -> None:
        wholes = whole_slots(optimizer)
        if not len(optimizer.variables) > len(wholes) == len(store.keys()):
            return plain(optimizer, store)
        for number, one in enumerate(wholes):
            one.assign(tf.cast(store[str(number)][()], one.dtype))

    keras.optimizers.Optimizer.load_own_variables = load


def raw(variables: Iterable[Variable]) -> list[Variable]:
    """Return TensorFlow's variables beneath Keras 3's; tf_keras has none of its own."""
    return [one._value if type(one).__module__.startswith("keras.") else one for one in variables]


def slots(optimizer: Optimizer, names: Mapping[str, Any]) -> dict[str, Variable]:
    """Return the optimizer's variables, the slots of a split variable's shards as one; raises UserError.

    A slot is a list with an entry for each variable that is trained, and has that one's name in `names`.
    """
    trained = optimizer._trainable_variables
    known = {id(one): name for name, one in names.items()}
    wholes: dict[str, list[int]] = {}
    for number, one in enumerate(trained):
        whole = id(vars(one).get("_whole", one))
        # One that is no layer's is found by its place, and so are all its shards.
        wholes.setdefault(known.setdefault(whole, f"{len(wholes):04}"), []).append(number)
    held, done = {}, set()
    for name, slot in vars(optimizer).items():
        if name in ("_trainable_variables", "_variables") or not isinstance(slot, list) or len(slot) != len(trained):
            continue
        for of, numbers in wholes.items():
            parts = [slot[number] for number in numbers]
            if any(not hasattr(part, "_value") for part in parts):
                continue
            if len(parts) > 1 and any(slot[number].shape != trained[number].shape for number in numbers):
                continue
            done |= {id(part) for part in parts}
            values = raw(parts)
            held[f"{name}/{of}"] = values[0] if len(values) == 1 else ShardedVariable(values)
    own = {id(one): name for name, one in vars(optimizer).items()}
    for number, one in enumerate(one for one in optimizer.variables if id(one) not in done):
        if PART.search(one.name):
            raise UserError(
                f"{type(optimizer).__name__} keeps {one.name!r} for one part of a table that is split over the ps: on "
                f"another number of ps no checkpoint could be restored. {NOT_SPLIT} take another optimizer "
                "(docs/keras3.md lists those that work)"
            )
        held[own.get(id(one), f"{number:04}")] = one._value
    return held
