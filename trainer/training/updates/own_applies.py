"""Refuse optimizers that do more than update variables, where other workers would come between.

An update of a variable is one act (atomic_updates.py). What an `apply_gradients` of the program's writes beside these
is none. And two workers may read the same number of steps, or one that has passed by: what is to happen at each
third step would not happen then, or twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.tf_internals.graphs import APART, CHOICES, handle_shape, outermost
from trainer.training.updates.atomic_updates import WHOLE_BY_THEMSELVES, WRITING, written_handles
from trainer.training.updates.part_totals import reject_part_totals

RESTS = ("FloorMod", "Mod", "TruncateMod")
DIVIDING = ("FloorDiv", "TruncateDiv")
# What a number of steps goes through before it is compared.
COUNTING = (*RESTS, "Add", "AddV2", "Cast", "Identity", "Mul", "ReadVariableOp", "Sub")
COMPARING = ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual")
# The operations of updates, by name: an optimizer may have another one do the work.
_updates: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def applies_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class, or one that it derives from, replaces tf_keras's apply_gradients."""
    return not type(optimizer).apply_gradients.__module__.startswith("tf_keras.")


@contextlib.contextmanager
def applying(optimizer: Optimizer) -> Iterator[None]:
    """Raise UserError where an apply_gradients of the program's, which is traced meanwhile, writes beside updates."""
    if not applies_itself(optimizer):
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    updated = _updates.get(graph, set())
    for one in graph.get_operations()[before:]:
        if writes(one) and not (one.name in updated or APART in one.name or sets_rate(one, optimizer)):
            kind, into = type(optimizer).__name__, "update_step"
            if hasattr(optimizer, "get_slot"):
                into = "_resource_apply_dense and _resource_apply_sparse"
            raise UserError(
                f"{kind}.apply_gradients writes variables beside its updates, and those of other workers would come "
                f"between: put what it does to each variable into {into}, which is one act (docs/programs.md)"
            )


@contextlib.contextmanager
def updating(optimizer: Optimizer, gradient: Tensor, variable: Variable) -> Iterator[None]:
    """Take what is traced meanwhile for an update of a variable.

    Raises UserError where it depends on whose turn a step is, or on numbers of one part of a split variable.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    made = graph.get_operations()[before:]
    _updates.setdefault(graph, set()).update(one.name for one in made)
    reject_turns(optimizer, made)
    reject_part_totals(optimizer, variable, gradient, made)


def writes(operation: Any) -> bool:
    """Return whether it writes a variable; to add to a counter, as `iterations`, is one act by itself."""
    if operation.type in WHOLE_BY_THEMSELVES:
        handle, added = operation.inputs
        return added.op.type != "Const" and handle_shape(handle).rank != 0
    return operation.type.startswith(WRITING) or (operation.type in CHOICES and bool(written_handles([operation])))


def sets_rate(operation: Any, optimizer: Optimizer) -> bool:
    """Return whether it is tf_keras's own writing of what a schedule says, which is the same for each worker."""
    rate = getattr(optimizer, "_current_learning_rate", None)
    return isinstance(rate, tf.Variable) and outermost(operation.inputs[0]) is rate.handle


def reject_turns(optimizer: Optimizer, made: Sequence[Any]) -> None:
    """Raise UserError where operations compare what is left of `iterations` divided by something."""
    for one in made:
        if is_comparison(one) and compares_rest(one, optimizer):
            way = "add_slot" if hasattr(optimizer, "get_slot") else "add_variable_from_reference"
            raise UserError(
                f"{type(optimizer).__name__} does something at each so many steps (iterations), and several workers "
                f"may find the same number, or miss one: give each variable a count of its own ({way}), and add to it "
                "in its update (docs/programs.md)"
            )


def is_comparison(operation: Any) -> bool:
    """Return whether an operation says yes or no of numbers."""
    return operation.type in COMPARING or (operation.type == "Cast" and operation.outputs[0].dtype == tf.bool)


def compares_rest(operation: Any, optimizer: Optimizer) -> bool:
    """Return whether it compares a rest of `iterations`, or these with a multiple of what they are divided to.

    The quotient alone is the same for many steps, as in a warm-up.
    """
    sources = counted(operation, (*COUNTING, *DIVIDING))
    if any(each.type in RESTS for each in sources):
        return any(is_read(each, optimizer) for each in sources)
    undivided = counted(operation, COUNTING)
    return len(undivided) < len(sources) and any(is_read(each, optimizer) for each in undivided)


def is_read(operation: Any, optimizer: Optimizer) -> bool:
    """Return whether an operation reads an optimizer's number of steps."""
    counter = getattr(optimizer.iterations, "_value", optimizer.iterations)
    if tf.is_symbolic_tensor(counter):  # Keras 3's, which a step reads once
        return bool(counter.op is operation)
    return operation.type == "ReadVariableOp" and outermost(operation.inputs[0]) is counter.handle


def counted(operation: Any, through: Sequence[str]) -> list[Any]:
    """Return the operations that an operation's inputs come from, as far as they are of these types."""
    found: dict[str, Any] = {}
    todo = [given.op for given in operation.inputs]
    while todo:
        one = todo.pop()
        if one.type in through and one.name not in found:
            found[one.name] = one
            todo += [given.op for given in one.inputs if given.dtype != tf.resource]
    return list(found.values())
