"""What docs/from-other-setups.md gives people instead of what they had works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from pages import write_files
from processes import MINUTE, ROOT, Runs

from fleet.site.inventory import load_inventory
from trainer.tasks.local import local_cluster

pytestmark = pytest.mark.timeout(450)
TRAIN = """
import json
from trainer.testing import train
for name in ("houses:Houses", "clicks:Clicks"):
    result = train(name, steps=300, workers=2, ps=2)
    assert (result.directory / "export").is_dir()
    print("evaluated", json.dumps(result.evaluation))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("page")
    names = [str(path.relative_to(directory)) for path in write_files("from-other-setups.md", directory)]
    assert names == ["houses.py", "start.sh", "clicks.py", "inventory/mine/hosts.yml"]
    return directory


def test_programs_learn(page: Path, runs: Runs) -> None:
    script = page / "train.py"
    script.write_text(TRAIN)
    done = runs.script(str(script), PYTHONPATH=f"{ROOT}:{page}")
    assert done.wait(6 * MINUTE) == 0, done.output
    houses, clicks = (json.loads(found) for found in re.findall(r"^evaluated (.*)$", done.output, re.MULTILINE))
    assert houses["loss"] < 0.05
    assert clicks["accuracy"] > 0.9


def test_flags_start_a_cluster(page: Path, runs: Runs) -> None:
    cluster = local_cluster(2, 1)
    addresses = [*cluster["chief"], *cluster["ps"], *cluster["worker"]]
    hosts, *lines = (page / "start.sh").read_text().splitlines()
    for number, address in enumerate(addresses):
        hosts = hosts.replace(f"host{number}:2222", address)
    settings = page / "run.json"
    settings.write_text(
        json.dumps({"program": "houses:Houses", "run": "flags", "shared_dir": str(runs.shared), "steps": 300})
    )
    value = hosts.removeprefix('HOSTS="').removesuffix('"')
    commands = [shlex.split(line.replace("$HOSTS", value).replace("run.json", str(settings))) for line in lines]
    assert [command[:3] for command in commands] == [["python", "-m", "trainer"]] * 4
    path = {"PYTHONPATH": f"{ROOT}:{page}"}
    # One supervisor, with its own import of TensorFlow, tells as much as four.
    tasks = [runs.task(*command[3:], **path) for command in commands[:-1]]
    tasks.append(runs.start(commands[-1][1:], **path))
    assert tasks[-1].wait(4 * MINUTE) == 0, tasks[-1].output
    assert [task.wait(MINUTE) for task in tasks[:-1]] == [0, 0, 0]
    status = runs.status("flags")
    assert (status["state"], status["step"]) == ("finished", 300)


def test_the_inventory_makes_the_cluster_that_stood_there(page: Path) -> None:
    mine = load_inventory(str(page / "inventory/mine"))
    assert [(task.name, task.address) for task in mine.tasks if task.job != "chief"] == [
        ("ps-0", "10.0.0.1"),
        ("worker-0", "10.0.0.2"),
        ("worker-1", "10.0.0.3"),
    ]
