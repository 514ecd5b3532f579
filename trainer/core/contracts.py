"""The types of what is not ours: a user's program, and the objects of TensorFlow and Keras.

They are for annotations alone: nothing here imports TensorFlow when the trainer runs. Of these objects a type checker
knows no members, since the libraries have no type information; the names tell readers what a function takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    Model: TypeAlias = tf.keras.Model | keras.Model
    Layer: TypeAlias = tf.keras.layers.Layer | keras.Layer
    Optimizer: TypeAlias = tf.keras.optimizers.Optimizer | keras.optimizers.Optimizer
    Metric: TypeAlias = tf.keras.metrics.Metric | keras.metrics.Metric
    Callback: TypeAlias = tf.keras.callbacks.Callback | keras.callbacks.Callback
    Variable: TypeAlias = tf.Variable | keras.Variable
    Tensor: TypeAlias = tf.Tensor
    Strategy: TypeAlias = tf.distribute.Strategy
    Coordinator: TypeAlias = tf.distribute.coordinator.ClusterCoordinator
    Dataset: TypeAlias = tf.data.Dataset
    DataIterator: TypeAlias = tf.data.Iterator
    InputContext: TypeAlias = tf.distribute.InputContext
    Graph: TypeAlias = tf.Graph
    Operation: TypeAlias = tf.Operation
    Trackable: TypeAlias = tf.__internal__.tracking.Trackable
    Traced: TypeAlias = tf.types.experimental.ConcreteFunction
    ElementSpec: TypeAlias = tf.TypeSpec
    Structure: TypeAlias = tf.Tensor
else:
    Model = Layer = Optimizer = Metric = Callback = Variable = Tensor = Strategy = Coordinator = Dataset = object
    DataIterator = InputContext = Graph = Operation = Trackable = object
    Traced = object
    """A function that TensorFlow has traced, for one signature."""
    ElementSpec = object
    """The type of a dataset's elements: a TypeSpec, or a tuple or dict of such."""
    Structure = object
    """Tensors of a batch, or of what a step returns: one, or a tuple or dict of such."""


class Program(Protocol):
    """A user's program (docs/programs.md). `callbacks` and `serving_signature` are asked for where it has them."""

    def build_model(self) -> Model:
        """Return a compiled model of tf_keras or of Keras 3."""

    def train_dataset(self, context: InputContext) -> Dataset:
        """Return a dataset of batches (features, labels[, weights])."""

    def eval_dataset(self, context: InputContext) -> Dataset:
        """Return the same, finite; not asked for with `evaluation: none`."""
