"""A run finds nothing to do after a start; it finds what a hand damaged or emptied, and fixes it beside training."""

import json
import shutil

import pytest
import yaml

from tests.hosts import ROOT, answer, wait_until

from .conftest import children, environment_of, fab, give_second_task, play, units, wait_for_progress

# Both are narrower than the default route, and wider than the lab's own network.
WAY_OUT = ("0.0.0.0/1", "128.0.0.0/1")

# What a run reports besides the file that it fixed.
RESTARTING = {
    "Find running tasks that started before their files changed",
    "Reload systemd",
    "Restart a running TensorBoard",
    "Save and stop the coordinator",
    "Restart the other tasks",
    "Start the coordinator again",
}


def test_after_an_edit_supervisors_stay_and_fork_what_works_in_the_new_release(lab, long_run, tmp_path):
    programs, edited = tmp_path / "programs", tmp_path / "lab"
    shutil.copytree(ROOT / "tests/infra/programs", programs)
    (programs / "slow.py").write_text((programs / "slow.py").read_text() + "# edited\n")
    shutil.copytree(long_run, edited)
    variables = edited / "group_vars/all.yml"
    variables.write_text(yaml.safe_dump(yaml.safe_load(variables.read_text()) | {"release_program": str(programs)}))
    before, releases = units(lab), {answer(lab["head"], "readlink -f /opt/trainer/current")}
    for inventory in (edited, long_run):
        working = work(lab)
        done = fab("start-cluster", "--detach", inventory=inventory)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "way     fab by itself" in done.stdout
        assert units(lab) == before
        release = answer(lab["head"], "readlink -f /opt/trainer/current")
        now = work(lab)
        assert {place for _, place in now.values()} == {release}
        assert {task for task in now if now[task][0] == working[task][0]} == set()
        releases.add(release)
        shown = fab("status", inventory=inventory)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert release.rpartition("/")[2] in shown.stdout
    assert len(releases) == 2
    wait_for_progress(lab)


def work(lab):
    """The child of each task, and where it works."""
    found = {}
    for host in lab.values():
        with host.sudo():
            found |= children(host)
    return found


# How many tasks reach a host in a run that finds nothing to do. The coordinator's proves the release, notes which one
# is current, and shows TensorBoard.
MAX_TASKS = {"head": 17, "ps-0": 14, "ps-1": 14, "worker-0": 14, "worker-1": 14}


# What the next run does not do again, since nothing has to: it measures a host that has booted, and removes a release
# more than it keeps, once no process works in it.
SETTLED = "test -e /run/psfleet-pace.json && test $(ls /opt/trainer/releases | wc -l) -le {keep} && echo settled"


def settle(lab, inventory):
    """Have the hosts as a run finds them that comes right after another, whatever the tests before have left."""
    defaults = yaml.safe_load((ROOT / "roles/release/defaults/main.yml").read_text())
    look = SETTLED.format(keep=defaults["release_keep"])
    if any(answer(host, look) != "settled" for host in lab.values()):
        first = play("site.yml", inventory=inventory)
        assert first.code == 0, first.failed


def test_a_second_run_changes_nothing_and_restarts_nothing_that_runs(lab, long_run):
    """Also where `fab` has shipped the release by itself, as above."""
    settle(lab, long_run)
    before = units(lab)
    assert sorted(before) == ["chief-0", "evaluator-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    again = play("site.yml", inventory=long_run)
    assert (again.code, again.changed) == (0, [])
    assert {host: stats["changed"] for host, stats in again.stats.items() if stats["changed"]} == {}
    assert units(lab) == before
    # One more is a Python more on each host.
    assert {host: again.reached[host] for host in lab if again.reached[host] > MAX_TASKS[host]} == {}


PROBE = "Look at the path as the tasks' user, and write through it where it is shared"
# Settings that were written again are in the history, as each other change of them.
NOTE = "Note the change in the cluster's history"
# What a hand changes on a host, and the task that fixes it. On few hosts: each task of a role with something to fix
# costs each of its hosts a Python.
CHANGED = [
    ("head", "chmod 0600 /etc/systemd/journald.conf.d/60-psfleet.conf", "Keep the journal small"),
    ("head", "systemctl stop tensorboard", "Start it now and at each boot"),
    ("head", "rm /srv/trainer/.psfleet-host-head", PROBE),
    # Where its unit is to be written, check mode says nothing of this one.
    ("worker-0", "systemctl disable psfleet-firewall", "Load it at each boot"),
    ("worker-1", "chmod 0755 /etc/systemd/system/psfleet-firewall.service", "Have no task start without it"),
    ("worker-1", "usermod --shell /bin/sh trainer", "Create the user of the training tasks"),
    ("worker-1", "chmod 0700 /opt/trainer/current/trainer/run", "Unpack the code"),
    ("worker-1", "touch /opt/trainer/current/trainer/stranger.py", "Unpack the code"),
    ("worker-1", "chown trainer /var/lib/trainer", "Take the tasks' user's home from it"),
    ("worker-1", "sysctl -w net.ipv4.tcp_retries2=15", "Give up a connection to a silent machine after half a minute"),
    ("worker-1", "rm /usr/local/sbin/psfleet-check-shared-path", "Install the check of the shared path"),
]


def change(lab, changes):
    for name, command, _ in changes:
        with lab[name].sudo():
            lab[name].run_expect([0], command)


# Files of a release, its environment, its settings and its units: their tasks start again. One fix of `Unpack the
# code` on a host is for all of its files.
DAMAGED = [
    ("head", "/etc/trainer/run.json", "Write the run settings"),
    ("worker-1", "/opt/trainer/current/env/lib/python3*/site-packages/six.py", "Install the environment"),
    ("worker-1", "/opt/trainer/current/trainer/__main__.py", "Unpack the code"),
    ("worker-1", "/etc/systemd/system/trainer@.service", "Install the unit"),
]


def damage(lab):
    """Damage the files, and return what each of them held."""
    right = {}
    for name, pattern, _ in DAMAGED:
        with lab[name].sudo():
            file = lab[name].check_output(f"ls {pattern}")  # the Python version is a pattern
            right[name, file] = lab[name].check_output(f"cat {file}")
            lab[name].run_expect([0], f"sh -c 'echo \"# damaged\" >> {file}'")
    return right


@pytest.mark.parametrize("look_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_thing_that_a_hand_changed_is_found_and_fixed_alone_and_an_owed_restart_made_up_for(
    lab, long_run, look_first
):
    """With `--check` before, which finds as much and writes nothing: a run more of so many fixes."""
    before = units(lab)
    with lab["head"].sudo():
        wheel = lab["head"].check_output("ls /srv/trainer/wheels/no-gpu-3*/six-*.whl")
        lab["head"].run_expect([0], f"rm {wheel}")
    right = damage(lab)
    with lab["worker-0"].sudo():
        # As a run leaves it that dies right after. A process has its environment file's content, whatever its time.
        drop_in = "/etc/systemd/system/trainer@worker-0.service.d/psfleet-task.conf"
        lab["worker-0"].run_expect([0], f"test -f {drop_in} && touch {drop_in}")
    change(lab, [one for one in CHANGED if one[2] != PROBE])
    checked = play("site.yml", "--check", inventory=long_run) if look_first else None
    # Only now: check mode writes no marker, and the other hosts would refuse a path without it.
    change(lab, [one for one in CHANGED if one[2] == PROBE])
    repaired = play("site.yml", inventory=long_run)
    assert repaired.code == 0, repaired.failed
    # A release that a process used until its restart is one too many then.
    beside = ("Copy the wheels", "Restart the journal", "Keep the last few releases")
    fixed = {(name, task) for name, task in repaired.changed if task not in RESTARTING and not task.startswith(beside)}
    assert fixed == {*((name, task) for name, _, task in CHANGED + DAMAGED), ("head", NOTE)}
    if checked is not None:
        assert checked.code == 0, checked.failed
        assert set(checked.changed) >= fixed - {("head", PROBE), ("head", NOTE)}  # which check mode doesn't write
    assert lab["head"].file(wheel).exists
    for (name, file), text in right.items():
        with lab[name].sudo():
            assert lab[name].check_output(f"cat {file}") == text
    after = units(lab)
    assert [unit for unit in before if before[unit] == after[unit]] == ["ps-0", "ps-1"]
    wait_for_progress(lab)


def test_an_emptied_host_is_installed_alone_and_without_a_way_out(lab, long_run):
    host = lab["worker-1"]
    with host.sudo():
        environment = host.check_output("cat /etc/trainer/worker-1.env")
        host.run_expect([0], "systemctl stop trainer@worker-1")
        host.run_expect([0], "rm -rf /opt/trainer /etc/trainer /etc/systemd/system/trainer@.service")
        for half in WAY_OUT:
            host.run_expect([0], f"ip route add unreachable {half}")
    try:
        # The fault is real: no address but those of the lab's own network has a way.
        assert host.run("ip route get 198.51.100.1").rc != 0
        installed = play("site.yml", "--limit", "worker-1", inventory=long_run)
        assert installed.code == 0, installed.failed
        changed = {task for _, task in installed.changed}
        assert {"Unpack the code", "Install the environment", "Switch to the release"} <= changed
        assert {name for name in installed.stats if installed.stats[name]["ok"]} == {"worker-1"}
        with host.sudo():
            assert host.check_output("cat /etc/trainer/worker-1.env") == environment
            host.run_expect([0], "systemctl start trainer@worker-1")
            assert host.service("trainer@worker-1").is_running
            assert len(json.loads(environment_of(host, "trainer@worker-1")["TF_CONFIG"])["cluster"]["worker"]) == 2
    finally:
        with host.sudo():
            for half in WAY_OUT:
                host.run_expect([0], f"ip route del unreachable {half}")
    wait_for_progress(lab)


@pytest.mark.slow
def test_a_second_task_joins_a_training_and_a_moved_task_is_retired(lab, long_run, tmp_path):
    two = tmp_path / "two"
    shutil.copytree(long_run, two)
    give_second_task(two)
    try:
        started = fab("start-cluster", "--detach", inventory=two)
        assert started.returncode == 0, started.stdout + started.stderr
        with lab["worker-1"].sudo():
            assert lab["worker-1"].check_output("ls /etc/trainer").split() == ["run.json", "worker-2.env"]
            assert not lab["worker-1"].service("trainer@worker-1").is_running
            assert not lab["worker-1"].service("trainer@worker-1").is_enabled
        with lab["worker-0"].sudo():
            for index, port in enumerate((2400, 2401)):
                socket = lab["worker-0"].socket(f"tcp://{port}")
                wait_until(lambda socket=socket: socket.is_listening, 180, f"port {port} is open")
                config = json.loads(environment_of(lab["worker-0"], f"trainer@worker-{index}")["TF_CONFIG"])
                assert config["task"] == {"type": "worker", "index": index}
                assert len(config["cluster"]["worker"]) == 3
    finally:
        back = fab("start-cluster", "--detach", inventory=long_run)
    assert back.returncode == 0, back.stdout + back.stderr
    with lab["worker-0"].sudo():
        assert lab["worker-0"].check_output("ls /etc/trainer").split() == ["run.json", "worker-0.env"]
