"""Python in traced functions: `py_function` and `numpy_function` call it in the process that traced them."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Graph
from trainer.core.failures import UserError
from trainer.training.tf_internals.graphs import inner_graphs

log = logging.getLogger(__name__)
PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def has_python(definition: Any) -> bool:
    """Return whether a GraphDef, or a function in it, calls Python."""
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op in PYTHON_OPERATIONS for node in nodes)


def look_for_python(graph: Graph, what: str) -> None:
    """Warn where a step for workers calls Python; raise UserError where it would on a worker, which has none of it.

    TensorFlow has the call made in the process that traced it, but not that of a gradient.
    """
    calls = [one for each in inner_graphs(graph) for one in each.get_operations() if one.type in PYTHON_OPERATIONS]
    if any(not tf.DeviceSpec.from_string(one.device).job for one in calls):
        raise UserError(
            f"{what} trains through py_function, whose gradient is Python: workers' servers run none. Compute what is "
            "trained by TensorFlow's own operations (docs/programs.md)"
        )
    if calls:
        log.warning(
            "%s calls Python (py_function or numpy_function), as in a metric: the coordinator runs it for all workers, "
            "and their steps wait for that. TensorFlow's own operations run on the workers (docs/programs.md)",
            what,
        )
