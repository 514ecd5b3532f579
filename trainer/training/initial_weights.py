"""The weights that a new run begins with: those of another run's checkpoint, of a Keras file or of a SavedModel.

They are read once. The checkpoint of step 0 holds them from then on, so that no recovery reads them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from trainer.core.contracts import ElementSpec, Model, Program, Variable
from trainer.core.failures import UserError, first_line, is_the_programs
from trainer.core.program import build_model
from trainer.core.settings.config import Config
from trainer.core.settings.formats import SOURCE
from trainer.core.variables import flatten
from trainer.run.directory import RunDirectory
from trainer.training.handover import walk
from trainer.training.keras.adapters import keras_of
from trainer.training.placement import name_of
from trainer.training.steps.runner import StepRunner
from trainer.training.tables.row_restores import open_checkpoint
from trainer.training.tf_internals.variables import full_names, moving_average
from trainer.training.updates.optimizers import averaged, of_optimizers

log = logging.getLogger(__name__)
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
EXPORTED = re.compile(r"/variables/(\d+)")
# A split variable has no other name in a checkpoint.
NAMELESS = re.compile(r"ShardedVariable(_\d+)?")
# What is no weight of a model, beside what optimizers keep: metrics, and a counter of tf.train.Checkpoint.
OTHERS = re.compile(r"/keras_api/metrics/|/save_counter/")
MAX_NAMES = 6


@dataclasses.dataclass(frozen=True)
class Stored:
    """A variable that a source has."""

    name: str
    """As in the model that it was saved from, without ":0"; nothing where the source has none."""
    place: str
    """The way to it from the model, such as "/layer_with_weights-0/kernel"."""
    shape: tuple[int, ...]
    read: Callable[[], Any]


def read_initial_weights(config: Config, program: Program, runner: StepRunner) -> str:
    """Give the runner's model the weights that `initial_weights` names; returns what was read and what was not.

    A variable gets the stored one of its name and shape, else of its place in the model and its shape. What has
    neither keeps its own values. Raises UserError when there is no such source, or nothing of it fits.
    """
    source, model = config.initial_weights, runner.model
    stored = open_source(config, program, runner.element_spec)
    weights = weights_of(model)
    names = [name_of(next(flatten([weight]))) for _, weight in weights]
    by_name = {each.name: each for each in stored if [other.name for other in stored].count(each.name) == 1}
    by_place = {each.place: each for each in stored}
    taken: dict[int, Stored] = {}
    # What has the name of one weight must not be another's by its place.
    for number, name in enumerate(names):
        if name and names.count(name) == 1 and fits(found := by_name.get(name), weights[number][1]):
            taken[number] = found
    for number, (place, weight) in enumerate(weights):
        if number not in taken and fits(found := by_place.get(place), weight) and found not in taken.values():
            taken[number] = found
    for number, found in taken.items():
        with reading(source):
            value = found.read()
        weights[number][1].assign(value)
    used = list(taken.values())
    placed = [
        f"{names[number]} from {each.name}" for number, each in taken.items() if each.name not in ("", names[number])
    ]
    kept = [
        f"{names[number]} {tuple(weights[number][1].shape)}" for number in range(len(weights)) if number not in taken
    ]
    left = [f"{each.name or each.place} {each.shape}" for each in stored if each not in used]
    report = f"initial weights: {len(used)} of {len(weights)} variables read from {source}"
    for what, which in (("by their place", placed), ("not there", kept), ("not used", left)):
        report += f"; {what}: {listed(which)}" if which else ""
    if not used:
        raise UserError(f"{report}. Nothing of it fits: name weights of this model, or leave initial_weights out")
    restart_averages(model)
    log.log(logging.WARNING if kept or placed else logging.INFO, "%s", report)
    return report


def fits(stored: Stored | None, weight: Variable) -> TypeGuard[Stored]:
    return stored is not None and stored.shape == tuple(weight.shape)


def listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def weights_of(model: Model) -> list[tuple[str, Variable]]:
    """Return the model's weights with the way to each, a split one as a whole; none of its optimizer or metrics."""
    wanted = {id(weight) for weight in model.weights}
    found = []
    for place, value in walk(model):
        shards = getattr(value, "variables", None) if hasattr(value, "assign") else None
        if id(value) in wanted or (shards and all(id(shard) in wanted for shard in shards)):
            found.append((place, value))
    whole = {id(shard) for _, value in found for shard in getattr(value, "variables", ())}
    return [(place, value) for place, value in found if id(value) not in whole]


def restart_averages(model: Model) -> None:
    """Have the averages of the weights begin with the weights that were read."""
    for optimizer, weights in averaged(model):
        for weight in weights:
            moving_average(optimizer, weight).assign(weight)


def open_source(config: Config, program: Program, element_spec: ElementSpec) -> list[Stored]:
    """Return the variables that the source has; raises UserError where it is none."""
    source = config.initial_weights
    path = Path(source)
    with reading(source):
        if found := SOURCE.fullmatch(source):
            directory = RunDirectory(config.shared_dir, found["run"])
            step = int(found["step"])
            if step not in directory.catalogue.steps():
                steps = ", ".join(map(str, directory.catalogue.steps())) or "none"
                raise UserError(f"initial_weights: run {found['run']} has no checkpoint of step {step}; it has {steps}")
            return of_checkpoint(directory.catalogue.prefix(step))
        if (path / "saved_model.pb").is_file():
            stored = of_checkpoint(str(path / "variables" / "variables"))
            return of_export(stored, build_whole(program, element_spec))
        if path.suffix in (".h5", ".keras") and path.is_file():
            return of_keras(path, build_whole(program, element_spec))
        if Path(f"{source}.index").is_file():
            return of_checkpoint(source)
    raise UserError(
        f"initial_weights: there is nothing to read at {source}: name a checkpoint as RUN@STEP or by its path without "
        "an ending, a file .h5, .weights.h5 or .keras, or a directory with saved_model.pb, that this host can see"
    )


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Raise UserError where the source is damaged or gone; what the storage has failed is tried again."""
    try:
        yield
    except (OSError, ValueError, IndexError, tf.errors.OpError) as error:
        if not is_the_programs(error):
            raise
        raise UserError(
            f"initial_weights: {source} can't be read: {first_line(error)}: name another source, or correct this one"
        ) from error


def of_checkpoint(prefix: str) -> list[Stored]:
    """Return a model's variables in a checkpoint of TensorFlow's, whose root is the model or has it as `model`."""
    reader = open_checkpoint(prefix)
    shapes: Mapping[str, list[int]] = reader.get_variable_to_shape_map()
    names = full_names(reader)
    others = of_optimizers(shapes)
    root = "model/" if any(key.startswith("model/") for key in shapes) else ""
    return [
        Stored(
            name=NAMELESS.sub("", names.get(key, "")),
            place="/" + key.removeprefix(root).removesuffix(VALUE),
            shape=tuple(shape),
            read=lambda key=key: reader.get_tensor(key),  # type: ignore[misc]
        )
        for key, shape in sorted(shapes.items())
        if key.startswith(root) and key.endswith(VALUE) and key not in others and not OTHERS.search(f"/{key}")
    ]


def of_export(stored: list[Stored], model: Model) -> list[Stored]:
    """Give the variables that an exported model only numbers the places of those of the whole model."""
    places, weights = {id(weight): place for place, weight in weights_of(model)}, list(flatten(model.weights))
    found = []
    for each in stored:
        number = EXPORTED.fullmatch(each.place)
        weight = weights[int(number[1])] if number and int(number[1]) < len(weights) else None
        is_it = weight is not None and tuple(weight.shape) == each.shape
        found.append(dataclasses.replace(each, name="", place=places[id(weight)]) if is_it else each)
    return found


def of_keras(path: Path, model: Model) -> list[Stored]:
    """Return the variables of a Keras file, as the whole model has them that reads it."""
    weights = list(flatten(model.weights))
    before = [weight.numpy() for weight in weights]
    try:
        model.load_weights(str(path))
        missing: set[int] = set()
    except ValueError:
        if path.suffix == ".keras" or path.name.endswith(".weights.h5"):
            raise
        model.load_weights(str(path), by_name=True, skip_mismatch=True)
        # It does not say what it leaves out: that has its own values still.
        same = (np.array_equal(old, new) for old, new in zip(before, weights, strict=True))
        missing = {number for number, is_same in enumerate(same) if is_same}
    places = {id(weight): place for place, weight in weights_of(model)}
    return [
        Stored("", places[id(weight)], tuple(weight.shape), weight.numpy)
        for number, weight in enumerate(weights)
        if number not in missing
    ]


def build_whole(program: Program, element_spec: ElementSpec) -> Model:
    """Build the program's model outside any strategy."""
    model = build_model(program)
    keras_of(model).ensure_built(element_spec)
    return model
