"""How a coordinator ends after an error: its exit code, the state that it leaves, and what it does before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.core.failures import (
    STOPPED,
    TRY_AGAIN,
    USER_ERROR,
    Infrastructure,
    StalePath,
    Stopped,
    UserError,
    explain,
    is_device,
    is_infrastructure,
    is_stale,
)
from trainer.core.states import RunState


@dataclass(frozen=True)
class Exit:
    """The end of a process."""

    code: int
    state: RunState
    """Of the run, as it is left."""
    message: str = ""
    is_broken: bool = False
    """Whether a device is broken, which may be so for ever: the members' processes must restart."""
    restarts_unit: bool = False
    """Whether the unit must start again, not the process alone: it mounts the shared path."""
    pauses: bool = False
    """Whether this process holds the next one back, which would fail at once: no budget does yet."""

    @property
    def is_trouble(self) -> bool:
        """Whether it was trouble with the cluster that may pass."""
        return self.code == TRY_AGAIN and not self.is_broken


def decide_exit(error: BaseException, program_file: Path | None, *, leads: bool, begun: bool) -> Exit:
    """Return how a process ends after this error.

    `program_file` is the user's program, once it is loaded. `leads` says that the process is the run's coordinator,
    and `begun` that it has begun an attempt, whose budget counts.
    """
    if isinstance(error, Stopped):
        return Exit(STOPPED, RunState.STOPPED)
    message = str(error) if isinstance(error, UserError | Infrastructure) else explain(error, program_file)
    if not is_infrastructure(error, program_file):
        return Exit(USER_ERROR, RunState.FAILED, message)
    is_mount = isinstance(error, StalePath) or is_stale(error)
    return Exit(
        TRY_AGAIN,
        RunState.WAITING,
        message,
        is_broken=is_device(error),
        restarts_unit=is_mount,
        pauses=not is_mount and leads and not begun and isinstance(error, OSError),  # as of a full path
    )
