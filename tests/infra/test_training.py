"""One complete training on the lab: two workers, two parameter servers, an evaluator, a SavedModel."""

import json
import time

import pytest

from .conftest import fab, status

RUN = f"infra-{int(time.time())}"


@pytest.fixture(scope="module")
def trained(lab):
    """The lab's own inventory trained to its end, right after other settings were on the same hosts."""
    done = fab("start-cluster", "--run", RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    yield done.stdout
    fab("stop-cluster")
    with lab["head"].sudo():  # else the next start would go on with this run
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{RUN} /srv/trainer/selection.json")


def test_the_summary_says_what_how_well_and_where(trained):
    for part in (f"run {RUN} finished", "3000 steps", "accuracy 0.9", f"runs/{RUN}/checkpoints", ":6006", "fab logs"):
        assert part in trained


def test_accuracy_and_state(lab, trained):
    now = status(lab)
    assert (now["state"], now["step"]) == ("finished", 3000)
    assert now["evaluation"]["step"] == 3000
    assert now["evaluation"]["metrics"]["accuracy"] >= 0.95


def test_both_parameter_servers_wrote_their_shard(lab, trained):
    with lab["head"].sudo("trainer"):  # nobody else may look into a run
        files = lab["head"].check_output(f"ls /srv/trainer/runs/{RUN}/checkpoints").split()
    assert "ckpt-3000.index" in files
    assert len([file for file in files if file.startswith("ckpt-3000.data-")]) >= 2


def test_the_saved_model_predicts(lab, trained):
    code = (
        "import tensorflow as tf, numpy as np;"
        f"m = tf.saved_model.load('/srv/trainer/runs/{RUN}/export');"
        "f = m.signatures['serving_default'];"
        "d = np.load('/opt/trainer/current/trainer/examples/digits.npz');"
        "name = list(f.structured_input_signature[1])[0];"
        "x = tf.constant(d['images'], f.structured_input_signature[1][name].dtype);"
        "p = list(f(**{name: x}).values())[0].numpy();"
        "print('accuracy', float((p.argmax(-1) == d['labels']).mean()))"
    )
    with lab["head"].sudo("trainer"):
        printed = lab["head"].check_output(
            f"cd /tmp && TF_USE_LEGACY_KERAS=1 /opt/trainer/current/env/bin/python -c {json.dumps(code)}"
        )
    assert float(printed.split("accuracy ")[-1]) >= 0.95


@pytest.mark.slow  # tests/unit/test_fleet_start.py says it without a lab
def test_a_finished_run_started_again_says_so(lab, trained):
    again = fab("start-cluster", "--run", RUN)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "finished" in again.stdout
    assert "--run" in again.stdout


@pytest.fixture
def branch(lab):
    yield (name := f"{RUN}-on")
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{name}")


@pytest.mark.slow
def test_a_run_begins_from_a_checkpoint_of_another(lab, trained, branch):
    with lab["head"].sudo("trainer"):
        files = lab["head"].check_output(f"ls /srv/trainer/runs/{RUN}/checkpoints").split()
    step = min(int(file.split("-")[1].split(".")[0]) for file in files if file.endswith(".index"))
    assert step < 3000, files
    done = fab("start-cluster", "--run", branch, "--from", f"{RUN}@{step}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run {branch} finished" in done.stdout
    now = status(lab)
    assert (now["run"], now["state"], now["step"]) == (branch, "finished", 3000)
    with lab["head"].sudo():
        events = lab["head"].check_output(f"cat /srv/trainer/runs/{branch}/events.jsonl").splitlines()
    restored = [event for event in map(json.loads, events) if event["event"] == "restored"]
    assert [event["message"] for event in restored] == [f"step {step}"]
    again = fab("start-cluster", "--run", branch, "--from", f"{RUN}@{step}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "It was finished before" in again.stdout
    other = fab("start-cluster", "--run", branch, "--from", f"{RUN}@3000")
    assert other.returncode == 2, other.stdout + other.stderr
    assert branch in other.stderr
