"""`fab logs`: the tasks' journals."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict

from fleet.actions.console import Console
from fleet.hosts.cluster import Cluster
from fleet.hosts.journal import EVERY_LINE, JournalEntry, JournalQuery
from fleet.output.tables import put
from fleet.output.terminal import is_read

# How many lines of each task's journal are shown.
LINES, CHOSEN_LINES = 20, 1000


def show_logs(
    cluster: Cluster,
    console: Console,
    task_name: str | None,
    lines: int | None,
    follow: bool,
    chosen: JournalQuery = EVERY_LINE,
) -> None:
    """Show the journal of one task, or of all with the task's name before each line.

    Without `lines` it is the last 20 of each task; where a run, a time or a pattern was chosen, the last 1000.
    """
    inventory = cluster.inventory
    most = lines if lines is not None else LINES if chosen == EVERY_LINE else CHOSEN_LINES
    tasks = list(inventory.tasks) if task_name is None else [inventory.task(task_name)]
    width = max(len(task.name) for task in tasks)
    number: Counter[str] = Counter()

    def show(entry: JournalEntry) -> None:
        if follow and not is_read(console.json_out or console.out):
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the verb waits for what the hosts will say
            return
        number[entry.task] += 1
        if console.json_out is not None:
            console.print_json("logs", asdict(entry), on_a_line=True)
            return
        for line in entry.message.splitlines() or [""]:
            timed = f"{clock(entry.time)} {line}"
            console.print(timed if task_name else f"{entry.task.ljust(width)} | {timed}")

    if follow:
        cluster.follow_journal(tasks, most, show, chosen)
        return
    cluster.read_journal(tasks, most, show, chosen)
    full = [task for task, count in number.items() if count >= most]
    if lines is None and full and chosen != EVERY_LINE:
        put(sys.stderr, f"these are the last {most} lines of {', '.join(full)}; for more: --lines {10 * most}")


def clock(moment: float, now: float | None = None) -> str:
    """Return a time by this machine's clock, with the date where it is not today's."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)
