"""One ps's part of a dynamic table.

Rows are given and taken away while a mutex of the shard is held, and trained while the update's mutex is held
(atomic_updates.py). Each of these is one act. What a step does to a row that has gone meanwhile is dropped: an update
names the key with the row, and looks whether the row is still the key's (docs/decisions/0224).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Operation, Tensor
from trainer.training.tables.dynamic.arrays import Array, Index, parts_of
from trainer.training.tables.dynamic.hashing import FirstValues
from trainer.training.tables.dynamic.sketch import Sketch
from trainer.training.tables.dynamic.together import stand_in
from trainer.training.tables.table_lookups import GIVEN, GIVING
from trainer.training.tf_internals.graphs import APART, either
from trainer.training.updates.atomic_updates import give_back, locks_of

# What a key without a row reads, and where what is dropped is written; that is never read.
DEFAULT, SCRATCH, FIRST = 0, 1, 2
# Of a shard's numbers: the row to give next, how many are free again, how many keys found no room, how many rows are
# in use, how many were given and taken away since the table was made, and how many sightings the sketch has counted.
NEXT, FREE, REFUSED, ROWS, GIVEN_ROWS, EVICTED, SEEN = range(7)
INDEX_BYTES = 56  # of a key at most (docs/decisions/0224)
NO_KEY = tf.int64.min
LOOKED_AT = 1 << 20  # rows at once, where those that have changed are looked for
COUNTS = 1024  # steps that are told apart; the last number is of more
BEGIN = [FIRST, 0, 0, 0, 0, 0, 0]


class Shard:
    """What one ps has of a table. Make it, and call its methods, with that ps as the device."""

    def __init__(
        self,
        name: str,
        mutex: str,
        width: int,
        capacity: int,
        first: FirstValues,
        sightings: int = 1,
        room: int = 0,
    ) -> None:
        """`first` gives keys their first values; a key gets a row when it was seen in `sightings` steps.

        It gives `capacity` rows at most, and a restore as many as it has `room` for. It has no slots yet, and nothing
        is reserved.
        """
        self.name, self.mutex, self.width, self.capacity = name, mutex, width, capacity
        self.first_values, self.slots, self.begins = first, dict[str, Array](), dict[str, float]()
        self.sketch = Sketch(f"{name}/sketch", capacity, sightings) if sightings > 1 else None
        length = max(capacity, room) + FIRST
        self.values = Array(f"{name}/values", [length, width], tf.float32)
        self.keys = Array(f"{name}/keys", [length], tf.int64)
        self.usage = Array(f"{name}/told", [length, 2], tf.int32)  # in how many steps it was trained, and the last one
        self.free = Array(f"{name}/free", [length], tf.int64)
        self.numbers = Array(f"{name}/numbers", [len(BEGIN)], tf.int64)
        self.clock = Array(f"{name}/clock", [1], tf.int64)  # the steps that have trained the table
        self.index = Index(f"{name}/index", parts_of(capacity))

    def add_slots(self, begins: Mapping[str, float]) -> None:
        """Have slots of an optimizer, by the names of its lists, that begin with these values."""
        self.begins = dict(begins)
        self.slots = {
            one: Array(f"{self.name}/slot{number}", self.values.shape, tf.float32) for number, one in enumerate(begins)
        }

    @property
    def kept(self) -> dict[str, Array]:
        """What a checkpoint holds of each row."""
        slots = {f"slot{number}": slot for number, slot in enumerate(self.slots.values())}
        return {"values": self.values, **slots, "keys": self.keys, "told": self.usage}

    @property
    def row_bytes(self) -> int:
        """What a row takes, with its entry in the index, as it was measured."""
        lengths = ((one.dtype.size, one.shape[1] if len(one.shape) > 1 else 1) for one in self.kept.values())
        return sum(size * length for size, length in lengths) + INDEX_BYTES

    def with_own_handles(self) -> Shard:
        """Return the same with handles of its own, for what holds its mutex: by explicit dependencies alone."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Array | Index | Sketch):
                setattr(other, name, value.with_own_handles())
        other.slots = {name: slot.with_own_handles() for name, slot in self.slots.items()}
        return other

    def reserve(self) -> None:
        """Make the arrays, without a row."""
        made = [one.reserve() for one in (*self.kept.values(), self.free)]
        with tf.control_dependencies(made):
            self.begin()

    def begin(self) -> None:
        """Have no row: what was there is forgotten."""
        rows = tf.range(FIRST, dtype=tf.int64)
        for array, value in ((self.values, 0.0), *self._begun()):
            array.set(rows, tf.fill([FIRST, self.width], value))
        self.keys.set(rows, tf.fill([FIRST], NO_KEY))
        self.usage.set(rows, tf.zeros([FIRST, 2], tf.int32))
        self.numbers.assign(tf.constant(BEGIN, tf.int64))
        self.clock.assign(tf.zeros([1], tf.int64))
        if self.sketch is not None:
            self.sketch.begin()
        self.index.clear()

    def _begun(self) -> list[tuple[Array, float]]:
        return [(slot, self.begins[name]) for name, slot in self.slots.items()]

    def known_rows(self, keys: Tensor) -> Tensor:
        """Return the rows of keys, DEFAULT for those without one."""
        with tf.name_scope(APART):
            return tf.maximum(self.index.with_own_handles().find(keys), DEFAULT)

    def given_rows(self, keys: Tensor) -> Tensor:
        """Return the rows of keys, each named once; those without one get one, or DEFAULT where there is no room."""
        with tf.name_scope(APART), tf.name_scope(GIVING):
            found = self.index.with_own_handles().find(keys)
            rows = stand_in(lambda: tf.identity(found), rows_with_given, (self, keys, found))
        return tf.identity(rows, name=GIVEN)

    def give_to_some(self, keys: Tensor, found: Tensor) -> Tensor:
        """Return the rows of keys, of which some were not found; it is traced by itself."""
        with tf.name_scope(APART):
            own = self.with_own_handles()
            lacking = tf.where(found < 0)
            asked = tf.gather_nd(keys, lacking)
            locks = locks_of([self.mutex], after=asked)
            with tf.control_dependencies([locks[-1]]):
                now = own.index.find(asked)  # another worker may have been first
                places = tf.where((now < 0) & (asked != NO_KEY))
                new = tf.gather_nd(asked, places)
                seen = tf.size(new, tf.int64)
                if own.sketch is not None:
                    enough = own.sketch.seen_enough(new)
                    places, new = tf.boolean_mask(places, enough), tf.boolean_mask(new, enough)
                given, done = own.give(new, seen)
            with tf.control_dependencies(done):
                now = tf.tensor_scatter_nd_update(now, places[: tf.size(given)], given)
            give_back(locks, [*done, now])
            return tf.maximum(tf.tensor_scatter_nd_update(found, lacking, now), DEFAULT)

    def give(self, keys: Tensor, seen: Tensor) -> tuple[Tensor, list[Operation]]:
        """Give keys rows, as long as there is room, with the mutex held; `seen` is how many were new.

        Returns the rows of the first keys, for which there was room, and what must have run.
        In this order, a step that is cancelled in between may lose rows, but never gives one twice.
        """
        numbers, wanted = self.numbers.read(), tf.size(keys, tf.int64)
        next_row, free, *_ = tf.unstack(numbers)
        count = tf.maximum(tf.minimum(wanted, free + self.capacity + FIRST - next_row), 0)
        again = tf.minimum(count, free)
        new = count - again
        last_free = tf.range(free - again, free, dtype=tf.int64)
        rows = tf.concat([self.free.rows(last_free), tf.range(next_row, next_row + new, dtype=tf.int64)], 0)
        keys = keys[:count]
        changes = tf.stack([new, -again, wanted - count, count, count, tf.zeros([], tf.int64), seen])
        last = tf.cast(self.clock.read(), tf.int32)
        begun = [(self.values, lambda: self.first_values(keys))]
        begun += [(slot, partial(tf.fill, [count, self.width], value)) for slot, value in self._begun()]
        begun.append((self.usage, lambda: tf.broadcast_to(tf.concat([[0], last], 0), [count, 2])))
        begun.append((self.keys, lambda: keys))
        done = [self.numbers.assign(numbers + changes)]
        for array, make in begun:  # in turn: to wake another thread takes longer
            with tf.control_dependencies(done[-1:]):
                done.append(array.set(rows, make()))
        with tf.control_dependencies(done[-1:]):
            return rows, [*done, self.index.insert(keys, rows)]

    def insert_restored(self, restored: Mapping[str, Any], own: Tensor) -> Tensor:
        """Give the `own` ones among restored rows a row each, with all that is `kept` of them; clocks go on.

        A key that is there already stays as it is. Those without room are counted. Returns how many got one.
        """
        with tf.name_scope(APART):
            keys = restored["keys"]
            once, places = tf.unique(keys)  # of a key that a checkpoint has twice, the first counts
            firsts = tf.math.unsorted_segment_min(tf.range(tf.size(keys)), places, tf.size(once))
            chosen = tf.boolean_mask(firsts, tf.gather(own & (self.index.find(keys) < 0), firsts))
            numbers = self.numbers.read()
            wanted = tf.size(chosen, tf.int64)
            count = tf.minimum(wanted, self.values.shape[0] - numbers[NEXT])
            rows, chosen = numbers[NEXT] + tf.range(count), chosen[:count]
            nothing = tf.zeros([], tf.int64)
            changes = tf.stack([count, nothing, wanted - count, count, nothing, nothing, nothing])
            done = [self.numbers.assign(numbers + changes)]
            done += [array.set(rows, tf.gather(restored[name], chosen)) for name, array in self.kept.items()]
            done.append(self.clock.assign(tf.maximum(self.clock.read(), restored["clock"])))
            with tf.control_dependencies(done):
                inserted = self.index.insert(tf.gather(keys, chosen), rows)
            with tf.control_dependencies([inserted]):
                return tf.identity(count)

    def evict(self, start: Tensor, end: Tensor, before: Tensor, below: Tensor, most: Tensor, mutex: str) -> Tensor:
        """Take rows away, from one number to another, that no step has trained since the clock was `before`.

        Of these those that fewer than `below` steps have trained, and `most` of them. Returns how many. `mutex` is the
        update's: rows are taken while no worker trains or gives any.
        """
        with tf.name_scope(APART):
            own = self.with_own_handles()
            locks = locks_of([own.mutex, *([mutex] if mutex else [])], after=before)
            with tf.control_dependencies([locks[-1]]):
                rows = tf.range(start, end)
                rows = tf.gather(rows, tf.where(own.are_idle(rows, before, below))[:, 0])
                keys = own.keys.rows(rows)
                used = tf.where(own.index.find(keys) == rows)[:most, 0]
                rows, keys = tf.gather(rows, used), tf.gather(keys, used)
                count, numbers = tf.size(rows, tf.int64), own.numbers.read()
                gone = own.index.remove(keys)
            with tf.control_dependencies([gone]):  # a call cancelled here loses rows, and gives none twice
                done = [
                    own.keys.set(rows, tf.fill([count], NO_KEY)),
                    own.free.set(numbers[FREE] + tf.range(count), rows),
                ]
            with tf.control_dependencies(done):
                nothing = tf.zeros([], tf.int64)
                changes = tf.stack([nothing, count, nothing, -count, nothing, count, nothing])
                done.append(own.numbers.assign(numbers + changes))
            give_back(locks, done)
            with tf.control_dependencies(done):
                return tf.identity(count)

    def are_idle(self, rows: Tensor, before: Tensor, below: Tensor) -> Tensor:
        """Return which rows no step has trained since the clock was `before`, and fewer than `below` steps in all."""
        usage = self.usage.rows(rows)
        return (before > 0) & ~is_since(usage[:, 1], before) & (tf.cast(usage[:, 0], tf.int64) < below)

    def counts(self, start: Tensor, end: Tensor, before: Tensor) -> Tensor:
        """Return of the idle rows from one number to another how many were trained in each number of steps."""
        with tf.name_scope(APART):
            own = self.with_own_handles()
            rows = tf.range(start, end)
            rows = tf.gather(rows, tf.where(own.are_idle(rows, before, tf.constant(tf.int64.max)))[:, 0])
            rows = tf.gather(rows, tf.where(own.index.find(own.keys.rows(rows)) == rows)[:, 0])
            times = tf.minimum(own.usage.rows(rows)[:, 0], COUNTS - 1)
            return tf.math.bincount(times, minlength=COUNTS, maxlength=COUNTS, dtype=tf.int64)

    def age_sketch(self) -> Tensor:
        """Halve what the sketch has counted, so that it has room for the keys to come; returns how much that was."""
        with tf.name_scope(APART):
            own = self.with_own_handles()
            locks = locks_of([own.mutex])
            with tf.control_dependencies([locks[-1]]):
                assert own.sketch is not None
                halved = own.sketch.halve()
                seen = tf.one_hot(SEEN, len(BEGIN), dtype=tf.int64)
                numbers = own.numbers.read()
                counted = own.numbers.assign(numbers - seen * numbers[SEEN])
            give_back(locks, [halved, counted])
            with tf.control_dependencies([halved, counted]):
                return numbers[SEEN]

    def piece(self, start: Tensor, end: Tensor, since: Tensor, mutex: str) -> dict[str, Tensor]:
        """Return what is `kept` of the rows from one number to another that are a key's, and the clock.

        They are those that were given or trained when the clock was `since`, or later; all where that is below 0.
        `mutex` is the update's: a row and its slots are of one moment.
        """
        with tf.name_scope(APART):
            own = self.with_own_handles()
            rows = own.changed_rows(start, end, since)
            locks = locks_of([mutex] if mutex else [], after=rows)
            with tf.control_dependencies(locks):
                found = own.all_of(rows)
            give_back(locks, list(found.values()))
            return found

    def last_piece(self, start: Tensor, since: Tensor, began: Tensor, mutex: str) -> dict[str, Tensor]:
        """Return the same of all rows from a number on, and of those before it that have changed meanwhile.

        That is since the clock was `began`, when the first piece was read. So all pieces are of one moment.
        """
        with tf.name_scope(APART):
            own = self.with_own_handles()
            locks = locks_of([mutex] if mutex else [], after=start)
            with tf.control_dependencies([start, *locks]):
                end = own.numbers.read()[NEXT]
                first = tf.constant(FIRST, tf.int64)
                rows = [own.changed_rows(start, end, since), own.changed_rows(first, start, began)]
                found = own.all_of(tf.concat(rows, 0))
            give_back(locks, list(found.values()))
            return found

    def changed_rows(self, start: Tensor, end: Tensor, since: Tensor) -> Tensor:
        """Return the rows from one number to another that are a key's, and have changed as `piece` says it."""

        def find_changed(begin: Tensor, found: Any) -> tuple[Tensor, Any]:
            rows = tf.range(begin, tf.minimum(begin + LOOKED_AT, end))
            changed = (since < 0) | is_since(self.usage.rows(rows)[:, 1], since)
            rows = tf.gather(rows, tf.where(changed)[:, 0])
            has_key = self.index.find(self.keys.rows(rows)) == rows  # before that, it has no values
            return begin + LOOKED_AT, found.write(found.size(), tf.gather(rows, tf.where(has_key)[:, 0]))

        found = tf.TensorArray(tf.int64, 0, dynamic_size=True, infer_shape=False, element_shape=[None])
        _, found = tf.while_loop(lambda begin, _: begin < end, find_changed, (start, found), parallel_iterations=1)
        return found.concat()

    def all_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return what is `kept` of rows, and the clock."""
        return {**{name: array.rows(rows) for name, array in self.kept.items()}, "clock": self.clock.read()}

    @contextlib.contextmanager
    def changing(self, rows: Tensor, keys: Tensor) -> Iterator[Tensor]:
        """Give the numbers of rows to change, each named once; at the end they are counted as trained.

        Those that are not the keys' any more are left alone. Call it where an update is traced: all that uses what is
        written here is one act.
        """
        counted = self.clock.add(tf.ones([1], tf.int64))
        with tf.control_dependencies([counted]):  # so the look at the keys lies between uses of what the act writes
            known = self.keys.rows(rows)
        rows = tf.where(known == keys, rows, tf.constant(SCRATCH, tf.int64))
        rows = tf.maximum(rows, SCRATCH)
        yield rows
        times = self.usage.rows(rows) * [1, 0]
        self.usage.set(rows, times + tf.concat([[1], tf.cast(self.clock.read(), tf.int32)], 0))


def rows_with_given(asked: Sequence[tuple[Shard, Tensor, Tensor]]) -> list[Tensor]:
    """Return the rows of the keys of each lookup, with what was found of them: those without one get one."""

    def act(*given: Tensor) -> list[Tensor]:
        if len(asked) == 1:
            return [asked[0][0].give_to_some(*given)]
        each = zip([shard for shard, *_ in asked], given[::2], given[1::2], strict=True)
        return [rows for one in each for rows in rows_with_given([one])]

    with tf.name_scope(APART), tf.name_scope(GIVING):
        is_lacking = tf.reduce_any(tf.concat([found for *_, found in asked], 0) < 0)
        given = [tensor for _, *tensors in asked for tensor in tensors]
        return either(is_lacking, act, lambda *given: given[1::2], given)


def is_since(last: Tensor, clock: Tensor) -> Tensor:
    """Return which rows were last trained when the clock was so, or later; 32 bits of their last steps are kept."""
    return tf.bitcast(last, tf.uint32) - tf.cast(clock, tf.uint32) < tf.constant(2**31, tf.uint32)
