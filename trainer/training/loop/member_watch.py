"""What becomes of a training while calls are in flight: it waits, goes on without workers, or leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trainer.cluster.members.formation import MembershipChanged
from trainer.core.failures import Stopped, UserError
from trainer.core.states import Phase, RunState
from trainer.training.loop.progress_meter import ProgressMeter
from trainer.training.loop.scheduler import Schedule
from trainer.training.loop.stop_patience import StopPatience
from trainer.training.loop.worker_absence import WorkerAbsence
from trainer.training.run_context import RunContext
from trainer.training.steps.runner import CALL_POLL_SECONDS

log = logging.getLogger(__name__)


class MemberWatch:
    """Knows whether a worker is present, and for how long a request to stop has waited for calls."""

    def __init__(self, context: RunContext, schedule: Schedule, meter: ProgressMeter, save: Callable[[], None]) -> None:
        """`save` saves before this process leaves."""
        self._members, self.stopping = context.membership, context.stopping
        self._progress, self._phases = context.progress, context.phases
        self._schedule = schedule
        self._meter = meter
        self._save = save
        self._patience = StopPatience()
        self._absence = WorkerAbsence(context.config.member_wait_timeout_seconds)

    def wait(self, is_failing: Callable[[], bool]) -> None:
        """Look around while calls are in flight. `is_failing` tells whether calls have only ever failed.

        Leaves when asked to stop and they will not end in time, or when no worker came for the user's limit; raises
        Stopped, and UserError. Raises MembershipChanged when no worker reaches a ps: calls in flight would not end.
        """
        if self._members is not None and (unreachable := self._members.unreachable_ps()):
            raise MembershipChanged("; ".join(unreachable.values()))
        alive = self._members is None or bool(self._members.workers_serving())
        self.note(alive)
        if self.stopping():
            self._schedule.close()
            if why := self._patience.why_leave(time.monotonic(), has_workers=alive, is_failing=is_failing()):
                log.warning("%s: saving without it", why)
                self._save()
                raise Stopped
        time.sleep(CALL_POLL_SECONDS)

    def note(self, alive: bool) -> None:
        """Tell the time in which no worker is present from that of the training, which it neither is nor slows down."""
        now, absence = time.monotonic(), self._absence
        if not alive and not absence.lasts:
            absence.begin(now, self._phases.seconds)
            self._phases.enter(Phase.WAITING)
            self._progress.enter(RunState.WAITING, "no worker answers: going on with the first that is back")
        elif not alive and self._members and self._members.leaving_workers():
            self._meter.leave_out(absence.excuse(now))  # their hosts are rebooted: no limit is for that
        elif not alive and absence.is_too_long(now):
            self._save()
            seconds = absence.seconds(now)
            raise UserError(f"waited {seconds:.0f} s (member_wait_timeout_seconds) for a worker: start one")
        elif alive and absence.lasts:
            self._schedule.paused(now)
            seconds, used = absence.end(now)
            self._meter.leave_out(seconds)
            self._phases.enter(Phase.TRAINING, used)
            self._progress.enter(RunState.TRAINING)
