"""Trace a new run's export and evaluation before its first step: what can't be done is known at once, not after days.

A model is built as for the export, and all of it is traced; nothing is written. Large variables are reserved and
never filled, so that tables take no memory, and nothing that the trial draws changes what the training draws.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import ElementSpec, Model, Program
from trainer.core.failures import UserError, explain
from trainer.core.program import build_model, program_file
from trainer.core.settings.formats import SOURCE
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.training.data.input import eval_dataset
from trainer.training.exports.export import save_model
from trainer.training.exports.reserved import reserving
from trainer.training.keras.adapters import keras_of
from trainer.training.measures.evaluation_outputs import checked_outputs
from trainer.training.tables.dynamic.served import ServedTables
from trainer.training.tf_internals.saving import tracing_saves
from trainer.training.tf_internals.seeds import kept_seeds

log = logging.getLogger(__name__)
Trackable = tf.__internal__.tracking.Trackable
# What another state of the machine, of files or of the weights' values may change: it proves nothing of the export.
UNSURE = (tf.errors.OpError, OSError, MemoryError)


def try_new_run(
    program: Program, directory: RunDirectory, element_spec: ElementSpec, *, exports: bool, evaluates: bool
) -> None:
    """Trace the export, and the model's own test_step, of a run that has not trained yet; one model serves both.

    Raises UserError that says why the export would fail, or what test_step returns that no evaluation takes.
    """
    if not is_new(directory):
        return
    own, tables = apart_from(program), ServedTables.from_directory(directory)
    try:
        with kept_randomness(), tf.variable_creator_scope(reserving()):
            model = try_export(own, directory, element_spec, tables) if exports else None
            if evaluates:
                try_evaluation(own, model, ServedTables.from_directory(directory) if model is None else tables)
    finally:
        gc.collect()  # layers refer to one another


def try_export(
    program: Program, directory: RunDirectory, element_spec: ElementSpec, tables: ServedTables
) -> Model | None:
    """Do what the export does but for the values; returns the model, None where it is not known whether it can be."""
    began = time.monotonic()
    try:
        with tables.of_layers():
            model = build_model(program)
        with tracing_saves():
            save_model(program, model, str(directory.export), element_spec, tables=tables)
    except UNSURE as error:
        log.warning("it is not known yet whether the model can be exported: %s", explain(error, program_file(program)))
        return None
    except (Exception, SystemExit) as error:  # a program may say sys.exit
        why = str(error) if isinstance(error, UserError) else explain(error, program_file(program))
        has_way = isinstance(error, UserError) or getattr(program, "serving_signature", None) is not None
        way = "" if has_way else ", give the program a serving_signature(model)"
        raise UserError(
            f"the model could not be exported at the end of the run: {why.rstrip('.')}. Correct that{way}, or set "
            "export: false"
        ) from error
    log.info("tried the export in %.1f s", time.monotonic() - began)
    return model


def try_evaluation(program: Program, model: Model | None, tables: ServedTables) -> None:
    """Trace test_step as the evaluator will.

    Trouble but with what it returns proves nothing: the evaluation's files may lie on the evaluator's host alone.
    """
    try:
        with tables.of_layers():
            model = build_model(program) if model is None else model
            spec = eval_dataset(program).element_spec
            keras_of(model).ensure_built(spec)
            step = tf.function(keras_of(model).test_step()).get_concrete_function(spec)
    except Exception as error:
        log.warning("it is not known yet whether the model can be evaluated: %s", explain(error, program_file(program)))
        return
    checked_outputs(f"{type(program).__name__}'s model", model, step)


def is_new(directory: RunDirectory) -> bool:
    """Return whether a run has no checkpoint of its own training: a run that goes on was tried at its beginning."""
    newest = directory.catalogue.newest()
    if not newest:
        return True
    begun_from = SOURCE.fullmatch(str((read_record(directory.settings) or {}).get("from", "")))
    return begun_from is not None and int(begun_from["step"]) == newest


def apart_from(program: Program) -> Program:
    """Return a copy of a program: what build_model keeps in it is not the training's."""
    own = copy.copy(program)
    package, copies = type(program).__module__.partition(".")[0], {id(program): own}
    for name, value in getattr(own, "__dict__", {}).items():
        vars(own)[name] = copy_own(value, package, copies)
    return own


def copy_own(value: Any, package: str, copies: dict[int, Any]) -> Any:
    """Return a copy of a list, a dict or an object of this package, with copies of those in it; anything else as it is.

    What TensorFlow tracks, such as a layer, stays as it is.
    """
    is_own = type(value).__module__.partition(".")[0] == package
    inside = getattr(value, "__dict__", None) if is_own else value
    if id(value) in copies or isinstance(value, Trackable) or not isinstance(inside, dict | list):
        return copies.get(id(value), value)
    try:
        one = copies[id(value)] = copy.copy(value)
    except Exception:  # it may hold what can't be copied
        return value
    if one is not value:  # as an Enum's member is
        inside = vars(one) if is_own else one
        for key, each in inside.items() if isinstance(inside, dict) else enumerate(inside):
            inside[key] = copy_own(each, package, copies)
    return one


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Have what is drawn meanwhile leave all random states as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with kept_seeds():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
