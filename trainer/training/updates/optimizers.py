"""What tf_keras's optimizers lack on parameter servers, above all of split tables; docs/training.md has the table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.placement import name_of
from trainer.training.tf_internals.variables import divided, moving_average, whole_of

CHILDREN = "_coalesced_children"
PART = re.compile(r"/part_\d+:0$")


def treat_as_whole(model: Model) -> None:
    """Have the model's optimizers clip and restore a split table as if it were whole; call it before the first trace.

    They are the one that it is compiled with, and those that are attributes of the model, as a GAN has them.
    """
    for optimizer in optimizers_of(model):
        if is_wrapper(optimizer):
            continue
        if hasattr(optimizer, "get_slot"):
            keep_slots(optimizer)
        if getattr(optimizer, "clipnorm", None):
            clip_whole(optimizer, "_aggregate_gradients" if hasattr(optimizer, "get_slot") else "aggregate_gradients")
        if getattr(optimizer, "weight_decay", None):
            exclude_shards(optimizer)
    forget_children(model)


def share_among_workers(model: Model) -> None:
    """Have a step of one worker overwrite no weight that another one trains; call it before the first trace.

    Raises UserError where it must.
    """
    for layer in model.submodules:
        if isinstance(layer, tf.keras.layers.SpectralNormalization):
            raise UserError(
                f"the layer {layer.name!r} is a SpectralNormalization, which replaces weights at each step: workers "
                "would overwrite each other's. Leave it out"
            )
    for optimizer in optimizers_of(model):
        if overwrites_weights(optimizer):
            raise UserError(
                f"{type(optimizer).__name__} has ema_overwrite_frequency: each worker would overwrite what the others "
                "have trained. Set it to None: averages are taken for weights at the end"
            )
        if hasattr(optimizer, "build"):
            begin_where_weights_lie(optimizer)


def begin_where_weights_lie(optimizer: Optimizer) -> None:
    """Have the first values of an optimizer's variables computed on the ps.

    Adagrad and Ftrl compute those of each shard before they make a variable: on the coordinator, whose memory may be
    smaller, and which would send them.
    """
    plain = optimizer.build

    def build(variables: Collection[Variable]) -> None:
        placed = OnTheirDevices(variables)
        try:
            plain(placed)
        finally:
            placed.leave()

    object.__setattr__(optimizer, "build", build)


class OnTheirDevices(list[Any]):
    """Variables: what is computed while one of them is looped over is computed on its device."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        super().__init__(variables)
        self._loops: list[Generator[Any, None, None]] = []

    def __iter__(self) -> Iterator[Any]:
        self._loops.append(self._loop())
        return self._loops[-1]

    def leave(self) -> None:
        """End the loops that an error has left, the innermost first: each has entered its device."""
        while self._loops:
            self._loops.pop().close()

    def _loop(self) -> Generator[Any, None, None]:
        for variable in super().__iter__():
            with tf.device(variable.device):
                yield variable


def overwrites_weights(optimizer: Optimizer) -> bool:
    """Return whether it takes averages for the weights while it trains; RMSprop names a frequency without averages."""
    return bool(getattr(optimizer, "use_ema", False) and getattr(optimizer, "ema_overwrite_frequency", None))


def optimizers_of(model: Model) -> list[Optimizer]:
    """Return the optimizers that the model holds, each once; of one in a LossScaleOptimizer both.

    A WideDeepModel is compiled with a list of them.
    """
    found = {} if isinstance(model.optimizer, list | tuple) else {id(model.optimizer): model.optimizer}
    for value in tf.train.TrackableView(model).descendants():
        for optimizer in (value, getattr(value, "inner_optimizer", None)):
            if isinstance(optimizer, tf.keras.optimizers.Optimizer | tf.keras.optimizers.legacy.Optimizer):
                found[id(optimizer)] = optimizer
    return [one for one in found.values() if one is not None]


def averaged(model: Model) -> list[tuple[Optimizer, list[Variable]]]:
    """Return the optimizers that average weights, each with those that it trains: of others it has no average."""
    averaging = [one for one in optimizers_of(model) if getattr(one, "use_ema", False) and not is_wrapper(one)]
    return [
        (optimizer, [weight for weight in model.variables if moving_average(optimizer, weight) is not None])
        for optimizer in averaging
    ]


def is_wrapper(optimizer: Optimizer) -> bool:
    """Return whether another optimizer does the work, as in a LossScaleOptimizer."""
    return hasattr(optimizer, "inner_optimizer")


def build_optimizer(model: Model) -> None:
    """Make the variables of an optimizer of Keras's own that trains all of a built model's, in the strategy's scope."""
    optimizer = model.optimizer
    own = isinstance(optimizer, tf.keras.optimizers.Optimizer) and type(optimizer).__module__.startswith("tf_keras.")
    if own and not is_wrapper(optimizer):
        with tf.name_scope(optimizer.name or "optimizer"):  # as in apply_gradients
            optimizer.build(model.trainable_variables)


def keep_slots(optimizer: Optimizer) -> None:
    """Keep what a legacy optimizer returns as the slot of a split table: all its shards' slots as one.

    It makes that again at each call, and nothing else holds it. So a restore would forget what it has restored.
    """
    get_slot: Callable[[Any, str], Any] = optimizer.get_slot
    kept: dict[tuple[int, str], Any] = {}

    def get_kept_slot(variable: Variable, name: str) -> Variable:
        slot = get_slot(variable, name)
        return kept.setdefault((id(variable), name), slot) if hasattr(slot, "variables") else slot

    optimizer.get_slot = get_kept_slot


def exclude_shards(optimizer: Optimizer) -> None:
    """Leave a split table's shards out of weight decay where it is left out: the optimizer looks for them alone."""
    use: Callable[[Any], bool] = optimizer._use_weight_decay

    def use_weight_decay(variable: Variable) -> bool:
        whole = divided(variable)
        if whole is None or not use(variable):
            return use(variable)
        if optimizer._var_key(whole) in getattr(optimizer, "_exclude_from_weight_decay", ()):
            return False
        patterns = getattr(optimizer, "_exclude_from_weight_decay_names", ())
        return not any(re.search(one, f"{name_of(variable)}:0") for one in patterns)

    object.__setattr__(optimizer, "_use_weight_decay", use_weight_decay)


def clip_whole(optimizer: Optimizer, aggregate: str) -> None:
    """Have `clipnorm` mean a table's gradient: the optimizer would clip each shard's by the norm of that shard's.

    `aggregate` is the method that adds up the replicas' gradients, after which they are clipped.
    """
    add_up: Callable[..., Any] = getattr(optimizer, aggregate)

    def clipped(grads_and_vars: list[tuple[Tensor, Variable]]) -> list[tuple[Tensor, Variable]]:
        return clip_by_whole_norms(list(add_up(grads_and_vars)), optimizer.clipnorm)

    setattr(optimizer, aggregate, clipped)


def clip_by_whole_norms(grads_and_vars: list[tuple[Tensor, Variable]], most: float) -> list[tuple[Tensor, Variable]]:
    """Clip the gradients of each split table's shards to one norm together; the others stay as they are."""
    squares: dict[int, list[Any]] = {}
    for gradient, variable in grads_and_vars:
        if gradient is not None and divided(variable) is not None:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            squares.setdefault(id(divided(variable)), []).append(tf.reduce_sum(tf.square(values)))
    scales = {key: most / tf.maximum(tf.sqrt(tf.add_n(parts)), most) for key, parts in squares.items()}
    return [(scaled(gradient, scales.get(id(divided(variable)))), variable) for gradient, variable in grads_and_vars]


def scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    if gradient is None or scale is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


def forget_children(model: Model) -> None:
    """Have a checkpoint ask the optimizers again what they hold; call it when they hold all of it.

    One that was asked before its first step has kept the answer, in which what that step makes is missing.
    """
    for optimizer in optimizers_of(model):
        if hasattr(optimizer, CHILDREN):
            delattr(optimizer, CHILDREN)


def of_optimizers(names: Collection[str]) -> set[str]:
    """Return those names in a checkpoint that are an optimizer's, whichever attribute of the model it is.

    An optimizer is what has `_iterations`, or of those that Keras calls legacy, `iter` and `decay`.
    """

    def places(counter: str) -> set[str]:
        ending = f"/{counter}/.ATTRIBUTES/VARIABLE_VALUE"
        return {name.removesuffix(ending) for name in names if name.endswith(ending)}

    found = places("_iterations") | (places("iter") & places("decay")) | {"optimizer", "model/optimizer"}
    beginnings = tuple(f"{place}/" for place in found)
    return {name for name in names if name.startswith(beginnings) or "/.OPTIMIZER_SLOT/" in name}


def reject_state_of_shards(checkpointed: Any, what: str) -> None:
    """Raise UserError when a checkpoint of this would hold something of each shard that is no shard of a whole.

    Restored on another number of ps, where there are other shards, it would have no place.
    """
    found = [
        variable.name
        for variable in tf.train.TrackableView(checkpointed).descendants()
        if isinstance(variable, tf.Variable) and PART.search(variable.name) and whole_of(variable) is None
    ]
    if found:
        raise UserError(
            f"{what} keeps {found[0]!r} for one part of a table that is split over the ps: on another number of ps no "
            "checkpoint could be restored. Set partitioner to none, so that tables stay whole, or take another "
            "optimizer (docs/training.md lists those that work)"
        )
