"""What a training asks of a program's model, whichever Keras it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from trainer.core.contracts import (
    Callback,
    ElementSpec,
    Layer,
    Model,
    Optimizer,
    Structure,
    Traced,
    Trackable,
    Variable,
)
from trainer.core.settings.config import Config
from trainer.training.tables.dynamic.tables import DynamicTables

SPARSE = tf.RaggedTensorSpec | tf.SparseTensorSpec
NOT_COMPILED = (
    "%s is compiled with jit_compile=True, which has no effect here: XLA compiles a step of one device with its "
    "variables. A tf.function with jit_compile of its own may be in it"
)


class KerasModel(Protocol):
    """A model, and how its Keras has it trained. `keras_of` chooses between the two."""

    model: Model
    library: str
    """How a program names the library."""
    evaluations: str
    """The settings of `evaluation` with which the coordinator evaluates it."""

    @property
    def base(self) -> type[Model]:
        """The library's own class Model."""

    @property
    def callbacks(self) -> Any:
        """The library's module of callbacks."""

    @property
    def variables(self) -> list[Variable]:
        """The model's variables, as TensorFlow has them."""

    @property
    def counts(self) -> list[Variable]:
        """The optimizers' counts of steps, where an update adds to them as to the weights."""

    @property
    def is_built(self) -> bool:
        """Whether the model needs no data to be built."""

    def check_settings(self, config: Config) -> None:
        """Raise UserError for a setting that the model can't be trained with."""

    def prepare(self, *, remote: bool) -> None:
        """Make a model that was just built fit for training; call it in the strategy's scope, before the first trace.

        `remote` says that its variables lie on the ps. Raises UserError for what would be wrong there.
        """

    @property
    def optimizers(self) -> list[Optimizer]:
        """The model's optimizers, each once."""

    @property
    def layers(self) -> list[Layer]:
        """The model's layers, those within others too."""

    def gather_updates(self, config: Config, tables: DynamicTables | None = None) -> None:
        """Have workers update rows, of dynamic tables too, and variables in one act each.

        Call it before the first trace.
        """

    def build(self, element_spec: ElementSpec) -> None:
        """Make the variables that must be present before the first trace; call it in the strategy's scope.

        `element_spec` is of the training data.
        """

    def step(self) -> Callable[[Structure], Structure]:
        """Return the model's own train_step, for what is traced. Trace it again while it has `found_more`."""

    def test_step(self) -> Callable[..., Structure]:
        """Return the model's own test_step, for what is traced."""

    def check_step(self, step: Traced) -> None:
        """Raise UserError where a traced step would train the model wrong; call it in the strategy's scope.

        Tracing makes the variables that optimizers still lack: what they begin with is set here.
        """

    def trained(self, *, with_optimizers: bool = True) -> Trackable:
        """Return what checkpoints hold of the model."""

    def averaged(self) -> list[tuple[Optimizer, list[Variable]]]:
        """Return the optimizers that average weights, which are to be taken at the end, each with its weights."""

    def callback_list(self, found: list[Any], **arguments: object) -> Callback:
        """Return the library's list of callbacks, which leaves a call's outputs as they are, until one is read."""

    def ensure_built(self, element_spec: ElementSpec) -> bool:
        """Build a model that only its first input builds, with symbols of the data.

        Returns whether its call takes them. What a train_step of its own calls is built by that, as in training: a
        generator is given noise, not the data.
        """

    def export(self, path: str, element_spec: ElementSpec) -> None:
        """Write the model's call as a SavedModel."""


def named_by_keys(spec: ElementSpec, name: str | None = None) -> ElementSpec:
    """Return the spec of data with the names that its parts have in dicts, by which an export asks for them."""
    if isinstance(spec, dict):
        return {key: named_by_keys(one, f"{name}_{key}" if name else str(key)) for key, one in spec.items()}
    if tf.nest.is_nested(spec):
        return tf.nest.map_structure(named_by_keys, spec)
    return tf.TensorSpec(spec.shape, spec.dtype, name) if isinstance(spec, tf.TensorSpec) else spec


def has_call(keras: KerasModel) -> bool:
    """Return whether a model computes something from its input by itself; one that only trains others does not."""
    return type(keras.model).call is not keras.base.call


def has_test_step(keras: KerasModel) -> bool:
    """Return whether a model has a test_step of its own."""
    return type(keras.model).test_step is not keras.base.test_step


def is_of(method: object, function: object) -> bool:
    """Return whether a model's method is this function of its class: a program may set another on the model."""
    return getattr(method, "__func__", None) is function


def shapes_of_metrics(
    model: Model, base: type[Model], metrics: Any, outputs: Sequence[Any] | None, element_spec: ElementSpec
) -> tuple[Any, tf.TensorSpec] | None:
    """Return the symbol of a model's only output and the spec of its labels; None where one is missing.

    By their shapes its `metrics` can be built before the first step, where they lack that, and `base` updates them.
    """
    labels = element_spec[1] if isinstance(element_spec, tuple) and len(element_spec) > 1 else None
    lacks_them = metrics is not None and not metrics.built and is_of(model.compute_metrics, base.compute_metrics)
    if not lacks_them or not outputs or len(outputs) > 1 or not isinstance(labels, tf.TensorSpec):
        return None
    shape = tf.TensorShape(outputs[0].shape)
    known = labels.shape.rank and shape.rank and None not in (labels.shape[-1], shape[-1])
    return (outputs[0], labels) if known else None
