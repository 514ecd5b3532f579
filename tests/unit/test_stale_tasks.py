"""Which running tasks a change concerns, and what counts as a change."""

import os
import subprocess
import time

import pytest
import stale_tasks

LISTING = """\
Id=trainer@ps-0.service
MainPID=41

MainPID=0
Id=trainer@worker-0.service
"""


@pytest.fixture
def files(tmp_path):
    """A release, the tasks' files and the unit; all of them older than the moment returned."""
    for name in ("release/trainer/tasks/server.py", "etc/ps-0.env", "etc/chief-0.env", "etc/run.json", "unit"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "envs/lib/python3.11/site-packages").mkdir(parents=True)
    (tmp_path / "release/env").symlink_to("../envs")
    time.sleep(0.05)
    return tmp_path, time.time()


def newer(files, task):
    root, started = files
    time.sleep(0.05)
    return lambda: stale_tasks.newer_file(
        started, stale_tasks.inputs(task, task == "chief-0", root / "release", root / "etc", root / "unit")
    )


@pytest.mark.parametrize(
    ("changed", "tasks"),
    [
        ("etc/ps-0.env", {"ps-0"}),
        ("etc/run.json", {"chief-0"}),
        ("unit", {"ps-0", "chief-0"}),
        ("release/trainer/tasks/server.py", {"ps-0", "chief-0"}),
    ],
)
def test_a_change_concerns_the_tasks_that_read_the_file(files, changed, tasks):
    look = {task: newer(files, task) for task in ("ps-0", "chief-0")}
    assert {task for task, find in look.items() if find()} == set()
    os.utime(files[0] / changed, (0, 0))  # an old time of the content does not hide that the file was touched
    assert {task for task, find in look.items() if find()} == tasks


def test_a_newly_installed_distribution_counts(files):
    look = newer(files, "ps-0")
    (files[0] / "envs/lib/python3.11/site-packages/six.py").write_text("")
    assert look().endswith("site-packages")


def test_only_running_tasks_are_listed():
    assert list(stale_tasks.running_tasks(LISTING)) == [("ps-0", "41")]
    assert list(stale_tasks.running_tasks("")) == []


def test_start_time_is_the_process_start():
    before = time.time()
    with subprocess.Popen(["sleep", "5"]) as process:
        started = stale_tasks.start_time(str(process.pid))
        process.kill()
    assert abs(started - before) < 1
    assert stale_tasks.start_time("0") is None
