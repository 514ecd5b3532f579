"""lab/record, with stand-ins for lab, recorder and time: which commands each recording types, and what it leaves."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from invoke import Task

from fleet.places import KIT
from tests.unit.stand_ins import put_program

RECORD = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
if [ "$1 $5" = "tool asciinema" ]; then
  while [ "$1" != --command ]; do shift; done
  $2
fi
[ "$1" != doctor ]
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(KIT / "lab/record", tmp_path / "lab")
    for name in ("fab", "uv", "vagrant", "sleep"):
        put_program(tmp_path / ".venv/bin" / name, RECORD if name != "sleep" else "#!/bin/sh\n")
    return tmp_path


def record(lab: Path, *recordings: str) -> tuple[int, list[list[str]]]:
    calls = lab / "calls"
    calls.touch()
    environment = {**os.environ, "CALLS": str(calls)}
    done = subprocess.run(["lab/record", *recordings], cwd=lab, env=environment, capture_output=True, text=True)
    return done.returncode, [shlex.split(line, posix=False) for line in calls.read_text().splitlines()]


@pytest.mark.parametrize(
    ("recording", "typed"),
    [
        ("faults", ["start-cluster", "drill", "status"]),
        ("hosts", ["drain", "hosts", "undrain"]),
        ("doctor", ["doctor"]),
        ("queue", ["queue-add", "queue-add", "queue", "queue-move", "queue"]),
    ],
)
def test_a_recording_is_made_on_a_cluster_that_is_cleared_up_before_and_after(
    lab: Path, recording: str, typed: list[str]
) -> None:
    code, calls = record(lab, recording)
    assert code == 0
    (begun,) = [n for n, call in enumerate(calls) if "asciinema" in call]
    (rendered,) = [n for n, call in enumerate(calls) if f"docs/pictures/{recording}.svg" in call]
    assert [call[1] for call in calls[begun + 1 : rendered]] == typed
    for part in (calls[:begun], calls[rendered:]):
        ends = [call[1] for call in part if call[0] == "fab"]
        assert {"undrain", "queue-remove", "stop-cluster", "delete-run"} <= {*ends}
    verbs = [each for each in runpy.run_path(str(KIT / "fabfile.py")).values() if isinstance(each, Task)]
    flags = {
        str(each.name).replace("_", "-"): {f"--{name}" for flag in each.get_arguments() for name in flag.names}
        for each in verbs
    }
    for call in calls:
        if call[0] == "fab":
            assert {word for word in call if word.startswith("--")} <= flags[call[1]], call


def test_all_parts_are_recorded_and_an_unknown_one_is_refused(lab: Path) -> None:
    code, calls = record(lab)
    pictures = [call[-5] for call in calls if "termtosvg==1.1.0" in call]
    assert (code, len(pictures)) == (0, 4)
    assert record(lab, "hosts", "nonsense") == (2, calls)
