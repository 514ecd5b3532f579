"""How the program's data are divided among the workers, and how they will be with one more. Knows no TensorFlow."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trainer.core.contracts import Dataset, ElementSpec
from trainer.core.failures import explain

log = logging.getLogger(__name__)


class Division:
    """The dataset on each worker, and those that were traced for workers that are about to join."""

    def __init__(
        self, workers: int, trace: Callable[[int], Dataset], spec_of: Callable[[Dataset], ElementSpec]
    ) -> None:
        """`trace` traces the data for so many workers, `spec_of` returns the type of their iterators."""
        self._trace, self._spec_of = trace, spec_of
        self.dataset = trace(workers)
        self.spec = spec_of(self.dataset)
        """The type of each worker's iterator, which calls are traced for."""
        self._coming: dict[int, Dataset] = {}  # by the number of workers

    def trace_again(self, workers: int) -> None:
        """Trace the data once more: an operation that draws within `map` gets its seed there."""
        self.dataset = self._trace(workers)

    def can_be(self, workers: int) -> bool:
        """Return whether calls can read the data that are divided among so many workers; traces them for `coming`."""
        try:
            self._coming[workers] = coming = self._trace(workers)
        except Exception as error:
            log.warning("the data can't be divided among %d workers now: %s", workers, explain(error))
            return False
        if self._spec_of(coming) != self.spec:
            log.warning("divided among %d workers the data have batches of another shape", workers)
            return False
        return True

    def coming(self, workers: int) -> Dataset | None:
        """Return the data that `can_be` has traced for so many workers, once."""
        return self._coming.pop(workers, None)
