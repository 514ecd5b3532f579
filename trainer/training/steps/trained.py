"""What a step runner trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from trainer.core.contracts import Model, Trackable, Variable
from trainer.run.saves.snapshot import Copies, Take, take_value
from trainer.training.tables.dynamic.tables import DynamicTables


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The model that a runner's calls train, and what belongs to it."""

    model: Model
    kept: Trackable
    """What checkpoints hold of the model: of tf_keras the model itself."""
    step: Variable
    """The variable that counts the steps of the calls that have ended."""
    output_names: Collection[str]
    """The names of what a step tells."""
    copy: Callable[[Copies, Take], None]
    """Copies variables to other handles, in what is traced: each with its slots, between two updates."""
    tables: DynamicTables | None = None
    """The dynamic tables, which are no part of `kept`."""


class TrainsModel:
    """A runner's face for those that ask what it trains."""

    _what: TrainedModel

    @property
    def model(self) -> Model:
        return self._what.model

    @property
    def trained(self) -> Trackable:
        return self._what.kept

    @property
    def step(self) -> Variable:
        return self._what.step

    @property
    def output_names(self) -> Collection[str]:
        return self._what.output_names

    @property
    def tables(self) -> DynamicTables | None:
        return self._what.tables

    def copy(self, copies: Copies, take: Take = take_value, /) -> None:
        self._what.copy(copies, take)
