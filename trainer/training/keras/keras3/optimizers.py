"""The optimizers of a Keras 3 model, and their averages of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.core.contracts import Model, Optimizer, Variable
from trainer.training.keras.keras3.names import leaves_by_name
from trainer.training.keras.keras3.shards import shards_of
from trainer.training.placement import name_of
from trainer.training.updates.rows import own


def optimizers_of(model: Model) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers that are attributes of the model, or in lists and dicts that are, each once by its name."""
    import keras

    found: dict[int, tuple[str, Any]] = {}
    for attribute, value in sorted(vars(model).items()):
        if attribute.startswith("_self_"):  # these are TensorFlow's own
            continue
        for name, one in leaves_by_name(attribute, value):
            if isinstance(one, keras.optimizers.Optimizer) and (id(one) not in found or name == attribute):
                found[id(one)] = (name, one)
    yield from found.values()


def exclude_shards(model: Model, optimizer: Optimizer) -> None:
    """Leave a split variable's shards out of weight decay where it is left out: Keras looks for them by themselves."""
    excluded: set[str] = getattr(optimizer, "_exclude_from_weight_decay", set())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    for one in model.variables:
        first, *more = shards_of(one)
        # Keras looks at the name of TensorFlow's variable.
        if more and (optimizer._var_key(one) in excluded or (pattern and pattern.search(f"{name_of(own(first))}:0"))):
            excluded.update(optimizer._var_key(shard) for shard in (first, *more))


def averaged(model: Model) -> list[tuple[Optimizer, list[Variable]]]:
    """Return the optimizers that average weights, each with those that it trains, in the order of their averages."""
    return [(one, one._trainable_variables) for _, one in optimizers_of(model) if one.use_ema and one.built]


def begin_averages(model: Model) -> None:
    """Give averages of weights the weights to begin with: they are zeros, which Keras's first step replaces.

    All workers do a first step at once, and each would add the whole weights. Call it when a step has been traced,
    which builds the optimizers.
    """
    for optimizer, weights in averaged(model):
        for weight, average in zip(weights, optimizer._model_variables_moving_average, strict=True):
            if average is not None:
                average._value.assign(weight._value)
