"""What train_step returns: its names and its numbers."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import tensorflow as tf

from trainer.core.contracts import Structure, Traced


def outputs_of(traced: Traced, *, placed: bool = False) -> Structure:
    """Return what a traced step returns, without what `placed` has it say besides."""
    return traced.structured_outputs[0] if placed else traced.structured_outputs


def output_names(outputs: Structure) -> Collection[str]:
    """Return the names by which `fetch_numbers` gives a step's outputs."""
    return list(outputs) if isinstance(outputs, dict) else ["loss"]


def flat(outputs: Structure) -> Structure:
    """Return a dict's numbers beside those of the dicts in it, as Keras 3 logs them; its guide returns such."""
    if not isinstance(outputs, dict):
        return outputs
    inner = [flat(value) if isinstance(value, dict) else {name: value} for name, value in outputs.items()]
    return {name: value for one in inner for name, value in one.items()}


def problem(outputs: Structure) -> str:
    """Say what a traced step returned that is no tensor with a name; nothing where all are."""
    if outputs is None or isinstance(outputs, list | tuple):
        return "None" if outputs is None else f"a {type(outputs).__name__}, whose numbers have no names"
    named = outputs.items() if isinstance(outputs, dict) else ()
    odd = [(name, value) for name, value in named if value is None or isinstance(value, dict | list | tuple)]
    return ", ".join(f"{'None' if value is None else f'a {type(value).__name__}'} for {name!r}" for name, value in odd)


def fetch_numbers(outputs: Structure) -> dict[str, float]:
    """Return what train_step or an evaluation returned, by name; of several numbers their mean, as Keras shows them."""
    if not isinstance(outputs, dict):
        outputs = {"loss": outputs}
    return {str(name): float(np.mean(value)) for name, value in outputs.items() if has_numbers(value)}


def has_numbers(value: object) -> bool:
    """Return whether a value is a number, or an array of numbers: a text has no place in the log, nor have odd rows."""
    return not isinstance(value, tf.RaggedTensor | tf.SparseTensor) and np.asarray(value).dtype.kind in "biuf"
