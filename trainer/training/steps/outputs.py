"""What train_step returns: its names and its numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Structure, Traced


def outputs_of(traced: Traced, *, placed: bool = False) -> Structure:
    """Return what a traced step returns, without what `placed` has it say besides."""
    return traced.structured_outputs[0] if placed else traced.structured_outputs


def output_names(outputs: Structure) -> Collection[str]:
    """Return the names by which `fetch_numbers` gives a step's outputs."""
    return list(outputs) if isinstance(outputs, dict) else ["loss"]


def describe(outputs: Structure) -> str:
    """Name what a step returned, None by its names."""
    if not isinstance(outputs, dict):
        return "None" if outputs is None else "None beside its tensors"
    return "None for " + ", ".join(repr(name) for name, value in outputs.items() if None in tf.nest.flatten(value))


def fetch_numbers(outputs: Structure) -> dict[str, float]:
    """Return what train_step or an evaluation returned, by name; of several numbers their mean, as Keras shows them."""
    if not isinstance(outputs, dict):
        outputs = {"loss": outputs}
    return {str(name): mean_of(value) for name, value in outputs.items() if has_numbers(value)}


def has_numbers(value: object) -> bool:
    """Return whether a value is a number, or an array of numbers: a text has no place in the log."""
    return not getattr(value, "ndim", 0) or np.asarray(value).dtype.kind in "biuf"


def mean_of(value: Any) -> float:
    return float(np.mean(value)) if getattr(value, "ndim", 0) else float(value)
