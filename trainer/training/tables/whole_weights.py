"""Weights that tf_keras reads and writes as arrays: a variable that is split over the ps counts as one.

tf_keras lists the shards of a split variable as weights of their own. So what a file or an array has as one weight
would not fit a model with two ps. The methods that give, take, save and load weights see whole ones here, at any time;
and so does a caller that asks a layer for its `weights` while the program's `build_model` runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Layer, Optimizer, Variable
from trainer.core.failures import UserError, first_line
from trainer.training.placement import name_of
from trainer.training.tables.first_values import initialized_as_whole, scaled_as_whole
from trainer.training.tables.table_lookups import look_up
from trainer.training.tf_internals.saving import (
    load_saved_model_within,
    name_in_checkpoints,
    patch_hdf5_format,
    read_split_kernels,
)
from trainer.training.tf_internals.variables import OF_SOME_ROWS, join_converted_parts, whole_of
from trainer.training.updates.split_assign import shard_values
from trainer.training.updates.split_gradients import (
    PartsGradients,
    of_whole_sources,
    of_whole_variables,
    watching_parts,
)
from trainer.training.updates.unequal_parts import listed

ShardedVariable: Any = tf.__internal__.distribute.ShardedVariable
ARRAYS = ("get_weights", "set_weights")
STORES = ("load_own_variables", "save_own_variables")
OWN_LISTS = ("_trainable_weights", "_non_trainable_weights")
SUMS = ("L1", "L1L2", "L2")  # regularizers
SHAPES_DIFFER = "Shape mismatch"
_seeing_whole = [False]
_building = [False]


class Whole(ShardedVariable):
    """A split variable with the name of a whole one, which takes an array by parts: it is never copied as a whole."""

    def __init__(self, split: Variable) -> None:
        # Its constructor would have the shards take this one for what they are shards of.
        self.__dict__.update(vars(split))
        self._name = f"{name_of(split.variables[0])}:0"

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Assign an array or a tensor of the whole shape; raises ValueError for another one."""
        reject_other_shape(self, value)
        begin = 0
        for shard in self.variables:
            end = begin + int(shard.shape[0])
            shard.assign(value[begin:end])
            begin = end
        return self

    def numpy(self) -> Any:
        """Return the value, of the shards' type."""
        found = np.empty(self.shape, self.variables[0].dtype.as_numpy_dtype)
        begin = 0
        for shard in self.variables:
            end = begin + int(shard.shape[0])
            found[begin:end] = shard.numpy()
            begin = end
        return found


def reject_other_shape(variable: Variable, value: Any) -> None:
    """Raise ValueError unless the value has the variable's shape: TensorFlow takes the first rows of a larger one."""
    shape = getattr(value, "shape", None)
    shape = np.shape(value) if shape is None else shape
    if not variable.shape.is_compatible_with(shape):
        raise ValueError(
            f"Cannot assign value to variable '{name_of(variable.variables[0])}': {SHAPES_DIFFER}. The variable shape "
            f"{tuple(variable.shape)}, and the assigned value shape {tuple(shape)} are incompatible."
        )


def whole_view(split: Variable) -> Variable:
    """Return the one `Whole` of a split variable."""
    if "_psfleet_whole" not in vars(split):
        object.__setattr__(split, "_psfleet_whole", Whole(split))
    return vars(split)["_psfleet_whole"]


def joined(weights: Iterable[Variable]) -> list[Variable]:
    """Return the weights with one `Whole` in the place of the shards of each split variable."""
    found: list[Any] = []
    known: set[int] = set()
    for weight in weights:
        split = whole_of(weight)
        one = weight if split is None else whole_view(split)
        if id(one) not in known:
            known.add(id(one))
            found.append(one)
    return found


@contextlib.contextmanager
def flagged(flag: list[bool]) -> Iterator[None]:
    flag.append(True)
    try:
        yield
    finally:
        flag.pop()


@contextlib.contextmanager
def building_whole() -> Iterator[None]:
    """Have build_model see whole weights; raises UserError where it assigns a whole value to a shard."""
    see_whole_weights()
    try:
        with flagged(_building):
            yield
    except ValueError as error:
        if SHAPES_DIFFER not in str(error) or "/part_" not in str(error):
            raise
        raise UserError(
            f"{first_line(error).rstrip('.')}. That variable is split over the ps, and trainable_weights lists its "
            "parts. Assign the layer's attribute, such as layer.embeddings, or call layer.set_weights; or set "
            "partitioner to none, so that tables stay whole"
        ) from error


@functools.cache
def see_whole_weights() -> None:
    """Have tf_keras count split variables as whole ones where it reads or writes them as arrays, in this process."""
    layer, model, legacy = tf.keras.layers.Layer, tf.keras.Model, tf.keras.optimizers.legacy.Optimizer
    layer._dedup_weights = joining(layer._dedup_weights)
    layer._handle_weight_regularization = regularizing_whole(layer._handle_weight_regularization)
    for kind in (layer, model):
        kind.weights = property(while_building(kind.weights.fget))
        for name in ARRAYS:
            setattr(kind, name, seeing_whole(getattr(kind, name)))
    scaling = tf.keras.initializers.VarianceScaling
    scaling.__call__ = scaled_as_whole(scaling.__call__)
    layer._add_variable_with_custom_getter = initialized_as_whole(layer._add_variable_with_custom_getter)
    for name in STORES:
        setattr(layer, name, with_whole_lists(getattr(layer, name)))
    legacy.set_weights = with_whole_slots(legacy.set_weights)
    legacy.get_weights = with_whole_slots(legacy.get_weights)
    patch_hdf5_format(lambda plain: with_whole_lists(plain, model=1), whole_and_listed)
    ShardedVariable.assign = checking_shape(ShardedVariable.assign)
    ShardedVariable.value = ShardedVariable.read_value = tf.convert_to_tensor  # which each other variable has
    ShardedVariable._convert_variables_to_tensors = tf.convert_to_tensor  # as tf.map_fn and the like have them
    ShardedVariable.get_shape = ShardedVariable.shape.fget
    ShardedVariable.sparse_read = look_up  # by which tf.gather reads; TensorFlow's own gives rows by their shards
    ShardedVariable.__getitem__ = taking_tensors(ShardedVariable.__getitem__)
    ShardedVariable.trainable = property(lambda split: split.variables[0].trainable)
    ShardedVariable.__array__ = as_array  # else numpy has an object
    join_converted_parts()
    ShardedVariable.__composite_gradient__ = PartsGradients()
    tf.GradientTape.gradient = of_whole_sources(tf.GradientTape.gradient)
    tf.gradients = of_whole_variables(tf.gradients)
    accumulator = tf.autodiff.ForwardAccumulator
    accumulator.__init__ = watching_parts(accumulator.__init__)
    load_saved_model_within(whole_variables)
    read_split_kernels(tf.convert_to_tensor)
    name_in_checkpoints(ShardedVariable, lambda split: name_of(split._variables[0]))


def as_array(split: Variable, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return a split variable's value as numpy asks for it; as of others, not in a trace, where tf.stack asks too."""
    if not tf.executing_eagerly():
        raise NotImplementedError(f"{name_of(split.variables[0])} has no array while a function is traced")
    return np.asarray(split.numpy(), dtype)


def joining(plain: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return tf_keras's function through which each list of a layer's weights goes."""

    @functools.wraps(plain)
    def deduplicated(layer: Layer, weights: Sequence[Variable]) -> list[Variable]:
        found = plain(layer, weights)
        return joined(found) if _seeing_whole[-1] else listed(found)

    return deduplicated


def while_building(plain: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Return a property `weights` that lists whole ones while build_model runs."""

    @functools.wraps(plain)
    def weights(layer: Layer) -> list[Variable]:
        found = plain(layer)
        return joined(found) if _building[-1] else found

    return weights


def seeing_whole(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*given: object, **named: object) -> Any:
        with flagged(_seeing_whole):
            return plain(*given, **named)

    return method


def with_whole_lists(plain: Callable[..., Any], model: int = 0) -> Callable[..., Any]:
    """Return a function that sees whole weights in the lists that a layer keeps; `model` is that argument's place."""

    @functools.wraps(plain)
    def function(*given: object, **named: object) -> Any:
        kept = vars(given[model])
        before = {name: kept[name] for name in OWN_LISTS if name in kept}
        kept.update({name: joined(listed) for name, listed in before.items()})
        try:
            with flagged(_seeing_whole):
                return plain(*given, **named)
        finally:
            kept.update(before)

    return function


def whole_and_listed(layer: Layer) -> list[Variable]:
    """Return a layer's weights in the order of a file .h5; tf_keras's own function refuses what is split."""
    with flagged(_seeing_whole):
        return [*layer.trainable_weights, *layer.non_trainable_weights]


def regularizing_whole(plain: Callable[..., None]) -> Callable[..., None]:
    """Return what has a layer regularize a weight: tf_keras would have each part of a split one be a weight."""

    @functools.wraps(plain)
    def handle(layer: Layer, name: str, variable: Variable, regularizer: Any) -> None:
        if isinstance(variable, ShardedVariable) and not adds_up(regularizer):
            plain(layer, name, None, lambda _: regularizer(tf.concat(variable.variables, axis=0)))
        else:
            plain(layer, name, variable, regularizer)

    return handle


def adds_up(regularizer: Any) -> bool:
    """Return whether what a regularizer makes of a weight is the sum of what it makes of the parts."""
    return type(regularizer).__name__ in SUMS and type(regularizer).__module__.startswith(("tf_keras.", "keras."))


def with_whole_slots(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a legacy optimizer that sees the slots of a split variable's shards as one."""

    @functools.wraps(plain)
    def method(optimizer: Optimizer, *given: object) -> Any:
        kept = vars(optimizer)["_weights"]
        vars(optimizer)["_weights"] = joined_slots(optimizer)
        try:
            return plain(optimizer, *given)
        finally:
            vars(optimizer)["_weights"] = kept

    return method


def joined_slots(optimizer: Optimizer) -> list[Variable]:
    """Return a legacy optimizer's variables, with the slots of a split variable's shards as one."""
    split = [
        optimizer.get_slot(weight, name)
        for slots in list(optimizer._slots.values())
        for name, weight in slots.items()
        if isinstance(weight, ShardedVariable)
    ]
    slot_of = {id(part): whole_view(slot) for slot in split for part in slot.variables}
    wholes = [slot_of.get(id(weight), weight) for weight in optimizer._weights]
    return list({id(weight): weight for weight in wholes}.values())


def taking_tensors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives a part of a split variable: in the type of its layer, and by tensors, as of a whole one."""

    @functools.wraps(plain)
    def part(variable: Variable, spec: Any) -> Any:
        bounds = [(one.start, one.stop, one.step) if isinstance(one, slice) else one for one in tf.nest.flatten(spec)]
        if any(tf.is_tensor(one) for one in tf.nest.flatten(bounds)):
            return tf.convert_to_tensor(variable)[spec]
        with tf.name_scope(OF_SOME_ROWS):
            return tf.cast(plain(variable, spec), variable.dtype)

    return part


def checking_shape(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def assign(variable: Variable, value: object, *given: object, **named: object) -> Any:
        reject_other_shape(variable, value)
        if (values := shard_values(variable, value)) is not None:
            for shard, one in zip(variable.variables, values, strict=True):
                shard.assign(one)
            return variable
        return plain(variable, value, *given, **named)

    return assign


@contextlib.contextmanager
def whole_variables() -> Iterator[None]:
    """Have variables that are made meanwhile stay whole, as the functions of a SavedModel know them."""
    extended = tf.distribute.get_strategy().extended
    kept = getattr(extended, "_variable_partitioner", None)
    if kept is None:
        yield
        return
    extended._variable_partitioner = None
    try:
        yield
    finally:
        extended._variable_partitioner = kept
