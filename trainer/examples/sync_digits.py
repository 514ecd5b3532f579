"""Handwritten digits learnt in step: every replica computes its part of one large batch, and all apply the sum.

For `strategy: multi_worker_mirrored`, or `mirrored` on one machine with several GPUs. Images and model are those of
`digits`, and only the batches differ.
"""

from __future__ import annotations

import tensorflow as tf

from trainer.examples.digits import Digits, load

# The batch of one step, over all replicas together: it is what the learning rate belongs to. It can be divided by
# 1, 2, 3, 4, 6, 8, 12 or 16 replicas (a replica is a machine without GPUs, or one GPU).
GLOBAL_BATCH = 96


class SyncDigits(Digits):
    """A small convolutional network that reads a digit."""

    def __init__(self) -> None:
        super().__init__(learning_rate=2e-3)

    def train_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("train"))
        # Each machine reads its own part, in an order of its own, in batches for one replica.
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        batch = context.get_per_replica_batch_size(GLOBAL_BATCH)
        return dataset.shuffle(2000).repeat().batch(batch).prefetch(tf.data.AUTOTUNE)

    def eval_dataset(self, context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(load("test"))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))
