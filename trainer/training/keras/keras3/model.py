"""A model of Keras 3, as a training asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

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
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.training.keras.base import NOT_COMPILED, SPARSE, has_call, named_by_keys
from trainer.training.keras.keras3.building import build, call_with_symbols, features_of, is_built, prepare
from trainer.training.keras.keras3.checkpoint import CheckpointedModel, raw
from trainer.training.keras.keras3.checks import reject_hidden_optimizers, reject_settings, warn_of_whole_tables
from trainer.training.keras.keras3.optimizers import averaged, begin_averages, optimizers_of
from trainer.training.keras.keras3.row_updates import update_by_rows
from trainer.training.keras.keras3.seeds import drawing
from trainer.training.keras.keras3.steps import Step
from trainer.training.measures.outputs import flat
from trainer.training.tables.dynamic.tables import DynamicTables

log = logging.getLogger(__name__)


class Keras3Model:
    """As KerasModel says."""

    library = "keras"
    evaluations = "distributed or inline"

    def __init__(self, model: Model) -> None:
        self.model = model
        self._is_lazy = False
        self._tables: DynamicTables | None = None

    @property
    def base(self) -> type[Model]:
        import keras

        return keras.Model

    @property
    def callbacks(self) -> Any:
        import keras

        return keras.callbacks

    @property
    def variables(self) -> list[Variable]:
        return raw(self.model.variables)

    @property
    def counts(self) -> list[Variable]:
        return [one._iterations._value for _, one in optimizers_of(self.model)]

    @property
    def is_built(self) -> bool:
        return is_built(self.model)

    def check_settings(self, config: Config) -> None:
        reject_settings(config, self.model)

    def prepare(self, *, remote: bool) -> None:
        prepare(self.model)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [one for _, one in optimizers_of(self.model)]

    @property
    def layers(self) -> list[Layer]:
        return list(self.model._flatten_layers(include_self=False))

    def gather_updates(self, config: Config, tables: DynamicTables | None = None) -> None:
        """`build` gathers them, which makes the optimizer's variables."""
        self._is_lazy, self._tables = config.lazy_optimizers, tables
        if tables is not None:
            tables.bind(self.optimizers, own_step=type(self.model).train_step is not self.base.train_step)

    def build(self, element_spec: ElementSpec) -> None:
        build(self.model, element_spec)
        update_by_rows(self.model, lazy=self._is_lazy)
        if self._tables is not None:
            self._tables.train()

    def step(self) -> Callable[[Structure], Structure]:
        if self.model.jit_compile:
            log.warning(NOT_COMPILED, type(self.model).__name__)
        return Step(self.model)

    def test_step(self) -> Callable[..., Structure]:
        own = drawing(self.model.test_step)
        return lambda *batch: flat(own(*batch))

    def check_step(self, step: Traced) -> None:
        begin_averages(self.model)
        reject_hidden_optimizers(self.model, step)
        warn_of_whole_tables(self.model, step)

    def trained(self, *, with_optimizers: bool = True) -> Trackable:
        return CheckpointedModel(self.model, with_optimizers=with_optimizers)

    def averaged(self) -> list[tuple[Optimizer, list[Variable]]]:
        return averaged(self.model)

    def callback_list(self, found: list[Any], **arguments: object) -> Callback:
        import keras

        class Callbacks(keras.callbacks.CallbackList):
            def on_train_batch_end(self, batch: int, logs: object = None) -> None:
                for callback in self.callbacks:
                    callback.on_train_batch_end(batch, logs=logs)

        return Callbacks(found, **arguments)

    def ensure_built(self, element_spec: ElementSpec) -> bool:
        if getattr(self.model, "inputs", None) or not has_call(self):
            return True
        return call_with_symbols(self.model, element_spec) and not is_sparse(element_spec)

    def export(self, path: str, element_spec: ElementSpec) -> None:
        """Export the model; of one that has no inputs of its own Keras would take all types for float32."""
        has_inputs = getattr(self.model, "inputs", None)
        if not has_inputs and is_sparse(element_spec):
            raise UserError("Keras 3 exports sparse and ragged inputs as dense: give the program a serving_signature")
        spec = None if has_inputs else [batches(features_of(element_spec))]
        self.model.export(path, input_signature=spec, verbose=False)


def is_sparse(element_spec: ElementSpec) -> bool:
    """Return whether the features have sparse or ragged parts, which Keras traces as dense ones when it saves."""
    return any(isinstance(one, SPARSE) for one in tf.nest.flatten(features_of(element_spec)))


def batches(spec: ElementSpec) -> ElementSpec:
    """Return the spec of any number of examples, with the names that the data have in a dict."""
    return tf.nest.map_structure(
        lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype, one.name), named_by_keys(spec)
    )
