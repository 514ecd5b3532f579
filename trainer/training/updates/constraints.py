"""Constraints of weights that several workers train: each is applied within the update that it follows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import beneath, whole_of

KEPT = "_constraint_of_workers"


def constrain(variable: Variable) -> None:
    """Apply a constraint that was taken; call it in the variable's update."""
    own = beneath(variable)
    constraint = getattr(own, KEPT, None)
    if constraint is not None:
        own.assign(tf.cast(constraint(own.read_value()), own.dtype))


def is_constrained(variable: Variable) -> bool:
    """Return whether a constraint was taken of a variable."""
    return getattr(beneath(variable), KEPT, None) is not None


def take_constraint(variable: Variable) -> Any:
    """Return a variable's constraint, and have it kept where the optimizer doesn't look."""
    if variable.constraint is not None:
        setattr(variable, KEPT, variable.constraint)
        variable._constraint = None
    return getattr(variable, KEPT, None)


def reject_split_constraints(model: Model) -> None:
    """Raise UserError where a constraint would be computed of a split variable's parts; call it after the trace."""
    try:
        variables = model.trainable_variables
    except ValueError:  # a model with a build() of its own makes them with its first call
        return
    for variable in variables:
        if whole_of(variable) is not None and take_constraint(beneath(variable)) is not None:
            raise UserError(
                f"{name_of(variable)} has a constraint and is split over the ps, each part of which would be "
                "constrained by itself. Set partitioner to none, so that tables stay whole, or leave it out"
            )
