"""A drill: a fault, what must come of it, and by when; and what a drill saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.drills.faults import Fault
from fleet.drills.testbed import Testbed
from fleet.site.topology import Task


@dataclass
class Findings:
    """What a drill saw. Times in seconds; None where there is nothing to measure."""

    proof: str = ""
    detected: float | None = None
    paused: float | None = None  # the longest time without a new step; after the revert, where none was possible before
    lost: int | None = None
    restarted: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: object, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


Scenario = Callable[[Testbed, "Drill"], Findings]
"""What happens around a drill's fault, and what it makes of what it sees."""


@dataclass(frozen=True)
class Drill:
    """A fault, what must come of it, and by when (seconds)."""

    name: str
    text: str
    fault: Fault
    detected: float | None  # it is noticed within this time; None where it need not be
    paused: float  # no longer without a new step; or, where the run ends, until it does
    scenario: Scenario
    restarts: bool = True  # whether what is hit must be restarted
    may_too: Sequence[str] = ()  # jobs whose tasks may be restarted beside it
    program: str = "trainer.drill:DrillProgram"
    settings: Mapping[str, Any] = field(default_factory=dict)
    long_step: bool = False
    destructive: bool = False  # it fills, cuts, reboots or powers off
    needs: Sequence[str] = ()  # jobs that the inventory must have a task of, or "power"; "ps 2" for two

    def must_restart(self, task: Task, hit: Sequence[Task]) -> bool:
        return self.restarts and task in hit

    def may_restart(self, task: Task, hit: Sequence[Task]) -> bool:
        return task in hit or task.job in self.may_too

    def with_bounds_times(self, factor: float) -> Drill:
        detected = None if self.detected is None else self.detected * factor
        return replace(self, detected=detected, paused=self.paused * factor)
