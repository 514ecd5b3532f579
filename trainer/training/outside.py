"""Name what a program makes too early: at import, in its class or its constructor, and uses in what workers run.

A variable, table or generator that is made before the strategy lies in the coordinator's memory, under a name that no
worker knows. TensorFlow takes the error for a worker's failure, and repeats the call for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Program, Tensor, Traced, Variable
from trainer.core.failures import UserError
from trainer.core.program import is_users

# The name that TensorFlow gives to this process's devices until it joins a cluster.
BEFORE_STRATEGY = "/job:localhost/"
FIX = (
    "It was made before build_model was called: at import, in a class or in the constructor. So it lies in the "
    "coordinator, where workers can't reach it. Make it in build_model, which is called in the strategy's scope, and "
    "keep it as an attribute of the program or of the model"
)
KIND = "a variable, lookup table, random generator, optimizer, metric or queue"


def reject_outside_model(program: Program, model: Model) -> None:
    """Raise UserError where a model or its optimizer has variables that were made before the strategy."""
    for what, owner in (("a model", model), ("an optimizer", getattr(model, "optimizer", None))):
        for handle in handles_of(owner):
            if is_outside(handle):
                raise UserError(f"{type(program).__name__}.build_model returned {what} that is not its own. {FIX}")


def reject_outside(program: Program, traced: Traced, what: str, model: Model | None = None) -> None:
    """Raise UserError where a traced function uses something that was made before the strategy; `what` names it."""
    found = [outer for outer, _ in traced.graph.captures if outer.dtype == tf.resource and is_outside(outer)]
    if found:
        name = name_of(found[0], program, model)
        raise UserError(f"{what} uses {name or KIND}, which is not the strategy's. {FIX} (docs/programs.md)")


def reject_changing_shapes(traced: Traced, what: str) -> None:
    """Raise UserError where a traced function uses a variable without a fixed shape: TensorFlow's servers crash."""
    for variable in traced.graph.variables:
        if not variable.shape.is_fully_defined():
            raise UserError(
                f"{what} uses the variable {variable.name.partition(':')[0]!r} of shape {variable.shape}, which "
                "workers can't have: give it a fixed shape, that of the most that it holds"
            )


def is_outside(handle: Tensor) -> bool:
    """Return whether a resource's handle was made before this process joined a cluster."""
    return not tf.is_symbolic_tensor(handle) and str(getattr(handle, "device", "")).startswith(BEFORE_STRATEGY)


def name_of(handle: Tensor, program: Program, model: Model) -> str:
    """Return the name by which the program's code has what has this handle; nothing where it is found nowhere."""
    for owner, place in places(program, model):
        for name, value in list(place.items()):
            if any(one is handle for one in handles_of(value)):
                kind = type(value)
                called = kind.__name__.removeprefix("Resource").removeprefix("Caching")
                return f"{owner}.{name} ({kind.__module__.partition('.')[0]}'s {called})"
    return ""


def places(program: Program, model: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where a program may keep things, by name: its object, its class, its model, the user's modules."""
    for instance in (program, model):
        kind = type(instance)
        yield kind.__name__, vars(instance) if hasattr(instance, "__dict__") else {}
        yield from ((each.__name__, dict(vars(each))) for each in kind.__mro__ if is_users(each.__module__, program))
    for name in list(sys.modules):
        if is_users(name, program):
            yield name, vars(sys.modules[name])


def handles_of(value: object) -> Iterable[Tensor]:
    """Return the handles of a variable, of a table, or of what keeps variables, as a layer or an optimizer."""
    if value is None or isinstance(value, type):
        return []
    found = []
    for part in (value, getattr(value, "state", None), getattr(value, "_value", None), *variables_of(value)):
        for name in ("handle", "resource_handle", "queue_ref", "_resource"):
            one: Any = getattr(part, name, None)
            if tf.is_tensor(one) and one.dtype == tf.resource:
                found.append(one)
    return found


def variables_of(value: object) -> list[Variable]:
    """Return the variables of a layer, model, metric or optimizer, those beneath a split one and beneath Keras 3's."""
    of_keras = any(kind.__module__.startswith(("keras.", "tf_keras.")) for kind in type(value).__mro__)
    if not of_keras and not isinstance(value, tf.Module):
        return []
    try:
        kept = getattr(value, "variables", None)
        kept = kept() if callable(kept) else kept  # a legacy optimizer's is a method
    except (AttributeError, TypeError, ValueError):  # not built yet
        return []
    flat: list[Any] = []
    for one in kept or []:
        flat.extend(getattr(one, "variables", None) or [getattr(one, "_value", one)])
    return flat
