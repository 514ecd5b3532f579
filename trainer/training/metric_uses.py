"""Refuse a step that trains by what a metric says: with each call metrics begin at zero (docs/decisions/0088)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from trainer.core.contracts import Tensor, Traced, Variable
from trainer.core.failures import UserError
from trainer.training.tf_internals.graphs import outermost
from trainer.training.updates.atomic_updates import WRITING
from trainer.training.updates.transfers import SENT


def reject_uses(step: Traced, states: Iterable[Variable], metrics: Iterable[Variable], what: str) -> None:
    """Raise UserError where a traced step changes other variables by these states of metrics; `what` names the step.

    `metrics` has the states of all metrics, also of those that stay on the ps: one may be fed by another.
    """
    handles, own = ({id(inner): inner for inner in inner_handles(step, each)} for each in (states, metrics))
    reads = [one for handle in handles.values() for one in handle.consumers() if one.type == "ReadVariableOp"]
    read = computed_of(step, [output for one in reads for output in one.outputs])
    for operation in step.graph.get_operations():
        if not operation.type.startswith(WRITING) or id(operation.inputs[0]) in handles | own:
            continue
        if any(given.name in read for given in operation.inputs[1:]):
            handle = outermost(operation.inputs[0])
            names = [one.name.partition(":")[0] for one in step.graph.variables if one.handle is handle]
            raise UserError(
                f"{what} changes {repr(names[0]) if names else 'a variable'} by what a metric says. Metrics begin at "
                "zero with each call of a worker, so that these are other numbers than in one process: keep what it "
                "needs in a variable of the model that is no metric's, with trainable=False (docs/programs.md)"
            )


def inner_handles(step: Traced, variables: Iterable[Variable]) -> list[Tensor]:
    kept = {id(one.handle) for one in variables}
    return [inner for outer, inner in step.graph.captures if id(outer) in kept]


def computed_of(step: Traced, tensors: Iterable[Tensor]) -> set[str]:
    """Return the names of these tensors, and of all that are computed of them: of a message each tensor by itself."""
    copies = defaultdict[str, list[Tensor]](list)
    for sent, copy in step.graph.get_collection(SENT):
        copies[sent.name].append(copy)
    found, todo = set[str](), list(tensors)
    while todo:
        tensor = todo.pop()
        if tensor.name not in found:
            found.add(tensor.name)
            users = (one for one in tensor.consumers() if SENT not in one.name)
            todo += [*copies[tensor.name], *(output for one in users for output in one.outputs)]
    return found
