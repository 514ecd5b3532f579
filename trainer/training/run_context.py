"""What all generations of a process have in common."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.cluster.deadlines import Phases
from trainer.cluster.members.membership import Membership
from trainer.core.contracts import Program
from trainer.core.settings.config import Config
from trainer.core.signals import StopRequest
from trainer.run.directory import RunDirectory
from trainer.run.lease import Lease
from trainer.telemetry.progress import Progress


@dataclass(frozen=True)
class RunContext:
    """One process's part of a run: its settings, its program, and where it reports."""

    config: Config
    program: Program
    directory: RunDirectory
    progress: Progress
    phases: Phases
    membership: Membership | None
    lease: Lease | None
    stopping: StopRequest

    def workers(self, count: int) -> list[str]:
        """Return the names of the tasks that take calls, by their numbers in TensorFlow's cluster; none of others."""
        if not self.config.traits.remote:
            return []
        return self.membership.workers if self.membership else [f"worker-{each}" for each in range(count)]
