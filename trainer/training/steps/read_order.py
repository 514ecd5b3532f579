"""In which order workers read the training data, and how far each has come. Knows no TensorFlow."""

from __future__ import annotations

import json

from trainer.core.settings.config import Config
from trainer.run.data_position import FIRST, Beginning, Position


class ReadOrder:
    """Says where a worker's reading begins, whenever that is: a worker may come back.

    With `input_position: exact` each part has its own place. Otherwise a worker that comes back begins in the order of
    the step that the run has reached by then.
    """

    def __init__(self, config: Config, workers: int, seed: int, *, of_all: bool = False) -> None:
        """Take the seed of the order, drawn where the settings have none; `of_all` workers is one order, of a service.

        A data service is given one order, so that its readers never differ in where they began.
        """
        self.exact = config.input_position == "exact"
        self.seeded = self.exact or config.seed is not None
        """Whether the order follows from the seed alone."""
        self.workers = workers
        self._of_all = of_all
        self._seed, self._own_seed = seed, config.seed
        self._data = {"program": config.program, "program_args": json.loads(json.dumps(dict(config.program_args)))}
        self._first = self._counted = 0  # the step where the reading began, and the highest that a call has reported
        self._places = [FIRST] * workers

    def join(self) -> None:
        """One more worker reads: there are more parts, which are other ones. It must not be `exact`."""
        self.workers += 1
        self._places.append(FIRST)

    def begin(self, step: int) -> None:
        """The reading begins at this step."""
        self._first = self._counted = step

    def count(self, step: int) -> None:
        """A call has reported this step."""
        self._counted = max(self._counted, step)

    def advance(self, worker: int, place: tuple[int, int]) -> None:
        """A worker has read its part up to here: the pass, and the examples that were taken of it."""
        self._places[worker] = place

    def beginning(self, worker: int) -> Beginning:
        """Return where a worker's reading begins that begins now."""
        if self.exact:
            return Beginning(self._seed, *self._places[worker])
        return Beginning(self._seed, self._first if self._of_all else self._counted)

    @property
    def position(self) -> Position | None:
        """How far the data are read, where that is counted."""
        return Position(self._seed, tuple(self._places), self._data) if self.exact else None

    def go_on_from(self, position: Position) -> str:
        """Begin there; returns what differs where the position counts other data, whose pass begins again."""
        if not self.exact:
            return ""
        why = position.differs(self._own_seed, self._data)
        if position.files is not None:
            why = "input_sharding was dynamic"
        if why:
            position = position.rewound(self._own_seed, self._data)
        self._seed, self._places = position.seed, list(position.among(self.workers))
        return why
