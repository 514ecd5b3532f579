"""A layer for ids without a vocabulary. It needs TensorFlow alone: copy this file beside your program.

Under psfleet's parameter servers it trains a dynamic table, without a setting. Anywhere else it trains a fixed table,
in which ids that have the same hash share a row.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import tensorflow as tf


@functools.cache
def dynamic_embedding(keras: Any) -> Any:
    """Return the class for `tf.keras`, or for Keras 3's `keras`; call it also before such a model is loaded."""

    @keras.utils.register_keras_serializable("dynamic_embedding")
    class DynamicEmbedding(keras.layers.Embedding):
        """Rows of `output_dim` numbers for ids: whole numbers or texts, dense, ragged or sparse."""

        hashes_ids = True
        """Whether ids become numbers of rows here; psfleet sets it to False where it gives it a dynamic table."""

        def __init__(self, output_dim: int, table: dict[str, Any], rows: int = 1_000_000, **more: Any) -> None:
            """`table` is as in `dynamic_tables`: {"capacity": 50_000_000}. `rows` are those of a fixed table.

            The others are arguments of Embedding.
            """
            super().__init__(rows, output_dim, **more)
            self._table = json.dumps(table)  # Keras would track a dict

        @property
        def dynamic_table(self) -> dict[str, Any]:
            """What psfleet's setting `dynamic_tables` would say of this layer."""
            found: dict[str, Any] = json.loads(self._table)
            return found

        def call(self, ids: Any) -> Any:
            if not self.hashes_ids:
                return super().call(ids)
            if isinstance(ids, tf.SparseTensor):
                return super().call(ids.with_values(self._rows_of(ids.values)))
            if isinstance(ids, tf.RaggedTensor):
                return super().call(ids.with_flat_values(self._rows_of(ids.flat_values)))
            return super().call(self._rows_of(ids))

        def _rows_of(self, ids: Any) -> Any:
            ids = tf.convert_to_tensor(ids)
            texts = ids if ids.dtype == tf.string else tf.strings.as_string(ids)
            return tf.strings.to_hash_bucket_fast(texts, self.input_dim)

        def get_config(self) -> dict[str, Any]:
            config = super().get_config()
            rows = config.pop("input_dim")
            return {**config, "rows": rows, "table": self.dynamic_table}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls(**config)  # tf_keras's own looks for input_dim

    return DynamicEmbedding


DynamicEmbedding = dynamic_embedding(tf.keras)
