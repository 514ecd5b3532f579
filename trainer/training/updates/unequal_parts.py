"""Refuse steps that read or train some parts of a split weight otherwise than the others.

A program that takes weights by their places in trainable_variables, as the last two, does so without knowing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import OF_SOME_ROWS, beneath, divided
from trainer.training.updates.flows import Flow, Use, behind, reach
from trainer.training.updates.rows import own
from trainer.training.updates.split_gradients import Asked, noted

OF_TAPE = "gradient_tape/"  # TensorFlow's scope of all that a GradientTape computes
PARTS_ARE_LISTED = (
    "which is split over the ps: trainable_variables has a weight's parts, with places, names and shapes of their own. "
    "Set partitioner to none, so that weights stay whole, or take"
)
WHOLES_OWN = "the layer's own weight, as layer.kernel, in place of trainable_variables"
WHOLE_INSTEAD = f"take {WHOLES_OWN}"
LAYERS_INSTEAD = "the weights of a layer, as model.get_layer(NAME).trainable_variables"
# Of several that the tape gives for a part; another one may have fewer, as where a step reads its first row.
JOINING = ("AddN", "ConcatV2", "Identity", "Reshape", "UnsortedSegmentSum")
# By the parts' ids: which optimizers update a part in a graph, and what of its gradient was computed for it.
_updates: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = weakref.WeakKeyDictionary()


def note_update(optimizer: Optimizer, part: Variable, gradient: Tensor) -> None:
    """Note an update of a part that is traced."""
    noted = _updates.setdefault(tf.compat.v1.get_default_graph(), {}).setdefault(id(beneath(part)), [])
    noted.append((id(optimizer), Counter(made_of(gradient))))


def made_of(gradient: Tensor) -> Iterator[Any]:
    """Yield what a step makes of what the tape gives, number by number: kinds of operations, and factors."""
    given = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if not tf.is_symbolic_tensor(given):
        return
    rank = given.shape.rank

    def alike(flow: Flow) -> list[Flow]:
        return [] if is_of_tape(flow) or flow.tensor.shape.rank != rank else behind(flow)

    for one in reach([Flow(given)], alike):
        if is_of_tape(one) or not one.tensor.dtype.is_floating or one.tensor.op.type in JOINING:
            continue
        if one.tensor.shape.rank == rank:
            yield one.tensor.op.type
        elif (number := tf.get_static_value(one.tensor)) is not None:
            yield number.tobytes()


def reject_unequal_updates(parts: Sequence[Variable], used: Sequence[Sequence[Use]]) -> None:
    """Raise UserError where a step updates some parts of a weight only, or with other factors than the others.

    Not where it reads some rows alone, as the first ones of a table of positions: a part with none has no gradient.
    """
    updates = _updates.get(tf.compat.v1.get_default_graph(), {})
    first, *others = [updates.get(id(beneath(part)), []) for part in parts]
    reads_some_rows = any(OF_SOME_ROWS in one.operation.name for each in used for one in each)
    if not reads_some_rows and any(each != first for each in others):
        raise UserError(
            f"the step does not train all parts of {name_of(parts[0])} alike, {PARTS_ARE_LISTED} {LAYERS_INSTEAD}"
        )


def reject_short_lists(asked: Sequence[Sequence[tuple[Any, bool]]], is_written: Callable[[Any], bool]) -> None:
    """Raise UserError where a step trains as many of what it asked a tape for as these are weights, and no more.

    A list with a value for each weight does so, where `zip` ends with it: its places are those of parts.
    """
    for sources in asked:
        if not all(isinstance(own(one), tf.Variable) for one, _ in sources):
            continue
        wholes = [divided(own(one)) for one, _ in sources]
        number = len({id(one if whole is None else whole) for (one, _), whole in zip(sources, wholes, strict=True)})
        left = sources[number:]
        trained = [is_written(one) for one, _ in sources] if left else []
        if left and all(has for _, has in left) and trained == [True] * number + [False] * len(left):
            part = next(own(one) for (one, _), whole in zip(sources, wholes, strict=True) if whole is not None)
            raise UserError(
                f"the step trains the first {number} of the {len(sources)} variables whose gradients it takes, "
                f"as if these were whole weights. A list with a value for each weight is too short for "
                f"{name_of(part)}, {PARTS_ARE_LISTED} the value of each by its layer. A step that is to train these "
                "alone asks the tape for no others"
            )


def reject_unequal(parts: Sequence[Variable], reads: Sequence[Sequence[Use]]) -> None:
    """Raise UserError where a step reads some parts of a weight by their places, shapes or names."""
    numbers = [len([one for one in each if OF_SOME_ROWS not in one.operation.name]) for each in reads]
    if len(set(numbers)) > 1:
        part = parts[numbers.index(max(numbers))]
        raise UserError(
            f"the step reads {part.name} otherwise than the other parts of {name_of(part)}, {PARTS_ARE_LISTED} "
            f"{WHOLES_OWN}"
        )


class ListedParts(list[Any]):
    """What a step trains: a place at which whole weights would have something else is refused.

    Of single places it is known at the end: a step may go through all of them.
    """

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        asked = noted()
        parts = [own(one) for one in self if divided(own(one)) is not None]
        if asked is None or not parts:  # tf.nest makes lists of this kind of what a step has for each
            return found
        weights: dict[int, list[Any]] = {}
        for one in self:
            whole = divided(own(one))
            weights.setdefault(id(one if whole is None else whole), []).append(one)
        picked = [*weights.values()][key if isinstance(key, slice) else slice(key, key + 1 or None)]
        same = [*map(id, found if isinstance(key, slice) else [found])] == [id(one) for each in picked for one in each]
        why = (
            f"the step takes [{described(key)}] of trainable_variables, and would get something else of whole weights. "
            f"One of them is {name_of(parts[0])}, {PARTS_ARE_LISTED} "
        )
        if not isinstance(key, slice):
            places = asked.places.setdefault((*map(id, self),), {})
            places[key % len(self)] = "" if same else f"{why}{WHOLES_OWN}; or go through all of them"
        elif not same:
            raise UserError(f"{why}{LAYERS_INSTEAD}")
        return found


def reject_places(asked: Asked) -> None:
    """Raise UserError where a step has taken some places of what it trains that whole weights have not."""
    for weights, places in asked.places.items():
        if len(places) < len(weights) and (why := next(filter(None, places.values()), "")):
            raise UserError(why)


def described(key: Any) -> str:
    """Return a place in a list as it is written."""
    bounds = (key.start, key.stop, key.step) if isinstance(key, slice) else (key,)
    return ":".join("" if one is None else str(one) for one in bounds[: 2 if bounds[-1] is None else 3])


def listed(weights: list[Any]) -> list[Any]:
    """Return weights as a step that is traced may take them."""
    is_split = noted() is not None and any(divided(own(one)) is not None for one in weights)
    return ListedParts(weights) if is_split else weights


def is_tapes(operation: Operation) -> bool:
    return bool(operation.name.startswith(OF_TAPE))


def is_of_tape(flow: Flow) -> bool:
    return is_tapes(flow.tensor.op)
