"""What a process counts of its run for Prometheus, where nothing else keeps the number."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SAVE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """How many of the values lie up to each bound. One thread adds, any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one has what is above all bounds
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add the same value so often: a call of a thousand steps is no loop."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return the bounds as Prometheus writes them, each with the number of values up to it."""
        number, found = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            number += count
            found.append((bound, float(number)))
        return found


@dataclasses.dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint."""

    step: int
    at: float
    size: int


@dataclasses.dataclass(frozen=True)
class MemberHealth:
    """A member as the heartbeat has it."""

    state: str
    silence: float
    """Seconds since its last answer, or since it was first asked."""


@dataclasses.dataclass
class Counters:
    """The numbers of one run in one process; a reader may see one a moment before another."""

    steps: int = 0
    examples: int | None = None
    """Examples of those steps; None where the size of a batch is not known."""
    step_examples: int | None = None
    """How many one step has."""
    workers: Sequence[str] = ()
    """The present workers' names, by their number in TensorFlow's cluster."""
    worker_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    worker_stale: dict[str, int] = dataclasses.field(default_factory=dict)
    """Updates of others between a step's read of the weights and its own update, added up over a worker's steps."""
    worker_stale_max: dict[str, int] = dataclasses.field(default_factory=dict)
    worker_input_wait: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that a worker's steps have waited for their batches, where that is measured."""
    update_wait_seconds: float | None = None
    """How long updates have waited for others' updates of the same variable, on all ps together."""
    tables: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Of each dynamic table its rows, how many were given (`new`) and taken away (`evicted`), how many keys found no
    room (`refused`), and its bytes."""
    lookups: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    """Gives what steps ask of tables lately, as Lookups.summary has it."""
    servers: Sequence[str] = ()
    """The names of the ps that train, in the order in which Lookups.summary numbers them."""
    file_sizes: Callable[[], Mapping[str, Any]] = dict
    """Gives how large the files of the data are, as sizes_of_data has it."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """With `input_sharding: dynamic` how many files are `done`, `under_way` and `found`, and the number of the pass."""
    step_seconds: Histogram = dataclasses.field(default_factory=lambda: Histogram(STEP_BOUNDS))
    save_seconds: Histogram = dataclasses.field(default_factory=lambda: Histogram(SAVE_BOUNDS))
    restore_seconds: float | None = None
    checkpoint: NewestCheckpoint | None = None
    evaluation: tuple[int, Mapping[str, float]] | None = None
    """The last evaluation's step and metrics."""
    room: tuple[int, int] | None = None
    """Bytes of the shared path in all, and free."""
    ways: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """How each member reaches each other one."""
    members: Callable[[], Mapping[str, MemberHealth]] | None = None
    """What asks for the members, where there are some to be watched."""
    drained: Callable[[], Sequence[str]] = list
    """What asks which tasks' hosts an operator has drained."""
    _tables_before: tuple[Mapping[str, Mapping[str, int]], float] = ({}, 0.0)

    def returned(
        self,
        worker: int,
        steps: int,
        seconds: float,
        stale: tuple[int, int] | None = None,
        input_wait: float | None = None,
    ) -> None:
        """Count a call that has ended, for which a worker took so long.

        `stale` has the updates of others between its steps' reads and updates: their sum, and the most of one step.
        `input_wait` has the seconds that they waited for their batches.
        """
        name = self.workers[worker] if worker < len(self.workers) else f"worker-{worker}"
        self.steps += steps
        self.worker_steps[name] = self.worker_steps.get(name, 0) + steps
        if self.step_examples is not None:
            self.examples = (self.examples or 0) + steps * self.step_examples
        if steps > 0:
            self.step_seconds.add(max(0.0, seconds) / steps, steps)
        if stale is not None:
            self.worker_stale[name] = self.worker_stale.get(name, 0) + stale[0]
            self.worker_stale_max[name] = max(self.worker_stale_max.get(name, 0), stale[1])
        if input_wait is not None:
            self.worker_input_wait[name] = self.worker_input_wait.get(name, 0.0) + input_wait

    def table_rates(self, now: float) -> dict[str, dict[str, float | int]]:
        """Return what dynamic tables hold at this time, with the rows given and taken a minute since the last call."""
        (before, at), self._tables_before = self._tables_before, (self.tables, now)
        minutes = (now - at) / 60
        found: dict[str, dict[str, float | int]] = {}
        for name, table in self.tables.items():
            known = before.get(name, table)
            # A restore counts from the start.
            rates = {
                key: max(0, table[key] - known[key]) / minutes if minutes > 0 else 0.0 for key in ("new", "evicted")
            }
            found[name] = {
                "rows": table["rows"],
                "new_per_minute": round(rates["new"], 1),
                "evicted_per_minute": round(rates["evicted"], 1),
                "refused": table["refused"],
                "bytes": table["bytes"],
            }
        return found

    def forget_data(self) -> None:
        """Let go of what knows of the data and of lookups: it holds a generation's model."""
        self.lookups = self.file_sizes = dict

    def asked(self) -> dict[str, dict[str, Any]]:
        """Return what steps ask of tables lately, with the ps by their names."""
        found = {}
        for table, each in self.lookups().items():
            shares = {self._server(number): share for number, share in each["by_ps"].items()}
            hot = [[key, share, self._server(number)] for key, share, number in each["hot"]]
            found[table] = {**each, "by_ps": shares, "hot": hot}
        return found

    def _server(self, number: int) -> str:
        return self.servers[number] if number < len(self.servers) else f"ps-{number}"

    def data(self) -> dict[str, Any]:
        """Return how large the files of the data are, with the bytes of each worker's `parts` by its name."""
        sizes = dict(self.file_sizes())
        if parts := sizes.pop("parts", None):
            sizes["parts"] = dict(zip(self.workers, parts, strict=False))
        return sizes

    def staleness(self, worker: str) -> dict[str, float | int]:
        """Return a worker's mean and greatest number of updates of others between a read and an update, where known."""
        if not self.worker_steps.get(worker) or worker not in self.worker_stale:
            return {}
        mean = self.worker_stale[worker] / self.worker_steps[worker]
        return {"staleness": round(mean, 3), "staleness_max": self.worker_stale_max[worker]}

    def waited(self, worker: str) -> dict[str, float]:
        """Return for how many seconds a worker's steps have waited for their batches, where that is measured."""
        seconds = self.worker_input_wait.get(worker)
        return {} if seconds is None else {"input_wait_seconds": round(seconds, 3)}
