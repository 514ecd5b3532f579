"""How large variables are split over the parameter servers, by name."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.config import Config


def make_partitioner(config: Config, servers: int) -> Any:
    """Return the partitioner that the settings name, or None for whole variables."""
    partitioners = tf.distribute.experimental.partitioners
    if config.partitioner == "min_size":
        return partitioners.MinSizePartitioner(min_shard_bytes=config.partitioner_min_bytes, max_shards=servers)
    if config.partitioner == "max_size":
        return partitioners.MaxSizePartitioner(max_shard_bytes=config.partitioner_max_bytes)
    if config.partitioner == "fixed_shards":
        return partitioners.FixedShardsPartitioner(num_shards=config.partitioner_shards)
    return None
