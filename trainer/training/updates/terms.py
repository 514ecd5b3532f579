"""What lies between a step's reads of a variable and its writes of what it has computed of them."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.core.contracts import Operation, Tensor
from trainer.training.measures.metrics import READING

# What a step computes of a variable's value to write it again, and what a ps can do as well as a worker.
LIGHT = (
    *("Abs", "Add", "AddN", "AddV2", "BroadcastTo", "Cast", "ClipByValue", "Div", "DivNoNan", "Equal", "Exp"),
    *("ExpandDims", "FloorMod", "Greater", "GreaterEqual", "Identity", "Less", "LessEqual", "Log", "Maximum"),
    *("Minimum", "Mul", "Neg", "NotEqual", "Pow", "RealDiv", "Reciprocal", "Reshape", "Rsqrt", "Select", "SelectV2"),
    *("Sqrt", "Square", "SquaredDifference", "Squeeze", "Sub"),
)
TERMS = ("Add", "AddN", "AddV2", "Sub")
# Of which of its first inputs an operation's result is a multiple, or the same numbers.
FACTORS = {"Mul": 2, "RealDiv": 1, "DivNoNan": 1, "Cast": 1, "Identity": 1, "Neg": 1, "Reshape": 1}
# Of their first input they leave all numbers where they are, but for the rows that they write.
ROWS_WRITTEN = tuple(f"TensorScatter{kind}" for kind in ("Add", "Max", "Min", "Sub", "Update"))


def path_from_reads(handle: Tensor, writes: Sequence[Operation]) -> list[Operation]:
    """Return what lies between a variable's reads and writes that are computed from them, with these reads."""
    last = writes[-1]._id
    reads = [one for one in handle.consumers() if one.type in READING and one._id < last]
    after, todo = {one.name for one in reads}, list(reads)
    while todo:
        new = {one.name: one for given in todo.pop().outputs for one in given.consumers()}
        todo += [one for name, one in new.items() if name not in after and one._id < last]
        after |= set(new)
    found: dict[str, Operation] = {}
    todo = list(writes)
    while todo:
        inputs = {one.op.name: one.op for one in todo.pop().inputs if one.op.name in after}
        todo += [one for name, one in inputs.items() if name not in found]
        found |= inputs
    return list(found.values())


def terms_of(written: Tensor, path: Sequence[Operation]) -> list[Operation]:
    """Return the part of a path by which a variable's value is a term of what is written, as in a moving average.

    The other terms may be computed of the variable in any way, as a mean of what is near each row of it.
    """
    names = {one.name for one in path}

    def leading(tensor: Tensor) -> list[Operation]:
        operation = tensor.op
        if operation.name not in names or operation.type == "ReadVariableOp":
            return [operation] if operation.name in names else []
        inputs = operation.inputs[:1] if operation.type in ROWS_WRITTEN else operation.inputs
        own = [one for one in inputs if one.op.name in names]
        factors = operation.inputs[: FACTORS.get(operation.type, 0)]
        is_multiple = len(own) == 1 and any(one is own[0] for one in factors)
        if operation.type not in (*TERMS, *ROWS_WRITTEN) and not is_multiple:
            return []
        before = [each for one in own for each in leading(one)]
        return [operation, *before] if before else []

    return list({one.name: one for one in leading(written)}.values())


def is_light(operation: Operation) -> bool:
    """Return whether a ps can do an operation of a path as well as a worker can."""
    return operation.type in LIGHT or operation.type in READING
