"""What each task takes of its machine, for the run's page: <run>/tasks/<task>.jsonl, a line now and then.

{"t", "memory": bytes that are resident, "processor": cores in use since the line before, "cores": of the machine,
 "gpu": share of time in which its GPUs computed, "gpu_memory": bytes in use there; where it has GPUs}

A task writes its own. A worker on a host may write nothing: the coordinator asks it where it is scraped, and writes.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.run.directory import RunDirectory
from trainer.telemetry.events import append
from trainer.telemetry.gpu_use import GpuUse, read_gpu_use
from trainer.telemetry.history import thin_file

log = logging.getLogger(__name__)
FIRST_SECONDS, EVERY_SECONDS = 5.0, 60.0
MAX_BYTES = 256 * 2**10
WORKERS = "TRAINER_METRICS_OF_WORKERS"  # the coordinator's environment: {"worker-0": "address:port", ...}
ANSWER_SECONDS = 2.0
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
AT_ONCE = 16
NAMES = (
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_start_time_seconds",
    "psfleet_task_gpu_busy_ratio",
    "psfleet_task_gpu_memory_used_bytes",
)
_gpu_use: GpuUse | None = None


def gpu_use() -> GpuUse | None:
    """Return what this process's GPUs did when it was looked at last: a scrape starts no nvidia-smi."""
    return _gpu_use


def record_resources(task: str, directory: Callable[[], RunDirectory | None]) -> None:
    """Write now and then, in a thread of its own; `directory` says which run this process works for by then."""
    threading.Thread(target=_record, args=(task, directory), name="resources", daemon=True).start()


def _record(task: str, directory: Callable[[], RunDirectory | None]) -> None:
    global _gpu_use
    used, since, pause = cpu_seconds(), time.monotonic(), FIRST_SECONDS
    workers = Workers(json.loads(os.environ.get(WORKERS) or "{}"))
    while True:
        time.sleep(pause)
        before, began, used, since = used, since, cpu_seconds(), time.monotonic()
        pause = min(2 * pause, EVERY_SECONDS)  # of a short run there are some lines as well
        _gpu_use = read_gpu_use()
        run = directory()
        if run is None or not os.access(run.path, os.W_OK):
            continue
        processor = round((used - before) / (since - began), 3)
        gpu = {} if _gpu_use is None else {"gpu": _gpu_use.busy, "gpu_memory": _gpu_use.memory}
        taken = {"memory": memory(), "processor": processor, "cores": os.cpu_count(), **gpu}
        write_line(run.tasks / f"{task}.jsonl", taken)
        for worker, answer in workers.ask().items():
            write_line(run.tasks / f"{worker}.jsonl", answer)


class Workers:
    """The workers that are scraped at `addresses`, and the processor time that each had used when it was asked last."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._before: dict[str, tuple[float, float, float | None]] = {}

    def ask(self) -> dict[str, dict[str, float]]:
        """Return the memory of each that answers, and its `processor` where its process is that of the last time."""
        if not self._addresses:
            return {}
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="resources") as pool:
            answers = dict(zip(self._addresses, pool.map(read_process, self._addresses.values()), strict=True))
        taken: dict[str, dict[str, float]] = {}
        for worker, (memory, used, started, busy, held) in answers.items():
            if memory is None or used is None:
                continue
            now = time.monotonic()
            taken[worker] = {"memory": int(memory)}
            if busy is not None and held is not None:
                taken[worker] |= {"gpu": busy, "gpu_memory": int(held)}
            before, since, of = self._before.get(worker, (used, now, None))
            if of == started and now > since:
                taken[worker]["processor"] = round((used - before) / (now - since), 3)
            self._before[worker] = (used, now, started)
        return taken


def write_line(path: Path, taken: Mapping[str, float | None]) -> None:
    append(path, json.dumps({"t": round(time.time(), 1), **taken}, separators=(",", ":")))
    thin_file(path, MAX_BYTES)


def read_process(address: str) -> list[float | None]:
    """Ask a task where it is scraped: the values of NAMES; None each where it does not say."""
    try:
        with DIRECTLY.open(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith(NAMES)]
        known = {words[0]: float(words[1]) for words in lines if len(words) == 2}
    except (OSError, ValueError) as error:
        log.debug("%s does not say what it takes: %s", address, error)
        known = {}
    return [known.get(name) for name in NAMES]


def memory() -> int:
    """Return the bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system
