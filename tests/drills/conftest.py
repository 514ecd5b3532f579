"""One `fab drill` for all drills that were asked for, so that those after the first find their run under way."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from testinfra.host import Host

from fleet.drills.catalogue import CATALOGUE
from fleet.drills.drill import Drill
from tests.hosts import ROOT, adding_journals, answer

VERDICT = re.compile(r"^(pass|FAIL|skip)  ([a-z0-9-]+): ")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "dozen: one of the drills of `make dozen`, and so of `make test`")


def journal(host: Host) -> str:
    """What the tasks did in the last half hour, in which a step's line tells nothing."""
    since = "journalctl --no-pager --output=short-precise --since=-30min --unit='trainer@*'"
    return answer(host, f"{since} | grep -v ' step [0-9]* of ' | tail --lines=400")


pytest_runtest_makereport = adding_journals(journal)


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    """What `fab drill` said about each drill: its line, and what belongs to it."""
    names = [item.callspec.params["name"] for item in request.session.items if hasattr(item, "callspec")]
    names = [each.name for each in sorted(CATALOGUE, key=start_of) if each.name in names]
    # Generous: five hosts share this machine's processors. The tight figures are those of bench/recovery.
    command = ["fab", "drill", ",".join(names), "--bounds-factor=2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    return read_verdicts(done.stdout) | {"": f"fab drill ended with {done.returncode}\n{done.stdout}\n{done.stderr}"}


def start_of(drill: Drill) -> str:
    """What the drill's run is started with: drills of the same settings, one after another, share a run."""
    return f"{drill.program} {sorted(drill.settings.items())}"


def read_verdicts(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        verdict = VERDICT.match(line)
        name = verdict[2] if verdict else name if line.startswith(" ") else ""
        if name:
            found[name] = f"{found[name]}\n{line}" if name in found else line
    return found
