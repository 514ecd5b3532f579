"""A start that would harm a training that runs: before the switch nothing is touched, after it all is put back."""

import shutil

import pytest

from tests.hosts import ROOT

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


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param("slow:Slower", "slow has no 'Slower': did you mean 'Slow'?", marks=pytest.mark.slow),
        pytest.param(
            "slow:NoEvaluation", "program slow:NoEvaluation has no method eval_dataset", marks=pytest.mark.slow
        ),
        ("slow:Unbuildable", 'slow.py", line 32, in build_model'),
    ],
)
def test_a_wrong_program_is_refused_beside_the_training(lab, long_run, program, said):
    before = state(lab)
    refused = fab("start-cluster", "--run", WRONG_RUN, "--program", program, inventory=long_run)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert said in refused.stderr
    assert "nothing was stopped, switched or selected" in refused.stdout
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
    assert any(line.startswith("  change  Write the run settings: ") for line in lines), planned.stdout
    assert state(lab) == before
    wait_for_progress(lab)


def test_a_run_that_fails_after_the_switch_is_put_back(lab, long_run, another_release):
    files, before = state(lab)
    step = status(lab)["step"]
    failed = fab("start-cluster", "--run", WRONG_RUN, inventory=another_release)
    told = failed.stdout + failed.stderr
    assert failed.returncode == 1, told
    assert "no such file" in told
    assert f"put back: run {LONG_RUN}" in failed.stdout
    wait_for_progress(lab)
    assert state(lab)[0] == files
    assert sorted(units(lab)) == sorted(before)
    assert status(lab)["step"] >= step - 1000  # from its checkpoint, not from the beginning
