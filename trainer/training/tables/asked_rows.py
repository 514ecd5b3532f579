"""Which rows of tables steps ask for: some ids of a step, by which hot keys and uneven ps are known.

Counting all would cost each step time. Of the ids that a table's lookups have in the first step of a round, and of the
rows that they ask for, a few come with the call: SAMPLED of each, at other places each time.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Tensor, Variable
from trainer.core.variables import flatten
from trainer.telemetry.lookups import SAMPLED, Lookups, LookupSample, Owners
from trainer.training.measures.metrics import LAST
from trainer.training.measures.staleness import SCOPE
from trainer.training.placement import name_of, server_of
from trainer.training.tables.dynamic.hashing import owner_of
from trainer.training.tables.dynamic.tables import DynamicTables
from trainer.training.tables.table_lookups import noting

ASKED = f"{SCOPE}/asked"
APART = 2_654_435_761  # by which places differ that are taken of a step's ids: a prime
WEIGHT = "/embeddings"  # of a layer Embedding


class AskedRows:
    """Tells it in what is traced; make it in no scope, once the model has its variables."""

    def __init__(self, variables: Iterable[Variable], tables: DynamicTables | None) -> None:
        """`variables` are the model's."""
        owners = dict(split_tables(variables))
        if tables is not None:
            owners |= {name: functools.partial(owners_of_keys, len(one.shards)) for name, one in tables.tables.items()}
        shown = {name.removesuffix(WEIGHT): name for name in owners}
        self.lookups = Lookups({short: owners[name] for short, name in shown.items()})
        self._names = list(shown.values())
        self._last = tf.Variable(tf.zeros([len(shown), 2, 1 + SAMPLED], tf.int64), trainable=False)
        self.states = [(self._last, LAST)] if shown else []
        """What is kept where a call runs, with how the states of two calls are merged: of each table how many ids its
        lookups had, and some of them; and the same of rows."""

    def add_report(self, states: Sequence[Tensor], now: float) -> None:
        """Take what a call has reported at its end, at this time in seconds."""
        if not states or not self.lookups.is_due(now):
            return
        samples = []
        for (ids, *some_ids), (rows, *some_rows) in states[0].numpy().tolist():
            samples.append(LookupSample(ids, rows, some_ids, some_rows))
        self.lookups.add_samples(samples, now)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Tell of the lookups that are traced meanwhile, in this graph alone: not those in loops and conditions."""
        if not self.states:
            yield
            return
        with noting() as asked:
            yield
        with tf.name_scope(ASKED):
            places = tf.range(SAMPLED, dtype=tf.int64) * APART + tf.cast(tf.timestamp() * 1e6, tf.int64)
            ids_and_rows = [[[each[kind] for each in asked.get(name, [])] for name in self._names] for kind in (0, 1)]
            self._last.assign(tf.stack([some_of(parts, places) for parts in ids_and_rows], axis=1))


def some_of(parts: Sequence[Sequence[Tensor]], places: Tensor) -> Tensor:
    """Return of each table how many numbers there are, and those at these places, which begin again after the last one.

    `parts` are the numbers of each table's lookups. One operation takes those of all tables.
    """
    flat = [[tf.cast(tf.reshape(one, [-1]), tf.int64) for one in each] for each in parts]
    counts = tf.stack([tf.add_n([tf.size(one, tf.int64) for one in each] or [tf.zeros([], tf.int64)]) for each in flat])
    nothing = tf.zeros([1], tf.int64)  # one number is looked at where there is none
    numbers = tf.concat([*(one for each in flat for one in each), nothing], 0)
    places = tf.cumsum(counts, exclusive=True)[:, tf.newaxis] + places % tf.maximum(counts, 1)[:, tf.newaxis]
    found = tf.where(counts[:, tf.newaxis] > 0, tf.gather(numbers, places), 0)
    return tf.concat([counts[:, tf.newaxis], found], 1)


def split_tables(variables: Iterable[Variable]) -> Iterator[tuple[str, Owners]]:
    """Yield the name of each split matrix on the ps that has one alone, and what gives the ps of rows."""
    groups = collections.defaultdict(list)
    for one in flatten(variables):
        if server_of(one) is not None and "/part_" in one.name:
            groups[name_of(one)].append(one)
    for name, parts in groups.items():
        is_one = len({one.name for one in parts}) == len(parts)  # layers of two models may have one name
        if is_one and len(parts) > 1 and len(parts[0].shape) == 2:
            ends = list(itertools.accumulate(int(one.shape[0]) for one in parts))
            servers = [server_of(one) or 0 for one in parts]
            yield name, functools.partial(owners_of_rows, ends, servers)


def owners_of_rows(ends: Sequence[int], servers: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Return which ps has each row, of parts that end before these rows; the last one has what is beyond."""
    return [servers[min(bisect.bisect_right(ends, row), len(servers) - 1)] for row in rows]


def owners_of_keys(servers: int, keys: Sequence[int]) -> Sequence[int]:
    """Return which of so many ps has each key's row."""
    found: Any = owner_of(tf.constant(keys, tf.int64), servers)
    return found.numpy().tolist()
