"""Dynamic tables that a program's layers ask for themselves, as trainer/examples/dynamic_embedding.py has them.

Such a layer has `dynamic_table`, what the setting would say of it. It is found by building the model once, as the trial
of the export does; the settings then have it as if they had named the layer.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Layer, Program
from trainer.core.failures import UserError
from trainer.core.program import build_model
from trainer.core.settings.config import Config, ConfigError
from trainer.training.exports.reserved import reserving
from trainer.training.exports.trial import apart_from, kept_randomness
from trainer.training.keras.adapters import keras_of
from trainer.training.outside import places

log = logging.getLogger(__name__)
DECLARED = "dynamic_table"
COUNTED = re.compile(r"_\d+$")


def name_declared_tables(config: Config, program: Program) -> Config:
    """Return the settings with the tables of layers that ask for one; a layer that they name has what they say.

    Call it in no strategy's scope. Raises UserError for what can't be with dynamic tables.
    """
    if not config.traits.remote or not some_ask():
        return config
    made_before = [
        (f"{owner}.{name}", value)
        for owner, place in places(program, program)
        for name, value in list(place.items())
        if hasattr(type(value), DECLARED)
    ]
    with kept_randomness(), tf.variable_creator_scope(reserving()):
        layers = keras_of(build_model(apart_from(program))).layers
        asking = [layer for layer in layers if hasattr(layer, DECLARED)]
    reject_outside_layers(made_before, asking)
    declared = {layer.name: getattr(layer, DECLARED) for layer in asking}
    if not declared.keys() - config.dynamic_tables.keys():
        return config
    try:
        config = config.replace(dynamic_tables={**declared, **config.dynamic_tables})
    except ConfigError as error:
        raise UserError(f"{error} (the program's layers {', '.join(declared)} ask for dynamic tables)") from error
    log.info("layers that ask for dynamic tables: %s", ", ".join(declared))
    return config


def reject_outside_layers(made_before: Iterable[tuple[str, object]], layers: Sequence[Layer]) -> None:
    """Raise UserError where a layer that asks for a table was made before build_model: it is built once."""
    for place, value in made_before:
        if any(value is layer for layer in layers):
            raise UserError(
                f"{place}: this layer asks for a dynamic table, and was made before build_model was called: make it in "
                "build_model, with a name of its own"
            )


def reject_undeclared(layers: Iterable[Layer], made: Collection[str], known: Collection[str]) -> None:
    """Raise UserError where a layer asks for a table, and none was made: it would train a fixed one, of hashed ids.

    `layers` are all of the model's, once they are built, `made` those that have a dynamic table, and `known` those that
    the settings name.
    """
    numbered = {COUNTED.sub("", name) for name in known if name not in made}
    for layer in layers:
        if not hasattr(layer, DECLARED) or layer.name in made:
            continue
        what = f"the layer {layer.name!r} asks for a dynamic table, and"
        if layer.name in known:
            raise UserError(
                f"{what} the step does not build it: call it where the model is called, and have each call of "
                "build_model make a layer of its own"
            )
        if COUNTED.sub("", layer.name) in numbered:
            raise UserError(f"{what} had another name when the model was built before: give it the same each time")
        raise UserError(
            f"{what} that was not known before the training: its class was imported within build_model, or it is made "
            "when the model is first called, or as a global. Import its class where the program's module begins, and "
            f"make it in build_model; or name it in dynamic_tables ({{{layer.name}: {{capacity: ...}}}})"
        )


def some_ask() -> bool:
    """Return whether there is any class of layers that may ask for a table."""
    kinds: list[Any] = [tf.keras.layers.Embedding]
    if "keras" in sys.modules:
        kinds.append(sys.modules["keras"].layers.Embedding)
    while kinds:
        kind = kinds.pop()
        if hasattr(kind, DECLARED):
            return True
        kinds += kind.__subclasses__()
    return False
