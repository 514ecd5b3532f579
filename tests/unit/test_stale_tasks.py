"""Which running tasks a change concerns, and what counts as a change."""

import json
import os
import signal
import subprocess
import time
from functools import partial

import pytest
import stale_tasks

from fleet.hosts import agent
from fleet.site.escaping import environment_value
from tests.unit.stand_ins import result_of

LISTING = """\
Id=trainer@ps-0.service
MainPID=41

MainPID=0
Id=trainer@worker-0.service
"""


@pytest.fixture
def files(tmp_path):
    """Two releases of one kit, the tasks' files and the unit."""
    names = [f"{release}/{name}" for release in ("release", "old") for name in ("trainer/tasks/server.py", "slow.py")]
    for name in (*names, "etc/ps-0.env", "etc/chief-0.env", "etc/run.json", "etc/secrets/KEY", "unit"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "envs/lib/python3.11/site-packages").mkdir(parents=True)
    for number, release in enumerate(("release", "old")):
        (tmp_path / release / "env").symlink_to("../envs")
        sums = f"# psfleet release {release}\n{number:064}  slow.py\n{0:064}  trainer/tasks/server.py\n"
        (tmp_path / release / "SHA256SUMS").write_text(sums)
    time.sleep(0.05)
    return tmp_path


@pytest.fixture
def begin(files):
    """Start a supervisor in a release, with a child in one, or with none; returns its pid."""
    begun = []

    def begin(home, place=None):
        child = f"cd {files / place} && exec sleep 60 & wait" if place else "exec sleep 60"
        begun.append(subprocess.Popen(["sh", "-c", child], cwd=files / home, process_group=0))
        pid = str(begun[-1].pid)
        if place is not None:
            while stale_tasks.directory_of(stale_tasks.child_of(pid) or pid) != files / place:
                time.sleep(0.01)
        time.sleep(0.05)
        return pid

    yield begin
    for process in begun:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def look(files, task, pid):
    """Say what is newer than a task, and whether its supervisor may go on."""
    reads = task == "chief-0"
    own = partial(stale_tasks.inputs, task, reads, config_dir=files / "etc", unit=files / "unit", pid=pid)
    inputs = stale_tasks.inputs_of_child(reads, files / "release", files / "etc")
    newer, goes_on = stale_tasks.judge(pid, files / "release", own, inputs)
    return newer.removeprefix(f"{files}/"), goes_on


@pytest.mark.parametrize(
    ("changed", "tasks", "goes_on"),
    [
        ("etc/ps-0.env", {"ps-0"}, False),
        ("etc/run.json", {"chief-0"}, True),
        ("etc/secrets/KEY", {"chief-0"}, False),
        ("unit", {"ps-0", "chief-0"}, False),
        ("release/trainer/tasks/server.py", {"ps-0", "chief-0"}, False),
        ("release/slow.py", {"ps-0", "chief-0"}, True),
    ],
)
def test_a_change_concerns_the_tasks_that_read_the_file(files, begin, changed, tasks, goes_on):
    pid = begin("release", "release")
    assert [look(files, task, pid) for task in ("ps-0", "chief-0")] == [("", True)] * 2
    os.utime(files / changed, (0, 0))  # an old time of the content does not hide that the file was touched
    found = {task: look(files, task, pid) for task in ("ps-0", "chief-0")}
    assert found == {task: (changed, goes_on) if task in tasks else ("", True) for task in ("ps-0", "chief-0")}


def test_a_newly_installed_distribution_counts(files, begin):
    pid = begin("release", "release")
    (files / "envs/lib/python3.11/site-packages/six.py").write_text("")
    newer, goes_on = look(files, "ps-0", pid)
    assert newer.endswith("site-packages")
    assert not goes_on


def test_a_supervisor_of_the_same_kit_has_children_in_another_release(files, begin):
    pid = begin("old", "release")
    assert look(files, "chief-0", pid) == ("", True)
    os.utime(files / "old/slow.py", (0, 0))
    assert look(files, "chief-0", pid) == ("", True)
    os.utime(files / "old/trainer/tasks/server.py", (0, 0))
    assert look(files, "chief-0", pid) == ("old/trainer/tasks/server.py", False)


def test_a_child_of_another_release_is_stale_and_its_supervisor_may_go_on(files, begin):
    assert look(files, "ps-0", begin("old", "old")) == ("release", True)


def test_a_parked_task_is_not_stale(files, begin):
    pid = begin("old")
    os.utime(files / "etc/run.json", (0, 0))
    assert look(files, "chief-0", pid) == ("", True)
    os.utime(files / "etc/chief-0.env", (0, 0))
    assert look(files, "chief-0", pid) == ("etc/chief-0.env", False)


@pytest.mark.parametrize("changed", ["kit", "environment"])
def test_another_kit_or_environment_is_for_another_supervisor(files, begin, changed):
    if changed == "kit":
        sums = files / "release/SHA256SUMS"
        sums.write_text(sums.read_text().replace("0  trainer/", "1  trainer/"))
    else:
        (files / "release/env").unlink()
        (files / "release/env").symlink_to("../others")
    assert look(files, "ps-0", begin("old", "old")) == ("release", False)


def test_a_supervisor_that_has_ended_is_neither(files):
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert look(files, "ps-0", str(process.pid)) == ("", False)


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


OLD = {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]}


def config(cluster, job="worker"):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})


@pytest.mark.parametrize(
    ("after", "more"),
    [
        ({**OLD, "worker": ["c:1", "d:1", "e:1"]}, True),
        ({**OLD, "ps": ["b:1", "e:1"]}, True),
        ({**OLD, "worker": ["e:1", "c:1", "d:1"]}, False),
        ({**OLD, "worker": ["c:1"]}, False),
        ({**OLD, "chief": ["e:1"]}, False),
        ({**OLD, "data": ["e:1"]}, False),
    ],
)
def test_members_behind_the_others_make_nothing_stale(after, more):
    assert stale_tasks.names_more(config(OLD), config(after)) is more
    assert stale_tasks.names_more(config(OLD), config(after, "ps")) is False
    in_step = [{**cluster, "ps": []} for cluster in (OLD, after)]
    assert stale_tasks.names_more(*map(config, in_step)) is False


@pytest.mark.parametrize(
    ("unit", "more", "stale"),
    [
        ({"TRAINER_MEMBERS": "x"}, "", False),
        ({"TRAINER_MEMBERS": "x", "TRAINER_PARK_FILE": "/run/x"}, "", False),
        ({"TRAINER_MEMBERS": "x"}, "TRAINER_METRICS_OF_WORKERS='{}'\n", False),
        ({"TRAINER_MEMBERS": "x"}, "DATA_DIR=/elsewhere\n", True),
        ({"TRAINER_MEMBERS": "x", "TRAINER_METRICS": "a:1"}, "", True),
        ({}, "", True),
    ],
)
def test_a_task_follows_its_file_where_only_members_were_added(files, unit, more, stale):
    """The last two: a variable that the file no longer has, and a unit that was written earlier."""
    path = files / "etc/worker-0.env"
    (files / "unit").write_text("[Service]\nEnvironment=TRAINER_MEMBERS=x\nEnvironment=TRAINER_PARK_FILE=/run/%i\n")
    time.sleep(0.05)
    environment = {"PATH": os.environ["PATH"], "DATA_DIR": "/data", "TF_CONFIG": config(OLD), **unit}
    process = subprocess.Popen(["sleep", "60"], cwd=files / "release", env=environment)
    try:
        time.sleep(0.1)
        after = config({**OLD, "worker": [*OLD["worker"], "e:1"]})
        path.write_text(f"# managed\nTF_CONFIG={environment_value(after)}\nDATA_DIR=/data\n{more}")
        assert look(files, "worker-0", str(process.pid))[0] == ("etc/worker-0.env" if stale else "")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("members", "stale"),
    [
        ([["e:1", "f:1"], []], True),  # as many as it began with
        ([["e:1", "f:1"], ["e:1"]], True),
        ([["e:1"], ["e:1", "f:1"]], False),
        ([["e:1"], ["e:1"]], False),
    ],
)
def test_a_task_that_has_followed_members_restarts_when_some_go_again(files, monkeypatch, members, stale):
    """It never lets go of what it has followed: a worker that is gone for good would be one that is away."""
    path = files / "etc/worker-0.env"
    (files / "unit").write_text("[Service]\nEnvironment=TRAINER_MEMBERS=x\n")
    time.sleep(0.05)
    environment = {"PATH": os.environ["PATH"], "TF_CONFIG": config(OLD), "TRAINER_MEMBERS": "x"}
    process = subprocess.Popen(["sleep", "60"], cwd=files / "release", env=environment)
    listing = f"Id=trainer@worker-0.service\nMainPID={process.pid}\n"
    monkeypatch.setattr(agent.AnsibleModule, "run_command", lambda *_, **__: (0, listing, ""))
    monkeypatch.setattr(stale_tasks, "FOLLOWED", files / "followed")
    (files / "current").symlink_to("release")

    def find(check_mode):
        paths = {"root": files, "config_dir": files / "etc", "unit": files / "unit"}
        asked = {name: str(path) for name, path in paths.items()} | {"settings_readers": []}
        return result_of(stale_tasks, check_mode, **asked)["tasks"]

    try:
        for check_mode, more in ((False, members[0]), (True, ["e:1", "f:1", "g:1"]), (False, members[1])):
            time.sleep(0.05)
            after = config({**OLD, "worker": [*OLD["worker"], *more]})
            path.write_text(f"TF_CONFIG={environment_value(after)}\n")
            found = find(check_mode)
        assert found == ({"worker-0": str(path)} if stale else {})
    finally:
        process.kill()
        process.wait()
