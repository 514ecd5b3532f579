"""What a run is doing: its state, as others see it, and the phase that its time counts to."""

from __future__ import annotations

import enum


class Word(str, enum.Enum):
    """A word of a fixed set, which is the same in records, in messages and for `==`."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, how: str) -> str:
        return format(str(self.value), how)


class RunState(Word):
    """The `state` of status.json and state.json."""

    NEW = "new"
    """Nothing ran yet."""
    WAITING = "waiting"
    """For members, or for what the message says."""
    TRAINING = "training"
    STOPPED = "stopped"
    """On request, with a checkpoint."""
    FINISHED = "finished"
    FAILED = "failed"
    """By the user's error, which the message says."""
    UNKNOWN = "unknown"
    """Its record can't be read."""

    @classmethod
    def read(cls, text: str) -> RunState:
        """Return what a record says; UNKNOWN of a word that this version doesn't have."""
        return cls(text) if text in set(cls) else cls.UNKNOWN

    @property
    def ended(self) -> bool:
        """Whether no process goes on with the run by itself."""
        return self in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED)


class Phase(Word):
    """What a process does, which has a deadline, and a place in the ledger."""

    WAITING = "waiting"
    RESTORING = "restoring"
    COMPILING = "compiling"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
