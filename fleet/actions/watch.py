"""Looking at a cluster that was started, until it is where the operator wants it."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.actions.console import Console
from fleet.actions.shipping import BOTH_SECONDS
from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.hosts.run import Run, script_of_news
from fleet.hosts.units import Health
from fleet.output.tables import ProgressLine
from fleet.planning import decision
from fleet.site.topology import Task
from fleet.status import status_text

# How often the chief's host is asked for the run, and all hosts for their units.
RUN_SECONDS = 0.5
# Until a step is trained its host waits so long for news, and says them at once.
NEWS_SECONDS = 1.0
SHORT_SECONDS = 0.1
UNITS_SECONDS = 3.0
# Once a step is trained, looking at all hosts takes no more than one part in so many of the time.
UNITS_SHARE = 20
# The chief's host may be silent for so long before the watching ends; the training goes on without us. A slow one that
# builds its model has little time for SSH.
SILENCE_SECONDS = 180.0
# The evaluator gets so long after the last step.
EVALUATION_SECONDS = 180.0


class StartWatch:
    """Look at a started cluster until it is where the operator wants it."""

    def __init__(self, cluster: Cluster, console: Console, started: float, begun: float, hosts: Sequence[str]) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._console = console
        self._inventory = cluster.inventory
        self._started = started  # by the clock of the chief's host, which stamps the run's state too
        self._begun = begun
        self._restarts: dict[str, tuple[int | None, int]] = {}  # by task: the last step, the restarts before it
        self._first_step: int | None = None
        self._first_step_at = begun
        self._last_step: int | None = None
        self._last_step_at = begun
        self._heard = begun
        self._units_at: float | None = None
        self._units_took = 0.0
        self._took = 0.0  # the last look at the run
        self._trained = False
        self.timed_out = False
        self._observation = Observation()
        self.run: Run | None = None
        self.progress = ProgressLine(console.progress_out or console.out, clock=console.clock)

    def until_trained(self, timeout: float) -> Run:
        """Wait for the first new step; raise with what is wrong when the timeout passes without one."""
        while True:
            run = self._poll()
            if run and (run.state == "finished" or self._has_trained(run)):
                self._trained = True
                return run
            if self._console.clock() - self._begun > timeout:
                self.timed_out = True
                raise self._describe_timeout(timeout)
            self.progress.show(
                status_text.render_progress(run)
                if run and run.state == "training"
                else status_text.render_waiting(self._inventory, self._observation)
            )
            self._rest()

    def until_finished(self) -> Run:
        """Wait for the run's end. Where a queue took it in meanwhile and has the next, it is returned as it was."""
        watched = self.run
        while True:
            run = self._poll()
            if run and watched and run.run != watched.run:
                return watched
            watched = run or watched
            if run:
                if run.state == "finished":
                    return run
                self.progress.show(status_text.render_progress(run, self._console.clock() - self._last_step_at))
            self._rest()

    def until_evaluated(self, run: Run) -> bool:
        """Wait for the evaluation of the last step; False when none comes in time."""
        end = self._console.clock() + EVALUATION_SECONDS
        while self._console.clock() < end:
            latest = self._poll() or run
            if decision.is_evaluated(latest):
                return True
            self.progress.show(f"step {run.step}: finished, waiting for its evaluation")
            self._rest()
        return False

    def _rest(self) -> None:
        """Wait until the next look: a host that is slow to answer is asked less often."""
        awaits = self._awaited is not None and self._took < 2 * NEWS_SECONDS
        self._console.sleep(SHORT_SECONDS if awaits else max(RUN_SECONDS, self._took))

    @property
    def _awaited(self) -> Run | None:
        """The run of whose news its host waits."""
        return None if self._trained else self._observation.run

    @property
    def steps_per_second(self) -> float | None:
        """The pace over the whole of what was watched."""
        if self._first_step is None or self._last_step is None or self._last_step_at <= self._first_step_at:
            return None
        return (self._last_step - self._first_step) / (self._last_step_at - self._first_step_at)

    def _poll(self) -> Run | None:
        """Ask for the run, now and then for all units; return the run once this start's coordinator has spoken."""
        now = self._console.clock()
        pause = max(UNITS_SECONDS, UNITS_SHARE * self._units_took) if self._trained else UNITS_SECONDS
        whole = self._units_at is None or now - self._units_at >= pause
        chief = self._inventory.chief
        first = None
        if self._awaited and not whole:
            first = {chief.host: script_of_news(self._awaited, NEWS_SECONDS)}
        seen = self._cluster.observe(
            self._hosts if whole else [chief.host], new_is_enough=True, first=first, first_seconds=BOTH_SECONDS
        )
        self._took = self._console.clock() - now
        if whole:
            self._units_at = self._console.clock()
            self._units_took = self._took
            self._observation = seen
        if chief.host in seen.unreachable:
            if now - self._heard > SILENCE_SECONDS:
                raise HostsUnreachable(seen.unreachable, "the training may go on without it being watched: fab status")
            return None
        self._heard = now
        if seen.run_error:
            raise seen.run_error
        run = seen.run
        self._observation.run = run
        fresh = run if run and run.updated is not None and run.updated >= self._started else None
        if fresh and fresh.step is not None and fresh.step != self._last_step:
            self._last_step = fresh.step
            self._last_step_at = now
        # systemd needs a moment from the request to the first sign of life.
        stopped = seen.units[chief.name].health is Health.STOPPED and now - self._begun > 2 * UNITS_SECONDS
        self._reject_trouble(seen, fresh, stopped)
        if run and run.state == "finished" and stopped:
            self._reject_too_short(run)
            fresh = run  # a run that was complete before: its coordinator has nothing to write
        if fresh:
            self.run = fresh
        return fresh

    def _reject_trouble(self, seen: Observation, run: Run | None, stopped: bool) -> None:
        before: dict[str, int] = {}
        for name, unit in seen.units.items():
            step, restarts = self._restarts.get(name, (None, unit.restarts))
            # Restarts between steps are recovery. A counter that went back was reset: systemd counts from the last
            # start by hand.
            before[name] = unit.restarts if step != self._last_step else min(restarts, unit.restarts)
            self._restarts[name] = self._last_step, before[name]
        tasks = [task for task in self._inventory.tasks if task.name in seen.units]
        found = decision.find_troubles(tasks, seen.units, before, run)
        chief = self._inventory.chief
        if run and run.state == "failed":
            found.setdefault(chief, run.message or "the run failed")
        if found:
            raise ClusterTrouble("", self._cluster.trouble(found))
        if stopped and not (seen.run and seen.run.state == "finished"):
            where = f" at step {seen.run.step}" if seen.run and seen.run.step is not None else ""
            raise ClusterTrouble(f"{chief.name} on {chief.host} was stopped{where} while fab was watching")

    def _reject_too_short(self, run: Run) -> None:
        """Raise when the coordinator leaves a run that ended before the inventory's last step."""
        if run.step is not None and run.step < self._inventory.steps:
            what = (
                f"ended without training: it finds run {run.run} finished at step {run.step}, but the inventory wants "
                f"{self._inventory.steps} steps. Compare trainer_run with /etc/trainer/run.json there"
            )
            raise ClusterTrouble("", self._cluster.trouble({self._inventory.chief: what}))

    def _has_trained(self, run: Run) -> bool:
        if run.state != "training" or run.step is None:
            return False
        if self._first_step is None:
            self._first_step = run.step
            self._first_step_at = self._console.clock()
        # The coordinator tells its first step at once, and the step's number each log_seconds.
        begun = any(each.get("event") == "training" and each.get("time", 0) >= self._started for each in run.events)
        return begun or run.step > self._first_step

    def _describe_timeout(self, timeout: float) -> FleetError:
        seen = self._cluster.observe(self._hosts)
        late: dict[Task, str] = {}
        for task in self._inventory.tasks:
            unit = None if task.host in seen.drains else seen.units.get(task.name)
            if unit and unit.health is not Health.RUNNING:
                late[task] = f"is {unit.active} ({unit.sub})"
        if not late and self._inventory.chief.name in seen.units:
            late[self._inventory.chief] = f"runs; {status_text.render_run(seen.run)}"
        message = f"no step was trained in {timeout:.0f} s; the tasks go on trying (fab stop-cluster stops them)"
        trouble = ClusterTrouble(message, self._cluster.trouble(late))
        return HostsUnreachable(seen.unreachable, str(trouble)) if seen.unreachable else trouble
