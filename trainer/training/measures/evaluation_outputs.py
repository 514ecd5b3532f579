"""What test_step returns: results of metrics, what is made of those, and numbers of its own, averaged by example."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Model, Traced, Variable
from trainer.core.failures import UserError
from trainer.training.measures.metric_outputs import trace_outputs
from trainer.training.measures.metrics import metric_pieces, reached
from trainer.training.measures.outputs import problem

log = logging.getLogger(__name__)
Made = Callable[[], Mapping[str, Any]]


def checked_outputs(name: str, model: Model, step: Traced) -> tuple[list[str], list[str], Made]:
    """Return the names of what a traced test_step returns, and which of those are numbers of its own.

    The third gives by name what the step computes of metrics alone, of the states that these have when it is called.
    Raises UserError for what is no number. Leaves the metrics reset.
    """
    model.reset_metrics()
    outputs, known = step.structured_outputs, set(model.get_metrics_result())
    if odd := problem(outputs) or ("" if isinstance(outputs, dict) else "no dict"):
        raise UserError(f"test_step of {name} returns {odd}: have it return a dict of numbers")
    # Each replica has its own part of a mirrored variable.
    states = [part for one in metric_pieces(model) for part in getattr(one, "values", [one])]
    computed = outputs_depending_on(step, states)
    made: Any = trace_outputs(step, states, states) if computed - known else dict
    if mixed := computed - known - set(getattr(made, "structured_outputs", ())):
        raise UserError(
            f"test_step of {name} returns {', '.join(sorted(mixed))}, computed from metrics and something else, as the "
            "batch or (under multi_worker_mirrored) other members' parts of them, under a name that none of the "
            "model's metrics has: compute it of results of metrics alone, or return each under its name "
            f"({', '.join(sorted(known))})"
        )
    if own := sorted(set(outputs) - computed):
        # That of a metric whose state is not seen in its result is no number of the step's own.
        seen = outputs_depending_on(tf.function(model.get_metrics_result).get_concrete_function(), states)
        own = [one for one in own if one in seen or one not in known]
    for one in own:
        check_number(name, one, outputs[one])
    if own:
        log.info(
            "what test_step of %s returns beside its metrics is averaged over the batches, each weighed by its "
            "examples: %s",
            name,
            ", ".join(own),
        )
    return sorted(outputs), own, made


def check_number(name: str, one: str, value: Any) -> None:
    """Raise UserError for an output that can't be averaged."""
    is_number = isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)
    if not is_number or value.shape.rank not in (0, None):
        what = f"{value.dtype.name} of shape {value.shape}" if isinstance(value, tf.Tensor) else type(value).__name__
        raise UserError(
            f"test_step of {name} returns {one}, which is no metric's and no number ({what}): leave it out, or return "
            "its mean"
        )


def weighed(outputs: Mapping[str, tf.Tensor], names: Iterable[str], examples: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return numbers of a batch, each times its examples, as Keras weighs its loss; 0 of a batch without any."""
    times = tf.cast(examples, tf.float64)
    return {name: tf.math.multiply_no_nan(tf.cast(outputs[name], tf.float64), times) for name in names}


def outputs_depending_on(function: Traced, states: Iterable[Variable]) -> set[str]:
    """Return the names of what a traced function returns that it computes from these variables."""
    inner = {id(outer): inner for outer, inner in function.graph.captures}
    handles = [id(one.handle) for one in states]
    found = reached(inner[handle] for handle in handles if handle in inner)
    outputs = function.graph.structured_outputs
    named = outputs.items() if isinstance(outputs, dict) else ()
    return {name for name, value in named if getattr(value, "name", None) in found}
