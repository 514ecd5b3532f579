"""The custom loop on parameter servers as TensorFlow's guide has it: schedule one step a call, join once an epoch.

Prints a JSON line {"time", "step"} at the end of each epoch, until it is killed. The cluster comes from TF_CONFIG.
With a directory it saves there at the end of each epoch, before it prints, and begins where it has saved.
Source: https://www.tensorflow.org/tutorials/distribute/parameter_server_training, "Training with a custom training
loop" and "Parameter server or coordinator failure".
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import tensorflow as tf

from bench.timeline import print_point
from trainer.core.program import load_program


def main(program_name: str, epoch_steps: int, directory: str = "") -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    program = load_program(program_name, {})
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=256 << 10, max_shards=resolver.cluster_spec().num_tasks("ps")
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = program.build_model()
        accuracy, loss_class = metric_and_loss(model)
        example_loss = loss_class(from_logits=True, reduction=tf.keras.losses.Reduction.NONE)

    @tf.function
    def dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(program.train_dataset)

    train_step = step_of(strategy, model, accuracy, example_loss)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    epochs = itertools.count(1)
    if directory:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
        if manager.latest_checkpoint:
            checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
            epochs = itertools.count(1 + int(model.optimizer.iterations.numpy()) // epoch_steps)
    for epoch in epochs:
        for _ in range(epoch_steps):
            loss = coordinator.schedule(train_step, args=(iterator,))
        coordinator.join()
        loss.fetch()
        accuracy.reset_state()
        if directory:
            manager.save()
        print_point(epoch * epoch_steps)


def step_of(strategy: Any, model: Any, accuracy: tf.keras.metrics.Metric, example_loss: tf.keras.losses.Loss) -> Any:
    """Return the function that a worker is given to train one step."""

    @tf.function
    def train_step(iterator: Any) -> Any:
        def on_replica(features: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                predictions = model(features, training=True)
                loss = tf.nn.compute_average_loss(example_loss(labels, predictions))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, predictions)
            return loss

        losses = strategy.run(on_replica, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return train_step


def metric_and_loss(model: tf.keras.Model) -> tuple[tf.keras.metrics.Metric, type[tf.keras.losses.Loss]]:
    """Return a metric and the loss's class: a model with one output says yes or no, others choose among classes."""
    if model.output_shape[-1] == 1:
        return tf.keras.metrics.AUC(from_logits=True), tf.keras.losses.BinaryCrossentropy
    return tf.keras.metrics.SparseCategoricalAccuracy(), tf.keras.losses.SparseCategoricalCrossentropy


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
