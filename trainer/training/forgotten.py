"""Name what a step changes and no checkpoint has: after a fault it would begin again, without a word."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Program, Tensor, Traced, Trackable
from trainer.core.variables import flatten
from trainer.training.outside import handles_of, name_of
from trainer.training.tf_internals.graphs import called_graphs, owner_of
from trainer.training.updates.atomic_updates import WRITING

log = logging.getLogger(__name__)
CHANGING = (*WRITING, "LookupTableInsert", "LookupTableRemove", "LookupTableImport")


def warn_of_forgotten(program: Program, model: Model, step: Traced, kept: Iterable[Any]) -> None:
    """Log a warning where a model's traced step changes a variable or table that is none of those `kept`.

    A program may do without it after a fault, as without a counter of its own: the run goes on.

    What only draws random numbers, as a generator's state, is passed over, and so is what is no object of TensorFlow's:
    the trainer's own, as the indices of dynamic tables.
    """
    known = {id(handle) for one in kept for handle in handles_of(one)}
    captures = [(outer, inner) for outer, inner in step.graph.captures if outer.dtype == tf.resource]
    unknown = [(outer, inner) for outer, inner in captures if id(outer) not in known and owner_of(outer) is not None]
    lost = [outer for outer, inner in unknown if is_changed(inner)]
    if lost:
        name = name_of(lost[0], program, model) or called(lost[0])
        more = f" and {len(lost) - 1} more, which are" if len(lost) > 1 else ", which is"
        log.warning(
            "%s.train_step changes %s%s no part of the model: no checkpoint has that, and after a fault it begins "
            "again. Make the variable, or the layer, optimizer or table of it, an attribute of the model in "
            "build_model, as in model.second = optimizer (docs/programs.md)",
            type(model).__name__,
            name,
            more,
        )


def all_of(saved: Trackable, *others: Iterable[Any]) -> list[Any]:
    """Return what a checkpoint of this holds, a split variable as its shards, and these others."""
    found = [*tf.train.TrackableView(saved).descendants(), *(one for each in others for one in each)]
    return [*found, *flatten(one for one in found if hasattr(one, "shape"))]


def is_changed(handle: Tensor) -> bool:
    """Return whether a graph, or a function that it calls, changes what has this handle."""
    for operation in handle.consumers():
        if operation.type.startswith(CHANGING) and operation.inputs[0] is handle:
            return True
        for graph, given in called_graphs(operation):
            if any(is_changed(inner) for inner, one in zip(graph.inputs, given, strict=True) if one is handle):
                return True
    return False


def called(handle: Tensor) -> str:
    """Name the variable or table of a handle, as far as it is known."""
    owner = owner_of(handle)
    name = str(getattr(owner, "name", "") or "").removesuffix(":0")
    return f"{name!r}" if name else f"a {type(owner).__name__}"
