"""Random numbers: the seeds of Keras 3, and states that are kept."""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context
from tf_keras.src import backend as tf_keras_backend


def forget_keras3_seeds() -> None:
    """Have `keras.random` of Keras 3 without a seed begin again; call it when `keras` is imported."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)


@contextlib.contextmanager
def keras3_seeds(generator: DrawnSeeds | None) -> Iterator[None]:
    """Have `keras.random` of Keras 3 without a seed take its numbers there meanwhile; with None it begins again.

    Keras keeps a state for them in a variable, one for each thread, which no step that is traced may make.
    """
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


class DrawnSeeds:
    """Does for Keras 3 what its SeedGenerator does, without a state: each process draws its own seed."""

    def next(self, ordered: bool = True) -> tf.Tensor:
        return tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int64)


@contextlib.contextmanager
def kept_seeds() -> Iterator[None]:
    """Have TensorFlow and both Keras draw from other seeds meanwhile, and go on afterwards where they were.

    TensorFlow keeps a state for each pair of seeds that an operation was run with.
    """
    eager, of_keras = context.context(), tf_keras_backend._SEED_GENERATOR
    seed, drawn = eager._seed, getattr(eager, "_rng", None)  # without a seed there is no state
    generator = getattr(of_keras, "generator", None)
    if seed is not None:
        eager._seed, eager._rng = secrets.randbelow(2**31), random.Random()
    of_keras.generator = random.Random() if generator is not None else None
    with keras3_seeds(None) if "keras" in sys.modules else contextlib.nullcontext():
        try:
            yield
        finally:
            eager._seed, eager._rng = seed, drawn
            of_keras.generator = generator
