"""A start that would harm a training that runs: before the switch nothing is touched, after it all is put back."""

import os
import shutil
import signal
import subprocess
import tempfile

import pytest

from tests.hosts import ROOT, answer, wait_until

from .conftest import LONG_RUN, copy_inventory, fab, play, status, units, wait_for_progress

SELECTION = "/srv/trainer/selection.json"
WRONG_RUN = "infra-wrong"
FILES = f"sha256sum /etc/trainer/* /etc/systemd/system/trainer@.service; readlink /opt/trainer/current; cat {SELECTION}"


@pytest.fixture(autouse=True, scope="module")
def no_such_run(lab):
    """Without the run that an earlier call of these tests began: a run keeps its program."""
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{WRONG_RUN}")


def state(lab):
    """What a start may change on each host, byte for byte, and the units as systemd started them."""
    found = {}
    for name, host in lab.items():
        with host.sudo():
            found[name] = host.check_output(FILES)
    return found, units(lab)


def test_a_wrong_program_is_refused_beside_the_training(lab, long_run):
    before = state(lab)
    refused = fab("start-cluster", "--run", WRONG_RUN, "--program", "slow:Unbuildable", inventory=long_run)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert 'slow.py", line 25, in build_model' in refused.stderr
    assert "nothing was stopped, switched or selected" in refused.stdout
    assert "\x1b" not in refused.stdout + refused.stderr
    assert "owned" in refused.stderr  # its message has an escape
    assert state(lab) == before
    wait_for_progress(lab)


@pytest.fixture(scope="module")
def another_release(tmp_path_factory):
    """The inventory with another release, which lacks the program of the training that runs."""
    programs = tmp_path_factory.mktemp("programs")
    shutil.copy(ROOT / "tests/infra/programs/slow.py", programs / "slower.py")
    run = {"program": "slower:Untrainable", "run": LONG_RUN, "steps": 1_000_000, "checkpoint_seconds": 5}
    return copy_inventory(tmp_path_factory.mktemp("another") / "lab", run, str(programs))


@pytest.mark.slow
def test_the_playbook_restarts_nothing_on_a_release_without_the_program(lab, long_run, another_release):
    before = state(lab)
    # What the coordinator's host refuses, worker-0 doesn't get either.
    refused = play("site.yml", "--limit", "head,worker-0", inventory=another_release)
    assert refused.code != 0
    assert any("there is no module 'slow'" in message for _, message in refused.failed), refused.failed
    assert state(lab) == before


def test_a_plan_says_what_it_would_do_and_does_nothing(lab, long_run, another_release):
    before = state(lab)
    planned = fab("start-cluster", "--run", WRONG_RUN, "--plan", inventory=another_release)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    lines = planned.stdout.splitlines()
    assert "  stop    chief-0, evaluator-0" in lines
    assert any(line.startswith("  way     fab by itself: ") for line in lines), planned.stdout
    assert any(line.startswith("  change  Write the run settings: ") for line in lines), planned.stdout
    assert state(lab) == before
    wait_for_progress(lab)


def test_a_run_that_fails_after_the_switch_is_put_back(lab, long_run, another_release):
    files, before = state(lab)
    step = status(lab)["step"]
    failed = fab("start-cluster", "--run", WRONG_RUN, inventory=another_release)
    output = failed.stdout + failed.stderr
    assert failed.returncode == 1, output
    assert "no such file" in output
    assert f"put back: run {LONG_RUN}" in failed.stdout
    wait_for_progress(lab)
    assert state(lab)[0] == files
    assert sorted(units(lab)) == sorted(before)
    assert status(lab)["step"] >= step - 1000  # from its checkpoint, not from the beginning


def left(command, when, what, inventory):
    """Leave a command as Ctrl-C on a terminal does, to all of its processes, once `when()` is true."""
    # Where the tests run in the background, Ctrl-C is not heeded by what they start.
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            ["env", "--default-signal=INT", *command],
            cwd=ROOT,
            env=os.environ | {"PSFLEET_INVENTORY": str(inventory), "ANSIBLE_INVENTORY": str(inventory)},
            stdout=output,
            stderr=output,
            process_group=0,
        ) as begun,
    ):
        try:
            wait_until(lambda: begun.poll() is not None or when(), 600, what)
            if begun.poll() is None:
                os.killpg(begun.pid, signal.SIGINT)
            begun.wait(300)
        finally:
            begun.kill()
        output.seek(0)
        return begun.returncode, output.read()


@pytest.mark.slow
def test_a_start_that_is_left_in_the_switch_is_put_back(lab, long_run, another_release):
    files, before = state(lab)
    now = {name: answer(host, "readlink /opt/trainer/current") for name, host in lab.items()}
    step = status(lab)["step"]
    code, output = left(
        ["fab", "start-cluster", "--run", WRONG_RUN],
        lambda: any(answer(lab[name], "readlink /opt/trainer/current") != link for name, link in now.items()),
        "a host switches to the release",
        another_release,
    )
    assert code == 130, output
    assert f"put back: run {LONG_RUN}" in output
    wait_for_progress(lab)
    assert state(lab)[0] == files
    assert sorted(units(lab)) == sorted(before)
    assert status(lab)["step"] >= step - 1000


@pytest.mark.slow
def test_a_site_yml_that_is_left_in_the_middle_is_finished_by_the_next(lab, long_run):
    with lab["worker-1"].sudo():
        lab["worker-1"].run_expect([0], "echo 'HINT=stale' >>/etc/trainer/worker-1.env")
    before = units(lab)
    free = "flock --nonblock /run/psfleet-start true && echo free"
    code, output = left(
        ["ansible-playbook", "site.yml"],
        lambda: "HINT" not in answer(lab["worker-1"], "cat /etc/trainer/worker-1.env || echo HINT"),
        "the environment of worker-1 is right again",
        long_run,
    )
    assert code not in (0, 2, 4), output
    wait_until(lambda: answer(lab["head"], free) == "free", 60, "nobody is kept from a start any more")
    done = play("site.yml", inventory=long_run)
    assert done.code == 0, done.failed
    assert not any(stats["changed"] for stats in play("site.yml", inventory=long_run).stats.values())
    # What was to be restarted has been, though the run that changed its file was left before.
    after = units(lab)
    assert {name for name in after if after[name] != before[name]} == {"worker-1"}
    wait_for_progress(lab)
