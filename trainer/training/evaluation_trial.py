"""Look at a model's own test_step before the first step: what the evaluator refuses is known at once."""

from __future__ import annotations

import gc
import logging

import tensorflow as tf

from trainer.core.contracts import Program
from trainer.core.failures import explain
from trainer.core.program import build_model, program_file
from trainer.run.directory import RunDirectory
from trainer.training.data.input import eval_dataset
from trainer.training.exports.export_trial import apart_from, is_new, kept_randomness
from trainer.training.exports.reserved import reserving
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.evaluation_outputs import checked_outputs
from trainer.training.tables.dynamic.served import ServedTables

log = logging.getLogger(__name__)


def try_evaluation(program: Program, directory: RunDirectory) -> None:
    """Trace a new run's test_step as the evaluator will; raises UserError for what it returns and no evaluation takes.

    Other trouble proves nothing: the evaluation's files may lie on the evaluator's host alone.
    """
    if not is_new(directory):
        return
    own = apart_from(program)
    try:
        tables = ServedTables.from_directory(directory)
        with kept_randomness(), tf.variable_creator_scope(reserving()), tables.of_layers():
            model, spec = build_model(own), eval_dataset(own).element_spec
            keras_of(model).ensure_built(spec)
            step = tf.function(keras_of(model).test_step()).get_concrete_function(spec)
    except Exception as error:
        log.warning("it is not known yet whether the model can be evaluated: %s", explain(error, program_file(program)))
        return
    try:
        checked_outputs(f"{type(program).__name__}'s model", model, step)
    finally:
        gc.collect()  # layers refer to one another
