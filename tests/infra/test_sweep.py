"""A sweep on the lab goes on past a point that fails, and without the control machine that began it."""

import json
import os
import subprocess
import time

import pytest
import yaml

from tests.hosts import ROOT, wait_until

from .conftest import copy_inventory, fab, status

pytestmark = pytest.mark.slow  # tests/training/test_sweep.py says it of local processes
NAME = f"infra-sweep-{int(time.time())}"
POINTS = [{"learning_rate": 0.001}, {"dropout": 1.5}, {"learning_rate": 0.003, "dropout": 0.3}]
# The second point is to fail in its turn: the proof would refuse it before anything starts.
SITE = {"release_build_proof": False}


@pytest.fixture(scope="module")
def swept(lab, tmp_path_factory):
    """The sweep's end, as `fab sweep --status` tells it; its control process was killed at the first point."""
    directory = tmp_path_factory.mktemp("sweep")
    settings = {"program": "trainer.examples.digits:Digits", "steps": 600, "checkpoint_steps": 200}
    inventory = copy_inventory(directory / "lab", settings, **SITE)
    file = directory / "rates.yml"
    file.write_text(yaml.safe_dump({"name": NAME, "points": POINTS}))
    with (directory / "said").open("wb") as output:
        control = subprocess.Popen(
            ["fab", "sweep", str(file)],
            cwd=ROOT,
            env=os.environ | {"PSFLEET_INVENTORY": str(inventory)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: trains(lab, control, directory / "said"), 600, "the first point trains")
        finally:
            control.kill()  # of the whole control machine nothing else is needed
            control.wait()
    wait_until(lambda: sweep_status(inventory).get("evaluated"), 900, "the end of the sweep")
    yield inventory
    fab("stop-cluster", inventory=inventory)
    with lab["head"].sudo():
        runs = " ".join(f"/srv/trainer/runs/{NAME}-{number}" for number in range(1, 4))
        lab["head"].run_expect([0], f"rm -rf {runs} /srv/trainer/sweeps/{NAME}.json /srv/trainer/selection.json")


def trains(lab, control, output):
    assert control.poll() is None, output.read_text()
    now = status(lab)
    return now.get("run") == f"{NAME}-1" and now["state"] == "training" and (now["step"] or 0) > 0


def sweep_status(inventory):
    asked = fab("sweep", "--status", "--json", inventory=inventory)
    return json.loads(asked.stdout)["sweep"] if asked.returncode == 0 else {}


def test_each_point_has_its_end(swept):
    points = sweep_status(swept)["points"]
    assert [(point["run"], point["state"]) for point in points] == [
        (f"{NAME}-1", "finished"),
        (f"{NAME}-2", "failed"),
        (f"{NAME}-3", "finished"),
    ]
    assert [point["program_args"] for point in points] == POINTS
    assert "Invalid value 1.5 received for `rate`" in points[1]["message"]
    for point in (points[0], points[2]):
        assert (point["step"], point["evaluated_step"]) == (600, 600)
        assert point["evaluation"]["accuracy"] > 0.8


def test_the_table_shows_them(swept):
    lines = fab("sweep", "--status", inventory=swept).stdout.splitlines()
    assert lines[0] == f"sweep {NAME}: over, 1 failed"
    for line, parameters in zip(lines[2:5], ("learning_rate=0.001", "dropout=1.5", "dropout=0.3"), strict=True):
        assert parameters in line
    assert f"{NAME}-2 failed: " in lines[5]


def test_the_tasks_have_ended(lab, swept):
    for name, host in lab.items():
        with host.sudo():
            wait_until(lambda host=host: not tasks(host), 60, f"the tasks of {name} end")


def tasks(host):
    return host.check_output("systemctl list-units --no-legend --plain --state=running 'trainer@*'")
