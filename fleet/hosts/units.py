"""systemd's view of a task, and what it means for the operator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

from trainer.core.failures import USER_ERROR

PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "Result", "ExecMainStatus", "NRestarts",
    "StatusText", "StateChangeTimestamp", "MainPID", "WatchdogTimestamp", "WatchdogUSec",
)  # fmt: skip

# So many restarts without a new step are no recovery any more.
MAX_RESTARTS = 3


class Health(Enum):
    RUNNING = "running"
    STARTING = "starting"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    ABSENT = "not installed"


@dataclass(frozen=True)
class Unit:
    """One unit as `systemctl show` describes it."""

    name: str
    load: str = "loaded"
    active: str = "inactive"
    sub: str = "dead"
    file_state: str = "disabled"
    result: str = "success"
    exit_status: int = 0
    restarts: int = 0
    status_text: str = ""
    since: float | None = None  # when the state last changed, in seconds since 1970 by the host's clock
    pid: int = 0  # 0: no process
    alive: float | None = None  # its last sign of life to systemd's watchdog, likewise
    watchdog: float | None = None  # after so many seconds without one systemd ends it

    @property
    def enabled(self) -> bool:
        return self.file_state.startswith("enabled")

    @property
    def health(self) -> Health:
        if self.load != "loaded":
            return Health.ABSENT
        if self.active == "failed":
            return Health.FAILED
        if self.active == "activating":
            return Health.RESTARTING if self.sub.startswith("auto-restart") else Health.STARTING
        return {
            "active": Health.RUNNING,
            "reloading": Health.RUNNING,
            "deactivating": Health.STOPPING,
        }.get(self.active, Health.STOPPED)

    def silent(self, now: float) -> float | None:
        """Return for how long (seconds) it has given no sign of life, if it should have given two meanwhile.

        A server's is that it answers TensorFlow's own GetStatus.
        """
        if self.alive is None or not self.watchdog or self.health is not Health.RUNNING:
            return None
        seconds = now - self.alive
        return seconds if seconds > self.watchdog * 2 / 3 else None

    @property
    def parked(self) -> bool:
        """Whether its supervisor waits, without a child, until it is asked to go on (trainer/process/supervisor.py)."""
        return self.health is Health.RUNNING and self.status_text.startswith("parked")

    @property
    def up(self) -> bool:
        """Whether systemd runs it or is about to."""
        return self.health in (Health.RUNNING, Health.STARTING, Health.RESTARTING)

    @property
    def idle(self) -> bool:
        """Whether a start has something to do for it."""
        return self.parked or not self.up

    def describe_down(self) -> str:
        """Say that a unit does not run, and how it ended."""
        return {Health.FAILED: "has failed", Health.ABSENT: "is not installed"}.get(self.health, "does not run")

    def describe_failure(self) -> str:
        if self.result == "exit-code" and self.exit_status == 0:
            return "failed in a step before its start"
        if self.result == "exit-code":
            meaning = " (the user's error: systemd does not try again)" if self.exit_status == USER_ERROR else ""
            return f"exited with code {self.exit_status}{meaning}"
        return {
            "signal": f"was killed by signal {self.exit_status}",
            "core-dump": f"crashed with signal {self.exit_status}",
            "timeout": "did not start or stop in time",
            "watchdog": "gave systemd's watchdog no sign of life",
            "oom-kill": "was killed: the host had no memory left",
        }.get(self.result, f"failed ({self.result})")


def parse_units(text: str) -> dict[str, Unit]:
    """Read `systemctl show` of several units; keys are unit names."""
    return {name: _unit(values) for name, values in properties_of(text).items()}


def properties_of(text: str) -> dict[str, dict[str, str]]:
    """Return by unit what `systemctl show` says of several: in a block each, in an order of its own."""
    blocks = [
        dict(line.split("=", 1) for line in block.split("\n") if "=" in line) for block in text.strip().split("\n\n")
    ]
    return {values["Id"]: values for values in blocks if values.get("Id")}


def _unit(values: Mapping[str, str]) -> Unit:
    return Unit(
        name=values["Id"],
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        file_state=values.get("UnitFileState", ""),
        result=values.get("Result", ""),
        exit_status=int(values.get("ExecMainStatus") or 0),
        restarts=int(values.get("NRestarts") or 0),
        status_text=values.get("StatusText", ""),
        since=_timestamp(values.get("StateChangeTimestamp", "")),
        pid=int(values.get("MainPID") or 0),
        alive=_timestamp(values.get("WatchdogTimestamp", "")),
        watchdog=_time_span(values.get("WatchdogUSec", "")),
    )


def _timestamp(text: str) -> float | None:
    # "Thu 2025-11-20 14:25:01 UTC"; the script that asks sets TZ=UTC. Empty or "n/a": never.
    try:
        return datetime.strptime(text, "%a %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def _time_span(text: str) -> float | None:
    # As systemd writes it: "30s", "1min 30s". Empty, "0" or "infinity": none.
    units = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
    found = re.findall(r"(\d+)(d|h|min|s|ms|us)\b", text)
    return sum(int(number) * units[unit] for number, unit in found) or None


def find_trouble(unit: Unit, restarts_before: int) -> str | None:
    """Say why a task that should run won't, or None. A restart or two is recovery at work."""
    if unit.health is Health.FAILED:
        return unit.describe_failure()
    if unit.health is Health.ABSENT:
        return f"systemd knows no {unit.name}: run `ansible-playbook site.yml`"
    if unit.restarts - restarts_before >= MAX_RESTARTS:
        last = f"; the last time it {unit.describe_failure()}" if unit.result != "success" else ""
        return f"was restarted {unit.restarts - restarts_before} times without a new step{last}"
    return None
