"""A model of tf_keras (Keras 2), as a training asks for it."""

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
from trainer.core.settings.config import Config
from trainer.training.exports.export_tables import UNTRACKED, track_tables
from trainer.training.keras.base import NOT_COMPILED, SPARSE, has_call, named_by_keys, shapes_of_metrics
from trainer.training.tables.dynamic.tables import DynamicTables
from trainer.training.tables.row_updates import has_keras_step, update_by_rows
from trainer.training.updates.constraints import reject_split_constraints
from trainer.training.updates.one_update import gather
from trainer.training.updates.optimizers import (
    averaged,
    build_optimizer,
    forget_children,
    is_wrapper,
    optimizers_of,
    reject_state_of_shards,
    share_among_workers,
    treat_as_whole,
)

log = logging.getLogger(__name__)
MEANS = "_psfleet_means"


class Keras2Model:
    """As KerasModel says."""

    library = "tf.keras"
    evaluations = "exact, distributed or inline"
    base = tf.keras.Model
    callbacks = tf.keras.callbacks
    is_built = True  # what it lacks, the first trace makes

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def variables(self) -> list[Variable]:
        return list(self.model.variables)

    @property
    def counts(self) -> list[Variable]:
        return []

    def check_settings(self, config: Config) -> None:
        """Each setting is for tf_keras."""

    def prepare(self, *, remote: bool) -> None:
        let_losses_be_means()
        respect_compiled(self.model)
        treat_as_whole(self.model)
        if remote:
            share_among_workers(self.model)
            reject_split_constraints(self.model)

    @property
    def optimizers(self) -> list[Optimizer]:
        return optimizers_of(self.model)

    @property
    def layers(self) -> list[Layer]:
        return [one for one in self.model.submodules if isinstance(one, tf.keras.layers.Layer)]

    def gather_updates(self, config: Config, tables: DynamicTables | None = None) -> None:
        own = [one for one in self.optimizers if not is_wrapper(one)]
        if tables is not None:
            tables.bind(own, own_step=type(self.model).train_step is not tf.keras.Model.train_step)
        for optimizer in own:
            gather(optimizer)
        update_by_rows(self.model, lazy=config.lazy_optimizers)
        if tables is not None:
            tables.train()

    def build(self, element_spec: ElementSpec) -> None:
        """Make what Keras's own step would make in its first trace, which TensorFlow drops then; else that does so."""
        model = self.model
        if element_spec is None or not has_keras_step(model) or unbuilt(model):
            return
        build_optimizer(model)
        outputs = None if isinstance(getattr(model, "output", None), dict) else model.outputs
        metrics = model.compiled_metrics
        if shapes := shapes_of_metrics(model, self.base, metrics, outputs, element_spec):
            metrics.build(*shapes)

    def step(self) -> Callable[[Structure], Structure]:
        own: Callable[[Any], Any] = self.model.train_step
        if not self.model.jit_compile:
            return own
        strategy = self.model.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy) or strategy.num_replicas_in_sync > 1:
            log.warning(NOT_COMPILED, type(self.model).__name__)
            return own
        compiled: Callable[[Any], Any] = tf.function(own, jit_compile=True, reduce_retracing=True)  # as Keras does
        return compiled

    def test_step(self) -> Callable[..., Structure]:
        own: Callable[..., Any] = self.model.test_step
        return own

    def check_step(self, step: Traced) -> None:
        forget_children(self.model)
        reject_state_of_shards(self.model, type(self.model.optimizer).__name__)
        reject_split_constraints(self.model)

    def trained(self, *, with_optimizers: bool = True) -> Trackable:
        return self.model

    def averaged(self) -> list[tuple[Optimizer, list[Variable]]]:
        return averaged(self.model)

    def callback_list(self, found: list[Any], **arguments: object) -> Callback:
        return tf.keras.callbacks.CallbackList(found, **arguments)

    def ensure_built(self, element_spec: ElementSpec) -> bool:
        model, is_functional = self.model, bool(getattr(self.model, "inputs", None))
        own_step, is_whole = type(model).train_step is not tf.keras.Model.train_step, not unbuilt(model)
        stepped = own_step and not is_whole and is_built_by_its_step(model, element_spec)
        if is_functional or not has_call(self) or (stepped and model.save_spec()):
            return True
        features = element_spec[0] if isinstance(element_spec, tuple) else element_spec
        try:
            model(tf.nest.map_structure(lambda spec: tf.keras.Input(type_spec=spec), named_by_keys(features)))
        except Exception:
            if not stepped and not (own_step and is_whole):
                raise
            return False
        return True

    def export(self, path: str, element_spec: ElementSpec) -> None:
        model = self.model
        inputs = tf.nest.flatten(getattr(model, "inputs", None) or ())
        by_calls = isinstance(model, tf.keras.Sequential) and not inputs
        by_calls |= any(isinstance(one.type_spec, SPARSE) for one in inputs)
        save = export_as_called if by_calls else lambda model, path: model.export(path)
        try:
            save(model, path)
        except AssertionError as error:
            if UNTRACKED not in str(error):
                raise
            track_tables(model, tf.function(model.__call__).get_concrete_function(*model.save_spec()[0]))
            save(model, path)


def export_as_called(model: Model, path: str) -> None:
    """Export as it is called a Sequential built by several inputs, where Keras looks for one and fails.

    So is a model of ragged or sparse inputs, of which Keras's own way would make dense ones.
    """
    archive = tf.keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.__call__, list(model.save_spec()[0]))
    archive.write_out(path)


def respect_compiled(model: Model) -> None:
    """Train the layers that were trainable when the model was compiled, as its `fit` does."""
    compiled = model._compiled_trainable_state
    if any(compiled.get(layer, now) != now for layer, now in model._get_trainable_state().items()):
        model._set_trainable_state(compiled)


def unbuilt(model: Model) -> list[Layer]:
    """Return the layers of a model, itself among them, that have no variables yet."""
    layers = (one for one in (model, *model.submodules) if isinstance(one, tf.keras.layers.Layer))
    return [layer for layer in layers if not layer.built and not isinstance(layer, tf.keras.metrics.Metric)]


def is_built_by_its_step(model: Model, element_spec: ElementSpec) -> bool:
    """Trace the model's train_step, in which no optimizer makes slots or trains; returns whether these data fit it."""
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        object.__setattr__(optimizer, "apply_gradients", lambda *_, kept=optimizer, **__: kept.iterations)
    try:
        tf.function(model.train_step).get_concrete_function(element_spec)
    except Exception as error:  # of an evaluation, whose data may be others
        log.debug("%s.train_step does not take %s: %s", type(model).__name__, element_spec, error)
        return False
    finally:
        for optimizer in optimizers:
            object.__delattr__(optimizer, "apply_gradients")
    return True


def let_losses_be_means() -> None:
    """Let a step of the program's call losses that take their batch's mean, as they do by default.

    Keras refuses that under any strategy, since replicas in step would add their means up. One alone adds up nothing.
    """
    kind = tf.keras.losses.Loss
    plain = kind._get_reduction
    if hasattr(plain, MEANS):
        return

    def reduction(loss: Any) -> Any:
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            loss._allow_sum_over_batch_size = True
        return plain(loss)

    setattr(reduction, MEANS, True)
    kind._get_reduction = reduction
