"""Dynamic tables that a program's layers ask for themselves, as trainer/examples/dynamic_embedding.py has them.

Such a layer has `dynamic_table`, what the setting would say of it. It is found by building the model once, as the trial
of the export does; the settings then have it as if they had named the layer.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import tensorflow as tf

from trainer.core.config import Config, ConfigError
from trainer.core.contracts import Program
from trainer.core.failures import UserError
from trainer.core.program import build_model
from trainer.training.export_trial import apart_from, kept_randomness
from trainer.training.keras.adapters import keras_of
from trainer.training.reserved import reserving

log = logging.getLogger(__name__)
DECLARED = "dynamic_table"


def name_declared_tables(config: Config, program: Program) -> Config:
    """Return the settings with the tables of layers that ask for one; a layer that they name has what they say.

    Call it in no strategy's scope. Raises UserError for what can't be with dynamic tables.
    """
    if not config.traits.remote or not some_ask():
        return config
    with kept_randomness(), tf.variable_creator_scope(reserving()):
        layers = keras_of(build_model(apart_from(program))).layers
        declared = {layer.name: getattr(layer, DECLARED) for layer in layers if hasattr(layer, DECLARED)}
    if not declared.keys() - config.dynamic_tables.keys():
        return config
    try:
        config = config.replace(dynamic_tables={**declared, **config.dynamic_tables})
    except ConfigError as error:
        raise UserError(f"{error} (the program's layers {', '.join(declared)} ask for dynamic tables)") from error
    log.info("layers that ask for dynamic tables: %s", ", ".join(declared))
    return config


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
