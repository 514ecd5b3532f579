"""Names of a Keras 3 model's variables that no other order of layers changes, nor what else a process builds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Layer, Model, Variable

COUNT = re.compile(r"_?\d+")
# What Keras counts that is no layer, and makes names of or lets programs do so: tensors, and features of FeatureSpace.
NO_LAYER = re.compile(r"(?<![a-z0-9])(keras_tensor|float_normalized(?=_\d+_preprocessor$))_\d+(?!\d)")
OF_TENSORFLOW = (
    *(tf.Variable, tf.__internal__.distribute.ShardedVariable, tf.Module, tf.random.Generator),
    *(tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable),
)
DIRECTION = re.compile(r"^(forward|backward)_")  # by which Bidirectional names its copies of a layer


def named(model: Model) -> dict[str, Variable]:
    """Return the model's variables by names that no other order of layers changes, nor what else a process has built.

    Keras counts what it names by itself in all of a process. Such a layer is called as the attribute that it is, or
    as its class. Where several have one name, the number in Keras's tells which was made first.
    """
    found: dict[str, Any] = {}
    known: set[int] = set()
    for path, layer in layers_by_name(model):
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        own += [each.state for each in layer._seed_generators]
        # A dynamic table's rows are saved in a way of their own.
        variables = [one for one in own if id(one) not in known and not hasattr(one._value, "is_reserved")]
        known.update(map(id, variables))
        for name, one in disambiguate((COUNT.sub("", one.name), one) for one in variables):
            found[f"{path}{name}"] = one
    return found


def kept_beside(model: Model) -> dict[str, Any]:
    """Return TensorFlow's own variables, modules, generators and tables that are attributes of layers."""
    import keras

    found: dict[int, tuple[str, Any]] = {}
    for path, layer in layers_by_name(model):
        if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):  # its tables are made again
            continue
        for attribute, value in sorted(vars(layer).items()):
            if not attribute.startswith("_self_"):  # these are TensorFlow's own
                for name, one in leaves_by_name(attribute, value):
                    if isinstance(one, OF_TENSORFLOW):
                        found.setdefault(id(one), (f"{path}{name}", one))
    return dict(found.values())


def layers_by_name(model: Model) -> Iterator[tuple[str, Layer]]:
    """Yield the model and each layer in it once, with the path of its name."""
    known: set[int] = set()

    def walk(layer: Layer, path: str, around: Sequence[str] = ()) -> Iterator[tuple[str, Layer]]:
        yield path, layer
        layers = [one for one in layer._layers if id(one) not in known]
        known.update(map(id, layers))
        attributes = attributes_of(layer)
        around = [*around, uncounted(layer.name)] if is_named_by_keras(layer) else around
        for name, one in disambiguate((label(one, attributes, around), one) for one in layers):
            yield from walk(one, f"{path}{name}/", around)

    return walk(model, "")


def label(layer: Layer, attributes: Mapping[int, str], around: Iterable[str] = ()) -> str:
    """Return what a layer is called within another: by the program, else as its attribute, else by its class.

    A name that a program makes of one of Keras's has that one's number in it. `around` are the names, without numbers,
    of layers around this one that Keras has named.
    """
    name: str = layer.name
    if is_named_by_keras(layer):
        return attributes.get(id(layer), uncounted(name))
    if is_named_by_keras(layer, DIRECTION.sub("", name)):
        return uncounted(name)
    name = NO_LAYER.sub(r"\1", name)
    for other in around:
        name = re.sub(rf"(?<![a-z0-9]){re.escape(other)}_\d+(?!\d)", other, name)
    return name


def is_named_by_keras(layer: Layer, name: str = "") -> bool:
    """Return whether a layer's name, or this one, is that of its class, with a number or without."""
    of_class = rf"{type(layer).__name__.replace('_', '')}\d*"
    return re.fullmatch(of_class, (name or layer.name).replace("_", ""), re.IGNORECASE) is not None


def uncounted(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def attributes_of(layer: Layer) -> dict[int, str]:
    """Return the attributes that are layers, or hold some in a list or dict, by the layers' ids."""
    found: dict[int, str] = {}
    for name, value in sorted(vars(layer).items()):
        if not name.startswith("_"):
            found |= {id(one): path for path, one in reversed(list(leaves_by_name(name, value)))}
    return found


def leaves_by_name(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield what nested lists and dicts hold, with the way to it."""
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from leaves_by_name(f"{name}_{key}", part)


def disambiguate(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield parts with names that differ: those of one name in the order of the numbers in their own."""
    seen: Counter[str] = Counter()
    for name, one in sorted(parts, key=lambda part: [int(number) for number in re.findall(r"\d+", part[1].name)]):
        yield (f"{name}:{seen[name]}" if seen[name] else name), one
        seen[name] += 1
