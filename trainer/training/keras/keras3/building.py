"""Builds a Keras 3 model for parameter servers: prepared, with all its variables."""

from __future__ import annotations

import inspect

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Model, Tensor
from trainer.training.keras.base import is_of, shapes_of_metrics
from trainer.training.keras.keras3.checks import reject_model, reject_splits
from trainer.training.keras.keras3.optimizers import exclude_shards, optimizers_of
from trainer.training.keras.keras3.shards import LOOKS_UP_ROWS, train_shards
from trainer.training.measures.outputs import flat
from trainer.training.updates.one_update import gather_keras3


def prepare(model: Model) -> None:
    """Make a model fit for parameter servers; call it in the strategy's scope, before anything is traced.

    Raises UserError for what would be wrong there, with the fix.
    """
    import keras

    reject_model(model)
    train_shards()
    if "get_metrics_result" not in vars(model):  # `compile` keeps the results of a metric that has several in a dict
        plain = model.get_metrics_result
        object.__setattr__(model, "get_metrics_result", lambda: flat(plain()))
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding) and not layer.quantization_mode and not layer.lora_rank:
            object.__setattr__(layer, LOOKS_UP_ROWS, True)


def is_built(model: Model) -> bool:
    """Return whether a model needs no data to be built."""
    import keras

    return all(layer.built for layer in model._flatten_layers()) or type(model).call is keras.Model.call


def lacks_nothing(model: Model) -> bool:
    """Return whether all of a model's layers are built, and it makes no variables of its own."""
    import keras

    layers = model._flatten_layers(include_self=False)
    return bool(layers) and all(layer.built for layer in layers) and type(model).build is keras.Model.build


def build(model: Model, element_spec: ElementSpec) -> None:
    """Make the variables that a model and its optimizer still lack, and refuse what can't be trained with them.

    Call it in the strategy's scope. `element_spec` is of the training data; a model that is built needs none. A step
    of the program's own says in its trace what its optimizers train. Raises UserError.
    """
    import keras

    if not is_built(model):
        call_with_symbols(model, element_spec)
        prepare(model)  # what was built now
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built and is_of(model.train_step, keras.Model.train_step):
        optimizer.build(model.trainable_variables)
    build_metrics(model, element_spec)
    reject_splits(model)
    for _, one in optimizers_of(model):
        exclude_shards(model, one)
        gather_keras3(one)


def build_metrics(model: Model, element_spec: ElementSpec) -> None:
    """Make the metrics that Keras's own step would make in its first trace, which TensorFlow would drop then."""
    import keras

    metrics, outputs = model._compile_metrics, getattr(model, "outputs", None)
    shapes = shapes_of_metrics(model, keras.Model, metrics, outputs, element_spec)
    if shapes and is_of(model.train_step, keras.Model.train_step):
        output, labels = shapes
        metrics.build(labels, output)


def call_with_symbols(model: Model, element_spec: ElementSpec) -> bool:
    """Call a model with symbols of what the data consists of, which builds it; returns whether it takes them.

    It may take something else, as a generator's noise, where there is nothing to build.
    """
    import keras

    def symbol(spec: ElementSpec) -> Tensor:
        sparse, ragged = isinstance(spec, tf.SparseTensorSpec), isinstance(spec, tf.RaggedTensorSpec)
        return keras.Input(batch_shape=tuple(spec.shape), dtype=spec.dtype.name, sparse=sparse, ragged=ragged)

    symbols = tf.nest.map_structure(symbol, features_of(element_spec))
    try:
        model(symbols)
        if not is_built(model) and "training" in inspect.signature(model.call).parameters:
            model(symbols, training=True)  # it may have layers that it calls in training alone, as for a loss
    except Exception:
        if not lacks_nothing(model):
            raise
        return False
    return True


def features_of(element_spec: ElementSpec) -> ElementSpec:
    return element_spec[0] if isinstance(element_spec, tuple) else element_spec
