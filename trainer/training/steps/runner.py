"""What computes the steps: a model in a strategy's scope, its data, and a call that packs a number of steps.

`RemoteStepRunner` has the workers of a parameter-server cluster do it, `LocalStepRunner` this process's devices. The
controller drives either in the same way.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.core.contracts import ElementSpec, Model, Structure, Trackable, Variable
from trainer.run.data_position import Position
from trainer.training.release_resources import Iterators
from trainer.training.tables.dynamic.tables import DynamicTables
from trainer.training.updates.row_marks import RowMarks

CALL_POLL_SECONDS = 0.005


@dataclasses.dataclass
class Call:
    """A call that was given to a worker, and what it reported at its end."""

    steps: int
    began: float
    """When it was given (of time.monotonic)."""
    outputs: Any = None
    """What train_step returned at its last step."""
    worker: int = 0
    counted: int = 0
    """The step as it was then; 0 where this process ran it."""
    stale: tuple[int, int] | None = None
    """Updates of others between a step's read of the weights and its update: the sum over its steps, and the most."""
    input_wait: float | None = None
    """Seconds that its steps waited for their batches, where that is measured."""
    done: int | None = None
    """The steps that it has done, where these may be fewer; None for all."""


class StepRunner(abc.ABC):
    """Runs packed calls, and has what they train. Where a runner says nothing else, it does as replicas in step do."""

    def __init__(
        self,
        model: Model,
        trained: Trackable,
        step: Variable,
        output_names: Collection[str],
        copy: Callable[..., None],
        tables: DynamicTables | None = None,
        marks: RowMarks | None = None,
    ) -> None:
        self.model = model
        self.trained = trained
        """What checkpoints hold of the model: of tf_keras the model itself."""
        self.step = step
        """The variable that counts the steps of the calls that have ended."""
        self.output_names = output_names
        """The names of what a step tells."""
        self.copy = copy
        """Copies variables to other handles, in what is traced: each with its slots, between two updates."""
        self.tables = tables
        """The dynamic tables, which are no part of `trained`."""
        self.marks = marks
        """Those of rows that steps have changed, where incremental saves ask for them."""

    def doubt(self) -> None:
        """Have the next save be a whole one: what may change weights beside the steps has run."""
        if self.marks is not None:
            self.marks.doubt()

    @property
    @abc.abstractmethod
    def step_examples(self) -> int | None:
        """How many examples a step has, where that is known."""

    @property
    def seconds_waited(self) -> float:
        """How long updates have waited for others' updates of the same variable, on all ps together."""
        return 0.0

    @property
    def is_over(self) -> bool:
        """Whether the data have come to their end, which ends the training."""
        return False

    @property
    def files(self) -> Mapping[str, int]:
        """How many files are done, under way and found, where they are given out one by one; else nothing."""
        return {}

    @property
    def lookups(self) -> Mapping[str, Mapping[str, Any]]:
        """What steps ask of tables lately, by table, as Lookups.summary has it; else nothing."""
        return {}

    @property
    def file_sizes(self) -> Mapping[str, Any]:
        """How large the files are that workers read, as sizes_of_data has it; else nothing."""
        return {}

    @property
    def news(self) -> str:
        """What there is to say of the data; empty for nothing."""
        return ""

    @property
    @abc.abstractmethod
    def element_spec(self) -> ElementSpec:
        """What one replica gets of the program's training data."""

    @property
    def position(self) -> Position | None:
        """How far the data are read, with `input_position: exact`: all of it is in what the ended calls have done."""
        return None

    def go_on_from(self, position: Position) -> str:
        """Begin to read there, with `input_position: exact`; call it before the first call.

        Where other data were counted, the pass under way begins again; returns what differs.
        """
        return ""

    @property
    def is_recovering(self) -> bool:
        """Whether TensorFlow is taking in a worker again."""
        return False

    @property
    def takes_in(self) -> bool:
        """Whether workers can join those that train."""
        return False

    def take_in(self, task: str, address: str) -> bool:
        """Have the worker at this address (host:port) join; it may take calls once `joined` has named it.

        Returns False, now and later, where it can't.
        """
        return False

    def joined(self) -> list[str]:
        """Return the workers that have joined since the last time, which have what they need by now."""
        return []

    def leave_out(self, tasks: Collection[str]) -> bool | None:
        """Have the other workers read the data of these, which may be none; returns False where they can't now.

        None where there is nothing to divide: workers have no parts, or there is no other worker.
        """
        return False

    @property
    def is_failing(self) -> bool:
        """Whether calls have failed, and none has ended well since."""
        return False

    def is_failing_alike(self, error: Exception) -> bool:
        """Return whether every worker has failed with this error, while no process ended."""
        return False

    @abc.abstractmethod
    def call(self, steps: int) -> Call:
        """Give a call of so many steps."""

    @abc.abstractmethod
    def returned(self) -> list[Call]:
        """Return the calls that have ended since the last time; raises what went wrong in one."""

    def aggregate_outputs(self, outputs: Structure) -> Structure:
        """Return the outputs of the call that ended last, with metrics over all calls since they were reset."""
        return outputs

    def write_metrics(self) -> None:  # noqa: B027 - replicas in step have nothing to write
        """Let the model's own metrics say the same; nothing may be in flight."""

    def reset_metrics(self) -> None:
        """Begin the metrics again."""
        self.model.reset_metrics()

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the greatest of all members' numbers, place by place: members must do the same at the same time."""
        return numbers

    def close(self) -> Iterators | None:
        """End what this process does on others, no call can follow; returns the iterators that it has there."""
        return None
