"""`fab status --watch`: look on until Ctrl-C, whatever becomes of the hosts meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from rich.live import Live

from fleet.actions.console import Console
from fleet.actions.watch import RUN_SECONDS, UNITS_SECONDS, UNITS_SHARE
from fleet.hosts.cluster import Cluster
from fleet.hosts.observation import Observation
from fleet.output.tables import ProgressLine
from fleet.output.terminal import is_read, is_terminal
from fleet.site.inventory import Inventory
from fleet.status import status_text
from fleet.status.status_text import status_record
from fleet.status.status_view import draw, screen_of

# Each host is asked by itself, and all of them no more often together than this.
LOOKS_PER_SECOND = 10.0
# A host that has not answered for so long, though it was asked, is named.
QUIET_SECONDS = 5.0


class StatusWatch:
    """Asks every host again and again, each on a thread of its own: one that vanishes holds up no other.

    The connections are the cluster's, which stay open.
    """

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self._cluster = cluster
        self._clock = console.clock
        self._lock = threading.Lock()
        self._seen = Observation()
        self._asked: dict[str, float] = {}  # hosts whose answers are awaited, since when
        self._over = threading.Event()
        self._waited = set(cluster.inventory.hosts)

    def begin(self) -> None:
        for host in self._cluster.inventory.hosts:
            threading.Thread(target=self._follow, args=(host,), name=f"watch {host}", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    @property
    def is_known(self) -> bool:
        """Whether each host has answered once, or does not in time."""
        with self._lock:
            return all(self._clock() - self._asked.get(host, 0.0) > QUIET_SECONDS for host in self._waited)

    def snapshot(self) -> tuple[Observation, dict[str, float]]:
        """Return what is known, and the seconds of each host that is asked and does not answer."""
        with self._lock:
            now = self._clock()
            quiet = {host: now - since for host, since in self._asked.items() if now - since > QUIET_SECONDS}
            quiet = {host: seconds for host, seconds in quiet.items() if host not in self._seen.unreachable}
            known = Observation()
            known.merge(self._seen)
            return known, quiet

    def _follow(self, host: str) -> None:
        hosts = self._cluster.inventory.hosts
        least = RUN_SECONDS if host == self._cluster.inventory.chief.host else UNITS_SECONDS
        while not self._over.is_set():
            begun = self._clock()
            with self._lock:
                self._asked[host] = begun
            try:
                seen = self._cluster.observe([host], running=True)
            except Exception as error:  # as when the operator leaves in the middle of it
                seen = Observation(unreachable={host: str(error)})
            took = self._clock() - begun
            with self._lock:
                del self._asked[host]
                self._take(host, seen)
                self._waited.discard(host)
            # As start-cluster does: the run is looked at often, all else takes a small part of the time.
            slow = took if least == RUN_SECONDS or host in seen.unreachable else UNITS_SHARE * took
            self._over.wait(max(least, slow, len(hosts) / LOOKS_PER_SECOND))

    def _take(self, host: str, seen: Observation) -> None:
        """Replace what was known of a host: one that is lost has no units any more, and the run stays as it was."""
        for task in self._cluster.inventory.tasks_on(host):
            for known in (self._seen.units, self._seen.listening, self._seen.configured, self._seen.running):
                known.pop(task.name, None)
        self._seen.unreachable.pop(host, None)
        self._seen.marked.discard(host)
        if host == self._cluster.inventory.chief.host and host not in seen.unreachable:
            self._seen.drains = {name: self._seen.drains[name] for name in self._seen.marked}
            self._seen.run, self._seen.run_error, self._seen.selection = None, None, {}
        self._seen.merge(seen)


def watch_status(cluster: Cluster, console: Console, until: Callable[[], bool] = lambda: False) -> None:
    """Show the cluster until Ctrl-C: on a terminal a view that is redrawn, elsewhere a line where it changes.

    With `--json` each look is an object on a line. It ends, too, when its output is closed.
    """
    watch, stream = StatusWatch(cluster, console), console.json_out or console.out
    watch.begin()
    try:
        if console.json_out is None and is_terminal(stream):
            _draw(cluster, console, watch, until)
            return
        line = ProgressLine(stream, clock=console.clock)
        while not until() and is_read(stream):
            if watch.is_known:
                seen, quiet = watch.snapshot()
                if console.json_out is not None:
                    console.print_json("status", status_record(cluster.inventory, seen, quiet), on_a_line=True)
                else:
                    line.show(in_a_line(cluster.inventory, seen, quiet))
            console.sleep(RUN_SECONDS)
    finally:
        watch.end()


def _draw(cluster: Cluster, console: Console, watch: StatusWatch, until: Callable[[], bool]) -> None:
    screen = screen_of(console.out)
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        while not until():
            if watch.is_known:
                seen, quiet = watch.snapshot()
                live.update(draw(cluster.inventory, seen, quiet, screen.height), refresh=True)
            else:
                live.update(f"asking {len(cluster.inventory.hosts)} hosts", refresh=True)
            console.sleep(RUN_SECONDS)


def in_a_line(inventory: Inventory, seen: Observation, quiet: Mapping[str, float]) -> str:
    """Say the run, and who is not as it should be."""
    rows = status_text.task_rows(inventory, seen, quiet)
    wrong = [f"{row['task']} {row['state']}" for row in rows if row["trouble"]]
    return "; ".join([status_text.render_run(seen.run).replace("\n", ";"), *wrong])
