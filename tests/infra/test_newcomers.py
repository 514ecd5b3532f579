"""A rollback drains a host that came since, which stays out while all hosts reboot; the training goes on without it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import answer, wait_until

from .conftest import reboot, status, wait_for_progress
from .test_planned_reboot import events
from .test_second_day import Training, done, edit, seen

pytestmark = pytest.mark.slow  # tests/unit/test_second_day.py says it of pretended hosts
HOST = "worker-1"
HISTORY = "/srv/trainer/history.jsonl"
CAME_SINCE = f"""sed 's/, "{HOST}": \\["{HOST}"\\]//' {HISTORY} >/run/history && cat /run/history >{HISTORY}"""
FILES = "readlink /opt/trainer/current; cat /etc/trainer/run.json"


@pytest.fixture
def training(lab: dict[str, Any], long_run: Path, tmp_path: Path) -> Iterator[Training]:
    """A training that worker-1 has joined since another start, whose release it never had; in the end all are back.

    That it was away then is a change of that start's line in the history, and a release that is removed.
    """
    answer(lab["head"], CAME_SINCE)
    older = answer(lab[HOST], "readlink --canonicalize /opt/trainer/current")
    done("start-cluster", "--detach", inventory=edit(long_run, tmp_path, "# since worker-1 came\n"))
    answer(lab[HOST], f"rm -r {older}")
    wait_until(lambda: status(lab)["without"] == {}, 180, "all members take part")
    wait_for_progress(lab)
    yield Training(lab)
    done("start-cluster", "--detach", inventory=long_run)  # which brings the release to worker-1 again
    done("undrain", HOST, inventory=long_run)
    wait_until(lambda: status(lab)["without"] == {}, 180, "all members take part")


def test_a_rollback_drains_who_came_since_and_reboots_of_all_leave_it_so(training: Training, lab, long_run) -> None:
    """Some minutes: one training for both."""
    present = answer(lab["head"], FILES)
    planned = done("rollback", "--plan", inventory=long_run)
    assert f"drain    {HOST}: {HOST} came since. Have it back: fab undrain {HOST}" in planned
    assert answer(lab["head"], FILES) == present
    begun = time.monotonic()
    answered = json.loads(done("rollback", "--reason", "worse", "--json", inventory=long_run))
    print(f"rollback: {time.monotonic() - begun:.1f} s")
    assert (answered["drains"], answered["stays"], answered["settings"].get("log_seconds")) == ([HOST], [], None)
    training.check(*training.units)
    assert out(lab, long_run)
    begun, past = time.monotonic(), len(events())
    with ThreadPoolExecutor() as pool:
        list(pool.map(reboot, lab.values()))
    wait_for_progress(lab, 300)
    print(f"trains {time.monotonic() - begun:.1f} s after the reboots of all began")
    print(
        [each for each in events()[past:] if each["event"] in ("stopped", "saved", "restored") or "steps_lost" in each]
    )
    assert out(lab, long_run)


def out(lab: dict[str, Any], inventory: Path) -> bool:
    """Whether the host is out of the training, and everybody knows."""
    active = answer(lab[HOST], f"systemctl is-active trainer@{HOST}")
    return (active, list(status(lab)["without"]), seen(inventory)[HOST]["state"]) == ("inactive", [HOST], "drained")
