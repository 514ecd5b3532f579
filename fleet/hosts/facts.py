"""What a host says of itself beside its tasks: load, memory, disks, GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# A path that hangs must not hold up the look.
DISK_SECONDS = 3
_NUMBERS = ("load", "processors", "memory_total", "memory_available", "disk_free", "shared_free", "up")
_KIB = ("memory_total", "memory_available", "disk_free", "shared_free")


def script(shared_dir: str) -> str:
    """Return a script that prints `name=value` lines below `@facts`; sizes in KiB, `up` in seconds."""
    path = shlex.quote(shared_dir)
    free = "timeout {} df -Pk {} 2>/dev/null | sed -n '2s/  */ /gp' | cut -d' ' -f4"
    query = "--query-gpu=name,utilization.gpu,memory.used,memory.total --format=csv,noheader,nounits"
    return "\n".join(
        (
            "echo '@facts'",
            "read load rest </proc/loadavg; echo load=$load; echo processors=$(nproc)",
            r"sed -n 's/^MemTotal: *\([0-9]*\).*/memory_total=\1/p' /proc/meminfo",
            r"sed -n 's/^MemAvailable: *\([0-9]*\).*/memory_available=\1/p' /proc/meminfo",
            f"echo disk_free=$({free.format(DISK_SECONDS, '/opt')})",
            f"echo shared_free=$({free.format(DISK_SECONDS, path)})",
            "read up rest </proc/uptime; echo up=$up",
            f"if command -v nvidia-smi >/dev/null; then timeout 5 nvidia-smi {query} 2>/dev/null | sed 's/^/gpu=/'; fi",
        )
    )


def parse(text: str) -> dict[str, Any]:
    """Read what `script` printed: sizes in bytes, None for what the host did not say; `gpus` is a list of texts."""
    found: dict[str, Any] = {**dict.fromkeys(_NUMBERS), "gpus": []}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name == "gpu":
            found["gpus"].append(value)
        elif name in _NUMBERS:
            try:
                found[name] = float(value) * (1024 if name in _KIB else 1)
            except ValueError:
                continue
    return found


def describe_gpus(facts: Mapping[str, Any]) -> str:
    """Return each GPU's name, use and memory in a few words."""
    gpus = []
    for text in facts.get("gpus") or ():
        name, use, used, total = ([*map(str.strip, text.split(",")), "", "", ""])[:4]
        gpus.append(f"{name} {use} %, {used} of {total} MiB")
    return "; ".join(gpus)
