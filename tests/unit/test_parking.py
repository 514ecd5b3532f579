"""What `fab` has a host do so that its supervisors stay through a start; its systemctl shows files of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.hosts.host_scripts import COOL, DIRECTORIES, GO_ON, PARK, WARM, WARM_EARLY
from tests.unit.stand_ins import put_program

SYSTEMCTL = """#!/bin/sh
case $1 in
show) cat "$UNITS/$4/${3#--property=}" ;;
stop) shift; echo "$*" >>"$UNITS/stopped" ;;
start) ls "$UNITS/psfleet-parked" >>"$UNITS/started"; echo "$*" >>"$UNITS/started" ;;
esac
"""
# What a supervisor does at SIGHUP and at SIGUSR1, with its unit's directory in `here`.
HEEDS = """
import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
def park(number, frame):
    {park}
signal.signal(signal.SIGHUP, park)
signal.signal(signal.SIGUSR1, lambda *_: (here / "StatusText").write_text("goes on"))
(here / "MainPID").write_text(str(os.getpid()))
while True: time.sleep(0.01)
"""
PARKS = """time.sleep(0.3); (here / "StatusText").write_text("parked: waits")"""
Begin = Callable[..., None]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a unit's main process."""
    began = []

    def begin(unit: str, code: str = HEEDS.format(park=PARKS), active: str = "active") -> None:
        here = tmp_path / unit
        here.mkdir()
        (here / "ActiveState").write_text(active)
        (here / "StatusText").write_text("serves")
        began.append(subprocess.Popen([sys.executable, "-c", code, str(here)]))
        (here / "MainPID").write_text(str(began[-1].pid))
        time.sleep(0.5)  # until its handlers are there

    put_program(tmp_path / "systemctl", SYSTEMCTL)
    yield begin
    for process in began:
        process.kill()
        process.wait()


def run(place: Path, script: str, *words: str) -> str:
    for name in ("psfleet-parked", "psfleet-cooled", "psfleet-agent"):
        script = script.replace(f"/run/{name}", f"{place}/{name}")
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "UNITS": str(place)}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def stopped(place: Path) -> list[str]:
    """The units of each `systemctl stop`."""
    path = place / "stopped"
    return path.read_text().splitlines() if path.exists() else []


def test_a_supervisor_is_waited_for_until_it_is_parked_and_then_goes_on(tmp_path: Path, begin: Begin) -> None:
    begin("ps-0")
    run(tmp_path, PARK, "ps-0")
    assert (tmp_path / "ps-0/StatusText").read_text() == "parked: waits"
    run(tmp_path, GO_ON, "ps-0")
    time.sleep(0.2)
    assert (tmp_path / "ps-0/StatusText").read_text() == "goes on"
    assert stopped(tmp_path) == []


def test_what_can_not_be_parked_is_stopped(tmp_path: Path, begin: Begin) -> None:
    begin("old", "import time; time.sleep(60)")
    begin("starting", active="activating")
    begin("parks")
    begin("dies", HEEDS.format(park='(here / "MainPID").write_text("0")'))
    run(tmp_path, PARK, "old", "parks", "starting", "dies")
    assert " ".join(stopped(tmp_path)).split() == ["old", "starting", "dies"]
    assert (tmp_path / "parks/StatusText").read_text().startswith("parked")


def test_only_what_does_not_run_begins_parked_and_no_start_before_its_file(tmp_path: Path, begin: Begin) -> None:
    begin("runs")
    for unit, active in (("down", "inactive"), ("failed", "failed"), ("starting", "activating")):
        (tmp_path / unit).mkdir()
        (tmp_path / unit / "ActiveState").write_text(active)
    assert run(tmp_path, WARM_EARLY, "a1", "runs", "failed", "starting") == ""  # why it failed stays to be seen
    assert run(tmp_path, WARM, "a1", "runs", "down", "failed", "starting").split() == ["down", "failed"]
    started = (tmp_path / "started").read_text().splitlines()
    assert started == ["down", "start --no-block down", "down", "failed", "start --no-block failed"]


def test_what_begins_parked_is_not_parked_again_and_stops_where_the_start_is_broken_off(
    tmp_path: Path, begin: Begin
) -> None:
    begin("runs")
    begin("imports", "import time; time.sleep(60)", active="activating")
    begin("trains")  # an earlier start has left its file
    (tmp_path / "psfleet-parked").mkdir()
    for unit in ("imports", "waits", "trains"):
        (tmp_path / "psfleet-parked" / unit).touch()
    run(tmp_path, PARK, "runs", "imports")
    assert stopped(tmp_path) == []
    run(tmp_path, COOL, "a1", "runs", "imports", "trains")
    assert stopped(tmp_path) == ["imports"]
    assert [each.name for each in (tmp_path / "psfleet-parked").iterdir()] == ["waits"]
    run(tmp_path, COOL, "a1", "runs", "imports")  # again is nothing new
    assert stopped(tmp_path) == ["imports"]


def test_a_look_that_comes_late_begins_nothing_of_a_start_that_was_left(tmp_path: Path, begin: Begin) -> None:
    """Ctrl-C leaves a look under way, whose host may be slow: what is cooled then has not begun yet."""
    begin("runs")
    for unit in ("chief-0", "ps-0"):
        (tmp_path / unit).mkdir()
        (tmp_path / unit / "ActiveState").write_text("inactive")
    run(tmp_path, COOL, "a1", "chief-0")
    assert run(tmp_path, WARM_EARLY, "a1", "chief-0") == ""
    assert run(tmp_path, WARM, "a1", "chief-0", "ps-0").split() == ["ps-0"]  # that was not cooled
    assert run(tmp_path, WARM_EARLY, "b2", "chief-0").split() == ["chief-0"]  # another start's


def test_only_what_is_parked_is_asked_to_go_on(tmp_path: Path, begin: Begin) -> None:
    begin("serves", "import time; time.sleep(60)")
    begin("gone")
    (tmp_path / "gone/MainPID").write_text("0")
    (tmp_path / "gone/StatusText").write_text("parked: waits")
    run(tmp_path, GO_ON, "serves", "gone")
    assert Path(f"/proc/{(tmp_path / 'serves/MainPID').read_text()}/cmdline").read_text()


def test_where_a_task_works_is_its_childs_directory(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", f"cd {tmp_path}; sleep 60 & wait"], cwd="/", process_group=0) as one:
        time.sleep(0.3)
        assert run(tmp_path, DIRECTORIES, str(one.pid)) == f"{one.pid} {tmp_path}\n"
        os.killpg(one.pid, 9)
    with subprocess.Popen(["sleep", "60"], cwd="/") as alone:
        assert run(tmp_path, DIRECTORIES, str(alone.pid)) == f"{alone.pid} /\n"
        alone.kill()
