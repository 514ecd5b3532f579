"""Which GPUs a task is to train on, and whether it has them: TensorFlow without them takes the processor, silently."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from trainer.process.server_library import load_server_library
from trainer.telemetry.gpu_use import SECONDS
from trainer.telemetry.logs import HIDES_ALL


def find_missing(environment: Mapping[str, str]) -> str | None:
    """Compare the GPUs that TensorFlow sees with TRAINER_GPUS, which the role `trainer` writes; None when all is well.

    Counting them takes no memory of theirs.
    """
    wanted = environment.get("TRAINER_GPUS")
    if not wanted:
        return None
    found = len(load_server_library().list_physical_devices("GPU"))
    if found == int(wanted):
        return None
    return (
        f"TensorFlow sees {found} GPUs and this task has {wanted} "
        f"(CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES')}). `fab gpu-check` says what is wrong"
    )


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """Name the GPUs that a process may use, as CUDA_VISIBLE_DEVICES does: as it names them, else by UUID."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [] if visible.strip() in HIDES_ALL else [name.strip() for name in visible.split(",")]
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if asked.returncode else [line.strip() for line in asked.stdout.splitlines() if line.startswith("GPU-")]


def share_gpus(gpus: Sequence[str], tasks: int) -> list[str]:
    """Deal GPUs out to the tasks that train, as many to each; where there are fewer, several tasks share one."""
    each = max(1, len(gpus) // tasks)
    return [",".join(gpus[(place * each + n) % len(gpus)] for n in range(each)) for place in range(tasks)]
