"""How large variables are split over the parameter servers, by name."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.core.settings.config import Config


def make_partitioner(config: Config, servers: int) -> Any:
    """Return the partitioner that the settings name, or None for whole variables."""
    partitioners = tf.distribute.experimental.partitioners
    if config.partitioner == "min_size":
        least = config.partitioner_min_bytes
        return of_known_size(partitioners.MinSizePartitioner(min_shard_bytes=least, max_shards=servers))
    if config.partitioner == "max_size":
        return of_known_size(partitioners.MaxSizePartitioner(max_shard_bytes=config.partitioner_max_bytes))
    if config.partitioner == "fixed_shards":
        return of_known_size(partitioners.FixedShardsPartitioner(num_shards=config.partitioner_shards))
    return None


def of_known_size(partitioner: Any) -> Any:
    """Return a partitioner that leaves a variable whole whose size changes, as of a Discretization that is adapted."""

    def partition(shape: Any, dtype: Any, **more: object) -> Any:
        return partitioner(shape, dtype, **more) if shape.is_fully_defined() else [1] * shape.rank

    return partition
