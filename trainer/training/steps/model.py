"""The program's model in the strategy's scope."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from trainer.core.contracts import Model, Program, Strategy, Variable
from trainer.core.program import build_model, reject_own_function
from trainer.training.keras.adapters import keras_of
from trainer.training.keras.keras3.checkpoint import read_whole_slots
from trainer.training.keras.keras3.seeds import forget_seeds
from trainer.training.keras.keras3.shards import train_shards
from trainer.training.outside import reject_outside_model
from trainer.training.tables.dynamic.tables import DynamicTables
from trainer.training.tables.precision import cast_split_variables, no_loss_scaling
from trainer.training.tables.whole_weights import building_whole
from trainer.training.tf_internals.saving import keeping_default_graph

RESETS = "have `metrics` list what it resets, and keep anything else in a variable of the model that is no metric's"


def make_model(program: Program, strategy: Strategy, tables: DynamicTables | None = None) -> tuple[Model, Variable]:
    """Build the model with its dynamic tables, and the trainer's own step counter, in the strategy's scope."""
    cast_split_variables()
    with strategy.scope(), no_loss_scaling():
        forget_seeds()
        train_shards()
        read_whole_slots()
        with building_whole(), keeping_default_graph(), tables.of_layers() if tables else contextlib.nullcontext():
            model = build_model(program)
        remote = isinstance(strategy, tf.distribute.ParameterServerStrategy)
        if remote:
            reject_outside_model(program, model)
            reject_own_function(program, model, "reset_metrics", RESETS)
        keras_of(model).prepare(remote=remote)
        once = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return model, tf.Variable(0, dtype=tf.int64, trainable=False, name="step", aggregation=once)
