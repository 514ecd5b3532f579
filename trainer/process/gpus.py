"""Whether a task has the GPUs that it is to train on. TensorFlow without them says nothing and takes the processor."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.process.server_library import load_server_library


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
