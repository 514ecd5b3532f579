"""Refuse what is computed of all rows of a weight, as its norm, and would be of each part of a split one.

A dynamic table has such parts too.

What a program trains are the parts: to clip the gradient of each by its norm, to multiply it with itself or to keep its
largest numbers would do so part by part. A norm of all gradients is one number for all parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Operation, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import beneath, divided, whole_of
from trainer.training.updates.atomic_updates import WRITING
from trainer.training.updates.rows import own

TOTALS = ("All", "Any", "EuclideanNorm", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum")
ALONG_AN_AXIS = ("ArgMax", "ArgMin", "Cumprod", "Cumsum", "ReverseV2")  # the axis is the second input, as of totals
PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul")
OF_A_MATRIX = ("Cholesky", "MatrixInverse", "MatrixSquareRoot", "Qr", "SelfAdjointEigV2", "Svd")
OF_A_LIST = ("TopKV2",)  # sorts and quantiles too
OF_TAPE = "gradient_tape/"  # TensorFlow's scope of all that a GradientTape computes
SUMS = ("L2Loss", "Sum")  # of parts they add up to the whole's
CURVED = ("Exp", "Log", "Maximum", "Minimum", "Pow", "Reciprocal", "Rsqrt", "Sqrt", "Square")  # of a sum they don't
JOINING = ("AccumulateNV2", "AddN", "ConcatV2", "Pack")
OF_NO_VALUES = ("Const", "Rank", "Shape", "ShapeN", "Size")
_origins: weakref.WeakKeyDictionary[Any, dict[str, frozenset[str]]] = weakref.WeakKeyDictionary()
# Of each split weight in a graph: its parts that have been updated since the first one, and what their gradients share.
_shared: weakref.WeakKeyDictionary[Any, dict[int, tuple[list[str], set[frozenset[str]]]]] = weakref.WeakKeyDictionary()
_searched: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # of each graph, the split weights


def reject_part_totals(optimizer: Optimizer, variable: Variable, gradient: Tensor, made: Sequence[Operation]) -> None:
    """Raise UserError where a part's gradient, or its update with these operations, has a number of that part alone."""
    part = own(variable)
    if (whole := divided(part)) is None:
        return
    is_dynamic = whole_of(part) is None
    kind = type(optimizer)
    size = part.shape.num_elements() if isinstance(part, tf.Variable) else None  # else of rows of a part
    is_clipped = bool(getattr(optimizer, "clipnorm", None))  # by the whole's norm before (optimizers.py)
    where = "the step" if not is_clipped and differs(whole, part, totals_of(gradient)) else ""
    instead = "give the optimizer clipnorm (of Keras 3: global_clipnorm)"
    if not is_dynamic and is_read_apart(whole, made):
        where, instead = "the step", "take the layer's own weight, as layer.kernel, in place of trainable_variables"
    is_own = not kind.__module__.startswith(("tf_keras.", "keras."))  # Keras's are refused by name
    if is_own and any(one.shape.num_elements() == size for one in mixed_and_written(made)):
        where = f"{kind.__name__}'s update"
    if where:
        fix = (
            "Leave its layer out of dynamic_tables"
            if is_dynamic
            else "Set partitioner to none, so that weights stay whole"
        )
        raise UserError(
            f"{where} computes a norm, a mean, a matrix product or the like of each part of {name_of(part)} or of its "
            f"gradient, which is split over the ps: no part would get the whole's. {fix}, or {instead}"
        )


def is_read_apart(whole: Variable, made: Sequence[Operation]) -> bool:
    """Return whether the step, before the weight's first update, computes what is no sum of each of its parts."""
    graph = tf.compat.v1.get_default_graph()
    searched = _searched.setdefault(graph, set())
    if id(whole) in searched or not hasattr(graph, "capture"):
        return False
    searched.add(id(whole))
    updating = {one.name for one in made}
    handles = [graph.capture(beneath(one).handle) for one in whole.variables]
    reads = [one for each in handles for one in each.consumers() if one.type == "ReadVariableOp"]
    return any(is_no_sum(read.outputs[0]) for read in reads if read.name not in updating)


def is_no_sum(read: Tensor) -> bool:
    """Return whether anything is computed of these rows to which that of other rows can't be added."""
    todo, known = [(read, False)], {(read.name, False)}
    while todo:
        tensor, is_summed = todo.pop()
        for one in tensor.consumers():
            is_joined = (
                is_summed and one.type in ("AddV2", "Sub") and all(each.op.type != "Const" for each in one.inputs)
            )
            if is_joined or one.type in (*JOINING, *OF_NO_VALUES) or one.name.startswith(OF_TAPE):
                continue
            is_mixed = any(each is tensor for each in mixed(one)) and one.type not in ("All", "Any")
            if is_mixed and not is_summed and is_of_all(one):
                continue
            if (is_mixed and not is_sum(one)) or (is_summed and one.type in CURVED):
                return True
            more = [(each, is_summed or is_mixed) for each in one.outputs]
            todo += [(each, summed) for each, summed in more if (each.name, summed) not in known]
            known.update((each.name, summed) for each, summed in more)
    return False


def is_sum(operation: Operation) -> bool:
    """Return whether of parts this adds up to the whole's, as a product of all elements with others does."""
    is_dot = operation.type in (*PRODUCTS, "Einsum") and operation.outputs[0].shape.num_elements() == 1
    return is_dot or operation.type in SUMS


def is_of_all(one: Operation) -> bool:
    """Return whether an operation takes the largest or the smallest number, of which that of all parts is taken."""
    used = [each for each in one.outputs[0].consumers() if not each.name.startswith(OF_TAPE)]
    after = [each for each in later(used) if each.type not in OF_NO_VALUES and not each.name.startswith(OF_TAPE)]
    is_joined = bool(used) and all(each.type in JOINING for each in used)
    return one.type in ("Max", "Min") and is_joined and all(each.type == one.type and mixed(each) for each in after)


def later(operations: Sequence[Operation]) -> list[Operation]:
    """Return what takes the results of operations."""
    return [each for one in operations for result in one.outputs for each in result.consumers()]


def mixed_and_written(made: Sequence[Operation]) -> list[Tensor]:
    """Return what has its rows mixed in an update's operations, and something written that comes from it."""
    todo = [each.op for one in made if one.type.startswith(WRITING) for each in one.inputs]
    known, found = {one.name for one in made}, []
    while todo:
        one = todo.pop()
        if one.name in known:
            known.discard(one.name)
            todo += [each.op for each in one.inputs]
            found += mixed(one)
    return found


def differs(whole: Variable, part: Variable, totals: set[frozenset[str]]) -> bool:
    """Return whether another part's gradient of the same `apply_gradients` has other numbers in it."""
    weights = _shared.setdefault(tf.compat.v1.get_default_graph(), {})
    parts, first = weights.get(id(whole), ([], totals))
    if part.name in parts:  # the next apply_gradients of the step
        parts, first = [], totals
    weights[id(whole)] = ([*parts, part.name], first)
    return totals != first


def totals_of(gradient: Tensor) -> set[frozenset[str]]:
    """Return of what is computed over all rows of something between the tape and this gradient: what it comes from.

    Two numbers that come from the same are the same, as a global norm that a step computes again for each gradient.
    """
    given = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if not tf.is_symbolic_tensor(given):
        return set()
    behind = sources_of(given, lambda one: is_of_tape(one) or is_total(one.op))  # a total's origins have the rest
    found = {origins_of(one) for one in behind if not is_of_tape(one) and mixed(one.op)}
    return found - {frozenset()}  # of shapes and constants alone


def origins_of(result: Tensor) -> frozenset[str]:
    """Return what the tape gives, the variables and the step's inputs from which rows are mixed for this result."""
    graph_known = _origins.setdefault(result.graph, {})
    if result.name in graph_known:
        return graph_known[result.name]
    found: set[str] = set()
    for rows in mixed(result.op):
        for tensor in sources_of(rows, lambda one: is_of_tape(one) or one.op.type in OF_NO_VALUES):
            if tensor.op.type in OF_NO_VALUES:
                continue
            handles = [each.name for each in tensor.op.inputs if each.dtype == tf.resource]
            found.update(handles)
            if is_of_tape(tensor) or not (inputs_of(tensor) or handles):
                found.add(tensor.name)
    graph_known[result.name] = frozenset(found)
    return graph_known[result.name]


def sources_of(tensor: Tensor, is_end: Callable[[Tensor], bool]) -> Iterator[Tensor]:
    """Yield a tensor and all that it is computed of, each once; nothing behind those at which it ends."""
    todo, known = [tensor], {tensor.name}
    while todo:
        yield (one := todo.pop())
        if not is_end(one):
            more = [each for each in inputs_of(one) if each.name not in known]
            todo += more
            known.update(each.name for each in more)


def is_of_tape(tensor: Tensor) -> bool:
    return bool(tensor.op.name.startswith(OF_TAPE))


def inputs_of(tensor: Tensor) -> list[Tensor]:
    """Return what a tensor is computed of, but for resources; of IdentityN the one that it is."""
    one = tensor.op
    inputs = one.inputs[tensor.value_index :][:1] if one.type == "IdentityN" else one.inputs
    return [each for each in inputs if each.dtype != tf.resource]


def is_total(operation: Operation) -> bool:
    return operation.type in TOTALS and bool(mixed(operation))


def mixed(operation: Operation) -> list[Tensor]:
    """Return those of an operation's inputs of which one row of its result takes other rows than its own."""
    kind, first = operation.type, operation.inputs[0] if operation.inputs else None
    if first is None or not (rank := first.shape.rank):
        return []
    if kind == "Einsum":
        sources, result = operation.get_attr("equation").decode().split("->")
        return [one for one, axes in zip(operation.inputs, sources.split(","), strict=True) if axes[:1] != result[:1]]
    if kind in PRODUCTS and rank == 2:
        is_turned = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return [*([first] if is_turned else []), operation.inputs[1]]
    if kind in OF_A_MATRIX:
        return [first] if rank == 2 else []
    if kind in OF_A_LIST:
        return [first] if rank == 1 else []
    if kind not in (*TOTALS, *ALONG_AN_AXIS):
        return []
    if kind == "L2Loss" or rows_are_moved(first) or (axes := tf.get_static_value(operation.inputs[1])) is None:
        return [first]
    return [first] if any(axis % rank == 0 for axis in np.ravel(axes)) else []


def is_behind_tape(tensor: Tensor) -> bool:
    """Return whether a tensor is computed of a gradient."""
    return any(is_of_tape(one) for one in sources_of(tensor, is_of_tape))


def rows_are_moved(tensor: Tensor) -> bool:
    """Return whether a gradient was transposed, or its rows were joined, before this was computed of it."""
    return any(
        moves_rows(one.op) and is_behind_tape(one) for one in sources_of(tensor, is_of_tape) if not is_of_tape(one)
    )


def moves_rows(operation: Operation) -> bool:
    """Return whether an operation puts something else in the place of rows."""
    if operation.type == "Transpose":
        order = tf.get_static_value(operation.inputs[1])
        return order is None or bool(len(order) and order[0] != 0)
    if operation.type != "Reshape":
        return False
    given, made = operation.inputs[0].shape, operation.outputs[0].shape
    is_joined = given.rank is not None and made.rank == 1 and given.rank > 1
    return bool(is_joined or (given.rank and made.rank and not given[:1].is_compatible_with(made[:1])))
