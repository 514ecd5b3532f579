"""The finished model as a SavedModel: unsharded, and servable without the program's code."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.program import build_model
from trainer.run.checkpoints import read_model
from trainer.run.directory import RunDirectory
from trainer.run.records import sync, sync_tree

log = logging.getLogger(__name__)


def export_model(program: Any, directory: RunDirectory, step: int, element_spec: Any) -> str:
    """Write the checkpoint's model to the run's export directory; returns that directory, which is on disk then.

    The model is built again outside any strategy, so that its variables are whole. It keeps the layers that prepare
    its input. `serving_signature` of the program, where there is one, says what the SavedModel offers; without it the
    model's own call does, under the name serving_default.
    """
    model = build_model(program)
    ensure_built(model, element_spec)
    read_model(directory, model, step)
    temporary = directory.export.with_name(".export.new")
    shutil.rmtree(temporary, ignore_errors=True)
    signature = getattr(program, "serving_signature", None)
    if signature is None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a page of tensor numbers
            model.export(str(temporary))
    else:
        tf.saved_model.save(model, str(temporary), signatures=signature(model))
    sync_tree(temporary)
    replace_directory(temporary, directory.export)
    log.info("exported the model of step %d to %s", step, directory.export)
    return str(directory.export)


def ensure_built(model: Any, element_spec: Any) -> None:
    """Build a model that only its first input builds, with symbols of what the data consists of."""
    if getattr(model, "inputs", None):
        return
    features = element_spec[0] if isinstance(element_spec, tuple) else element_spec
    model(tf.nest.map_structure(lambda spec: tf.keras.Input(type_spec=spec), features))


def replace_directory(new: Path, target: Path) -> None:
    """Move a directory to its place; the old one is gone only when the new one is there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
