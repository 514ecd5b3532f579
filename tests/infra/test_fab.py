"""The operator's verbs on a cluster that trains, with one host away, and with mistakes."""

import json
import os
import signal
import subprocess

import pytest
import yaml

from tests.hosts import ROOT, answer, wait_until

from .conftest import LONG_RUN, fab, reboot, units, wait_for_progress


def test_status_shows_every_task_and_the_run(lab, long_run):
    shown = fab("status", inventory=long_run)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for task in ("chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "evaluator-0"):
        assert any(line.startswith(task) and "active (running)" in line for line in shown.stdout.splitlines())
    assert f"run {LONG_RUN}: training" in shown.stdout


def test_status_fails_when_a_task_is_down(lab, long_run):
    host = lab["worker-0"]
    with host.sudo():
        host.run_expect([0], "systemctl stop trainer@worker-0")
    try:
        shown = fab("status", inventory=long_run)
    finally:
        with host.sudo():
            host.run_expect([0], "systemctl start trainer@worker-0")
    assert shown.returncode == 1
    assert "worker-0 on worker-0" in shown.stdout + shown.stderr
    wait_for_progress(lab)


@pytest.mark.slow
def test_starting_again_restarts_nothing(lab, long_run):
    before = units(lab)
    again = fab("start-cluster", "--detach", inventory=long_run)
    assert again.returncode == 0, again.stdout + again.stderr
    assert units(lab) == before


def test_a_second_start_is_refused_until_the_first_is_over(lab, long_run):
    free = "flock --nonblock /run/psfleet-start true && echo free"
    environment = os.environ | {"PSFLEET_INVENTORY": str(long_run)}
    # Where the tests run in the background, Ctrl-C is not heeded by what they start.
    start = ["env", "--default-signal=INT", "fab", "start-cluster"]
    with subprocess.Popen(start, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as one:
        try:
            wait_until(lambda: answer(lab["head"], free) != "free", 120, "a start is at work")
            other = fab("start-cluster", "--run", "infra-second", inventory=long_run)
            one.send_signal(signal.SIGINT)
            output, _ = one.communicate(timeout=120)
        finally:
            one.kill()
    assert other.returncode == 2, other.stdout + other.stderr
    assert "this cluster is taken by a start of " in other.stderr
    assert one.returncode == 130, output
    wait_until(lambda: answer(lab["head"], free) == "free", 60, "it is over")
    wait_for_progress(lab)


def test_logs_name_each_lines_task(long_run):
    shown = fab("logs", "--lines", "5", inventory=long_run)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    named = {line.split()[0].rstrip(":|") for line in shown.stdout.splitlines()}
    assert named == {"chief-0", "ps-0", "ps-1", "worker-0", "worker-1", "evaluator-0"}


def test_runs_lists_the_run(long_run):
    shown = fab("runs", "--json", inventory=long_run)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    (run,) = [run for run in json.loads(shown.stdout)["runs"] if run["run"] == LONG_RUN]
    assert (run["state"], run["program"]) == ("training", "slow:Slow")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start-cluster", "--run", "../up"], "../up"),
        (["logs", "--task", "worker-9"], "worker-9"),
        (["status", "--inventory", "no/such/place"], "no/such/place"),
    ],
)
def test_a_mistake_ends_with_2_and_names_the_value(long_run, arguments, message):
    done = fab(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr


def test_an_unreachable_host_ends_with_4_and_hides_no_other(long_run, tmp_path):
    inventory = yaml.safe_load((long_run / "hosts.yml").read_text())
    inventory["worker"]["hosts"]["worker-1"]["ansible_host"] = "10.0.3.254"
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    (tmp_path / "group_vars").symlink_to(long_run / "group_vars")
    done = fab("status", inventory=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "worker-1" in done.stderr
    assert any(line.startswith("chief-0") and "active (running)" in line for line in done.stdout.splitlines())


def test_stop_saves_and_keeps_the_cluster_down_through_a_reboot(lab, long_run):
    stopped = fab("stop-cluster", inventory=long_run)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    for name, host in lab.items():
        with host.sudo():
            listed = host.check_output(
                "systemctl list-units --plain --no-legend --state=active,activating,failed 'trainer@*'"
            )
            assert listed == "", name
    assert f"run {LONG_RUN}: stopped" in fab("status", inventory=long_run).stdout
    reboot(lab["ps-1"])
    with lab["ps-1"].sudo():
        assert not lab["ps-1"].service("trainer@ps-1").is_enabled
        assert not lab["ps-1"].service("trainer@ps-1").is_running
