"""Putting back what was there before a start that fails."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from fleet.actions.console import Console
from fleet.actions.exclusive import restart_previous
from fleet.actions.stopping import stop_tasks
from fleet.errors import FleetError, HostsUnreachable
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.planning.plan import Plan
from fleet.signals import undisturbed


class StartRollback:
    """A context that brings back the run, the release, the files and what ran, if what stands in it fails.

    It says what can't be brought back, and leaves the error to the caller.
    """

    def __init__(self, cluster: Cluster, console: Console, plan: Plan, before: Observation) -> None:
        self.plan = plan
        self.begun_run: str | None = None
        """Was made of a checkpoint and not started: without it, its name can be given again."""
        self._cluster = cluster
        self._console = console
        self._before = before

    def __enter__(self) -> StartRollback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.restore_state()

    def restore_state(self) -> None:
        """Put everything back. Ctrl-C is not heeded meanwhile: half of it would be neither the old nor the new."""
        with undisturbed():
            self._console.print("the start is broken off: what was there before is put back")
            seen = self._cluster.observe(self.plan.hosts, new_is_enough=True)
            away, failed = self._carry_out(self._steps(seen), dict(seen.unreachable))
            if failed:
                self._say_what_is_left(away)
            else:
                self._say_what_is_back()

    def _steps(self, seen: Observation) -> dict[str, Callable[[], None]]:
        """Return what has to be done, in its order, by what it is for."""
        cluster, before, plan = self._cluster, self._before, self.plan
        chief = plan.inventory.chief.host
        steps: dict[str, Callable[[], None]] = {
            "stop the new tasks": lambda: stop_tasks(cluster, self._console, seen),
            "put back release, settings and units": lambda: cluster.restore_state(plan.hosts),
        }
        if plan.choice.write:
            steps["select what was selected before"] = lambda: cluster.select(before.selection)
        steps["name the release to the tasks"] = lambda: cluster.publish_release(before.releases[chief] or "")
        steps["start what ran before"] = lambda: restart_previous(cluster, plan.hosts)
        return steps

    def _carry_out(self, steps: dict[str, Callable[[], None]], away: dict[str, str]) -> tuple[dict[str, str], bool]:
        """Do each step, whatever becomes of the others; return the hosts that are away, and whether a step failed."""
        failed = False
        for what, step in steps.items():
            failed |= not self._succeeds(what, step, away)
        if (begun := self.begun_run) is None:
            return away, failed
        if failed:
            self._console.print(f"run {begun} is kept, since it may be selected still")
            return away, True
        return away, not self._succeeds(
            f"remove run {begun}, which had begun", lambda: self._cluster.forget(begun), away
        )

    def _succeeds(self, what: str, step: Callable[[], None], away: dict[str, str]) -> bool:
        try:
            step()
        except FleetError as error:
            if isinstance(error, HostsUnreachable):
                away.update(error.reasons)
            self._console.print(f"could not {what}: {error}")
            return False
        return True

    def _say_what_is_left(self, away: dict[str, str]) -> None:
        self._console.print("not everything was put back: see above, and fab status")
        if gone := [host for host in self.plan.hosts if host in away]:
            release = self._before.releases.get(gone[0]) or "none"
            self._console.print(
                f"{', '.join(gone)} may have the new release, settings and units. When it is back, run `fab "
                f"start-cluster` again; from the checkout of release {release}, to have what was there before"
            )

    def _say_what_is_back(self) -> None:
        before = self._before
        ran = [
            each.name
            for each in self._cluster.inventory.tasks
            if each.name in before.units and before.units[each.name].up
        ]
        chosen = f"run {before.run.run}" if before.run else "no run"
        releases = ", ".join(sorted({release or "none" for release in before.releases.values()}))
        again = f"started again: {', '.join(ran)}" if ran else "nothing ran, and nothing was started"
        self._console.print(f"put back: {chosen}, release {releases}; {again}")
