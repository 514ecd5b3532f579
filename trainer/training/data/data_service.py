"""Have the data service read and preprocess: `tf.data.experimental.service`, as those that train see it."""

from __future__ import annotations

import dataclasses
import uuid
import warnings
from typing import Any

import tensorflow as tf

from trainer.cluster.spec import ClusterConfig
from trainer.core.settings.config import Config
from trainer.training.tf_internals.datasets import forget_uncompressing


@dataclasses.dataclass(frozen=True)
class DataService:
    """Where the dispatcher is, how the data are divided over its data workers, and the name of the present job."""

    dispatcher: str
    sharding: str
    job: str

    @classmethod
    def from_config(cls, config: Config, cluster: ClusterConfig) -> DataService | None:
        """Return the settings' data service with a job of a new name, or None where each worker reads for itself.

        A job that was begun before may have ended, or stand somewhere in the data: each generation has its own. Its
        workers share it, each batch goes to one of them.
        """
        if config.input != "service":
            return None
        [dispatcher] = cluster.service["dispatcher"]
        return cls(dispatcher, config.input_sharding, f"{config.run}-{uuid.uuid4().hex}")

    def read(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset's elements without end, as the data workers make them; those that train get each once.

        It ends at once where there is none.
        """
        policies = tf.data.experimental.service.ShardingPolicy
        if self.sharding == "off":
            return self._serve(dataset.repeat(), policies.OFF, self.job, self.job)
        endless = self._serve(dataset.repeat(), policies.DYNAMIC, self.job, self.job)

        # A data worker takes a pass without elements for one that the others have read, and would look for ever. What
        # can't be counted is therefore asked for an element, which each data worker looks for from the beginning.
        first = self._serve(dataset.take(1), policies.OFF, f"{self.job}-first", None).take(1)
        size = dataset.cardinality()
        sure = tf.data.Dataset.range(tf.cast((size > 0) | (size == tf.data.INFINITE_CARDINALITY), tf.int64))
        asked = tf.data.Dataset.range(tf.cast(size == tf.data.UNKNOWN_CARDINALITY, tf.int64)).flat_map(lambda _: first)
        return sure.concatenate(asked.map(lambda *_: tf.zeros([], tf.int64))).flat_map(lambda _: endless)

    def _serve(self, dataset: tf.data.Dataset, policy: Any, name: str, job: str | None) -> tf.data.Dataset:
        """Register the dataset by that name and read it; those who name the same job share its elements."""
        service = tf.data.experimental.service
        address = f"grpc://{self.dispatcher}"
        with warnings.catch_warnings():
            # It reads the dataset's options, which a graph need not know.
            warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
            forget_uncompressing()
            # All trainers register the same dataset: the journal keeps it once.
            known = service.register_dataset(address, dataset, dataset_id=name)
        return service.from_dataset_id(
            processing_mode=policy, service=address, dataset_id=known, element_spec=dataset.element_spec, job_name=job
        )
