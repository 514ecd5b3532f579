"""How large variables are split over the parameter servers, by name."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.core.settings.config import Config

READ_WHOLE = (tf.float16, tf.uint16, tf.uint32, tf.uint64, tf.string)  # TensorFlow's RestoreV2 reads no part of these


def make_partitioner(config: Config, servers: int) -> Any:
    """Return the partitioner that the settings name, or None for whole variables."""
    partitioners = tf.distribute.experimental.partitioners
    if config.partitioner == "min_size":
        least = config.partitioner_min_bytes
        return restorable(partitioners.MinSizePartitioner(min_shard_bytes=least, max_shards=servers))
    if config.partitioner == "max_size":
        return restorable(partitioners.MaxSizePartitioner(max_shard_bytes=config.partitioner_max_bytes))
    if config.partitioner == "fixed_shards":
        return restorable(partitioners.FixedShardsPartitioner(num_shards=config.partitioner_shards))
    return None


def restorable(partitioner: Any) -> Any:
    """Return a partitioner that leaves whole what can't be split, or not be restored on another number of ps.

    The first is a variable whose size changes, as of a Discretization that is adapted.
    """

    def partition(shape: Any, dtype: Any, **more: object) -> Any:
        is_whole = not shape.is_fully_defined() or dtype in READ_WHOLE
        return [1] * shape.rank if is_whole else partitioner(shape, dtype, **more)

    return partition
