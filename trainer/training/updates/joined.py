"""Which updates of a step can be one act: those on one ps of which none waits for another one.

To take a mutex wakes a thread, and an update takes two. A step that trains 26 tables would wake a hundred.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trainer.training.updates.orders import added_orders, is_small, sources


def joined(updates: Sequence[Any]) -> list[list[Any]]:
    """Return the updates (atomic_updates.py) of one graph in groups, each of which can be one act.

    What one update of a group needs comes from no other one of it. All that it needs is small, and arrives in the
    message that brings the others theirs (transfers.py).
    """
    if not updates:
        return []
    try:
        rounds = rounds_of(updates)
    except graphlib.CycleError:  # where operations between those of an update use its variable, they stay apart
        return [[one] for one in updates]
    groups: dict[Any, list[Any]] = defaultdict(list)
    for number, one in enumerate(updates):
        groups[(one.device, rounds[number]) if may_wait(one) else number].append(one)
    return list(groups.values())


def may_wait(update: Any) -> bool:
    """Return whether an update may wait for what others of its ps need."""
    return tf.DeviceSpec.from_string(update.device).job == "ps" and all(map(is_small, update.needs))


def rounds_of(updates: Sequence[Any]) -> list[int]:
    """Return of each update how many others wait for each other before it, at most."""
    graph = updates[0].operations[0].graph
    of = {operation.name: number for number, one in enumerate(updates) for operation in one.operations}
    pairs = [(before, after) for after in graph.get_operations() for before in sources(after)]
    pairs += added_orders(graph)
    pairs += [(before, one.operations[0]) for one in updates for before in one.earlier]
    waits: dict[str | int, set[str | int]] = {number: set() for number in range(len(updates))}
    for before, after in pairs:
        first, then = (of.get(one.name, one.name) for one in (before, after))
        if first != then:
            waits.setdefault(then, set()).add(first)
    rounds: dict[str | int, int] = {}
    for one in graphlib.TopologicalSorter(waits).static_order():
        rounds[one] = max((rounds[each] + isinstance(each, int) for each in waits.get(one, ())), default=0)
    return [rounds[number] for number in range(len(updates))]
