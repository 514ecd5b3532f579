"""Constraints of weights that several workers train: each writes what its constraint changes, and leaves the rest."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals import beneath, whole_of

CHANGED = 1e-5  # of a weight: less is a constraint's rounding
KEPT = "_constraint_of_workers"


def write_changes(variable: Any, read: Any, constrained: Any) -> None:
    """Write a constraint's result where it differs from what was read: of the rest others may have trained more."""
    if not variable.shape.rank:
        variable.assign(constrained)
        return
    changed = tf.where(tf.abs(constrained - read) > CHANGED * tf.abs(read))
    variable.scatter_nd_update(changed, tf.gather_nd(constrained, changed))


def constrain_by_elements(optimizer: Any) -> None:
    """Have an optimizer of tf_keras do so, which writes whole weights; call it before the step is traced."""
    apply = optimizer.apply_gradients

    def apply_gradients(grads_and_vars: Any, *more: Any, **named: Any) -> Any:
        pairs = list(grads_and_vars)
        constraints = [(variable, take_constraint(variable)) for variable in (beneath(one) for _, one in pairs)]
        applied = apply(pairs, *more, **named)
        for variable, constraint in constraints:
            if constraint is not None:
                read = variable.read_value()
                write_changes(variable, read, tf.convert_to_tensor(constraint(read), variable.dtype))
        return applied

    object.__setattr__(optimizer, "apply_gradients", apply_gradients)


def take_constraint(variable: Any) -> Any:
    """Return a variable's constraint, and have it kept where the optimizer doesn't look."""
    if variable.constraint is not None:
        setattr(variable, KEPT, variable.constraint)
        variable._constraint = None
    return getattr(variable, KEPT, None)


def refuse_split_constraints(model: Any) -> None:
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
