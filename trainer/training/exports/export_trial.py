"""Trace a new run's export before its first step: what can't be exported is known at once, and not after days.

The model is built as for the export, and all of it is traced; nothing is written. Large variables are reserved and
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

from trainer.core.contracts import ElementSpec, Program
from trainer.core.failures import UserError, explain
from trainer.core.program import build_model, program_file
from trainer.core.settings.formats import SOURCE
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record
from trainer.training.exports.export import save_model
from trainer.training.exports.reserved import reserving
from trainer.training.tables.dynamic.served import ServedTables
from trainer.training.tf_internals.saving import tracing_saves
from trainer.training.tf_internals.seeds import kept_seeds

log = logging.getLogger(__name__)
Trackable = tf.__internal__.tracking.Trackable
# What another state of the machine, of files or of the weights' values may change: it proves nothing of the export.
UNSURE = (tf.errors.OpError, OSError, MemoryError)


def try_export(program: Program, directory: RunDirectory, element_spec: ElementSpec) -> None:
    """Trace the export of a run that has not trained yet; raises UserError that says why it would fail."""
    if not is_new(directory):
        return
    began = time.monotonic()
    try:
        trace_export(program, directory, element_spec)
    except UNSURE as error:
        log.warning("it is not known yet whether the model can be exported: %s", explain(error, program_file(program)))
    except (Exception, SystemExit) as error:  # a program may say sys.exit
        why = str(error) if isinstance(error, UserError) else explain(error, program_file(program))
        has_way = isinstance(error, UserError) or getattr(program, "serving_signature", None) is not None
        way = "" if has_way else ", give the program a serving_signature(model)"
        raise UserError(
            f"the model could not be exported at the end of the run: {why.rstrip('.')}. Correct that{way}, or set "
            "export: false"
        ) from error
    finally:
        gc.collect()  # layers refer to one another
    log.info("tried the export in %.1f s", time.monotonic() - began)


def is_new(directory: RunDirectory) -> bool:
    """Return whether a run has no checkpoint of its own training: a run that goes on was tried at its beginning."""
    newest = directory.catalogue.newest()
    if not newest:
        return True
    begun_from = SOURCE.fullmatch(str((read_record(directory.settings) or {}).get("from", "")))
    return begun_from is not None and int(begun_from["step"]) == newest


def trace_export(program: Program, directory: RunDirectory, element_spec: ElementSpec) -> None:
    """Do what the export does but for the values; raises what goes wrong."""
    own = apart_from(program)
    with kept_randomness(), tf.variable_creator_scope(reserving()), tracing_saves():
        tables = ServedTables.from_directory(directory)
        with tables.of_layers():
            model = build_model(own)
        save_model(own, model, str(directory.export), element_spec, tables=tables)


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
