"""The layers `Embedding` of both Keras, which get a dynamic table in the place of their weights."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Layer
from trainer.core.failures import UserError
from trainer.training.keras.keras3.shards import LOOKS_UP_ROWS
from trainer.training.tables.dynamic.hashing import FirstValues, constant, normal, salt_of, uniform
from trainer.training.tables.table_lookups import rows_of, without_negative

Build = Callable[[Any], Any]
_build: list[Build] = [lambda layer: None]
INITIALIZERS = ("RandomUniform", "RandomNormal", "Zeros", "Ones", "Constant")
# What an Embedding may be told that a dynamic table can't do, by its attribute, with what it is without.
REFUSED = {
    "embeddings_regularizer": None,
    "embeddings_constraint": None,
    "sparse": False,
    "lora_rank": None,
    "quantization_mode": None,
}


@contextlib.contextmanager
def take_over_layers(build: Build) -> Iterator[None]:
    """Have layers that are built meanwhile ask `build` first; it returns None where a layer keeps its weights."""
    ask(tf.keras.layers.Embedding, tf.keras.layers.Layer)
    if "keras" in sys.modules:
        ask(sys.modules["keras"].layers.Embedding, sys.modules["keras"].layers.Layer)
    _build.append(build)
    try:
        yield
    finally:
        _build.pop()


def ask(kind: Any, base: Any) -> None:
    """Have a class of layers ask, once in this process."""
    plain = kind.build
    if hasattr(plain, "asks"):
        return

    @functools.wraps(plain)
    def build(layer: Layer, input_shape: Any = None) -> None:
        if _build[-1](layer) is None:
            plain(layer, input_shape)
        elif base is tf.keras.layers.Layer:
            base.build(layer, input_shape)
        else:
            layer.built = True

    build.asks = True  # type: ignore[attr-defined]
    kind.build = build
    if base is tf.keras.layers.Layer:  # Keras 3's call is replaced already (keras/keras3/shards.py)
        kind.call = by_key(kind.call)


def by_key(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `call` that leaves ids to a layer's table: Keras would make 32 bits of what is no int64."""

    @functools.wraps(plain)
    def call(layer: Layer, inputs: Any) -> Any:
        if not hasattr(layer.embeddings, "look_up"):
            return plain(layer, inputs)
        ids = without_negative(inputs) if isinstance(inputs, tf.SparseTensor) else inputs
        return tf.cast(rows_of(layer.embeddings, ids), layer.compute_dtype)

    return call


class TableAsVariable:
    """A table where Keras 3 has a variable of its own."""

    def __init__(self, table: Any) -> None:
        self._value = table

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self._value)


def attach(layer: Layer, table: Any) -> None:
    """Give a layer a table in the place of its weights; no checkpoint finds it there.

    The table has `variables`, what is trained of it.
    """
    table.masks = layer.mask_zero
    if hasattr(layer, "hashes_ids"):  # as trainer/examples/dynamic_embedding.py has it
        object.__setattr__(layer, "hashes_ids", False)
    if isinstance(layer, tf.keras.layers.Layer):
        object.__setattr__(layer, "embeddings", table)
        layer._trainable_weights.extend(table.variables)
        return
    import keras

    class TablePart(keras.Variable):
        """A part of the table. Keras looks at shapes before it lets anybody make a variable, and asks again then."""

        __module__ = keras.Variable.__module__  # by which one of Keras's is known

        def _initialize_with_initializer(self, initializer: Callable[[], Any]) -> None:
            self._value = initializer()

    made = [
        TablePart(lambda one=one: one, shape=tuple(one.shape), dtype="float32", name=f"part_{number}")
        for number, one in enumerate(table.variables)
    ]
    for variable in made:
        variable._path, variable._autocast = f"{table.name}/{variable.name}", False
    layer._trainable_variables.extend(made)
    object.__setattr__(layer, "_embeddings", TableAsVariable(table))
    object.__setattr__(layer, LOOKS_UP_ROWS, True)


def check_layer(layer: Layer) -> None:
    """Raise UserError where a layer does what a dynamic table can't."""
    for attribute, expected in REFUSED.items():
        if getattr(layer, attribute, expected) != expected:
            raise UserError(
                f"dynamic_tables: the layer {layer.name!r} has {attribute}, which works on all rows of a table or "
                f"none: leave {attribute} out, or leave the layer out of dynamic_tables"
            )
    if layer.variable_dtype != "float32":
        raise UserError(
            f"dynamic_tables: the layer {layer.name!r} keeps weights of {layer.variable_dtype}, expected float32: "
            "leave its dtype out, or leave the layer out of dynamic_tables"
        )


def first_values_of(layer: Layer) -> FirstValues:
    """Return what gives a layer's keys their first values, as its initializer would; raises UserError."""
    initializer, width, salt = layer.embeddings_initializer, int(layer.output_dim), salt_of(layer.name)
    kind, held = type(initializer).__name__, initializer.get_config() if hasattr(initializer, "get_config") else {}
    if kind == "RandomUniform":
        return uniform(width, salt, float(held["minval"]), float(held["maxval"]))
    if kind == "RandomNormal":
        return normal(width, salt, float(held["mean"]), float(held["stddev"]))
    if kind in ("Zeros", "Ones", "Constant"):
        return constant(width, float({"Zeros": 0, "Ones": 1}.get(kind, held.get("value", 0))))
    raise UserError(
        f"dynamic_tables: the layer {layer.name!r} has the initializer {kind}, expected one of "
        f"{', '.join(INITIALIZERS)}, by which a key's first values follow from the key: take one of these"
    )
