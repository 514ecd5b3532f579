"""How the program's data are divided among the workers that read, and how they will be. Knows no TensorFlow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from trainer.core.contracts import Dataset, ElementSpec
from trainer.core.failures import explain

log = logging.getLogger(__name__)


class Division:
    """The dataset on each worker, and those that were traced for other readers: some join, others are drained."""

    def __init__(
        self, workers: int, trace: Callable[[Sequence[int]], Dataset], spec_of: Callable[[Dataset], ElementSpec]
    ) -> None:
        """`trace` traces the data for readers, which are workers' numbers; `spec_of` returns the iterators' type."""
        self._trace, self._spec_of = trace, spec_of
        self.readers: Sequence[int] = tuple(range(workers))
        """The workers that have a part each, in the order of their parts."""
        self.dataset = trace(self.readers)
        self.spec = spec_of(self.dataset)
        """The type of each worker's iterator, which calls are traced for."""
        self._coming: dict[Sequence[int], Dataset] = {}

    def trace_again(self) -> None:
        """Trace the data once more: an operation that draws within `map` gets its seed there."""
        self.dataset = self._trace(self.readers)

    def can_be(self, readers: Sequence[int]) -> bool:
        """Return whether calls can read the data that are divided among these; traces them for `coming`, once."""
        if tuple(readers) in self._coming:
            return True
        try:
            coming = self._trace(readers)
        except Exception as error:
            log.warning("the data can't be divided among %d workers now: %s", len(readers), explain(error))
            return False
        if self._spec_of(coming) != self.spec:
            log.warning("divided among %d workers the data have batches of another shape", len(readers))
            return False
        self._coming[tuple(readers)] = coming
        return True

    def coming(self, readers: Sequence[int]) -> Dataset | None:
        """Return the data that `can_be` has traced for these readers, once, and count with these from now on."""
        if (coming := self._coming.pop(tuple(readers), None)) is not None:
            self.readers = tuple(readers)
        return coming


def part_of(worker: int, readers: Sequence[int]) -> int:
    """Return which part a worker reads: one that is drained, and still answers for a moment, reads another's."""
    return readers.index(worker) if worker in readers else worker % len(readers)
