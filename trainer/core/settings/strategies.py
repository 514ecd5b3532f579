"""The strategies of TensorFlow, as far as the package must know of them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What the package must know of a strategy; trainer/training/strategies.py makes them."""

    jobs: tuple[str, ...] = ("chief",)
    """Those that take part. An evaluator may stand beside any of them."""
    remote: bool = False
    """Whether workers compute what the coordinator schedules, on variables that lie on the ps."""
    in_step: bool = False
    """Whether each member runs the program, and must save, evaluate and stop together with the others."""


STRATEGIES = {
    "parameter_server": Strategy(("chief", "ps", "worker"), remote=True),
    "multi_worker_mirrored": Strategy(("chief", "worker"), in_step=True),
    "mirrored": Strategy(),
    "one_device": Strategy(),
    "central_storage": Strategy(),
}
