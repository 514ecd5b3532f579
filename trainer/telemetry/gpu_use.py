"""What the GPUs do that this process may use, as nvidia-smi says: TensorFlow knows only what it took of their memory.

A GPU that tasks share counts for each of them. Of MIG instances nvidia-smi tells no use (docs/gpu.md).
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import os
import subprocess
from collections.abc import Iterable, Mapping

from trainer.telemetry.logs import HIDES_ALL

log = logging.getLogger(__name__)
FIELDS = "index,uuid,utilization.gpu,memory.used"
SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class GpuUse:
    """The share of time in which they computed, from 0 to 1 (their mean), and their memory in use, in bytes."""

    busy: float
    memory: int


def read_gpu_use(environment: Mapping[str, str] = os.environ) -> GpuUse | None:
    """Ask nvidia-smi; None where the process has no GPU, or nothing is known of it."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in HIDES_ALL:
        return None
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("nvidia-smi does not say what the GPUs do: %s", error)
        return None
    return None if asked.returncode else parse(asked.stdout.splitlines(), visible)


def parse(lines: Iterable[str], visible: str | None) -> GpuUse | None:
    """Read nvidia-smi's lines, one a GPU; `visible` names those of the process, by index or (part of) UUID."""
    wanted = None if visible is None else [name.strip() for name in visible.split(",")]
    busy, memory = [], 0
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) != 4:
            continue
        index, uuid, used, mebibytes = (cell.strip() for cell in row)
        is_ours = wanted is None or any(name == index or (name and uuid.startswith(name)) for name in wanted)
        if is_ours and used.isdecimal() and mebibytes.isdecimal():  # else "[N/A]"
            busy.append(int(used) / 100)
            memory += int(mebibytes) * 2**20
    return GpuUse(round(sum(busy) / len(busy), 3), memory) if busy else None
