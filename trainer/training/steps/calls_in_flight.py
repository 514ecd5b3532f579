"""The calls that workers have been given, until it is known how they ended."""

from __future__ import annotations

import itertools

from trainer.training.steps.reports import Report
from trainer.training.steps.runner import Call


class CallsInFlight:
    """Knows each call by a number, by which its report names it."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._reports: list[Report] = []  # that are still to be handed out

    def __len__(self) -> int:
        return len(self._calls)

    def next_number(self) -> int:
        """Return the number of the call that is to be given next."""
        return next(self._numbers)

    def add(self, number: int, call: Call) -> None:
        """A call was given."""
        self._calls[number] = call

    def report(self, report: Report) -> None:
        """A call has reported its end."""
        self._reports.append(report)

    def ended(self, *, is_quiet: bool) -> list[tuple[Call, Report]]:
        """Return the calls that have ended since the last time, each once.

        The last one in flight has ended once TensorFlow `is_quiet`, that is done with it, too: those that wait for all
        calls count on that.
        """
        found = []
        while (len(self._calls) > 1 or is_quiet) and self._reports:
            report = self._reports.pop(0)
            # One that ran twice, because its worker died, may have reported twice.
            if call := self._calls.pop(report.number, None):
                found.append((call, report))
        return found

    def clear(self) -> None:
        """Forget those in flight: they never end."""
        self._calls.clear()
