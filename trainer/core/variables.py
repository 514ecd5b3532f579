"""The variables of a model, and what they take. Needs no TensorFlow: it looks at the variables that it is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from trainer.core.contracts import Model, Variable


def variables_of(model: Model) -> Iterator[Variable]:
    """Yield the model's, its metrics' and its optimizer's variables, a sharded one as its shards, each once."""
    optimizer = getattr(model, "optimizer", None)
    kept = getattr(optimizer, "variables", ())
    groups = [model.variables, [v for metric in model.metrics for v in metric.variables]]
    groups.append(kept() if callable(kept) else kept)  # a method in the optimizers called legacy
    seen = set()
    for variable in flatten(variable for group in groups for variable in group):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def flatten(variables: Iterable[Variable]) -> Iterator[Variable]:
    """Yield variables, a sharded one as its shards.

    What tf_keras lists among them for a lookup layer that was adapted is none: its vocabulary, of no shape. Nor are
    the rows of a dynamic table, which are saved, counted and handed over in ways of their own.
    """
    for variable in variables:
        for one in getattr(variable, "variables", (variable,)):
            if hasattr(one, "shape") and not getattr(one, "is_reserved", False):
                yield one


def bytes_of(variable: Variable) -> int:
    """Return what a variable takes, 0 where its size changes."""
    return math.prod(int(side or 0) for side in variable.shape) * int(variable.dtype.size)
