"""The tables that an export must take along, since signatures use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Trackable
from trainer.training.tf_internals.graphs import owner_of, track

UNTRACKED = "references an 'untracked' resource"  # how TensorFlow says that a root does not have what a function uses


def track_tables(root: Trackable, signatures: Any) -> None:
    """Have the export take the tables that signatures use and the program keeps, as those that its datasets use, too.

    A table that is filled when it is made is the same in each process. What changes must be the model's.
    """
    known = {id(one) for one in tf.train.TrackableView(root).descendants()}
    for number, owner in enumerate(owners(signatures)):
        if isinstance(owner, tf.lookup.StaticHashTable) and id(owner) not in known:
            track(root, f"table_of_program_{number}", owner)


def owners(signatures: Any) -> list[Trackable]:
    """Return the tables and variables that signatures use, each once."""
    found: dict[int, Any] = {}
    for one in signatures.values() if isinstance(signatures, Mapping) else [signatures]:
        traced = one.get_concrete_function() if hasattr(one, "get_concrete_function") else one
        for outer, _ in traced.graph.captures if hasattr(traced, "graph") else ():
            if (owner := owner_of(outer)) is not None:
                found[id(owner)] = owner
    return list(found.values())
