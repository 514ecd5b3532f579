"""A Keras 3 model's own step, whose changes of what workers share are added instead of written over."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Operation, Optimizer, Structure, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.keras.keras3.optimizers import optimizers_of
from trainer.training.keras.keras3.shards import shards_of
from trainer.training.measures.metrics import READING
from trainer.training.measures.outputs import flat
from trainer.training.tf_internals.graphs import called_graphs, is_read_since_writes
from trainer.training.tf_internals.seeds import DrawnSeeds, keras3_seeds
from trainer.training.tf_internals.variables import beneath
from trainer.training.updates.constraints import KEPT
from trainer.training.updates.split_gradients import by_parts

ShardedVariable = tf.__internal__.distribute.ShardedVariable
ADDED = ("Add", "AddN", "AddV2")
CHOICES = ("Select", "SelectV2")
# They leave the numbers of their first input where they are, or most of them.
CARRIED = (
    *("BroadcastTo", "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape"),
    *("Squeeze", "StopGradient"),
    *("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate", "TensorStridedSliceUpdate"),
)
PRODUCTS = {"Mul": 2, "MulNoNan": 1, "RealDiv": 1, "Div": 1, "DivNoNan": 1}  # which of their inputs may be multiplied


class Step:
    """The model's own train_step, whose changes of what the workers share are added up; for what is traced.

    Which weights it replaces without training them, as those of a target network, is seen when it is traced. Trace it
    again while `found_more`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._replaced: dict[int, Any] = {}
        self._trained: dict[str, set[int]] = {}  # by the optimizer's attribute
        self.found_more = False

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Structure) -> Any:
        self.found_more = False
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras3_seeds(DrawnSeeds()))
            for attribute, optimizer in optimizers_of(self._model):
                stack.enter_context(self._noted(attribute, optimizer))
            adding = {id(one): one for one in [*shared_state(self._model), *self._replaced.values()]}
            for variable in adding.values():
                stack.enter_context(changes_added(variable))
            weights = [one for layer in self._model._flatten_layers() for one in layer._trainable_variables]
            watched = {id(each): each for one in weights for each in (one, *shards_of(one))}
            for variable in watched.values():
                if id(variable) not in adding:
                    stack.enter_context(self._watched(variable))
            results = flat(self._model.train_step(data))
        for variable in self._replaced.values():
            self._reject_trained(variable)
        self._reject_stale_averages()
        return results

    @contextlib.contextmanager
    def _noted(self, attribute: str, optimizer: Optimizer) -> Iterator[None]:
        """Note what an optimizer trains: it may be built with weights of which it is given no gradients."""
        plain = optimizer.apply

        def apply(grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None) -> Any:
            gradients, given = list(grads), trainable_variables
            variables = optimizer._trainable_variables if given is None else list(given)
            if len(gradients) == len(variables):  # else Keras says so
                pairs = by_parts(zip(gradients, variables, strict=True), shards_of)
                gradients, variables = [one for one, _ in pairs], [one for _, one in pairs]
                trained = self._trained.setdefault(attribute, set())
                trained.update(id(one) for gradient, one in pairs if gradient is not None)
            return plain(gradients, None if given is None else variables)

        object.__setattr__(optimizer, "apply", apply)
        try:
            yield
        finally:
            object.__delattr__(optimizer, "apply")

    @contextlib.contextmanager
    def _watched(self, variable: Variable) -> Iterator[None]:
        """Note what replaces a weight, add what is added to one, and leave a constraint to the weight's update."""
        own, constraint = variable._value, variable.constraint

        def assign(value: object) -> None:
            given = tf.convert_to_tensor(value)  # it may be a variable
            if (more := added(given, own)) is not None:
                own.assign_add(tf.broadcast_to(tf.cast(more, own.dtype), own.shape))
                return
            self._replaced[id(variable)] = variable
            self.found_more = True
            own.assign(tf.cast(given, own.dtype))

        variable._direct_assign = assign
        if constraint is not None:
            setattr(beneath(own), KEPT, constraint)
            variable._constraint = None
        try:
            yield
        finally:
            variable._constraint = constraint
            del variable._direct_assign

    def _reject_trained(self, variable: Variable) -> None:
        parts = {id(variable), *map(id, shards_of(variable))}
        trained = [*self._trained.items(), *self._averaged().items()]
        if attribute := next((name for name, found in trained if parts & set(found)), ""):
            name = type(self._model).__name__
            raise UserError(
                f"{name}.train_step assigns {variable.path}, which {attribute} trains: workers would overwrite "
                "each other's changes. To keep weights within bounds give the layer a constraint; make layers that "
                "follow others, as a target network, trainable=False"
            )

    def _reject_stale_averages(self) -> None:
        """Refuse averages of weights that another optimizer trains: an average changes with its optimizer's updates."""
        for attribute, averaged in self._averaged().items():
            others = {one for name, found in self._trained.items() if name != attribute for one in found}
            stale = (others - self._trained.get(attribute, set())) & averaged.keys()
            if stale:
                raise UserError(
                    f"{attribute} of {type(self._model).__name__} was built with {averaged[min(stale)]} and averages "
                    "it (use_ema), but another optimizer trains it: the average would never change. Build each "
                    "optimizer with the weights that it trains, or leave build() out"
                )

    def _averaged(self) -> dict[str, dict[int, str]]:
        """Return the paths of the weights for which averages are taken at the end, by their ids and optimizers."""
        averaging = [(name, one) for name, one in optimizers_of(self._model) if one.use_ema and one.built]
        return {name: {id(weight): weight.path for weight in one._trainable_variables} for name, one in averaging}


def shared_state(model: Model) -> list[Variable]:
    """Return what each worker's step reads, changes and writes beside the weights: counters, seeds, layers' state.

    What is no number, such as a flag, is left out: nothing can be added to it, and it is overwritten.
    """
    found = []
    for layer in model._flatten_layers():
        found += [*layer._non_trainable_variables, *(each.state for each in layer._seed_generators)]
    for _, optimizer in optimizers_of(model):
        found.append(optimizer._iterations)
    numbers = [one for one in found if one is not None and one.dtype not in ("bool", "string")]
    there = [one for one in numbers if isinstance(one._value, tf.Variable | ShardedVariable)]
    return list({id(one): one for one in there}.values())


@contextlib.contextmanager
def changes_added(variable: Variable) -> Iterator[None]:
    """Have what is traced inside read a variable once, and add to it what its `assign` changes.

    Keras adds by reading, adding and writing: what another worker has written meanwhile would be lost. What is no
    change of the value that was read is written as it is.
    """
    own = variable._value
    first = seen = tf.convert_to_tensor(own) if isinstance(own, ShardedVariable) else own.read_value()

    def assign(value: Any) -> None:
        nonlocal seen
        # What reads it later in the step gets no gradient of what it was computed from, as of a variable.
        value = tf.stop_gradient(tf.cast(value, own.dtype))
        if is_changed(value, (first, seen)):
            own.assign_add(value - seen, read_value=False)
        else:
            own.assign(value, read_value=False)
        if value.graph is seen.graph:  # else it is of a branch
            variable._value = seen = value

    variable._value = seen
    variable._direct_assign = assign
    try:
        yield
    finally:
        variable._value = own
        del variable._direct_assign


def added(value: Tensor, own: Variable) -> Tensor | None:
    """Return what a tensor has more than a variable, where it is a sum with what that holds now, or a difference."""

    def source(tensor: Tensor) -> Tensor:
        while tensor.op.type in ("Identity", "Cast"):
            tensor = tensor.op.inputs[0]
        return tensor

    def is_read(tensor: Tensor) -> bool:
        read, handle = source(tensor).op, value.graph.capture(own.handle)
        is_own = read.type == "ReadVariableOp" and read.inputs[0] is handle
        return is_own and is_read_since_writes(read, handle, READING)

    if isinstance(own, ShardedVariable):
        return None
    operation = source(value).op
    if operation.type not in ("AddV2", "Sub"):
        return None
    left, right = operation.inputs
    if is_read(left):
        return right if operation.type == "AddV2" else -right
    return left if operation.type == "AddV2" and is_read(right) else None


def is_changed(value: Any, sources: Sequence[Any]) -> bool:
    """Return whether a tensor has one of these in it as a sum or a moving average has: what it has more is a change.

    What is computed of them in another way, as a queue that is shifted, a number that turns or the nearest row, is no
    change: two workers' would not add up, and what they leave would not settle.
    """
    found = {key(one.op) for one in sources}
    known: dict[tuple[int, str], Collection[int]] = {}

    def signs(tensor: Any) -> Collection[int]:
        """Return with which signs it has them."""
        if key(tensor.op) in found:
            return {1}
        if key(tensor.op) not in known:
            known[key(tensor.op)] = ()
            known[key(tensor.op)] = of_inputs(tensor)
        return known[key(tensor.op)]

    def of_inputs(tensor: Any) -> Collection[int]:
        operation, inputs = tensor.op, list(tensor.op.inputs)
        if operation.type == "Placeholder" and operation.graph is not sources[0].graph:
            outer = [outer for outer, inner in operation.graph.captures if inner.op is operation]
            return signs(outer[0]) if outer and tf.is_symbolic_tensor(outer[0]) else {1} if not outer else ()
        if called_graphs(operation):
            return {1} if depends(tensor, sources) else ()
        if operation.type in ADDED:
            return {sign for one in inputs for sign in signs(one)}
        if operation.type in CHOICES:  # by what it was itself, as of a maximum or a place in a ring, is no change
            first, second = (set(signs(one)) for one in inputs[1:])
            return first & second if depends(inputs[0], sources) else first | second
        if operation.type == "Sub":
            return {*signs(inputs[0]), *(-sign for sign in signs(inputs[1]))}
        if operation.type == "Neg":
            return {-sign for sign in signs(inputs[0])}
        if operation.type in PRODUCTS:
            either = [(signs(one), other) for one, other in (inputs, inputs[::-1])][: PRODUCTS[operation.type]]
            return next((own for own, other in either if own and not depends(other, sources)), ())
        return signs(inputs[0]) if operation.type in CARRIED else ()

    return 1 in signs(value)


def depends(value: Any, sources: Sequence[Any]) -> bool:
    """Return whether a tensor is computed from one of these, of one graph, or may be.

    A branch of a condition has what it uses from outside as inputs of its own. The other inputs of a function, and
    what a loop carries, may come from anywhere.
    """

    outside, found = sources[0].graph, {key(one.op) for one in sources}
    todo, known = [value.op], {key(value.op)}
    while todo:
        operation = todo.pop(0)  # those that are near come first: a sum has the value itself in it
        if key(operation) in found:
            return True
        tensors = list(operation.inputs)
        if operation.type == "Placeholder" and operation.graph is not outside:
            tensors = [outer for outer, inner in operation.graph.captures if inner.op is operation]
            if not tensors:
                return True
        inputs = [one.op for one in tensors if tf.is_symbolic_tensor(one)]
        todo += [one for one in inputs if key(one) not in known]
        known.update(map(key, inputs))
    return False


def key(operation: Operation) -> tuple[int, str]:
    return id(operation.graph), operation.name
