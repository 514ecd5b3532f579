"""Refuse what is computed of all rows of a weight, as its norm, and would be of each part of a split one.

A dynamic table has such parts too.

What a program trains are the parts: to clip the gradient of each by its norm, to multiply it with itself or to keep its
largest numbers would do so part by part. A norm of all gradients is one number for all parts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Operation, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import OF_SOME_ROWS, beneath, divided, whole_of
from trainer.training.updates.atomic_updates import WRITING
from trainer.training.updates.first_trace import is_dropped
from trainer.training.updates.flows import Calls, Flow, Use, behind, is_only_asserted, outside, reach, uses, within
from trainer.training.updates.rows import own
from trainer.training.updates.split_gradients import noting_asked
from trainer.training.updates.unequal_parts import (
    WHOLE_INSTEAD,
    is_of_tape,
    is_tapes,
    note_update,
    reject_places,
    reject_short_lists,
    reject_unequal,
    reject_unequal_updates,
)

TOTALS = ("All", "Any", "EuclideanNorm", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum")
ALONG_AN_AXIS = ("ArgMax", "ArgMin", "Cumprod", "Cumsum", "ReverseV2")  # the axis is the second input, as of totals
PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul")
OF_A_MATRIX = ("Cholesky", "MatrixInverse", "MatrixSquareRoot", "Qr", "SelfAdjointEigV2", "Svd")
OF_A_LIST = ("TopKV2",)  # sorts and quantiles too
SUMS = ("L2Loss", "Sum")  # of parts they add up to the whole's
# Of a sum they don't.
CURVED = (
    *("Equal", "Exp", "Greater", "GreaterEqual", "Less", "LessEqual", "Log", "Maximum", "Minimum", "NotEqual"),
    *("Pow", "Reciprocal", "Rsqrt", "Sqrt", "Square"),
)
DIVIDING = ("Div", "DivNoNan", "FloorDiv", "RealDiv")
JOINING = ("AccumulateNV2", "AddN", "ConcatV2", "Pack")
ALL_INSTEAD = "take a norm of all gradients, as tf.linalg.global_norm"
SAME = ("Identity", "Reshape", "Squeeze")
ITEM = "TensorListGetItem"  # a row, of tf.map_fn
LISTING = ("TensorListConcatV2", "TensorListPushBack", "TensorListSetItem", "TensorListStack")
# What the step has of a part: its rows, these in other places, one of them at a time, or a sum of them.
ROWS, MOVED, ROW, SUMMED = "rows", "moved", "row", "summed"
OF_NO_VALUES = ("Const", "Rank", "Shape", "ShapeN", "Size")
_origins: weakref.WeakKeyDictionary[Any, dict[Any, frozenset[Any]]] = weakref.WeakKeyDictionary()
# Of each split weight in a graph: its parts that have been updated since the first one, and what their gradients share.
_shared: weakref.WeakKeyDictionary[Any, dict[int, tuple[list[str], set[frozenset[Any]]]]] = weakref.WeakKeyDictionary()
_updating: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # what updates of parts read
# What tapes gave for updates of parts, by the parts' ids.
_gradients: weakref.WeakKeyDictionary[Any, dict[int, list[Flow]]] = weakref.WeakKeyDictionary()


def reject_part_totals(optimizer: Optimizer, variable: Variable, gradient: Tensor, made: Sequence[Operation]) -> None:
    """Raise UserError where a part's gradient, or its update with these operations, has a number of that part alone."""
    part = own(variable)
    if (whole := divided(part)) is None:
        return
    graph = tf.compat.v1.get_default_graph()
    _updating.setdefault(graph, set()).update(one.name for one in made)
    kind = type(optimizer)
    note_update(optimizer, part, gradient)
    size = part.shape.num_elements() if isinstance(part, tf.Variable) else None  # else of rows of a part
    is_clipped = bool(getattr(optimizer, "clipnorm", None))  # by the whole's norm before (optimizers.py)
    where = "the step" if not is_clipped and differs(whole, part, totals_of(gradient)) else ""
    if size and not is_clipped:
        _gradients.setdefault(graph, {}).setdefault(id(beneath(part)), []).extend(from_tapes(gradient))
    is_own = not kind.__module__.startswith(("tf_keras.", "keras."))  # Keras's are refused by name
    if is_own and any(one.tensor.shape.num_elements() == size for one in mixed_and_written(made)):
        where = f"{kind.__name__}'s update"
    if where:
        instead = "give the optimizer clipnorm (of Keras 3: global_clipnorm)"
        raise refusal(where, part, instead, is_dynamic=whole_of(part) is None)


def refusal(where: str, part: Variable, instead: str, *, is_dynamic: bool = False, operation: str = "") -> UserError:
    fix = "Leave its layer out of dynamic_tables"
    if not is_dynamic:
        fix = "Set partitioner to none, so that weights stay whole"
    named = f" (as operation {operation})" if operation else ""
    return UserError(
        f"{where} computes a norm, a mean, a matrix product or the like of each part of {name_of(part)} or of its "
        f"gradient{named}, which is split over the ps: no part would get the whole's. {fix}, or {instead}"
    )


@contextlib.contextmanager
def rejecting_numbers_of_parts(variables: Callable[[], Iterable[Variable]]) -> Iterator[None]:
    """Raise UserError where a step that is traced meanwhile computes or writes numbers of one part of a variable.

    They are asked for at the end. What updates compute is looked at with each (reject_part_totals).
    """
    with noting_asked() as asked:
        yield
    graph = tf.compat.v1.get_default_graph()
    if is_dropped() or not hasattr(graph, "captures"):
        return
    handles = {id(outer): inner for outer, inner in graph.captures}

    def is_written(variable: Variable) -> bool:
        handle = handles.get(id(beneath(own(variable)).handle))
        return handle is not None and any(one.operation.type.startswith(WRITING) for one in uses(Flow(handle)))

    reject_places(asked)
    reject_short_lists(asked.sources, is_written)
    for parts in split_weights(variables()):
        given = [handles.get(id(beneath(part).handle)) for part in parts]
        used = [[] if one is None else [each for each in uses(Flow(one)) if not is_of_update(each)] for one in given]
        reads = [[one for one in each if one.operation.type == "ReadVariableOp"] for each in used]
        reject_unequal(parts, reads)
        reject_unequal_updates(parts, used)
        first = totals_written(used[0])
        for part, read, each in zip(parts, reads, used, strict=True):
            taped = _gradients.get(graph, {}).get(id(beneath(part)), [])
            listed = [one for one in read if OF_SOME_ROWS not in one.operation.name]  # others are of the whole's rows
            if found := no_sum([result for one in listed for result in one.results]):
                raise refusal("the step", part, WHOLE_INSTEAD, operation=found)
            if (found := no_sum(taped)) or totals_written(each) != first:
                raise refusal("the step", part, ALL_INSTEAD, operation=found)


def split_weights(variables: Iterable[Variable]) -> list[list[Variable]]:
    """Return the parts of each split weight among these, of whichever Keras."""
    wholes = [one if hasattr(one, "variables") else whole_of(one) for one in map(own, variables)]
    return [one.variables for one in {id(one): one for one in wholes if one is not None}.values()]


def totals_written(used: Sequence[Use]) -> set[frozenset[Any]]:
    """Return the totals in what is written to a part; what the step's other parts are written is to have the same."""
    writing = [one for one in used if one.operation.type.startswith(WRITING)]
    values = [Flow(each, one.calls) for one in writing for each in one.operation.inputs if each.dtype != tf.resource]
    return set().union(*map(totals_behind, values))


def is_of_update(read: Use) -> bool:
    """Return whether an optimizer's update reads this, or calls what does."""
    return any(one.name in _updating.get(one.graph, ()) for one in (read.operation, *read.calls))


def no_sum(reads: Sequence[Flow]) -> str:
    """Return the name of what is computed of these rows to which that of other rows can't be added; or nothing."""
    todo = [(one, ROWS) for one in reads]
    states: dict[Any, set[str]] = {}  # of what was computed of the rows, by its key
    known, of_sums = {(one.key, state) for one, state in todo}, []
    while todo:
        flow, state = todo.pop()
        for use in uses(flow, is_tapes):
            if is_of_update(use):
                continue
            states.setdefault(Flow(use.given, use.calls).key, set()).add(state)
            if use.operation.type in (*JOINING, *OF_NO_VALUES) or is_tapes(use.operation):
                continue
            if is_wrong(use, state) and not is_only_asserted(use):
                return str(use.operation.name)
            of_sums += [use] if state == SUMMED else []
            more = [(each, now) for now in after(use, state) for each in use.results]
            todo += [(each, now) for each, now in more if (each.key, now) not in known]
            known.update((each.key, now) for each, now in more)
    return next((str(use.operation.name) for use in of_sums if is_with_rows(use, states)), "")


def is_wrong(use: Use, state: str) -> bool:
    """Return whether an operation makes of the rows, or of a sum of them, what is no sum."""
    one = use.operation
    if state == ROW:
        return False
    if state == SUMMED and (one.type in CURVED or (one.type in DIVIDING and use.given is one.inputs[1])):
        return one.type != "Sqrt" or not is_norm_of_all(use)
    return is_mixing(use, state) and not is_sum(one) and (state == SUMMED or not is_of_all(use))


def after(use: Use, state: str) -> list[str]:
    """Return what the results of an operation are, if it is no wrong one; nothing where other parts' come to it."""
    one = use.operation
    if state == SUMMED:
        is_joined = one.type in ("AddV2", "Sub") and all(each.op.type != "Const" for each in one.inputs)
        return [] if is_joined or one.type == "Sqrt" else [SUMMED]
    if state == ROW:
        return [ROWS if one.type in LISTING else ROW]
    if is_mixing(use, state):
        return [SUMMED] if is_sum(one) else []
    if moves_rows(one):
        return [ROWS if state == MOVED else MOVED]
    return [ROW if one.type == ITEM and state == ROWS else state]


def is_mixing(use: Use, state: str) -> bool:
    one = use.operation
    is_mixed = state == MOVED and one.type in (*TOTALS, *PRODUCTS, *ALONG_AN_AXIS, *OF_A_LIST, ITEM)
    return one.type not in ("All", "Any") and (
        is_mixed or any(each.tensor is use.given for each in mixed(one, use.calls))
    )


def is_with_rows(use: Use, states: Mapping[Any, set[str]]) -> bool:
    """Return whether a sum of a part's rows is computed with these rows, or multiplied with such a sum."""
    one = use.operation
    others = [Flow(each, use.calls).key for each in one.inputs if each is not use.given]
    if one.type == "Mul":
        return not others or any(states.get(each) for each in others)
    return any(states.get(each, set()) - {SUMMED} for each in others)


def is_sum(operation: Operation) -> bool:
    """Return whether of parts this adds up to the whole's, as a product of all elements with others does."""
    is_dot = operation.type in (*PRODUCTS, "Einsum") and operation.outputs[0].shape.num_elements() == 1
    return is_dot or operation.type in SUMS


def is_of_all(use: Use) -> bool:
    """Return whether an operation takes the largest or the smallest number, of which that of all parts is taken."""
    kind, taken = use.operation.type, of_joined(use)
    is_taken = bool(taken) and all(one.operation.type == kind and is_mixing(one, ROWS) for one in taken)
    return kind in ("Max", "Min") and is_taken


def is_norm_of_all(use: Use) -> bool:
    """Return whether a root is squared again with those of other parts, as in a norm of norms."""
    return bool(taken := of_joined(use)) and all(is_square(one.operation) for one in taken)


def is_square(operation: Operation) -> bool:
    kind, inputs = operation.type, operation.inputs
    return kind in ("L2Loss", "Square") or (kind == "Mul" and inputs[0] is inputs[1])


def of_joined(use: Use) -> list[Use]:
    """Return what takes the results of an operation joined with others; nothing where something takes them alone."""
    used = later([use])
    while any(one.operation.type in SAME for one in used):
        used = [one for each in used for one in (later([each]) if each.operation.type in SAME else [each])]
    return later(used) if all(one.operation.type in JOINING for one in used) else []


def later(used: Sequence[Use]) -> list[Use]:
    """Return what takes the results of operations, but for what takes no numbers of them."""
    found = [each for one in used for result in one.results for each in uses(result, is_tapes)]
    return [one for one in found if one.operation.type not in OF_NO_VALUES and not is_tapes(one.operation)]


def mixed_and_written(made: Sequence[Operation]) -> list[Flow]:
    """Return what has its rows mixed in an update's operations, and something written that comes from it."""
    own_names = {one.name for one in made}
    writing = [(one, calls) for one, calls in within(made) if one.type.startswith(WRITING)]
    written = [Flow(each, calls) for one, calls in writing for each in one.inputs if each.dtype != tf.resource]

    def is_end(one: Flow) -> bool:
        return (one.calls[0] if one.calls else one.tensor.op).name not in own_names

    found = reach(written, lambda one: [] if is_end(one) else behind(one))
    return [each for one in found if not is_end(one) for each in mixed(one.tensor.op, one.calls)]


def differs(whole: Variable, part: Variable, totals: set[frozenset[Any]]) -> bool:
    """Return whether another part's gradient of the same `apply_gradients` has other numbers in it."""
    weights = _shared.setdefault(tf.compat.v1.get_default_graph(), {})
    parts, first = weights.get(id(whole), ([], totals))
    if part.name in parts:  # the next apply_gradients of the step
        parts, first = [], totals
    weights[id(whole)] = ([*parts, part.name], first)
    return totals != first


def totals_of(gradient: Tensor) -> set[frozenset[Any]]:
    """Return the totals in a gradient as it is applied."""
    given = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return totals_behind(Flow(given)) if tf.is_symbolic_tensor(given) else set()


def from_tapes(gradient: Tensor) -> list[Flow]:
    """Return what tapes gave, of which a gradient was computed number by number."""
    given = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if not tf.is_symbolic_tensor(given) or given.shape.rank is None:
        return []

    def alike(flow: Flow) -> list[Flow]:
        return [one for one in behind(flow) if not is_of_tape(flow) and one.tensor.shape.as_list() == shape]

    shape = given.shape.as_list()
    return [one for one in reach([Flow(given)], alike) if is_of_tape(one)]


def totals_behind(value: Flow) -> set[frozenset[Any]]:
    """Return of what is computed over all rows of something between the tape and this value: what it comes from.

    Two numbers that come from the same are the same, as a global norm that a step computes again for each gradient.
    """

    def is_end(one: Flow) -> bool:
        """A total's origins have the rest."""
        return is_of_tape(one) or (one.tensor.op.type in TOTALS and bool(mixed(one.tensor.op, one.calls)))

    found = sources_of(value, is_end)
    totals = {origins_of(one) for one in found if not is_of_tape(one) and mixed(one.tensor.op, one.calls)}
    return totals - {frozenset()}  # of shapes and constants alone


def origins_of(result: Flow) -> frozenset[Any]:
    """Return what the tape gives, the variables and the step's inputs from which rows are mixed for this result."""
    graph_known = _origins.setdefault(result.tensor.graph, {})
    if result.key in graph_known:
        return graph_known[result.key]
    found: set[Any] = set()
    for rows in mixed(result.tensor.op, result.calls):
        for one in sources_of(rows, lambda each: is_of_tape(each) or each.tensor.op.type in OF_NO_VALUES):
            operation = one.tensor.op
            if operation.type in OF_NO_VALUES:
                continue
            handles = [outside(Flow(each, one.calls)).key for each in operation.inputs if each.dtype == tf.resource]
            found.update(handles)
            if is_of_tape(one) or not (behind(one) or handles):
                found.add(one.key)
    graph_known[result.key] = frozenset(found)
    return graph_known[result.key]


def sources_of(flow: Flow, is_end: Callable[[Flow], bool]) -> Iterator[Flow]:
    """Yield a tensor and all that it is computed of, each once; nothing behind those at which it ends."""
    return reach([flow], lambda one: [] if is_end(one) else behind(one))


def mixed(operation: Operation, calls: Calls = ()) -> list[Flow]:
    """Return those of an operation's inputs of which one row of its result takes other rows than its own."""
    return [Flow(one, calls) for one in mixed_inputs(operation, calls)]


def mixed_inputs(operation: Operation, calls: Calls) -> list[Tensor]:
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
    is_moved = rows_are_moved(Flow(first, calls))
    if not is_moved and is_of_row(Flow(first, calls)):
        return []
    if kind == "L2Loss" or is_moved or (axes := tf.get_static_value(operation.inputs[1])) is None:
        return [first]
    return [first] if any(axis % rank == 0 for axis in np.ravel(axes)) else []


def is_of_row(flow: Flow) -> bool:
    """Return whether a tensor is computed of one row at a time, as in tf.map_fn."""
    found = sources_of(flow, lambda one: one.tensor.op.type in (ITEM, *LISTING) or is_of_tape(one))
    return any(one.tensor.op.type == ITEM for one in found)


def rows_are_moved(flow: Flow) -> bool:
    """Return whether a gradient was transposed, or its rows were joined, before this was computed of it."""
    moved = [one for one in sources_of(flow, is_of_tape) if not is_of_tape(one) and moves_rows(one.tensor.op)]
    return any(is_of_tape(one) for each in moved for one in sources_of(each, is_of_tape))


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
