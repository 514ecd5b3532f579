"""Refuse steps that read or train some parts of a split weight otherwise than the others.

A program that takes weights by their places in trainable_variables, as the last two, may do so without knowing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import OF_SOME_ROWS, beneath
from trainer.training.updates.flows import Flow, Use, behind, reach

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


def reject_unequal(parts: Sequence[Variable], reads: Sequence[Sequence[Use]]) -> None:
    """Raise UserError where a step reads some parts of a weight by their places, shapes or names."""
    numbers = [len([one for one in each if OF_SOME_ROWS not in one.operation.name]) for each in reads]
    if len(set(numbers)) > 1:
        part = parts[numbers.index(max(numbers))]
        raise UserError(
            f"the step reads {part.name} otherwise than the other parts of {name_of(part)}, {PARTS_ARE_LISTED} "
            f"{WHOLES_OWN}"
        )


def is_tapes(operation: Operation) -> bool:
    return bool(operation.name.startswith(OF_TAPE))


def is_of_tape(flow: Flow) -> bool:
    return is_tapes(flow.tensor.op)
