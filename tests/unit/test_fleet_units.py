"""What systemd says about a unit, and what that means."""

from dataclasses import replace

import pytest

from fleet.hosts.units import Health, Unit, find_trouble, parse_units

SHOWN = """Result=success
NRestarts=0
ExecMainStatus=0
StatusText=2 of 4 members answer
Id=trainer@chief-0.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
StateChangeTimestamp=Thu 2025-11-20 14:25:01 UTC
WatchdogTimestamp=Thu 2025-11-20 14:25:31 UTC
WatchdogUSec=1min 30s

Result=exit-code
NRestarts=4
ExecMainStatus=75
StatusText=
Id=trainer@ps-0.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
UnitFileState=disabled
StateChangeTimestamp=

Id=trainer@ps-7.service
LoadState=not-found
ActiveState=inactive
SubState=dead
"""


def test_units_are_read_from_systemctl_show() -> None:
    units = parse_units(SHOWN)
    chief = units["trainer@chief-0.service"]
    assert chief.health is Health.RUNNING
    assert chief.enabled
    assert chief.status_text == "2 of 4 members answer"
    assert chief.since == 1763648701
    assert units["trainer@ps-0.service"].health is Health.RESTARTING
    assert units["trainer@ps-0.service"].restarts == 4
    assert units["trainer@ps-0.service"].since is None
    assert units["trainer@ps-7.service"].health is Health.ABSENT


@pytest.mark.parametrize(
    ("active", "sub", "health", "up"),
    [
        ("active", "running", Health.RUNNING, True),
        ("activating", "start-pre", Health.STARTING, True),
        ("activating", "start", Health.STARTING, True),
        ("activating", "auto-restart", Health.RESTARTING, True),
        ("activating", "auto-restart-queued", Health.RESTARTING, True),
        ("deactivating", "stop-sigterm", Health.STOPPING, False),
        ("inactive", "dead", Health.STOPPED, False),
        ("failed", "failed", Health.FAILED, False),
    ],
)
def test_health_of_each_state(active: str, sub: str, health: Health, up: bool) -> None:
    unit = Unit("trainer@ps-0.service", active=active, sub=sub)
    assert unit.health is health
    assert unit.up is up


def test_users_error_is_trouble_at_once() -> None:
    unit = Unit("u", active="failed", sub="failed", result="exit-code", exit_status=78)
    assert find_trouble(unit, 0) == "exited with code 78 (the user's error: systemd does not try again)"


@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        ("exit-code", 1, "exited with code 1"),
        ("exit-code", 0, "a step before its start"),
        ("signal", 9, "killed by signal 9"),
        ("oom-kill", 9, "no memory"),
        ("watchdog", 6, "watchdog"),
        ("timeout", 15, "in time"),
        ("resources", 0, "failed (resources)"),
    ],
)
def test_failure_is_told_in_words(result: str, status: int, message: str) -> None:
    assert message in Unit("u", active="failed", result=result, exit_status=status).describe_failure()


def test_restarts_are_trouble_only_when_they_go_on() -> None:
    unit = Unit("u", active="activating", sub="auto-restart", result="exit-code", exit_status=75, restarts=7)
    assert find_trouble(unit, 5) is None
    assert find_trouble(unit, 4) == "was restarted 3 times without a new step; the last time it exited with code 75"
    assert find_trouble(replace(unit, active="active", sub="running", result="success"), 4) == (
        "was restarted 3 times without a new step"
    )


@pytest.mark.parametrize("active", ["active", "activating", "inactive"])
def test_running_starting_and_stopped_units_are_no_trouble(active: str) -> None:
    assert find_trouble(Unit("u", active=active), 0) is None


def test_a_unit_without_signs_of_life_is_silent() -> None:
    chief = parse_units(SHOWN)["trainer@chief-0.service"]
    assert chief.watchdog == 90.0
    assert chief.alive is not None
    assert chief.silent(chief.alive + 59.0) is None
    assert chief.silent(chief.alive + 61.0) == pytest.approx(61.0)
    assert replace(chief, active="inactive").silent(chief.alive + 1000.0) is None
    ps = parse_units(SHOWN)["trainer@ps-0.service"]
    assert (ps.alive, ps.watchdog, ps.silent(2e9)) == (None, None, None)
