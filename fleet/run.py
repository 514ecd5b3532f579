"""The training run as the trainer on the chief's host describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What `python -m trainer status --json` says; a value that nobody knows is None."""

    run: str
    run_dir: str = ""
    program: str | None = None
    program_args: Mapping[str, Any] = field(default_factory=dict)
    state: str = "new"
    message: str = ""
    step: int | None = None
    steps: int | None = None
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    loss: float | str | None = None  # a text where it is no number, such as NaN
    metrics: Mapping[str, float | str] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    checkpoint: str | None = None
    export: str | None = None
    without: Mapping[str, str] = field(default_factory=dict)  # members that take no part, and what they are
    ways: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # how each member reaches each other one
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # their `steps` and `steps_per_second`
    faults: int = 0
    begun_from: str | None = None  # RUN@STEP of another run
    ledger: Mapping[str, Any] | None = None  # where the time went (trainer/telemetry/goodput.py)
    events: Sequence[Mapping[str, Any]] = ()  # the last ones, oldest first
    updated: float | None = None  # seconds since 1970 by the clock of the chief's host

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_run(values: Mapping[str, Any]) -> Run:
    """Make a Run of the trainer's JSON; keys of a newer trainer are passed over."""
    known = {each.name for each in fields(Run)}
    kept = {key: value for key, value in values.items() if key in known}
    evaluation = kept.get("evaluation")
    kept["evaluation"] = Evaluation(evaluation["step"], evaluation.get("metrics") or {}) if evaluation else None
    kept["metrics"] = kept.get("metrics") or {}
    kept["without"] = kept.get("without") or {}
    kept["ways"] = kept.get("ways") or {}
    kept["workers"] = kept.get("workers") or {}
    kept["message"] = kept.get("message") or ""
    kept["events"] = kept.get("events") or []
    return Run(**kept)
