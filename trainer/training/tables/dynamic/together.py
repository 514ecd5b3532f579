"""The lookups that a step makes in dynamic tables, of which none waits for another one, are made together.

Each of 26 tables would have a hash of its keys, of a dozen operations, and two conditions, of a function's call. So
what depends on keys alone has a stand-in while the step is traced. At the end one hash is made of all tables' keys, and
one condition for each ps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor
from trainer.training.tf_internals.graphs import take_instead
from trainer.training.updates.first_trace import is_dropped
from trainer.training.updates.joined import rounds_of

Make = Callable[[Sequence[Any]], Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A tensor of a traced step in the place of one that is made at the end, with those of other lookups."""

    tensor: Tensor
    make: Make
    """Makes those of stand-ins, which have the same one on the same device, of what was `given`."""
    given: Any

    @property
    def operations(self) -> list[Operation]:
        return [self.tensor.op]

    @property
    def earlier(self) -> list[Operation]:
        return []


_open: list[tuple[Any, list[StandIn]]] = []  # of each graph that is being traced


@contextlib.contextmanager
def made_together() -> Iterator[None]:
    """Have what has a stand-in, of lookups that are traced meanwhile in this graph, be made at the end."""
    graph, found = tf.compat.v1.get_default_graph(), list[StandIn]()
    _open.append((graph, found))
    try:
        yield
    finally:
        _open.pop()
    if found and not is_dropped():
        make_all(found)


def stand_in(tensor: Callable[[], Tensor], make: Make, given: Any) -> Tensor:
    """Return what is to be made of what is given: a stand-in of its type and shape, or that itself."""
    if not _open or _open[-1][0] is not tf.compat.v1.get_default_graph():
        return make([given])[0]
    one = StandIn(tensor(), make, given)
    _open[-1][1].append(one)
    return one.tensor


def make_all(found: Sequence[StandIn]) -> None:
    """Make what stand-ins are for, and have its users take it."""
    groups: dict[Any, list[StandIn]] = defaultdict(list)
    for one, number in zip(found, rounds(found), strict=True):
        groups[(number, one.make, one.tensor.device)].append(one)
    for (_, make, device), group in groups.items():
        with tf.control_dependencies(None), tf.device(device or None):
            made = make([one.given for one in group])
        for one, other in zip(group, made, strict=True):
            for user in list(one.tensor.consumers()):
                take_instead(user, one.tensor, other)


def rounds(found: Sequence[StandIn]) -> Sequence[int]:
    """Return of each how many others wait for each other before it; each has its own where that can't be known."""
    try:
        return rounds_of(found)
    except graphlib.CycleError:
        return range(len(found))
