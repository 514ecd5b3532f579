"""Points of a training: when which step was reached, and the speed between two of them."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """The step (batches applied, all workers together) at a time (seconds since 1970)."""

    time: float
    step: int


def print_point(step: int) -> None:
    print(json.dumps({"time": time.time(), "step": step}), flush=True)


def read_point(line: str) -> TimedStep | None:
    """Return what `print_point` printed, or None for any other line."""
    if not line.startswith('{"time"'):
        return None
    return TimedStep(**json.loads(line))


def take_point(points: list[TimedStep], status: Path) -> dict[str, Any]:
    """Add the step of a run's status where it is a new one; returns the status, empty while there is none."""
    read: dict[str, Any] = json.loads(status.read_text(encoding="utf-8")) if status.exists() else {}
    if read.get("state") == "training" and read["step"] and (not points or read["step"] > points[-1].step):
        points.append(TimedStep(read["updated"], read["step"]))
    return read


def spans(points: list[TimedStep], seconds: float) -> bool:
    """Return whether so much time lies between the first point and the last."""
    return bool(points) and points[-1].time - points[0].time >= seconds


def speed(points: list[TimedStep], warm_up: float) -> float | None:
    """Return the steps per second between the first point after the warm-up and the last one.

    The warm-up (seconds) begins at the first point, so that what comes before the first steps never counts.
    None as long as there are not two such points.
    """
    steady = [point for point in points if point.time - points[0].time >= warm_up]
    if len(steady) < 2:
        return None
    return (steady[-1].step - steady[0].step) / (steady[-1].time - steady[0].time)
