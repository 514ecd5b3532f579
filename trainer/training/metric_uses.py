"""Refuse a step that trains by what a metric says: with each call metrics begin at zero (docs/decisions/0088)."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.core.contracts import Traced, Variable
from trainer.core.failures import UserError
from trainer.training.atomic_updates import WRITING
from trainer.training.metrics import reached
from trainer.training.tf_internals.graphs import outermost


def refuse_uses(step: Traced, states: Iterable[Variable], what: str) -> None:
    """Raise UserError where a traced step changes other variables by these states of metrics; `what` names the step."""
    kept = {id(one.handle) for one in states}
    handles = [inner for outer, inner in step.graph.captures if id(outer) in kept]
    reads = [one for handle in handles for one in handle.consumers() if one.type == "ReadVariableOp"]
    read, own = reached(output for one in reads for output in one.outputs), {one.name for one in handles}
    for operation in step.graph.get_operations():
        if not operation.type.startswith(WRITING) or operation.inputs[0].name in own:
            continue
        if any(given.name in read for given in operation.inputs[1:]):
            handle = outermost(operation.inputs[0])
            names = [one.name.partition(":")[0] for one in step.graph.variables if one.handle is handle]
            raise UserError(
                f"{what} changes {repr(names[0]) if names else 'a variable'} by what a metric says. Metrics begin at "
                "zero with each call of a worker, so that these are other numbers than in one process: keep what it "
                "needs in a variable of the model that is no metric's, with trainable=False (docs/programs.md)"
            )
