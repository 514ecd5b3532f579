"""What of a Keras 3 model can't be trained on parameter servers, each with its fix."""

from __future__ import annotations

import logging

import tensorflow as tf

from trainer.core.contracts import Model, Traced
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.core.sizes import size
from trainer.core.variables import bytes_of, flatten
from trainer.training.keras.keras3.names import named
from trainer.training.keras.keras3.optimizers import optimizers_of
from trainer.training.keras.keras3.shards import shards_of
from trainer.training.updates.optimizers import overwrites_weights

log = logging.getLogger(__name__)
# What they compute of a table's shard is no part of what they compute of the table.
WHOLE_TABLES = ("Adafactor", "Lamb", "Muon")
TABLE_BYTES = 4 * 1024 * 1024  # from here on a read at each step takes time that is felt on a network
PASSED_ON = ("Identity", "Cast", "ConcatV2")
NOT_SPLIT = "Set partitioner to none, so that tables stay whole, or"


def reject_settings(config: Config, model: Model) -> None:
    """Raise UserError for a setting that a model of Keras 3 can't be trained with."""
    refused = (
        (f"strategy: {config.strategy}", not config.traits.remote, "they train under parameter_server alone"),
        ("api: fit", config.api == "fit", "its fit can't; set api to custom_loop, which calls the same callbacks"),
        (
            "export",
            config.export and bool(config.dynamic_tables),
            "a model of it with dynamic tables is not exported; set export: false",
        ),
        ("evaluation: exact", config.evaluation == "exact", "take distributed, which gives each example once as well"),
        ("initial_weights", config.initial_weights != "", "call model.load_weights in build_model instead"),
    )
    for setting, given, why in refused:
        if given:
            raise UserError(
                f"{setting} is not for models of Keras 3, as {type(model).__name__} is: {why}. Or build the model with "
                "tf.keras (docs/keras3.md)"
            )


def reject_model(model: Model) -> None:
    """Raise UserError where workers that train beside each other would be wrong about the model."""
    import keras

    name = type(model).__name__
    if keras.config.backend() != "tensorflow":
        raise UserError(f"Keras 3 runs on {keras.config.backend()}: set KERAS_BACKEND to tensorflow, or leave it out")
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise UserError(
                f"the layer {layer.name!r} is stateful: it would go on from a batch of another worker. Leave stateful "
                "out, and give it sequences as they are to be seen"
            )
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise UserError(
                f"the layer {layer.name!r} is a SpectralNormalization, which replaces weights at each step: workers "
                "would overwrite each other's. Leave it out"
            )
    for attribute, optimizer in optimizers_of(model):
        kind = f"{name}.{attribute} is {type(optimizer).__name__}"
        if optimizer._distribution_strategy is not tf.distribute.get_strategy():
            raise UserError(f"{kind}, made outside of build_model, so that it is not on the ps: make it in build_model")
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise UserError(f"{kind} (mixed_float16), whose scale all workers would change: take mixed_bfloat16")
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise UserError(f"{kind}, which is not tried on the ps: take one optimizer, or a train_step with several")
        if optimizer.gradient_accumulation_steps:
            raise UserError(
                f"{kind} with gradient_accumulation_steps: gradients would lie on the ps, where workers overwrite each "
                "other's. Add them up within a step (docs/programs.md)"
            )
        if overwrites_weights(optimizer):
            raise UserError(
                f"{kind} with ema_overwrite_frequency: each worker would overwrite what the others have trained. Set "
                "it to None: averages are taken for weights at the end"
            )
        if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
            raise UserError(f"{kind}, which replaces the weights at each step: workers would overwrite each other's")


def reject_splits(model: Model) -> None:
    """Raise UserError where a split variable would be trained otherwise than a whole one."""
    split = [one for one in model.variables if len(shards_of(one)) > 1]
    if not split:
        return
    for one in split:
        if one.constraint is not None:
            raise UserError(f"{one.path} has a constraint and is split over the ps. {NOT_SPLIT} leave it out")
    for attribute, optimizer in optimizers_of(model):
        if any(kind.__name__ in WHOLE_TABLES for kind in type(optimizer).__mro__):
            raise UserError(
                f"{attribute} is {type(optimizer).__name__}, which looks at a whole table, and {split[0].path} is "
                f"split over the ps. {NOT_SPLIT} take another optimizer (docs/keras3.md lists those that work)"
            )
        if optimizer.clipnorm:
            raise UserError(
                f"{attribute} has clipnorm, and {split[0].path} is split over the ps: each part would be clipped by "
                f"itself. {NOT_SPLIT} take global_clipnorm"
            )


def reject_hidden_optimizers(model: Model, step: Traced) -> None:
    """Raise UserError where a traced step trains with an optimizer that no checkpoint would have."""
    known = {id(one) for _, one in optimizers_of(model)}
    used = {id(capture) for capture in step.graph.external_captures}
    for layer in model._flatten_layers(include_self=False):
        for attribute, one in optimizers_of(layer):
            if id(one) not in known and id(one._iterations._value.handle) in used:
                name = type(model).__name__
                raise UserError(
                    f"{name}.train_step trains with {layer.name}.{attribute}, which is of a model within it: no "
                    f"checkpoint would have its state. Make it an attribute of {name} as well"
                )


def warn_of_whole_tables(model: Model, step: Traced) -> None:
    """Say which tables a traced step reads as a whole to look rows up: what a layer of the program's own may do."""
    names = {
        id(part.handle): (name, bytes_of(one._value))
        for name, one in named(model).items()
        for part in flatten([one._value])
    }
    handles = {inner.name: names[id(outer)] for outer, inner in step.graph.captures if id(outer) in names}
    warned = set()
    for operation in step.graph.get_operations():
        todo = [operation.inputs[0]] if operation.type == "GatherV2" else []
        while todo:
            source = todo.pop().op
            if source.type in PASSED_ON:
                todo += source.inputs
            elif source.type == "ReadVariableOp" and source.inputs[0].name in handles:
                warned.add(handles[source.inputs[0].name])
    for name, size_of in sorted(warned):
        if size_of >= TABLE_BYTES:
            log.warning(
                "each step reads all of %s (%s) to look rows up: use keras.layers.Embedding, or its own call in a "
                "class of yours, which ask for the batch's rows",
                name,
                size(size_of),
            )
