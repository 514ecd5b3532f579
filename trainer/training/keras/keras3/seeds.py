"""Random numbers of Keras 3 without a seed: drawn again on each cluster, and drawn in each step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import tensorflow as tf

from trainer.core.contracts import Structure
from trainer.training.tf_internals.seeds import DrawnSeeds, forget_keras3_seeds, keras3_seeds


def forget_seeds() -> None:
    """Have `keras.random` without a seed begin again: its state lies on the ps of the cluster that was before.

    That is what `build_model` draws. A step draws otherwise (`drawing`).
    """
    if "keras" in sys.modules:
        forget_keras3_seeds()


def drawing(step: Callable[..., Structure]) -> Callable[..., Structure]:
    """Return a step of a model in which `keras.random` may be used without a seed; for what is traced."""

    @tf.autograph.experimental.do_not_convert
    def draws(*data: Structure) -> Structure:
        with keras3_seeds(DrawnSeeds()):
            return step(*data)

    return draws
