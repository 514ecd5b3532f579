"""What this process takes of its machine, for the run's page: <run>/tasks/<task>.jsonl, each written by its own task.

{"t", "memory": bytes that are resident, "processor": cores in use since the line before, "cores": of the machine}
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.reporting.events import append
from trainer.reporting.history import thin_file
from trainer.run.directory import RunDirectory

FIRST_SECONDS, EVERY_SECONDS = 5.0, 60.0
MOST_BYTES = 256 * 2**10


def record_resources(task: str, directory: Callable[[], RunDirectory | None]) -> None:
    """Write now and then, in a thread of its own; `directory` says which run this process works for by then."""
    threading.Thread(target=_record, args=(task, directory), name="resources", daemon=True).start()


def _record(task: str, directory: Callable[[], RunDirectory | None]) -> None:
    used, since, pause = cpu_seconds(), time.monotonic(), FIRST_SECONDS
    while True:
        time.sleep(pause)
        before, began, used, since, pause = used, since, cpu_seconds(), time.monotonic(), EVERY_SECONDS
        run = directory()
        if run is not None and run.path.is_dir():
            write_line(run.tasks / f"{task}.jsonl", (used - before) / (since - began))


def write_line(path: Path, processor: float) -> None:
    line = {"t": round(time.time(), 1), "memory": memory(), "processor": round(processor, 3), "cores": os.cpu_count()}
    append(path, json.dumps(line, separators=(",", ":")))
    thin_file(path, MOST_BYTES)


def memory() -> int:
    """Return the bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system
